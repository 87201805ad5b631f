"""Sum GPU-hours and costs by group, for pods that hold GPUs now and for all pods of a period.

The record of past hours includes pods that have ended.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from heapq import nsmallest
from typing import Final, NamedTuple

import msgspec
from aiohttp import web

from extender.answers import routes
from extender.answers.holding import CostGroup, Costs, UsageFigures, UsageGroup
from extender.answers.holding import Usage as UsageAnswer
from extender.core.devices.gpu_models import model_name, short_model
from extender.fleet.fleet import Fleet
from extender.insight.holder_sums import HeldDevice, Holder, Sums
from extender.insight.holders import PIECE_PODS, PIECE_SHOWN, Holders
from extender.runtime.metrics import Metrics
from extender.server.json_api import (
    QueryError,
    chunks,
    json_answer,
    moment,
    read_boolean,
    read_number,
    serve,
    stream_answer,
)
from extender.server.redaction import sees

logger = logging.getLogger(__name__)

_SWEEP_SECONDS: Final = 60.0
_HOUR: Final = 3600
_KEPT_HOURS: Final = routes.USAGE.number("since").high // _HOUR + 1
_MAX_GROUPS: Final = 2000
"""Largest number of groups in the metrics; further ones count as `other`."""
_OTHER: Final = "other"
_NONE: Final = "none"
_GPU: Final = "gpu"
_MIG: Final = "mig"


class _Group(NamedTuple):
    """Pods whose usage is recorded together.

    Attributes:
        owner_kind: kind of their controller, `none` without one.
        model: full name of their GPUs' model; the metrics have the short one.
    """

    namespace: str
    owner_kind: str
    model: str

    def shortened(self) -> "_Group":
        """Return the group with the short name of the model, for the labels of metrics."""
        return self._replace(model=short_model(self.model))


@dataclass(slots=True)
class _Usage:
    """Card-hours and costs; `cost` and `cost_idle` exclude pods without a price."""

    gpu_hours: float = 0.0
    gpu_hours_idle: float = 0.0
    cost: float = 0.0
    cost_idle: float = 0.0

    def add(self, other: "_Usage") -> None:
        """Add another usage."""
        self.gpu_hours += other.gpu_hours
        self.gpu_hours_idle += other.gpu_hours_idle
        self.cost += other.cost
        self.cost_idle += other.cost_idle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rate:
    """Use of a pod per second since a sweep.

    Attributes:
        idle_share: share of its devices that are idle.
        price: price of a card-hour, None if unknown.
    """

    group: _Group
    cards: float
    idle_share: float
    price: float | None

    def over(self, seconds: float) -> _Usage:
        """Return the usage over some seconds."""
        hours = self.cards * seconds / _HOUR
        price = self.price or 0.0
        return _Usage(
            gpu_hours=hours,
            gpu_hours_idle=hours * self.idle_share,
            cost=hours * price,
            cost_idle=hours * self.idle_share * price,
        )


@dataclass(slots=True)
class _Hour:
    """Usage by group in one hour; `number` counts hours since the epoch."""

    number: int
    groups: dict[_Group, _Usage] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    """Devices of one kind that the pods of a group hold: all devices, and the idle devices."""

    all: int = 0
    idle: int = 0
    hour_idle: int = 0

    def add(self, count: int, idle: Iterable[HeldDevice]) -> None:
        """Add one pod's devices."""
        self.all += count
        for device in idle:
            self.idle += 1
            self.hour_idle += device.idle_seconds >= _HOUR


