"""Decisions of other replicas reach this replica's pages once, if the caller may see them."""

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from extender.api.page import broadcaster
from extender.api.page.broadcaster import _MOST_AT_ONCE, _MOST_REPLICAS, FarFeed
from extender.insight.replicas import Replicas
from extender.server.redaction import SEES_ALL, VIEWER, SeesNone, write_json, write_json_in_full
from testkit.decisions import application, decide, replica
from testkit.others import FAR, THIRD, OtherReplicas
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World


@pytest.fixture
async def other(aiohttp_client: MakeClient) -> Client:
    """Return another replica that has already decided about a pod."""
    client = await aiohttp_client(application(*replica("far")))
    await decide(client, "before")
    return client


@pytest.fixture
def far(other: Client) -> OtherReplicas:
    return OtherReplicas({FAR: other})


@pytest.fixture
def world() -> World:
    world = World()
    world.register_node("a")
    world.register_node("b")
    return world


@pytest.fixture
def feed(world: World, far: OtherReplicas) -> FarFeed:
    return FarFeed(world.fleet, Replicas(name="near", others=far, answers_peers=True))


def as_read(batch: object) -> dict[str, Any]:
    """Return a batch as a caller receives it who sees all pods."""
    whose = VIEWER.set(SEES_ALL)
    try:
        read: dict[str, Any] = json.loads(write_json(batch))
    finally:
        VIEWER.reset(whose)
    return read


def names(batch: object) -> list[str]:
    return [one["pod"] for one in as_read(batch)["decisions"]]


async def test_earlier_decisions_are_not_new_and_each_decision_is_reported_once(
    feed: FarFeed, other: Client
) -> None:
    assert await feed.batch() is None
    await decide(other, "a")
    await decide(other, "b")

    batch = await feed.batch()

    assert names(batch) == ["team/a", "team/b"]
    assert batch is not None
    assert batch["passed_over"] == 0
    assert await feed.batch() is None


