"""The agent's main loop: read, attribute tenants, evaluate, publish the report."""

import asyncio
import importlib.metadata
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Final, Protocol

import msgspec

from agent.gpu.backend import Backend, DeviceReading, NodeReading, Values, XidEvent
from agent.gpu.events import XidLog, XidWatcher
from agent.gpu.session import Session, hung_problem
from agent.gpu.worker import CallTracker, HungError, Worker
from agent.options import Options
from agent.report.contract import Device, Problem, Report, Verdict
from agent.report.verdict import DeviceEvaluator, DeviceFacts, VerdictPolicy, most_severe_xid
from agent.tenants.attribution import DeviceTenants, DeviceUsage
from agent.tenants.device_holders import DeviceIds
from agent.tenants.kubelet import UNKNOWN_TOPOLOGY, KubeletFlags, Topology
from extender.core.decision.signals import agreed_activity
from extender.core.devices.readings import Signal
from extender.core.policy import RECOVERY_CHANGED
from extender.runtime.logs import LogThrottle

logger = logging.getLogger(__name__)

_REPORTED: Final = tuple(signal.value for signal in Signal)
_PAUSE_SECONDS: Final = 0.1
"""Shortest time between two passes: XID errors that follow each other share a pass."""
_DIGITS: Final = 4
"""Decimal places of reported values: 0.0001 and 0.1 mW are finer than any measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TenantSnapshot:
    """Tenants of all devices at one time.

    Attributes:
        devices: tenants of each device in the order of the readings; None without a source of
            tenants.
        tenants_problem: why the holders of devices are unknown, None if they are known.
        processes_problem: why the pods of processes are unknown, None if they are known.
        topology: policy and scope of the kubelet's Topology Manager.
    """

    devices: tuple[DeviceTenants, ...] | None = None
    tenants_problem: Problem | None = None
    processes_problem: Problem | None = None
    topology: Topology = UNKNOWN_TOPOLOGY


def _device_usages(readings: Sequence[DeviceReading]) -> tuple[DeviceUsage, ...]:
    """Map readings to the device usages by which tenants are attributed."""
    return tuple(
        DeviceUsage(
            device=DeviceIds(
                key=(reading.card.uuid, reading.gpu_instance_id),
                mig_uuids=reading.mig_uuids,
                index=reading.card.minor if reading.card.minor is not None else reading.card.index,
            ),
            memory_used_bytes=_whole(reading.values.get(Signal.MEMORY_USED)),
            utilization_ratio=reading.values.get(
                Signal.GRAPHICS_ACTIVE, reading.values.get(Signal.GPU_UTILIZATION)
            ),
            agreed_ratio=agreed_activity(reading.values),
            processes=reading.processes,
        )
        for reading in readings
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


class _ReportBuilder:
    """Builds reports, and numbers them in sequence.

    Args:
        started_at: start of the agent, seconds since the epoch.
        verdict_policy: thresholds and health actions.
        xids: log of XID errors.
    """

    def __init__(
        self, node: str, started_at: float, verdict_policy: VerdictPolicy, xids: XidLog
    ) -> None:
        self._node = node
        self._started_at = started_at
        self._version = importlib.metadata.version("idlegpu")
        self._evaluator = DeviceEvaluator(verdict_policy)
        self._health = verdict_policy.health
        self._xids = xids
        self._sequence = 0

    def build(self, node_reading: NodeReading, tenants: _TenantSnapshot, now: float) -> Report:
        """Build the report of one pass.

        Args:
            node_reading: values of all devices.
            tenants: tenants of all devices.
            now: seconds since the epoch.
        """
        self._sequence += 1
        readings = node_reading.devices
        xids = [self._xid(reading, now) for reading in readings]
        signals = _columns(readings, [None if xid is None else xid[1] for xid in xids])
        facts = DeviceFacts(
            sources=[reading.source for reading in readings],
            xid_at=[None if xid is None else xid[0] for xid in xids],
            is_lost=[not reading.values for reading in readings],
        )
        verdicts = self._evaluator.evaluate(signals, facts, now)
        of_devices = tenants.devices or repeat(None, len(readings))
        rows = zip(readings, xids, verdicts, of_devices, strict=True)
        return Report(
            node=self._node,
            agent_version=self._version,
            started_at=self._started_at,
            sequence=self._sequence,
            at=now,
            driver_version=node_reading.driver_version,
            topology_policy=tenants.topology[0],
            topology_scope=tenants.topology[1],
            devices=tuple(
                _device(reading, xid, verdict, on_it, now) for reading, xid, verdict, on_it in rows
            ),
            signals=signals,
            problem=node_reading.problem,
            tenants_problem=tenants.tenants_problem,
            processes_problem=tenants.processes_problem,
        )

    def _xid(self, reading: DeviceReading, now: float) -> tuple[float, int] | None:
        events = self._xids.latest_of(reading.card.uuid, reading.gpu_instance_id)
        reads_recovery = Signal.RECOVERY_ACTION in reading.values
        return most_severe_xid(events, self._health, now, reads_recovery=reads_recovery)


def _columns(
    readings: Sequence[DeviceReading], xids: Sequence[int | None]
) -> dict[str, tuple[float | None, ...]]:
    """Map readings to one column for each signal that any device has."""
    signals_by_device = [_device_signals(reading) for reading in readings]
    present = set().union(*signals_by_device)
    columns: dict[str, tuple[float | None, ...]] = {
        name: tuple(
            [
                None if (value := values.get(name)) is None else round(value, _DIGITS)
                for values in signals_by_device
            ]
        )
        for name in _REPORTED
        if name in present
    }
    if any(xid is not None for xid in xids):
        columns[Signal.XID.value] = tuple(None if xid is None else float(xid) for xid in xids)
    listed = [reading.processes for reading in readings]
    if any(processes is not None for processes in listed):
        columns[Signal.PROCESSES.value] = tuple(
            None if processes is None else float(len(processes)) for processes in listed
        )
    return columns


def _device_signals(reading: DeviceReading) -> Values:
    """Return a device's reported values; for an instance without power, which only the card has."""
    if not reading.gpu_instance_id:
        return reading.values
    of_card = {Signal.POWER, Signal.POWER_LIMIT}
    return {name: value for name, value in reading.values.items() if name not in of_card}


