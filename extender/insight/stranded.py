"""Find free GPUs that no pod can use, and the pods to move so that a large request fits.

GPUs are stranded if their node lacks CPU, memory or ephemeral storage. A plan for a large request
moves the smallest number of pods.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import combinations, islice
from statistics import median_high
from typing import Final, NamedTuple

import numpy as np

from extender.answers.advice import HostAmounts, StrandedGpus, StrandedHolder
from extender.answers.fleet import MovePlan, PodMove
from extender.core.nodes.host_resources import NAMES, NONE, HostResources, PlacedPod
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.nodes.snapshot import Pool, PoolRow, Rows, Telemetry
from extender.core.quantity import GIB
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.fleet.impossible_requests import is_bad
from extender.server.redaction import namespace_of, of_pod, pod_key

HostPods = Callable[[], Mapping[str, PlacedPod]]
"""Returns the requests of every pod that has a node, by `namespace/name`."""

_EVEN_PART: Final = 0.5
"""Assumed need of a GPU, as a fraction of its even share of the node's CPU and memory, if no pod
with such GPUs requests any."""
_MOST_HOLDERS: Final = 10
_PIECE_PODS: Final = 4000
_PIECE_GPU_PODS: Final = 1000
_PIECE_NODES: Final = 500

_MAX_EXAMINED: Final = 64
"""Maximum number of nodes whose pods are tried on other nodes: those with the fewest moves."""

_MAX_TRIES: Final = 100
"""Maximum number of choices of pods that are tried for one node."""

_PIECE_CANDIDATES: Final = 200
_DAEMON_SET: Final = "DaemonSet "

_IsOpen = Callable[[str], bool]
"""Returns whether kube-scheduler may place pods on a node."""


class _Holder(NamedTuple):
    """A pod that holds more of a node's CPU, memory or storage than the even share of its GPUs.

    Attributes:
        gpus: number of GPUs or replicas that it requests.
        part: part of the node's scarcest resource that it holds beyond its even share, 0 to 1.
    """

    key: str
    gpus: int
    needs: HostResources
    part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _StrandedNode:
    """A node with GPUs for which it lacks CPU, memory or ephemeral storage; see `StrandedGpus`."""

    node: str
    resource: str
    gpus: int
    free: int
    lacks: tuple[str, ...]
    left: HostResources
    need: HostResources
    is_assumed: bool
    holders: tuple[_Holder, ...] = ()

    def view(self) -> StrandedGpus:
        """Describe the node for an answer."""
        return StrandedGpus(
            node=self.node,
            resource=self.resource,
            stranded_gpus=self.gpus,
            free_gpus=self.free,
            lacks=list(self.lacks),
            left=_json(self.left),
            need=_json(self.need),
            is_need_assumed=self.is_assumed,
            holders_total=len(self.holders),
            holders=[_holder_view(one) for one in self.holders[:_MOST_HOLDERS]],
            remedy=self._remedy(),
        )

    def _remedy(self) -> str:
        if not self.holders:
            return "no pod holds more than its even share: the node has too little for its GPUs"
        if not self.holders[0].gpus:
            return (
                "keep pods without GPUs off the node (kubectl taint node "
                f"{self.node} nvidia.com/gpu=present:NoSchedule), and restart the pods listed here "
                "elsewhere"
            )
        return f"lower the requests of the pods listed here to {_words(self.need)} for each GPU"


@dataclass(frozen=True, slots=True)
class TypicalNeeds:
    """Typical host resources for a GPU: the median of the pods that request any.

    Attributes:
        by_resource: requests of a GPU or replica, by resource name; 0 for what no pod requests.
    """

    by_resource: Mapping[str, HostResources]

    def of(self, resource: str, host: HostResources, count: int) -> tuple[HostResources, set[str]]:
        """Return CPU, memory and storage for one GPU, and the names of assumed amounts.

        Args:
            resource: resource name of the GPU.
            host: allocatable resources of its node.
            count: GPUs or replicas of the node.
        """
        needs = self.by_resource.get(resource, NONE)
        even = HostResources(
            int(host.millicores * _EVEN_PART / count),
            int(host.memory_bytes * _EVEN_PART / count),
            0,
        )
        assumed = {
            name for name, need, part in zip(NAMES, needs, even, strict=True) if not need and part
        }
        return HostResources(
            *(need or part for need, part in zip(needs, even, strict=True))
        ), assumed


def find_needs(fleet: Fleet, pods: Mapping[str, PlacedPod]) -> Steps[TypicalNeeds]:
    """Compute the typical host resources for a GPU, in steps.

    Args:
        pods: requests of every pod that has a node, by `namespace/name`.
    """
    seen: dict[str, tuple[list[int], list[int], list[int]]] = {}
    for at, record in enumerate(tuple(fleet.pods.values())):
        if at % _PIECE_GPU_PODS == _PIECE_GPU_PODS - 1:
            yield
        placed = pods.get(record.key) if record.node else None
        requested = record.host if placed is None else placed.needs
        if record.gives_way or record.phase.is_terminal:
            continue
        for resource, count in record.resources.items():
            for values, value in zip(
                seen.setdefault(resource, ([], [], [])), requested, strict=True
            ):
                if value:
                    values.append(-(-value // count))
    return TypicalNeeds(
        {
            resource: HostResources(*(median_high(values) if values else 0 for values in each))
            for resource, each in seen.items()
        }
    )


def count_usable(node: NodeRecord, resource: str, row: PoolRow, needs: TypicalNeeds) -> int:
    """Return the free GPUs, or replicas, for which a node has CPU, memory and storage left.

    Args:
        resource: resource name of the GPUs.
        row: the node's row in the resource's pool.
        needs: typical host resources for a GPU.
    """
    free = max(row.allocatable - row.held, 0)
    if node.host is None or not free:
        return free
    need, _ = needs.of(resource, node.host, row.allocatable)
    return min([free, *_fits(row, need).values()])


def count_stranded(node: NodeRecord, resource: str, row: PoolRow, needs: TypicalNeeds) -> int:
    """Return the free GPUs, or replicas, that `count_usable` leaves out."""
    return max(row.allocatable - row.held, 0) - count_usable(node, resource, row, needs)


def _fits(row: PoolRow, need: HostResources) -> dict[str, int]:
    """Return the number of GPUs that each host resource of a node can serve."""
    return {
        name: rest // each for name, rest, each in zip(NAMES, _left(row), need, strict=True) if each
    }


def _left(row: PoolRow) -> HostResources:
    return HostResources(row.free_millicores, row.free_bytes, row.free_storage_bytes)


def find_stranded(
    fleet: Fleet, pods: Mapping[str, PlacedPod], node: str | None = None
) -> Steps[list[_StrandedNode]]:
    """Find stranded GPUs in steps, the nodes with most of them first.

    Args:
        pods: requests of every pod that has a node, by `namespace/name`.
        node: only this node; None for all.
    """
    needs = yield from find_needs(fleet, pods)
    found: list[_StrandedNode] = []
    for pool in fleet.snapshot().pools.values():
        for at, (name, row) in enumerate(zip(pool.nodes, pool.rows, strict=True)):
            if at % _PIECE_NODES == _PIECE_NODES - 1:
                yield
            record = fleet.nodes.get(name)
            if record is not None and node in {None, name}:
                found += _of_row(record, pool.resource, row, needs)
    holders = yield from _holders(pods, {one.node for one in found})
    found = [_with_holders(fleet, one, holders[one.node]) for one in found]
    return sorted(found, key=lambda one: (-one.gpus, one.node))


def _of_row(
    node: NodeRecord, resource: str, row: PoolRow, needs: TypicalNeeds
) -> Iterator[_StrandedNode]:
    """Yield a node if it lacks host resources for its free GPUs behind a resource."""
    free = row.allocatable - row.held
    gpus = count_stranded(node, resource, row, needs) // row.replicas
    if node.host is None or not gpus or node.is_unschedulable or not node.is_ready:
        return
    need, assumed = needs.of(resource, node.host, row.allocatable)
    fits = _fits(row, need)
    lacks = sorted((name for name in fits if fits[name] < free), key=fits.__getitem__)
    yield _StrandedNode(
        node=node.name,
        resource=resource,
        gpus=gpus,
        free=free // row.replicas,
        lacks=tuple(lacks),
        left=_left(row),
        need=need,
        is_assumed=lacks[0] in assumed,
    )


def _holders(
    pods: Mapping[str, PlacedPod], nodes: AbstractSet[str]
) -> Steps[dict[str, list[tuple[str, HostResources]]]]:
    """Return the requests of the pods on the given nodes, by node."""
    found: dict[str, list[tuple[str, HostResources]]] = {name: [] for name in nodes}
    if not nodes:
        return found
    for at, (key, placed) in enumerate(tuple(pods.items())):
        if at % _PIECE_PODS == _PIECE_PODS - 1:
            yield
        if placed.node in found:
            found[placed.node].append((key, placed.needs))
    return found


def _with_holders(
    fleet: Fleet, found: _StrandedNode, pods: Sequence[tuple[str, HostResources]]
) -> _StrandedNode:
    """Add the pods that hold more of the scarcest resource than the even share of their GPUs."""
    record = fleet.nodes.get(found.node)
    pool = fleet.snapshot().pools.get(found.resource)
    if record is None or record.host is None or pool is None or found.node not in pool.row_of:
        return found
    row = pool.rows[pool.row_of[found.node]]
    gpus_of = {  # also those of the node's other resources, such as other MIG profiles
        pod.key: sum(pod.resources.values()) or len(pod.claimed or ())
        for pod in fleet.pods_on(found.node)
    }
    scarce = NAMES.index(found.lacks[0])
    whole = max(record.host[scarce], 1)
    every = max(sum(record.allocatable.values()), row.allocatable)
    holders = [
        _Holder(
            key, gpus_of.get(key, 0), needs, needs[scarce] / whole - gpus_of.get(key, 0) / every
        )
        for key, needs in pods
    ]
    kept = sorted((one for one in holders if one.part > 0), key=lambda one: (-one.part, one.key))
    return replace(found, holders=tuple(kept))


def _json(resources: HostResources) -> HostAmounts:
    return HostAmounts(
        cpus=resources.millicores / 1000,
        memory_bytes=resources.memory_bytes,
        storage_bytes=resources.storage_bytes,
    )


def _words(need: HostResources) -> str:
    """Describe requests in one line."""
    words = [f"{need.millicores / 1000:g} CPUs"] if need.millicores else []
    words += [f"{need.memory_bytes / GIB:.0f} GiB of memory"] if need.memory_bytes else []
    words += [f"{need.storage_bytes / GIB:.0f} GiB of storage"] if need.storage_bytes else []
    return ", ".join(words)


def _holder_view(holder: _Holder) -> StrandedHolder:
    namespace = namespace_of(holder.key)
    return StrandedHolder(
        pod=pod_key(holder.key),
        gpus=holder.gpus,
        part=holder.part,
        requests=of_pod(namespace, _json(holder.needs)),
    )


# --- pods to move ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A pod that has to move.

    Attributes:
        gpus: number of devices or replicas that it holds of the resource.
        to: a node with room for it, "" without one.
    """

    pod: PodRecord
    gpus: int
    to: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The pods to move so that a node has enough free devices.

    Attributes:
        free: number of devices or replicas that are free there now.
        moves: the pods to move, the largest first.
    """

    node: str
    free: int
    moves: tuple[_Move, ...]

    @property
    def fits(self) -> bool:
        """Whether all pods fit on other nodes."""
        return all(move.to for move in self.moves)

    @property
    def cost(self) -> tuple[bool, int, int, str]:
        """Sort key of plans: plans that fit first, then fewest moves, then fewest GPUs."""
        gpus = sum(move.gpus for move in self.moves)
        return not self.fits, len(self.moves), gpus, self.node

    def view(self) -> MovePlan:
        """Describe the plan for an answer."""
        return MovePlan(
            node=self.node,
            free=self.free,
            fits=self.fits,
            moves=[
                PodMove(
                    pod=pod_key(move.pod.key),
                    owner=of_pod(move.pod.namespace, move.pod.owner or None),
                    gpus=move.gpus,
                    to=move.to or None,
                )
                for move in self.moves
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defrag:
    """Nodes with room for a request, and moves that make room on further nodes.

    Attributes:
        ready: nodes that have room already.
        plans: the moves for other nodes, the best first.
    """

    ready: tuple[str, ...] = ()
    plans: tuple[_Plan, ...] = ()


@dataclass(slots=True)
class _Room:
    """Free devices of each node of a pool; nodes that admit no pods have none."""

    free: Rows
    millicores: Rows
    memory_bytes: Rows
    storage_bytes: Rows

    def copy(self) -> "_Room":
        return _Room(
            self.free.copy(),
            self.millicores.copy(),
            self.memory_bytes.copy(),
            self.storage_bytes.copy(),
        )

    def place(self, gpus: int, needs: HostResources) -> int | None:
        """Allocate a pod's devices on the fullest node with room; return the node's row."""
        fits = (
            (self.free >= gpus)
            & (self.millicores >= needs.millicores)
            & (self.memory_bytes >= needs.memory_bytes)
            & (self.storage_bytes >= needs.storage_bytes)
        )
        if not fits.any():
            return None
        at = int(np.argmin(np.where(fits, self.free, np.iinfo(np.intp).max)))
        self.free[at] -= gpus
        self.millicores[at] -= needs.millicores
        self.memory_bytes[at] -= needs.memory_bytes
        self.storage_bytes[at] -= needs.storage_bytes
        return at


def find_plans(
    fleet: Fleet, resource: str, gpus: int, *, is_open: _IsOpen, host_pods: HostPods
) -> Steps[_Defrag]:
    """Find the fewest moves that free devices on one node, in cooperative steps.

    Pods of DaemonSets stay, and pods that are being deleted count as gone. Stranded devices do not
    count as free, nor do devices that cannot work or are used whole from outside Kubernetes. A node
    that would lack CPU, memory or storage for the devices after the moves has no plan.

    Args:
        resource: resource name of the devices.
        gpus: number of devices, or replicas, that must be free on the node.
        is_open: returns whether kube-scheduler may place pods on a node.
        host_pods: returns the CPU, memory and storage of the pods.
    """
    snapshot = fleet.snapshot()
    pool = snapshot.pools.get(resource)
    if pool is None:
        return _Defrag()
    overlay = fleet.ledger.overlays(without="").get(resource, {})
    ready: list[str] = []
    wanted: list[tuple[int, int, str, int]] = []
    free = np.zeros(len(pool.nodes), dtype=np.intp)
    needs = yield from find_needs(fleet, host_pods())
    for at, node in enumerate(pool.nodes):
        if at % _PIECE_CANDIDATES == 0:
            yield
        row = pool.rows[at]
        if node not in fleet.nodes or not is_open(node) or row.is_reconfiguring:
            continue
        assumed = sum(tenant.count for tenant in overlay.get(node, ()))
        bad_free, bad = _bad(row, snapshot.telemetry)
        free[at] = max(row.allocatable - row.held - assumed - bad_free, 0)
        missing = gpus - _leaving(fleet, node, resource) - int(free[at])
        if count_usable(fleet.nodes[node], resource, row, needs) - assumed - bad_free >= gpus:
            ready.append(node)
        elif free[at] >= gpus or row.allocatable - bad < gpus:
            continue
        elif (least := _fewest(fleet, node, resource, missing)) is not None:
            wanted.append((len(least), sum(count for _, count in least), node, missing))
    room = _Room(
        free,
        np.array([row.free_millicores for row in pool.rows], dtype=np.intp),
        np.array([row.free_bytes for row in pool.rows], dtype=np.intp),
        np.array([row.free_storage_bytes for row in pool.rows], dtype=np.intp),
    )
    plans: list[_Plan] = []
    for _, _, node, missing in sorted(wanted):
        yield
        lacks = _lacking(fleet, pool, node, gpus, needs, host_pods())
        plan = _plan(fleet, pool, node, missing, room, host_pods(), lacks=lacks)
        plans += [plan] if plan else []
        if len(plans) == _MAX_EXAMINED:
            break
    plans.sort(key=lambda plan: plan.cost)
    return _Defrag(ready=tuple(ready), plans=tuple(plans))


def _bad(row: PoolRow, telemetry: Telemetry) -> tuple[int, int]:
    """Count a node's replicas on unhealthy devices: the free replicas, and all replicas."""
    free = every = 0
    for slot, used in zip(row.slots, row.used, strict=True):
        if is_bad(slot, row, telemetry):
            free += max(row.replicas - used, 0)
            every += row.replicas
    # The kubelet withdraws bad devices first.
    return max(free - row.withdrawn, 0), max(every - row.withdrawn, 0)


