"""Measure the share of pods that land on a bad GPU although good GPUs are free.

`python -m bench.bad_gpus` has one empty node with 8 GPUs, some of them bad, and six nodes with 3 to
6 free and idle GPUs each. Pods for 1, 2 and 4 GPUs arrive one after the other, as long as another
node has enough free GPUs. kube-scheduler cannot see the fault: the kubelet still advertises every
GPU, and assigns any free ones. In the cases with shared GPUs each GPU has 4 replicas. On the other
nodes 2 or 3 replicas are held, and the GPU is 25 % busy; pods request one replica, and the kubelet
assigns one of the GPU with the fewest tenants. Nodes are chosen by the extender's decision on a
real fleet with readings, by kube-scheduler's scores, and at random. 0 % is possible in each case.

A pod on a broken GPU fails after half a minute; a pod on a GPU with foreign use keeps running.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from bench import churn, former
from bench.churn import CPU_SHARE, MEMORY_SHARE, Cluster, most_allocated
from bench.machine import Bound, report
from bench.traces import Floats, Ints
from bench.virtual_cluster import GIB, Shape, VirtualCluster
from extender.core.decision.decision import Evaluate
from extender.core.devices.readings import Signal
from extender.core.policy import Policy, Strategy
from simulation.default_scheduler import least_allocated

NODES: Final = 7
BAD_NODE: Final = 3
CARDS: Final = 8
FREE: Final = (3, 6)
TRIALS: Final = 20
SEEDS: Final = 3
SIZES: Final = (1, 2, 4)
SHARES: Final = (0.78, 0.13, 0.09)
PODS: Final = 12
REPLICAS: Final = 4
TENANTS: Final = (2, 3)
"""Held replicas of each shared GPU of the other nodes."""

PAUSE_SECONDS: Final = 60.0
READINGS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Fault of some GPUs of the empty node.

    Attributes:
        name: name in the table.
        count: number of bad GPUs.
        is_foreign: whether a process outside Kubernetes uses them; otherwise they are broken.
        signals: their telemetry.
        replicas: replicas of each GPU; 1 for whole GPUs.
    """

    name: str
    count: int
    is_foreign: bool
    signals: Mapping[Signal, float]
    replicas: int = 1


BROKEN: Final = {Signal.XID: 48.0, Signal.ECC_DOUBLE_BIT_VOLATILE: 2.0}
REMAP: Final = {Signal.ROW_REMAP_FAILURE: 1.0}
DOCKER: Final = {Signal.GPU_UTILIZATION: 0.8, Signal.MEMORY_USED: 30 * GIB}
CASES: Final = (
    Case(name="1 of 8 broken", count=1, is_foreign=False, signals=BROKEN),
    Case(name="2 of 8 broken", count=2, is_foreign=False, signals=BROKEN),
    Case(name="2 of 8 with a failed row remap", count=2, is_foreign=False, signals=REMAP),
    Case(name="7 of 8 broken", count=7, is_foreign=False, signals=BROKEN),
    Case(name="2 of 8 used by docker", count=2, is_foreign=True, signals=DOCKER),
    *(
        Case(
            name=f"{count} of 8 shared ones broken",
            count=count,
            is_foreign=False,
            signals=BROKEN,
            replicas=REPLICAS,
        )
        for count in (1, 7)
    ),
)


class Placement(churn.Placement, Protocol):
    """Policy that chooses nodes, with hooks for changes of the cluster and for time."""

    def read(self, holder: Ints, case: Case, bad: Ints) -> None:
        """Process a reading of all GPUs."""

    def wait(self, seconds: float) -> None:
        """Advance the policy's clock."""


class ByScore(Placement):
    """Policy that chooses the node with the highest score; ties are random.

    Args:
        score: returns scores of nodes from the shares of CPU and memory requested after the
            placement.
        draws: random numbers for ties.
    """

    def __init__(
        self, score: Callable[[Floats, Floats], Floats], draws: np.random.Generator
    ) -> None:
        self._score = score
        self._draws = draws

    @override
    def choose(self, cluster: Cluster, gpus: int, nodes: Ints) -> int | None:
        """Choose by requested CPU and memory, which are proportional to requested GPUs."""
        size = cluster.holder.shape[1]
        held = (size - cluster.free[nodes] + gpus) * CARDS / size
        scores = self._score(held * CPU_SHARE, held * MEMORY_SHARE)
        return int(self._draws.choice(nodes[scores == scores.max()]))

    @override
    def start(self, cluster: Cluster, job: int, node: int, gpus: int) -> None:
        """Ignore the start of a job."""

    @override
    def end(self, cluster: Cluster, job: int) -> None:
        """Ignore the end of a job."""

    @override
    def read(self, holder: Ints, case: Case, bad: Ints) -> None:
        """Ignore a reading."""

    @override
    def wait(self, seconds: float) -> None:
        """Ignore the passing of time."""


