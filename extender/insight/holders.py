"""The route /v1/holders: pods that hold GPUs, the idle time of these GPUs, and their cost."""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from aiohttp import web

from extender.answers import routes
from extender.answers.holding import HeldDeviceAnswer, HolderAnswer, HoldersAnswer
from extender.core.devices.readings import Column, DeviceInfo, DeviceKey, Signal
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Snapshot, Telemetry
from extender.core.prices import PriceList, card_share
from extender.core.quantity import GIB
from extender.fleet.fleet import Fleet
from extender.insight.holder_sums import HeldDevice, Holder, Sums
from extender.insight.views import PRODUCT_LABEL
from extender.server.json_api import chunks, moment, read_boolean, read_number, serve, stream_answer
from extender.server.redaction import of_pod, pod_name, sees

logger = logging.getLogger(__name__)

_SWEEP_SECONDS: Final = 15.0
_ACTIVE_FROM: Final = 0.02
"""Minimum activity of a device that counts as used. Monitoring and a display server cause about 1
%."""

_RISE: Final = 0.001
"""Increase of the window's mean that shows activity between two sweeps."""


class Idleness:
    """Records the last activity of all devices in periodic sweeps, on the event loop's thread only.

    A device without readings counts as active: idleness is claimed only for observed time.

    Args:
        clock: seconds since the epoch.

    Attributes:
        began_at: time of the first sweep, seconds since the epoch; None before it.
        seen: event that is set after a sweep has found a device with readings.
        active_from: minimum activity ratio of a device that counts as used.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self.began_at: float | None = None
        self.seen = asyncio.Event()
        self.active_from = _ACTIVE_FROM
        self._fleet = fleet
        self._clock = clock
        self._used_at: npt.NDArray[np.float64] = np.zeros(0)
        self._is_guess: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._mean: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)

    async def run(self) -> None:
        """Record the activity of all devices periodically until cancelled."""
        while True:
            try:
                self.look()
            except Exception:  # a fault here must not stop the extender
                logger.exception("internal error", extra={"verb": "idleness"})
            await asyncio.sleep(_SWEEP_SECONDS)

    def look(self) -> None:
        """Update the last activity of all devices in a few vector operations."""
        now = self._clock()
        if self.began_at is None:
            self.began_at = now
        telemetry = self._fleet.snapshot().telemetry
        new = self._grow(len(telemetry.latest), now)
        is_known = telemetry.freshness > 0
        if not self.seen.is_set() and is_known.any():
            self.seen.set()
        is_active = is_known & _is_active(telemetry, self._mean)
        is_active[new:] &= telemetry.latest[new:] >= _ACTIVE_FROM  # no earlier mean to compare with
        is_guess = ~is_known
        self._used_at[is_active | is_guess] = now
        self._is_guess[is_active] = False
        self._is_guess[is_guess] = True
        self._mean[:] = np.where(is_known, telemetry.utilization, 0.0)

    def learn(
        self,
        devices: Sequence[DeviceKey],
        used_at: Column,
        is_guess: npt.NDArray[np.bool_],
        until: float,
    ) -> None:
        """Import activity times from before the first sweep, for example from Prometheus.

        A device keeps its own time if it was active since then, or had no readings for a while.

        Args:
            used_at: time of each device's last activity, seconds since the epoch.
            is_guess: whether that time is only the start of the known history.
            until: end of the history; the first sweep was before it.
        """
        for key, at, guess in zip(devices, used_at.tolist(), is_guess.tolist(), strict=True):
            row = self._fleet.store.row_of(key)
            if row is None or row >= len(self._used_at) or not self._is_guess[row]:
                continue
            if at < self._used_at[row] <= until:
                self._used_at[row], self._is_guess[row] = at, guess

    def last_used(self, row: int) -> tuple[float, bool]:
        """Return the time of a device's last activity, and whether it is only a lower bound.

        Args:
            row: the device's row in the telemetry.
        """
        if row >= len(self._used_at):
            return self._clock(), True
        return float(self._used_at[row]), bool(self._is_guess[row])

    def idle_rows(self, seconds: float) -> list[int]:
        """Return the rows of the devices without activity for at least this long."""
        used_at = self._used_at[: len(self._fleet.store)]  # the arrays may have spare rows
        return np.flatnonzero(self._clock() - used_at >= seconds).tolist()

    def _grow(self, devices: int, now: float) -> int:
        """Extend the arrays: telemetry never shrinks. Return the first row without history."""
        before = len(self._used_at)
        missing = devices - before
        if missing:
            self._used_at = np.pad(self._used_at, (0, missing), constant_values=now)
            self._is_guess = np.pad(self._is_guess, (0, missing), constant_values=True)
            self._mean = np.pad(self._mean, (0, missing))
        return before


def _is_active(telemetry: Telemetry, before: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Mark the devices that are active now or were since the last sweep."""
    has_risen = telemetry.utilization > before + _RISE
    is_active: npt.NDArray[np.bool_] = (telemetry.latest >= _ACTIVE_FROM) | has_risen
    return is_active


