"""Predict the nodes that kube-scheduler alone would choose for the demo's pods."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from simulation.default_scheduler import DefaultScheduler, Fate, Outcome
from simulation.fleet import SimulatedFleet
from simulation.objects import JsonObject

RUNS = 100


def without_idlegpu(
    build: Callable[[], SimulatedFleet], pods: Sequence[JsonObject], seed: int = 0
) -> list[Outcome]:
    """Schedule pods, in their order, on a new fleet, and return their outcomes.

    Args:
        build: builds the fleet.
        pods: the pods.
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