class ByExtender(Placement):
    """Policy that chooses by the extender's own decision; the initial pods are bound first.

    Args:
        cluster: the jobs that hold each GPU.
        evaluate: replacement of the extender's evaluation; None for the original.
    """

    def __init__(self, cluster: Cluster, policy: Policy, evaluate: Evaluate | None = None) -> None:
        self.replicas = cluster.holder.shape[1] // CARDS
        shape = Shape(nodes=NODES, cards=CARDS, replicas=self.replicas)
        self.virtual = VirtualCluster(shape, policy, evaluate)
        for node in range(NODES):
            for pod in np.unique(cluster.holder[node][cluster.holder[node] >= 0]).tolist():
                count = int((cluster.holder[node] == pod).sum())
                self.virtual.bind(f"pod-{pod}", node, count=count)

    @override
    def choose(self, cluster: Cluster, gpus: int, nodes: Ints) -> int | None:
        """Choose by filter and prioritize."""
        return self.virtual.choose(nodes.tolist(), count=gpus)

    @override
    def start(self, cluster: Cluster, job: int, node: int, gpus: int) -> None:
        """Report a bound pod to the fleet, as the watch would."""
        self.virtual.bind(f"pod-{job}", node, count=gpus)

    @override
    def end(self, cluster: Cluster, job: int) -> None:
        """Report a failed pod to the fleet, as the watch would."""
        self.virtual.end(f"pod-{job}", is_failed=True)

    @override
    def wait(self, seconds: float) -> None:
        """Advance the fleet's clock."""
        self.virtual.now += seconds

    @override
    def read(self, holder: Ints, case: Case, bad: Ints) -> None:
        """Apply an answer of Prometheus to the fleet."""
        tenants = (holder.reshape(-1, self.replicas) >= 0).sum(axis=1)
        columns = {
            signal: np.zeros(len(tenants))
            for signal in {Signal.GPU_UTILIZATION, Signal.MEMORY_USED, *BROKEN, *REMAP}
        }
        activity, memory = (0.9, 40 * GIB) if self.replicas == 1 else (0.25, 8 * GIB)
        columns[Signal.GPU_UTILIZATION][tenants > 0] = activity
        columns[Signal.MEMORY_USED] = tenants * memory
        for signal, value in case.signals.items():
            columns[signal][bad] = np.maximum(columns[signal][bad], value)
        size = self.virtual.shape.memory_bytes
        columns[Signal.MEMORY_FREE] = size - columns[Signal.MEMORY_USED]
        self.virtual.read(
            columns,
            np.full(len(tenants), self.virtual.now),
            {
                card: [f"pod-{pod}" for pod in on_it if pod >= 0]
                for card, on_it in enumerate(holder.reshape(-1, self.replicas).tolist())
            },
        )


Way = Callable[[Cluster, np.random.Generator], Placement]


def ways() -> dict[str, Way]:
    """Return all policies by name."""

    def by_score(score: Callable[[Floats, Floats], Floats]) -> Way:
        return lambda _, draws: ByScore(score, draws)

    def ours(strategy: Strategy) -> Way:
        return lambda cluster, _: ByExtender(cluster, Policy(strategy=strategy))

    return {
        "LeastAllocated": by_score(least_allocated),
        "MostAllocated": by_score(most_allocated),
        "random": by_score(lambda cpu, _: np.zeros(len(cpu))),
        former.NAME: lambda cluster, _: ByExtender(cluster, former.POLICY, former.evaluate),
        **{f"strategy {strategy}": ours(strategy) for strategy in Strategy},
    }


