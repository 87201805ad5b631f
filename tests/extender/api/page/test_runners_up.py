"""Reasons of runners-up equal those of the full explanation, from any replica."""

import pytest
from aiohttp import web

from extender.api.page import routes
from extender.api.page.routes import _MOST_IDS, _PEERS_PATH, PATH, _Lost
from extender.insight.replicas import NoReplicas, Replicas
from extender.server.redaction import SEES_ALL, SeesNone, Viewer
from testkit.api_requests import decide, get
from testkit.cards import BUSY, IDLE
from testkit.others import FAR, OtherReplicas, SeesTeam
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World


def replica(
    name: str,
    far: OtherReplicas | None = None,
    viewer: Viewer = SEES_ALL,
    *,
    answers_peers: bool = True,
    yielded: list[None] | None = None,
) -> web.Application:
    world = World()
    world.add({"a": [IDLE] * 3, "b": [IDLE], "c": [BUSY]})

    async def yield_control() -> None:
        if yielded is not None:
            yielded.append(None)

    lost = _Lost(
        world.history,
        Replicas(name=name, others=far or NoReplicas(), answers_peers=answers_peers),
        yield_control,
    )
    app = world.build_app(viewer=viewer)
    app.add_routes([*lost.routes(), *lost.peer_routes()])
    return app


@pytest.fixture
async def client(aiohttp_client: MakeClient) -> Client:
    client = await aiohttp_client(replica("here"))
    await decide(client, "a", "b", name="two")
    await decide(client, "a", name="one")
    await decide(client, "a", "b", "c", name="three")
    return client


async def test_runner_up_matches_the_full_explanation(client: Client) -> None:
    reported = (await get(client, PATH, ids="here-1,here-2,here-3,here-7"))["lost_by"]
    reasons: list[str] = []
    for number in ("1", "3"):
        full = await get(client, "/v1/explain", number=number)
        reasons += [one["lost_by"] for one in full["nodes"] if one["rank"] == 2]

    assert reported == {"here-1": reasons[0], "here-2": None, "here-3": reasons[1]}
    assert all(reasons)
    assert (await get(client, PATH, ids="here-1"))["lost_by"] == {"here-1": reported["here-1"]}


async def test_the_latest_reasons_are_kept(
    aiohttp_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_MOST_KEPT", 2)
    yielded: list[None] = []
    client = await aiohttp_client(replica("here", yielded=yielded))
    for name in ("one", "two", "three"):
        await decide(client, "a", "b", name=name)

    counts = []
    for number in (1, 2, 3, 3, 2, 1):
        await get(client, PATH, ids=f"here-{number}")
        counts.append(len(yielded))

    assert counts == [1, 2, 3, 3, 3, 4]


@pytest.mark.parametrize("viewer", [SEES_ALL, SeesTeam()])
async def test_runners_up_of_another_replica_are_queried_there(
    client: Client, aiohttp_client: MakeClient, viewer: Viewer
) -> None:
    near = await aiohttp_client(replica("near", OtherReplicas({FAR: client}), viewer))

    theirs = (await get(near, PATH, ids="here-1,near-9"))["lost_by"]

    assert theirs == (await get(client, PATH, ids="here-1"))["lost_by"]


@pytest.mark.parametrize("garbage", [None, b"", b"<html>", b"[]", b'{"here-1": 3}'])
async def test_a_replica_that_does_not_answer_leaves_it_unsaid(
    aiohttp_client: MakeClient, garbage: bytes | None
) -> None:
    near = await aiohttp_client(replica("near", OtherReplicas({FAR: None}, garbage=garbage)))

    assert (await get(near, PATH, ids="here-1"))["lost_by"] == {}


async def test_nothing_is_reported_about_other_tenants_pods(
    client: Client, aiohttp_client: MakeClient
) -> None:
    near = await aiohttp_client(replica("near", OtherReplicas({FAR: client}), SeesNone()))
    await decide(near, "a", "b", name="ours")

    assert (await get(near, PATH, ids="here-1,near-1"))["lost_by"] == {}


@pytest.mark.parametrize("number", ["", "x", "\u00b2", "9" * 5000], ids=range(4))
async def test_a_decision_without_a_valid_number_is_left_out(client: Client, number: str) -> None:
    assert (await get(client, PATH, ids=f"here-{number}"))["lost_by"] == {}


@pytest.mark.parametrize("ids", ["", ",", ",".join(["here-1"] * (_MOST_IDS + 1))])
async def test_request_for_no_or_too_many_ids_is_refused(client: Client, ids: str) -> None:
    answer = await get(client, PATH, 400, ids=ids)

    assert f"must be 1 to {_MOST_IDS} decision ids" in answer["error"]


async def test_without_tls_replicas_get_no_answer(aiohttp_client: MakeClient) -> None:
    client = await aiohttp_client(replica("here", answers_peers=False))

    assert "without TLS" in (await get(client, _PEERS_PATH, 403, ids="here-1"))["error"]
