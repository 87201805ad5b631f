"""Run a simulated day on a fleet with whole GPUs, shared GPUs, and limited CPU and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from bench.day_pods import (
    CARDS,
    HOST,
    LARGEST,
    NODES,
    SHARED,
    WHOLE,
    FleetPods,
    draw_broken,
    draw_fleet_pods,
    draw_outside,
)
from bench.sharing_day import NO_POD, Day, Placement
from bench.sharing_pods import STEP_SECONDS
from bench.traces import Floats, Ints
from bench.virtual_cluster import Shape

DIES_AFTER_STEPS: Final = 2
"""Number of steps after which a pod on a broken card fails."""

HOUR_STEPS: Final = 3600 / STEP_SECONDS
ALL: Final = Shape(nodes=NODES, cards=CARDS, replicas=SHARED.replicas)
"""Nodes of the fleet; only the first slot of a whole GPU is used."""


@dataclass(slots=True)
class Counts:
    """Counts of events on a day.

    Attributes:
        on_broken: starts of pods with a broken card.
        on_foreign: starts on a whole GPU with foreign use.
        beside_foreign: starts on a shared GPU with foreign use.
        broken_ends: pods that failed on a broken card.
        shut_out: pods for 8 GPUs without a node at arrival although the fleet had 8 free GPUs.
        idle_hours: GPU-hours of free, working and idle whole GPUs while pods waited for them.
    """

    on_broken: int = 0
    on_foreign: int = 0
    beside_foreign: int = 0
    broken_ends: int = 0
    shut_out: int = 0
    idle_hours: float = 0.0


class FleetDay(Day):
    """State of a simulated day of the fleet.

    Args:
        seed: seed of all draws of the day.
        pods: the pods; None to draw them.

    Attributes:
        fleet_pods: the pods of the day.
        millicores: CPU that each node's pods request.
        host_bytes: memory that each node's pods request.
        broken: whether each card is broken, by step and card.
        counts: counts of events so far.
    """

    def __init__(self, seed: int, pods: FleetPods | None = None) -> None:
        self.fleet_pods = pods or draw_fleet_pods(seed)
        super().__init__(
            shape=ALL,
            pods=self.fleet_pods,
            foreign=draw_outside(seed),
            ties=np.random.default_rng([seed, 3]),
        )
        self.broken = draw_broken(seed)
        self.millicores = np.zeros(NODES, dtype=np.intp)
        self.host_bytes = np.zeros(NODES, dtype=np.intp)
        self.counts = Counts()
        self._seen = np.zeros(len(self.fleet_pods), dtype=np.bool_)

    @property
    def free(self) -> Ints:
        """Number of free GPUs or replicas of each node, as kube-scheduler counts them."""
        offered = np.where(np.arange(NODES) < WHOLE.nodes, CARDS, CARDS * SHARED.replicas)
        free: Ints = offered - self.used_by_node()
        return free

    def shares(self, nodes: Sequence[int], pod: int | None = None) -> tuple[Floats, Floats]:
        """Return the requested shares of each node's CPU and memory, including a pod if given."""
        at = list(nodes)
        more = (
            (0, 0)
            if pod is None
            else (self.fleet_pods.millicores[pod], self.fleet_pods.host_bytes[pod])
        )
        return (
            (self.millicores[at] + more[0]) / HOST.millicores,
            (self.host_bytes[at] + more[1]) / HOST.memory_bytes,
        )

    @override
    def nodes_for(self, pod: int) -> list[int]:
        """Return the nodes with enough free GPUs, CPU and memory for a pod."""
        cpu, memory = self.shares(range(NODES), pod)
        has_room = (self.free >= self.fleet_pods.gpus[pod]) & (cpu <= 1) & (memory <= 1)
        has_room &= (np.arange(NODES) < WHOLE.nodes) == self.fleet_pods.is_whole[pod]
        nodes: list[int] = np.flatnonzero(has_room).tolist()
        return nodes

    @override
    def hand_out(self, pod: int, node: int) -> Ints:
        """Return the assigned devices: any free whole GPUs, or the shared one with fewest pods."""
        if not self.fleet_pods.is_whole[pod]:
            return super().hand_out(pod, node)
        first = node * CARDS
        free = first + np.flatnonzero(self.slots[first : first + CARDS, 0] == NO_POD)
        return self.ties.permutation(free)[: self.fleet_pods.gpus[pod]]

    @override
    def place(self, placement: Placement, pod: int) -> bool:
        """Place a pod if a node has room, and count the kind of its devices."""
        is_first, self._seen[pod] = not self._seen[pod], True
        free = int(self.free[: WHOLE.nodes].sum())
        if not super().place(placement, pod):
            if is_first and self.fleet_pods.gpus[pod] == LARGEST <= free:
                self.counts.shut_out += 1
            return False
        cards = np.flatnonzero((self.slots == pod).any(axis=1))
        node = int(cards[0]) // CARDS
        self.millicores[node] += self.fleet_pods.millicores[pod]
        self.host_bytes[node] += self.fleet_pods.host_bytes[pod]
        self.counts.on_broken += bool(self.broken[self.at, cards].any())
        if (self.foreign.utilization[self.at, cards] > 0).any():
            self.counts.on_foreign += bool(self.fleet_pods.is_whole[pod])
            self.counts.beside_foreign += not self.fleet_pods.is_whole[pod]
        return True

    @override
    def leave(self, placement: Placement, pod: int, *, is_failed: bool) -> None:
        """Release the devices and requests of a pod."""
        node = int(np.flatnonzero((self.slots == pod).any(axis=1))[0]) // CARDS
        self.millicores[node] -= self.fleet_pods.millicores[pod]
        self.host_bytes[node] -= self.fleet_pods.host_bytes[pod]
        super().leave(placement, pod, is_failed=is_failed)

    @override
    def pass_step(self, placement: Placement) -> list[int]:
        """Advance by one step; pods that have been on a broken card for half a minute fail."""
        failed = super().pass_step(placement)
        # Pods that have just ended are not active any more.
        is_empty = (self.slots == NO_POD).all(axis=1)
        self.utilization[is_empty] = self.foreign.utilization[self.at, is_empty]
        since = self.at - DIES_AFTER_STEPS
        long_broken = self.broken[max(since, 0) : self.at + 1].all(axis=0)
        for pod in np.unique(self.slots[long_broken]).tolist():
            if pod != NO_POD and self.started[pod] <= since:
                self.counts.broken_ends += 1
                self.leave(placement, pod, is_failed=True)
                failed.append(pod)
        return failed

    @override
    def note_waiting(self, waiting: Sequence[int]) -> None:
        """Count the step for the waiting pods, and the whole GPUs that they could have used."""
        super().note_waiting(waiting)
        wanted = int(
            self.fleet_pods.gpus[[pod for pod in waiting if self.fleet_pods.is_whole[pod]]].sum()
        )
        if wanted:
            cards = slice(WHOLE.devices)
            is_idle = self.slots[cards, 0] == NO_POD
            is_idle &= ~self.broken[self.at, cards] & (
                self.foreign.utilization[self.at, cards] == 0
            )
            self.counts.idle_hours += min(int(is_idle.sum()), wanted) / HOUR_STEPS
