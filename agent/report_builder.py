"""Build the report from a pass's readings, the tenants and the verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from agent.backend import Values
from agent.device_ids import DeviceIds
from agent.events import XidLog
from agent.reading import DeviceReading, NodeReading
from agent.report import Device, Problem, Report, Verdict
from agent.tenants import DeviceTenants, DeviceUsage
from agent.verdict import DeviceEvaluator, DeviceFacts, VerdictPolicy, most_severe_xid
from extender.core.decision.signals import agreed_activity
from extender.core.devices.readings import Signal

_REPORTED: Final = tuple(signal.value for signal in Signal)
_DIGITS: Final = 4
"""Decimal places of reported values: 0.0001 and 0.1 mW are finer than any measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIdentity:
    """Fields of the report that identify the agent.

    Attributes:
        node: name of the node.
        agent_version: version of the program.
        started_at: start of the agent, seconds since the epoch.
    """

    node: str
    agent_version: str
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSnapshot:
    """Tenants of all devices at one time.

    Attributes:
        devices: tenants of each device in the order of the readings; None without a source of
            tenants.
        tenants_problem: why the holders of devices are unknown, None if they are known.
        processes_problem: why the pods of processes are unknown, None if they are known.
    """

    devices: tuple[DeviceTenants, ...] | None = None
    tenants_problem: Problem | None = None
    processes_problem: Problem | None = None


def device_usages(readings: Sequence[DeviceReading]) -> tuple[DeviceUsage, ...]:
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


class ReportBuilder:
    """Builds reports, and numbers them in sequence.

    Args:
        identity: node, version and start time of the agent.
        verdict_policy: thresholds and health actions.
        xids: log of XID errors.
    """

    def __init__(
        self, identity: AgentIdentity, verdict_policy: VerdictPolicy, xids: XidLog
    ) -> None:
        self._identity = identity
        self._evaluator = DeviceEvaluator(verdict_policy)
        self._health = verdict_policy.health
        self._xids = xids
        self._sequence = 0

    def build(self, node_reading: NodeReading, tenants: TenantSnapshot, now: float) -> Report:
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
        rows = zip(readings, xids, verdicts, strict=True)
        return Report(
            node=self._identity.node,
            agent_version=self._identity.agent_version,
            started_at=self._identity.started_at,
            sequence=self._sequence,
            at=now,
            driver_version=node_reading.driver_version,
            devices=tuple(
                _device(reading, xid, verdict, _of(tenants, row), now)
                for row, (reading, xid, verdict) in enumerate(rows)
            ),
            signals=signals,
            problem=node_reading.problem,
            tenants_problem=tenants.tenants_problem,
            processes_problem=tenants.processes_problem,
        )

    def _xid(self, reading: DeviceReading, now: float) -> tuple[float, int] | None:
        events = self._xids.of(reading.card.uuid, reading.gpu_instance_id)
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


def _of(tenants: TenantSnapshot, row: int) -> DeviceTenants | None:
    return None if tenants.devices is None else tenants.devices[row]


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