_Result = TypeVar("_Result")

_MOST_KEPT = 4
"""Size of the cache: each result may take megabytes."""


_PIECE_ROWS = 1000
"""Number of devices to check between two yields to the event loop; nodes and pods take longer, so
fewer of them."""
_PIECE_HOLDERS = 64
PIECE_PODS = 500
PIECE_SHOWN = 16
_SHARED_SECONDS = 5.0
"""Lifetime of a result that several callers share: ten open pages take as much work as one."""
_LEAST_SECONDS = 2 * _SWEEP_SECONDS
"""Shortest idle time that counts, even if the caller asks for less: two sweeps."""
_EMPTY_BYTES = 64 << 20
"""Memory below which a device counts as empty: the driver itself uses some."""


class _Shared(Generic[_Result]):
    """Caches results for some seconds; concurrent callers share one computation.

    Args:
        clock: seconds since the epoch.
        seconds: lifetime of a result.
    """

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._entries: OrderedDict[Hashable, tuple[float, _Result]] = OrderedDict()
        self._lock = asyncio.Lock()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[_Result]]) -> _Result:
        """Return the cached result for a key, or compute it; callers must not change it."""
        async with self._lock:
            entry = self._entries.get(key)
            if entry is not None and 0 <= self._clock() - entry[0] < self._seconds:
                return entry[1]
            result = await make()
            entry = self._entries[key] = (self._clock(), result)
            if len(self._entries) > _MOST_KEPT:
                self._entries.popitem(last=False)
            # Free the memory even if no further request comes.
            asyncio.get_running_loop().call_later(self._seconds, self._forget, key, entry)
            return result

    def clear(self) -> None:
        """Drop all results, because their input has changed."""
        self._entries.clear()

    def _forget(self, key: Hashable, entry: tuple[float, _Result]) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]


