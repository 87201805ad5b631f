"""Schedule pods as kube-scheduler does without an extender, on a separate fleet.

The model covers kube-scheduler's resource fit and default scores. The pods' fates follow from the
simulated GPUs.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from simulation.devices import Device, Load
from simulation.fleet import SimulatedFleet
from simulation.kubelet import load_of, pod_ref, requested
from simulation.models import GIB, MIB
from simulation.nodes import Sharing
from simulation.objects import JsonObject

_Shares = npt.NDArray[np.float64]

_UNSET_SHARES = (0.1 / 128, (200 * MIB) / (1056762036 << 10))
"""CPU and memory that the scores assume for a container without requests (100m, 200Mi), as shares
of a simulated node's."""


RUNS = 100
"""Number of runs of `mean_fates`."""

_JUST = 1e-9
"""Added before rounding down, because kube-scheduler divides integers."""


class Fate(StrEnum):
    """Outcome of a scheduled pod on its GPUs."""

    GOOD = "on good GPUs"
    SATURATED = "on saturated GPUs"
    BROKEN = "on broken GPUs"
    OUT_OF_MEMORY = "out of memory"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Node and fate of one pod.

    Attributes:
        node: node of the pod, "" if it waits.
        fate: the pod's fate.
        reason: the fate in a few words.
    """

    node: str
    fate: Fate
    reason: str


def default_scores(
    cpu: _Shares, memory: _Shares, cpu_before: _Shares, memory_before: _Shares
) -> _Shares:
    """Return the sum of NodeResourcesFit's and NodeResourcesBalancedAllocation's default scores.

    The other default plugins score all nodes alike for a pod that has neither affinity nor a
    Service, ReplicaSet or StatefulSet, and whose image no node has.

    Args:
        cpu: requested share of each node's CPU, the pod included, 0 to 1.
        memory: requested share of each node's memory, the pod included.
        cpu_before: requested share of each node's CPU without the pod.
        memory_before: requested share of each node's memory without the pod.
    """
    gain = _balance(cpu, memory) - _balance(cpu_before, memory_before)
    balanced = 50 + np.trunc(
        (50 + gain) / 2
    )  # the formula of Kubernetes 1.37; earlier versions use the balance with the pod
    return np.asarray(least_allocated(cpu, memory) + balanced)


def least_allocated(cpu: _Shares, memory: _Shares) -> _Shares:
    """Return NodeResourcesFit's default scores, from the shares with the pod.

    The order of nodes equals that of the default scores if pods request equal shares of a node's
    CPU and memory. For pods that request neither, NodeResourcesBalancedAllocation is skipped.
    """
    return (np.floor(100 * (1 - cpu) + _JUST) + np.floor(100 * (1 - memory) + _JUST)) // 2


def _balance(cpu: _Shares, memory: _Shares) -> _Shares:
    return np.asarray(np.floor(100 * (1 - np.abs(cpu - memory) / 2)))


class DefaultScheduler:
    """Scheduler that places one pod without annotations at a time.

    Args:
        fleet: the fleet; the pods are placed on it.
        draws: random numbers. kube-scheduler draws among the nodes with the highest score.
    """

    def __init__(self, fleet: SimulatedFleet, draws: random.Random) -> None:
        self._fleet = fleet
        self._draws = draws

    def schedule(self, pod: JsonObject) -> Outcome:
        """Place a pod, and return its outcome; a pod that fails frees its GPUs at once."""
        ref = pod_ref(pod)
        wanted = requested(pod)
        best = self.best(pod)
        if not best:
            most = max(wanted.values())
            return Outcome(node="", fate=Fate.WAITING, reason=f"no node has {most} free")
        node = self._draws.choice(best)
        for resource, count in wanted.items():
            self._fleet.place(ref, node, resource, count, load_of(self._fleet, pod))
        outcome = outcome_of(self._fleet, ref.uid)
        if outcome.fate in {Fate.BROKEN, Fate.OUT_OF_MEMORY}:
            self._fleet.release(ref.uid)
        return outcome

    def best(self, pod: JsonObject) -> list[str]:
        """Return the nodes with the highest score of those where a pod fits."""
        names = fitting(self._fleet, requested(pod))
        scores = self._scores(names)
        return [name for name, score in zip(names, scores, strict=True) if score == scores.max()]

    def _scores(self, names: list[str]) -> _Shares:
        """Score nodes by their number of pods: simulated pods request neither CPU nor memory."""
        pods = Counter(placements[0].node for placements in self._fleet.placements.values())
        containers = np.array([pods[name] + 1.0 for name in names])
        cpu, memory = _UNSET_SHARES
        return least_allocated(containers * cpu, containers * memory)


def fitting(fleet: SimulatedFleet, wanted: dict[str, int]) -> list[str]:
    """Return the nodes with enough unallocated devices, as NodeResourcesFit does."""
    held: Counter[tuple[str, str]] = Counter()
    for placements in fleet.placements.values():
        for placement in placements:
            held[placement.node, placement.resource] += placement.count
    return [
        name
        for name, node in fleet.nodes.items()
        if all(
            node.count(resource) - held[name, resource] >= count
            for resource, count in wanted.items()
        )
    ]


def outcome_of(fleet: SimulatedFleet, uid: str) -> Outcome:
    """Return the outcome of a placed pod, on the worst of its GPUs.

    The loads of all pods count, including pods that are still warming up.
    """
    worst = Outcome(node="", fate=Fate.GOOD, reason="")
    for placement in fleet.placements[uid]:
        worst = replace(worst, node=placement.node)
        is_capped = fleet.node(placement.node).spec.sharing is Sharing.MPS
        for device in placement.devices:
            fate, reason = _fate_on(device, uid, is_capped=is_capped)
            if _SEVERITY.index(fate) > _SEVERITY.index(worst.fate):
                worst = replace(worst, fate=fate, reason=reason)
    return worst


_SEVERITY = (Fate.GOOD, Fate.SATURATED, Fate.OUT_OF_MEMORY, Fate.BROKEN)


def _fate_on(device: Device, uid: str, *, is_capped: bool) -> tuple[Fate, str]:
    """Return a pod's fate on one of its devices, and the reason."""
    own = next(tenant.load for tenant in device.tenants if tenant.pod.uid == uid)
    others = _sum(
        [device.base, device.foreign, *(t.load for t in device.tenants if t.pod.uid != uid)]
    )
    if device.card.is_lost:
        return Fate.BROKEN, f"lost GPU (XID {device.card.xid})"
    total = (device.memory_mib - device.reserved_mib) * MIB
    room = max(total - others.memory_bytes, 0)
    if is_capped:
        room = min(room, total // device.replicas)
    if own.memory_bytes > room:
        return Fate.OUT_OF_MEMORY, f"only {room / GIB:.0f} GiB is free"
    if own.utilization + others.utilization > 1.0:
        return Fate.SATURATED, f"GPU {others.utilization:.0%} busy"
    return Fate.GOOD, ""


def _sum(loads: list[Load]) -> Load:
    return Load(
        utilization=sum(load.utilization for load in loads),
        memory_bytes=sum(load.memory_bytes for load in loads),
    )


def without_idlegpu(
    build: Callable[[], SimulatedFleet], pods: Sequence[JsonObject], seed: int = 0
) -> list[Outcome]:
    """Schedule pods, in their order, on a new fleet, and return their outcomes.

    Args:
        seed: seed of kube-scheduler's draws among equal nodes.
    """
    scheduler = DefaultScheduler(build(), random.Random(seed))
    return [scheduler.schedule(pod) for pod in pods]


def mean_fates(
    build: Callable[[], SimulatedFleet], pods: Sequence[JsonObject], runs: int = RUNS
) -> Mapping[Fate, float]:
    """Return the mean number of pods with each fate, over runs with different draws."""
    counts: Counter[Fate] = Counter()
    for seed in range(runs):
        counts.update(outcome.fate for outcome in without_idlegpu(build, pods, seed))
    return {fate: counts[fate] / runs for fate in Fate}
