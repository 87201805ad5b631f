"""The route /v1/pods: the caller's pods with their GPUs, use and waits, one page at a time."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from aiohttp import web

from extender.answers import routes
from extender.answers.pods import PodDevice, Pods, PodSummary
from extender.core.devices.gpu_models import model_name
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Snapshot
from extender.fleet.fleet import Fleet
from extender.insight.holder_sums import HeldDevice, Holder
from extender.insight.holders import Holders
from extender.insight.pending import LastReported, Pending, waits
from extender.server.json_api import QueryError, chunks, moment, read_number, serve, stream_answer
from extender.server.redaction import of_pod, pod_name, sees

_MAX_WORDS: Final = 200
"""Longest search text, in characters."""
_MOST_SOUGHT: Final = 10
"""Maximum number of words of a search: every pod is compared with each word."""

_PIECE_PODS: Final = 500
"""Pods to filter or sort between two yields to the event loop."""
_PIECE_SHOWN: Final = 16

_STATES: Final = ("holds", "waits")

_Value = float | str
_Order = Callable[[PodRecord, Holder | None, Snapshot], _Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PodQuery:
    """Parameters of a request.

    Attributes:
        namespace: only pods of this namespace; None for all.
        words: words that must occur in the pod's name, owner or node; lower case.
        state: one of `_STATES`, "" for both.
        sort: a key of the orders, "" for waiting pods first.
    """

    namespace: str | None
    words: tuple[str, ...]
    state: str
    sort: str
    offset: int
    limit: int


class PodList:
    """Handler of /v1/pods; lists only pods that the caller may read.

    Args:
        holders: finds the devices of pods.
        pending: describes waiting pods.
        clock: seconds since the epoch.
    """

    def __init__(
        self, fleet: Fleet, holders: Holders, pending: Pending, clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._holders = holders
        self._pending = pending
        self._clock = clock
        self._orders: Mapping[str, _Order] = {
            "": lambda record, *_: record.created_at if waits(record) else float("inf"),
            "pod": lambda record, *_: record.key,
            "owner": lambda record, *_: record.owner,
            "node": lambda record, *_: record.node,
            "gpus": lambda record, holder, _: -_size(record, holder),
            "use": lambda _, holder, snapshot: -_or_least(_use(holder, snapshot)),
            "memory": lambda record, holder, snapshot: (
                -_or_least(self._memory(record, holder, snapshot))
            ),
            "idle": lambda _, holder, __: -holder.idle_seconds if holder and holder.idle else 1.0,
            "wait": lambda record, *_: record.created_at if waits(record) else float("inf"),
        }

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/pods."""
        return [serve(routes.PODS, self._answer)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        wanted = self._read(request)
        found, namespaces, counts = await self._find(wanted)
        page = await self._page(found, wanted)
        others = LastReported()
        if any(map(waits, page)):
            others = await self._pending.last.fetch(namespace=wanted.namespace or "")
        snapshot = self._fleet.snapshot()
        pieces = (
            [self._view(record, snapshot, others) for record in some]
            for some in chunks(page, _PIECE_SHOWN)
        )
        answer = Pods(
            pods=[],
            at=moment(self._clock()),
            total=len(found),
            offset=wanted.offset,
            holds=counts["holds"],
            waits=counts["waits"],
            namespaces=sorted(namespaces),
            unreachable=list(others.unreachable),
        )
        return await stream_answer(request, answer, "pods", pieces)

    def _read(self, request: web.Request) -> _PodQuery:
        """Parse the query parameters of a request."""
        query = request.query
        search, state, sort = (query.get(name, "") for name in ("search", "state", "sort"))
        if len(search) > _MAX_WORDS:
            raise QueryError("search", search, f"must have at most {_MAX_WORDS} characters")
        words = tuple(dict.fromkeys(search.lower().split()))
        if len(words) > _MOST_SOUGHT:
            raise QueryError("search", search, f"must have at most {_MOST_SOUGHT} words")
        for name, value, allowed in (("state", state, _STATES), ("sort", sort, self._orders)):
            if value and value not in allowed:
                listed = ", ".join(filter(None, allowed))
                raise QueryError(name, value, f"must be one of {listed}")
        return _PodQuery(
            namespace=query.get("namespace") or None,
            words=words,
            state=state,
            sort=sort,
            offset=read_number(query, routes.PODS, "offset"),
            limit=read_number(query, routes.PODS, "limit"),
        )

    async def _find(self, wanted: _PodQuery) -> tuple[list[PodRecord], set[str], Mapping[str, int]]:
        """Return the matching pods, and the namespaces and states of all visible pods."""
        visible: dict[str, bool] = {}
        namespaces: set[str] = set()
        counts: Counter[str] = Counter()
        found: list[PodRecord] = []
        for some in chunks(tuple(self._fleet.pods.values()), _PIECE_PODS):
            for record in some:
                state = _state(record)
                if not state:
                    continue
                name = record.namespace
                if name not in visible:
                    visible[name] = sees(name)
                if not visible[name]:
                    continue
                namespaces.add(name)
                if _matches(record, wanted):
                    counts[state] += 1
                    if wanted.state in {"", state}:
                        found.append(record)
            await asyncio.sleep(0)
        return found, namespaces, counts

    async def _page(self, found: Sequence[PodRecord], wanted: _PodQuery) -> list[PodRecord]:
        """Sort in steps, and return the requested page."""
        holders: dict[str, Holder] = {}
        if wanted.sort in {"gpus", "use", "memory", "idle"}:
            for few in chunks(await self._holders.find(0.0), _PIECE_PODS):
                holders.update((one.record.uid, one) for one in few)
                await asyncio.sleep(0)
        order, snapshot = self._orders[wanted.sort], self._fleet.snapshot()
        parts = []
        for some in chunks(found, _PIECE_PODS):
            keyed = (
                (order(record, holders.get(record.uid), snapshot), record.key, record.uid)
                for record in some
            )
            parts.append(sorted(keyed))
            await asyncio.sleep(0)
        merged = islice(heapq.merge(*parts), wanted.offset + wanted.limit)
        last: list[str] = []
        for place, entries in enumerate(chunks(merged, _PIECE_PODS)):
            skipped = max(wanted.offset - place * _PIECE_PODS, 0)
            last += (uid for _, _, uid in entries[skipped:])
            await asyncio.sleep(0)
        known = self._fleet.pods
        return [known[uid] for uid in last if uid in known]

    def _view(self, record: PodRecord, snapshot: Snapshot, others: LastReported) -> PodSummary:
        holder = self._holders.of_pod(record)
        held = () if holder is None else holder.devices
        declared = self._fleet.memory_on(record.node, record) if record.node else None
        size = _size(record, holder)
        is_waiting, hidden = waits(record), record.namespace
        return PodSummary(
            pod=pod_name(hidden, record.name),
            uid=of_pod(hidden, record.uid),
            owner=of_pod(hidden, record.owner or None),
            state="waits" if is_waiting else "holds",
            is_deleting=record.is_deleting,
            node=record.node or None,
            model=model_name(holder.model) if holder else "",
            resources=dict(record.resources),
            gpus=size,
            gpus_unknown=0 if is_waiting else max(size - len(held), 0),
            devices=[self._device(record, one, snapshot) for one in held],
            utilization_ratio=_use(holder, snapshot),
            memory_used_bytes=self._memory(record, holder, snapshot),
            memory_declared_bytes=of_pod(hidden, None if declared is None else declared * size),
            gpus_idle=len(holder.idle) if holder else None,
            idle_seconds=holder.idle_seconds if holder and holder.idle else None,
            is_at_least=any(one.is_at_least for one in holder.idle) if holder else False,
            held_seconds=holder.held_seconds if holder else None,
            wait=self._pending.view(record, others) if is_waiting else None,
        )

    def _device(self, record: PodRecord, device: HeldDevice, snapshot: Snapshot) -> PodDevice:
        return PodDevice(
            index=device.info.index,
            uuid=device.info.uuid,
            gpu_instance_id=device.info.gpu_instance_id,
            mig_profile=device.info.mig_profile,
            shares=_shares(record, device.row, snapshot),
            tenants=device.tenants,
            utilization_ratio=_use_of(device, snapshot),
            memory_used_bytes=self._memory_of(record, device, snapshot),
        )

    def _memory(self, record: PodRecord, holder: Holder | None, snapshot: Snapshot) -> int | None:
        """Return the memory that a pod uses on all its devices, None if unknown for one."""
        devices = holder.devices if holder else ()
        used = [self._memory_of(record, one, snapshot) for one in devices]
        known = [one for one in used if one is not None]
        return sum(known) if known and len(known) == len(used) else None

    def _memory_of(self, record: PodRecord, device: HeldDevice, snapshot: Snapshot) -> int | None:
        """Return the memory that a pod uses on a device: all memory in use if it is alone on it."""
        telemetry, row = snapshot.telemetry, device.row
        if device.tenants > 1:
            return self._fleet.pod_memory.last(record.uid, device.info.key)
        if row >= len(telemetry.memory_used) or not telemetry.memory_freshness[row]:
            return None
        return int(telemetry.memory_used[row] * telemetry.memory_total_bytes[row])


def _state(record: PodRecord) -> str:
    """Return `holds` or `waits`, "" for a pod that does neither."""
    if record.holds_devices:
        return "holds"
    return "waits" if waits(record) else ""


def _matches(record: PodRecord, wanted: _PodQuery) -> bool:
    """Check a pod against namespace and words; the state is checked separately."""
    if wanted.namespace not in {None, record.namespace}:
        return False
    if not wanted.words:
        return True
    text = f"{record.key} {record.owner} {record.node}".lower()
    return all(word in text for word in wanted.words)


def _size(record: PodRecord, holder: Holder | None) -> int:
    """Return the number of devices that a pod holds, or requests if no held device is known."""
    return holder.size if holder else sum(record.resources.values())


def _use(holder: Holder | None, snapshot: Snapshot) -> float | None:
    """Return the mean activity of a pod's devices over the window, None if unknown."""
    known = [_use_of(one, snapshot) for one in (holder.devices if holder else ())]
    ratios = [one for one in known if one is not None]
    return sum(ratios) / len(ratios) if ratios else None


def _use_of(device: HeldDevice, snapshot: Snapshot) -> float | None:
    telemetry, row = snapshot.telemetry, device.row
    if row >= len(telemetry.utilization) or not telemetry.freshness[row]:
        return None
    return float(telemetry.utilization[row])


def _shares(record: PodRecord, row: int, snapshot: Snapshot) -> int:
    """Return the number of shares that a device is divided into, 1 for a whole device."""
    for resource in record.resources:
        pool = snapshot.pools.get(resource)
        at = None if pool is None else pool.row_of.get(record.node)
        if pool is not None and at is not None and row in pool.rows[at].slots:
            return pool.rows[at].replicas
    return 1


def _or_least(value: float | None) -> float:
    """Return a sort key: unknown values come last."""
    return -1.0 if value is None else value
