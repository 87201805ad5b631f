"""Model of kube-scheduler without an extender, and the fates of its pods."""

import random

import numpy as np
import pytest

from simulation.default_scheduler import (
    DefaultScheduler,
    Fate,
    default_scores,
    least_allocated,
    mean_fates,
    without_idlegpu,
)
from simulation.demo_fleet import demo_fleet
from simulation.demo_scenes import PODS
from simulation.devices import Load
from simulation.fleet import SimulatedFleet
from simulation.models import GIB
from simulation.objects import pod_object
from tests.simulation import builders


def _schedule(fleet: SimulatedFleet, name: str = "new", gpus: int = 1) -> tuple[str, Fate, str]:
    outcome = DefaultScheduler(fleet, random.Random(0)).schedule(pod_object(name, gpus))
    return outcome.node, outcome.fate, outcome.reason


def test_the_scores_are_those_of_the_default_plugins() -> None:
    cpu, memory = np.array([0.25, 0.5, 0.07]), np.array([0.25, 0.1, 0.07])
    before = np.array([0.25, 0.0, 0.0]), np.array([0.05, 0.0, 0.0])

    # NodeResourcesFit gives 75, 70 and 93. The balance with and without the pod is 100 and 90, 80
    # and 100, 100 and 100.
    assert least_allocated(cpu, memory).tolist() == [75, 70, 93]
    assert default_scores(cpu, memory, *before).tolist() == [75 + 80, 70 + 65, 93 + 75]


def test_a_pod_goes_where_fewest_pods_are_whatever_the_gpus_do() -> None:
    fleet = builders.fleet(builders.spec("node-a", cards=32), builders.spec("node-b", cards=32))
    for number in range(16):  # each pod takes less than 0.1% of a node's CPU
        fleet.place(builders.pod(f"pod-{number}"), "node-b", "nvidia.com/gpu")
    fleet.set_foreign("node-a", 0, Load(utilization=0.9))

    assert _schedule(fleet) == ("node-a", Fate.SATURATED, "GPU 90% busy")


def test_a_pod_waits_where_no_node_has_as_many_free_gpus() -> None:
    assert _schedule(builders.fleet(), gpus=3) == ("", Fate.WAITING, "no node has 3 free")


@pytest.mark.parametrize(
    ("used_gib", "xid", "fate"),
    [(0, 0, Fate.GOOD), (78, 0, Fate.OUT_OF_MEMORY), (0, 79, Fate.BROKEN)],
)
def test_a_failed_pod_frees_its_gpus(used_gib: int, xid: int, fate: Fate) -> None:
    fleet = builders.fleet()
    fleet.set_memory_used("node-a", 0, used_gib * GIB)
    fleet.set_xid("node-a", 0, xid)

    assert _schedule(fleet)[1] is fate
    assert bool(fleet.placements) is (fate is Fate.GOOD)


def test_equal_draws_give_equal_outcomes_and_each_pod_has_one_fate() -> None:
    assert without_idlegpu(demo_fleet, PODS, 3) == without_idlegpu(demo_fleet, PODS, 3)
    assert sum(mean_fates(demo_fleet, PODS, 5).values()) == pytest.approx(len(PODS))
