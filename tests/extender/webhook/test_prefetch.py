"""Test that prioritize is decided ahead of its request, and again after any change."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from extender.core.request.request import ParsedRequest, PodRef
from extender.placement.placer import Placer, Weighed
from extender.webhook import handlers
from extender.webhook.handlers import Webhooks
from extender.webhook.wire import JsonObject
from testkit.cards import BUSY, IDLE
from testkit.webhook_questions import Client, MakeClient, pod, scores_of
from testkit.world import World

NODES = ["idle-b", "busy", "idle-a"]


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[Weighed]:
    """Decisions so far."""
    decided: list[Weighed] = []
    weigh = Placer.weigh

    def noted(self: Placer, *args: object, **how: object) -> Weighed:
        decided.append(weigh(self, *args, **how))  # type: ignore[arg-type] # as it was called
        return decided[-1]

    monkeypatch.setattr(Placer, "weigh", noted)
    # The prefetch must not expire on a slow machine.
    monkeypatch.setattr(handlers, "BETWEEN_VERBS_SECONDS", 60.0)
    return decided


async def ask(client: Client, verb: str, names: list[str], asker: object) -> Any:
    """Send a request in the form of Go: without spaces."""
    question = {"Pod": asker, "Nodes": None, "NodeNames": names}
    body = json.dumps(question, separators=(",", ":"))
    response = await client.post(f"/{verb}", data=body)
    assert response.status == 200
    return await response.json()


async def place(client: Client, between: Callable[[], None] = lambda: None) -> dict[str, int]:
    """Send filter and prioritize, and return the scores."""
    answer = await ask(client, "filter", NODES, pod())
    assert isinstance(answer, dict)
    between()
    scores = await ask(client, "prioritize", answer["NodeNames"], pod())
    assert isinstance(scores, list)
    return scores_of(scores)


async def test_prioritize_uses_the_prefetched_decision(
    client: Client, world: World, weighed: list[Weighed]
) -> None:
    foreseen = await place(client)
    count = len(weighed)
    unforeseen = scores_of(await ask(client, "prioritize", NODES, pod()))

    assert count == 2
    assert world.expected == 1
    assert len(weighed) == 3
    assert foreseen == unforeseen
    verbs = [record.verb for record in world.history]
    assert verbs == ["prioritize", "prioritize", "filter"]
    assert world.fleet.ledger.get("uid-asker") is not None


async def test_a_pod_between_its_requests_keeps_its_prefetch_when_another_expires(
    client: Client, weighed: list[Weighed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "BETWEEN_VERBS_SECONDS", 0.05)
    await place(client)
    count, is_up = len(weighed), after(handlers.BETWEEN_VERBS_SECONDS)
    monkeypatch.setattr(handlers, "BETWEEN_VERBS_SECONDS", 60.0)
    later = pod("later")
    answer = await ask(client, "filter", NODES, later)
    assert isinstance(answer, dict)
    await is_up.wait()

    await ask(client, "prioritize", answer["NodeNames"], later)

    assert len(weighed) == count + 2


async def test_a_prefetch_without_a_second_request_expires(
    client: Client, world: World, weighed: list[Weighed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "BETWEEN_VERBS_SECONDS", 0.01)
    answer = await ask(client, "filter", NODES, pod())
    assert isinstance(answer, dict)
    await after(handlers.BETWEEN_VERBS_SECONDS).wait()
    (record,) = world.history

    assert record.evidence
    await ask(client, "prioritize", answer["NodeNames"], pod())
    assert len(weighed) == 3


def after(seconds: float) -> asyncio.Event:
    """Return an event that is set after this time, behind all timers of the same time."""
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, event.set)
    return event


async def test_a_prefetch_is_not_used_after_a_change(
    client: Client, world: World, weighed: list[Weighed]
) -> None:
    def turn_busy() -> None:
        world.now += 10
        world.report({"idle-a": [BUSY, BUSY], "idle-b": [IDLE, IDLE], "busy": [BUSY, BUSY]})

    scores = await place(client, turn_busy)

    assert len(weighed) == 3
    assert max(scores, key=scores.__getitem__) == "idle-b"


async def test_a_pod_placed_meanwhile_counts(
    client: Client, world: World, weighed: list[Weighed]
) -> None:
    def bind_another() -> None:
        world.add_pod("another", "idle-a", gpus=2)

    scores = await place(client, bind_another)

    assert len(weighed) == 3
    assert max(scores, key=scores.__getitem__) == "idle-b"


async def test_a_prefetch_is_not_used_if_the_request_is_parsed_differently(
    client: Client, weighed: list[Weighed], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Webhooks._parse

    def read_otherwise() -> None:
        def parse_differently(
            self: Webhooks, pod_object: JsonObject
        ) -> tuple[PodRef, ParsedRequest]:
            asker, parsed = read(self, pod_object)
            assert parsed.request is not None
            request = replace(parsed.request, memory_bytes=1 << 30)
            return asker, replace(parsed, request=request)

        monkeypatch.setattr(Webhooks, "_parse", parse_differently)

    await place(client, read_otherwise)

    assert len(weighed) == 3


async def test_a_prefetch_is_not_used_for_other_nodes_or_another_pod(
    client: Client, weighed: list[Weighed]
) -> None:
    await ask(client, "filter", NODES, pod())
    fewer = scores_of(await ask(client, "prioritize", NODES[1:], pod()))
    await ask(client, "filter", NODES, pod())
    await ask(client, "prioritize", NODES, pod(gpus=2))

    assert set(fewer) == {"busy", "idle-a"}
    assert len(weighed) == 6


async def test_nothing_is_prefetched_for_a_single_feasible_node(
    client: Client, weighed: list[Weighed]
) -> None:
    await ask(client, "filter", ["dead", "idle-a"], pod())

    assert len(weighed) == 1


async def test_nothing_is_prefetched_for_a_shortlist_of_one(
    world: World, aiohttp_client: MakeClient, weighed: list[Weighed]
) -> None:
    world.shortlist = 1

    await ask(await aiohttp_client(world.build_app()), "filter", NODES, pod())

    assert len(weighed) == 1
    assert world.expected == 0
