"""Build the updates that a connection to the extender carries, from reports."""

import math
import re
import struct
from collections.abc import Sequence
from typing import Final

from agent.push.digest import Digest
from agent.report.contract import (
    AGE,
    FOREIGN_MEMORY,
    FOREIGN_UTILIZATION,
    MAX_DEVICE_PROCESSES,
    MAX_NAME,
    MAX_PROCESSES,
    MEAN,
    MEAN_SQUARE,
    XID_AGE,
    Device,
    ForeignProcess,
    Holders,
    Layout,
    LayoutDevice,
    Place,
    Process,
    Report,
    Update,
)
from extender.core.devices.readings import Signal
from extender.runtime.terminal_escapes import plain_text

MEAN_SECONDS: Final = 5.0
"""Minimum period of a mean; each mean counts as one reading in the extender's window."""
SHARES_SECONDS: Final = 60.0
"""Interval of memory shares of shared devices; the extender's advice needs no more."""

_SIGNALS: Final = tuple(signal.value for signal in Signal)
_REST: Final = (AGE, XID_AGE, FOREIGN_MEMORY, FOREIGN_UTILIZATION, MEAN, MEAN_SQUARE)

_MEMORY_STEP: Final = 256 << 20
"""Memory is rounded up to this step, so that small changes are not reported again."""

_CONTAINER_ID: Final = re.compile(r"([0-9a-f]{12})[0-9a-f]{52}")
"""Ids are shortened as `docker ps` and `crictl ps` show them."""

_Number = float | None


class UpdateBuilder:
    """Builds the updates of one connection; omits what the connection has already carried."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._holders: Holders | None = None
        self._foreign: tuple[ForeignProcess, ...] = ()
        self._means_at = -math.inf
        self._shares_at = -math.inf
        self._totals: dict[tuple[str, str], tuple[int, float, float]] = {}

    def build(self, report: Report, digest: Digest, *, is_news: bool, sent_at: float) -> Update:
        """Build the update for a report; the caller must send it, and in this order.

        Args:
            report: the report.
            digest: digest of the report.
            is_news: whether the report may change a decision.
            sent_at: time of sending, seconds since the epoch.
        """
        names, columns = self._columns(report, digest)
        layout = Layout(
            driver_version=report.driver_version,
            topology_policy=report.topology_policy,
            topology_scope=report.topology_scope,
            devices=tuple(map(_part, report.devices)),
            rows=names,
        )
        holders = Holders(pods=tuple(map(_pods, report.devices)))
        foreign = _foreign_processes(report.devices)
        known = self._foreign if layout == self._layout else ()
        update = Update(
            node=report.node,
            started_at=report.started_at,
            sequence=report.sequence,
            at=report.at,
            sent_at=sent_at,
            is_news=is_news,
            layout=None if layout == self._layout else layout,
            holders=None if holders == self._holders else holders,
            values=_pack(columns),
            shares=self._shares(report),
            foreign=None if foreign == known else foreign,
        )
        self._layout, self._holders, self._foreign = layout, holders, foreign
        return update

    def _shares(self, report: Report) -> tuple[tuple[int, str, int], ...]:
        """Return (device number, pod UID, memory in bytes) for shared devices; () until due."""
        if 0 <= report.at - self._shares_at < SHARES_SECONDS:  # also due if the clock was set back
            return ()
        self._shares_at = report.at
        return tuple(
            (place, uid, count)
            for place, device in enumerate(report.devices)
            if len(shares := _shares_of(device)) > 1
            for uid, count in sorted(shares.items())
        )

    def _columns(
        self, report: Report, digest: Digest
    ) -> tuple[tuple[str, ...], list[Sequence[_Number]]]:
        """Return the names and columns of all rows that have values."""
        devices = report.devices
        means = self._means(report, digest)
        foreign = [device.foreign for device in devices]
        rest: tuple[Sequence[_Number], ...] = (
            [device.age_seconds for device in devices],
            [device.xid_age_seconds for device in devices],
            [None if one is None else one.memory_bytes for one in foreign],
            [None if one is None else one.utilization_ratio for one in foreign],
            [mean for mean, _ in means],
            [square for _, square in means],
        )
        names = tuple(name for name in _SIGNALS if name in report.signals)
        return (*names, *_REST), [*(report.signals[name] for name in names), *rest]

    def _means(self, report: Report, digest: Digest) -> list[tuple[_Number, _Number]]:
        """Return each device's mean activity since the last sent mean, and the mean square."""
        if 0 <= report.at - self._means_at < MEAN_SECONDS:  # likewise
            return [(None, None)] * len(report.devices)
        means: list[tuple[_Number, _Number]] = []
        for device in report.devices:
            count, total, square = digest.totals.get(device.key, (0, 0.0, 0.0))
            passes, before, squares = self._totals.get(device.key, (0, 0.0, 0.0))
            if not self._totals or count <= passes:
                means.append((None, None))  # no mean over the time before this connection
                continue
            new = count - passes
            means.append(((total - before) / new, max((square - squares) / new, 0.0)))
        self._totals, self._means_at = dict(digest.totals), report.at
        return means


