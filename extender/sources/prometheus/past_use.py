"""Asks Prometheus once, at start, when devices were last used before there was anybody to watch."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from extender.core.devices.readings import Column, DeviceKey
from extender.core.nodes.snapshot import Flags
from extender.sources.prometheus.common import PrometheusError
from extender.sources.prometheus.frames import Frame
from extender.sources.prometheus.process import WorkerError, WorkerProcess

if TYPE_CHECKING:
    from extender.settings.config import Prometheus

logger = logging.getLogger(__name__)

LOOKED_BACK_SECONDS: Final = 24 * 3600.0
LIMIT_SECONDS: Final = 600.0
"""A day of forty thousand devices is twelve answers of ten megabytes for each metric."""
PAUSES_SECONDS: Final = (0.0, 30.0, 120.0, 600.0)
WAIT_SECONDS: Final = 1.0
MOST_WAITS: Final = 300
"""So often it waits for who asks for many megabytes as well: both at once would need the memory."""


class Watch(Protocol):
    """Whoever watches from now on which devices are used; see `insight.last_active`."""

    @property
    def seen(self) -> asyncio.Event:
        """Is set once devices are known, and watched from then on."""

    @property
    def active_from(self) -> float:
        """Ratio of activity from which on a device is used."""

    def learn(
        self, devices: Sequence[DeviceKey], used_at: Column, is_guess: Flags, until: float
    ) -> None:
        """Take over when devices were last used, as it was known at some time."""


class PastUse:
    """Asks in a process of its own: an answer of many megabytes keeps nobody waiting.

    Args:
        settings: of Prometheus; nothing is asked where there is no URL.
        clock: seconds since the epoch.
        watch: takes what was answered, some devices at a time.
        is_busy: whether somebody else asks for the past just now.
    """

    def __init__(
        self,
        settings: "Prometheus",
        clock: Callable[[], float],
        watch: Watch,
        *,
        is_busy: Callable[[], bool],
    ) -> None:
        self._is_busy = is_busy
        self._settings = settings
        self._clock = clock
        self._watch = watch

    async def run(self) -> None:
        """Ask once; a few tries are enough, for from now on it is watched."""
        if not self._settings.url:
            return
        await self._watch.seen.wait()
        for _ in range(MOST_WAITS):
            if not self._is_busy():
                break
            await asyncio.sleep(WAIT_SECONDS)
        for pause_seconds in PAUSES_SECONDS:
            await asyncio.sleep(pause_seconds)
            try:
                count = await self._learn()
            except (PrometheusError, WorkerError) as error:
                logger.warning("past use is not known", extra={"error": str(error)})
                continue
            except Exception:
                logger.exception("past use of devices failed")  # placing pods must go on
                return
            logger.info("past use is known", extra={"devices": count})
            return

    async def _learn(self) -> int:
        """Ask, and hand on what was answered; return of how many devices.

        Raises:
            PrometheusError: Prometheus gave no usable answer.
            WorkerError: there was none at all.
        """
        now = self._clock()
        worker = WorkerProcess(self._settings)
        question = {
            "now": now,
            "use_seconds": LOOKED_BACK_SECONDS,
            "active_from": self._watch.active_from,
        }
        try:
            answer = await worker.ask(question, LIMIT_SECONDS)
        finally:
            await worker.stop()
        if "error" in answer[-1].header:
            raise PrometheusError(answer[-1].header["error"])
        count = 0
        for frame in answer:
            devices = _devices_of(frame)
            if devices:
                used_at, is_guess = np.frombuffer(frame.body, dtype=np.float64).reshape(2, -1)
                self._watch.learn(devices, used_at, is_guess > 0, now)
                count += len(devices)
                await asyncio.sleep(0)
        return count


def _devices_of(frame: Frame) -> list[DeviceKey]:
    return [DeviceKey((uuid, instance)) for uuid, instance in frame.header.get("devices", ())]