def _device(
    reading: DeviceReading,
    xid: tuple[float, int] | None,
    verdict: Verdict,
    tenants: DeviceTenants | None,
    now: float,
) -> Device:
    card = reading.card
    if reading.problem is not None:
        verdict = msgspec.structs.replace(verdict, is_idle=None, reason=reading.problem.text)
    return Device(
        uuid=card.uuid,
        gpu_instance_id=reading.gpu_instance_id,
        mig_uuids=reading.mig_uuids,
        mig_profile=reading.mig_profile,
        index=card.index,
        model=card.model,
        pci_bus_id=card.pci_bus_id,
        numa_node=reading.topology.numa_node,
        nvlink_peers=reading.topology.nvlink_peers,
        activity_source=reading.source,
        age_seconds=(
            None
            if reading.measured_at is None
            else round(max(now - reading.measured_at, 0.0), _DIGITS)
        ),
        xid_age_seconds=None if xid is None else round(max(now - xid[0], 0.0), _DIGITS),
        allocated_to=None if tenants is None else tenants.allocated_to,
        used_by=reading.processes if tenants is None else tenants.used_by,
        foreign=None if tenants is None else tenants.foreign,
        replicas=None if tenants is None else tenants.replicas,
        verdict=verdict,
        problem=reading.problem,
    )


