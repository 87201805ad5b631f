"""Waiting pods, and the reasons why they wait."""

from typing import Any

import pytest

from extender.core.nodes.assumed_pods import Assumption
from extender.core.nodes.inventory import PodPhase
from extender.insight.scheduler_message import OF_THE_POD
from testkit.api_requests import decide, get
from testkit.builders import GPU
from testkit.cards import IDLE
from testkit.others import SeesTeam
from testkit.webhook_requests import Client, MakeClient
from testkit.world import MESSAGE, World


@pytest.fixture
def world() -> World:
    world = World()
    world.add({"idle": [IDLE, IDLE], "full": [IDLE]})
    world.add_pod("a", "full")
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


async def test_refused_pod_names_the_filters_and_nodes(world: World, client: Client) -> None:
    world.add_waiting("p", is_unscheduled=True, is_refused=True, message=MESSAGE, owner="Job train")

    answer = await get(client, "/v1/pending")
    (pod,) = answer["pods"]

    assert (answer["total"], answer["nodes"]) == (1, 2)
    assert (pod["pod"], pod["uid"], pod["owner"]) == ("team/p", "uid-p", "Job train")
    assert (pod["state"], pod["nodes"], pod["waiting_seconds"]) == ("refused", 9, 100.0)
    assert pod["resources"] == {GPU: 2}
    assert [one["count"] for one in pod["by_scheduler"]] == [4, 2]
    assert pod["by_us"] == [{"count": 3, "reason": "node(s) had too few GPUs known to be idle"}]
    assert len(pod["hints"]) == 3
    assert pod["message"] == MESSAGE
    assert pod["decision"] is None


async def test_own_decision_counts_before_kube_schedulers_message(
    world: World, client: Client
) -> None:
    world.add_waiting("p")
    await decide(client, "full", name="p", require_idle="true", gpus=2)

    (pod,) = (await get(client, "/v1/pending"))["pods"]

    assert pod["state"] == "refused"
    assert pod["by_us"] == [{"count": 1, "reason": "node(s) had too few GPUs known to be idle"}]
    assert pod["hints"][0].startswith("1 node(s) had too few GPUs known to be idle (full): ")
    assert (pod["decision"]["candidates"], pod["decision"]["feasible"]) == (1, 0)


@pytest.mark.parametrize(
    ("record", "state"),
    [
        ({}, "untried"),
        ({"is_gated": True}, "gated"),
        ({"is_deleting": True, "is_refused": True}, "deleting"),
        ({"nominated_node": "idle"}, "nominated"),
        ({"is_unscheduled": True}, "unschedulable"),
    ],
)
async def test_the_state_says_why_a_pod_is_not_bound(
    world: World, client: Client, record: dict[str, Any], state: str
) -> None:
    world.add_waiting("p", **record)

    (pod,) = (await get(client, "/v1/pending"))["pods"]

    assert pod["state"] == state
    assert bool(pod["hints"]) is (state in {"untried", "gated", "nominated"})


async def test_a_pod_that_was_just_placed_is_being_placed(world: World, client: Client) -> None:
    uid = world.add_waiting("p")
    world.fleet.ledger.assume(
        Assumption(
            uid=uid,
            key="team/p",
            node="idle",
            resources=((GPU, 2),),
            memory_bytes=None,
            expires_at=world.now + 60,
        )
    )

    (pod,) = (await get(client, "/v1/pending"))["pods"]

    assert (pod["state"], pod["assumed_node"]) == ("placing", "idle")


async def test_the_longest_wait_comes_first_and_the_list_is_bounded(
    world: World, client: Client
) -> None:
    for number in range(3):
        world.add_waiting(f"p{number}", created_at=world.now - number)
    world.add_waiting("done", phase=PodPhase.FAILED)
    world.add_waiting("claims", resources={}, has_claims=True)

    answer = await get(client, "/v1/pending", limit="2")

    assert [pod["pod"] for pod in answer["pods"]] == ["team/p2", "team/p1"]
    assert answer["total"] == 3


async def test_a_namespace_can_be_named(world: World, client: Client) -> None:
    world.add_waiting("mine")
    world.add_waiting("theirs", "other")

    answer = await get(client, "/v1/pending", namespace="other")

    assert [pod["pod"] for pod in answer["pods"]] == ["other/theirs"]


async def test_pods_that_the_caller_may_not_read_have_no_names(
    world: World, aiohttp_client: MakeClient
) -> None:
    claim = '1 persistentvolumeclaim "secret-data" not found'
    message = MESSAGE.replace("4 Insufficient", f"{claim}, 4 Insufficient")
    world.add_waiting("secret", "other", message=message, owner="Job secret", memory_bytes=1 << 34)
    client = await aiohttp_client(world.build_app(viewer=SeesTeam()))

    everything = await get(client, "/v1/pending")
    named = await get(client, "/v1/pending", namespace="other")
    (pod,) = everything["pods"]

    assert "secret" not in str(everything)
    assert (pod["pod"], pod["uid"], pod["message"]) == ("another pod", None, None)
    assert pod["gpu_memory_bytes"] is None
    assert [one["count"] for one in pod["by_scheduler"]] == [4, 2, 1]
    assert pod["by_scheduler"][0]["reason"] == "Insufficient nvidia.com/gpu"
    assert pod["by_scheduler"][2]["reason"] == OF_THE_POD
    assert len(pod["hints"]) == 4
    assert named["pods"] == []


@pytest.mark.parametrize(
    ("query", "allowed"),
    [
        ({"limit": "0"}, "must be a whole number from 1 to 1000"),
        ({"limit": "x"}, "must be a whole number from 1 to 1000"),
        ({"pod": "a"}, "use limit, namespace"),
    ],
)
async def test_bad_parameter_is_refused_with_allowed_values(
    client: Client, query: dict[str, str], allowed: str
) -> None:
    assert allowed in (await get(client, "/v1/pending", 400, **query))["error"]
