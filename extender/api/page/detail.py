"""Detail of one node for the page: the record of /v1/nodes, and every reading with its source."""

from dataclasses import asdict
from typing import Final

from extender.core.decision.signals import OTHER_ACTIVITY, UTILIZATION
from extender.core.devices.readings import Signal
from extender.core.devices.thermal_stress import SLOWDOWN_WORDS
from extender.core.nodes.snapshot import Snapshot
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.insight.last_hour import rows_of
from extender.insight.views import Json, node_views

SHOWN: Final = (
    *UTILIZATION,
    *OTHER_ACTIVITY,
    Signal.MEMORY_USED,
    Signal.MEMORY_FREE,
    Signal.POWER,
    Signal.POWER_LIMIT,
    Signal.TEMPERATURE,
    Signal.MEMORY_TEMPERATURE,
)
"""Signals whose raw readings are shown."""

PIECE_DEVICES: Final = 2
"""Devices to look up between two yields to the event loop."""


def throttling(reasons: float | None) -> list[str] | None:
    """Return the reasons that slow a card down, None if unknown.

    Example:
        >>> throttling(0x44), throttling(0x1), throttling(None)
        (['software power cap', 'hardware thermal slowdown'], [], None)
    """
    if reasons is None:
        return None
    return [text for bit, text in SLOWDOWN_WORDS.items() if int(reasons) & bit]


def node_detail_in_steps(fleet: Fleet, name: str) -> Steps[Json | None]:
    """Build a node's record with its devices' readings, in steps; None for an unknown node."""
    if name not in fleet.nodes:
        return None
    snapshot = fleet.snapshot()
    (view,) = node_views(fleet, snapshot, [name], gpus=True)
    record = fleet.nodes[name]
    view["labels"] = dict(record.labels)
    view["taints"] = [asdict(taint) for taint in record.taints]
    gpus = view["gpus"]
    assert isinstance(gpus, list)  # noqa: S101 - asked for above
    rows = rows_of(fleet, snapshot, name)
    for at, (gpu, row) in enumerate(zip(gpus, rows, strict=True)):
        if at % PIECE_DEVICES == 0:
            yield
        gpu["readings"] = _readings(fleet, snapshot, row)
        gpu["throttling"] = throttling(fleet.store.value(Signal.CLOCK_EVENT_REASONS, row))
    return view


def _readings(fleet: Fleet, snapshot: Snapshot, row: int) -> list[Json]:
    """Return a device's latest readings, one for each signal."""
    readings: list[Json] = []
    for signal in SHOWN:
        value, by = fleet.store.value(signal, row), fleet.store.told([signal], row)
        if value is not None and by is not None:
            readings.append(
                {
                    "signal": signal.value,
                    "value": value,
                    "source": by[0],
                    "age_seconds": max(snapshot.at - by[1], 0.0),
                }
            )
    return readings