class _TenantSource(Protocol):
    """What the sampler needs of a source of tenants."""

    @property
    def holders_problem(self) -> Problem | None:
        """Error of the kubelet's API, None while the holders of devices are known."""

    @property
    def processes_problem(self) -> Problem | None:
        """Problem that leaves the pods of processes unknown, or None."""

    def attribute(self, usages: tuple[DeviceUsage, ...]) -> tuple[DeviceTenants, ...]:
        """Return the tenants of each device, in the order given."""


class LatestReport:
    """The latest report; tasks can wait for the next one. Older reports are not kept.

    One task publishes, any task of the same event loop reads.

    Args:
        stale_seconds: maximum age of a current reading.

    Attributes:
        report: None before the first pass.
        node_reading: the values from which the report was built.
    """

    def __init__(self, stale_seconds: float = math.inf) -> None:
        self._stale_seconds = stale_seconds
        self.report: Report | None = None
        self.node_reading = NodeReading()
        self._published = asyncio.Event()

    def publish(self, report: Report, node_reading: NodeReading) -> None:
        """Replace the latest report, and wake the waiting tasks."""
        self.report, self.node_reading = report, node_reading
        self._published.set()
        self._published = asyncio.Event()

    def are_fresh(self, now: float) -> tuple[bool, ...]:
        """Return for each device whether its reading is current.

        Args:
            now: seconds since the epoch.
        """
        return tuple(
            reading.measured_at is not None and now - reading.measured_at <= self._stale_seconds
            for reading in self.node_reading.devices
        )

    async def wait_newer(self, sequence: int) -> Report:
        """Wait for a report with a higher sequence number; 0 matches any report."""
        while self.report is None or self.report.sequence <= sequence:
            await self._published.wait()
        return self.report


