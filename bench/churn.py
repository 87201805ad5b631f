"""Measure waiting times of jobs that come and go, under several placement policies.

`python -m bench.churn` simulates nodes with 8 GPUs. Jobs for 1, 2, 4 and 8 GPUs arrive at random,
with the run times of a public trace. A job without a node waits; whenever a job ends, the queue is
retried, oldest first. Jobs are not preempted. Nodes are chosen by the extender's decision on a real
fleet with readings each minute, by kube-scheduler's scores of CPU and memory, which jobs request in
proportion to their GPUs, and at random. The kubelet assigns any free GPUs. `spread` was the default
strategy of version 0.1.

Two clusters: 32 nodes at 50, 70 and 85 % load, and 30 nodes at 60 and 75 %. One day is measured,
after half a day of warm-up. Each seed has its own jobs, which are the same for every policy.
"""

import argparse
import heapq
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from bench import former
from bench.machine import Bound, report
from bench.traces import DAY_SECONDS, Floats, Ints, openb_pods
from bench.virtual_cluster import GIB, START, Shape, VirtualCluster
from extender.core.decision.decision import Evaluate
from extender.core.devices.readings import Signal
from extender.core.policy import Policy, Strategy
from simulation.default_scheduler import least_allocated

SEEDS: Final = 3
SIZES: Final = (1, 2, 4, 8)
SHARES: Final = (0.70, 0.12, 0.10, 0.08)
LARGEST: Final = SIZES[-1]
WARM_UP_SECONDS: Final = 0.5 * DAY_SECONDS
LEAST_SECONDS: Final = 60.0
READING_SECONDS: Final = 60.0
LATE_SECONDS: Final = 60.0
LOADS: Final = ((32, 0.50), (32, 0.70), (32, 0.85), (30, 0.60), (30, 0.75))
"""Number of nodes, and the offered load as a share of their GPUs."""

CPU_SHARE: Final = 12 / 128
MEMORY_SHARE: Final = 96 / 1024
"""Memory that a job requests with each GPU, as a share of a node's memory. The shares are equal, so
NodeResourcesBalancedAllocation prefers no node."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Jobs of a run in the order of arrival: arrival and run time in seconds, and GPUs."""

    arrives: Floats
    runs: Floats
    gpus: Ints


def draw_jobs(nodes: int, load: float, seed: int) -> Jobs:
    """Draw the jobs of half a day of warm-up and the measured day."""
    draws = np.random.default_rng([seed, 1])
    durations = np.clip(openb_pods().ran, LEAST_SECONDS, DAY_SECONDS)
    of_each = float(np.dot(SIZES, SHARES) * durations.mean())
    pause = of_each / (load * nodes * LARGEST)
    whole = WARM_UP_SECONDS + DAY_SECONDS
    arrives = np.cumsum(draws.exponential(pause, int(1.2 * whole / pause) + 100))
    arrives = arrives[arrives < whole]
    return Jobs(
        arrives=arrives,
        runs=draws.choice(durations, len(arrives)),
        gpus=draws.choice(SIZES, len(arrives), p=SHARES),
    )


@dataclass(slots=True)
class Cluster:
    """Jobs that hold each GPU, and the simulated time.

    Attributes:
        nodes: number of nodes.
        holder: job by node and GPU, -1 for a free GPU.
        now: seconds since the start.
    """

    nodes: int
    holder: Ints = field(init=False)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.holder = np.full((self.nodes, LARGEST), -1, dtype=np.intp)

    @property
    def free(self) -> Ints:
        """Number of free GPUs of each node."""
        count: Ints = (self.holder < 0).sum(axis=1)
        return count


class Placement(Protocol):
    """Policy that chooses nodes, with hooks for changes of the cluster."""

    def choose(self, cluster: Cluster, gpus: int, nodes: Ints) -> int | None:
        """Return one of the nodes with `gpus` free GPUs, or None to let the job wait."""

    def start(self, cluster: Cluster, job: int, node: int, gpus: int) -> None:
        """Process the start of a job."""

    def end(self, cluster: Cluster, job: int) -> None:
        """Process the end of a job."""


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
        """Choose by requested CPU and memory."""
        held = (LARGEST - cluster.free[nodes] + gpus).astype(np.float64)
        scores = self._score(held * CPU_SHARE, held * MEMORY_SHARE)
        return int(self._draws.choice(nodes[scores == scores.max()]))

    @override
    def start(self, cluster: Cluster, job: int, node: int, gpus: int) -> None:
        """Ignore the start of a job."""

    @override
    def end(self, cluster: Cluster, job: int) -> None:
        """Ignore the end of a job."""


