"""The ports that others come to: webhooks, over TLS where set, and the rest beside them."""

import ssl
from typing import Final

from aiohttp import web

from extender.config import Settings
from extender.tls import Certificates

LAST_WORDS_SECONDS: Final = 2.0
"""Time for answers that are on their way when everything accepted has been answered."""


class Doors:
    """What this listens on.

    Args:
        settings: where.
        webhooks: what kube-scheduler and other replicas ask; everything where `status` is None.
        status: health, metrics and API, for a port of their own.

    Raises:
        TlsError: the certificates cannot be used.
    """

    def __init__(
        self, settings: Settings, webhooks: web.Application, status: web.Application | None
    ) -> None:
        self._settings = settings
        self._runner = _runner(settings, webhooks)
        self._status = _runner(settings, status) if status is not None else None
        self._certificates = Certificates(settings.tls) if settings.tls.is_used else None
        self._site: web.TCPSite | None = None

    @property
    def client_context(self) -> ssl.SSLContext | None:
        """How other replicas are asked; None for without TLS."""
        return self._certificates.client if self._certificates is not None else None

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs, those of the webhooks first."""
        scheme = "http" if self._certificates is None else "https"
        status = self._status.addresses if self._status is not None else ()
        return (
            *(_url(scheme, address) for address in self._runner.addresses),
            *(_url("http", address) for address in status),
        )

    async def open(self) -> None:
        """Listen.

        Raises:
            OSError: an address cannot be used.
        """
        await self._runner.setup()
        host, port = self._settings.listen_address
        context = self._certificates.server if self._certificates is not None else None
        self._site = web.TCPSite(self._runner, host, port, ssl_context=context)
        await self._site.start()
        if self._status is not None:
            await self._status.setup()
            await web.TCPSite(self._status, *self._settings.status_address).start()

    async def run(self) -> None:
        """Follow the certificates until cancelled; ends at once where there are none."""
        if self._certificates is not None:
            await self._certificates.run()

    async def close_webhooks(self) -> None:
        """Take no new questions; those that are there are answered, and health is told on."""
        if self._site is not None:
            await self._site.stop()
            self._site = None

    async def close(self) -> None:
        """Close everything."""
        await self.close_webhooks()
        await self._runner.cleanup()
        if self._status is not None:
            await self._status.cleanup()


def _runner(settings: Settings, app: web.Application) -> web.AppRunner:
    return web.AppRunner(
        app,
        access_log=None,
        keepalive_timeout=settings.keepalive_seconds,
        shutdown_timeout=LAST_WORDS_SECONDS,
        handler_cancellation=False,
    )


def _url(scheme: str, address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return the base URL behind a socket's address."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{scheme}://{host}:{address[1]}"
