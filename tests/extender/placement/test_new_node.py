"""Answers about a node that was just added, until its first readings."""

import pytest

from extender.core.decision.filtering import Code
from extender.core.nodes.inventory import NodeRecord
from extender.core.policy import LoadFilter, Policy
from extender.core.steps import finish
from testkit.builders import GIB, GPU, request
from testkit.world import BUSY, World

MANY = 50  # more nodes than are allocated at once


def come(world: World, stage: str) -> None:
    """Advance a new node to a stage; its GPUs have no readings yet."""
    if stage == "unseen":
        return
    offered = {} if stage == "without-device-plugin" else {GPU: 1}
    for number in range(MANY if stage == "one-of-many" else 1):
        record = NodeRecord(name=f"new-{number}", allocatable=offered, capacity=offered)
        world.fleet.apply_node(record)


@pytest.fixture(params=["unseen", "without-device-plugin", "unread", "one-of-many"])
def world(request: pytest.FixtureRequest) -> World:
    """Return a world with an idle node, a busy one, and a new one."""
    made = World(in_steps=True)
    for name in ("idle", "busy"):
        made.add_node(name)
    made.card("busy").values = dict(BUSY)
    made.read()
    made.fleet.snapshot()
    come(made, request.param)
    return made


def test_new_node_ranks_between_idle_and_busy_nodes(world: World) -> None:
    decision = world.rank(nodes=("busy", "new-0", "idle"))

    assert [decision.candidates[at] for at in decision.order] == ["idle", "new-0", "busy"]


@pytest.mark.parametrize(
    "wish", [{}, {"memory_bytes": int(40 * GIB)}], ids=["a stock pod", "one that says its memory"]
)
def test_new_node_is_refused_only_to_pods_that_require_idle(
    world: World, wish: dict[str, int]
) -> None:
    assert world.rank(request(**wish), nodes=("new-0",)).best == "new-0"


def test_a_pod_that_requires_idle_gpus_waits_for_its_readings(world: World) -> None:
    decision = world.rank(request(requires_idle=True), nodes=("new-0",))

    assert decision.best is None
    assert Code(decision.codes[0]) is Code.NOT_IDLE


def test_new_node_counts_from_its_first_reading(world: World) -> None:
    for number in range(MANY):
        world.add_node(f"new-{number}")
    world.read_after(10.0)
    finish(world.fleet.refresh_in_steps())

    assert world.rank(request(requires_idle=True), nodes=("new-0",)).best == "new-0"


def test_new_node_is_not_refused_for_load() -> None:
    world = World(Policy(load_filter=LoadFilter(is_enabled=True)))
    world.add_node("idle")
    world.add_node("busy")
    world.card("busy").values = dict(BUSY)
    world.read()
    come(world, "unread")

    decision = world.rank(nodes=("busy", "new-0", "idle"))

    assert [decision.candidates[at] for at in decision.order] == ["idle", "new-0"]
