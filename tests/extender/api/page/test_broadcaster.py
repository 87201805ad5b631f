"""Each viewer of the page receives each update once, at its own pace."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import pytest

from extender.api.page import broadcaster as broadcaster_module
from extender.api.page.broadcaster import Broadcaster
from extender.server.readiness import SourceStatus
from extender.server.redaction import SEES_ALL, VIEWER, SeesNone
from testkit.page.serving import Server
from testkit.webhook_requests import names_request, pod
from testkit.world import World
from tests.extender.api.page.feeds import read

pytestmark = pytest.mark.looptime


@asynccontextmanager
async def running(world: World, **rest: Any) -> AsyncIterator[Broadcaster]:
    """Update the feeds of a page that is not served."""
    page = Server(world, **rest).make_page()
    task = asyncio.create_task(page.run())
    try:
        yield page.broadcaster
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
def broadcaster(world: World) -> Broadcaster:
    return Server(world).make_page().broadcaster


async def decide(world: World, name: str) -> None:
    requested = names_request("node-a", "node-b", requester=pod(name))
    await world.webhooks().prioritize(json.dumps(requested).encode())


def names_of(broadcaster: Broadcaster, viewer: Any) -> list[str]:
    return [read(update)[0] for update in broadcaster.news_for(viewer)]


def pods_of(broadcaster: Broadcaster, viewer: Any) -> list[list[str]]:
    """Return the pods of each batch of decisions that a viewer has not received."""
    updates = [read(update) for update in broadcaster.news_for(viewer)]
    return [
        [one["pod"] for one in document["decisions"]]
        for name, document in updates
        if name == "decisions"
    ]


async def test_a_viewer_gets_everything_first_and_then_only_what_is_new(world: World) -> None:
    async with running(world) as broadcaster:
        viewer = broadcaster.join()
        assert names_of(broadcaster, viewer) == ["beat", "changes"]
        assert not viewer.news.is_set()

        await asyncio.sleep(0.5)
        assert viewer.news.is_set()
        assert names_of(broadcaster, viewer) == ["fleet"]
        assert names_of(broadcaster, viewer) == []

        await asyncio.sleep(4.0)
        assert not viewer.news.is_set()
        await asyncio.sleep(1.0)
        assert viewer.news.is_set()  # for the heartbeat alone, every five seconds
        assert names_of(broadcaster, viewer) == ["beat"]

        await asyncio.sleep(1.0)
        await decide(world, "p")
        await asyncio.sleep(1.0)
        assert viewer.news.is_set()
        assert names_of(broadcaster, viewer) == ["decisions"]


async def test_a_heartbeat_says_how_old_each_source_is(world: World) -> None:
    sources = [
        SourceStatus(name="silent", last_success_at=None, failures=1, error="no answer"),
        SourceStatus(name="old", last_success_at=world.now - 7.0, failures=0, error=""),
        SourceStatus(name="ahead", last_success_at=world.now + 7.0, failures=0, error=""),
    ]
    broadcaster = Server(world, sources=sources).make_page().broadcaster

    name, document = read(next(broadcaster.news_for(broadcaster.join())))

    assert (name, document["at"], document["look_seconds"]) == ("beat", world.now, 2.0)
    assert document["sources"] == [
        {"name": "silent", "age_seconds": None, "error": "no answer"},
        {"name": "old", "age_seconds": 7.0, "error": ""},
        {"name": "ahead", "age_seconds": 0.0, "error": ""},
    ]


async def test_viewers_get_decisions_since_they_joined_and_at_most_the_kept_batches(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster_module, "_MOST_BATCHES", 3)
    VIEWER.set(SEES_ALL)
    async with running(world) as broadcaster:
        slow, fast = broadcaster.join(), broadcaster.join()
        later: list[Any] = []
        received: list[list[str]] = []
        for number in range(5):
            later += [broadcaster.join()] if number == 3 else []
            await asyncio.sleep(1.0)
            await decide(world, f"p{number}")
            await asyncio.sleep(1.0)
            received += pods_of(broadcaster, fast)

        assert received == [[f"team/p{number}"] for number in range(5)]
        assert pods_of(broadcaster, later[0]) == [["team/p3"], ["team/p4"]]
        assert pods_of(broadcaster, slow) == [["team/p2"], ["team/p3"], ["team/p4"]]
        assert pods_of(broadcaster, slow) == []


async def test_a_batch_is_encoded_once_for_all_who_see_it_whole(world: World) -> None:
    async with running(world) as broadcaster:
        viewers = [broadcaster.join() for _ in range(3)]
        await asyncio.sleep(1.0)
        await decide(world, "secret")
        await asyncio.sleep(1.0)

        VIEWER.set(SeesNone())
        redacted = [*broadcaster.news_for(viewers[0])][-1]
        VIEWER.set(SEES_ALL)
        first, second = ([*broadcaster.news_for(viewer)][-1] for viewer in viewers[1:])

    assert b"secret" not in redacted
    assert b"secret" in first
    assert second is first


async def test_decisions_of_other_replicas_are_queried_every_two_seconds(world: World) -> None:
    async with running(world) as broadcaster:
        batch = {"decisions": [], "passed_over": 3, "bound": []}
        with mock.patch.object(broadcaster._far, "batch", side_effect=[None, batch, None]) as query:
            viewer = broadcaster.join()
            await asyncio.sleep(1.5)
            assert query.call_count == 1
            names_of(broadcaster, viewer)

            await asyncio.sleep(1.0)
            assert query.call_count == 2
            assert viewer.news.is_set()
            assert read(next(broadcaster.news_for(viewer))) == ("decisions", batch)
            broadcaster.leave(viewer)


async def test_the_newest_viewer_of_the_client_with_most_makes_room(
    broadcaster: Broadcaster,
) -> None:
    first, second, other = (broadcaster.join(who) for who in ("greedy", "greedy", "other"))
    names_of(broadcaster, second)

    assert broadcaster.has_room_for("new", 4)
    assert not second.is_let_go
    assert not broadcaster.has_room_for("other", 3)  # it would have as many as the other
    assert broadcaster.has_room_for("new", 3)

    assert [one.is_let_go for one in (first, second, other)] == [False, True, False]
    assert second.news.is_set()
    assert len(broadcaster) == 2


async def test_every_viewer_learns_that_the_server_shuts_down(broadcaster: Broadcaster) -> None:
    viewers = [broadcaster.join() for _ in range(2)]
    for viewer in viewers:
        names_of(broadcaster, viewer)

    broadcaster.close()

    assert broadcaster.is_closing
    assert all(viewer.news.is_set() for viewer in viewers)
