"""Measure how much slower pods run on shared GPUs, under several placement policies.

`python -m bench.sharing` places the one-GPU pods of a public trace on 6 nodes of 8 time-sliced GPUs
with 4 replicas each, in steps of 15 s for a day. The policies are: the extender's decision on a
real fleet with readings that are 15 to 30 s old, a model of its former default (`bench.former`),
kube-scheduler's scores of replicas, random choice, and a clairvoyant that knows every device's next
hour. Strategy `spread` is left out: it orders shared GPUs as `auto` does. Pods request one replica
and declare nothing else; similar pods share an owner or a request. A pod alone on its device runs
at full speed; pods on the same device slow each other down (`bench.sharing_day`), and a device that
runs out of memory ends its youngest pod.

Each seed has its own pods and foreign load, which are the same for every policy.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final

import numpy as np
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from bench import former
from bench.machine import Bound, report
from bench.sharing_day import NO_POD, Day, Outcome, Placement
from bench.sharing_pods import (
    COMPRESSION,
    FOREIGN_SECONDS,
    REGIMES,
    STEP_SECONDS,
    Regime,
    draw_foreign,
    draw_pods,
)
from bench.virtual_cluster import NAMESPACE, START, VirtualCluster
from extender.core.decision.decision import Evaluate
from extender.core.devices.readings import Signal
from extender.core.nodes.pod_groups import Kin, owner_key
from extender.core.policy import Policy, Strategy

LEAST: Final = "LeastAllocated"
CLAIRVOYANT: Final = "clairvoyant"
HALF_WAY: Final = 0.5
SEEDS: Final = 8
"""Two for each period of the trace (`sharing_pods.WINDOWS`): one is far busier than the others."""
OUT_OF_MEMORY: Final = 100.0
UNITS: Final = {
    "mean slowdown": "times", "p99 slowdown": "times", "mean wait s": "s", "OOM ends": "times",
}  # fmt: skip
NEXT_STEPS: Final = int(FOREIGN_SECONDS / STEP_SECONDS)


class Blind(Placement):
    """Base of policies that only use the held replicas."""

    @override
    def start(self, day: Day, pod: int, node: int) -> None:
        """Ignore the start of a pod."""

    @override
    def end(self, day: Day, pod: int, *, is_failed: bool) -> None:
        """Ignore the end of a pod."""

    @override
    def step(self, day: Day) -> None:
        """Ignore the devices' readings."""


class ByReplicas(Blind):
    """Policy that chooses by the number of free replicas, as kube-scheduler's scores do.

    If pods request CPU and memory in proportion to their replicas, NodeResourcesFit and
    NodeResourcesBalancedAllocation together give the same order. Ties are broken at random.

    Args:
        sign: 1 for the node with the most free replicas, -1 for the fewest, 0 for any node.
        draws: random numbers for ties.
    """

    def __init__(self, sign: int, draws: np.random.Generator) -> None:
        self._sign = sign
        self._draws = draws

    @override
    def choose(self, day: Day, pod: int, nodes: Sequence[int]) -> int | None:
        """Choose by free replicas."""
        used = day.used_by_node()[list(nodes)] * self._sign
        return int(self._draws.choice(np.asarray(nodes)[used == used.min()]))


class Clairvoyant(Blind):
    """Policy that chooses the node with the lowest cost, by the devices' future load.

    The cost of a node is the mean over the devices that the plugin may assign. The cost of a device
    is the slowdown of the new pod and of its present pods, and far more if its memory will run out.
    """

    @override
    def choose(self, day: Day, pod: int, nodes: Sequence[int]) -> int | None:
        """Choose by the load of the next hour."""
        ahead = np.arange(min(NEXT_STEPS, 1 + int(day.pods.alone[pod] / STEP_SECONDS)))
        steps = STEP_SECONDS * ahead.astype(np.float64)
        own = day.pods.utilization(np.full(len(ahead), pod), steps)

        def cost(device: int) -> float:
            load = day.foreign.utilization[day.at : day.at + len(ahead), device].copy()
            most = np.max(day.foreign.memory[day.at : day.at + len(ahead), device], initial=0.0)
            outside = max(float(most) * day.shape.memory_bytes, float(day.foreign_bytes[device]))
            held = outside + float(day.pods.memory_bytes[pod])
            for other in day.slots[device]:
                if other == NO_POD:
                    continue
                progress = day.progress[other] + steps
                busy = day.pods.utilization(np.full(len(ahead), other), progress)
                load += np.where(progress < day.pods.alone[other], busy, 0.0)
                held += float(day.pods.memory_bytes[other])
            beyond = OUT_OF_MEMORY if held > day.shape.memory_bytes else 0.0
            return beyond + float((own * load).mean())

        return min(nodes, key=lambda node: _mean(cost(at) for at in day.landing(node).tolist()))