def filled(case: Case, draws: np.random.Generator) -> Cluster:
    """Return a cluster with pods on all nodes but one; each column of `holder` is one replica."""
    cluster = Cluster(NODES)
    cluster.holder = np.full((NODES, CARDS * case.replicas), -1, dtype=np.intp)
    for node in range(NODES):
        if case.replicas == 1:
            free = int(draws.integers(FREE[0], FREE[1] + 1))
            held = 0 if node == BAD_NODE else CARDS - free
            cluster.holder[node, draws.permutation(CARDS)[:held]] = 1000 + node
        elif node != BAD_NODE:
            for card in range(CARDS):
                start, count = card * case.replicas, draws.integers(TENANTS[0], TENANTS[1] + 1)
                pods = 1000 * (node + 1) + start + np.arange(count)
                cluster.holder[node, start : start + count] = pods
    return cluster


def hand_out(holder: Ints, wanted: int, case: Case, picks: np.random.Generator) -> Ints:
    """Return the replicas that a kubelet assigns: any free GPUs, of shared ones the emptiest."""
    free: Ints = picks.permutation(np.flatnonzero(holder < 0))
    tenants = (holder.reshape(CARDS, case.replicas) >= 0).sum(axis=1)
    return free[np.argsort(tenants[free // case.replicas], kind="stable")][:wanted]


def run(case: Case, seed: int, trial: int, way: Way) -> tuple[int, int]:
    """Run a trial; return the number of placed pods, and how many of them got a bad GPU."""
    draws = np.random.default_rng([seed, trial])
    cluster = filled(case, draws)
    bad = BAD_NODE * CARDS + draws.permutation(CARDS)[: case.count]
    gpus = draws.choice(SIZES, PODS, p=SHARES) if case.replicas == 1 else np.ones(PODS, np.intp)
    picks, ties = np.random.default_rng([seed, trial, 1]), np.random.default_rng([seed, trial, 2])
    placement = way(cluster, ties)
    for _ in range(READINGS):
        placement.read(cluster.holder.ravel(), case, bad)
        placement.wait(PAUSE_SECONDS)
    placed = hit = 0
    for pod, wanted in enumerate(gpus.tolist()):
        good = cluster.holder.copy()
        good[BAD_NODE] = (
            # counted as held: the extender cannot distinguish all of its good GPUs from bad ones
            pod
        )
        if ((good < 0).sum(axis=1) >= wanted).any():
            placement.read(cluster.holder.ravel(), case, bad)
            with_room = np.flatnonzero(cluster.free >= wanted)
            chosen = placement.choose(cluster, wanted, with_room)
            placement.wait(PAUSE_SECONDS / 2)
            if chosen is None:
                continue
            handed = hand_out(cluster.holder[chosen], wanted, case, picks)
            cluster.holder[chosen, handed] = pod
            placement.start(cluster, pod, chosen, wanted)
            placement.wait(PAUSE_SECONDS / 2)
            is_hit = bool(np.isin(chosen * CARDS + handed // case.replicas, bad).any())
            placed, hit = placed + 1, hit + is_hit
            if is_hit and not case.is_foreign:
                cluster.holder[cluster.holder == pod] = -1
                placement.end(cluster, pod)
    return placed, hit


def main() -> int:
    """Run all trials, print and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.bad_gpus", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="one seed; nothing is written")
    parser.add_argument("--name", default="bad_gpus", help="of the files in bench/results")
    options = parser.parse_args()
    began = time.perf_counter()
    rows: list[dict[str, object]] = []
    promised = []
    for case in CASES:
        row: dict[str, object] = {"emptied node": case.name}
        for name, way in ways().items():
            found = [
                run(case, seed, trial, way)
                for seed in range(1 if options.quick else options.seeds)
                for trial in range(TRIALS)
            ]
            placed, hit = np.sum(found, axis=0).tolist()
            row["pods"] = placed
            row[f"{name} %"] = 100 * hit / placed
            if name == f"strategy {Policy().strategy}":
                what = f"{case.name}: pods on bad GPUs by {name}"
                promised.append(Bound(what=what, limit=0.0, measured=100 * hit / placed, unit="%"))
        rows.append(row)
    is_met = report(
        options.name,
        "Pods on bad GPUs",
        rows=rows,
        bounds=promised,
        notes=[__doc__.strip(), f"{time.perf_counter() - began:.0f} s in all."],
        module="bad_gpus",
        **({"folder": None} if options.quick else {}),
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
