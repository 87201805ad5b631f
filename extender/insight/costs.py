"""The route /v1/costs: cost of the GPUs that pods hold, by pod, owner or namespace."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import nsmallest

import msgspec
from aiohttp import web

from extender.answers import routes
from extender.answers.holding import CostGroup, Costs
from extender.insight.holder_sums import Holder, Sums
from extender.insight.holders import PIECE_PODS, PIECE_SHOWN, Holders
from extender.server.json_answers import chunks, moment, stream_answer
from extender.server.query_parameters import (
    QueryError,
    read_boolean,
    read_number,
    serve,
)
from extender.server.redaction import sees


class _By(StrEnum):
    """Grouping of costs."""

    POD = "pod"
    OWNER = "owner"
    NAMESPACE = "namespace"


@dataclass(slots=True, kw_only=True)
class _Group:
    """Sums over the pods of one group.

    Attributes:
        namespace: namespace of the pods.
        name: name of the pod or owner; "" if the pods have no owner, or if the group is a
            namespace.
        sums: the sums.
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


async def _grouped(found: Sequence[Holder], by: _By) -> tuple[list[_Group], Sums, int]:
    """Group pods; return the groups, the total, and the number of pods hidden from the caller."""
    groups: dict[tuple[str, str], _Group] = {}
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
                group = groups[key] = _Group(namespace=record.namespace, name=name)
            group.sums.add(holder)
            total.add(holder)
        await asyncio.sleep(0)
    return list(groups.values()), total, hidden


async def _first(groups: Iterable[_Group], count: int) -> list[_Group]:
    """Return the first groups by rank, in batches that yield to the event loop."""
    first: list[_Group] = []
    for some in chunks(groups, PIECE_PODS):
        first = nsmallest(count, [*first, *some], key=lambda group: group.rank)
        await asyncio.sleep(0)
    return first


def _view(group: _Group, by: _By) -> CostGroup:
    return CostGroup(
        namespace=group.namespace,
        pod=f"{group.namespace}/{group.name}" if by is _By.POD else None,
        owner=group.name or None if by is _By.OWNER else None,
        **msgspec.structs.asdict(group.sums.view()),
    )


def _read_by(text: str) -> _By:
    """Parse the parameter `by`.

    Raises:
        QueryError: the value is not a grouping.
    """
    try:
        return _By(text)
    except ValueError as error:
        raise QueryError("by", text, f"must be one of {', '.join(_By)}") from error