class ByExtender(Placement):
    """Policy that chooses by the extender's own decision.

    Args:
        day: the simulated day; its cluster is rebuilt here.
        evaluate: replacement of the extender's evaluation; None for the original.
    """

    def __init__(self, day: Day, policy: Policy, evaluate: Evaluate | None = None) -> None:
        devices = day.shape.devices
        self.cluster = VirtualCluster(day.shape, policy, evaluate)
        self._utilization, self._memory = np.zeros(devices), np.zeros(devices)
        self._measured_at = np.full(devices, START)
        self._tenants: dict[int, tuple[str, ...]] = {}

    @override
    def choose(self, day: Day, pod: int, nodes: Sequence[int]) -> int | None:
        """Choose by filter and prioritize."""
        kin = owner_key(NAMESPACE, day.pods.owner[pod], ""), *_likeness(day, pod)
        return self.cluster.choose(nodes, kin=kin)

    @override
    def start(self, day: Day, pod: int, node: int) -> None:
        """Report a bound pod to the fleet, as the watch would."""
        owner, likeness = day.pods.owner[pod], _likeness(day, pod)
        self.cluster.bind(day.name_of(pod), node, owner=owner, likeness=likeness)

    @override
    def end(self, day: Day, pod: int, *, is_failed: bool) -> None:
        """Report an ended pod to the fleet, as the watch would."""
        self.cluster.end(day.name_of(pod), is_failed=is_failed)

    @override
    def step(self, day: Day) -> None:
        """Apply the readings of the previous step; every node is measured each second step."""
        self.cluster.now = START + day.seconds
        self.cluster.read(
            {
                Signal.GPU_UTILIZATION: self._utilization.copy(),
                Signal.MEMORY_USED: self._memory.copy(),
                Signal.MEMORY_FREE: day.shape.memory_bytes - self._memory,
            },
            self._measured_at.copy(),
            self._tenants,
        )
        node = np.arange(day.shape.devices) // day.shape.cards
        now = (node + day.at) % 2 == 0
        self._utilization[now] = day.utilization[now]
        self._memory[now] = day.memory_bytes[now]
        self._measured_at[now] = self.cluster.now
        for device in np.flatnonzero(now).tolist():
            self._tenants[device] = tuple(
                day.name_of(pod) for pod in day.slots[device].tolist() if pod != NO_POD
            )


def _likeness(day: Day, pod: int) -> Kin:
    """Return the key of a pod's requests."""
    return (f"{NAMESPACE} requests {day.pods.shape[pod]}",)


Way = Callable[[Day, int], Placement]
"""Constructor of a policy for a day and a seed."""


def ways() -> dict[str, Way]:
    """Return all policies by name: kube-scheduler's, then the extender's, then the clairvoyant."""

    def by_replicas(sign: int) -> Way:
        return lambda _, seed: ByReplicas(sign, np.random.default_rng([seed, 4]))

    def ours(strategy: Strategy) -> Way:
        return lambda day, _: ByExtender(day, Policy(strategy=strategy))

    return {
        LEAST: by_replicas(1),
        "MostAllocated": by_replicas(-1),
        "random": by_replicas(0),
        former.NAME: lambda day, _: ByExtender(day, former.POLICY, former.evaluate),
        **{f"strategy {kind}": ours(kind) for kind in (Strategy.AUTO, Strategy.PACK)},
        CLAIRVOYANT: lambda *_: Clairvoyant(),
    }


