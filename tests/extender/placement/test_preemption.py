"""Nodes that are accepted after preemption would make room."""

from dataclasses import replace

import pytest

from extender.core.decision.filtering import Code
from extender.core.devices.readings import Signal
from extender.core.nodes.inventory import NodeRecord
from extender.core.policy import LoadFilter, Policy, PriceMode, Prices
from extender.core.request.request import GpuRequest
from extender.core.steps import finish
from extender.fleet.allocation import _MAX_DEVICES
from extender.placement.placer import Victims
from testkit.agent.fleet_reports import Agents
from testkit.builders import GIB, GPU, pod_ref, rejected, request
from testkit.world import BUSY, IDLE, World, time_sliced

TWENTY = int(20 * GIB)


def accepts(world: World, requested: GpuRequest, *victims: str, node: str = "node-0") -> bool:
    uids = frozenset(f"uid-{name}" for name in victims)
    accepted = world.placer.accepts_without(
        pod_ref("new"), requested, [Victims(node=node, uids=uids)]
    )
    return accepted == {node}


def full_node(replicas: int = 1, *, is_mapped: bool = True, started: float = 300.0) -> World:
    """Return a node whose only card pod `a` fills, as the readings show."""
    world = World()
    world.is_mapped = is_mapped
    world.add_node("node-0", 1, replicas=replicas)
    world.read()
    world.bind("a", "node-0", replicas, on=[world.card("node-0")])
    world.card("node-0").values.update({**BUSY, Signal.MEMORY_FREE: 10 * GIB})
    world.read_after(started)
    world.rank()
    return world


@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "unmapped"])
@pytest.mark.parametrize("started", [300.0, 30.0], ids=["old", "young"])
@pytest.mark.parametrize("replicas", [1, 4], ids=["whole", "shared"])
def test_node_is_accepted_after_its_victims_end_despite_old_readings(
    is_mapped: bool, started: float, replicas: int
) -> None:
    world = full_node(replicas, is_mapped=is_mapped, started=started)

    assert accepts(world, request(memory_bytes=TWENTY), "a")


def test_victim_makes_room_on_its_own_card() -> None:
    world = World()
    world.add_node("node-0", 2, replicas=4)
    for index, name in enumerate("ab"):
        world.bind(name, "node-0", 4, on=[world.card("node-0", index)])
    world.read(MEMORY_USED=78 * GIB, MEMORY_FREE=2 * GIB)
    world.read_after(300)

    assert not accepts(world, request(memory_bytes=TWENTY))
    assert accepts(world, request(memory_bytes=TWENTY), "a")


@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "unmapped"])
@pytest.mark.parametrize("started", [300.0, 30.0], ids=["old", "young"])
def test_a_pod_that_requires_idle_preempts_for_capacity_as_any_pod_does(
    is_mapped: bool, started: float
) -> None:
    world = full_node(is_mapped=is_mapped, started=started)

    assert accepts(world, request(requires_idle=True), "a")
    assert accepts(world, request(requires_idle=True, memory_bytes=TWENTY), "a")


def test_a_pod_that_waits_for_load_alone_gets_no_candidate() -> None:
    assert not accepts(full_node(replicas=4), request(requires_idle=True), "a")


@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "unmapped"])
def test_no_pod_is_evicted_beside_a_free_gpu_that_is_busy(is_mapped: bool) -> None:
    world = World()
    world.is_mapped = is_mapped
    world.add_node("node-0", 2)
    world.bind("a", "node-0", on=[world.card("node-0")])
    world.card("node-0", 1).values[Signal.GRAPHICS_ACTIVE] = 0.9
    world.read_after(300, times=2)

    assert not accepts(world, request(2, requires_idle=True), "a")


@pytest.mark.parametrize(("models", "accepted"), [((), {"cheap"}), (("H100",), {"cheap", "dear"})])
def test_under_strict_prices_no_pod_is_evicted_from_a_dearer_node_than_another_that_would_do(
    models: tuple[str, ...], accepted: set[str]
) -> None:
    world = World(Policy(prices=Prices(mode=PriceMode.STRICT, entries={"T4": 0.5, "H100": 4.0})))
    victims = []
    for node, model in (("cheap", "Tesla T4"), ("dear", "NVIDIA H100 80GB HBM3")):
        world.add_node(node)
        card = world.card(node)
        card.info = replace(card.info, model=model)
        world.bind(node, node, on=[card])
        victims.append(Victims(node=node, uids=frozenset({f"uid-{node}"})))
    world.read_after(300)

    asked = request(preferred_models=models)
    assert world.placer.accepts_without(pod_ref("new"), asked, victims) == accepted
    assert world.placer.accepts_without(pod_ref("new"), asked, victims[1:]) == {"dear"}


