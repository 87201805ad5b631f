"""Open the HTTP ports: the webhooks' port, and the status and admission ports if set.

At the webhooks' port each client must show a certificate. At the status port only the server shows
one, and clients send a token. The admission webhook has its own port, because the API server shows
no client certificate: that port answers every client, and offers nothing to read or change.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from typing_extensions import override  # in typing from Python 3.12 on

from extender.runtime.logs import ThrottledLogger
from extender.server.listener import RESERVED_DESCRIPTORS, Factory, Listener, spare_for
from extender.server.request_tracker import RequestTracker
from extender.server.tls import Certificates, ServerContext, follow_certificate
from extender.settings.config import MAX_CONNECTIONS, Settings

logger = logging.getLogger(__name__)

_KEEPALIVE_SECONDS: Final = 120.0
"""Time after which an idle connection is closed: kube-scheduler closes its own after 90 s, and
loses a call if the server closes first."""
_FINISH_SECONDS: Final = 2.0
"""Time to finish sending answers at shutdown, after all accepted requests have been handled."""

_HEAD_SECONDS: Final = 10.0
"""Time from the first byte of a request until its head is complete."""

_BODY_SECONDS: Final = 30.0
"""Time for a request body to arrive. kube-scheduler waits one second for its answer."""

_LINGERING_SECONDS: Final = 2.0
"""Time to read the rest of a body after the answer, so that a refused client gets its answer."""

_CLIENTS_HINT: Final = (
    "kube-scheduler must present a valid certificate of a CA in tls.client_ca_file: set "
    "tlsConfig.certFile and keyFile of its extender; another replica presents its tls.cert_file"
)


class ServerPorts:
    """The listening ports and the aiohttp applications behind them.

    Args:
        settings: addresses, certificates and limits of the ports.
        webhooks: application of the webhooks' port; serves everything if `status` is None.
        status: application of health, metrics and API on a port of its own.
        admission: application of the admission webhook, or None if it is not configured.
        request_tracker: is notified of bytes and ends of connections to the webhooks' port.

    Raises:
        TlsError: the certificates cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        webhooks: web.Application,
        status: web.Application | None,
        admission: web.Application | None = None,
        *,
        request_tracker: RequestTracker | None = None,
    ) -> None:
        heads = _Heads()
        self._runner = _runner(webhooks, heads)
        self._status = _runner(status, heads) if status is not None else None
        self._admission = _runner(admission, heads) if admission is not None else None
        self._certificates = Certificates(settings.tls) if settings.tls.is_used else None
        if self._certificates is not None:
            self._certificates.end_dropped_connections(webhooks, _KEEPALIVE_SECONDS)
        self._admission_certificate = (
            follow_certificate(*settings.admission.files(settings.tls))
            if admission is not None
            else None
        )
        status_files = settings.api.files(settings.tls) if status is not None else None
        self._status_certificate = follow_certificate(*status_files) if status_files else None
        self._webhooks_port = Listener(
            "webhooks",
            settings.listen_address,
            _factory(self._runner, heads, request_tracker),
            most=lambda: settings.max_connections,
            tls=self._certificates.server if self._certificates is not None else None,
            spare=min(RESERVED_DESCRIPTORS, spare_for(0)),
            hint=_CLIENTS_HINT,
        )
        # Clients of the other ports must leave enough file descriptors for kube-scheduler.
        spare = spare_for(settings.max_connections)
        self._admission_port = (
            Listener(
                "admission",
                settings.admission.address,
                _factory(self._admission, heads),
                most=lambda: MAX_CONNECTIONS,
                tls=self._admission_certificate.context,
                spare=spare,
            )
            if self._admission is not None and self._admission_certificate is not None
            else None
        )
        self._status_port = (
            Listener(
                "status",
                settings.status_address,
                _factory(self._status, heads),
                most=lambda: MAX_CONNECTIONS,
                tls=self._status_certificate.context if self._status_certificate else None,
                spare=spare,
            )
            if self._status is not None
            else None
        )

    @property
    def ports(self) -> tuple[Listener, ...]:
        """All listening ports, the webhooks' first."""
        ports = (self._webhooks_port, self._status_port, self._admission_port)
        return tuple(port for port in ports if port is not None)

    @property
    def _webhook_ports(self) -> tuple[Listener, ...]:
        ports = (self._webhooks_port, self._admission_port)
        return tuple(port for port in ports if port is not None)

    @property
    def client_context(self) -> ssl.SSLContext | None:
        """TLS context for requests to other replicas, or None without TLS."""
        return self._certificates.client if self._certificates is not None else None

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs of all ports, the webhooks' port first."""
        return tuple(_url(port, address) for port in self.ports for address in port.addresses)

    def callers(self) -> tuple[object, ...]:
        """Return open connections and unfinished handshakes of webhooks and admission."""
        handlers = [
            handler
            for runner in (self._runner, self._admission)
            if runner is not None and runner.server is not None
            for handler in runner.server.connections
            if handler.connected
        ]
        return (*handlers, *(one for port in self._webhook_ports for one in port.handshaking))

    async def open(self) -> None:
        """Bind every port and accept connections.

        Raises:
            OSError: an address cannot be bound.
        """
        for runner in (self._runner, self._admission, self._status):
            if runner is not None:
                await runner.setup()
                _refuse_expectations(runner)
        for port in self.ports:
            await port.open()

    async def run(self) -> None:
        """Reload changed certificates until cancelled; return at once if no port uses TLS."""
        certificates: list[Certificates | ServerContext | None] = [
            self._certificates,
            self._admission_certificate,
            self._status_certificate,
        ]
        async with asyncio.TaskGroup() as group:
            for each in certificates:
                if each is not None:
                    group.create_task(each.run(), name="certificates")

    async def close_webhooks(self) -> None:
        """Accept no new connections for webhooks and admission; keep the open ones."""
        for port in self._webhook_ports:
            port.close()

    async def close(self) -> None:
        """Close every port and connection."""
        for port in self.ports:
            await port.end()
        for runner in (self._runner, self._admission, self._status):
            if runner is not None:
                await runner.cleanup()


