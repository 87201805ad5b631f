"""Each decision of this replica reaches its pages once, and then the pod's node."""

import json
from typing import Any

import pytest

from extender.api.page import broadcaster
from extender.api.page.broadcaster import _MOST_AT_ONCE, DecisionFeed
from extender.server.redaction import SEES_ALL, VIEWER, write_json
from testkit.cards import IDLE
from testkit.webhook_requests import names_request, pod
from testkit.world import World


@pytest.fixture
def world() -> World:
    world = World()
    world.add({"a": [IDLE], "b": [IDLE] * 2})
    return world


@pytest.fixture
def feed(world: World) -> DecisionFeed:
    feed = DecisionFeed(world.history)
    feed.start()
    return feed


async def decide(world: World, *names: str) -> None:
    for name in names:
        requested = names_request("a", "b", requester=pod(name))
        await world.webhooks().prioritize(json.dumps(requested).encode())


def batch_of(feed: DecisionFeed) -> dict[str, Any] | None:
    """Return the next batch as a page receives it, None if there is nothing new."""
    token = VIEWER.set(SEES_ALL)
    steps = list(feed.batch_in_steps())
    assert steps[:-1] == [None] * (len(steps) - 1)
    batch: dict[str, Any] | None = json.loads(write_json(steps[-1])) if steps else None
    VIEWER.reset(token)
    return batch


def pods_of(batch: dict[str, Any] | None) -> list[str]:
    return [one["pod"] for one in batch["decisions"]] if batch else []


async def test_only_decisions_after_the_start_are_new_and_each_once(
    world: World, feed: DecisionFeed
) -> None:
    assert batch_of(feed) is None
    await decide(world, "first")
    assert pods_of(batch_of(feed)) == ["team/first"]
    await decide(world, "unseen", "also-unseen")

    feed.start()
    assert batch_of(feed) is None
    await decide(world, "second", "third")
    batch = batch_of(feed)

    assert pods_of(batch) == ["team/second", "team/third"]
    assert batch is not None
    assert (batch["passed_over"], batch["bound"]) == (0, [])
    assert "nodes" not in batch["decisions"][0]  # brief
    assert batch_of(feed) is None


async def test_the_nodes_of_pods_are_reported_once(world: World, feed: DecisionFeed) -> None:
    await decide(world, "before", "bound-before")
    world.history.note_bound("uid-bound-before", "a")
    feed.start()
    await decide(world, "after")
    batch_of(feed)
    best = {record.pod.name: str(record.decision.best) for record in world.history}
    other = "a" if best["before"] == "b" else "b"

    world.history.note_bound("uid-before", other)
    world.history.note_bound("uid-after", best["after"])
    batch = batch_of(feed)

    assert batch is not None
    assert batch["decisions"] == []
    assert [(one["bound_node"], one["is_followed"]) for one in batch["bound"]] == [
        (other, False),
        (best["after"], True),
    ]
    assert batch_of(feed) is None


async def test_a_node_that_was_chosen_while_no_page_was_open_is_not_reported(
    world: World, feed: DecisionFeed
) -> None:
    await decide(world, "p")
    batch_of(feed)
    world.history.note_bound("uid-p", "a")

    feed.start()

    assert batch_of(feed) is None


async def test_of_many_decisions_the_newest_are_reported_in_steps(
    world: World, feed: DecisionFeed
) -> None:
    VIEWER.set(SEES_ALL)
    await decide(world, *(f"p{number}" for number in range(_MOST_AT_ONCE + 5)))

    steps = list(feed.batch_in_steps())
    batch = json.loads(write_json(steps[-1]))

    assert (len(batch["decisions"]), batch["passed_over"]) == (_MOST_AT_ONCE, 5)
    assert batch["decisions"][-1]["pod"] == f"team/p{_MOST_AT_ONCE + 4}"
    assert len(steps) == 1 + _MOST_AT_ONCE // 8


async def test_the_oldest_pods_are_no_longer_awaited_if_there_are_too_many(
    world: World, feed: DecisionFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "_MOST_OPEN", 2)
    await decide(world, "one", "two", "three")
    batch_of(feed)

    for name in ("one", "two", "three"):
        world.history.note_bound(f"uid-{name}", "a")
    batch = batch_of(feed)

    assert batch is not None
    assert [one["id"].rpartition("-")[2] for one in batch["bound"]] == ["2", "3"]


async def test_at_the_start_only_the_newest_pods_are_awaited(
    world: World, feed: DecisionFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "_MOST_OPEN", 2)
    await decide(world, "one", "two", "three")
    feed.start()
    await decide(world, "four")
    batch_of(feed)

    for name in ("one", "two", "three", "four"):
        world.history.note_bound(f"uid-{name}", "a")
    batch = batch_of(feed)

    assert batch is not None
    assert [one["id"].rpartition("-")[2] for one in batch["bound"]] == ["3", "4"]