def test_a_node_that_preemption_cannot_help_is_no_candidate() -> None:
    world = full_node()

    assert not accepts(world, request(memory_bytes=int(90 * GIB)), "a")
    world.card("node-0").values[Signal.XID] = 48.0
    world.read_after(30)
    assert not accepts(world, request(), "a")


def test_a_victim_or_a_node_that_we_do_not_know_is_no_reason_to_refuse() -> None:
    world = full_node()

    assert accepts(world, request(), "unknown")
    assert accepts(world, request(memory_bytes=TWENTY), "a", "unknown")
    assert accepts(world, request(), "a", node="node-9")
    assert accepts(world, replace(request(), resource="b", resources=(("b", 1),)), "a")


def test_a_victim_that_holds_no_gpu_takes_no_foreign_use_with_it() -> None:
    world = World()
    world.add_node("node-0", 2)
    world.bind("a", "node-0", on=[world.card("node-0", 1)])
    nothing: dict[str, int] = {}
    world.bind("claimant", "node-0", resources=nothing, has_claims=True)
    world.card("node-0").values.update({Signal.MEMORY_USED: 20 * GIB, Signal.MEMORY_FREE: 60 * GIB})
    world.read_after(30, times=4)
    assert world.estimated(world.card("node-0"), "is_foreign")
    both = request(2)

    assert not accepts(world, both, "a")
    for without in ("not-asking-for-gpus", "claimant"):
        assert not accepts(world, both, "a", without), without
    assert accepts(world, request(), "a", "not-asking-for-gpus")


def test_unseen_young_victim_does_not_explain_earlier_foreign_use() -> None:
    world = World()
    world.add_node("node-0", 2)
    world.card("node-0").values.update({Signal.MEMORY_USED: 20 * GIB, Signal.MEMORY_FREE: 60 * GIB})
    world.read_after(30, times=3)
    young = world.bind("young", "node-0")
    world.read_after(5)

    assert not accepts(world, request(2), "young")
    world.end(young)
    assert rejected(world.rank(request(2))) == {"node-0": Code.FOREIGN_USE}


def used_before_its_pod(world: World) -> None:
    """Let a process outside Kubernetes use a card before a pod gets it."""
    world.add_node("node-0", 1)
    card = world.card("node-0")
    card.values.update({Signal.MEMORY_USED: 30 * GIB, Signal.MEMORY_FREE: 50 * GIB})
    world.read_after(30, times=4, GRAPHICS_ACTIVE=0.9)
    world.bind("a", "node-0", on=[card])
    world.read_after(30, times=20)


@pytest.mark.parametrize("requires_idle", [False, True])
def test_no_pod_is_evicted_from_a_gpu_with_earlier_foreign_use(requires_idle: bool) -> None:
    world = World()
    used_before_its_pod(world)

    assert not accepts(world, request(requires_idle=requires_idle), "a")


def test_use_from_before_a_pod_ends_once_an_agent_no_longer_sees_it() -> None:
    world = World()
    used_before_its_pod(world)
    agents = Agents(world)
    agents.pods = {world.card("node-0").info.key: ("ns/a",)}

    world.clock.now += 5
    agents.report("node-0", foreign_bytes=20 * GIB, is_foreign=True)
    assert not accepts(world, request(), "a")
    world.clock.now += 5
    agents.report("node-0", foreign_bytes=0.0)

    assert accepts(world, request(), "a")
    assert accepts(world, request(requires_idle=True), "a")


@pytest.mark.parametrize("is_mapped", [True, False])
def test_use_by_a_pod_before_it_was_known_is_not_foreign(*, is_mapped: bool) -> None:
    world = World()
    world.is_mapped = is_mapped
    world.add_node("node-0", 1)
    bound = world.clock.now - 100
    world.read_after(30, times=4, GRAPHICS_ACTIVE=0.9, SM_ACTIVE=0.9)

    world.bind("a", "node-0", on=[world.card("node-0")], bound_at=bound, started_at=bound)
    world.read_after(30, times=4)

    assert accepts(world, request(), "a")


@pytest.mark.parametrize("is_used", [True, False])
def test_nominated_pod_that_requires_idle_needs_readings_after_its_victims(is_used: bool) -> None:
    world = World()
    used_before_its_pod(world)
    requested = request(requires_idle=True, nominated_node="node-0")
    foreign = {"node-0": Code.FOREIGN_USE}
    victim = world.fleet.pods["uid-a"]

    world.fleet.apply_pod(replace(victim, is_deleting=True))
    assert rejected(world.rank(requested)) == foreign
    world.clock.now += 1
    world.end(victim)
    assert rejected(world.rank(requested)) == foreign
    if not is_used:
        world.card("node-0").values.update(IDLE)
    world.read_after(5)

    assert rejected(world.rank(requested)) == (foreign if is_used else {})


