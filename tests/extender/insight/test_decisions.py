"""Decisions of all replicas from any of them, redacted for the caller."""

import json
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from extender.insight.decisions import PEERS_PATH, BypassedPodsTable, DecisionRoutes
from extender.placement.bypassed_pods import _BoundPods, _BypassEvidence
from extender.placement.request_log import BypassVerdict
from extender.server.redaction import write_json_in_full
from testkit.api_requests import get
from testkit.builders import GPU
from testkit.decisions import application, decide, replica
from testkit.others import FAR, NEAR, THIRD, LearnsTeam, OtherReplicas, serve_to
from testkit.webhook_requests import Client, MakeClient
from testkit.world import SHARED


@pytest.fixture
async def other(aiohttp_client: MakeClient) -> Client:
    """Return another replica that decided about pods of two tenants, later than this one."""
    world, decisions = replica("far")
    world.now += 60
    client = await aiohttp_client(application(world, decisions))
    await decide(client, "theirs")
    world.now += 1
    await decide(client, "secret", "hush")
    return client


@pytest.fixture
def far(other: Client) -> OtherReplicas:
    return OtherReplicas({FAR: other})


@pytest.fixture
async def client(aiohttp_client: MakeClient, far: OtherReplicas) -> Client:
    world, decisions = replica("near", far)
    client = await aiohttp_client(application(world, decisions))
    await decide(client, "ours")
    return client


@pytest.fixture
async def tenant(aiohttp_client: MakeClient, far: OtherReplicas) -> Client:
    world, decisions = replica("near", far)
    client = await aiohttp_client(application(world, decisions, LearnsTeam()))
    await decide(client, "ours")
    return client


async def test_another_tenants_pod_of_the_same_name_does_not_hide_ones_own(
    other: Client, tenant: Client
) -> None:
    await decide(other, "theirs", "hush")

    reported = await get(tenant, "/v1/decisions", pod="theirs", limit="1", brief="true")

    assert [one["pod"] for one in reported["decisions"]] == ["team/theirs"]


async def test_the_decisions_of_all_replicas_are_listed_the_newest_first(client: Client) -> None:
    reported = await get(client, "/v1/decisions", brief="true")

    pods = [(each["pod"], each["id"], each["replica"]) for each in reported["decisions"]]
    assert pods == [
        ("hush/secret", "far-2", "pod-far"),
        ("team/theirs", "far-1", "pod-far"),
        ("team/ours", "near-1", "pod-near"),
    ]
    assert reported["unreachable"] == []
    (newest,) = (await get(client, "/v1/decisions", brief="true", limit="1"))["decisions"]
    assert newest["id"] == "far-2"


@pytest.mark.parametrize(
    ("known", "ids"), [("far-1,near-7", ["far-2"]), ("near-7", ["far-2", "far-1"])]
)
async def test_a_replica_gets_the_decisions_that_it_does_not_know(
    other: Client, known: str, ids: list[str]
) -> None:
    answer = await get(other, PEERS_PATH, after=known)

    assert [one["id"] for one in answer["decisions"]] == ids


async def test_another_replicas_decision_is_as_full_as_our_own(client: Client) -> None:
    theirs, ours = [
        each
        for each in (await get(client, "/v1/decisions"))["decisions"]
        if each["pod"] != "hush/secret"
    ]

    assert set(theirs) == set(ours)
    assert set(theirs["nodes"]) == {"a", "b"}
    assert theirs["explained"][0]["devices"]
    assert await get(client, "/v1/decisions/far-1") == theirs


@pytest.mark.parametrize("about", ["team/theirs", "theirs", "uid-theirs"])
async def test_pod_is_found_through_any_replica(client: Client, about: str) -> None:
    (found,) = (await get(client, "/v1/decisions", pod=about))["decisions"]

    assert found["id"] == "far-1"


async def test_a_number_that_several_replicas_have_is_no_answer(client: Client) -> None:
    reported = await get(client, "/v1/decisions/1", status=409)

    assert "far-1, near-1" in reported["error"]
    assert (await get(client, "/v1/decisions/2"))["pod"] == "hush/secret"


async def test_own_decision_is_found_without_other_replicas(
    client: Client, far: OtherReplicas
) -> None:
    assert (await get(client, "/v1/decisions/near-1"))["pod"] == "team/ours"
    assert far.requested == []


async def test_forgotten_decision_is_404(client: Client) -> None:
    reported = await get(client, "/v1/decisions/far-7", status=404)

    assert "'far-7' is not remembered" in reported["error"]


async def test_another_replicas_pods_are_hidden_without_rights(tenant: Client) -> None:
    text = await (await tenant.get("/v1/decisions")).text()

    secret, theirs, ours = json.loads(text)["decisions"]
    assert [each["pod"] for each in (theirs, ours)] == ["team/theirs", "team/ours"]
    assert theirs["request"]["prefer_models"] == ["A100"]
    assert (secret["pod"], secret["uid"]) == ("another pod", None)
    assert secret["request"] == {"resources": {"nvidia.com/gpu": 1}}
    assert "hush" not in text
    assert "secret" not in text
    one = await get(tenant, "/v1/decisions/far-2")
    assert (one["pod"], one["uid"]) == ("another pod", None)


