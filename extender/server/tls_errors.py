"""Classify failed TLS handshakes by a small set of reasons, with a hint for each."""

import ssl
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final


class TlsFailure(StrEnum):
    """Reason why a TLS handshake failed, as a metric label."""

    NO_CERTIFICATE = "no-certificate"
    EXPIRED = "expired-certificate"
    """The certificate is expired or not valid yet."""
    UNKNOWN_CA = "unknown-ca"
    """The client's certificate is self-signed, or its CA is not trusted here."""
    BAD_CERTIFICATE = "bad-certificate"
    """The certificate is invalid in another way, such as a wrong key usage."""
    OURS_REFUSED = "our-certificate-refused"
    """The client rejects the server's certificate."""
    PLAIN = "plain-http"
    PROTOCOL = "no-common-protocol"
    """No TLS version or cipher in common, or no TLS at all."""
    TIMEOUT = "timeout"
    LEFT = "left"
    """The client closed the connection, as port probes and load balancers do."""
    OTHER = "other"


UNLOGGED: Final = frozenset({TlsFailure.LEFT})
"""Reasons that also occur in normal operation, and are not logged."""


CLIENT_FAILURES: Final = frozenset(
    {
        TlsFailure.NO_CERTIFICATE,
        TlsFailure.EXPIRED,
        TlsFailure.UNKNOWN_CA,
        TlsFailure.BAD_CERTIFICATE,
    }
)
HINTS: Final[Mapping[TlsFailure, str]] = {
    TlsFailure.OURS_REFUSED: "the client must trust the CA of this port's certificate, and "
    "connect to a name in it",
    TlsFailure.PLAIN: "this port accepts only TLS: configure the client with https",
}

_TIMES: Final = frozenset({9, 10})
"""X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED."""
_ISSUERS: Final = frozenset({2, 18, 19, 20, 21, 22, 24, 27, 30})
"""X509_V_ERR_* about the issuer: not found, not trusted, not a CA, self-signed, or with a key that
does not match."""

_REASONS: Final[Mapping[TlsFailure, Iterable[str]]] = {
    TlsFailure.NO_CERTIFICATE: ("PEER_DID_NOT_RETURN_A_CERTIFICATE",),
    TlsFailure.PLAIN: ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST"),
    TlsFailure.PROTOCOL: (
        "WRONG_VERSION_NUMBER",
        "UNSUPPORTED_PROTOCOL",
        "NO_SHARED_CIPHER",
        "NO_SUITABLE_SIGNATURE_ALGORITHM",
        "NO_SUITABLE_KEY_SHARE",
        "VERSION_TOO_LOW",
        "TLSV1_ALERT_PROTOCOL_VERSION",
        "BAD_PROTOCOL_VERSION_NUMBER",
        "UNKNOWN_PROTOCOL",
        "UNEXPECTED_MESSAGE",
        "BAD_RECORD_TYPE",
        "PACKET_LENGTH_TOO_LONG",
        "RECORD_LAYER_FAILURE",
    ),
    TlsFailure.OURS_REFUSED: (
        "TLSV1_ALERT_UNKNOWN_CA",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
        "TLSV1_ALERT_ACCESS_DENIED",
        "TLSV1_ALERT_DECRYPT_ERROR",
    ),
    TlsFailure.LEFT: ("UNEXPECTED_EOF_WHILE_READING",),
}
_FAILURES: Final = {reason: failure for failure, some in _REASONS.items() for reason in some}


def failure_of(error: OSError) -> TlsFailure:
    """Return the reason why a TLS handshake failed, from the error that it raised."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _TIMES:
            return TlsFailure.EXPIRED
        return (
            TlsFailure.UNKNOWN_CA if error.verify_code in _ISSUERS else TlsFailure.BAD_CERTIFICATE
        )
    if isinstance(error, ssl.SSLEOFError):
        return TlsFailure.LEFT
    if isinstance(error, ssl.SSLError):
        return _FAILURES.get(error.reason or "", TlsFailure.OTHER)
    # asyncio raises these when a handshake takes too long.
    if isinstance(error, ConnectionAbortedError | TimeoutError):
        return TlsFailure.TIMEOUT
    return TlsFailure.LEFT if isinstance(error, ConnectionError) else TlsFailure.OTHER
