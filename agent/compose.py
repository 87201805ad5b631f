"""Makes the report of what was read, of whose the devices are, and of what is made of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from agent.backend import Values
from agent.device_ids import KnownDevice
from agent.events import XidLog
from agent.reading import DeviceReading, Pass
from agent.report import Device, Problem, Report, Verdict
from agent.tenants import DeviceTenants, DeviceUse
from agent.verdict import Facts, Judge, Judgement, gravest_xid
from extender.core.readings import Signal

_REPORTED: Final = tuple(signal.value for signal in Signal)
_DIGITS: Final = 4
"""A ratio of 0.0001 and 0.1 mW are finer than anything that is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a report says of its agent.

    Attributes:
        node: name of the node.
        agent_version: of the program.
        started_at: seconds since the epoch.
    """

    node: str
    agent_version: str
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Whose:
    """What is known of tenants.

    Attributes:
        devices: of each device, in the order of the readings; None where nothing is asked.
        tenants_problem: why it is not known who holds the devices.
        processes_problem: why it is not known whose the processes are.
    """

    devices: tuple[DeviceTenants, ...] | None = None
    tenants_problem: Problem | None = None
    processes_problem: Problem | None = None


def uses_of(readings: Sequence[DeviceReading]) -> tuple[DeviceUse, ...]:
    """Return what tenants are found by."""
    return tuple(
        DeviceUse(
            device=KnownDevice(
                key=(reading.card.uuid, reading.gpu_instance_id),
                mig_uuids=reading.mig_uuids,
                index=reading.card.minor if reading.card.minor is not None else reading.card.index,
            ),
            memory_used_bytes=_whole(reading.values.get(Signal.MEMORY_USED)),
            utilization_ratio=reading.values.get(
                Signal.GRAPHICS_ACTIVE, reading.values.get(Signal.GPU_UTILIZATION)
            ),
            processes=reading.processes,
        )
        for reading in readings
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


class Composer:
    """Makes reports, and numbers them.

    Args:
        identity: whose they are.
        judgement: when a device is idle, and when it is ill.
        xids: what XIDs happened.
    """

    def __init__(self, identity: Identity, judgement: Judgement, xids: XidLog) -> None:
        self._identity = identity
        self._judge = Judge(judgement)
        self._health = judgement.health
        self._xids = xids
        self._sequence = 0

    def compose(self, found: Pass, whose: Whose, now: float) -> Report:
        """Make the report of a pass.

        Args:
            found: what was read.
            whose: what is known of tenants.
            now: seconds since the epoch.
        """
        self._sequence += 1
        readings = found.devices
        xids = [self._xid(reading, now) for reading in readings]
        signals = _columns(readings, [None if xid is None else xid[1] for xid in xids])
        facts = Facts(
            sources=[reading.source for reading in readings],
            xid_at=[None if xid is None else xid[0] for xid in xids],
            is_lost=[not reading.values for reading in readings],
        )
        verdicts = self._judge.judge(signals, facts, now)
        rows = zip(readings, xids, verdicts, strict=True)
        return Report(
            node=self._identity.node,
            agent_version=self._identity.agent_version,
            started_at=self._identity.started_at,
            sequence=self._sequence,
            at=now,
            driver_version=found.driver_version,
            devices=tuple(
                _device(reading, xid, verdict, _of(whose, row), now)
                for row, (reading, xid, verdict) in enumerate(rows)
            ),
            signals=signals,
            problem=found.problem,
            tenants_problem=whose.tenants_problem,
            processes_problem=whose.processes_problem,
        )

    def _xid(self, reading: DeviceReading, now: float) -> tuple[float, int] | None:
        events = self._xids.of(reading.card.uuid, reading.gpu_instance_id)
        reads_recovery = Signal.RECOVERY_ACTION in reading.values
        return gravest_xid(events, self._health, now, reads_recovery=reads_recovery)


def _columns(
    readings: Sequence[DeviceReading], xids: Sequence[int | None]
) -> dict[str, tuple[float | None, ...]]:
    """Return the signals that any device has."""
    told = [_reported(reading) for reading in readings]
    present = set().union(*told)
    columns: dict[str, tuple[float | None, ...]] = {
        name: tuple(
            [
                None if (value := values.get(name)) is None else round(value, _DIGITS)
                for values in told
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


def _reported(reading: DeviceReading) -> Values:
    """Return what is reported of a device; an instance draws no power of its own."""
    if not reading.gpu_instance_id:
        return reading.values
    of_card = {Signal.POWER, Signal.POWER_LIMIT}
    return {name: value for name, value in reading.values.items() if name not in of_card}


def _of(whose: Whose, row: int) -> DeviceTenants | None:
    return None if whose.devices is None else whose.devices[row]


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
        verdict=verdict,
        problem=reading.problem,
    )
