"""Warnings about requests that no node of the cluster can ever serve."""

from collections.abc import Mapping

import pytest

from extender.core.devices.readings import Signal
from extender.core.policy import Policy
from extender.fleet.impossible_requests import request_problems
from testkit.builders import GIB, request
from testkit.world import World

MIB = 1 << 20
OF_80_GB = 81559 * MIB
"""Memory that drivers report of a card sold with 80 GB."""


def problems(world: World, memory_bytes: float, policy: Policy | None = None) -> list[str]:
    requested = request(memory_bytes=int(memory_bytes))
    found = request_problems(
        requested, world.fleet.snapshot(), world.fleet.store, policy or world.policy
    )
    return [problem.message for problem in found]


def world_of(*sizes: float, replicas: int = 1, labels: Mapping[str, str] | None = None) -> World:
    world = World()
    for number, size in enumerate(sizes):
        world.add_node(f"n-{number}", replicas=replicas, labels=labels or {})
        world.card(f"n-{number}").values[Signal.MEMORY_FREE] = size
    world.read()
    return world


def test_a_request_for_more_than_every_gpu_has_is_reported_with_the_most_that_can_be_had() -> None:
    world = world_of(OF_80_GB, 40 * GIB)

    assert problems(world, 80 * GIB) == [
        'annotation idlegpu.io/gpu-memory: "81920Mi" is not allowed: must be at most 81559Mi, the '
        "most that one nvidia.com/gpu here has; used instead: nothing, the pod waits for a larger "
        "one"
    ]
    assert problems(world, OF_80_GB) == []


@pytest.mark.parametrize("cap_gib", [None, 12])
def test_under_mps_the_most_is_a_shares_cap(cap_gib: int | None) -> None:
    labels = {"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "mps"}
    world = world_of(OF_80_GB, replicas=4, labels=labels)
    cap_bytes = None if cap_gib is None else int(cap_gib * GIB)
    policy = Policy(mps_share_bytes=cap_bytes)

    (problem,) = problems(world, 20 * GIB, policy)

    assert f"at most {(cap_bytes or OF_80_GB // 4) // MIB}Mi" in problem


def test_a_gpu_of_unknown_size_may_have_the_memory() -> None:
    world = world_of(OF_80_GB, 40 * GIB)
    world.add_node("new", labels={})

    assert problems(world, 400 * GIB) == []
