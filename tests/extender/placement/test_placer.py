"""Pods that are placed one after another, in the order of kube-scheduler's calls."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from extender.core.decision.filtering import Code, Rejection
from extender.core.devices.readings import Signal
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import PodRecord
from extender.core.policy import Strategy
from testkit.builders import GIB, GPU, pod_ref, rejected, request
from testkit.cards import card
from testkit.world import World, one_node, time_sliced

TWENTY = int(20 * GIB)


def burst(world: World, pods: int, *, bound_after: int, seconds: float = 0.05) -> Counter[str]:
    """Place pods one after another; return the number of pods of each node.

    Args:
        world: the cluster.
        pods: number of pods.
        bound_after: number of further pods after which the watch shows a pod as bound.
        seconds: interval between pods.
    """
    chosen: list[str] = []
    for number in range(pods):
        node = world.place(f"pod-{number}")
        assert node is not None
        chosen.append(node)
        world.clock.now += seconds
        late = number - bound_after
        if late >= 0:
            world.bind(f"pod-{late}", chosen[late], started_at=None)
    return Counter(chosen)


@pytest.mark.parametrize("bound_after", [0, 3, 32], ids=["at-once", "late", "never"])
@pytest.mark.parametrize(("cards", "replicas"), [(1, 10), (2, 5)])
@pytest.mark.parametrize("load", [0.0, 0.28, 0.95], ids=["idle", "nearly-busy", "busy"])
def test_a_burst_spreads_evenly_over_equal_nodes_while_metrics_are_frozen(
    cards: int, replicas: int, bound_after: int, load: float
) -> None:
    world = time_sliced(4, cards, replicas, GRAPHICS_ACTIVE=load)

    assert burst(world, 32, bound_after=bound_after) == {f"node-{index}": 8 for index in range(4)}


@pytest.mark.parametrize("bound_after", [0, 32], ids=["at-once", "never"])
def test_a_burst_spreads_evenly_without_known_holders(bound_after: int) -> None:
    world = World()
    world.is_mapped = False
    for index in range(4):
        world.add_node(f"node-{index}", 2, replicas=5)
    world.read()

    assert set(burst(world, 32, bound_after=bound_after).values()) == {8}


def test_a_burst_spreads_evenly_without_any_telemetry() -> None:
    world = World()
    for index in range(4):
        world.add_node(f"node-{index}", 1, replicas=10)
    world.devices.clear()

    assert set(burst(world, 32, bound_after=2).values()) == {8}


def test_a_burst_of_whole_gpu_pods_takes_each_gpu_once() -> None:
    world = World()
    for index in range(4):
        world.add_node(f"node-{index}", 8)
    world.read()

    assert set(burst(world, 32, bound_after=5).values()) == {8}


def test_pods_with_declared_memory_never_share_missing_room() -> None:
    world = time_sliced(2)
    chosen = [world.place(f"pod-{number}", request(memory_bytes=TWENTY)) for number in range(9)]

    assert Counter(chosen) == {"node-0": 4, "node-1": 4, None: 1}


# --- assumed pods ---------------------------------------------------------------------------------


def on(world: World) -> dict[str, list[str]]:
    overlay = world.fleet.ledger.overlays(without="").get(GPU, {})
    return {node: [tenant.uid for tenant in tenants] for node, tenants in overlay.items()}


def test_a_pod_counts_from_our_answer_and_never_against_itself() -> None:
    world = time_sliced(2)

    first = world.place("a")

    assert on(world) == {first: ["uid-a"]}
    assert world.place("a") == first
    assert world.place("b") != first


def test_prioritize_replaces_the_assumption_of_filter() -> None:
    world = time_sliced(2)
    world.placer.place("filter", pod_ref("a"), request(), ("node-0", "node-1"))

    world.placer.place("prioritize", pod_ref("a"), request(), ("node-1",))

    assert on(world) == {"node-1": ["uid-a"]}


def test_a_pod_that_finds_no_node_is_assumed_nowhere() -> None:
    world = time_sliced(1)
    world.place("a")

    world.placer.place("filter", pod_ref("a"), request(), ())

    assert on(world) == {}


def test_a_tentative_pod_counts_until_its_time_is_up() -> None:
    world = time_sliced(1)
    world.place("a")

    world.clock.now += 29.9
    world.fleet.snapshot()
    assert on(world) == {"node-0": ["uid-a"]}
    world.clock.now += 0.1
    world.fleet.snapshot()
    assert on(world) == {}


def test_a_tentative_pod_that_binds_elsewhere_counts_there() -> None:
    world = time_sliced(2)
    assert world.place("a") == "node-0"

    world.bind("a", "node-1")

    assert on(world) == {}
    assert (world.row("node-0").held, world.row("node-1").held) == (0, 1)


def pending(name: str = "a", **changes: Any) -> PodRecord:
    described = PodRecord(uid=f"uid-{name}", namespace="ns", name=name, resources={GPU: 1})
    return replace(described, **changes)


def test_a_tentative_pod_no_longer_counts_once_reported_unschedulable() -> None:
    world = time_sliced(2)
    world.fleet.apply_pod(pending())
    world.place("a")

    world.fleet.apply_pod(pending(is_unscheduled=True))

    assert on(world) == {}


def test_the_message_of_an_earlier_attempt_does_not_end_this_assumption() -> None:
    world = time_sliced(2)
    world.fleet.apply_pod(pending(is_unscheduled=True))
    node = world.place("a")

    world.fleet.apply_pod(pending(is_unscheduled=True, memory_bytes=1))

    assert on(world) == {node: ["uid-a"]}


def said(message: str) -> PodRecord:
    return pending(is_unscheduled=True, message=message)


def test_a_retried_pod_no_longer_counts_once_reported_unschedulable_again() -> None:
    world = time_sliced(2)
    world.fleet.apply_pod(said("0/2 nodes are available: 2 too few GPUs"))
    world.place("a", request(last_refusal="0/2 nodes are available: 2 too few GPUs"))

    world.fleet.apply_pod(said("0/2 nodes are available: 2 waiting for volumes"))

    assert on(world) == {}


@pytest.mark.parametrize("known", [pending(), said("at first")])
def test_a_late_event_of_the_attempt_before_does_not_count(known: PodRecord) -> None:
    world = time_sliced(2)
    world.fleet.apply_pod(known)
    node = world.place("a", request(last_refusal="the time before"))

    world.fleet.apply_pod(said("the time before"))
    assert on(world) == {node: ["uid-a"]}
    world.fleet.apply_pod(said("now"))
    assert on(world) == {}


def test_a_deleted_tentative_pod_no_longer_counts() -> None:
    world = time_sliced(1)
    world.fleet.apply_pod(pending())
    world.place("a")

    world.fleet.remove_pod("uid-a", world.clock.now)

    assert on(world) == {}


def test_nominated_pod_stays_on_its_node_despite_our_ranking() -> None:
    world = time_sliced(2)
    world.fleet.apply_pod(pending(nominated_node="node-1"))

    assert world.place("a", request(nominated_node="node-1")) == "node-0"

    assert on(world) == {"node-1": ["uid-a"]}


def test_a_nominated_pod_counts_where_it_goes_if_its_nominated_node_is_unsuitable() -> None:
    world = time_sliced(2)
    world.bind("tenant", "node-0", on=[world.card("node-0")], memory_bytes=int(60 * GIB))
    world.read_after(300.0)
    memory = int(60 * GIB)
    for name in "ab":
        world.fleet.apply_pod(pending(name, nominated_node="node-0", memory_bytes=memory))
    requested = request(memory_bytes=memory, nominated_node="node-0")

    assert world.place("a", requested) == "node-1"
    assert world.place("b", requested) is None

    assert on(world) == {"node-0": ["uid-b"], "node-1": ["uid-a"]}


@pytest.mark.parametrize(("priority", "first", "other"), [(0, "a", "b"), (1, "b", "a")])
def test_pods_nominated_to_one_node_do_not_block_each_other(
    priority: int, first: str, other: str
) -> None:
    world = time_sliced(1)
    memory = int(60 * GIB)
    nominated: dict[str, Any] = {"nominated_node": "node-0", "memory_bytes": memory}
    world.fleet.apply_pod(pending("b", created_at=20.0, priority=priority, **nominated))
    world.fleet.apply_pod(pending("a", created_at=10.0, **nominated))
    requested = request(memory_bytes=memory, nominated_node="node-0")

    assert world.place(other, requested) is None
    assert world.place(first, requested) == "node-0"
    assert world.place("c", request(memory_bytes=memory)) is None


@pytest.mark.parametrize(("priority", "expected"), [(0, None), (10, None), (11, "node-0")])
def test_a_nominated_pod_reserves_nothing_against_pods_of_higher_priority(
    priority: int, expected: str | None
) -> None:
    world = time_sliced(1)
    memory = int(60 * GIB)
    nominated: dict[str, Any] = {"nominated_node": "node-0", "memory_bytes": memory}
    world.fleet.apply_pod(pending("a", priority=10, **nominated))
    world.fleet.apply_pod(pending("b", priority=priority, memory_bytes=memory))

    assert world.place("b", request(memory_bytes=memory)) == expected
    assert "uid-a" in on(world)["node-0"]
    assert (world.place("a", request(memory_bytes=memory)) is None) is (expected is not None)


def test_a_pod_that_is_already_bound_is_not_counted_twice() -> None:
    world = time_sliced(1)
    world.bind("a", "node-0")

    world.place("a")

    assert (on(world), world.row("node-0").held) == ({}, 1)


def test_what_if_assumes_and_records_nothing() -> None:
    world = time_sliced(1)

    assert world.rank().best == "node-0"
    assert (on(world), len(world.history)) == ({}, 0)


def test_cached_answers_are_those_of_a_fresh_placer() -> None:
    world = time_sliced(3)
    for number in range(7):
        world.place(f"pod-{number}", request(memory_bytes=TWENTY if number % 2 else None))

        for requested in (
            request(),
            request(memory_bytes=TWENTY),
            request(nominated_node="node-1"),
        ):
            cached, fresh = world.rank(requested), World.rank(_with_fresh_placer(world), requested)
            assert cached.scores.tolist() == fresh.scores.tolist()
            assert cached.codes.tolist() == fresh.codes.tolist()


def _with_fresh_placer(world: World) -> World:
    other = World()
    other.fleet, other.clock = world.fleet, world.clock
    other.placer = type(world.placer)(world.fleet, world.history, world.clock)
    return other


# --- nodes ----------------------------------------------------------------------------------------


def test_node_with_early_failures_ranks_lower_until_it_recovers() -> None:
    world = time_sliced(2)
    for number in range(5):
        world.bind(f"dead-{number}", "node-0", owner=f"Job {number}", is_failed_early=True)
    for number in range(5):
        world.fleet.remove_pod(f"uid-dead-{number}", world.clock.now)
    world.read_after(30, times=2)
    assert world.rank().best == "node-1"

    world.clock.now += 2 * 3600
    world.read()

    assert world.rank().best == "node-0"


# --- history --------------------------------------------------------------------------------------


def test_a_shared_gpu_with_foreign_use_in_bursts_is_not_idle_in_a_pause() -> None:
    world = time_sliced(1, replicas=4)
    card = world.card("node-0")
    card.values.update({Signal.MEMORY_USED: 10 * GIB, Signal.MEMORY_FREE: 70 * GIB})
    for number in range(20):
        world.read_after(30, GRAPHICS_ACTIVE=0.0 if number % 2 else 0.95)
    waits = {"node-0": Code.NOT_IDLE}
    assert rejected(world.rank(request(requires_idle=True))) == waits

    card.values.update({Signal.MEMORY_USED: 0.0, Signal.MEMORY_FREE: 80 * GIB})
    world.read_after(30, times=2)

    assert rejected(world.rank(request(requires_idle=True))) == {}


def test_decision_is_recorded_with_its_inputs() -> None:
    world = time_sliced(3)
    record = world.placer.place("filter", pod_ref("a"), request(), tuple(world.fleet.nodes))

    world.placer.detail(record)

    assert [detail.node for detail in record.details] == ["node-0", "node-1", "node-2"]
    assert record.details[0].score == pytest.approx(record.decision.scores[0])
    assert world.history.last_of("uid-a") is record


def test_an_answer_is_explained_as_it_was_and_not_as_it_would_be_now() -> None:
    world = time_sliced(1)
    record = world.placer.place("filter", pod_ref("a"), request(), ("node-0",))
    world.read_after(2, GRAPHICS_ACTIVE=0.9)
    world.place("b")

    later = world.placer.place("filter", pod_ref("c"), request(), ("node-0",))
    for each in (record, later):
        world.placer.detail(each)
        assert each.details[0].score == pytest.approx(each.decision.scores[0])

    assert record.details[0].devices[0].state == "idle"
    assert record.details[0].score > later.details[0].score


def test_unknown_nodes_and_resources_are_not_explained() -> None:
    world = time_sliced(1)
    unknown = replace(request(), resource="b", resources=(("b", 1),))

    assert world.placer.explain_nodes(request(), ["node-9"]) == ()
    assert world.placer.explain_nodes(unknown, ["node-0"]) == ()


def test_an_answer_that_was_explained_in_full_is_left_alone() -> None:
    world = time_sliced(1)
    record = world.placer.place("filter", pod_ref("a"), request(), ("node-0",))
    world.placer.detail(record)
    packed = record.packed

    world.placer.detail(record)

    assert record.packed is packed


def test_if_few_nodes_pass_some_refused_ones_are_recorded_in_full() -> None:
    """One node for each reason comes before a second one for the same reason."""
    world = World()
    for name in ("broken-1", "broken-2", "busy-1", "busy-2", "idle"):
        world.add_node(name, 1)
        values = world.card(name).values
        values[Signal.MEMORY_USED] = 0.0
        values[Signal.GRAPHICS_ACTIVE] = 0.9 if name.startswith("busy") else 0.0
        values[Signal.ROW_REMAP_FAILURE] = float(name.startswith("broken"))
    world.read()
    world.placer.detailed = 3
    requested = request(requires_idle=True)
    record = world.placer.place("filter", pod_ref("a"), requested, sorted(world.fleet.nodes))

    world.placer.detail(record)

    assert [(detail.node, detail.rejection) for detail in record.details] == [
        ("idle", ""),
        ("broken-1", Rejection.UNHEALTHY),
        ("busy-1", Rejection.NOT_IDLE),
    ]


def test_remembered_decisions_share_one_list_of_the_same_candidates() -> None:
    world = time_sliced(3, 1, 4)
    names = sorted(world.fleet.nodes)

    def remembered(verb: str, number: int) -> object:
        record = world.placer.place(
            verb, pod_ref(f"pod-{number}"), request(), world.fleet.node_index.number(names)
        )
        world.placer.detail(record)
        return record.decision.candidates

    lists = [remembered(verb, number) for number in range(3) for verb in ("filter", "prioritize")]

    assert {id(one) for one in lists[2:]} <= {id(one) for one in lists[:2]}


def test_a_pod_is_not_woken_for_a_node_without_cpu_for_it() -> None:
    world = World()
    world.register_node("short", host=HostResources(8_000, 64 << 30))
    world.fleet.apply_host_use("short", HostResources(6_000))
    world.live({"short": [card(), card()]}, 60)

    assert world.placer.would_do(pod_ref(), request(1, millicores=2_000), "short")
    assert not world.placer.would_do(pod_ref(), request(1, millicores=4_000), "short")
    world.fleet.apply_host_use("short", HostResources(1_000))
    assert world.placer.would_do(pod_ref(), request(1, millicores=4_000), "short")
    world.place("another", request(1, millicores=4_000))
    assert not world.placer.would_do(pod_ref(), request(1, millicores=4_000), "short")
    assert world.placer.would_do(pod_ref(), request(1, millicores=3_000), "short")


def test_pod_is_not_woken_for_unknown_or_full_nodes() -> None:
    world = one_node(2)
    world.place("a")

    assert world.placer.would_do(pod_ref("a"), request(2), "node")
    assert world.placer.would_do(pod_ref("b"), request(1), "node")
    assert not world.placer.would_do(pod_ref("b"), request(2), "node")
    assert not world.placer.would_do(pod_ref("b"), request(1), "node-9")


def test_all_replicas_that_a_pod_requests_are_left_out_of_the_free_ones() -> None:
    world = time_sliced(1, 2, 3)

    (verdict,) = world.placer.explain_nodes(request(3, strategy=Strategy.PACK), ["node-0"])

    assert verdict.reason.endswith("leaves 3 of 6 replicas usable")