class UsageRecord:
    """Adds up usage once a minute; an ended pod's last period counts up to its end.

    Args:
        holders: finds the pods that hold GPUs.
        clock: seconds since the epoch.
        metrics: counters to increase; None for none.
    """

    def __init__(
        self,
        fleet: Fleet,
        holders: Holders,
        clock: Callable[[], float],
        metrics: Metrics | None = None,
    ) -> None:
        self.began_at = clock()
        self._fleet = fleet
        self._holders = holders
        self._clock = clock
        self._metrics = metrics
        self._swept_at = self.began_at
        self._rates: dict[str, _Rate] = {}
        self._hours: deque[_Hour] = deque(maxlen=_KEPT_HOURS)
        self._known: set[_Group] = set()

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/usage."""
        return [serve(routes.USAGE, self._answer)]

    async def run(self) -> None:
        """Add up the usage of all pods periodically until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                await self.sweep()
            except Exception:  # a fault here must not stop the extender
                logger.exception("internal error", extra={"verb": "usage"})

    async def sweep(self) -> None:
        """Add the usage of all pods since the last sweep."""
        now, before = self._clock(), self._swept_at
        if now <= before:  # the clock was set back
            self._swept_at = now
            return
        found = await self._holders.find(0.0)
        hour = self._hour(now)
        rates: dict[str, _Rate] = {}
        held: dict[tuple[_Group, str], _Held] = {}
        for some in chunks(found, PIECE_PODS):
            for holder in some:
                rate = self._rate(holder, now - before)
                rates[holder.record.uid] = rate
                for kind, count in ((_GPU, holder.gpus), (_MIG, holder.instances)):
                    if count:
                        idle = [one for one in holder.idle if one.is_instance == (kind == _MIG)]
                        key = (rate.group.shortened(), kind)
                        held.setdefault(key, _Held()).add(count, idle)
                self._add(hour, rate, min(now - before, holder.held_seconds))
            await asyncio.sleep(0)
        for uid, rate in self._rates.items():
            if uid not in rates:
                self._add(hour, rate, self._last_seconds(uid, before, now))
        self._rates, self._swept_at = rates, now
        self._export_held(held)

    def _export_held(self, held: Mapping[tuple[_Group, str], _Held]) -> None:
        """Replace the gauges, so that groups without pods lose their series."""
        if self._metrics is None:
            return
        gauges = (
            self._metrics.held_gpus,
            self._metrics.held_idle_gpus,
            self._metrics.held_hour_idle_gpus,
        )
        for gauge in gauges:
            gauge.clear()
        for (group, kind), sums in held.items():
            for gauge, count in zip(gauges, (sums.all, sums.idle, sums.hour_idle), strict=True):
                gauge.labels(*group, kind).set(count)

    def _rate(self, holder: Holder, seconds: float) -> _Rate:
        record = holder.record
        idle = sum(device.idle_seconds >= seconds for device in holder.devices)
        kind = record.owner.partition(" ")[0] or _NONE
        group = _Group(record.namespace, kind, model_name(holder.model) or _OTHER)
        if group not in self._known and len(self._known) >= _MAX_GROUPS:
            group = _Group(_OTHER, _OTHER, _OTHER)
        self._known.add(group)
        return _Rate(
            group=group,
            cards=holder.cards,
            idle_share=idle / max(holder.size, 1),
            price=holder.price,
        )

    def _last_seconds(self, uid: str, before: float, now: float) -> float:
        """Return the seconds for which an ended pod held its GPUs after the last sweep."""
        record = self._fleet.pods.get(uid)
        ended_at = record.ended_at if record is not None else None
        # If the time of its end is unknown, the middle of the interval has the smallest error on
        # average.
        return min(max((ended_at or (before + now) / 2) - before, 0.0), now - before)

    def _hour(self, now: float) -> _Hour:
        number = int(now // _HOUR)
        if not self._hours or self._hours[-1].number < number:
            self._hours.append(_Hour(number))
        return self._hours[-1]

    def _add(self, hour: _Hour, rate: _Rate, seconds: float) -> None:
        used = rate.over(seconds)
        hour.groups.setdefault(rate.group, _Usage()).add(used)
        if self._metrics is None:
            return
        for use, hours, cost in (
            ("idle", used.gpu_hours_idle, used.cost_idle),
            ("used", used.gpu_hours - used.gpu_hours_idle, used.cost - used.cost_idle),
        ):
            labels = (*rate.group.shortened(), use)
            self._metrics.gpu_hours.labels(*labels).inc(max(hours, 0.0))
            if rate.price is not None:
                self._metrics.gpu_cost.labels(*labels).inc(max(cost, 0.0))

    def since(self, seconds: float) -> Mapping[_Group, _Usage]:
        """Return the usage by group since this many seconds ago, rounded down to a whole hour."""
        first = int((self._clock() - seconds) // _HOUR)
        found: dict[_Group, _Usage] = {}
        for hour in self._hours:
            if hour.number >= first:
                for group, usage in hour.groups.items():
                    found.setdefault(group, _Usage()).add(usage)
        return found

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        seconds = read_number(request.query, routes.USAGE, "since")
        namespace = request.query.get("namespace")
        first = max(self.began_at, (self._clock() - seconds) // _HOUR * _HOUR)
        seen = [
            (group, usage)
            for group, usage in self.since(float(seconds)).items()
            if sees(group.namespace) and namespace in {None, group.namespace}
        ]
        seen.sort(key=lambda one: (-one[1].gpu_hours_idle, one[0]))
        total = _Usage()
        for _, usage in seen:
            total.add(usage)
        return json_answer(
            UsageAnswer(
                at=moment(self._clock()),
                since=moment(first),
                is_priced=bool(self._holders.prices),
                usage=[UsageGroup(**group._asdict(), **asdict(usage)) for group, usage in seen],
                sums=UsageFigures(**asdict(total)),
            )
        )


class _By(StrEnum):
    """Grouping of costs."""

    POD = "pod"
    OWNER = "owner"
    NAMESPACE = "namespace"


@dataclass(slots=True, kw_only=True)
class _GroupCosts:
    """Sums over the pods of one group.

    Attributes:
        name: name of the pod or owner; "" if the pods have no owner, or if the group is a
            namespace.
    """

    namespace: str
    name: str
    sums: Sums = field(default_factory=Sums)

    @property
    def rank(self) -> tuple[float, float, str, str]:
        """Sort key: highest idle cost first, then most idle GPU-hours."""
        return -self.sums.cost_idle, -self.sums.gpu_hours_idle, self.namespace, self.name


class CostRoutes:
    """Handler of /v1/costs; pods that the caller may not read are excluded from all sums.

    Args:
        holders: finds pods that hold GPUs.
        clock: seconds since the epoch.
    """

    def __init__(self, holders: Holders, clock: Callable[[], float]) -> None:
        self._holders = holders
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/costs."""
        return [serve(routes.COSTS, self._answer)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        by = _read_by(query.get("by", _By.OWNER))
        namespace = query.get("namespace")
        limit = read_number(query, routes.COSTS, "limit")
        seconds = float(read_number(query, routes.COSTS, "idle_for"))
        found = await self._holders.find(seconds, namespace, is_any=read_boolean(query, "some"))
        groups, total, hidden = await _grouped(found, by)
        shown = await _first(groups, limit)
        answer = Costs(
            costs=[],
            at=moment(self._clock()),
            watched_since=self._holders.watched_since,
            idle_for_seconds=seconds,
            by=by.value,
            is_priced=bool(self._holders.prices),
            total=len(groups),
            sums=total.view(),
            hidden_pods=hidden,
            unknown=await self._holders.unknown(namespace),
        )
        pieces = ([_view(group, by) for group in some] for some in chunks(shown, PIECE_SHOWN))
        return await stream_answer(request, answer, "costs", pieces)


async def _grouped(found: Sequence[Holder], by: _By) -> tuple[list[_GroupCosts], Sums, int]:
    """Group pods; return the groups, the total, and the number of pods hidden from the caller."""
    groups: dict[tuple[str, str], _GroupCosts] = {}
    total, hidden = Sums(), 0
    for some in chunks(found, PIECE_PODS):
        for holder in some:
            record = holder.record
            if not sees(record.namespace):
                hidden += 1
                continue
            name = {_By.POD: record.name, _By.OWNER: record.owner, _By.NAMESPACE: ""}[by]
            key = (record.namespace, name)
            group = groups.get(key)
            if group is None:
                group = groups[key] = _GroupCosts(namespace=record.namespace, name=name)
            group.sums.add(holder)
            total.add(holder)
        await asyncio.sleep(0)
    return list(groups.values()), total, hidden


async def _first(groups: Iterable[_GroupCosts], count: int) -> list[_GroupCosts]:
    """Return the first groups by rank, in batches that yield to the event loop."""
    first: list[_GroupCosts] = []
    for some in chunks(groups, PIECE_PODS):
        first = nsmallest(count, [*first, *some], key=lambda group: group.rank)
        await asyncio.sleep(0)
    return first


def _view(group: _GroupCosts, by: _By) -> CostGroup:
    return CostGroup(
        namespace=group.namespace,
        pod=f"{group.namespace}/{group.name}" if by is _By.POD else None,
        owner=group.name or None if by is _By.OWNER else None,
        **msgspec.structs.asdict(group.sums.view()),
    )


def _read_by(text: str) -> _By:
    """Parse the parameter `by`."""
    try:
        return _By(text)
    except ValueError as error:
        raise QueryError("by", text, f"must be one of {', '.join(_By)}") from error