def _leaving(fleet: Fleet, node: str, resource: str) -> int:
    """Return the devices of pods that are being deleted."""
    return sum(pod.resources.get(resource, 0) for pod in fleet.pods_on(node) if pod.is_deleting)


def _movable(fleet: Fleet, node: str, resource: str) -> list[tuple[PodRecord, int]]:
    """Return the pods that can move with their number of devices, the largest first."""
    found = [
        (pod, pod.resources[resource])
        for pod in fleet.pods_on(node)
        if pod.resources.get(resource)
        and not pod.is_deleting
        and not pod.owner.startswith(_DAEMON_SET)
    ]
    return sorted(found, key=lambda held: (-held[1], held[0].priority, held[0].key))


def _fewest(
    fleet: Fleet, node: str, resource: str, missing: int
) -> list[tuple[PodRecord, int]] | None:
    """Return the fewest pods that hold the missing devices; None if all together hold too few."""
    chosen: list[tuple[PodRecord, int]] = []
    for pod, count in _movable(fleet, node, resource):
        if missing <= 0:
            break
        chosen.append((pod, count))
        missing -= count
    return chosen if missing <= 0 else None


def _lacking(
    fleet: Fleet,
    pool: Pool,
    node: str,
    gpus: int,
    needs: TypicalNeeds,
    placed: Mapping[str, PlacedPod],
) -> HostResources:
    """Return the host resources that a node lacks for free devices, once deleted pods are gone."""
    record, row = fleet.nodes[node], pool.rows[pool.row_of[node]]
    if record.host is None:
        return NONE
    need, _ = needs.of(pool.resource, record.host, row.allocatable)
    gone = _needs_of([pod for pod in fleet.pods_on(node) if pod.is_deleting], placed)
    return HostResources(
        *(gpus * each - rest for each, rest in zip(need, _left(row).plus(gone), strict=True))
    )


