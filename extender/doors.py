"""The ports that others come to: webhooks, over TLS where set, and the rest beside them.

The admission webhook has a port of its own, for the API server shows no certificate of ours: that
port proves who it is and asks nobody, and there is nothing to learn or to change at it. At the
webhooks' port, whoever asks shows a certificate. At the port of health, metrics and API, too, only
we do, where that is set: a token says who asks.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from extender.config import Settings
from extender.listening import KEPT_BACK, Listener, spare_for
from extender.seldom import SeldomLogger
from extender.tls import Certificates, ServerContext, follow_certificate

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS: Final = 2.0
"""Time for answers that are on their way when everything accepted has been answered."""

BODY_SECONDS: Final = 30.0
"""Time for a request body to arrive. kube-scheduler waits one second for its answer."""

LINGERING_SECONDS: Final = 2.0
"""Time to read the rest of a body after the answer, so that a refused client gets its answer."""

CLIENTS_HINT: Final = (
    "kube-scheduler must show a certificate that holds now, of a CA in tls.client_ca_file: set "
    "tlsConfig.certFile and keyFile of its extender; another replica shows its tls.cert_file"
)

Watch = Callable[[web.RequestHandler], asyncio.BaseProtocol]
"""Stands between a connection and what handles it."""


class Doors:
    """What this listens on.

    Args:
        settings: where.
        webhooks: what kube-scheduler and other replicas ask; everything where `status` is None.
        status: health, metrics and API, for a port of their own.
        admission: what the API server asks; None for nothing.
        watch: is given what handles a connection of the webhooks' port, and returns what does so.

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
        watch: Watch = lambda connection: connection,
    ) -> None:
        self._runner = _runner(settings, webhooks)
        self._status = _runner(settings, status) if status is not None else None
        self._admission = _runner(settings, admission) if admission is not None else None
        self._certificates = Certificates(settings.tls) if settings.tls.is_used else None
        if self._certificates is not None:
            self._certificates.see_off_dropped(webhooks, settings.keepalive_seconds)
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
            _factory(self._runner, watch),
            most=lambda: settings.max_connections,
            tls=self._certificates.server if self._certificates is not None else None,
            spare=min(KEPT_BACK, spare_for(0)),
            hint=CLIENTS_HINT,
        )
        # Whoever comes to another port leaves kube-scheduler its file descriptors.
        spare = spare_for(settings.max_connections)
        self._admission_port = (
            Listener(
                "admission",
                settings.admission.address,
                _factory(self._admission),
                most=lambda: settings.admission.max_connections,
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
                _factory(self._status),
                most=lambda: settings.api.max_connections,
                tls=self._status_certificate.context if self._status_certificate else None,
                spare=spare,
            )
            if self._status is not None
            else None
        )

    @property
    def ports(self) -> tuple[Listener, ...]:
        """What this listens on, the webhooks' first."""
        ports = (self._webhooks_port, self._status_port, self._admission_port)
        return tuple(port for port in ports if port is not None)

    @property
    def _webhook_ports(self) -> tuple[Listener, ...]:
        ports = (self._webhooks_port, self._admission_port)
        return tuple(port for port in ports if port is not None)

    @property
    def client_context(self) -> ssl.SSLContext | None:
        """How other replicas are asked by now; None for without TLS."""
        return self._certificates.client if self._certificates is not None else None

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs, those of the webhooks first."""
        return tuple(_url(port, address) for port in self.ports for address in port.addresses)

    def callers(self) -> tuple[object, ...]:
        """Return who is at the ports of the webhooks, as `InFlight` asks for it."""
        handlers = [
            handler
            for runner in (self._runner, self._admission)
            if runner is not None and runner.server is not None
            for handler in runner.server.connections
            if handler.connected
        ]
        return (*handlers, *(one for port in self._webhook_ports for one in port.coming))

    async def open(self) -> None:
        """Listen.

        Raises:
            OSError: an address cannot be used.
        """
        for runner in (self._runner, self._admission, self._status):
            if runner is not None:
                await runner.setup()
        for port in self.ports:
            await port.open()

    async def run(self) -> None:
        """Follow the certificates until cancelled; ends at once where there are none."""
        followed: list[Certificates | ServerContext | None] = [
            self._certificates,
            self._admission_certificate,
            self._status_certificate,
        ]
        async with asyncio.TaskGroup() as group:
            for each in followed:
                if each is not None:
                    group.create_task(each.run(), name="certificates")

    async def close_webhooks(self) -> None:
        """Take no new questions; those that are there are answered, and health is told on."""
        for port in self._webhook_ports:
            port.close()

    async def close(self) -> None:
        """Close everything."""
        for port in self.ports:
            await port.end()
        for runner in (self._runner, self._admission, self._status):
            if runner is not None:
                await runner.cleanup()


@web.middleware
async def _guard_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse compressed bodies, and end connections whose body does not come.

    No client needs compression, and a small body can unpack to gigabytes.
    """
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() == "identity":
        if request.content.is_eof():
            return await handler(request)
        timer = asyncio.get_running_loop().call_later(BODY_SECONDS, _end_late_body, request)
        try:
            return await handler(request)
        finally:
            timer.cancel()
    response = web.Response(
        status=415,
        text="compressed bodies are not read: send the body as it is\n",
        headers={hdrs.ACCEPT_ENCODING: "identity"},
    )
    response.force_close()  # the rest of the body is not awaited
    return response


def _end_late_body(request: web.Request) -> None:
    if not request.content.is_eof() and request.transport is not None:
        request.transport.abort()


def _runner(settings: Settings, app: web.Application) -> web.AppRunner:
    app.middlewares.insert(0, _guard_body)
    return web.AppRunner(
        app,
        access_log=None,
        logger=SeldomLogger(logger),
        keepalive_timeout=settings.keepalive_seconds,
        shutdown_timeout=LAST_WORDS_SECONDS,
        handler_cancellation=False,
        auto_decompress=False,
        lingering_time=LINGERING_SECONDS,
    )


def _factory(
    runner: web.AppRunner, watch: Watch = lambda connection: connection
) -> Callable[[], asyncio.BaseProtocol]:
    """Return what makes the handler of each connection, once the runner is set up."""

    def make() -> asyncio.BaseProtocol:
        if runner.server is None:
            raise ConnectionAbortedError("the server ends")
        return watch(runner.server())

    return make


def _url(port: Listener, address: tuple[str, int]) -> str:
    """Return the base URL behind a socket's address."""
    scheme = "https" if port.is_tls else "http"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{scheme}://{host}:{address[1]}"
