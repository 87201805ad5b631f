"""Find the smallest number of pods to move so that a node has room for a large request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Final

import numpy as np

from extender.answers.fleet import MovePlan, PodMove
from extender.core.nodes.host_resources import NONE, HostResources, PlacedPod
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Pool, PoolRow, Rows, Telemetry
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.fleet.impossible_requests import is_bad
from extender.insight.stranded import HostPods, count_usable, find_needs
from extender.server.redaction import of_pod, pod_key

_MAX_EXAMINED: Final = 64
"""Maximum number of nodes whose pods are tried on other nodes: those with the fewest moves."""

_MAX_TRIES: Final = 100
"""Maximum number of choices of pods that are tried for one node."""

_PIECE_NODES: Final = 200
_DAEMON_SET: Final = "DaemonSet "

_IsOpen = Callable[[str], bool]
"""Returns whether kube-scheduler may place pods on a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A pod that has to move.

    Attributes:
        pod: the pod.
        gpus: number of devices or replicas that it holds of the resource.
        to: a node with room for it, "" without one.
    """

    pod: PodRecord
    gpus: int
    to: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The moves that free a node.

    Attributes:
        node: name of the node.
        free: its devices or replicas that are free already.
        moves: the moves, largest pod first.
    """

    node: str
    free: int
    moves: tuple[Move, ...]

    @property
    def fits(self) -> bool:
        """Whether all pods fit on other nodes."""
        return all(move.to for move in self.moves)

    @property
    def cost(self) -> tuple[bool, int, int, str]:
        """Order among plans: those that fit first, then fewest moves, then fewest GPUs."""
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
class Defrag:
    """Nodes with room for a request, and moves that make room on further nodes.

    Attributes:
        ready: nodes that have room already.
        plans: the moves for other nodes, the best first.
    """

    ready: tuple[str, ...] = ()
    plans: tuple[Plan, ...] = ()


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
) -> Steps[Defrag]:
    """Find the fewest moves that free devices on one node, in cooperative steps.

    Pods of DaemonSets stay, and pods that are being deleted count as gone. Stranded devices do not
    count as free, nor do devices that cannot work or are used whole from outside Kubernetes.

    Args:
        fleet: the fleet.
        resource: resource name of the devices.
        gpus: number of devices, or replicas, that must be free on the node.
        is_open: returns whether kube-scheduler may place pods on a node.
        host_pods: returns the CPU, memory and storage of the pods.
    """
    snapshot = fleet.snapshot()
    pool = snapshot.pools.get(resource)
    if pool is None:
        return Defrag()
    overlay = fleet.ledger.overlays(without="").get(resource, {})
    ready: list[str] = []
    wanted: list[tuple[int, int, str, int]] = []
    free = np.zeros(len(pool.nodes), dtype=np.intp)
    needs = yield from find_needs(fleet, host_pods())
    for at, node in enumerate(pool.nodes):
        if at % _PIECE_NODES == 0:
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
        elif least := _fewest(fleet, node, resource, missing):
            wanted.append((len(least), sum(count for _, count in least), node, missing))
    room = _Room(
        free,
        np.array([row.free_millicores for row in pool.rows], dtype=np.intp),
        np.array([row.free_bytes for row in pool.rows], dtype=np.intp),
        np.array([row.free_storage_bytes for row in pool.rows], dtype=np.intp),
    )
    plans = []
    for _, _, node, missing in sorted(wanted)[:_MAX_EXAMINED]:
        yield
        plans.append(_plan(fleet, pool, node, missing, room, host_pods))
    plans.sort(key=lambda plan: plan.cost)
    return Defrag(ready=tuple(ready), plans=tuple(plans))


def _bad(row: PoolRow, telemetry: Telemetry) -> tuple[int, int]:
    """Return the replicas on bad devices that a node offers: the free ones, and all."""
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


def _plan(
    fleet: Fleet, pool: Pool, node: str, missing: int, room: _Room, host_pods: HostPods
) -> Plan:
    """Return the fewest moves that free a node; prefer pods that fit on other nodes."""
    pods = _movable(fleet, node, pool.resource)
    size = len(_fewest(fleet, node, pool.resource, missing) or ())
    at, needs = pool.row_of[node], host_pods()
    free = int(room.free[at])
    plans: list[Plan] = []
    for chosen in islice(combinations(pods, size), _MAX_TRIES):
        if sum(count for _, count in chosen) < missing:
            continue
        plan = Plan(node=node, free=free, moves=_moves(pool, at, chosen, room, needs))
        plans.append(plan)
        if plan.fits and sum(move.gpus for move in plan.moves) == missing:
            break
    return min(plans, key=lambda plan: plan.cost)


def _moves(
    pool: Pool,
    at: int,
    chosen: Sequence[tuple[PodRecord, int]],
    room: _Room,
    needs: Mapping[str, PlacedPod],
) -> tuple[Move, ...]:
    """Place the chosen pods on other nodes, the largest first."""
    left = room.copy()
    left.free[at] = 0
    moves = []
    for pod, count in chosen:
        placed = needs.get(pod.key)
        to = left.place(count, NONE if placed is None else placed.needs)
        moves.append(Move(pod=pod, gpus=count, to="" if to is None else pool.nodes[to]))
    return tuple(moves)
