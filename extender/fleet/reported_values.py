"""What was last told of some devices, and who told it, as it was: small, for thousands are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.decision.signals import MEASURED
from extender.core.devices.readings import Signal
from extender.core.nodes.snapshot import Rows
from extender.fleet.columns import DeviceColumns
from extender.fleet.latest_values import FILLING, ReportedSignals

_KEPT: Final = (
    *MEASURED,
    Signal.TEMPERATURE,
    Signal.MEMORY_TEMPERATURE,
    Signal.CLOCK_EVENT_REASONS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedValues:
    """What was last told of some devices.

    Attributes:
        signals: what of.
        values: a row for each of them, a column for each device; NaN where missing. Seven digits
            are kept.
        limit_watts: power limit of each device, NaN where unknown.
        rest_watts: what each was seen to draw at rest, likewise.
        memory: who told their memory, and when it was measured.
        heat: likewise of their temperature.
        clocks: likewise of what holds their clocks back.
    """

    signals: tuple[Signal, ...]
    values: npt.NDArray[np.float32]
    limit_watts: npt.NDArray[np.float32]
    rest_watts: npt.NDArray[np.float32]
    memory: ReportedSignals
    heat: ReportedSignals
    clocks: ReportedSignals

    def reading(self, at: int) -> dict[Signal, float]:
        """Return what was told of a device by its place; without what is missing."""
        told = zip(self.signals, self.values[:, at].tolist(), strict=True)
        limit = float(self.limit_watts[at])
        known = {signal: value for signal, value in told if not np.isnan(value)}
        return known if np.isnan(limit) else {**known, Signal.POWER_LIMIT: limit}

    def told(self, at: int) -> Mapping[str, tuple[str, float] | None]:
        """Return who told memory, temperature and throttling of a device, and when, None where."""
        words = {"memory": self.memory, "temperature": self.heat, "throttling": self.clocks}
        return {name: word.of(at) for name, word in words.items()}


def reported_values_of(
    columns: DeviceColumns, rows: Rows, sources: Sequence[str]
) -> ReportedValues:
    """Keep what is told of some devices; `sources` are the names of who tells it, by number."""
    latest = columns.latest
    known = latest.columns
    signals = tuple(signal for signal in _KEPT if signal in known)
    values = np.empty((len(signals), len(rows)), dtype=np.float32)
    for place, signal in enumerate(signals):
        values[place] = known[signal].take(rows)
    limit = columns.numbers["board_watts"].take(rows)
    if Signal.POWER_LIMIT in known:
        told = known[Signal.POWER_LIMIT].take(rows)
        limit = np.where(told > 0, told, limit)
    return ReportedValues(
        signals=signals,
        values=values,
        limit_watts=limit.astype(np.float32),
        rest_watts=columns.numbers["rest_watts"].take(rows).astype(np.float32),
        memory=latest.word(FILLING, rows, sources),
        heat=latest.word((Signal.TEMPERATURE,), rows, sources),
        clocks=latest.word((Signal.CLOCK_EVENT_REASONS,), rows, sources),
    )