def most_allocated(cpu: Floats, memory: Floats) -> Floats:
    """Return the scores of NodeResourcesFit with the strategy MostAllocated."""
    return np.asarray((np.floor(100 * cpu) + np.floor(100 * memory)) // 2)


class ByExtender(Placement):
    """Policy that chooses by the extender's own decision.

    Args:
        nodes: number of nodes.
        evaluate: replacement of the extender's evaluation; None for the original.
    """

    def __init__(self, nodes: int, policy: Policy, evaluate: Evaluate | None = None) -> None:
        self.virtual = VirtualCluster(Shape(nodes=nodes), policy, evaluate)
        self._read_at = -np.inf

    @override
    def choose(self, cluster: Cluster, gpus: int, nodes: Ints) -> int | None:
        """Choose by filter and prioritize."""
        self._follow(cluster)
        return self.virtual.choose(nodes.tolist(), count=gpus)

    @override
    def start(self, cluster: Cluster, job: int, node: int, gpus: int) -> None:
        """Report a bound pod to the fleet, as the watch would."""
        self._follow(cluster)
        self.virtual.bind(f"job-{job}", node, count=gpus)

    @override
    def end(self, cluster: Cluster, job: int) -> None:
        """Report an ended pod to the fleet, as the watch would."""
        self._follow(cluster)
        self.virtual.end(f"job-{job}")

    def _follow(self, cluster: Cluster) -> None:
        """Apply the due readings; if several are due, only the last."""
        self.virtual.now = START + cluster.now
        if cluster.now - self._read_at < READING_SECONDS:
            return
        self._read_at = cluster.now - cluster.now % READING_SECONDS
        holder = cluster.holder.ravel()
        is_held = holder >= 0
        used = np.where(is_held, 40 * GIB, 0.0)
        size = self.virtual.shape.memory_bytes
        self.virtual.read(
            {
                Signal.GPU_UTILIZATION: np.where(is_held, 0.9, 0.0),
                Signal.MEMORY_USED: used,
                Signal.MEMORY_FREE: size - used,
            },
            np.full(len(holder), START + self._read_at),
            {at: (f"job-{holder[at]}",) for at in np.flatnonzero(is_held).tolist()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of the jobs that arrived during the measured day.

    Attributes:
        gpus: requested GPUs of each job.
        wait_seconds: time from arrival to start, or to the end of the run if it did not start.
        is_shut_out: whether no single node had enough free GPUs at arrival although the cluster
            had.
    """

    gpus: Ints
    wait_seconds: Floats
    is_shut_out: Flags


def run(nodes: int, load: float, seed: int, placement: Placement) -> Outcome:
    """Run the warm-up and the measured day with a policy."""
    jobs, cluster = draw_jobs(nodes, load, seed), Cluster(nodes)
    picks = np.random.default_rng([seed, 2])
    count = len(jobs.arrives)
    starts, shut_out = np.full(count, np.inf), np.zeros(count, dtype=np.bool_)
    ends: list[tuple[float, int]] = []
    waiting: list[int] = []

    def place(job: int) -> bool:
        gpus = int(jobs.gpus[job])
        with_room = np.flatnonzero(cluster.free >= gpus)
        node = placement.choose(cluster, gpus, with_room) if with_room.size else None
        if node is None:
            return False
        handed = picks.permutation(np.flatnonzero(cluster.holder[node] < 0))[:gpus]
        cluster.holder[node, handed] = job
        starts[job] = cluster.now
        heapq.heappush(ends, (cluster.now + float(jobs.runs[job]), job))
        placement.start(cluster, job, node, gpus)
        return True

    for job in range(count):
        while ends and ends[0][0] <= jobs.arrives[job]:
            cluster.now, ended = heapq.heappop(ends)
            cluster.holder[cluster.holder == ended] = -1
            placement.end(cluster, ended)
            waiting = [late for late in waiting if not place(late)]
        cluster.now = float(jobs.arrives[job])
        free = cluster.free
        shut_out[job] = free.sum() >= jobs.gpus[job] > free.max()
        if not place(job):
            waiting.append(job)
    is_measured = jobs.arrives >= WARM_UP_SECONDS
    wait = np.minimum(starts, WARM_UP_SECONDS + DAY_SECONDS) - jobs.arrives
    return Outcome(
        gpus=jobs.gpus[is_measured],
        wait_seconds=wait[is_measured],
        is_shut_out=shut_out[is_measured],
    )


def ways() -> dict[str, Callable[[int, int], Placement]]:
    """Return constructors of all policies by name; each takes the number of nodes and a seed."""

    def by_score(score: Callable[[Floats, Floats], Floats]) -> Callable[[int, int], Placement]:
        return lambda _, seed: ByScore(score, np.random.default_rng([seed, 3]))

    def ours(strategy: Strategy) -> Callable[[int, int], Placement]:
        return lambda nodes, _: ByExtender(nodes, Policy(strategy=strategy))

    return {
        "LeastAllocated": by_score(least_allocated),
        "MostAllocated": by_score(most_allocated),
        "random": by_score(lambda cpu, _: np.zeros(len(cpu))),
        former.NAME: lambda nodes, _: ByExtender(nodes, former.POLICY, former.evaluate),
        **{f"strategy {strategy}": ours(strategy) for strategy in Strategy},
    }


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the table's values for days of all seeds together."""
    gpus = np.concatenate([day.gpus for day in outcomes])
    wait = np.concatenate([day.wait_seconds for day in outcomes]) / 60
    shut_out = np.concatenate([day.is_shut_out for day in outcomes])
    large, small = gpus == LARGEST, gpus == SIZES[0]
    return {
        "8-GPU jobs": float(large.sum()),
        "found no node, 8 free %": 100 * float(shut_out[large].mean()),
        "8 GPUs: waited %": 100 * float((wait[large] > LATE_SECONDS / 60).mean()),
        "mean min": float(wait[large].mean()),
        "p95 min": float(np.percentile(wait[large], 95)),
        "1 GPU: waited %": 100 * float((wait[small] > LATE_SECONDS / 60).mean()),
        "1 GPU: mean min": float(wait[small].mean()),
    }


def bounds(found: Mapping[tuple[str, str], Mapping[str, float]]) -> Iterable[Bound]:
    """Yield the bounds of the default strategy: as good as packing, within a point and a minute."""
    ours = f"strategy {Policy().strategy}"
    for cluster, name in found:
        if name != ours:
            continue
        packed = found[cluster, f"strategy {Strategy.PACK}"]
        for figure, spare, unit in (
            ("found no node, 8 free %", 1.0, "%"),
            ("8 GPUs: waited %", 1.0, "%"),
            ("mean min", 1.0, "min"),
        ):
            yield Bound(
                what=f"{cluster}: {figure} of {ours}",
                limit=packed[figure] + spare,
                measured=found[cluster, name][figure],
                unit=unit,
            )


def main() -> int:
    """Run all days, print and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.churn", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="one seed; nothing is written")
    parser.add_argument("--placements", nargs="*", default=list(ways()))
    parser.add_argument("--name", default="churn", help="of the files in bench/results")
    options = parser.parse_args()
    seeds = range(1 if options.quick else options.seeds)
    began = time.perf_counter()
    found: dict[tuple[str, str], dict[str, float]] = {}
    for nodes, load in LOADS:
        for name, way in ways().items():
            if name in options.placements:
                outcomes = [run(nodes, load, seed, way(nodes, seed)) for seed in seeds]
                found[f"{nodes} nodes, {load:.0%}", name] = figures(outcomes)
    is_whole = len(found) == len(LOADS) * len(ways())
    is_met = report(
        options.name,
        "Churn of whole GPUs",
        rows=[
            {"cluster": cluster, "placement": name, **shown}
            for (cluster, name), shown in found.items()
        ],
        bounds=list(bounds(found)) if is_whole else [],
        notes=[
            __doc__.strip(),
            f"{len(seeds)} seeds together; {time.perf_counter() - began:.0f} s in all.",
        ],
        module="churn",
        **({} if is_whole and not options.quick else {"folder": None}),
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
