"""Waiting pods, and the reasons why they wait."""

from dataclasses import dataclass
from typing import Any

import pytest

from extender.core.nodes.assumed_pods import Assumption
from extender.core.nodes.inventory import PodPhase
from extender.insight.pending import _PEERS_PATH, _SELF_EVIDENT
from extender.insight.scheduler_message import _OF_THE_POD
from testkit.api_requests import decide, get
from testkit.builders import GPU
from testkit.cards import IDLE, Gpu
from testkit.cli_serving import runner, serving
from testkit.others import FAR, NEAR, THIRD, OtherReplicas, SeesTeam, far_of, replica_world
from testkit.webhook_requests import Client, MakeClient
from testkit.world import MESSAGE, World

REFUSED = [{"count": 1, "reason": "node(s) had too few GPUs known to be idle"}]


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
    by_count = [hint.partition(" ")[0] for hint in pod.pop("hints")]
    assert by_count == ["4", "3", "2"]
    assert pod == {
        "pod": "team/p",
        "uid": "uid-p",
        "owner": "Job train",
        "scheduler": "default-scheduler",
        "created_at": "2027-01-15T07:58:50.000+00:00",
        "waiting_seconds": 100.0,
        "resources": {GPU: 2},
        "gpu_memory_bytes": None,
        "nominated_node": None,
        "assumed_node": None,
        "state": "refused",
        "nodes": 9,
        "by_scheduler": [
            {"count": 4, "reason": "Insufficient nvidia.com/gpu"},
            {"count": 2, "reason": "node(s) had untolerated taint {team: red, blue}"},
        ],
        "by_us": [{"count": 3, "reason": "node(s) had too few GPUs known to be idle"}],
        "message": MESSAGE,
        "preemption": MESSAGE.partition(" preemption: ")[2],
        "decision": None,
    }


async def test_own_decision_counts_before_kube_schedulers_message(
    world: World, client: Client
) -> None:
    world.add_waiting("p")
    await decide(client, "full", name="p", require_idle="true", gpus=2)

    (pod,) = (await get(client, "/v1/pending"))["pods"]

    assert pod["state"] == "refused"
    assert pod["by_us"] == [{"count": 1, "reason": "node(s) had too few GPUs known to be idle"}]
    assert pod["hints"][0].startswith("1 node(s) had too few GPUs known to be idle (full): ")
    assert (pod["message"], pod["preemption"], pod["owner"]) == (None, None, None)
    assert pod["decision"] == {
        "id": "here-1",
        "replica": "",
        "number": 1,
        "at": "2027-01-15T08:00:30.000+00:00",
        "verb": "prioritize",
        "candidates": 1,
        "feasible": 0,
        "node": None,
    }


async def test_once_kube_scheduler_gave_its_reasons_they_count(
    world: World, client: Client
) -> None:
    world.add_waiting("p", is_unscheduled=True, message="0/2 nodes are available: 2 Too many pods.")
    await decide(client, "full", name="p", require_idle="true", gpus=2)

    (pod,) = (await get(client, "/v1/pending"))["pods"]

    assert (pod["state"], pod["by_us"]) == ("unschedulable", [])
    assert [one["reason"] for one in pod["by_scheduler"]] == ["Too many pods"]


async def test_own_reasons_come_with_their_number_of_nodes_and_an_example(
    world: World, client: Client
) -> None:
    world.add({"dead-1": [Gpu(xid=79.0)], "dead-2": [Gpu(xid=79.0)]})
    world.add_waiting("p")
    nodes = "full", "dead-2", "dead-1", "idle"
    await decide(client, *nodes, name="p", require_idle="true", gpus=1)
    (placed,) = (await get(client, "/v1/pending"))["pods"]
    await decide(client, *nodes[:3], name="p", require_idle="true", gpus=1)
    (pod,) = (await get(client, "/v1/pending"))["pods"]

    assert (placed["state"], placed["by_us"]) == ("placing", [])
    assert pod["by_us"] == [
        {"count": 2, "reason": "node(s) had too few working GPUs"},
        {"count": 1, "reason": "node(s) had too few GPUs known to be idle"},
    ]
    unhealthy, busy = pod["hints"]
    assert unhealthy.startswith("2 node(s) had too few working GPUs (such as dead-1): ")
    assert busy.startswith("1 node(s) had too few GPUs known to be idle (full): ")


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
    assert pod["nominated_node"] == record.get("nominated_node")
    assert pod["hints"] == [text for name, text in _SELF_EVIDENT.items() if name == state]
    assert len(pod["hints"]) == (state in {"untried", "gated", "nominated"})


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
    assert pod["hints"][0].startswith("the extender chose a node for it a moment ago")