class Holders:
    """Handler of /v1/holders.

    Args:
        idleness: time of each device's last activity.
        clock: seconds since the epoch.
    """

    def __init__(self, fleet: Fleet, idleness: Idleness, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._idleness = idleness
        self._clock = clock
        self._prices = PriceList({})
        self._found = _Shared[Sequence[Holder]](clock, _SHARED_SECONDS)
        self._unknown = _Shared[Mapping[str, int]](clock, _SHARED_SECONDS)

    @property
    def prices(self) -> PriceList:
        """Price list of a GPU-hour."""
        return self._prices

    @prices.setter
    def prices(self, prices: PriceList) -> None:
        self._prices = prices
        self._found.clear()

    @property
    def watched_since(self) -> str | None:
        """Start of the activity watch; None before the first sweep."""
        began_at = self._idleness.began_at
        return None if began_at is None else moment(began_at)

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/holders."""
        return [serve(routes.HOLDERS, self._answer)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        namespace = query.get("namespace")
        limit = read_number(query, routes.HOLDERS, "limit")
        idle_for = read_number(query, routes.HOLDERS, "idle_for")
        is_any = read_boolean(query, "some")
        seconds = float(idle_for)
        found = await self.find(seconds, namespace, is_any=is_any)
        longest = found[:limit]
        snapshot = self._fleet.snapshot()
        pieces = (
            [self._view(one, snapshot) for one in some] for some in chunks(longest, PIECE_SHOWN)
        )
        answer = HoldersAnswer(
            holders=[],
            at=moment(self._clock()),
            watched_since=self.watched_since,
            idle_for_seconds=seconds,
            active_from_ratio=_ACTIVE_FROM,
            total=len(found),
            unknown=await self.unknown(namespace),
            is_priced=bool(self.prices),
            sums=(await _sum_seen(found)).view(),
        )
        return await stream_answer(request, answer, "holders", pieces)

    async def find(
        self, seconds: float, namespace: str | None = None, *, is_any: bool = False
    ) -> Sequence[Holder]:
        """Return the pods whose devices have been idle long enough, longest first.

        Args:
            seconds: shortest idle time; 0 for all pods that hold devices.
            namespace: only pods of this namespace; None for all.
            is_any: include pods that use some of their devices.
        """
        if namespace is not None and not sees(namespace):
            return ()
        found = await self._found.get((seconds, is_any), lambda: self._find(seconds, is_any=is_any))
        if namespace is None:
            return found
        return [holder for holder in found if holder.record.namespace == namespace]

    async def _find(self, seconds: float, *, is_any: bool) -> Sequence[Holder]:
        """Find the pods in all namespaces; the caller redacts them."""
        nodes: dict[str, None] = {}
        for some in chunks(self._idleness.idle_rows(seconds), _PIECE_ROWS):
            nodes.update(dict.fromkeys(self._nodes_of(some)))
            await asyncio.sleep(0)
        found: list[Holder] = []
        idle: list[float] = []
        holders = (holder for node in nodes for holder in self._on(node, seconds))
        for few in chunks(holders, _PIECE_HOLDERS):
            wanted = [
                holder
                for holder in few
                if holder.is_idle or not seconds or (is_any and bool(holder.idle))
            ]
            found += wanted
            idle += (holder.idle_seconds for holder in wanted)
            await asyncio.sleep(0)
        order = np.argsort(-np.array(idle), kind="stable").tolist()
        ranked: list[Holder] = []
        for places in chunks(order, _PIECE_ROWS):
            ranked += map(found.__getitem__, places)
            await asyncio.sleep(0)
        return ranked

    def of_pod(self, record: PodRecord) -> Holder | None:
        """Return a pod with its devices, None if no source attributes any to it."""
        held = [
            row
            for row in self._fleet.store.rows_of_node(record.node)
            if record.key in self._fleet.tenants_of(row)
        ]
        return self._holder(record, held, 0.0, self._fleet.snapshot()) if held else None

    def _nodes_of(self, rows: Iterable[int]) -> Iterator[str]:
        """Yield the nodes of the devices that pods hold."""
        for row in rows:
            if self._fleet.tenants_of(row):
                info = self._fleet.store.info(row)
                if info is not None:
                    yield info.node

    def _on(self, node: str, seconds: float) -> Iterator[Holder]:
        """Yield the pods on a node whose devices are known."""
        rows_by_pod: dict[str, list[int]] = {}
        for row in self._fleet.store.rows_of_node(node):
            for key in self._fleet.tenants_of(row):
                rows_by_pod.setdefault(key, []).append(row)
        snapshot = self._fleet.snapshot()
        for record in self._fleet.pods_on(node):
            rows = rows_by_pod.get(record.key)
            if rows:
                yield self._holder(record, rows, seconds, snapshot)

    def _holder(
        self, record: PodRecord, rows: list[int], seconds: float, snapshot: Snapshot
    ) -> Holder:
        devices = tuple(filter(None, (self._device(record, row) for row in rows)))
        whole = shared = instances = 0
        cards, counted, is_partial = 0.0, set[int](), not record.resources
        for resource, count in record.resources.items():
            pool = snapshot.pools.get(resource)
            at = pool.row_of.get(record.node) if pool is not None else None
            if pool is None or at is None:
                whole += count
                is_partial = True
                continue
            row = pool.rows[at]
            shared += row.is_shared
            whole += 0 if row.is_shared else count
            slots = set(row.slots)
            counted |= slots
            infos = [device.info for device in devices if device.row in slots]
            first = self._fleet.store.info(row.slots[0]) if row.slots else None
            if first is not None and first.mig_profile:  # all devices of a resource are of one kind
                instances += count
            cards += count * _mean_share(infos) / row.replicas
        if is_partial:  # ResourceClaims, or a resource that the node lost: count the devices
            cards += sum(_own_share(device) for device in devices if device.row not in counted)
        missing = 0 if shared else max(whole - len(devices), 0)
        instances -= sum(device.is_instance for device in devices)
        model = self._model(record, devices)
        least = max(seconds, _LEAST_SECONDS)
        idle = tuple(device for device in devices if device.idle_seconds >= least)
        return Holder(
            record=record,
            model=model,
            devices=devices,
            missing=missing,
            missing_instances=min(max(instances, 0), missing),
            cards=cards,
            idle=idle,
            idle_seconds=min((device.idle_seconds for device in idle), default=0.0),
            held_seconds=max(self._clock() - (record.bound_at or record.created_at), 0.0),
            price=self.prices.of(model, self._fleet.nodes.get(record.node)),
        )

    def _model(self, record: PodRecord, devices: Iterable[HeldDevice]) -> str:
        """Return the model of a pod's devices; all cards of a node are of one model."""
        node = self._fleet.nodes.get(record.node)
        label = node.labels.get(PRODUCT_LABEL, "") if node else ""
        return next((device.info.model for device in devices if device.info.model), label)

    def _device(self, record: PodRecord, row: int) -> HeldDevice | None:
        info = self._fleet.store.info(row)
        if info is None:
            return None
        used_at, is_guess = self._idleness.last_used(row)
        bound_at = record.bound_at or record.created_at
        return HeldDevice(
            row=row,
            info=info,
            idle_seconds=max(self._clock() - max(used_at, bound_at), 0.0),
            is_at_least=is_guess and used_at > bound_at,
            tenants=len(self._fleet.tenants_of(row)),
        )

    async def unknown(self, namespace: str | None) -> int:
        """Return the number of pods that hold devices which no source attributes to them."""
        if namespace is not None and not sees(namespace):
            return 0
        counts = await self._unknown.get(None, self._count_unknown)
        return sum(counts.values()) if namespace is None else counts.get(namespace, 0)

    async def _count_unknown(self) -> Mapping[str, int]:
        """Count by namespace the pods that hold devices which no source attributes to them."""
        counts: Counter[str] = Counter()
        for some in chunks(tuple(self._fleet.pods.values()), PIECE_PODS):
            counts.update(
                record.namespace
                for record in some
                if record.holds_devices
                and record.resources
                and not self._fleet.is_shown(record.uid)
            )
            await asyncio.sleep(0)
        return counts

    def _view(self, holder: Holder, snapshot: Snapshot) -> HolderAnswer:
        record, hidden = holder.record, holder.record.namespace
        devices = [
            _device_view(device, snapshot, self._processes(device.row)) for device in holder.devices
        ]
        memory = _sum_known(device.memory_used_bytes for device in devices)
        is_at_least = any(device.is_at_least for device in holder.idle)
        return HolderAnswer(
            pod=pod_name(record.namespace, record.name),
            uid=of_pod(hidden, record.uid),
            owner=of_pod(hidden, record.owner or None),
            node=record.node,
            resources=dict(record.resources),
            gpus=holder.gpus,
            gpus_idle=holder.gpus_idle,
            gpus_in_use=holder.gpus - holder.gpus_idle,
            mig_instances=holder.instances,
            mig_instances_idle=holder.instances_idle,
            mig_instances_in_use=holder.instances - holder.instances_idle,
            bound_at=moment(record.bound_at or record.created_at),
            held_seconds=holder.held_seconds,
            idle_seconds=holder.idle_seconds,
            is_at_least=is_at_least,
            gpu_hours=holder.gpu_hours,
            gpu_hours_idle=holder.gpu_hours_idle,
            cost=of_pod(hidden, holder.cost),
            cost_used=of_pod(hidden, holder.cost_used),
            cost_idle=of_pod(hidden, holder.cost_idle),
            memory_used_bytes=memory,
            why=_why(holder, devices, is_at_least=is_at_least),
            devices=devices,
        )

    def _processes(self, row: int) -> int | None:
        """Return the number of processes on a device, None if unknown or stale."""
        reading = self._fleet.store.reported((Signal.PROCESSES,), row)
        count = self._fleet.store.value(Signal.PROCESSES, row)
        if reading is None or count is None:
            return None
        is_fresh = self._clock() - reading[1] <= self._fleet.policy.freshness.max_age_seconds
        return int(count) if is_fresh else None


async def _sum_seen(holders: Iterable[Holder]) -> Sums:
    """Sum over the pods that the caller may read."""
    sums = Sums()
    for some in chunks(holders, PIECE_PODS):
        for holder in some:
            if sees(holder.record.namespace):
                sums.add(holder)
        await asyncio.sleep(0)
    return sums


def _mean_share(infos: Sequence[DeviceInfo]) -> float:
    """Return the devices' mean share of a card's compute; 1 if none is known."""
    shares = [card_share(info.model, info.mig_profile) for info in infos]
    return sum(shares) / len(shares) if shares else 1.0


def _own_share(device: HeldDevice) -> float:
    """Return one tenant's share of a card, assuming equal shares of all tenants of the device."""
    return card_share(device.info.model, device.info.mig_profile) / max(device.tenants, 1)


def _device_view(device: HeldDevice, snapshot: Snapshot, processes: int | None) -> HeldDeviceAnswer:
    telemetry, row = snapshot.telemetry, device.row
    is_there = row < len(telemetry.latest)
    used = None
    if is_there and telemetry.memory_freshness[row] and telemetry.memory_total_bytes[row]:
        used = int(telemetry.memory_used[row] * telemetry.memory_total_bytes[row])
    is_known = is_there and bool(telemetry.freshness[row])
    return HeldDeviceAnswer(
        index=device.info.index,
        uuid=device.info.uuid,
        gpu_instance_id=device.info.gpu_instance_id,
        utilization_ratio=float(telemetry.latest[row]) if is_known else None,
        memory_used_bytes=used,
        processes=processes,
        idle_seconds=device.idle_seconds,
        tenants=device.tenants,
    )


def _sum_known(values: Iterable[int | None]) -> int | None:
    """Sum the known values, None if there is none."""
    known = [one for one in values if one is not None]
    return sum(known) if known else None


def _why(holder: Holder, devices: list[HeldDeviceAnswer], *, is_at_least: bool) -> str:
    """Describe in one line the evidence that a pod does not use its devices."""
    if not holder.idle:
        return "uses its GPUs" if holder.gpus else "uses its MIG instances"
    least = "at least " if is_at_least else ""
    unused = [
        f"{idle} of {all_of} {name}"
        for idle, all_of, name in (
            (holder.gpus_idle, holder.gpus, "GPUs"),
            (holder.instances_idle, holder.instances, "MIG instances"),
        )
        if all_of
    ]
    parts = [f"no activity on {' and '.join(unused)} for {least}{_span(holder.idle_seconds)}"]
    processes = [one.processes for one in devices]
    if None not in processes:
        # On a shared device the processes may belong to another pod.
        count = _sum_known(processes) or 0
        parts.append(
            {0: "no process there", 1: "1 process there"}.get(count, f"{count} processes there")
        )
    memory = _sum_known(one.memory_used_bytes for one in devices)
    if memory is None:
        parts.append("memory unknown")
    elif memory < _EMPTY_BYTES * len(devices):
        parts.append("almost no memory held")
    else:
        parts.append(f"{memory / GIB:.1f} GiB of memory held")
    return ", ".join(parts)


def _span(seconds: float) -> str:
    """Format a duration in words, with two units at most.

    Example:
        >>> _span(59.4), _span(3600), _span(5400), _span(90000)
        ('59 s', '1 h', '1 h 30 min', '1 d 1 h')
    """
    whole = int(seconds)
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    for place, (name, length) in enumerate(units):
        if whole >= length:
            count, rest = divmod(whole, length)
            if place + 1 < len(units):
                lesser, smaller = units[place + 1]
                if rest >= smaller:
                    return f"{count} {name} {rest // smaller} {lesser}"
            return f"{count} {name}"
    return "0 s"
