"""Serve until SIGTERM, which drains connections first, or SIGINT, which stops at once."""

import asyncio
import logging
import signal

from extender.app import Extender, start
from extender.config import Settings
from extender.settings_file import SettingsFile

logger = logging.getLogger(__name__)

HURRY_SECONDS = 2.0
"""Time for open requests after SIGINT."""


async def serve(settings: Settings, file: SettingsFile | None = None) -> None:
    """Serve until SIGTERM or SIGINT, and apply changes of the settings file."""
    stopping, hurrying = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_signal_handler(signal.SIGINT, hurrying.set)
    async with start(settings, file=file) as extender, asyncio.TaskGroup() as group:
        hurry = group.create_task(hurrying.wait(), name="hurry")
        leave = group.create_task(_leave(extender, stopping), name="leave")
        await asyncio.wait([hurry, leave], return_when=asyncio.FIRST_COMPLETED)
        logger.info("shutting down")
        if hurrying.is_set():
            extender.in_flight.hurry(HURRY_SECONDS)
        hurry.cancel()
        leave.cancel()


async def _leave(extender: Extender, stopping: asyncio.Event) -> None:
    """Wait for the signal, then drain connections for `drain_seconds`."""
    await stopping.wait()
    settings = extender.settings
    if settings.drain_seconds:
        logger.info("draining", extra={"seconds": settings.drain_seconds})
        await extender.in_flight.take_leave(settings.drain_seconds, settings.shutdown_seconds)
