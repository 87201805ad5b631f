"""The last hour of a node's devices: from Prometheus where it tells, else from our own memory."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from extender.core.readings import DeviceKey
from extender.core.snapshot import Snapshot
from extender.fleet.fleet import Fleet
from extender.observe.page.detail import rows_of
from extender.observe.page.history import ShortMemory
from extender.observe.page.roster import NOTHING
from extender.observe.views import Json

KEPT_SECONDS: Final = 30.0
KEPT_NODES: Final = 64

Values = list[float | None]


class Hour(Protocol):
    """The last hour as Prometheus tells it; see `sources.prometheus_plots`."""

    @property
    def times(self) -> tuple[float, ...]:
        """Time of each step."""

    @property
    def activity(self) -> Mapping[DeviceKey, Values]:
        """Ratios."""

    @property
    def memory_bytes(self) -> Mapping[DeviceKey, Values]:
        """In use."""

    @property
    def error(self) -> str:
        """Why there is nothing, "" where there is."""


class Plots(Protocol):
    """Who asks Prometheus."""

    @property
    def is_there(self) -> bool:
        """Whether there is a Prometheus."""

    async def hour(self, devices: Sequence[DeviceKey]) -> Hour:
        """Return the last hour of some devices."""

    async def past(self, devices: Sequence[DeviceKey], *, seconds: float, steps: int) -> Hour:
        """Return likewise what they were like for so long, at so many times."""


class Past:
    """Tells the last hour of a node.

    Args:
        fleet: the fleet.
        memory: our own.
        plots: asks Prometheus; None for never.
    """

    def __init__(self, fleet: Fleet, memory: ShortMemory, plots: Plots | None) -> None:
        self._fleet = fleet
        self._memory = memory
        self._plots = plots
        self._kept: OrderedDict[str, tuple[float, Json]] = OrderedDict()

    async def of(self, snapshot: Snapshot, node: str) -> Json:
        """Return the last hour of a node's devices, in the page's order of them."""
        rows = rows_of(self._fleet, snapshot, node)
        if self._plots is None or not self._plots.is_there:
            return self._short(rows)
        kept = self._kept.get(node)
        if kept is not None and 0 <= snapshot.at - kept[0] < KEPT_SECONDS:
            return kept[1]
        infos = [self._fleet.store.info(row) or NOTHING for row in rows]
        totals = snapshot.telemetry.memory_total_bytes[rows].tolist()
        hour = await self._plots.hour([info.key for info in infos])
        if not any(any(one is not None for one in line) for line in hour.activity.values()):
            return self._short(rows) | {"note": hour.error}
        blank: Values = [None] * len(hour.times)
        told: Json = {
            "source": "prometheus",
            "times": hour.times,
            "series": {
                "activity": [hour.activity.get(info.key, blank) for info in infos],
                "memory": [
                    _shares(hour.memory_bytes.get(info.key, blank), total)
                    for info, total in zip(infos, totals, strict=True)
                ],
            },
        }
        self._kept[node] = (snapshot.at, told)
        self._kept.move_to_end(node)
        if len(self._kept) > KEPT_NODES:
            self._kept.popitem(last=False)
        return told

    def _short(self, rows: Sequence[int]) -> Json:
        times, columns = self._memory.of(rows)
        return {"source": "memory", "times": times, "series": columns}


def _shares(values: Values, total: float) -> Values:
    return [None if one is None or total <= 0 else one / total for one in values]
