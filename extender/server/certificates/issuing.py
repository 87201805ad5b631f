"""Issue and renew X.509 certificates: PEM files in, PEM files out, no I/O."""

import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Files = Mapping[str, bytes]
"""PEM content by file name: `ca.crt`, `ca.key`, `next.crt`, `next.key`, `previous.crt`, and `.crt`
and `.key` of each side."""

EXTENDER: Final = "extender"
SCHEDULER: Final = "kube-scheduler"
EXTENDER_NAME: Final = "idlegpu-extender"
_SCHEDULER_NAME: Final = "idlegpu-kube-scheduler"

_CA_DAYS: Final = 3650
_BACKDATED: Final = timedelta(minutes=5)
"""Start of validity before the time of issue, because clocks differ between machines."""


class CertsError(ValueError):
    """Certificates cannot be created from the given files; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Names, addresses and lifetime of the certificates to issue.

    Attributes:
        names: DNS names of the extender.
        addresses: IP addresses of the extender.
        days: lifetime of a new certificate.
        renew_days: a certificate that expires sooner than this is renewed.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...] = ()
    days: int = 365
    renew_days: int = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """The certificate of one side: subject, key usages and alternative names."""

    side: str
    common_name: str
    usages: tuple[x509.ObjectIdentifier, ...]
    names: tuple[x509.GeneralName, ...]


def _leaves(wanted: Wanted) -> tuple[_Leaf, _Leaf]:
    addresses = (x509.IPAddress(ipaddress.ip_address(one)) for one in wanted.addresses)
    extender = _Leaf(
        side=EXTENDER,
        common_name=EXTENDER_NAME,
        # The extender is also a client: of its other replicas.
        usages=(ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
        names=(*map(x509.DNSName, wanted.names), *addresses),
    )
    scheduler = _Leaf(
        side=SCHEDULER,
        common_name=_SCHEDULER_NAME,
        usages=(ExtendedKeyUsageOID.CLIENT_AUTH,),
        names=(x509.DNSName(_SCHEDULER_NAME),),
    )
    return extender, scheduler


def renewed(files: Files, wanted: Wanted, now: datetime) -> dict[str, bytes]:
    """Return all files, with missing, expiring or outdated certificates issued again.

    A certificate is outdated if its names or its CA changed. It never outlives its CA: see
    `expiry_warning`.

    Raises:
        CertsError: a file is damaged, or a certificate has no key.
    """
    result = dict(files)
    if "ca.crt" not in result:
        result |= _authority("ca", now)
    for leaf in _leaves(wanted):
        if _is_due(result, leaf, wanted.renew_days, now):
            result |= _issue(result, leaf, wanted.days, now)
    return result


def expiry_warning(files: Files, wanted: Wanted, now: datetime) -> str:
    """Return a warning if the CA expires before a certificate that it would issue now, else "".

    Raises:
        CertsError: the CA certificate is damaged.
    """
    ends_at = expires_at(files["ca.crt"])
    if ends_at >= now + timedelta(days=wanted.days):
        return ""
    verb = "expired" if ends_at <= now else "expires"
    step = "--switch-ca" if "next.crt" in files else "--next-ca"
    return (
        f"the CA {verb} on {ends_at:%Y-%m-%d}, before a new certificate of {wanted.days} days "
        f"would: continue with {step} (the steps: --next-ca, restart every kube-scheduler with the "
        "new ca.crt, --switch-ca, --drop-ca)"
    )


def with_next(files: Files, now: datetime) -> dict[str, bytes]:
    """Add a second CA to the files; both sides trust it, and it issues no certificates yet."""
    if "next.crt" in files:
        return dict(files)
    return {**files, **_authority("next", now)}


def switched(files: Files) -> dict[str, bytes]:
    """Make the second CA of the files the issuing CA; both CAs stay trusted.

    Raises:
        CertsError: there is no second CA.
    """
    if "next.crt" not in files or "next.key" not in files:
        raise CertsError("there is no next CA: create one with --next-ca first")
    rest = {name: text for name, text in files.items() if not name.startswith("next.")}
    return {
        **rest,
        "ca.crt": files["next.crt"],
        "ca.key": files["next.key"],
        "previous.crt": files["ca.crt"],
    }


def without_previous(files: Files) -> dict[str, bytes]:
    """Remove the CA that issued certificates before the last switch from the files."""
    return {name: text for name, text in files.items() if name != "previous.crt"}


def trusted(files: Files) -> bytes:
    """Return the PEM bundle of all CAs that both sides trust."""
    bundle = (files[name] for name in ("ca.crt", "next.crt", "previous.crt") if name in files)
    return b"".join(bundle)


def expires_at(certificate: bytes) -> datetime:
    """Return the expiry time of a PEM certificate.

    Raises:
        CertsError: the bytes are not a certificate.
    """
    return _parse(certificate, "the certificate").not_valid_after_utc


def _authority(stem: str, now: datetime) -> dict[str, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    # A unique name, because TLS libraries find the issuer in a bundle by its name.
    name = f"idlegpu CA {now:%Y-%m-%d} {secrets.token_hex(4)}"
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        _builder(subject, subject, key.public_key(), now, now + timedelta(days=_CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return {f"{stem}.crt": _pem(certificate), f"{stem}.key": _key_pem(key)}


def _issue(files: Files, leaf: _Leaf, days: int, now: datetime) -> dict[str, bytes]:
    authority = _load(files, "ca")
    # An expired CA issues an expired certificate: no peer accepts it, but the CA can be replaced.
    ends_at = min(now + timedelta(days=days), authority.not_valid_after_utc)
    signer = serialization.load_pem_private_key(files["ca.key"], None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise CertsError("ca.key is not an elliptic-curve key: it was not created by this command")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, leaf.common_name)])
    certificate = (
        _builder(subject, authority.subject, key.public_key(), min(now, ends_at), ends_at)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(leaf.usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(leaf.names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    return {f"{leaf.side}.crt": _pem(certificate), f"{leaf.side}.key": _key_pem(key)}


def _is_due(files: Files, leaf: _Leaf, renew_days: int, now: datetime) -> bool:
    if f"{leaf.side}.crt" not in files or f"{leaf.side}.key" not in files:
        return True
    certificate = _parse(files[f"{leaf.side}.crt"], f"{leaf.side}.crt")
    stated = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    authority = _load(files, "ca")
    # Renewing a certificate that expires together with its CA would not extend it.
    good_until = min(now + timedelta(days=renew_days), authority.not_valid_after_utc)
    return (
        certificate.not_valid_after_utc < good_until
        or set(stated) != set(leaf.names)
        or certificate.issuer != authority.subject
    )


def _load(files: Files, stem: str) -> x509.Certificate:
    if f"{stem}.key" not in files:
        raise CertsError(f"{stem}.crt exists without {stem}.key: restore it, or remove both")
    return _parse(files[f"{stem}.crt"], f"{stem}.crt")


def _parse(text: bytes, what: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(text)
    except ValueError as error:
        raise CertsError(f"{what} is not a certificate: {error}") from error


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: CertificatePublicKeyTypes,
    begins_at: datetime,
    ends_at: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins_at.astimezone(UTC) - _BACKDATED)
        .not_valid_after(ends_at.astimezone(UTC))
    )


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
