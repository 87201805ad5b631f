"""Any replica returns the latest decision about a waiting pod, made by any of them."""

from dataclasses import dataclass
from typing import Any

import pytest

from extender.insight.last_decisions import PEERS_PATH
from testkit.api_requests import decide, get
from testkit.cards import IDLE
from testkit.cli_serving import runner, serving
from testkit.others import FAR, NEAR, OtherReplicas, SeesTeam, far_of, replica_world
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World

REFUSED = [{"count": 1, "reason": "node(s) had too few GPUs known to be idle"}]


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


async def test_newest_decision_is_reported_by_any_replica(
    sides: tuple[Side, Side],
) -> None:
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


async def test_pod_requested_at_another_replica_counts_as_tried(
    sides: tuple[Side, Side],
) -> None:
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

    assert (await get(far.client, PEERS_PATH))["last"] == {}
    assert [pod["decision"] for pod in await near.pending()] == [None, None]


async def test_explanation_has_the_last_decision_of_any_replica(
    sides: tuple[Side, Side],
) -> None:
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

    assert "without TLS" in (await get(client, PEERS_PATH, 403))["error"]
