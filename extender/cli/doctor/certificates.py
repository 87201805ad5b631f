"""Parse certificates into their subject and expiry time."""

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Final

from cryptography import x509

from extender.cli.doctor.facts import Certificate
from extender.core.untyped import text_of

PEM: Final = "-----BEGIN CERTIFICATE-----"


def read_certificates(source: str, text: str) -> Iterator[Certificate]:
    """Parse the certificates in a PEM text; a text without certificates yields none.

    Raises:
        ValueError: a certificate is malformed.
    """
    if PEM not in text:
        return
    for certificate in x509.load_pem_x509_certificates(text.encode()):
        yield Certificate(
            source=source,
            subject=certificate.subject.rfc4514_string(),
            ends_at=certificate.not_valid_after_utc.timestamp(),
        )


def read_secret(source: str, data: Mapping[str, object]) -> Iterator[Certificate]:
    """Parse the certificates in a Secret's data; private keys are not read."""
    for name, value in data.items():
        if not name.endswith(".crt"):
            continue
        try:
            text = base64.b64decode(text_of(value), validate=True).decode()
            yield from read_certificates(f"{source} {name}", text)
        except (binascii.Error, ValueError):
            continue  # the component that uses the certificate reports the error
