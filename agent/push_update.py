"""Build the updates of one connection; leave out what the connection has already carried."""

import math
import struct
from collections.abc import Sequence
from typing import Final

from agent.push_digest import Digest
from agent.report import (
    AGE,
    FOREIGN_MEMORY,
    FOREIGN_UTILIZATION,
    MEAN,
    MEAN_SQUARE,
    XID_AGE,
    Device,
    Holders,
    Layout,
    Part,
    Place,
    Report,
    Update,
)
from extender.core.devices.readings import Signal

MEAN_SECONDS: Final = 5.0
"""Minimum period of a mean; each mean counts as one reading in the extender's window."""
SHARES_SECONDS: Final = 60.0
"""Interval of memory shares of shared devices; the extender's advice needs no more."""

_SIGNALS: Final = tuple(signal.value for signal in Signal)
_REST: Final = (AGE, XID_AGE, FOREIGN_MEMORY, FOREIGN_UTILIZATION, MEAN, MEAN_SQUARE)

Number = float | None


class UpdateBuilder:
    """Builds updates for one connection."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._holders: Holders | None = None
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
            devices=tuple(map(_part, report.devices)),
            rows=names,
        )
        holders = Holders(pods=tuple(map(_pods, report.devices)))
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
        )
        self._layout, self._holders = layout, holders
        return update

    def _shares(self, report: Report) -> tuple[tuple[int, str, int], ...]:
        """Return (device number, pod UID, memory in bytes) of shared devices when due, else ()."""
        if report.at - self._shares_at < SHARES_SECONDS:
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
    ) -> tuple[tuple[str, ...], list[Sequence[Number]]]:
        """Return the names and columns of all rows that have values."""
        devices = report.devices
        means = self._means(report, digest)
        foreign = [device.foreign for device in devices]
        rest: tuple[Sequence[Number], ...] = (
            [device.age_seconds for device in devices],
            [device.xid_age_seconds for device in devices],
            [None if one is None else one.memory_bytes for one in foreign],
            [None if one is None else one.utilization_ratio for one in foreign],
            [mean for mean, _ in means],
            [square for _, square in means],
        )
        names = tuple(name for name in _SIGNALS if name in report.signals)
        return (*names, *_REST), [*(report.signals[name] for name in names), *rest]

    def _means(self, report: Report, digest: Digest) -> list[tuple[Number, Number]]:
        """Return each device's mean activity since the last sent mean, and the mean square."""
        if report.at - self._means_at < MEAN_SECONDS:
            return [(None, None)] * len(report.devices)
        means: list[tuple[Number, Number]] = []
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


def _part(device: Device) -> Part:
    return Part(
        uuid=device.uuid,
        gpu_instance_id=device.gpu_instance_id,
        index=device.index,
        model=device.model,
        mig_profile=device.mig_profile,
        replicas=device.replicas,
    )


def _pods(device: Device) -> tuple[tuple[str, str, str], ...] | None:
    """Return the pods on a device: its holders, else the pods of its processes; None if unknown.

    Processes show no holder that runs none, and processes of unknown location may belong to any
    pod.
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


def _pack(columns: Sequence[Sequence[Number]]) -> bytes:
    values = [math.nan if value is None else value for column in columns for value in column]
    return struct.pack(f"<{len(values)}d", *values)
