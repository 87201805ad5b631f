"""Any replica explains the decisions of all, for callers who may read the pod."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from extender.insight.explain import _PEERS_PATH
from extender.server.redaction import VIEWER, Viewer
from testkit.api_requests import decide, get
from testkit.cards import BUSY, IDLE, Gpu
from testkit.others import FAR, THIRD, LearnsTeam, OtherReplicas, far_of, replica_world
from testkit.webhook_requests import Client, MakeClient, names_request, pod
from testkit.world import World

CARDS = {"idle": [IDLE, IDLE], "half": [IDLE, BUSY], "dead": [Gpu(xid=79.0)]}


@pytest.fixture
async def other(aiohttp_client: MakeClient) -> Client:
    """Return another replica that decided a minute later than this one."""
    world = replica_world(name="far")
    world.now += 60
    client = await aiohttp_client(world.build_app())
    await decide(client, "a", "b", name="theirs")
    await decide(client, "b", name="both")
    return client


@pytest.fixture
def far(other: Client) -> OtherReplicas:
    return OtherReplicas({FAR: other})


@pytest.fixture
async def client(far: OtherReplicas, aiohttp_client: MakeClient) -> Client:
    world = replica_world(far=far)
    client = await aiohttp_client(world.build_app())
    await decide(client, "a", name="ours")
    await decide(client, "a", name="both")
    return client


async def test_a_pod_that_another_replica_decided_about_is_explained(client: Client) -> None:
    answer = await get(client, "/v1/explain", pod="team/theirs")

    assert (answer["pod"], answer["decision"]["candidates"]) == ("team/theirs", 2)
    assert [node["node"] for node in answer["nodes"]] == ["a", "b"]
    assert answer["nodes"][0]["parts"]


async def test_the_replica_that_decided_reports_its_record_of_one_node(client: Client) -> None:
    answer = await get(client, "/v1/explain", pod="theirs", node="b")

    assert (answer["requested_node"]["kept"], answer["requested_node"]["rank"]) == ("in-full", 1)


async def test_the_last_decision_counts_whose_ever_it_is(client: Client) -> None:
    assert (await get(client, "/v1/explain", pod="ours"))["decision"]["node"] == "a"
    assert (await get(client, "/v1/explain", pod="both"))["decision"]["node"] == "b"


async def test_another_replicas_decision_is_explained_by_its_id(client: Client) -> None:
    answer = await get(client, "/v1/explain", id="far-1")

    assert (answer["pod"], answer["decision"]["id"]) == ("team/theirs", "far-1")
    assert answer["nodes"][0]["parts"]
    await get(client, "/v1/explain", 404, id="far-7")


async def test_own_decision_is_explained_without_other_replicas(
    client: Client, far: OtherReplicas
) -> None:
    request = names_request("a", requester=pod("whole"))
    for verb in ("filter", "prioritize"):
        assert (await client.post(f"/{verb}", json=request)).status == 200

    assert (await get(client, "/v1/explain", id="near-4"))["pod"] == "team/whole"
    assert far.requested == []


async def test_a_number_finds_the_decision_of_any_replica_unless_several_have_it(
    client: Client, other: Client
) -> None:
    await decide(other, "a", name="third")

    assert (await get(client, "/v1/explain", number="3"))["pod"] == "team/third"
    several = (await get(client, "/v1/explain", 409, number="1"))["error"]
    assert "request it by its id, one of far-1, near-1" in several


async def test_decision_id_gives_nothing_without_rights(
    far: OtherReplicas, aiohttp_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sees = LearnsTeam()
    client = await aiohttp_client(replica_world(far=far).build_app(viewer=sees))
    monkeypatch.setattr(sees, "sees", lambda namespace: not namespace)

    for wanted in ({"id": "far-1"}, {"number": "1"}):
        await get(client, "/v1/explain", 404, **wanted)


async def test_caller_without_rights_receives_no_explanation(
    far: OtherReplicas, aiohttp_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = replica_world(far=far)
    sees = LearnsTeam()
    client = await aiohttp_client(world.build_app(viewer=sees))

    assert (await get(client, "/v1/explain", pod="theirs"))["pod"] == "team/theirs"

    monkeypatch.setattr(sees, "sees", lambda namespace: not namespace)
    await get(client, "/v1/explain", 404, pod="theirs")


async def test_a_short_name_means_the_pod_that_the_caller_may_read(
    far: OtherReplicas, other: Client, aiohttp_client: MakeClient
) -> None:
    hidden = pod("theirs")
    hidden["metadata"] |= {"namespace": "other", "uid": "uid-hidden"}  # type: ignore[operator] # a dict
    request = names_request("a", requester=hidden)
    assert (await other.post("/prioritize", json=request)).status == 200
    world = replica_world(far=far)
    world.add_waiting("theirs")
    client = await aiohttp_client(world.build_app(viewer=LearnsTeam(learnt={"team"})))

    assert (await get(client, "/v1/explain", pod="theirs"))["decision"]["id"] == "far-1"


@pytest.mark.parametrize(
    "garbage", [None, b"", b"[]", b"{", b'{"decision": {"at": "x", "id": "far-1"}}']
)
async def test_a_replica_that_does_not_answer_is_left_out(
    aiohttp_client: MakeClient, garbage: bytes | None
) -> None:
    world = replica_world(far=OtherReplicas({FAR: None}, garbage=garbage))
    client = await aiohttp_client(world.build_app())
    await decide(client, "a", name="ours")

    assert (await get(client, "/v1/explain", pod="ours"))["decision"]["node"] == "a"
    await get(client, "/v1/explain", 404, pod="no-such-pod")


async def test_without_tls_replicas_get_no_answer(aiohttp_client: MakeClient) -> None:
    client = await aiohttp_client(replica_world(answers_peers=False).build_app())

    assert "without TLS" in (await get(client, _PEERS_PATH, 403, pod="ours"))["error"]


async def test_peer_request_grants_its_connection_no_more_rights(
    aiohttp_client: MakeClient,
) -> None:
    # aiohttp may answer all requests of a connection in one context.
    seen: list[Viewer] = []
    world = replica_world()
    explain = world.why.explain

    async def answer(request: web.Request) -> web.StreamResponse:
        whose = LearnsTeam()
        VIEWER.set(whose)
        answer = await explain._answer_peer(request)
        seen.append(VIEWER.get())
        assert seen[-1] is whose
        return answer

    app = web.Application()
    app.router.add_get(_PEERS_PATH, answer)
    await get(await aiohttp_client(app), _PEERS_PATH, pod="no-such-pod")
    assert len(seen) == 1


async def test_replica_does_not_report_decisions_of_others(client: Client) -> None:
    assert await get(client, _PEERS_PATH, pod="no-such-pod") == {}


def replica(name: str, far: OtherReplicas | None = None, **rest: Any) -> World:
    world = replica_world(name=name, far=far or OtherReplicas(), **rest)
    world.add(CARDS)
    return world


async def call(client: Client, verb: str, *nodes: str) -> None:
    request = json.dumps(names_request(*nodes, requester=pod("p")))
    assert (await client.post(f"/{verb}", data=request)).status == 200


@pytest.fixture
def filtering() -> World:
    return replica("filters")


@pytest.fixture
async def filters(filtering: World, aiohttp_client: MakeClient) -> Client:
    """Return the replica that answers filter."""
    client = await aiohttp_client(filtering.build_app())
    await call(client, "filter", *CARDS)
    # The explanation of an answer is recorded a moment after it.
    while not next(iter(filtering.history)).packed:
        await asyncio.sleep(0.005)
    return client


@pytest.fixture
async def ranking(filters: Client) -> World:
    """Return the replica that answers prioritize a moment later."""
    world = replica("ranks", OtherReplicas({FAR: filters}))
    world.now += 0.1
    return world


@pytest.fixture
async def ranks(ranking: World, aiohttp_client: MakeClient) -> Client:
    client = await aiohttp_client(ranking.build_app())
    await call(client, "prioritize", "idle", "half")
    return client


def assert_complete(answer: Any) -> None:
    assert answer["decision"]["id"] == "ranks-1"
    assert (answer["filter"]["id"], answer["filter"]["candidates"]) == ("filters-1", 3)
    assert [node["node"] for node in answer["nodes"]] == ["idle", "half", "dead"]
    dead = answer["nodes"][-1]
    assert dead["lost_by"] == "refused: node(s) had too few working GPUs"
    assert dead["devices"][0]["signals"]["health"]["source"] == "prometheus"
    assert [(one["count"], one["nodes"]) for one in answer["rejected"]] == [(1, ["dead"])]
    assert (answer["kept"]["in_full"], answer["kept"]["in_short"]) == (3, 0)
    assert (answer["others"], answer["others_left"]) == ([], 0)


async def test_ranking_replica_returns_nodes_refused_by_the_other(ranks: Client) -> None:
    assert_complete(await get(ranks, "/v1/explain", pod="team/p"))
    assert_complete(await get(ranks, "/v1/explain", id="ranks-1"))


async def test_the_replica_that_filtered_returns_the_others_ranking(
    ranks: Client, filters: Client, filtering: World
) -> None:
    far_of(filtering).clients = {THIRD: ranks}

    assert_complete(await get(filters, "/v1/explain", pod="team/p"))


async def test_a_third_replica_returns_both(
    ranks: Client, filters: Client, aiohttp_client: MakeClient
) -> None:
    third = await aiohttp_client(
        replica("third", OtherReplicas({FAR: filters, THIRD: ranks})).build_app(viewer=LearnsTeam())
    )

    assert_complete(await get(third, "/v1/explain", pod="team/p"))


async def test_node_refused_by_the_other_replica_can_be_requested(ranks: Client) -> None:
    requested = (await get(ranks, "/v1/explain", pod="team/p", node="dead"))["requested_node"]

    assert (requested["kept"], requested["rejection"]) == (
        "in-full",
        "node(s) had too few working GPUs",
    )


async def test_a_node_that_passed_and_was_not_ranked_is_reported_in_short(
    ranking: World, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(ranking.build_app())
    await call(client, "prioritize", "idle")

    answer = await get(client, "/v1/explain", pod="team/p", node="half")

    assert [node["node"] for node in answer["nodes"]] == ["idle", "dead"]
    assert [node["node"] for node in answer["others"]] == ["half"]
    assert (answer["kept"]["in_full"], answer["kept"]["in_short"]) == (2, 1)
    assert answer["requested_node"]["kept"] == "in-short"
    assert "it passed, in place 2 of 2" in answer["requested_node"]["why"]

    answer = await get(client, "/v1/explain", pod="team/p", limit="0")
    assert (answer["others"], answer["others_left"]) == ([], 1)


@pytest.mark.parametrize("detailed", [1, 20], ids=["filter kept one in full", "filter kept all"])
async def test_other_nodes_that_passed_are_listed_best_first(
    aiohttp_client: MakeClient, detailed: int
) -> None:
    filtering, ranking = replica("filters"), replica("ranks")
    filtering.placer.detailed = detailed
    filters = await aiohttp_client(filtering.build_app())
    await call(filters, "filter", *CARDS, "a", "b")
    await get(filters, "/v1/explain", pod="team/p")
    far_of(ranking).clients = {FAR: filters}
    client = await aiohttp_client(ranking.build_app())
    await call(client, "prioritize", "idle")

    answer = await get(client, "/v1/explain", pod="team/p")
    some = await get(client, "/v1/explain", pod="team/p", limit="2")

    own = await get(filters, "/v1/explain", pod="team/p")
    scores = {one["node"]: one["score"] for one in (*own["nodes"], *own["others"])}
    order = sorted({"a", "b", "half"}, key=lambda node: (-scores[node], node))
    listed = [(one["node"], one["score"]) for one in answer["others"]]
    assert listed == [(node, pytest.approx(scores[node], abs=1e-6)) for node in order]
    assert answer["others_left"] == 0
    assert ([one["node"] for one in some["others"]], some["others_left"]) == (order[:2], 1)


@pytest.mark.parametrize("seconds", [-2.0, -1.0, 5.0, 60.0])
async def test_filter_results_of_another_attempt_are_left_out(
    ranking: World, filtering: World, aiohttp_client: MakeClient, seconds: float
) -> None:
    ranking.now = filtering.now + seconds
    client = await aiohttp_client(ranking.build_app())
    await call(client, "prioritize", "idle", "half")

    answer = await get(client, "/v1/explain", id="ranks-1")

    assert (answer["filter"], answer["rejected"]) == (None, [])


@pytest.mark.parametrize(
    "garbage", [None, b"[]", b'{"uid": "uid-p", "pod": "team/p", "decision": {"at": "x"}}']
)
async def test_a_replica_that_does_not_answer_leaves_it_as_it_is(
    aiohttp_client: MakeClient, garbage: bytes | None
) -> None:
    world = replica("ranks", OtherReplicas({FAR: None}, garbage=garbage))
    client = await aiohttp_client(world.build_app())
    await call(client, "prioritize", "idle", "half")

    answer = await get(client, "/v1/explain", pod="team/p")

    assert [node["node"] for node in answer["nodes"]] == ["idle", "half"]
    assert answer["filter"] is None


async def test_explanation_stays_unchanged_if_it_cannot_be_joined(
    aiohttp_client: MakeClient,
) -> None:
    reported = {"pod": "team/p", "uid": "uid-p", "nodes": 7, "others": [{}], "rejected": []}
    at = "2023-11-14T22:13:20+00:00"
    decision = {"id": "filters-1", "at": at, "candidates": 3, "feasible": 2}
    garbage = json.dumps(reported | {"decision": decision}).encode()
    world = replica("ranks", OtherReplicas({FAR: None}, garbage=garbage))
    client = await aiohttp_client(world.build_app())
    await call(client, "prioritize", "idle", "half")

    answer = await get(client, "/v1/explain", id="ranks-1")

    assert answer["filter"] is None


async def test_invalid_time_is_refused(ranks: Client) -> None:
    error = (await get(ranks, "/v1/peers/explain", 400, pod="p", attempt="soon"))["error"]

    assert error == "attempt='soon' must be seconds since the epoch"
