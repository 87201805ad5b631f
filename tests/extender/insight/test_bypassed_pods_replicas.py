"""Any replica returns the pods bound without an answer that any of them knows."""

from dataclasses import dataclass

import pytest
from aiohttp import web

from extender.insight.bypassed_pods import PATH, PEERS_PATH, BypassedPodsTable
from extender.insight.replicas import NoReplicas, Replicas
from extender.placement.bypass_causes import BoundPods, BypassEvidence, BypassVerdict
from extender.placement.bypassed_pods import BypassReport
from extender.server.redaction import SEES_ALL, Viewer
from testkit.builders import GPU
from testkit.http_questions import get
from testkit.others import FAR, NEAR, Far, LearnsTeam, serve_to
from testkit.webhook_questions import Client, MakeClient


@dataclass
class Unasked:
    """What one replica noticed, by its own clock."""

    report_now: BypassReport

    def report(self) -> BypassReport:
        return self.report_now


def bound(count: int, *, ago: float, at: float = 0.0, example: str = "team/a") -> BoundPods:
    return BoundPods(
        scheduler="default-scheduler",
        resources=(GPU,),
        verdict=BypassVerdict.NOT_ASKED,
        count=count,
        example=example,
        first_at=at - ago - 5.0,
        last_at=at - ago,
    )


def replica(
    name: str,
    report: BypassReport,
    *,
    far: Far | None = None,
    viewer: Viewer = SEES_ALL,
    answers_peers: bool = True,
) -> web.Application:
    table = BypassedPodsTable(
        Unasked(report),  # type: ignore[arg-type] # it only reports
        Replicas(name=name, others=far or NoReplicas(), answers_peers=answers_peers),
    )
    app = web.Application(middlewares=[serve_to(viewer)])
    app.add_routes([*table.routes(), *table.peer_routes()])
    return app


def noticed(
    *pods: BoundPods, at: float = 0.0, unjudged: int = 0, asked_by: str = "near-scheduler"
) -> BypassReport:
    evidence = BypassEvidence(pods=pods)
    return BypassReport(at=at, unjudged=unjudged, evidence=evidence, asked_by=(asked_by,))


JUST_STARTED = noticed(at=3.0)


@pytest.fixture
async def far(aiohttp_client: MakeClient) -> Far:
    pods = (bound(7, ago=60.0, at=5000.0, example="hush/secret"),)
    reported = noticed(*pods, at=5000.0, unjudged=2, asked_by="far-scheduler")
    other: Client = await aiohttp_client(replica("far", reported))
    return Far({FAR: other})


async def test_a_replica_that_has_just_started_returns_the_others_evidence(
    far: Far, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(replica("near", JUST_STARTED, far=far))

    answer = await get(client, PATH)

    (group,) = answer["bound"]
    assert (group["count"], group["example"]) == (7, "hush/secret")
    assert (group["first_age_seconds"], group["last_age_seconds"]) == (65.0, 60.0)
    assert answer["unjudged"] == 2
    assert answer["asked_by"] == ["far-scheduler", "near-scheduler"]
    assert answer["likely_causes"][0]["field"] == "extenders"
    assert answer["unreachable"] == []


async def test_pods_that_several_replicas_judged_count_once(
    far: Far, aiohttp_client: MakeClient
) -> None:
    fewer = noticed(bound(3, ago=10.0, at=100.0), at=100.0, unjudged=5)
    client = await aiohttp_client(replica("near", fewer, far=far))

    answer = await get(client, PATH)

    assert [group["count"] for group in answer["bound"]] == [7]
    assert answer["unjudged"] == 5


async def test_another_replicas_example_is_not_named_to_who_may_not_read_it(
    far: Far, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(replica("near", JUST_STARTED, far=far, viewer=LearnsTeam()))

    (group,) = (await get(client, PATH))["bound"]

    assert group["example"] == "another pod"


@pytest.mark.parametrize("garbage", [None, b"", b"[]", b'{"version":2,"replica":"far"}'])
async def test_replicas_that_do_not_answer_are_named(
    aiohttp_client: MakeClient, garbage: bytes | None
) -> None:
    own = noticed(bound(1, ago=10.0, at=100.0), at=100.0)
    client = await aiohttp_client(replica("near", own, far=Far({FAR: None}, garbage=garbage)))

    answer = await get(client, PATH)

    assert [group["example"] for group in answer["bound"]] == ["team/a"]
    assert answer["unreachable"] == [FAR]


async def test_an_address_that_is_our_own_is_no_replica_that_is_away(
    aiohttp_client: MakeClient,
) -> None:
    far = Far()
    client = await aiohttp_client(replica("near", noticed(bound(1, ago=1.0)), far=far))
    far.clients = {NEAR: client}

    assert (await get(client, PATH))["unreachable"] == []


async def test_without_tls_replicas_get_no_answer(aiohttp_client: MakeClient) -> None:
    client = await aiohttp_client(replica("near", JUST_STARTED, answers_peers=False))

    assert "without TLS" in (await get(client, PEERS_PATH, 403))["error"]
