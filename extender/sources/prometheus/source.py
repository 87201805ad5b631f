"""Query Prometheus periodically, and once for past use; deliver readings.

A worker process (`worker`) queries and reduces; frames of numbers come back.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from sys import intern
from typing import Any, Final, Protocol

import numpy as np

from extender.core.devices.readings import (
    ChangedTenants,
    Column,
    DeviceInfo,
    DeviceKey,
    History,
    Readings,
    Signal,
)
from extender.core.nodes.snapshot import Flags
from extender.settings.sources import Prometheus
from extender.sources.prometheus.node_identity import NodeIdentity
from extender.sources.prometheus.process import WorkerError, WorkerProcess
from extender.sources.prometheus.protocol import ROUND_TIMEOUTS, Frame, PrometheusError

logger = logging.getLogger(__name__)

_SOURCE = "prometheus"

_MAX_PAUSE_SECONDS: Final = 30.0
_JITTER: Final = 0.1
# The worker ends a round by itself. If it cannot (a server sends its headers byte by byte), it is
# killed after this time.
_GRACE_SECONDS: Final = 5.0
_START_SECONDS: Final = 10.0
_WAIT_FOR_NODES_SECONDS: Final = 0.5
_HISTORY_RETRY_SECONDS: Final = (5.0, 30.0, 120.0)
_HISTORY_QUERIES: Final = 8  # maximum: names, and two generations of three signals
_HISTORY_TIMEOUT_FACTOR: Final = 6.0

_PAST_SECONDS: Final = 24 * 3600.0
_PAST_LIMIT_SECONDS: Final = 600.0
"""Time limit for a query of the past: a day of 40,000 devices is 120 MB per metric."""

_PAST_DELAYS_SECONDS: Final = (0.0, 30.0, 120.0, 600.0)
_PAST_WAIT_SECONDS: Final = 1.0
_PAST_MAX_WAITS: Final = 300
"""Number of waits for another query of the past: both at once would need too much memory."""


# --- frames of the worker to readings, in steps small enough for the event loop -------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundReport:
    """Result of a round besides readings.

    Attributes:
        failed: failed queries by metric, with the reason.
        partial_answers: number of answers that the server marked as incomplete.
    """

    failed: Mapping[str, str]
    partial_answers: int
    warning: str


class ReadingsBuilder:
    """Build readings from the worker's changes; replaced whenever the worker process restarts.

    Used by one task. Returned values are never changed afterwards.
    """

    def __init__(self) -> None:
        self._devices: tuple[DeviceInfo, ...] = ()
        self._tenants: dict[DeviceKey, tuple[str, ...]] = {}

    async def apply(self, answer: Sequence[Frame], at: float) -> tuple[Readings, _RoundReport]:
        """Apply one complete answer.

        Args:
            at: when Prometheus was queried.
        """
        added: list[DeviceInfo] = []
        changed: dict[DeviceKey, tuple[str, ...]] = {}
        columns: dict[Signal, Column] = {}
        shares: list[tuple[DeviceKey, str, int]] = []
        divided: list[DeviceKey] = []
        *parts, last = answer
        for part in parts:
            added.extend(_device_info(row) for row in part.header.get("added", ()))
            for uuid, gpu_instance_id, *pods in part.header.get("tenants", ()):
                changed[DeviceKey((uuid, gpu_instance_id))] = tuple(pods)
            for uuid, gpu_instance_id, pod, held in part.header.get("shares", ()):
                shares.append((DeviceKey((uuid, gpu_instance_id)), pod, held))
            divided.extend(DeviceKey((uuid, of)) for uuid, of in part.header.get("divided", ()))
            if "signal" in part.header:
                columns[Signal(part.header["signal"])] = _column(part)
            await asyncio.sleep(0)
        self._change_devices(last.header["removed"], added)
        before = self._tenants
        self._change_tenants(changed)
        readings = Readings(
            source=_SOURCE,
            at=at,
            devices=self._devices,
            columns=columns,
            measured_at=_column(last),
            tenants=self._tenants if last.header["has_tenants"] else None,
            tenants_at=last.header["tenants_at"],
            changed_tenants=ChangedTenants(before, changed.keys()),
            shares=tuple(shares),
            divided=tuple(divided),
            unmatched_series=last.header["unmatched_series"],
            unmatched_example=last.header["unmatched_example"],
        )
        report = _RoundReport(
            failed=last.header["failed"],
            partial_answers=last.header["partial_answers"],
            warning=last.header["warning"],
        )
        return readings, report

    def _change_devices(self, removed: Sequence[int], added: Sequence[DeviceInfo]) -> None:
        """Update the devices; keep the same tuple while nothing changes: comparing it is cheap."""
        if removed:
            gone = set(removed)
            kept = (device for at, device in enumerate(self._devices) if at not in gone)
            self._devices = (*kept, *added)
        elif added:
            self._devices = (*self._devices, *added)

    def _change_tenants(self, changed: Mapping[DeviceKey, tuple[str, ...]]) -> None:
        if not changed:
            return
        tenants = {**self._tenants, **changed}
        for key, pods in changed.items():
            if not pods:
                del tenants[key]
        self._tenants = tenants


def _column(frame: Frame) -> Column:
    return np.frombuffer(frame.body, dtype=np.float64)


def _device_info(row: Sequence[object]) -> DeviceInfo:
    node, uuid, gpu_instance_id, index, model, mig_profile, driver_version = row
    # Each frame has its own copy of texts that many devices share.
    return DeviceInfo(
        node=intern(str(node)),
        uuid=str(uuid),
        gpu_instance_id=intern(str(gpu_instance_id)),
        index=index if isinstance(index, int) else None,
        model=intern(str(model)),
        mig_profile=intern(str(mig_profile)),
        driver_version=intern(str(driver_version)),
    )


async def _read_history(answer: Sequence[Frame]) -> AsyncIterator[History]:
    """Yield the past readings of some devices at a time; `answer` is used up."""
    first, *parts = answer
    times = np.array(first.header["times"], dtype=np.float64)
    parts.reverse()
    while parts:
        part = parts.pop()
        devices = tuple(_devices_of(part))
        if devices:
            block = np.frombuffer(part.body, dtype=np.float16).astype(np.float64)
            matrices = block.reshape(first.header["matrices"], len(devices), len(times))
            yield History(
                times=times,
                devices=devices,
                utilization=matrices[0].T,
                xid=matrices[1].T if len(matrices) > 1 else None,
            )
        await asyncio.sleep(0)


# --- the source -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusStatus:
    """Status of the source, for metrics and health checks.

    Attributes:
        last_success_at: time of the last successful round; None before the first.
        last_error: why the latest round failed, "" after a success.
        consecutive_failures: failed rounds since the last success.
        rounds: number of rounds.
        failures: number of failed rounds.
        devices: devices in the latest answer.
        unmatched_series: series of the latest answer whose labels name no node.
        unmatched_example: labels of one of them.
        failed_queries: failed queries of the latest round by metric, with the reason.
        partial_answers: number of answers that the server marked as incomplete.
        worker_starts: starts of the worker process; more than one means that it died or was killed.
        has_history: the past readings were delivered.
    """

    last_success_at: float | None = None
    last_error: str = ""
    consecutive_failures: int = 0
    rounds: int = 0
    failures: int = 0
    devices: int = 0
    unmatched_series: int = 0
    unmatched_example: str = ""
    failed_queries: Mapping[str, str] = field(default_factory=dict)
    partial_answers: int = 0
    worker_starts: int = 0
    has_history: bool = False


class PrometheusSource:
    """Query Prometheus every `interval_seconds`, one round at a time.

    Only the task in `run` changes the state; other tasks of the same loop may read it.

    Args:
        settings: settings of Prometheus; `url` must not be empty.
        identity: returns names and addresses of the nodes; called before each round. Rounds wait
            until there are nodes. It should return the same object while nothing changes.
        deliver: receives each round's readings; the next round waits for it. An answer without
            devices is delivered, a failed round is not.
        deliver_history: receives the past readings once, some devices at a time.
        clock: seconds since the epoch.
        window_seconds: how far back past readings are queried; 0 for no query.
    """

    def __init__(
        self,
        settings: Prometheus,
        *,
        identity: Callable[[], NodeIdentity],
        deliver: Callable[[Readings], Awaitable[None]],
        deliver_history: Callable[[History], Awaitable[None]],
        clock: Callable[[], float],
        window_seconds: float,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._deliver = deliver
        self._deliver_history = deliver_history
        self._clock = clock
        self._window_seconds = window_seconds
        self._status = PrometheusStatus()
        self._worker = WorkerProcess(settings)
        self._builder = ReadingsBuilder()
        self._sent_identity: NodeIdentity | None = None

    def status(self) -> PrometheusStatus:
        """Return the status of the source."""
        return self._status

    def adopt(self, settings: Prometheus, window_seconds: float) -> None:
        """Apply new settings; call it while `run` does not run, unless `settings` is unchanged.

        The status stays, and past readings are queried only if they have not been delivered.
        """
        self._window_seconds = window_seconds
        if settings != self._settings:
            self._settings = settings
            # This restart is intended and does not count as a lost process.
            self._worker = WorkerProcess(settings, starts=max(self._worker.starts - 1, 0))

    async def run(self) -> None:
        """Query until cancelled; no failure of Prometheus or the worker process ends this."""
        loop = asyncio.get_running_loop()
        history: asyncio.Task[None] | None = None
        try:
            while True:
                identity = self._identity()
                if not identity.names:
                    await asyncio.sleep(_WAIT_FOR_NODES_SECONDS)
                    continue
                started = loop.time()
                await self._run_round(identity)
                if history is None and self._is_history_due():
                    history = asyncio.create_task(self._fill_history(), name="prometheus history")
                # After a round that took longer than the interval the next one starts at once.
                await asyncio.sleep(max(0.0, started + self._pause_seconds() - loop.time()))
        finally:
            if history is not None:
                history.cancel()
                await asyncio.wait([history])
            await self._worker.stop()

    def _is_history_due(self) -> bool:
        is_wanted = bool(self._window_seconds) and not self._status.has_history
        return is_wanted and self._status.last_success_at is not None

    def _pause_seconds(self) -> float:
        interval = self._settings.interval_seconds
        # 2 ** 10 intervals are longer than the longest pause.
        doubled = interval * 2.0 ** min(self._status.consecutive_failures, 10)
        longest = max(interval, _MAX_PAUSE_SECONDS)
        return min(doubled, longest) * random.uniform(1 - _JITTER, 1 + _JITTER)

    async def _run_round(self, identity: NodeIdentity) -> None:
        try:
            readings, report = await self._query_round(identity, self._clock())
            await self._deliver_round(readings, report)
        except (PrometheusError, WorkerError) as error:
            self._note_failure(str(error))
        except Exception as error:
            # A bug must not end the readings for good.
            logger.exception("readings from prometheus failed")
            await self._worker.stop()
            self._note_failure(f"{type(error).__name__}: {error}")

    async def _deliver_round(self, readings: Readings, report: _RoundReport) -> None:
        if report.failed and not readings.columns:
            raise PrometheusError(next(iter(report.failed.values())))
        await self._deliver(readings)
        self._note_success(readings, report)

    async def _query_round(
        self, identity: NodeIdentity, now: float
    ) -> tuple[Readings, _RoundReport]:
        if not self._worker.is_running:
            self._builder = ReadingsBuilder()  # a new process has no state
            self._sent_identity = None
        request: dict[str, Any] = {"now": now}
        if identity != self._sent_identity:
            request["nodes"] = {
                "names": sorted(identity.names),
                "addresses": dict(identity.addresses),
                "exporter_pods": dict(identity.exporter_pods),
            }
        round_seconds = ROUND_TIMEOUTS * self._settings.timeout_seconds
        limit_seconds = round_seconds + _GRACE_SECONDS + _START_SECONDS
        answer = await self._worker.send(request, limit_seconds)
        self._sent_identity = identity
        _check_answer(answer)
        return await self._builder.apply(answer, now)

    def _note_failure(self, error: str) -> None:
        before = self._status
        self._status = replace(
            before,
            last_error=error,
            consecutive_failures=before.consecutive_failures + 1,
            rounds=before.rounds + 1,
            failures=before.failures + 1,
            worker_starts=self._worker.starts,
        )
        _log_changes(before, self._status)

    def _note_success(self, readings: Readings, report: _RoundReport) -> None:
        before = self._status
        self._status = replace(
            before,
            last_success_at=readings.at,
            last_error="",
            consecutive_failures=0,
            rounds=before.rounds + 1,
            devices=len(readings.devices),
            unmatched_series=readings.unmatched_series,
            unmatched_example=readings.unmatched_example,
            failed_queries=report.failed,
            partial_answers=before.partial_answers + report.partial_answers,
            worker_starts=self._worker.starts,
        )
        _log_changes(before, self._status, report.warning)

    async def _fill_history(self) -> None:
        """Query the past once, with a few retries; without it the windows fill over time."""
        for delay_seconds in (0.0, *_HISTORY_RETRY_SECONDS):
            await asyncio.sleep(delay_seconds)
            try:
                async for past in _read_history(await self._query_history()):
                    await self._deliver_history(past)
            except (PrometheusError, WorkerError) as error:
                logger.warning("no past readings from prometheus", extra={"error": str(error)})
                continue
            except Exception:
                # A bug, as above: do not retry.
                logger.exception("past readings from prometheus failed")
                return
            self._status = replace(self._status, has_history=True)
            return

    async def _query_history(self) -> list[Frame]:
        limit_seconds = (
            self._settings.timeout_seconds * _HISTORY_TIMEOUT_FACTOR * _HISTORY_QUERIES
            + _START_SECONDS
        )
        request = {"now": self._clock(), "window_seconds": self._window_seconds}
        return await _query_apart(self._settings, request, limit_seconds)


async def _query_apart(
    settings: Prometheus, request: Mapping[str, Any], limit_seconds: float
) -> list[Frame]:
    """Query in a separate process: readings must not wait for an answer of many megabytes.

    Raises:
        PrometheusError: Prometheus gave no usable answer.
        WorkerError: the worker process gave no answer.
    """
    worker = WorkerProcess(settings)
    try:
        answer = await worker.send(request, limit_seconds)
    finally:
        await worker.stop()
    _check_answer(answer)
    return answer


def _check_answer(answer: Sequence[Frame]) -> None:
    """Raise PrometheusError if the worker reports that Prometheus gave no usable answer."""
    if "error" in answer[-1].header:
        raise PrometheusError(answer[-1].header["error"])


def _log_changes(before: PrometheusStatus, now: PrometheusStatus, warning: str = "") -> None:
    if now.last_error:
        if now.last_error != before.last_error:
            logger.warning("no readings from prometheus", extra={"error": now.last_error})
        return
    if before.last_error or before.last_success_at is None:
        logger.info("readings from prometheus", extra={"devices": now.devices})
    if set(before.failed_queries) != set(now.failed_queries):
        if now.failed_queries:
            failed = dict(now.failed_queries)
            logger.warning("queries to prometheus failed", extra={"failed": failed})
        else:
            logger.info("all queries to prometheus answered")
    if now.unmatched_series and not before.unmatched_series:
        logger.warning(
            "series name no node of the cluster",
            extra={"series": now.unmatched_series, "example": now.unmatched_example},
        )
    if before.unmatched_series and not now.unmatched_series:
        logger.info("all series name nodes of the cluster")
    if now.partial_answers and not before.partial_answers:
        logger.warning("prometheus answers are incomplete", extra={"warning": warning})


class UseRecorder(Protocol):
    """Records the use of devices from now on; see `insight.holders`."""

    @property
    def seen(self) -> asyncio.Event:
        """Event that is set once devices are known and their use is recorded."""

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
        settings: Prometheus,
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
        """Query the last use of devices once, with retries; the extender records later use."""
        if not self._settings.url:
            return
        await self._recorder.seen.wait()
        for _ in range(_PAST_MAX_WAITS):
            if not self._is_busy():
                break
            await asyncio.sleep(_PAST_WAIT_SECONDS)
        for delay_seconds in _PAST_DELAYS_SECONDS:
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
        request = {
            "now": now,
            "use_seconds": _PAST_SECONDS,
            "active_from": self._recorder.active_from,
        }
        answer = await _query_apart(self._settings, request, _PAST_LIMIT_SECONDS)
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