@pytest.mark.parametrize("about", ["hush/secret", "secret", "uid-secret"])
async def test_another_replicas_pod_is_hidden_without_rights(tenant: Client, about: str) -> None:
    assert (await get(tenant, "/v1/decisions", pod=about))["decisions"] == []


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(None, id="silent"),
        pytest.param(b"", id="empty"),
        pytest.param(b"<html>", id="no-json"),
        pytest.param(b'{"version":2,"replica":"far","decisions":[]}', id="newer-form"),
        pytest.param(b'{"version":1,"replica":"far","decisions":[7]}', id="no-decisions"),
    ],
)
async def test_replicas_that_do_not_answer_are_named(
    client: Client, far: OtherReplicas, garbage: bytes | None
) -> None:
    far.clients = {FAR: None}
    far.garbage = garbage

    reported = await get(client, "/v1/decisions")

    assert [each["id"] for each in reported["decisions"]] == ["near-1"]
    assert reported["unreachable"] == [FAR]
    missing = await get(client, "/v1/decisions/far-1", status=404)
    assert missing["unreachable"] == [FAR]
    assert (await get(client, "/v1/decisions/1"))["unreachable"] == [FAR]


async def test_decisions_of_a_hung_replica_are_reported_in_short(
    client: Client, far: OtherReplicas, other: Client, aiohttp_client: MakeClient
) -> None:
    world, decisions = replica("third")
    third = await aiohttp_client(application(world, decisions))
    await decide(third, "fine")
    far.clients = {FAR: other, THIRD: third}
    far.hanging = {FAR}

    reported = (await get(client, "/v1/decisions"))["decisions"]

    assert {one["id"] for one in reported} == {"far-2", "far-1", "third-1", "near-1"}
    assert {one["id"] for one in reported if "explained" in one} == {"third-1", "near-1"}
    in_full = [path for path in far.requested if "id=" in path]
    assert in_full == [f"{PEERS_PATH}?id=far-2", f"{PEERS_PATH}?id=third-1"]


async def test_decisions_that_make_no_sense_are_left_out(
    client: Client, far: OtherReplicas
) -> None:
    far.clients = {FAR: None}
    views = [
        {"id": "far-1", "at": "soon", "pod": "team/a"},
        {"id": "near-1", "at": "2027-01-15T08:00:00+00:00", "pod": "team/forged"},
        {"id": "far-3", "at": "2027-01-15T08:00:00+00:00", "pod": 7},
    ]
    far.garbage = write_json_in_full({"version": 1, "replica": "far", "decisions": views})

    reported = await get(client, "/v1/decisions", brief="true")

    assert [each["id"] for each in reported["decisions"]] == ["near-1", "far-3"]


async def test_our_own_address_adds_nothing_twice(aiohttp_client: MakeClient) -> None:
    far = OtherReplicas()
    world, decisions = replica("near", far)
    client = await aiohttp_client(application(world, decisions))
    far.clients = {NEAR: client}
    await decide(client, "ours")

    reported = await get(client, "/v1/decisions")

    assert [each["id"] for each in reported["decisions"]] == ["near-1"]


async def test_without_other_replicas_no_query_is_sent(client: Client, far: OtherReplicas) -> None:
    far.clients = {}

    assert (await get(client, "/v1/decisions/1"))["id"] == "near-1"


class Bypassed:
    """Stand-in that reports pods that were bound without a call."""

    def report(self) -> Any:
        known = _BoundPods(
            scheduler="default-scheduler",
            resources=(GPU, SHARED),
            verdict=BypassVerdict.NOT_CALLED,
            example="team/quiet",
            count=3,
            first_at=2.0,
            last_at=7.0,
        )
        pods = (known, replace(known, example="hush/secret"))
        return _BypassEvidence(pods=pods, at=10.0, schedulers=("b", "a"), unjudged=4)


async def test_pods_without_a_decision_are_reported_in_groups(aiohttp_client: MakeClient) -> None:
    app = web.Application(middlewares=[serve_to(LearnsTeam())])
    app.add_routes(BypassedPodsTable(Bypassed()).routes())  # type: ignore[arg-type] # it only reports

    answer = await get(await aiohttp_client(app), "/v1/bypassed")

    known, hidden = answer["bound"]
    assert known == {
        "scheduler": "default-scheduler",
        "resources": [GPU, SHARED],
        "verdict": "not-called",
        "count": 3,
        "example": "team/quiet",
        "first_age_seconds": 8.0,
        "last_age_seconds": 3.0,
    }
    assert hidden["example"] == "another pod"
    assert (answer["unjudged"], answer["schedulers"]) == (4, ["a", "b"])
    assert answer["likely_causes"]


async def test_a_replica_that_cannot_authenticate_its_peers_answers_nothing(
    aiohttp_client: MakeClient,
) -> None:
    world, _ = replica("near")
    client = await aiohttp_client(application(world, DecisionRoutes(world.history)))

    reported = await get(client, PEERS_PATH, status=403)

    assert "tls" in reported["error"]
