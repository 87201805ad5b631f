"""Reads of certificates whom they name and when they end."""

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Final

from cryptography import x509

from extender.core.untyped import text_of
from extender.doctor.facts import Certificate

PEM: Final = "-----BEGIN CERTIFICATE-----"


def read_certificates(source: str, text: str) -> Iterator[Certificate]:
    """Yield the certificates of a PEM text; what is none is left out.

    Raises:
        ValueError: one of them cannot be read.
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
    """Yield the certificates of a Secret's data; keys are not looked at."""
    for name, value in data.items():
        if not name.endswith(".crt"):
            continue
        try:
            text = base64.b64decode(text_of(value), validate=True).decode()
            yield from read_certificates(f"{source} {name}", text)
        except (binascii.Error, ValueError):
            continue  # whoever uses it complains louder