async def test_a_pod_that_is_still_to_come_waits_for_no_time(world: World, client: Client) -> None:
    world.add_waiting("p", created_at=world.now + 5.0)  # by the API server's clock

    (pod,) = (await get(client, "/v1/pending"))["pods"]

    assert pod["waiting_seconds"] == 0.0


async def test_the_longest_wait_comes_first_and_the_list_is_bounded(
    world: World, client: Client
) -> None:
    for number in range(3):
        world.add_waiting(f"p{number}", created_at=world.now - number)
    world.add_waiting("also", created_at=world.now - 2)
    world.add_waiting("done", phase=PodPhase.FAILED)
    world.add_waiting("claims", resources={}, has_claims=True)
    world.add_waiting("gpu-claims", resources={}, has_claims=True, has_gpu_claims=True)

    answer = await get(client, "/v1/pending", limit="3")

    assert [pod["pod"] for pod in answer["pods"]] == ["team/gpu-claims", "team/also", "team/p2"]
    assert answer["total"] == 5


async def test_a_namespace_can_be_named(world: World, client: Client) -> None:
    world.add_waiting("mine")
    world.add_waiting("theirs", "other")

    answer = await get(client, "/v1/pending", namespace="other")

    assert [pod["pod"] for pod in answer["pods"]] == ["other/theirs"]
    assert answer["total"] == 1


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
    assert pod["by_scheduler"][2]["reason"] == _OF_THE_POD
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


@dataclass
class Side:
    """One of two replicas, with its client."""

    world: World
    client: Client

    async def place(self, name: str, at: float) -> None:
        """Decide about a pod that a node can take."""
        self.world.now = at
        await decide(self.client, "a", "b", name=name)

    async def refuse(self, name: str, at: float) -> None:
        """Decide about a pod that no node can take."""
        self.world.now = at
        await decide(self.client, "full", name=name, require_idle="true", gpus=2)

    async def pending(self, **query: str) -> list[dict[str, Any]]:
        pods: list[dict[str, Any]] = (await get(self.client, "/v1/pending", 200, **query))["pods"]
        return pods


@pytest.fixture
async def sides(aiohttp_client: MakeClient) -> tuple[Side, Side]:
    """Return two replicas that see the same pods, and report their requests to each other."""
    near, far = replica_world(name="near"), replica_world(name="far")
    near.request_log.answered.subscribe(far.request_log.take)
    far.request_log.answered.subscribe(near.request_log.take)
    sides = tuple([Side(each, await aiohttp_client(each.build_app())) for each in (near, far)])
    far_of(near).clients, far_of(far).clients = {FAR: sides[1].client}, {NEAR: sides[0].client}
    for world in (near, far):
        world.add({"full": [IDLE]})
        world.add_pod("holder", "full")
        for name in ("p", "q"):
            world.add_waiting(name, created_at=world.now)
    return sides  # type: ignore[return-value] # two


async def test_newest_decision_is_reported_by_any_replica(sides: tuple[Side, Side]) -> None:
    near, far = sides
    start = near.world.now
    await near.place("p", start + 1)
    await far.refuse("p", start + 2)
    await far.refuse("q", start + 3)
    await near.place("q", start + 4)

    for side in sides:
        p, q = await side.pending()

        assert (p["decision"]["id"], p["state"], p["by_us"]) == ("far-1", "refused", REFUSED)
        assert (q["decision"]["id"], q["state"], q["by_us"]) == ("near-2", "placing", [])
        assert (p["decision"]["candidates"], p["decision"]["node"]) == (1, None)
        assert set(p["decision"]) == set(q["decision"])


async def test_newest_decision_of_several_other_replicas_counts(
    sides: tuple[Side, Side], aiohttp_client: MakeClient
) -> None:
    near, far = sides
    start = near.world.now
    await near.place("p", start + 1)
    await far.refuse("p", start + 2)
    await far.place("q", start + 3)
    await near.refuse("q", start + 4)
    third = replica_world(
        name="third", far=OtherReplicas({FAR: far.client, THIRD: None, NEAR: near.client})
    )
    for name in ("p", "q"):
        third.add_waiting(name, created_at=third.now)
    client = await aiohttp_client(third.build_app())

    answer = await get(client, "/v1/pending")

    assert [pod["decision"]["id"] for pod in answer["pods"]] == ["far-1", "near-2"]
    assert answer["unreachable"] == [THIRD]
    for uid, known in (("uid-p", {"uid-p"}), ("uid-none", set())):
        assert set((await get(far.client, _PEERS_PATH, uid=uid))["last"]) == known
    for namespace, known in (("team", {"uid-p", "uid-q"}), ("other", set())):
        reported = await get(far.client, _PEERS_PATH, namespace=namespace)
        assert set(reported["last"]) == known