def _needs_of(pods: Sequence[PodRecord], placed: Mapping[str, PlacedPod]) -> HostResources:
    total = NONE
    for pod in pods:
        total = total.plus(placed[pod.key].needs) if pod.key in placed else total
    return total


def _plan(
    fleet: Fleet,
    pool: Pool,
    node: str,
    missing: int,
    room: _Room,
    needs: Mapping[str, PlacedPod],
    *,
    lacks: HostResources,
) -> _Plan | None:
    """Return the fewest moves that free a node; prefer pods that fit on other nodes.

    None if the node still lacks the host resources `lacks` after the moves.
    """
    pods = _movable(fleet, node, pool.resource)
    size = len(_fewest(fleet, node, pool.resource, missing) or ())
    at = pool.row_of[node]
    free = int(room.free[at])
    plans: list[_Plan] = []
    for chosen in islice(combinations(pods, size), _MAX_TRIES):
        if sum(count for _, count in chosen) < missing:
            continue
        freed = _needs_of([pod for pod, _ in chosen], needs)
        if any(lack > got for lack, got in zip(lacks, freed, strict=True)):
            continue
        plan = _Plan(node=node, free=free, moves=_moves(pool, at, chosen, room, needs))
        plans.append(plan)
        if plan.fits and sum(move.gpus for move in plan.moves) == missing:
            break
    return min(plans, key=lambda plan: plan.cost, default=None)


def _moves(
    pool: Pool,
    at: int,
    chosen: Sequence[tuple[PodRecord, int]],
    room: _Room,
    needs: Mapping[str, PlacedPod],
) -> tuple[_Move, ...]:
    """Place the chosen pods on other nodes, the largest first."""
    left = room.copy()
    left.free[at] = 0
    moves = []
    for pod, count in chosen:
        placed = needs.get(pod.key)
        to = left.place(count, NONE if placed is None else placed.needs)
        moves.append(_Move(pod=pod, gpus=count, to="" if to is None else pool.nodes[to]))
    return tuple(moves)