class Sampler:
    """Publishes a report after every pass, and immediately after an XID error.

    Everything but the library's calls runs on the event loop's thread.

    Args:
        tenant_source: source of tenants, None for no tenants.
        clock: seconds since the epoch.

    Attributes:
        xids: log of XID errors.
        passes: passes made.
        pass_seconds: total duration of the passes.
        library_seconds: total time spent in the driver's library.
        hung: hung calls by name of the call; 0 for calls that were made and never hung.
    """

    def __init__(
        self,
        backend: Backend,
        options: Options,
        tenant_source: _TenantSource | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.latest = LatestReport(options.stale_seconds)
        self.xids = XidLog()
        self.passes = 0
        self.pass_seconds = 0.0
        self.library_seconds = 0.0
        self.hung: dict[str, int] = {}
        self._options = options
        self._tenant_source = tenant_source
        self._kubelet = KubeletFlags(Path(options.proc) if options.proc else None, monotonic)
        self._clock = clock
        self._monotonic = monotonic
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._throttle = LogThrottle(monotonic=monotonic)
        self._unreadable_since: float | None = None
        self.watcher = XidWatcher(backend, self._deliver, monotonic=monotonic)
        self.session = Session(
            backend, self.watcher, cadence=options.cadence, clock=clock, monotonic=monotonic
        )
        self._worker = Worker(limit_seconds=options.call_seconds)
        self._report_builder = _ReportBuilder(
            options.node, clock(), options.verdict_policy, self.xids
        )

    @property
    def is_alive(self) -> bool:
        """Whether /healthz succeeds; False after the GPUs were unreadable for too long."""
        since = self._unreadable_since
        return since is None or self._monotonic() - since < self._options.liveness_seconds

    async def run(self) -> None:
        """Sample until cancelled."""
        loop = asyncio.get_running_loop()
        due = self._monotonic()
        while True:
            await self.sample()
            due = max(due + self._options.period_seconds, now := self._monotonic())
            timer = loop.call_later(due - now, self._wake.set)
            await asyncio.sleep(min(_PAUSE_SECONDS, due - now))
            await self._wake.wait()
            timer.cancel()
            self._wake.clear()

    async def sample(self) -> Report:
        """Make one pass, publish its report, and return it."""
        self._loop = asyncio.get_running_loop()
        started = self._monotonic()
        node_reading = await self._read()
        report = self._report_builder.build(
            node_reading, self._tenant_snapshot(node_reading), self._clock()
        )
        now = self._monotonic()
        self.passes += 1
        self.pass_seconds += now - started
        if not node_reading.needs_restart:
            self._unreadable_since = None
        elif self._unreadable_since is None:
            self._unreadable_since = now
        self._log_changes(node_reading)
        self.latest.publish(report, node_reading)
        return report

    def close(self) -> None:
        """Stop the threads."""
        self.watcher.close()
        self._worker.close()

    async def _read(self) -> NodeReading:
        """Read every card that does not hang; a call that hangs ends the pass after its limit.

        The next pass skips the hung card and reads the cards after it.
        """
        skipped = self._worker.hung_subjects()
        try:
            node_reading, seconds, calls = await self._worker.run(
                partial(self._read_in_thread, skipped)
            )
        except HungError as error:
            self._record_hang(error)
            return self.session.last_reading()
        self._worker.clear_hangs(skipped)
        self.library_seconds += seconds
        # Export 0 first: Prometheus does not count an increase from a missing series.
        self.hung = dict.fromkeys(calls, 0) | self.hung
        return node_reading

    def _read_in_thread(
        self, skipped: frozenset[str], tracker: CallTracker
    ) -> tuple[NodeReading, float, Collection[str]]:
        node_reading = self.session.read(tracker, skipped)
        return node_reading, tracker.take_busy_seconds(), tracker.names

    def _record_hang(self, error: HungError) -> None:
        self.hung[error.call] = self.hung.get(error.call, 0) + 1
        self.session.mark_hung(error.subject, hung_problem(error.call, error.seconds))
        logger.error(
            "driver call does not return",
            extra={"call": error.call, "gpu": error.subject, "limit_seconds": error.seconds},
        )

    def _tenant_snapshot(self, node_reading: NodeReading) -> _TenantSnapshot:
        if self._tenant_source is None:
            return _TenantSnapshot()
        return _TenantSnapshot(
            devices=self._tenant_source.attribute(_device_usages(node_reading.devices)),
            tenants_problem=self._tenant_source.holders_problem,
            processes_problem=self._tenant_source.processes_problem,
            topology=self._kubelet.topology(),
        )

    def _deliver(self, event: XidEvent) -> None:
        """Pass an event from the card's thread to the event loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note_xid, event)

    def _note_xid(self, event: XidEvent) -> None:
        self.xids.add(event, self._clock())
        unlogged = self._throttle.due(event)
        if unlogged is not None:
            extra = {"gpu": event.uuid, "instance": event.gpu_instance_id, "xid": event.xid}
            logger.warning("XID error", extra={**extra, "also_unlogged": unlogged})
        if event.xid == RECOVERY_CHANGED:  # the recovery action is a slow-changing value
            self.session.request_slow_read()
        self._wake.set()

    def _log_changes(self, node_reading: NodeReading) -> None:
        """Log each problem once when it appears, and once when it is gone."""
        before, after = _problems(self.latest.node_reading), _problems(node_reading)
        for subject, problem in after.items():
            if subject not in before or before[subject].code != problem.code:
                logger.warning(
                    "cannot read GPU data", extra={"what": subject, "problem": problem.text}
                )
        for subject in before.keys() - after.keys():
            logger.info("GPU data can be read again", extra={"what": subject})
        if (
            node_reading.driver_version != self.latest.node_reading.driver_version
            and node_reading.driver_version
        ):
            logger.info(
                "reading GPUs",
                extra={"driver": node_reading.driver_version, "devices": len(node_reading.devices)},
            )


def _problems(node_reading: NodeReading) -> dict[str, Problem]:
    """Return the problems of the node and of each device."""
    problems = {
        device.card.uuid: device.problem
        for device in node_reading.devices
        if device.problem is not None
    }
    return problems if node_reading.problem is None else {**problems, "GPUs": node_reading.problem}
