"""Copy the reported values of devices in a compact form, because thousands are stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.decision.signals import MEASURED
from extender.core.devices.readings import Signal
from extender.core.nodes.snapshot import Rows
from extender.fleet.columns import DeviceColumns
from extender.fleet.latest_values import MEMORY_SIGNALS, ReportedSignals

_KEPT: Final = (
    *MEASURED,
    Signal.TEMPERATURE,
    Signal.MEMORY_TEMPERATURE,
    Signal.CLOCK_EVENT_REASONS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedValues:
    """Last reported values of some devices.

    Attributes:
        signals: signals of the rows of `values`.
        values: one row per signal, one column per device, seven digits; NaN if missing.
        limit_watts: power limit of each device, NaN if unknown.
        rest_watts: power draw of each device at rest, NaN if unknown.
        memory: source and time of the memory signals.
        heat: source and time of the temperature.
        clocks: source and time of the clock event reasons.
    """

    signals: tuple[Signal, ...]
    values: npt.NDArray[np.float32]
    limit_watts: npt.NDArray[np.float32]
    rest_watts: npt.NDArray[np.float32]
    memory: ReportedSignals
    heat: ReportedSignals
    clocks: ReportedSignals

    def reading(self, at: int) -> dict[Signal, float]:
        """Return the values of the device at a position; missing ones are left out."""
        values = zip(self.signals, self.values[:, at].tolist(), strict=True)
        limit = float(self.limit_watts[at])
        known = {signal: value for signal, value in values if not np.isnan(value)}
        return known if np.isnan(limit) else {**known, Signal.POWER_LIMIT: limit}

    def sources(self, at: int) -> Mapping[str, tuple[str, float] | None]:
        """Return source and time of a device's memory, temperature and throttling."""
        signals = {"memory": self.memory, "temperature": self.heat, "throttling": self.clocks}
        return {name: part.of(at) for name, part in signals.items()}


def reported_values_of(
    columns: DeviceColumns, rows: Rows, sources: Sequence[str]
) -> ReportedValues:
    """Copy the reported values of the given devices.

    Args:
        columns: the device columns.
        rows: rows of the devices.
        sources: names of the sources, by number.
    """
    latest = columns.latest
    known = latest.columns
    signals = tuple(signal for signal in _KEPT if signal in known)
    values = np.empty((len(signals), len(rows)), dtype=np.float32)
    for place, signal in enumerate(signals):
        values[place] = known[signal].take(rows)
    limit = columns.numbers["board_watts"].take(rows)
    if Signal.POWER_LIMIT in known:
        reported = known[Signal.POWER_LIMIT].take(rows)
        limit = np.where(reported > 0, reported, limit)
    return ReportedValues(
        signals=signals,
        values=values,
        limit_watts=limit.astype(np.float32),
        rest_watts=columns.numbers["rest_watts"].take(rows).astype(np.float32),
        memory=latest.reported_signals(MEMORY_SIGNALS, rows, sources),
        heat=latest.reported_signals((Signal.TEMPERATURE,), rows, sources),
        clocks=latest.reported_signals((Signal.CLOCK_EVENT_REASONS,), rows, sources),
    )
