"""The ports that others come to: webhooks, over TLS where set, and the rest beside them.

The admission webhook has a port of its own, for the API server shows no certificate of ours: that
port proves who it is and asks nobody, and there is nothing to learn or to change at it. At the
webhooks' port, whoever asks shows a certificate.
"""

import asyncio
import ssl
from typing import Final

from aiohttp import web

from extender.config import Settings
from extender.tls import Certificates, ServerContext, follow_certificate

LAST_WORDS_SECONDS: Final = 2.0
"""Time for answers that are on their way when everything accepted has been answered."""


class Doors:
    """What this listens on.

    Args:
        settings: where.
        webhooks: what kube-scheduler and other replicas ask; everything where `status` is None.
        status: health, metrics and API, for a port of their own.
        admission: what the API server asks; None for nothing.

    Raises:
        TlsError: the certificates cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        webhooks: web.Application,
        status: web.Application | None,
        admission: web.Application | None = None,
    ) -> None:
        self._settings = settings
        self._runner = _runner(settings, webhooks)
        self._status = _runner(settings, status) if status is not None else None
        self._admission = _runner(settings, admission) if admission is not None else None
        self._certificates = Certificates(settings.tls) if settings.tls.is_used else None
        self._admission_certificate = (
            follow_certificate(*settings.admission.files(settings.tls))
            if admission is not None
            else None
        )
        self._sites: list[web.TCPSite] = []

    @property
    def client_context(self) -> ssl.SSLContext | None:
        """How other replicas are asked; None for without TLS."""
        return self._certificates.client if self._certificates is not None else None

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs, those of the webhooks first."""
        scheme = "http" if self._certificates is None else "https"
        status = self._status.addresses if self._status is not None else ()
        admission = self._admission.addresses if self._admission is not None else ()
        return (
            *(_url(scheme, address) for address in self._runner.addresses),
            *(_url("http", address) for address in status),
            *(_url("https", address) for address in admission),
        )

    async def open(self) -> None:
        """Listen.

        Raises:
            OSError: an address cannot be used.
        """
        await self._runner.setup()
        host, port = self._settings.listen_address
        context = self._certificates.server if self._certificates is not None else None
        await self._start(web.TCPSite(self._runner, host, port, ssl_context=context))
        if self._admission is not None and self._admission_certificate is not None:
            await self._admission.setup()
            host, port = self._settings.admission.address
            context = self._admission_certificate.context
            await self._start(web.TCPSite(self._admission, host, port, ssl_context=context))
        if self._status is not None:
            await self._status.setup()
            await web.TCPSite(self._status, *self._settings.status_address).start()

    async def _start(self, site: web.TCPSite) -> None:
        await site.start()
        self._sites.append(site)

    async def run(self) -> None:
        """Follow the certificates until cancelled; ends at once where there are none."""
        followed: list[Certificates | ServerContext | None] = [
            self._certificates,
            self._admission_certificate,
        ]
        async with asyncio.TaskGroup() as group:
            for each in followed:
                if each is not None:
                    group.create_task(each.run(), name="certificates")

    async def close_webhooks(self) -> None:
        """Take no new questions; those that are there are answered, and health is told on."""
        while self._sites:
            await self._sites.pop().stop()

    async def close(self) -> None:
        """Close everything."""
        await self.close_webhooks()
        for runner in (self._runner, self._admission, self._status):
            if runner is not None:
                await runner.cleanup()


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