def test_no_pod_gets_a_gpu_that_was_used_from_outside_before_its_victims_came() -> None:
    world = World()
    used_before_its_pod(world)
    stock = request(nominated_node="node-0")
    victim = world.fleet.pods["uid-a"]
    foreign = {"node-0": Code.FOREIGN_USE}

    world.fleet.apply_pod(replace(victim, is_deleting=True))
    assert rejected(world.rank(stock)) == foreign
    world.clock.now += 1
    world.end(victim)
    assert rejected(world.rank(stock)) == rejected(world.rank()) == foreign

    world.card("node-0").values.update(IDLE)
    world.read_after(5)
    assert rejected(world.rank(stock)) == rejected(world.rank()) == {}


def test_pod_gets_no_victims_gpu_while_others_are_free() -> None:
    world = World()
    world.add_node("node-0", 2)
    world.card("node-0").values.update({Signal.MEMORY_USED: 30 * GIB, Signal.MEMORY_FREE: 50 * GIB})
    victim = world.bind("a", "node-0", on=[world.card("node-0", 1)])
    world.read_after(30, times=4)
    requested = request(nominated_node="node-0")
    foreign = {"node-0": Code.FOREIGN_USE}
    assert rejected(world.rank(requested)) == foreign

    world.fleet.apply_pod(replace(victim, is_deleting=True))
    assert rejected(world.rank(requested)) == foreign
    world.clock.now += 1
    world.end(victim)

    assert rejected(world.rank(requested)) == {}


def test_a_gpu_that_was_active_before_its_victims_came_is_not_presumed_idle() -> None:
    world = World()
    world.add_node("node-0", 1)
    card = world.card("node-0")
    card.values = {Signal.GRAPHICS_ACTIVE: 0.9}
    world.read_after(30, times=4)
    world.clock.now += 3
    victim = world.bind("a", "node-0", on=[card])
    world.read_after(30, times=4)
    requested = request(requires_idle=True, nominated_node="node-0")
    waits = {"node-0": Code.NOT_IDLE}

    assert not accepts(world, request(requires_idle=True), "a")
    world.fleet.apply_pod(replace(victim, is_deleting=True))
    assert rejected(world.rank(requested)) == waits
    world.clock.now += 1
    world.end(victim)
    assert rejected(world.rank(requested)) == waits


def test_activity_after_the_victims_end_is_not_theirs() -> None:
    world = full_node()
    requested = request(requires_idle=True, nominated_node="node-0")
    world.end(world.fleet.pods["uid-a"])
    assert rejected(world.rank(requested)) == {}

    world.read_after(5)
    assert rejected(world.rank(requested)) == {"node-0": Code.NOT_IDLE}
    world.read_after(5, GRAPHICS_ACTIVE=0.0, GPU_UTILIZATION=0.0)

    assert rejected(world.rank(requested)) == {}


def test_other_pods_on_their_way_to_the_node_count_unless_they_are_victims() -> None:
    world = time_sliced(1, replicas=4)
    for name in "ab":
        world.place(name, request(memory_bytes=int(35 * GIB)))

    assert not accepts(world, request(memory_bytes=TWENTY), "c")
    assert accepts(world, request(memory_bytes=TWENTY), "a")


def test_preemptor_passes_on_its_nominated_node_despite_victims_readings() -> None:
    world = full_node(4)
    requested = request(memory_bytes=TWENTY, nominated_node="node-0")
    assert rejected(world.rank(requested)) == {"node-0": Code.NO_MEMORY}

    world.fleet.apply_pod(replace(world.fleet.pods["uid-a"], is_deleting=True))

    assert rejected(world.rank(replace(requested, nominated_node=""))) == {"node-0": Code.NO_MEMORY}
    assert rejected(world.rank(requested)) == {}
    explained = world.placer.explain_nodes(requested, ["node-0"])
    assert explained[0].rejection == ""


