"""Simulation of one day of pods that share time-sliced GPUs.

Two jobs that share a GPU run at 1.024 - 0.402 x the product of their utilizations (a fit to 1,388
measured pairs on an RTX 3090, Lucid, ASPLOS '23), at most at full speed; with several others each
reduces the speed further. A device that runs out of memory ends its youngest pod, which restarts
from the beginning after a back-off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from bench.sharing_pods import STEP_SECONDS, STEPS, ForeignLoad, Pods
from bench.traces import Floats, Ints
from bench.virtual_cluster import Shape

ALONE_SPEED: Final = 1.024
SHARED_SPEED: Final = 0.402
BACK_OFF_SECONDS: Final = (10.0, 360.0)
"""Back-off of the Job controller: after the first failure, doubled at each further one, and its
maximum."""
NO_POD: Final = -1


class Placement(Protocol):
    """Policy that chooses nodes, with hooks for changes of the cluster."""

    def choose(self, day: "Day", pod: int, nodes: Sequence[int]) -> int | None:
        """Return one of the nodes with a free replica, or None to let the pod wait."""

    def start(self, day: "Day", pod: int, node: int) -> None:
        """Process the start of a pod."""

    def end(self, day: "Day", pod: int, *, is_failed: bool) -> None:
        """Process the end of a pod."""

    def step(self, day: "Day") -> None:
        """Process the current readings of the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of a day's pods.

    Attributes:
        slowdown: time from arrival to end of each pod, divided by its run time alone; a pod that is
            unfinished at the end of the day counts as if it then ran alone.
        wait_seconds: time of each pod in the queue.
        ooms: number of pods that ended because their device ran out of memory.
    """

    slowdown: Floats
    wait_seconds: Floats
    ooms: int


@dataclass(slots=True, kw_only=True)
class Day:
    """State of a simulated day; pods and devices by number.

    Attributes:
        shape: the cluster.
        pods: pods of the day.
        foreign: load outside Kubernetes.
        ties: random numbers for ties of the device plugin.
        at: number of the current step.
        slots: pod by device and replica, `NO_POD` for a free replica.
        progress: seconds of work that each pod has done.
        tries: number of starts of each pod.
        started: step of the last start of each pod.
        utilization: utilization of each device, 0 to 1.
        memory_bytes: used memory of each device.
        foreign_bytes: part of it that processes outside Kubernetes use.
    """

    shape: Shape
    pods: Pods
    foreign: ForeignLoad
    ties: np.random.Generator
    at: int = 0
    slots: Ints = field(init=False)
    progress: Floats = field(init=False)
    tries: Ints = field(init=False)
    utilization: Floats = field(init=False)
    memory_bytes: Floats = field(init=False)
    foreign_bytes: Floats = field(init=False)
    started: Ints = field(init=False)
    _ended: Floats = field(init=False)
    _waited: Floats = field(init=False)
    _ooms: int = 0

    def __post_init__(self) -> None:
        count, devices = len(self.pods), self.shape.devices
        self.slots = np.full((devices, self.shape.replicas), NO_POD, dtype=np.intp)
        self.progress, self._waited = np.zeros(count), np.zeros(count)
        self._ended = np.full(count, np.nan)
        self.tries, self.started = np.zeros(count, dtype=np.intp), np.zeros(count, dtype=np.intp)
        self.utilization, self.memory_bytes = np.zeros(devices), np.zeros(devices)
        self.foreign_bytes = np.zeros(devices)

    @property
    def seconds(self) -> float:
        """Time since the start of the day."""
        return self.at * STEP_SECONDS

    @property
    def used(self) -> Ints:
        """Number of used replicas of each device."""
        count: Ints = (self.slots != NO_POD).sum(axis=1)
        return count

    def name_of(self, pod: int) -> str:
        """Return the name of a pod's latest start: in the cluster each start is a new pod."""
        return f"pod-{pod}-{self.tries[pod]}"

    def run(self, placement: Placement) -> Outcome:
        """Run the whole day with a policy."""
        waiting: list[int] = []
        returning: list[tuple[float, int]] = []
        coming = 0
        for self.at in range(STEPS):
            for pod in self.pass_step(placement):
                first, most = BACK_OFF_SECONDS
                pause = min(first * 2.0 ** (int(self.tries[pod]) - 1), most)
                returning.append((self.seconds + pause, pod))
            placement.step(self)
            waiting += [pod for at, pod in returning if at <= self.seconds]
            returning = [(at, pod) for at, pod in returning if at > self.seconds]
            while coming < len(self.pods) and self.pods.arrives[coming] <= self.seconds:
                waiting.append(coming)
                coming += 1
            waiting = [pod for pod in waiting if not self.place(placement, pod)]
            self.note_waiting(waiting)
        return self._outcome()

    def _outcome(self) -> Outcome:
        alone = self.pods.alone
        left = np.maximum(alone - self.progress, 0.0)
        end = np.where(np.isnan(self._ended), STEPS * STEP_SECONDS + left, self._ended)
        return Outcome(
            slowdown=(end - self.pods.arrives) / alone, wait_seconds=self._waited, ooms=self._ooms
        )

    def note_waiting(self, waiting: Sequence[int]) -> None:
        """Count the step for the pods that found no node in it."""
        self._waited[waiting] += STEP_SECONDS

    def place(self, placement: Placement, pod: int) -> bool:
        """Place a pod if it finds a node; return whether it did."""
        nodes = self.nodes_for(pod)
        node = placement.choose(self, pod, nodes) if nodes else None
        if node is None:
            return False
        for device in self.hand_out(pod, node).tolist():
            slot = int(np.flatnonzero(self.slots[device] == NO_POD)[0])
            self.slots[device, slot] = pod
        self.started[pod] = self.at
        self.progress[pod] = 0.0
        self.tries[pod] += 1
        placement.start(self, pod, node)
        return True

    def nodes_for(self, pod: int) -> list[int]:
        """Return the nodes where kube-scheduler finds room for a pod."""
        del pod  # all ask for one replica
        free = self.shape.cards * self.shape.replicas - self.used_by_node()
        nodes: list[int] = np.flatnonzero(free > 0).tolist()
        return nodes

    def used_by_node(self) -> Ints:
        """Return the number of used replicas of each node."""
        count: Ints = self.used.reshape(self.shape.nodes, self.shape.cards).sum(axis=1)
        return count

    def landing(self, node: int) -> Ints:
        """Return the devices that the plugin may assign: those with the fewest pods."""
        first = node * self.shape.cards
        used = self.used[first : first + self.shape.cards]
        return first + np.flatnonzero(used == used.min())

    def hand_out(self, pod: int, node: int) -> Ints:
        """Return the devices that a pod gets on a node."""
        del pod  # all ask for one replica
        return np.array([self.ties.choice(self.landing(node))])

    def pass_step(self, placement: Placement) -> list[int]:
        """Advance by one step; return the pods that failed."""
        held = self.slots != NO_POD
        pods = np.where(held, self.slots, 0)
        busy = np.where(held, self.pods.utilization(pods, self.progress[pods]), 0.0)
        foreign = self.foreign.utilization[self.at]
        speed = _speeds(busy, foreign)
        # A pod with several devices is as fast as the slowest of them.
        slowest = np.full(len(self.pods), np.inf)
        np.minimum.at(slowest, pods[held], speed[held])
        running = np.array(list(dict.fromkeys(pods[held].tolist())), dtype=np.intp)
        self.progress[running] += STEP_SECONDS * slowest[running]
        self.utilization = np.minimum(busy.sum(axis=1) + foreign, 1.0)
        for pod in running[self.progress[running] >= self.pods.alone[running]].tolist():
            self._ended[pod] = self.seconds
            self.leave(placement, pod, is_failed=False)
        return self._end_where_full(placement)

    def _end_where_full(self, placement: Placement) -> list[int]:
        """End the youngest pods of devices that ran out of memory; return them."""
        size = self.shape.memory_bytes
        ended: list[int] = []
        wanted = size * self.foreign.memory[self.at]
        while True:
            held = self.slots != NO_POD
            pods = np.where(held, self.slots, 0)
            by_pods = np.where(held, self.pods.memory(pods, self.progress[pods]), 0.0).sum(axis=1)
            # A process outside Kubernetes takes the free memory when it starts, and keeps it.
            comes = (wanted > 0) & (self.foreign_bytes == 0)
            fits = np.clip(size - by_pods, 1.0, wanted)
            self.foreign_bytes = np.where(
                wanted > 0, np.where(comes, fits, self.foreign_bytes), 0.0
            )
            self.memory_bytes = np.minimum(by_pods + self.foreign_bytes, size)
            full = np.flatnonzero((by_pods + self.foreign_bytes > size + 1.0) & held.any(axis=1))
            if not full.size:
                return ended
            for device in full.tolist():
                on_it = self.slots[device][held[device]]
                pod = int(max(on_it, key=lambda pod: (self.started[pod], pod)))
                self._ooms += 1
                self.leave(placement, pod, is_failed=True)
                ended.append(pod)

    def leave(self, placement: Placement, pod: int, *, is_failed: bool) -> None:
        """Free the devices of a pod that has ended; one that failed will start again."""
        self.slots[self.slots == pod] = NO_POD
        if is_failed:
            self.progress[pod] = 0.0
        placement.end(self, pod, is_failed=is_failed)


def _speeds(busy: Floats, foreign: Floats) -> Floats:
    """Return the speed of the pod in each slot.

    Args:
        busy: utilization by device and slot, 0 for a free slot.
        foreign: utilization outside Kubernetes by device.
    """
    pairs = np.minimum(ALONE_SPEED - SHARED_SPEED * busy[:, :, None] * busy[:, None, :], 1.0)
    slots = np.arange(busy.shape[1])
    pairs[:, slots, slots] = 1.0
    beside = np.minimum(ALONE_SPEED - SHARED_SPEED * busy * foreign[:, None], 1.0)
    speed: Floats = pairs.prod(axis=2) * beside
    return speed
