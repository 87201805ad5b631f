"""Any replica returns the outcomes of all, redacted for each caller."""

from typing import Any

import pytest
from aiohttp import web

from extender.answers.routes import REGRET
from extender.core.request.request import PodRef
from extender.insight.regret_table import PEERS_PATH, RegretTable
from extender.insight.regret_watch import PlacementOutcome, RegretWatch
from extender.insight.replicas import NoReplicas, Replicas
from extender.server.redaction import SEES_ALL, Viewer
from testkit.api_requests import get
from testkit.others import FAR, NEAR, LearnsTeam, OtherReplicas, serve_to
from testkit.outcomes import outcome
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World


def secret() -> PlacementOutcome:
    pod = PodRef(uid="uid-secret", namespace="hush", name="secret")
    return _with(outcome("secret", got=0.4, choice=0.4, followed=True), pod=pod)


def _with(one: PlacementOutcome, **rest: Any) -> PlacementOutcome:
    values = {name: getattr(one, name) for name in PlacementOutcome.__dataclass_fields__}
    return PlacementOutcome(**{**values, **rest})


def replica(
    name: str,
    *outcomes: PlacementOutcome,
    far: OtherReplicas | None = None,
    viewer: Viewer = SEES_ALL,
    answers_peers: bool = True,
) -> web.Application:
    """Return a replica with these outcomes, and with a pod that it left out."""
    world = World()
    watch = RegretWatch(world.fleet, lambda: world.now, pods=100, after_seconds=3600.0)
    watch.outcomes.extend(outcomes)
    watch.left_out = 1
    table = RegretTable(
        lambda: watch, Replicas(name=name, others=far or NoReplicas(), answers_peers=answers_peers)
    )

    app = web.Application(middlewares=[serve_to(viewer)])
    app.add_routes([*table.routes(), *table.peer_routes()])
    return app


OURS = outcome("ours", got=0.5, choice=0.2, followed=False)
THEIRS = _with(outcome("theirs", got=0.1, choice=0.0, followed=True), seconds=3700.0)


@pytest.fixture
async def other(aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(replica("far", THEIRS, secret()))


@pytest.fixture
def far(other: Client) -> OtherReplicas:
    return OtherReplicas({FAR: other})


async def test_placements_of_all_replicas_are_compared(
    far: OtherReplicas, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(replica("near", OURS, far=far))

    answer = await get(client, REGRET.path)

    pods = [one["pod"] for one in answer["placements"]]
    assert pods[0] == "team/theirs"  # was judged last
    assert set(pods[1:]) == {"team/ours", "hush/secret"}
    assert answer["all"]["placements"] == 3
    assert answer["all"]["got_ratio"] == pytest.approx((0.5 + 0.1 + 0.4) / 3)
    assert answer["left_out"] == 2
    assert answer["unreachable"] == []
    assert (await get(client, REGRET.path, namespace="team"))["total"] == 2


async def test_pod_decided_by_two_replicas_counts_once_by_the_later(
    far: OtherReplicas, aiohttp_client: MakeClient
) -> None:
    earlier = _with(THEIRS, choice="elsewhere", decided_at=THEIRS.decided_at - 1)
    client = await aiohttp_client(replica("near", earlier, far=far))

    placements = (await get(client, REGRET.path))["placements"]

    (theirs,) = [one for one in placements if one["pod"] == "team/theirs"]
    assert theirs["choice"] == THEIRS.choice


async def test_another_replicas_pods_are_hidden_without_rights(
    far: OtherReplicas, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(replica("near", OURS, far=far, viewer=LearnsTeam()))

    text = await (await client.get(REGRET.path)).text()

    assert "team/theirs" in text
    assert "secret" not in text
    assert "hush" not in text


@pytest.mark.parametrize(
    "garbage",
    [None, b"", b"[]", b'{"version":2,"replica":"far","watched":0,"left_out":0,"outcomes":[]}'],
)
async def test_replicas_that_do_not_answer_are_named(
    aiohttp_client: MakeClient, garbage: bytes | None
) -> None:
    far = OtherReplicas({FAR: None}, garbage=garbage)
    client = await aiohttp_client(replica("near", OURS, far=far))

    answer = await get(client, REGRET.path)

    assert [one["pod"] for one in answer["placements"]] == ["team/ours"]
    assert answer["unreachable"] == [FAR]


async def test_our_own_address_adds_nothing_twice(aiohttp_client: MakeClient) -> None:
    far = OtherReplicas()
    client = await aiohttp_client(replica("near", OURS, far=far))
    far.clients = {NEAR: client}

    assert (await get(client, REGRET.path))["left_out"] == 1


async def test_without_tls_replicas_get_no_answer(aiohttp_client: MakeClient) -> None:
    client = await aiohttp_client(replica("near", OURS, answers_peers=False))

    assert "without TLS" in (await get(client, PEERS_PATH, 403))["error"]