async def test_a_replica_reports_its_latest_decisions_first(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.insight.pending._MOST_SENT", 1)
    near, far = sides
    await far.place("q", near.world.now + 1)
    await far.place("p", near.world.now + 2)

    assert list((await get(far.client, _PEERS_PATH))["last"]) == ["uid-p"]


async def test_pod_requested_at_another_replica_counts_as_tried(sides: tuple[Side, Side]) -> None:
    near, far = sides
    await far.refuse("p", near.world.now + 1)

    p, q = await near.pending(namespace="team")

    assert (p["state"], p["decision"]["id"]) == ("refused", "far-1")
    assert (q["state"], q["decision"]) == ("untried", None)


async def test_pods_that_do_not_wait_are_not_reported(sides: tuple[Side, Side]) -> None:
    near, far = sides
    await far.place("p", near.world.now + 1)
    await far.place("gone", near.world.now + 2)
    far.world.add_waiting("p", node="a")

    assert (await get(far.client, _PEERS_PATH))["last"] == {}
    assert [pod["decision"] for pod in await near.pending()] == [None, None]


async def test_explanation_has_the_last_decision_of_any_replica(sides: tuple[Side, Side]) -> None:
    near, far = sides
    start = near.world.now
    await near.place("p", start + 1)
    await far.refuse("p", start + 2)

    for side in sides:
        for wanted in ({"pod": "p"}, {"id": "near-1"}, {"id": "far-1"}):
            answer = await get(side.client, "/v1/explain", 200, **wanted)

            assert answer["decision"]["id"] == wanted.get("id", "far-1")
            assert (answer["state"], answer["pending"]["decision"]["id"]) == ("refused", "far-1")


async def test_of_another_tenants_pod_the_last_decision_names_nothing(
    sides: tuple[Side, Side], aiohttp_client: MakeClient
) -> None:
    near, far = sides
    for side in sides:
        side.world.add_waiting("secret", "hush", created_at=0.0)
    await far.place("secret", far.world.now + 1)
    client = await aiohttp_client(near.world.build_app(viewer=SeesTeam()))

    answer = await get(client, "/v1/pending")

    hidden = answer["pods"][0]
    assert (hidden["pod"], hidden["uid"], hidden["decision"]["id"]) == (
        "another pod",
        None,
        "far-1",
    )
    assert "secret" not in str(answer)
    assert "hush" not in str(answer)


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(None, id="silent"),
        pytest.param(b"<html>", id="no-json"),
        pytest.param(b'{"version":2,"replica":"far","last":{}}', id="newer-form"),
        pytest.param(b'{"version":1,"replica":"far","last":{"uid-p":{}}}', id="no-decision"),
    ],
)
async def test_replicas_that_do_not_answer_are_named(
    sides: tuple[Side, Side], garbage: bytes | None
) -> None:
    near, _ = sides
    await near.refuse("p", near.world.now + 1)
    others = far_of(near.world)
    others.clients, others.garbage = {FAR: None}, garbage

    answer = await get(near.client, "/v1/pending")

    assert answer["pods"][0]["decision"]["id"] == "near-1"
    assert answer["unreachable"] == [FAR]


def test_the_command_line_names_replicas_that_do_not_answer() -> None:
    world = replica_world(far=OtherReplicas({FAR: None}))

    with serving(world.build_app()) as url:
        shown = runner(url)("pending").stdout

    assert shown.splitlines() == ["no GPU pod waits", f"replicas that do not answer: {FAR}"]


async def test_our_own_address_adds_nothing_twice(sides: tuple[Side, Side]) -> None:
    near, _ = sides
    far_of(near.world).clients = {NEAR: near.client}
    await near.refuse("p", near.world.now + 1)

    answer = await get(near.client, "/v1/pending")

    assert answer["pods"][0]["decision"]["id"] == "near-1"
    assert answer["unreachable"] == []


async def test_without_tls_replicas_get_no_answer(aiohttp_client: MakeClient) -> None:
    client = await aiohttp_client(
        replica_world(answers_peers=False, far=OtherReplicas()).build_app()
    )

    assert "without TLS" in (await get(client, _PEERS_PATH, 403))["error"]