def test_leaving_pods_make_no_room_on_the_card_that_a_free_share_comes_from() -> None:
    world = World()
    world.add_node("node-0", 2, replicas=4)
    world.read()
    sixty = int(60 * GIB)
    victims = [
        world.bind(name, "node-0", on=[world.card("node-0")], memory_bytes=sixty // 2)
        for name in "ab"
    ]
    world.bind("stays", "node-0", on=[world.card("node-0", 1)], memory_bytes=sixty)
    world.read_after(300)
    requested = request(memory_bytes=sixty, nominated_node="node-0")

    for victim in victims:
        world.fleet.apply_pod(replace(victim, is_deleting=True))
    assert rejected(world.rank(requested)) == {"node-0": Code.NO_MEMORY}
    for victim in victims:
        world.end(victim)

    assert rejected(world.rank(requested)) == {}


@pytest.mark.parametrize("is_nominated", [True, False])
def test_pods_of_unknown_cards_do_not_move_when_another_leaves(*, is_nominated: bool) -> None:
    world = World()
    world.is_mapped = False
    world.add_node("node-0", 2, replicas=2)
    world.read()
    world.card("node-0").values.update({Signal.MEMORY_USED: 50 * GIB, Signal.MEMORY_FREE: 30 * GIB})
    world.read_after(30, times=3)
    victim = world.bind("a", "node-0", memory_bytes=int(10 * GIB))
    for name, gib in (("stays", 60), ("b", 5), ("c", 5)):
        world.now += 1
        world.bind(name, "node-0", memory_bytes=int(gib * GIB))
    world.card("node-0", 1).values.update(
        {Signal.MEMORY_USED: 60 * GIB, Signal.MEMORY_FREE: 20 * GIB}
    )
    world.read_after(300)
    requested = request(memory_bytes=int(40 * GIB), nominated_node="node-0")

    if is_nominated:
        world.fleet.apply_pod(replace(victim, is_deleting=True))
        assert rejected(world.rank(requested)) == {"node-0": Code.NO_MEMORY}
    else:
        assert not accepts(world, requested, "a")


def test_the_load_filter_passes_the_least_loaded_of_busy_nodes() -> None:
    world = World(Policy(load_filter=LoadFilter(is_enabled=True)))
    for index, load in enumerate((0.9, 0.5, 0.95)):
        world.add_node(f"node-{index}")
        world.card(f"node-{index}").values[Signal.GRAPHICS_ACTIVE] = load
    world.read()

    assert set(rejected(world.rank())) == {"node-0", "node-2"}


def test_idle_requirement_evicts_no_pod_if_no_gpu_is_known_idle() -> None:
    world = full_node()
    elsewhere = request(requires_idle=True, resources=((GPU, 1), ("b", 1)))

    assert not accepts(world, request(requires_idle=True), "a", node="node-9")
    assert not accepts(world, replace(elsewhere, resource=GPU), "a")
    assert accepts(world, replace(elsewhere, requires_idle=False), "a")


@pytest.mark.parametrize("requires_idle", [False, True])
def test_a_node_that_has_just_gone_is_no_fault(requires_idle: bool) -> None:
    world = World(in_steps=True)
    for name in ("node-0", "node-1"):
        world.add_node(name, 1)
    world.bind("a", "node-0", on=[world.card("node-0")])
    world.read()
    finish(world.fleet.refresh_in_steps())
    world.fleet.remove_node("node-0")
    assert "node-0" in world.fleet.snapshot().nodes

    assert accepts(world, request(requires_idle=requires_idle), "a") is not requires_idle


def test_node_with_more_devices_than_the_snapshot_is_no_fault() -> None:
    world = World(in_steps=True)

    def offer(name: str, gpus: int) -> None:
        world.fleet.apply_node(NodeRecord(name=name, allocatable={GPU: gpus}, capacity={GPU: gpus}))

    offer("node-0", 1)
    world.bind("a", "node-0")
    finish(world.fleet.refresh_in_steps())
    room = len(world.fleet.snapshot().telemetry.latest)
    for number in range(1, room // _MAX_DEVICES + 1):
        offer(f"node-{number}", _MAX_DEVICES)
    world.fleet.snapshot()
    offer("node-0", 3)
    slots = world.fleet.leaving("node-0", frozenset())[GPU].row.slots
    assert max(slots) >= len(world.fleet.snapshot().telemetry.latest)

    assert accepts(world, request(), "a")


def test_readings_of_a_victim_under_an_old_resource_have_no_pod() -> None:
    world = full_node(is_mapped=False)
    former = world.fleet.nodes["node-0"]
    shared = {"nvidia.com/gpu.shared": 4}
    world.fleet.apply_node(replace(former, allocatable=shared, capacity=shared))
    world.read_after(30)
    requested = GpuRequest(resource="nvidia.com/gpu.shared", count=1, memory_bytes=TWENTY)

    assert rejected(world.rank(requested)) == {"node-0": Code.NO_MEMORY}
    assert accepts(world, requested, "a")
    assert not accepts(world, requested)


def test_readings_are_not_attributed_to_a_victim_with_unknown_claims() -> None:
    world = World()
    world.add_node("node-0", 1, allocatable={}, capacity={})
    world.read()
    nothing: dict[str, int] = {}
    world.bind("a", "node-0", resources=nothing, has_claims=True)
    world.card("node-0").values.update({**BUSY, Signal.MEMORY_FREE: 10 * GIB})
    world.read_after(300)

    assert accepts(world, request(memory_bytes=TWENTY), "a")
