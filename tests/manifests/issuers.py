"""Secrets as cert-manager or an organization's own CA would create them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from testkit.controlplane.objects import Object
from testkit.controlplane.shipped import find

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

DEFAULT_USAGES: Final = ("digital signature", "key encipherment")
"""cert-manager's usages for a Certificate without `usages`."""

_EXTENDED: Final = {
    "server auth": ExtendedKeyUsageOID.SERVER_AUTH,
    "client auth": ExtendedKeyUsageOID.CLIENT_AUTH,
}
_KEY_USAGES: Final = {
    "digital signature": "digital_signature",
    "key encipherment": "key_encipherment",
    "cert sign": "key_cert_sign",
}
_UNUSED: Final = (
    "content_commitment",
    "data_encipherment",
    "key_agreement",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)
_CURVES: Final = {256: ec.SECP256R1(), 384: ec.SECP384R1(), 521: ec.SECP521R1()}
_NAMES: Final = frozenset({"isCA", "commonName", "dnsNames", "usages", "duration", "privateKey"})
_ELSEWHERE: Final = frozenset({"secretName", "issuerRef", "renewBefore"})
"""Fields without an effect on the certificate's content."""


@dataclass(frozen=True, kw_only=True)
class Issued:
    """Certificate with its key, and the intermediate certificates below the root."""

    certificate: x509.Certificate
    key: Key
    chain: tuple[x509.Certificate, ...] = ()


def secrets_of_cert_manager(items: Iterable[Object]) -> dict[str, dict[str, bytes]]:
    """Return the Secrets that cert-manager would create from Issuers and Certificates, by name.

    Each holds `tls.crt`, `tls.key` and `ca.crt`, the issuer's certificate:
    https://cert-manager.io/docs/usage/certificate/#target-secret

    Raises:
        ValueError: an object has an unsupported field.
        LookupError: an Issuer is missing.
    """
    objects = list(items)
    made: dict[str, Issued] = {}
    secrets: dict[str, dict[str, bytes]] = {}
    waiting = [item for item in objects if item["kind"] == "Certificate"]
    # The CA first: cert-manager retries until the issuer's Secret exists.
    for certificate in sorted(waiting, key=lambda item: not item["spec"].get("isCA")):
        spec = certificate["spec"]
        issuer = find(objects, spec["issuerRef"]["kind"], spec["issuerRef"]["name"])
        if issuer["metadata"]["namespace"] != certificate["metadata"]["namespace"]:
            raise ValueError(f"{certificate['metadata']['name']}: its Issuer is elsewhere")
        signer = (
            None if "selfSigned" in issuer["spec"] else made[issuer["spec"]["ca"]["secretName"]]
        )
        issued = issue(spec, signer)
        authority = issued if signer is None else signer
        made[spec["secretName"]] = issued
        secrets[spec["secretName"]] = secret_data(issued, authority.certificate)
    return secrets


def issue(spec: Object, signer: Issued | None) -> Issued:
    """Issue the certificate of a Certificate's spec; self-signed without a signer.

    Raises:
        ValueError: the spec has an unsupported field.
    """
    unknown = spec.keys() - _NAMES - _ELSEWHERE
    if unknown:
        raise ValueError(f"{spec['commonName']}: not known to this test: {sorted(unknown)}")
    key = _key(spec.get("privateKey", {}))
    subject = _subject(spec["commonName"])
    now = datetime.now(UTC)
    usages = list(spec.get("usages", DEFAULT_USAGES)) + ["cert sign"] * bool(spec.get("isCA"))
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if signer is None else signer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(hours=int(spec["duration"].removesuffix("h"))))
        .add_extension(x509.BasicConstraints(bool(spec.get("isCA")), None), critical=True)
        .add_extension(_key_usage(usages), critical=True)
    )
    extended = [_EXTENDED[usage] for usage in usages if usage not in _KEY_USAGES]
    if extended:
        builder = builder.add_extension(x509.ExtendedKeyUsage(extended), critical=False)
    if names := [x509.DNSName(name) for name in spec.get("dnsNames", [])]:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if spec.get("isCA"):
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(identifier, critical=False)
    if signer is not None:
        public = signer.key.public_key()
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(public)
        builder = builder.add_extension(authority, critical=False)
    certificate = builder.sign(key if signer is None else signer.key, hashes.SHA256())
    chain: tuple[x509.Certificate, ...] = ()
    if signer is not None and signer.certificate.issuer != signer.certificate.subject:
        chain = (signer.certificate, *signer.chain)
    return Issued(certificate=certificate, key=key, chain=chain)


def secret_data(issued: Issued, authority: x509.Certificate) -> dict[str, bytes]:
    """Return the content of a certificate's Secret."""
    pem = serialization.Encoding.PEM
    chain = (issued.certificate, *issued.chain)
    return {
        "tls.crt": b"".join(one.public_bytes(pem) for one in chain),
        "tls.key": issued.key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        "ca.crt": authority.public_bytes(pem),
    }


def secrets_of_ones_own(namespace_secrets: Mapping[str, Object]) -> dict[str, dict[str, bytes]]:
    """Return Secrets of an organization's CA, which signs with an intermediate CA.

    Args:
        namespace_secrets: `commonName`, `dnsNames` and `usages` of each Secret's certificate.
    """
    common = {"duration": "720h", "privateKey": {"algorithm": "RSA", "size": 2048}}
    root = issue({**common, "isCA": True, "commonName": "example root"}, None)
    between = issue({**common, "isCA": True, "commonName": "example for idlegpu"}, root)
    return {
        name: secret_data(issue({**common, **what}, between), root.certificate)
        for name, what in namespace_secrets.items()
    }


def _key(wanted: Object) -> Key:
    size = wanted.get("size")
    if wanted.get("algorithm", "RSA") == "RSA":
        return rsa.generate_private_key(public_exponent=65537, key_size=size or 2048)
    return ec.generate_private_key(_CURVES[size or 256])


def _subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(usages: Iterable[str]) -> x509.KeyUsage:
    wanted = {_KEY_USAGES[usage] for usage in usages if usage in _KEY_USAGES}
    values = {name: name in wanted for name in (*_KEY_USAGES.values(), *_UNUSED)}
    return x509.KeyUsage(**values)