async def test_a_replica_that_had_decided_nothing_is_read_from_its_first(
    world: World, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(application(*replica("far")))
    feed = FarFeed(world.fleet, Replicas(name="near", others=OtherReplicas({FAR: client})))
    assert await feed.batch() is None

    await decide(client, "a")

    assert names(await feed.batch()) == ["team/a"]


async def test_newest_decisions_are_reported_and_the_rest_counted(
    feed: FarFeed, other: Client
) -> None:
    await feed.batch()
    for number in range(_MOST_AT_ONCE + 5):
        await decide(other, f"p-{number}")

    batch = await feed.batch()

    assert batch is not None
    assert names(batch)[-1] == f"team/p-{_MOST_AT_ONCE + 4}"
    assert (len(names(batch)), batch["passed_over"]) == (_MOST_AT_ONCE, 5)


async def test_bindings_of_old_and_new_decisions_are_reported_once(
    feed: FarFeed, world: World, other: Client
) -> None:
    await feed.batch()
    await decide(other, "a")
    await feed.batch()

    world.add_pod("a", "a")
    world.add_pod("before", "a")
    batch = await feed.batch()

    assert batch is not None
    bound = sorted(batch["bound"], key=lambda one: one["id"])  # type: ignore[call-overload] # a list
    assert [(one["id"], one["bound_node"], one["is_followed"]) for one in bound] == [
        ("far-1", "a", True),
        ("far-2", "a", False),
    ]
    assert await feed.batch() is None


async def test_decisions_that_were_made_while_no_page_was_open_are_not_new(
    feed: FarFeed, far: OtherReplicas, world: World, other: Client
) -> None:
    await feed.batch()
    await decide(other, "meanwhile")

    feed.start()
    assert await feed.batch() is None
    world.add_pod("before", "a")
    batch = await feed.batch()

    assert batch is not None  # the page lists that decision, too
    assert [one["id"] for one in as_read(batch)["bound"]] == ["far-1"]

    far.clients = {FAR: None}
    feed.start()
    world.add_pod("meanwhile", "b")
    assert await feed.batch() is None  # it lists no decision of a replica that is gone


async def test_the_nodes_of_all_decisions_that_a_page_lists_first_are_reported(
    feed: FarFeed, world: World, other: Client
) -> None:
    for number in range(_MOST_AT_ONCE + 5):
        await decide(other, f"p-{number}")
    await feed.batch()

    world.add_pod("before", "a")

    assert [one["id"] for one in as_read(await feed.batch())["bound"]] == ["far-1"]


async def test_the_oldest_pods_are_no_longer_awaited_if_there_are_too_many(
    feed: FarFeed, world: World, other: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "_MOST_OPEN", 2)
    for name in ("a", "b"):
        await decide(other, name)
    await feed.batch()

    for name in ("before", "a", "b"):
        world.add_pod(name, "a")

    assert [one["id"] for one in as_read(await feed.batch())["bound"]] == ["far-2", "far-3"]


async def test_decisions_come_in_the_order_of_time_and_none_is_counted_before_the_first_known(
    feed: FarFeed, far: OtherReplicas
) -> None:
    await feed.batch()
    views = [
        {"id": f"new-{number}", "pod": f"team/at-{hour}", "at": f"2027-01-15T{hour}:00:00+00:00"}
        for number, hour in ((50, "08"), (49, "10"), (48, "09"))
    ]
    reported = {"version": 1, "replica": "new", "decisions": views}
    far.clients, far.garbage = {THIRD: None}, write_json_in_full(reported)

    batch = await feed.batch()

    assert names(batch) == ["team/at-08", "team/at-09", "team/at-10"]
    assert as_read(batch)["passed_over"] == 0


async def test_pods_are_hidden_from_callers_without_rights(feed: FarFeed, other: Client) -> None:
    await feed.batch()
    await decide(other, "secret", "hush")
    batch = await feed.batch()

    VIEWER.set(SeesNone())
    text = write_json(batch).decode()

    assert "another pod" in text
    assert "secret" not in text
    assert "hush" not in text


@pytest.mark.parametrize("garbage", [None, b"", b"<html>", b'{"version":1}'])
async def test_silent_replica_is_queried_again_later(
    feed: FarFeed, far: OtherReplicas, other: Client, garbage: bytes | None
) -> None:
    await feed.batch()
    far.clients, far.garbage = {FAR: None}, garbage
    assert await feed.batch() is None
    await decide(other, "meanwhile")

    far.clients = {FAR: other}

    assert names(await feed.batch()) == ["team/meanwhile"]


async def test_our_own_address_adds_nothing_twice(world: World, aiohttp_client: MakeClient) -> None:
    client = await aiohttp_client(application(*replica("near")))
    feed = FarFeed(world.fleet, Replicas(name="near", others=OtherReplicas({FAR: client})))
    await feed.batch()

    await decide(client, "ours")

    assert await feed.batch() is None


async def test_replicas_that_are_long_gone_are_no_longer_queried(
    feed: FarFeed, far: OtherReplicas, other: Client
) -> None:
    news: list[str] = []
    for number in range(_MOST_REPLICAS + 5):  # a replica that restarts repeatedly
        at = "2027-01-15T08:00:00+00:00"
        views = [{"id": f"gone{number}-1", "pod": f"team/p-{number}", "at": at}]
        reported = {"version": 1, "replica": f"gone{number}", "decisions": views}
        far.clients, far.garbage = {THIRD: None, FAR: other}, write_json_in_full(reported)
        batch = await feed.batch()
        news += names(batch) if batch else []
    far.clients = {FAR: other}
    await decide(other, "a")

    assert names(await feed.batch()) == ["team/a"]
    assert "team/before" not in news  # a replica that still exists is not read from its start
    assert f"team/p-{_MOST_REPLICAS + 4}" in news
    known = parse_qs(urlsplit(far.requested[-1]).query)["after"][0].split(",")
    assert len(known) == _MOST_REPLICAS
    assert {"far-1", f"gone{_MOST_REPLICAS + 4}-1"} <= set(known)
    assert "gone0-1" not in known
