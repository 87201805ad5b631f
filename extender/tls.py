"""TLS of the ports that others come to: contexts from files that may change, and who asks.

Of webhooks it is the client's certificate that says who asks: kube-scheduler's extenders know no
token.
"""

import asyncio
import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import WeakSet

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from extender.settings.tls import Tls

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 2.0
"""Files are looked at this often: two replaced together may be seen apart once, and are taken over
the next time."""

PEERS_PATH: Final = "/v1/peers/"
MAX_COMPLAINTS: Final = 100
"""Strangers that the log names; whoever comes after them is only refused."""


class TlsError(ValueError):
    """The files cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """What the files make.

    Attributes:
        server: for those who ask us.
        client: for asking other replicas.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext


class ServerContext:
    """A server's context that follows its files: whoever connects gets what is in them now.

    Args:
        paths: the files.
        make: makes a context of what they hold; raises TlsError.

    Attributes:
        context: hands whoever connects to the context of the newest files, so the socket stays
            open; connections that are there go on with what they were made with.
        narrowed_at: when a CA was last dropped, of `time.monotonic`.

    Raises:
        TlsError: they cannot be used.
    """

    def __init__(self, paths: tuple[Path, ...], make: Callable[[], ssl.SSLContext]) -> None:
        self._paths = paths
        self._make = make
        self._seen = self._fingerprint()
        self._problem = ""
        self.context = self._newest = make()
        self.narrowed_at = 0.0
        self._in_force = WeakSet([self._newest])
        self.context.sni_callback = self._hand_over

    def _hand_over(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        """Let a connection go on with the newest files; called for those without SNI, too."""
        connection.context = self._newest

    async def run(self) -> None:
        """Have new certificates used until cancelled; bad ones change nothing."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.look()

    def look(self) -> bool:
        """Use what the files hold, if that is new and good; tell whether it was."""
        seen = self._fingerprint()
        if seen == self._seen:
            return False
        try:
            newest = self._make()
        except TlsError as error:  # a file of them may still be on its way
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("cannot use new certificates", extra={"cause": str(error)})
            return False
        self._seen, self._problem = seen, ""
        if not _authorities(self._newest) <= _authorities(newest):
            self._in_force.clear()
            self.narrowed_at = time.monotonic()
        self._in_force.add(newest)
        self._newest = newest
        logger.info("using new certificates", extra={"file": str(self._paths[0])})
        return True

    def is_in_force(self, context: ssl.SSLContext) -> bool:
        """Tell whether every CA that a context trusts has been trusted ever since."""
        return context in self._in_force

    def _fingerprint(self) -> tuple[str, ...]:
        """Return what the files hold, in short; a file that is not there holds nothing."""
        return tuple(_digest(path) for path in self._paths)


class Certificates:
    """The contexts of webhooks and of replicas, which follow their files.

    Args:
        settings: where they are; all three are set.

    Attributes:
        server: for those who ask us; goes on to new files by itself.
        client: for asking other replicas; another one as soon as the files are others, so it is
            to be taken anew for each question.

    Raises:
        TlsError: they cannot be used.
    """

    client: ssl.SSLContext

    def __init__(self, settings: Tls) -> None:
        if not (settings.cert_file and settings.key_file and settings.client_ca_file):
            raise TlsError("set tls.cert_file, tls.key_file and tls.client_ca_file")
        self._paths = (settings.cert_file, settings.key_file, settings.client_ca_file)
        self._followed = ServerContext(self._paths, self._make)
        self.server = self._followed.context

    def _make(self) -> ssl.SSLContext:
        # A context trusts for ever what it once trusted: without a dropped CA it must be another.
        contexts = make_contexts(*self._paths)
        self.client = contexts.client
        return contexts.server

    async def run(self) -> None:
        """Have new certificates used until cancelled; bad ones change nothing."""
        await self._followed.run()

    def look(self) -> None:
        """Use what the files hold, if that is new and good."""
        self._followed.look()

    def see_off_dropped(self, app: web.Application, grace_seconds: float) -> None:
        """Have connections end that a CA let in which has been dropped since.

        Nobody's is closed while they may ask on it: the next answer is the last one there. Whoever
        asks but later is refused.

        Args:
            app: what is asked over these connections; not set up yet.
            grace_seconds: longer than anybody rightful keeps a connection and asks nothing.
        """

        @web.middleware
        async def refuse_late(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_late = time.monotonic() - self._followed.narrowed_at > grace_seconds
            if is_late and self._is_dropped(request):
                return web.Response(status=403, text="this certificate's CA was dropped\n")
            return await handler(request)

        async def end(request: web.Request, response: web.StreamResponse) -> None:
            if self._is_dropped(request):  # it may have been while the answer was made
                response.headers[hdrs.CONNECTION] = "close"
                response.force_close()

        app.middlewares.append(refuse_late)
        app.on_response_prepare.append(end)

    def _is_dropped(self, request: web.Request) -> bool:
        connection: ssl.SSLObject | None = request.get_extra_info("ssl_object")
        return connection is not None and not self._followed.is_in_force(connection.context)


def follow_certificate(cert_file: Path, key_file: Path) -> ServerContext:
    """Return the context of a server that knows by other means who comes, as by a token.

    Raises:
        TlsError: the files cannot be used.
    """

    def make() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.num_tickets = 0  # who comes stays: a session that could be resumed is not
        try:
            context.load_cert_chain(cert_file, key_file)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise TlsError(
                f"cannot use {cert_file} and {key_file} for TLS: {error}: must be a certificate "
                "and its key without a password, both in PEM"
            ) from error
        return context

    return ServerContext((cert_file, key_file), make)


def make_contexts(cert_file: Path, key_file: Path, client_ca_file: Path) -> Contexts:
    """Read the files.

    Raises:
        TlsError: they cannot be used.
    """
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server.verify_mode = ssl.CERT_REQUIRED
        server.set_alpn_protocols(["http/1.1"])
        # A session that is resumed is not asked for its certificate again: it would outlive its CA.
        server.num_tickets = 0
        server.options |= ssl.OP_NO_TICKET
        # Replicas are asked by their addresses, which no certificate names. That the other side is
        # one says its certificate: of our CA none but the extender's may serve.
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
    return Contexts(server=server, client=client)


def only_known(settings: Tls) -> Middleware:
    """Return what lets only those ask us whose certificate has a name that is expected."""
    clients, peers = frozenset(settings.clients), frozenset(settings.peers)
    complained: set[frozenset[str]] = set()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        names = names_of(request.get_extra_info("peercert"))
        allowed = peers if request.path.startswith(PEERS_PATH) else clients
        if names & allowed:
            return await handler(request)
        if names not in complained and len(complained) < MAX_COMPLAINTS:
            complained.add(names)
            logger.warning(
                "refused a client whose certificate names nobody who may ask",
                extra={"names": sorted(names), "allowed": sorted(allowed), "path": request.path},
            )
        return web.Response(status=403, text="this certificate's name is not allowed here\n")

    return check


def only_secret(secret: str) -> Middleware:
    """Return a middleware that refuses replicas without the secret; "" refuses all of them."""
    expected = f"Bearer {secret}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith(PEERS_PATH):
            given = request.headers.get("Authorization", "").encode(errors="replace")
            if not secret or not hmac.compare_digest(given, expected):
                text = "replicas without TLS must know peers.secret_file\n"
                return web.Response(status=403, text=text)
        return await handler(request)

    return check


def names_of(certificate: object) -> frozenset[str]:
    """Return the names that a certificate has, as `ssl` tells of it; none where there is none.

    Example:
        >>> sorted(names_of({"subject": ((("commonName", "a"),),),
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
    """Return the CAs that a context trusts."""
    return frozenset(context.get_ca_certs(binary_form=True))


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
