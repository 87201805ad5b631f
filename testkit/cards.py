"""Telemetry of cards, for tests that set every card of a node at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from extender.core.devices.readings import Column, DeviceInfo, DeviceKey, Readings, Signal

CARD_BYTES: Final = 80 << 30
HOUR: Final = 3600.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Values of one card; None is missing. `signs` are further signals."""

    busy: float | None = 0.0
    used_gib: float | None = 0.0
    xid: float | None = 0.0
    tenants: tuple[str, ...] = ()
    age: float = 0.0
    signs: Mapping[Signal, float] = field(default_factory=dict)


IDLE: Final = Gpu()
BUSY: Final = Gpu(busy=0.9, used_gib=60.0)


def card(*tenants: str, busy: float = 0.0, used_gib: float = 0.0) -> Gpu:
    """Build the values of a card that the given pods hold."""
    return Gpu(busy=busy, used_gib=used_gib, tenants=tenants)


def readings_of(cards: Mapping[str, Sequence[Gpu]], *, at: float, source: str) -> Readings:
    """Return one reading of every card, by node."""
    placed = [
        (
            DeviceInfo(
                node=node,
                uuid=f"GPU-{node}-{index}",
                index=index,
                model="NVIDIA H100 80GB HBM3",
                driver_version="580.95.05",
            ),
            gpu,
        )
        for node, gpus in cards.items()
        for index, gpu in enumerate(gpus)
    ]
    shown = [gpu for _, gpu in placed]
    tenants: dict[DeviceKey, tuple[str, ...]] = {
        info.key: gpu.tenants for info, gpu in placed if gpu.tenants
    }
    used = [None if gpu.used_gib is None else gpu.used_gib * (1 << 30) for gpu in shown]
    return Readings(
        source=source,
        at=at,
        devices=tuple(info for info, _ in placed),
        columns={
            Signal.GPU_UTILIZATION: _column([gpu.busy for gpu in shown]),
            Signal.MEMORY_USED: _column(used),
            Signal.MEMORY_TOTAL: _column([float(CARD_BYTES)] * len(shown)),
            Signal.XID: _column([gpu.xid for gpu in shown]),
            **{
                signal: _column([gpu.signs.get(signal) for gpu in shown])
                for signal in dict.fromkeys(one for gpu in shown for one in gpu.signs)
            },
        },
        measured_at=_column([at - gpu.age for gpu in shown]),
        tenants=tenants,
        unmatched_series=3,
        unmatched_example='{Hostname="gone"}',
    )


def _column(values: Sequence[float | None]) -> Column:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
