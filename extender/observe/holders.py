"""Pods that hold GPUs and have not used them, for how long, and what that came to."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from aiohttp import web

from extender.core.inventory import PodRecord
from extender.core.readings import DeviceInfo
from extender.core.snapshot import Snapshot
from extender.fleet.fleet import Fleet
from extender.observe.answers import stream_answer
from extender.observe.idleness import ACTIVE_FROM, SWEEP_SECONDS, Idleness
from extender.observe.parameters import (
    check_parameters,
    read_boolean,
    read_number,
    refusing,
)
from extender.observe.pending import moment
from extender.observe.seen import of_pod, pod_name, sees
from extender.observe.views import GIB, Json

PATH = "/v1/holders"
DEFAULT_HOLDERS, MAX_HOLDERS = 200, 1000
DEFAULT_SECONDS, MAX_SECONDS = 3600, 30 * 86_400
PIECE_ROWS = 1000
"""Devices that are looked at between two turns of the event loop; nodes and pods are dearer."""
PIECE_NODES = 8
PIECE_PODS = 500
PIECE_SHOWN = 16
LEAST_SECONDS = 2 * SWEEP_SECONDS
"""A device that was active at the last look but one is in use, whatever is asked."""
EMPTY_BYTES = 64 << 20
"""Less than this on a device is no process's: drivers keep a little for themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevice:
    """A device that a pod holds.

    Attributes:
        row: its row in the telemetry.
        info: what is known of it besides numbers.
        idle_seconds: since it was last active, and no longer than the pod holds it.
        is_at_least: nobody knows whether it was active before that.
        tenants: pods on it.
    """

    row: int
    info: DeviceInfo
    idle_seconds: float
    is_at_least: bool
    tenants: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A pod that holds devices.

    Attributes:
        record: the pod.
        devices: those that it is known to hold.
        missing: so many more it holds, and nobody knows which.
        cards: how many whole devices that comes to: a share of a shared one counts in part.
        idle: of `devices`, those idle for as long as was asked.
        idle_seconds: for how long all of these have been idle.
    """

    record: PodRecord
    devices: tuple[HeldDevice, ...]
    missing: int
    cards: float
    idle: tuple[HeldDevice, ...]
    idle_seconds: float

    @property
    def is_idle(self) -> bool:
        """Whether it uses none of them."""
        return not self.missing and len(self.idle) == len(self.devices)


class Holders:
    """Tells of the pods that hold devices.

    Args:
        fleet: the fleet.
        idleness: when each device was last active.
        clock: seconds since the epoch.
    """

    def __init__(self, fleet: Fleet, idleness: Idleness, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._idleness = idleness
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.get(PATH, refusing(self._answer))]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        check_parameters(query, frozenset({"namespace", "limit", "idle_for", "some"}))
        namespace = query.get("namespace")
        limit = read_number(query, "limit", default=DEFAULT_HOLDERS, low=1, high=MAX_HOLDERS)
        idle_for = read_number(query, "idle_for", default=DEFAULT_SECONDS, low=0, high=MAX_SECONDS)
        is_any = read_boolean(query, "some")
        seconds = float(idle_for)
        found = await self.find(seconds, namespace, is_any=is_any)
        idle = np.fromiter((one.idle_seconds for one in found), np.float64, len(found))
        longest = [found[at] for at in np.argsort(-idle, kind="stable")[:limit].tolist()]
        snapshot = self._fleet.snapshot()
        pieces = (
            [self._view(one, snapshot) for one in longest[start : start + PIECE_SHOWN]]
            for start in range(0, len(longest), PIECE_SHOWN)
        )
        rest = {
            "at": moment(self._clock()),
            "watched_since": moment(self._idleness.began_at),
            "idle_for_seconds": seconds,
            "active_from_ratio": ACTIVE_FROM,
            "total": len(found),
            "unknown": await self._unknown(namespace),
        }
        return await stream_answer(request, "holders", pieces, rest)

    async def find(
        self, seconds: float, namespace: str | None = None, *, is_any: bool = False
    ) -> list[Holder]:
        """Return the pods whose devices are idle for so long.

        Args:
            seconds: how long at least; 0 for all that hold devices.
            namespace: only its pods; None for all.
            is_any: those as well that use some of their devices.
        """
        if namespace is not None and not sees(namespace):
            return []
        nodes: dict[str, None] = {}
        rows = iter(self._idleness.idle_rows(seconds))
        while some := list(islice(rows, PIECE_ROWS)):
            nodes.update(dict.fromkeys(self._nodes_of(some)))
            await asyncio.sleep(0)
        found: list[Holder] = []
        names = iter(nodes)
        while few := list(islice(names, PIECE_NODES)):
            for node in few:
                for holder in self._on(node, seconds):
                    is_wanted = holder.is_idle or not seconds or (is_any and bool(holder.idle))
                    if is_wanted and namespace in {None, holder.record.namespace}:
                        found.append(holder)
            await asyncio.sleep(0)
        return found

    def _nodes_of(self, rows: Iterable[int]) -> Iterator[str]:
        """Yield the nodes of those devices that pods hold."""
        for row in rows:
            if self._fleet.tenants_of(row):
                info = self._fleet.store.info(row)
                if info is not None and info.node in self._fleet.nodes:
                    yield info.node

    def _on(self, node: str, seconds: float) -> Iterator[Holder]:
        """Yield the pods of a node whose devices are known."""
        held: dict[str, list[int]] = {}
        for row in self._fleet.store.rows_of_node(node):
            for key in self._fleet.tenants_of(row):
                held.setdefault(key, []).append(row)
        snapshot = self._fleet.snapshot()
        for record in self._fleet.pods_on(node):
            rows = held.get(record.key)
            if rows:
                yield self._holder(record, rows, seconds, snapshot)

    def _holder(
        self, record: PodRecord, rows: list[int], seconds: float, snapshot: Snapshot
    ) -> Holder:
        devices = tuple(filter(None, (self._device(record, row) for row in rows)))
        whole = shared = 0
        cards = 0.0
        for resource, count in record.resources.items():
            pool = snapshot.pools.get(resource)
            at = pool.row_of.get(record.node) if pool is not None else None
            row = pool.rows[at] if pool is not None and at is not None else None
            if row is not None and row.is_shared:
                shared += 1
                cards += count / max(row.replicas, 1)
            else:
                whole += count
                cards += count
        least = max(seconds, LEAST_SECONDS)
        idle = tuple(device for device in devices if device.idle_seconds >= least)
        return Holder(
            record=record,
            devices=devices,
            missing=0 if shared else max(whole - len(devices), 0),
            cards=cards or float(len(devices)),  # those of claims no resource counts
            idle=idle,
            idle_seconds=min((device.idle_seconds for device in idle), default=0.0),
        )

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

    async def _unknown(self, namespace: str | None) -> int:
        """Return how many pods hold devices of which no source says which they are."""
        if namespace is not None and not sees(namespace):
            return 0
        count = 0
        records = iter(tuple(self._fleet.pods.values()))
        while some := list(islice(records, PIECE_PODS)):
            count += sum(
                record.holds_devices
                and bool(record.resources)
                and namespace in {None, record.namespace}
                and not self._fleet.is_shown(record.uid)
                for record in some
            )
            await asyncio.sleep(0)
        return count

    def _view(self, holder: Holder, snapshot: Snapshot) -> Json:
        record, hidden = holder.record, holder.record.namespace
        bound_at = record.bound_at or record.created_at
        held_seconds = max(self._clock() - bound_at, 0.0)
        devices = [_device_view(device, snapshot) for device in holder.devices]
        known = [device["memory_used_bytes"] for device in devices]
        memory = sum(one for one in known if isinstance(one, int))
        gpus = len(holder.devices) + holder.missing
        idle_share = len(holder.idle) / max(gpus, 1)
        is_at_least = any(device.is_at_least for device in holder.idle)
        return {
            "pod": pod_name(record.namespace, record.name),
            "uid": of_pod(hidden, record.uid),
            "owner": of_pod(hidden, record.owner or None),
            "node": record.node,
            "resources": dict(record.resources),
            "gpus": gpus,
            "gpus_idle": len(holder.idle),
            "gpus_in_use": gpus - len(holder.idle),
            "bound_at": moment(bound_at),
            "held_seconds": held_seconds,
            "idle_seconds": holder.idle_seconds,
            "is_at_least": is_at_least,
            "gpu_hours": holder.cards * held_seconds / 3600,
            "gpu_hours_idle": holder.cards * idle_share * holder.idle_seconds / 3600,
            "memory_used_bytes": memory if any(one is not None for one in known) else None,
            "why": _why(holder, gpus, memory, is_at_least=is_at_least),
            "devices": devices,
        }


def _device_view(device: HeldDevice, snapshot: Snapshot) -> Json:
    telemetry, row = snapshot.telemetry, device.row
    is_there = row < len(telemetry.latest)
    used = None
    if is_there and telemetry.memory_freshness[row] and telemetry.memory_total_bytes[row]:
        used = int(telemetry.memory_used[row] * telemetry.memory_total_bytes[row])
    is_known = is_there and bool(telemetry.freshness[row])
    return {
        "index": device.info.index,
        "uuid": device.info.uuid,
        "gpu_instance_id": device.info.gpu_instance_id,
        "utilization_ratio": float(telemetry.latest[row]) if is_known else None,
        "memory_used_bytes": used,
        "idle_seconds": device.idle_seconds,
        "tenants": device.tenants,
    }


def _why(holder: Holder, gpus: int, memory: int, *, is_at_least: bool) -> str:
    """Return in one line why a pod is believed not to use its devices."""
    if not holder.idle:
        return "uses its GPUs"
    least = "at least " if is_at_least else ""
    told = f"no activity on {len(holder.idle)} of {gpus} GPUs for {least}" + span(
        holder.idle_seconds
    )
    if memory < EMPTY_BYTES * len(holder.devices):
        return f"{told}, and no process has memory there"
    return f"{told}, {memory / GIB:.1f} GiB of memory held"


def span(seconds: float) -> str:
    """Return a time span in words, two units at most.

    Example:
        >>> span(59.4), span(3600), span(5400), span(90000)
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
