"""Test that in shadow mode answers change nothing, and decisions are still recorded."""

import pytest

from extender.placement.request_log import AnsweredRequest
from testkit.cards import BUSY, IDLE
from testkit.webhook_requests import (
    Client,
    MakeClient,
    call,
    meta,
    names_request,
    objects_request,
    pod,
)
from testkit.world import World

NODES = ("busy", "idle-b", "dead", "foreign", "idle-a")


@pytest.fixture
async def shadow(world: World, aiohttp_client: MakeClient) -> Client:
    world.placer.is_shadow = True
    world.shortlist = 1
    return await aiohttp_client(world.build_app())


async def test_filter_passes_every_candidate_in_the_order_of_the_request(
    shadow: Client, world: World
) -> None:
    answer = await call(shadow, "filter", names_request(*NODES))

    assert answer == {
        "Nodes": None,
        "NodeNames": list(NODES),
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": {},
        "Error": "",
    }
    (record,) = world.history
    assert record.is_shadow
    assert (record.decision.best, record.decision.feasible) == ("idle-a", 3)


async def test_filter_answers_whole_nodes_with_whole_nodes(shadow: Client) -> None:
    request = objects_request(*NODES)

    answer = await call(shadow, "filter", request)

    assert answer["Nodes"]["items"] == request["Nodes"]["items"]  # type: ignore[index] # an object
    assert answer["NodeNames"] is None


async def test_prioritize_gives_no_scores_at_all(shadow: Client, world: World) -> None:
    await call(shadow, "filter", names_request(*NODES))

    assert await call(shadow, "prioritize", names_request(*NODES)) == []
    assert [record.verb for record in world.history] == ["prioritize", "filter"]
    assert all(record.decision.best == "idle-a" for record in world.history)


async def test_a_pod_that_requires_idle_gpus_passes_everywhere(
    shadow: Client, world: World
) -> None:
    request = names_request("busy", requester=pod(require_idle="true"))

    assert (await call(shadow, "filter", request))["NodeNames"] == ["busy"]
    (record,) = world.history
    assert record.decision.best is None
    assert not record.leaves_none


async def test_preempt_returns_all_candidates(shadow: Client) -> None:
    request = {"Pod": pod(), **meta(*NODES)}

    assert await call(shadow, "preempt", request) == meta(*NODES)


async def test_a_pod_counts_only_from_its_binding(shadow: Client, world: World) -> None:
    await call(shadow, "filter", names_request(*NODES))
    await call(shadow, "prioritize", names_request(*NODES))
    assert len(world.fleet.ledger) == 0

    world.add_pod("requester", "idle-b")
    world.history.note_bound("uid-requester", "idle-b")
    spread = pod("next", strategy="spread")
    await call(shadow, "filter", names_request(*NODES, requester=spread))

    newest = next(iter(world.history))
    assert newest.decision.best == "idle-a"  # it has one more idle GPU than idle-b now
    assert world.fleet.snapshot().pools["nvidia.com/gpu"].rows is not None
    followed = next(record for record in world.history if record.pod.name == "requester")
    assert (followed.decision.best, followed.bound_node) == ("idle-a", "idle-b")


async def test_an_earlier_assumption_is_dropped_with_the_next_request_for_the_pod(
    shadow: Client, world: World
) -> None:
    world.placer.is_shadow = False
    await call(shadow, "filter", names_request(*NODES))
    assert world.fleet.ledger.get("uid-requester") is not None

    world.placer.is_shadow = True
    await call(shadow, "filter", names_request(*NODES))

    assert world.fleet.ledger.get("uid-requester") is None


async def test_peers_receive_no_node_to_count_the_pod_on(shadow: Client, world: World) -> None:
    published: list[AnsweredRequest] = []
    world.request_log.answered.subscribe(published.append)

    await call(shadow, "filter", names_request(*NODES))
    await call(shadow, "prioritize", names_request(*NODES))

    assert [(one.verb, one.choices, one.node, one.resources) for one in published] == [
        ("filter", len(NODES), "", ()),
        ("prioritize", len(NODES), "", ()),
    ]


async def test_answers_count_again_after_shadow_mode(shadow: Client, world: World) -> None:
    world.report({"idle-a": [BUSY, BUSY], "idle-b": [IDLE, IDLE], "busy": [BUSY, BUSY]})
    world.placer.is_shadow = False

    answer = await call(shadow, "filter", names_request("idle-b", "dead"))

    assert answer["NodeNames"] == ["idle-b"]
