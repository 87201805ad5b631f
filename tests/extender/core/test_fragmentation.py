"""Room that a placement leaves for the requests seen so far."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.decision import fragmentation
from extender.core.decision.dirty_rows import evaluate_in_steps
from extender.core.decision.evaluation import EvaluationInputs, device_requests
from extender.core.nodes.seen_requests import NONE_SEEN, RequestKind, SeenRequests
from extender.core.policy import Policy, Strategy
from extender.core.request.request import GpuRequest
from testkit.builders import (
    GPU,
    Node,
    decide_on,
    gpu,
    node,
    ranking,
    request,
    score_of,
    shared,
    snapshot_of,
)
from testkit.world import World

ONE_WITH_CPU = RequestKind(1, millicores=8000)
PAIRS = SeenRequests.of({RequestKind(2): 1.0})


def free(count: int, **rest: Any) -> Node:
    """Return a node of 8 GPUs with `count` free ones."""
    return node(*[gpu(used=1)] * (8 - count), *[gpu()] * count, **rest)


def best(nodes: dict[str, Node], requested: GpuRequest | None = None, **how: Any) -> str:
    """Return the node that ranks first."""
    return ranking(decide_on(nodes, requested, **how))[0]


@pytest.mark.parametrize("strategy", [Strategy.AUTO, Strategy.PACK])
def test_a_node_that_stays_usable_comes_before_a_fuller_one(strategy: Strategy) -> None:
    # After one GPU of four a pair still fits; of two GPUs a single one would be left.
    nodes = {"a": free(2), "b": free(3)}
    requested = request(strategy=strategy)

    assert best(nodes, requested) == "a"
    assert best(nodes, requested, seen=PAIRS) == "b"


def test_spread_does_not_count_it() -> None:
    nodes = {"a": free(8), "b": free(3)}

    assert best(nodes, request(strategy=Strategy.SPREAD), seen=PAIRS) == "a"


def test_gpus_without_cpu_for_the_requests_are_taken_first() -> None:
    seen = SeenRequests.of({ONE_WITH_CPU: 1.0})
    nodes = {"a": free(1, free_millicores=64_000), "b": free(4, free_millicores=4000)}

    assert best(nodes, request(millicores=1000)) == "a"
    assert best(nodes, request(millicores=1000), seen=seen) == "b"


def test_gpus_of_a_model_that_no_request_names_are_taken_first() -> None:
    seen = SeenRequests.of({RequestKind(1, models=("h100",)): 1.0})
    models = ("", "nvidia h100 80gb hbm3", "nvidia t4")
    nodes = {"a": free(1, model_id=1), "b": free(4, model_id=2)}

    assert best(nodes, models=models) == "a"
    assert best(nodes, models=models, seen=seen) == "b"


def test_pack_keeps_a_whole_device_for_requests_of_all_its_replicas() -> None:
    seen = SeenRequests.of({RequestKind(4): 1.0})
    nodes = {"a": shared(gpu(), replicas=4), "b": shared(gpu(used=2), gpu(used=1), replicas=4)}
    requested = request(strategy=Strategy.PACK)

    assert best(nodes, requested) == "a"
    assert best(nodes, requested, seen=seen) == "b"


def test_auto_spreads_shared_devices_by_load_all_the_same() -> None:
    seen = SeenRequests.of({RequestKind(4): 1.0})
    nodes = {"a": shared(gpu(), replicas=4), "b": shared(gpu(used=2), gpu(used=2), replicas=4)}

    assert best(nodes, seen=seen) == "a"


def test_among_nodes_that_strand_as_many_the_fullest_comes_first() -> None:
    seen = SeenRequests.of({RequestKind(1): 1.0})

    assert best({"a": free(7), "b": free(3)}, seen=seen) == "b"


def test_idle_gpus_come_first_whatever_is_stranded() -> None:
    nodes = {"a": node(*[gpu(utilization=0.9)] * 3), "b": free(2)}

    assert best(nodes, seen=PAIRS) == "b"


@pytest.mark.parametrize("step_rows", [256, 7])
@pytest.mark.parametrize("every", [1, 2, 41], ids=["shared", "mixed", "whole"])
def test_a_node_scores_alone_as_among_others(
    every: int, step_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fragmentation, "_STEP_ROWS", step_rows)
    # Sixteenths put differences on the border between two steps.
    seen = SeenRequests.of({RequestKind(1 + at % 4, millicores=1000 * at): 1.0 for at in range(16)})
    nodes = {
        f"node-{at}": shared(*[gpu(used=at % 5)] * 4, replicas=4, free_millicores=900 * at)
        if (at + 1) % every == 0
        else free(at % 8 + 1, free_millicores=900 * at)
        for at in range(40)
    }
    requested = request(strategy=Strategy.PACK, millicores=500)

    decision = decide_on(nodes, requested, seen=seen)

    alone = [score_of(described, requested, seen=seen) for described in nodes.values()]
    assert decision.scores.tolist() == alone


def test_one_step_measures_few_shared_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragmentation, "_STEP_ROWS", 7)
    nodes = {f"node-{at}": shared(gpu(), replicas=4) for at in range(40)}
    snapshot = snapshot_of(nodes, seen=PAIRS)
    requested = request(strategy=Strategy.PACK)
    ((_, device_request),) = device_requests(requested)
    inputs = EvaluationInputs(
        request=requested, devices=device_request, policy=Policy(), overlay={}
    )

    def steps(seen: SeenRequests) -> int:
        pool = replace(snapshot.pools[GPU], seen=seen)
        return sum(1 for _ in evaluate_in_steps(snapshot, pool, inputs))

    assert steps(PAIRS) - steps(NONE_SEEN) == 6


def test_the_fleet_learns_from_waiting_pods() -> None:
    world = World()
    world.add_node("node")
    world.read()
    for number in range(20):
        world.add_waiting(f"pod-{number}")
    world.read_after(60)

    assert world.fleet.snapshot().pools[GPU].seen.kinds == (RequestKind(2),)


def test_pods_seen_again_count_once() -> None:
    world = World()
    world.add_node("node")
    world.read()
    for _ in range(20):
        world.add_waiting("pod")
    world.read_after(60)

    assert world.fleet.snapshot().pools[GPU].seen is NONE_SEEN