@web.middleware
async def _guard_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse compressed bodies, and close connections whose body takes longer than `_BODY_SECONDS`.

    No client needs compression, and a small body can unpack to gigabytes.
    """
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() == "identity":
        if request.content.is_eof():
            return await handler(request)
        timer = asyncio.get_running_loop().call_later(_BODY_SECONDS, _end_late_body, request)
        try:
            return await handler(request)
        except (ConnectionError, web.RequestPayloadError):
            if request.transport is not None:
                raise
            return web.Response(status=400)  # no one reads it: the client left before its body
        finally:
            timer.cancel()
    response = web.Response(
        status=415,
        text="compressed bodies are not accepted: send the body uncompressed\n",
        headers={hdrs.ACCEPT_ENCODING: "identity"},
    )
    response.force_close()  # the rest of the body is not awaited
    return response


def _refuse_expectations(runner: web.AppRunner) -> None:
    """Answer requests that carry an Expect header with 417.

    aiohttp would send "100 Continue" before the request is authorized. Clients that use the header
    for large bodies, such as curl, repeat the request without it.
    """
    server = runner.server
    if server is None:
        return
    handle = server.request_handler

    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        if hdrs.EXPECT not in request.headers:
            return await handle(request)
        response = web.Response(status=417, text="send the body without an Expect header\n")
        response.force_close()
        return response

    server.request_handler = refuse


def _end_late_body(request: web.Request) -> None:
    if not request.content.is_eof() and request.transport is not None:
        request.transport.abort()


class _Heads:
    """Closes connections on which the head of a request takes longer than `_HEAD_SECONDS`.

    aiohttp closes only idle connections. It counts a connection as idle until the head is complete,
    and the limit for idle connections is as long as kube-scheduler keeps its own open.
    """

    def __init__(self) -> None:
        self._handled: dict[asyncio.BaseProtocol, web.Request] = {}
        self._timers: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Stop the timer of a connection: the head of a request is complete."""
        connection = request.protocol
        self.forget(connection)
        self._handled[connection] = request
        try:
            return await handler(request)
        finally:
            # Bytes of a body that arrive after the answer do not start a new request.
            rest_seconds = 0.0 if request.content.is_eof() else _LINGERING_SECONDS
            asyncio.get_running_loop().call_later(rest_seconds, self._end, connection, request)

    def _end(self, connection: asyncio.BaseProtocol, request: web.Request) -> None:
        if self._handled.get(connection) is request:
            del self._handled[connection]

    def note_bytes(self, connection: asyncio.BaseProtocol, transport: asyncio.Transport) -> None:
        """Start the timer when bytes arrive on a connection that handles no request."""
        if connection not in self._handled and connection not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[connection] = loop.call_later(_HEAD_SECONDS, transport.abort)

    def forget(self, connection: asyncio.BaseProtocol) -> None:
        """Cancel the timer of a connection."""
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()


class _Timed(asyncio.Protocol):
    """Forwards all events of a connection, and first reports arriving bytes and its end.

    Args:
        heads: times the heads of requests.
        request_tracker: is notified too, if given.
        on_bytes: called whenever bytes arrive.
    """

    def __init__(
        self,
        connection: web.RequestHandler,
        heads: _Heads,
        request_tracker: RequestTracker | None,
        on_bytes: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._heads = heads
        self._request_tracker = request_tracker
        self._on_bytes = on_bytes
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment] # uvloop's class is not a subclass
        self._connection.connection_made(transport)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._heads.forget(self._connection)
        self._transport = None
        if self._request_tracker is not None:
            self._request_tracker.note_end(self._connection)
        self._connection.connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        self._on_bytes()
        if self._transport is not None:
            self._heads.note_bytes(self._connection, self._transport)
        if self._request_tracker is not None:
            self._request_tracker.note_bytes(self._connection)
        self._connection.data_received(data)

    @override
    def eof_received(self) -> bool | None:
        self._connection.eof_received()
        return None

    @override
    def pause_writing(self) -> None:
        self._connection.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._connection.resume_writing()


def _runner(app: web.Application, heads: _Heads) -> web.AppRunner:
    app.middlewares[:0] = [heads.note, _guard_body]
    return web.AppRunner(
        app,
        access_log=None,
        logger=ThrottledLogger(logger),
        keepalive_timeout=_KEEPALIVE_SECONDS,
        shutdown_timeout=_FINISH_SECONDS,
        handler_cancellation=False,
        auto_decompress=False,
        lingering_time=_LINGERING_SECONDS,
    )


def _factory(
    runner: web.AppRunner, heads: _Heads, request_tracker: RequestTracker | None = None
) -> Factory:
    """Return a function that creates the protocol of each connection, once the runner is set up."""

    def make(on_bytes: Callable[[], None]) -> asyncio.BaseProtocol:
        if runner.server is None:
            raise ConnectionAbortedError("the server is shutting down")
        return _Timed(runner.server(), heads, request_tracker, on_bytes)

    return make


def _url(port: Listener, address: tuple[str, int]) -> str:
    scheme = "https" if port.is_tls else "http"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{scheme}://{host}:{address[1]}"
