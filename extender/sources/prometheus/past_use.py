"""Query Prometheus once, at start, for the last use of devices before the extender ran."""

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
    from extender.settings.sources import Prometheus

logger = logging.getLogger(__name__)

_LOOKBACK_SECONDS: Final = 24 * 3600.0
_LIMIT_SECONDS: Final = 600.0
"""A day of forty thousand devices is twelve answers of ten megabytes per metric."""
_RETRY_DELAYS_SECONDS: Final = (0.0, 30.0, 120.0, 600.0)
_WAIT_SECONDS: Final = 1.0
_MAX_WAITS: Final = 300
"""Number of waits for another query of the past: both at once would need too much memory."""


class UseRecorder(Protocol):
    """Records the use of devices from now on; see `insight.last_active`."""

    @property
    def seen(self) -> asyncio.Event:
        """Set once devices are known and their use is recorded."""

    @property
    def active_from(self) -> float:
        """Ratio of activity from which a device counts as in use."""

    def learn(
        self, devices: Sequence[DeviceKey], used_at: Column, is_guess: Flags, until: float
    ) -> None:
        """Add the last use of devices, as it was known at `until`."""


class PastUse:
    """Query the last use of devices in a separate process: the answers have many megabytes.

    Args:
        settings: settings of Prometheus; without a URL nothing is queried.
        clock: seconds since the epoch.
        recorder: receives the last use, some devices at a time.
        is_busy: returns whether another query of the past is running.
    """

    def __init__(
        self,
        settings: "Prometheus",
        clock: Callable[[], float],
        recorder: UseRecorder,
        *,
        is_busy: Callable[[], bool],
    ) -> None:
        self._is_busy = is_busy
        self._settings = settings
        self._clock = clock
        self._recorder = recorder

    async def run(self) -> None:
        """Query once, with a few retries: later use is recorded by the extender itself."""
        if not self._settings.url:
            return
        await self._recorder.seen.wait()
        for _ in range(_MAX_WAITS):
            if not self._is_busy():
                break
            await asyncio.sleep(_WAIT_SECONDS)
        for delay_seconds in _RETRY_DELAYS_SECONDS:
            await asyncio.sleep(delay_seconds)
            try:
                count = await self._query()
            except (PrometheusError, WorkerError) as error:
                logger.warning("cannot query past use", extra={"error": str(error)})
                continue
            except Exception:
                logger.exception("query of past use failed")  # placing pods must go on
                return
            logger.info("queried past use", extra={"devices": count})
            return

    async def _query(self) -> int:
        """Query the last use and pass it on; return the number of devices.

        Raises:
            PrometheusError: Prometheus gave no usable answer.
            WorkerError: the worker process gave no answer.
        """
        now = self._clock()
        worker = WorkerProcess(self._settings)
        request = {
            "now": now,
            "use_seconds": _LOOKBACK_SECONDS,
            "active_from": self._recorder.active_from,
        }
        try:
            answer = await worker.send(request, _LIMIT_SECONDS)
        finally:
            await worker.stop()
        if "error" in answer[-1].header:
            raise PrometheusError(answer[-1].header["error"])
        count = 0
        for frame in answer:
            devices = _devices_of(frame)
            if devices:
                used_at, is_guess = np.frombuffer(frame.body, dtype=np.float64).reshape(2, -1)
                self._recorder.learn(devices, used_at, is_guess > 0, now)
                count += len(devices)
                await asyncio.sleep(0)
        return count


def _devices_of(frame: Frame) -> list[DeviceKey]:
    return [DeviceKey((uuid, instance)) for uuid, instance in frame.header.get("devices", ())]