def run(regime: Regime, seed: int, name: str) -> Outcome:
    """Run one day with a policy."""
    day = Day(
        shape=regime.shape,
        pods=draw_pods(regime, seed),
        foreign=draw_foreign(regime, seed),
        ties=np.random.default_rng([seed, 3]),
    )
    return day.run(ways()[name](day, seed))


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the table's values: means over seeds."""
    return {
        "mean slowdown": _mean(float(day.slowdown.mean()) for day in outcomes),
        "p99 slowdown": _mean(float(np.percentile(day.slowdown, 99)) for day in outcomes),
        "mean wait s": _mean(float(day.wait_seconds.mean()) for day in outcomes),
        "OOM ends": _mean(float(day.ooms) for day in outcomes),
    }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def bounds(found: Mapping[tuple[str, str], Mapping[str, float]], ours: str) -> list[Bound]:
    """Return the bounds of the default strategy by regime and policy.

    Args:
        found: table values by regime and policy.
        ours: policy to which the bounds apply.
    """
    promised = []
    for regime in REGIMES:
        measured, least = found[regime.name, ours], found[regime.name, LEAST]
        for name, unit in UNITS.items():
            what = f"{regime.name}: {name} of {ours}, at most that of {LEAST}"
            promised.append(Bound(what=what, limit=least[name], measured=measured[name], unit=unit))
        if regime.has_foreign:
            ahead = found[regime.name, CLAIRVOYANT]["mean slowdown"]
            limit = least["mean slowdown"] * (1 - HALF_WAY) + ahead * HALF_WAY
            what = f"{regime.name}: mean slowdown of {ours}, half of the way to the {CLAIRVOYANT}"
            promised.append(
                Bound(what=what, limit=limit, measured=measured["mean slowdown"], unit="times")
            )
    return promised


def main() -> int:
    """Run all days, print and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="one seed; nothing is written")
    parser.add_argument("--regimes", nargs="*", default=[regime.name for regime in REGIMES])
    parser.add_argument("--placements", nargs="*", default=list(ways()))
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at once")
    parser.add_argument("--name", default="sharing", help="of the files in bench/results")
    options = parser.parse_args()
    seeds = range(1 if options.quick else options.seeds)
    began = time.perf_counter()
    found: dict[tuple[str, str], dict[str, float]] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        days = {
            (regime.name, name): [pool.submit(run, regime, seed, name) for seed in seeds]
            for regime in REGIMES
            for name in ways()
            if regime.name in options.regimes and name in options.placements
        }
        for about, outcomes in days.items():
            found[about] = figures([day.result() for day in outcomes])
            sys.stderr.write(f"{about}: {found[about]}\n")
    is_whole = len(found) == len(REGIMES) * len(ways())
    is_kept = is_whole and not options.quick
    is_met = report(
        options.name,
        "A day of sharing GPUs",
        rows=[
            {"regime": regime, "placement": name, **shown, **_position(found, regime, shown)}
            for (regime, name), shown in found.items()
        ],
        bounds=bounds(found, f"strategy {Policy().strategy}") if is_whole else [],
        notes=[
            __doc__.strip(),
            *(
                f"{regime.name}: {regime.what}; {regime.load:.0%} of {COMPRESSION:g} days' pods."
                for regime in REGIMES
            ),
            f"Means of {len(seeds)} seeds. {time.perf_counter() - began:.0f} s in all.",
        ],
        module="sharing",
        **({} if is_kept else {"folder": None}),
    )
    return 0 if is_met else 1


def _position(
    found: Mapping[tuple[str, str], Mapping[str, float]], regime: str, shown: Mapping[str, float]
) -> dict[str, str]:
    """Return a policy's position between LeastAllocated (0) and the clairvoyant (1)."""
    least, ahead = found.get((regime, LEAST)), found.get((regime, CLAIRVOYANT))
    if least is None or ahead is None:
        return {"of the way": ""}
    whole = least["mean slowdown"] - ahead["mean slowdown"]
    return {"of the way": f"{(least['mean slowdown'] - shown['mean slowdown']) / whole:.0%}"}


if __name__ == "__main__":
    sys.exit(main())
