"""History of a node's devices over the last hour, from Prometheus or else from our own samples."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from extender.core.devices.readings import DeviceInfo, DeviceKey
from extender.core.nodes.snapshot import Snapshot
from extender.fleet.fleet import Fleet
from extender.insight.short_memory import ShortMemory
from extender.insight.views import Json, order_of


def rows_of(fleet: Fleet, snapshot: Snapshot, name: str) -> list[int]:
    """Return the telemetry rows of a node's devices, in the order of `node_views`."""
    rows = [
        row
        for pool in snapshot.pools.values()
        if name in pool.row_of
        for row in pool.rows[pool.row_of[name]].slots
    ]
    return sorted(rows, key=lambda row: order_of(fleet.store.info(row) or NOTHING))


NOTHING: Final = DeviceInfo(node="", uuid="")


_KEPT_SECONDS: Final = 30.0
_KEPT_NODES: Final = 64

Values = list[float | None]


class _Hour(Protocol):
    """Result of a Prometheus query; see `sources.prometheus.plots`."""

    @property
    def times(self) -> tuple[float, ...]:
        """Sample times, seconds since the epoch."""

    @property
    def activity(self) -> Mapping[DeviceKey, Values]:
        """Activity ratios by device."""

    @property
    def memory_bytes(self) -> Mapping[DeviceKey, Values]:
        """Used memory by device."""

    @property
    def error(self) -> str:
        """Reason why there is no data, "" if there is."""


class Plots(Protocol):
    """Interface to Prometheus range queries."""

    @property
    def is_configured(self) -> bool:
        """Whether a Prometheus is configured."""

    async def hour(self, devices: Sequence[DeviceKey]) -> _Hour:
        """Query the last hour of some devices."""

    async def past(self, devices: Sequence[DeviceKey], *, seconds: float, steps: int) -> _Hour:
        """Query a longer period of some devices, with a given number of samples."""


class LastHour:
    """Returns the history of a node's devices.

    Args:
        fleet: state of the fleet.
        memory: our own history.
        plots: queries Prometheus; None to use our own history.
    """

    def __init__(self, fleet: Fleet, memory: ShortMemory, plots: Plots | None) -> None:
        self._fleet = fleet
        self._memory = memory
        self._plots = plots
        self._cache: OrderedDict[str, tuple[float, Json]] = OrderedDict()

    async def of(self, snapshot: Snapshot, node: str) -> Json:
        """Return the last hour of a node's devices, in the page's order."""
        rows = rows_of(self._fleet, snapshot, node)
        if self._plots is None or not self._plots.is_configured:
            return self._short(rows)
        cached = self._cache.get(node)
        if cached is not None and 0 <= snapshot.at - cached[0] < _KEPT_SECONDS:
            return cached[1]
        infos = [self._fleet.store.info(row) or NOTHING for row in rows]
        totals = snapshot.telemetry.memory_total_bytes[rows].tolist()
        hour = await self._plots.hour([info.key for info in infos])
        if not any(any(one is not None for one in line) for line in hour.activity.values()):
            return self._short(rows) | {"note": hour.error}
        blank: Values = [None] * len(hour.times)
        history: Json = {
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
        self._cache[node] = (snapshot.at, history)
        self._cache.move_to_end(node)
        if len(self._cache) > _KEPT_NODES:
            self._cache.popitem(last=False)
        return history

    def _short(self, rows: Sequence[int]) -> Json:
        times, columns = self._memory.of(rows)
        return {"source": "memory", "times": times, "series": columns}


def _shares(values: Values, total: float) -> Values:
    return [None if one is None or total <= 0 else one / total for one in values]