def _shares_of(device: Device) -> dict[str, int]:
    """Return the memory in bytes of each pod on the device, by UID; {} if it is not fully known.

    A pod that holds a share and has no process on the device uses none of its memory.
    """
    used_by = device.used_by
    if used_by is None or any(
        one.place is Place.UNKNOWN or (one.place is Place.POD and not one.uid) for one in used_by
    ):
        return {}
    shares = {one.uid: 0 for one in device.allocated_to or () if one.uid}
    for one in used_by:
        if one.place is not Place.POD:
            continue
        if one.memory_bytes is None:
            return {}
        shares[one.uid] = shares.get(one.uid, 0) + one.memory_bytes
    return shares


def _part(device: Device) -> LayoutDevice:
    return LayoutDevice(
        uuid=device.uuid,
        gpu_instance_id=device.gpu_instance_id,
        index=device.index,
        model=device.model,
        mig_profile=device.mig_profile,
        replicas=device.replicas,
        numa_node=device.numa_node,
        nvlink_peers=device.nvlink_peers,
    )


def _pods(device: Device) -> tuple[tuple[str, str, str], ...] | None:
    """Return the pods on a device: its holders, else the pods of its processes; None if unknown.

    Processes do not show holders without processes, and processes of unknown location may belong to
    any pod.
    """
    if device.allocated_to is not None:
        found = {(one.namespace, one.pod, one.uid) for one in device.allocated_to}
        return tuple(sorted(found))
    used_by = device.used_by
    if used_by is None or any(one.place is Place.UNKNOWN for one in used_by):
        return None
    inside = [one for one in used_by if one.place is Place.POD]
    if not inside or not all(one.pod for one in inside):
        return None
    return tuple(sorted({(one.namespace, one.pod, one.uid) for one in inside}))


def _pack(columns: Sequence[Sequence[_Number]]) -> bytes:
    values = [math.nan if value is None else value for column in columns for value in column]
    return struct.pack(f"<{len(values)}d", *values)


def _foreign_processes(devices: Sequence[Device]) -> tuple[ForeignProcess, ...]:
    """Return the processes that use devices without holding them, by device, most memory first.

    If there are too many, each device keeps its largest ones.
    """
    ranked: list[tuple[int, ForeignProcess]] = []
    for number, device in enumerate(devices):
        pids = frozenset(() if device.foreign is None else device.foreign.pids)
        if not pids:
            continue
        inside = [one for one in device.used_by or () if one.pid in pids]
        inside.sort(key=lambda one: (-(one.memory_bytes or 0), one.pid))
        ranked += enumerate(_named(number, one) for one in inside[:MAX_DEVICE_PROCESSES])
    ranked.sort(key=lambda one: one[0])  # stable: the largest process of each device comes first
    return tuple(sorted((one for _, one in ranked[:MAX_PROCESSES]), key=lambda one: one.device))


def _named(device: int, process: Process) -> ForeignProcess:
    name = f"{process.namespace}/{process.pod}" if process.pod else process.uid
    memory = process.memory_bytes
    return ForeignProcess(
        device=device,
        pid=process.pid,
        name=plain_text(process.name, MAX_NAME),
        memory_bytes=None if memory is None else -(-memory // _MEMORY_STEP) * _MEMORY_STEP,
        started_at=process.started_at,
        pod=name if process.place is Place.POD else "",
        container=plain_text(_CONTAINER_ID.sub(r"\1", process.container), MAX_NAME),
    )
