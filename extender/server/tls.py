"""TLS of the ports: contexts from files that may change, the clients of the webhooks, failures.

kube-scheduler's extenders cannot send a token, so the client's certificate identifies them.
"""

import asyncio
import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final
from weakref import WeakSet

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from extender.settings.api import Tls

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 2.0
"""Time between checks of the files. If a check sees only one of two replaced files, the next check
sees both."""

_PEERS_PATH: Final = "/v1/peers/"
_MAX_LOGGED: Final = 100
"""Maximum number of different refused clients that are logged; further ones are refused without a
log line."""


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


CLIENT_FAILURES: Final = frozenset(
    {
        TlsFailure.NO_CERTIFICATE,
        TlsFailure.EXPIRED,
        TlsFailure.UNKNOWN_CA,
        TlsFailure.BAD_CERTIFICATE,
    }
)

FAILURE_HINTS: Final[Mapping[TlsFailure, str]] = {
    TlsFailure.OURS_REFUSED: "the client must trust the CA of this port's certificate, and "
    "connect to a name in it",
    TlsFailure.PLAIN: "this port accepts only TLS: configure the client with https",
}


class TlsError(ValueError):
    """The certificate files cannot be used; the message gives the cause and a hint."""


class ServerContext:
    """A server's TLS context that reloads its files: new connections use their current content.

    Args:
        paths: the files.
        make: creates a context from the files; raises TlsError.

    Attributes:
        context: context for the listening socket, which stays open when the files change: new
            connections switch to the newest context, and existing ones keep theirs.
        ca_removed_at: time at which a CA was last removed, on the clock `time.monotonic`.

    Raises:
        TlsError: the files cannot be used.
    """

    def __init__(self, paths: tuple[Path, ...], make: Callable[[], ssl.SSLContext]) -> None:
        self._paths = paths
        self._make = make
        self._seen = self._fingerprint()
        self._problem = ""
        self.context = self._newest = make()
        self.ca_removed_at = 0.0
        self._in_force = WeakSet([self._newest])
        self.context.sni_callback = self._use_newest

    def _use_newest(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        """Switch a new connection to the newest context; OpenSSL calls this also without SNI."""
        connection.context = self._newest

    async def run(self) -> None:
        """Reload changed files until cancelled; invalid files change nothing."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            self.reload()

    def reload(self) -> None:
        """Reload the files if they have changed and are valid."""
        seen = self._fingerprint()
        if seen == self._seen:
            return
        try:
            newest = self._make()
        except TlsError as error:  # possibly only some of the files are replaced yet
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("cannot use new certificates", extra={"cause": str(error)})
            return
        self._seen, self._problem = seen, ""
        if not _authorities(self._newest) <= _authorities(newest):
            self._in_force.clear()
            self.ca_removed_at = time.monotonic()
        self._in_force.add(newest)
        self._newest = newest
        logger.info("using new certificates", extra={"file": str(self._paths[0])})

    def is_in_force(self, context: ssl.SSLContext) -> bool:
        """Return whether no CA of a context has been removed from the trusted CAs since."""
        return context in self._in_force

    def _fingerprint(self) -> tuple[str, ...]:
        """Return a digest of each file, "" for a missing one."""
        return tuple(_digest(path) for path in self._paths)


class Certificates:
    """The TLS contexts of the webhooks' port and of requests to other replicas.

    Args:
        settings: paths of the files; all three are set.

    Attributes:
        server: context for incoming connections; follows changed files by itself.
        client: context for requests to other replicas. Changed files replace it, so read this
            attribute for each request.

    Raises:
        TlsError: the files cannot be used.
    """

    client: ssl.SSLContext

    def __init__(self, settings: Tls) -> None:
        if not (settings.cert_file and settings.key_file and settings.client_ca_file):
            raise TlsError("set tls.cert_file, tls.key_file and tls.client_ca_file")
        self._paths = (settings.cert_file, settings.key_file, settings.client_ca_file)
        self._server_context = ServerContext(self._paths, self._make)
        self.server = self._server_context.context

    def _make(self) -> ssl.SSLContext:
        # A context cannot drop a CA, so changed files need a new context.
        server, self.client = _make_contexts(*self._paths)
        return server

    async def run(self) -> None:
        """Reload changed files until cancelled; invalid files change nothing."""
        await self._server_context.run()

    def end_dropped_connections(self, app: web.Application, grace_seconds: float) -> None:
        """Close connections whose client certificate was issued by a CA that is no longer trusted.

        No connection is closed while its client may send a request; its next answer is the last.
        After the grace period requests on such connections are refused.

        Args:
            app: application of these connections, before its setup.
            grace_seconds: longer than the time for which clients keep an idle connection.
        """

        @web.middleware
        async def refuse_late(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_late = time.monotonic() - self._server_context.ca_removed_at > grace_seconds
            if is_late and self._is_dropped(request):
                return web.Response(status=403, text="this certificate's CA was dropped\n")
            return await handler(request)

        async def end(request: web.Request, response: web.StreamResponse) -> None:
            if self._is_dropped(request):  # the CA may be dropped while the answer is made
                response.headers[hdrs.CONNECTION] = "close"
                response.force_close()

        app.middlewares.append(refuse_late)
        app.on_response_prepare.append(end)

    def _is_dropped(self, request: web.Request) -> bool:
        connection: ssl.SSLObject | None = request.get_extra_info("ssl_object")
        return connection is not None and not self._server_context.is_in_force(connection.context)


def follow_certificate(cert_file: Path, key_file: Path) -> ServerContext:
    """Return the context of a server without client certificates, which reloads changed files.

    Raises:
        TlsError: the files cannot be used.
    """

    def make() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.num_tickets = 0  # clients keep connections open, and resume no sessions
        try:
            context.load_cert_chain(cert_file, key_file)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise TlsError(
                f"cannot use {cert_file} and {key_file} for TLS: {error}: must be a certificate "
                "and its key without a password, both in PEM"
            ) from error
        return context

    return ServerContext((cert_file, key_file), make)


def _make_contexts(
    cert_file: Path, key_file: Path, client_ca_file: Path
) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Create the contexts for incoming connections, and for requests to other replicas."""
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server.verify_mode = ssl.CERT_REQUIRED
        server.set_alpn_protocols(["http/1.1"])
        # A resumed session skips the check of the client's certificate: it would outlive its CA.
        server.num_tickets = 0
        server.options |= ssl.OP_NO_TICKET
        # Requests to replicas use IP addresses, which no certificate names. The certificate still
        # identifies a replica: our CA issues server certificates to the extender only.
        client.check_hostname = False
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(cert_file, key_file)
            context.load_verify_locations(cafile=client_ca_file)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise TlsError(
            f"cannot use {cert_file}, {key_file} and {client_ca_file} for TLS: {error}: must be a "
            "certificate, its key without a password, and CAs, all in PEM"
        ) from error
    return server, client


def only_known(settings: Tls) -> Middleware:
    """Return a middleware that refuses clients whose certificate has no allowed name."""
    clients, peers = frozenset(settings.clients), frozenset(settings.peers)
    logged: set[frozenset[str]] = set()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        names = _names_of(request.get_extra_info("peercert"))
        allowed = peers if request.path.startswith(_PEERS_PATH) else clients
        if names & allowed:
            return await handler(request)
        if names not in logged and len(logged) < _MAX_LOGGED:
            logged.add(names)
            logger.warning(
                "refused a client whose certificate has no allowed name",
                extra={"names": sorted(names), "allowed": sorted(allowed), "path": request.path},
            )
        return web.Response(status=403, text="this certificate's name is not allowed here\n")

    return check


def only_secret(secret: str) -> Middleware:
    """Return a middleware that refuses replicas without the secret; "" refuses every replica."""
    expected = f"Bearer {secret}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith(_PEERS_PATH):
            given = request.headers.get("Authorization", "").encode(errors="replace")
            if not secret or not hmac.compare_digest(given, expected):
                text = "replicas without TLS must know peers.secret_file\n"
                return web.Response(status=403, text=text)
        return await handler(request)

    return check


def _names_of(certificate: object) -> frozenset[str]:
    """Return common, DNS and URI names of a certificate in the form of `ssl.getpeercert`.

    Example:
        >>> sorted(_names_of({"subject": ((("commonName", "a"),),),
        ...                  "subjectAltName": (("DNS", "b"), ("IP Address", "10.0.0.1"))}))
        ['a', 'b']
    """
    if not isinstance(certificate, Mapping):
        return frozenset()
    common = (
        value
        for attributes in certificate.get("subject", ())
        for name, value in attributes
        if name == "commonName"
    )
    others = (
        value for kind, value in certificate.get("subjectAltName", ()) if kind in {"DNS", "URI"}
    )
    return frozenset((*common, *others))


def _authorities(context: ssl.SSLContext) -> frozenset[bytes]:
    return frozenset(context.get_ca_certs(binary_form=True))


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


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
