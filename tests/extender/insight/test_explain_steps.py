"""Explanations of many nodes in cooperative steps, equal to those made at once."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision.verdicts import NodeVerdict, VerdictEvidence, explain
from extender.insight import decisions
from extender.insight.decisions import FORM, DecisionRoutes
from extender.insight.explain_views import Ranking, Wish, full_nodes
from extender.insight.holders import _MOST_KEPT, _Shared
from extender.insight.views import PIECE_VERDICTS, Json, decision_in_steps, decision_view, veiled
from extender.placement import history
from extender.placement.history import _PIECE_NODES, DecisionRecord
from extender.server.json_api import _PIECE_ITEMS, document_answer, write_in_pieces
from extender.server.redaction import SEES_ALL, VIEWER, OfPod, write_json, write_json_in_full
from testkit.api_requests import decide, get
from testkit.cards import BUSY, Gpu
from testkit.others import FAR, OtherReplicas, SeesTeam, replica_world
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World

NODES = 5 * _PIECE_NODES + 3
CARDS = {
    f"node-{at:03d}": [Gpu(busy=(at * 7 + card) % 30 / 100) for card in range(1 + at % 3)]
    for at in range(NODES)
} | {"busy": [BUSY]}

texts = st.text(max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
long_lists = st.builds(
    lambda item, more: [item] * (_PIECE_ITEMS + more), json_values, st.integers(0, 2 * _PIECE_ITEMS)
)


def replica(name: str, far: OtherReplicas | None = None, **rest: object) -> World:
    world = replica_world(name=name, far=far or OtherReplicas(), **rest)  # type: ignore[arg-type] # a test's
    world.placer.detailed = NODES
    world.add(CARDS, readings=1)
    return world


@pytest.fixture
def world() -> World:
    return replica("near")


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


@pytest.fixture
async def record(world: World, client: Client) -> DecisionRecord:
    """Return a decision with the full record of many nodes."""
    await decide(client, *CARDS, name="p")
    await get(client, "/v1/decisions", limit="1")  # by then the record is complete
    (record,) = world.history
    assert len(record.details) == NODES
    return record


def test_some_nodes_at_a_time_are_explained_as_all_at_once(record: DecisionRecord) -> None:
    (part,) = record.evidence

    whole = explain(part.evidence)

    reported = part.explain()
    assert [verdict.node for verdict in reported] == [verdict.node for verdict in whole]
    for one, other in zip(reported, whole, strict=True):
        assert replace(one, devices=()) == replace(other, devices=())
        assert [device.state for device in one.devices] == [
            device.state for device in other.devices
        ]
        names = {device.uuid for device in one.devices}
        assert names == {f"GPU-{one.node}-{card}" for card in range(len(CARDS[one.node]))}


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of nodes of each rendered explanation."""
    counted: list[int] = []

    def count(some: VerdictEvidence) -> tuple[NodeVerdict, ...]:
        counted.append(len(some.nodes))
        return explain(some)

    monkeypatch.setattr(history, "explain", count)
    return counted


def steps_of(work: Coroutine[Any, Any, Any]) -> Iterator[None]:
    """Yield each time that some work yields to others."""
    while True:
        try:
            work.send(None)
        except StopIteration:
            return
        yield


async def test_no_step_explains_more_than_a_few_nodes(
    world: World, record: DecisionRecord, explained: list[int]
) -> None:
    works = [
        world.why.explain._view(record, None, Wish(limit=10_000, node="")),
        world.why._what_if._predict(record.request, {}, Wish(limit=10_000, node="")),
    ]
    for work in works:
        steps = 0
        before = len(explained)
        for _ in steps_of(work):
            assert sum(explained[before:]) <= _PIECE_NODES
            before = len(explained)
            steps += 1
        assert steps > 2 * NODES / _PIECE_NODES  # to render them, and to record them


def test_a_decision_in_full_is_reported_in_steps_as_at_once(
    record: DecisionRecord, explained: list[int]
) -> None:
    before = 0
    for _ in decision_in_steps(record, brief=False):
        assert sum(explained[before:]) <= _PIECE_NODES
        before = len(explained)

    view = decision_view(record, brief=False)
    assert len(view["explained"]) == NODES  # type: ignore[arg-type] # a list
    assert set(view["nodes"]) == set(CARDS)  # type: ignore[call-overload] # an object


async def test_a_decision_is_written_for_another_replica_some_nodes_at_a_time(
    world: World, record: DecisionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def write(value: Any) -> bytes:
        nodes = value.get("explained", ()) if isinstance(value, dict) else value
        written.append(len(nodes) if isinstance(nodes, list) else 0)
        return write_json_in_full(value)

    monkeypatch.setattr(decisions, "write_json_in_full", write)
    decided = DecisionRoutes(world.history)

    before = 0
    for _ in steps_of(decided._written(record)):
        assert sum(written[before:]) <= _PIECE_ITEMS
        before = len(written)

    assert sum(written) == NODES
    whole = orjson.loads(write_json_in_full(decision_view(record, brief=False)))
    assert orjson.loads(await decided._written(record)).items() >= whole.items()


async def test_long_fields_of_another_replica_are_forwarded_undecoded(
    world: World,
    record: DecisionRecord,
    aiohttp_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decisions, "_LONG_BYTES", 1000)
    written = await DecisionRoutes(world.history)._written(record)
    reported = FORM.read(b'{"version":1,"replica":"near","decisions":[%b]}' % written)
    assert reported is not None
    (view,) = reported.decisions

    async def answer(request: web.Request) -> web.StreamResponse:
        VIEWER.set(SEES_ALL)
        return await document_answer(request, veiled(view))

    app = web.Application()
    app.router.add_get("/decision", answer)

    assert {name for name, it in view.items() if isinstance(it, msgspec.Raw)} == {
        "explained",
        "nodes",
    }
    assert await get(await aiohttp_client(app), "/decision") == orjson.loads(written)


def test_records_of_some_nodes_are_made_in_each_step(record: DecisionRecord) -> None:
    ranking = Ranking(decision=record.decision, details=record.details)

    assert len(list(full_nodes(ranking))) == -(-NODES // PIECE_VERDICTS)


async def test_every_node_is_in_the_answer_of_any_replica(aiohttp_client: MakeClient) -> None:
    other = await aiohttp_client(replica("far").build_app())
    client = await aiohttp_client(replica("near", OtherReplicas({FAR: other})).build_app())
    await decide(other, *CARDS, name="p")

    for limit in ("0", "10000"):
        reported = await get(client, "/v1/explain", pod="team/p", limit=limit)

        assert reported == await get(other, "/v1/explain", pod="team/p", limit=limit)
        assert len(reported["nodes"]) == NODES
        assert [node["rank"] for node in reported["nodes"]] == list(range(1, NODES + 1))
        others = [one["node"] for one in reported["others"]]
        assert len(others) == (1 if limit != "0" else 0)
        assert {node["node"] for node in reported["nodes"]} | {*others} <= set(CARDS)
        assert reported["others_left"] + len(others) == 1


@given(st.dictionaries(texts, json_values | long_lists, max_size=4))
def test_document_in_pieces_equals_the_whole(document: dict[str, object]) -> None:
    whole = write_json_in_full(document)

    assert b"".join(write_in_pieces(document, write_json_in_full)) == whole


def test_encoded_json_is_copied_unchanged() -> None:
    document: Json = {
        "a": 1,
        "list": msgspec.Raw(b"[" + b"7," * (1 << 18) + b"8]"),
        "b": OfPod("", 2),
    }

    pieces = list(write_in_pieces(document, write_json_in_full))

    reported = orjson.loads(b"".join(pieces))
    assert (reported["a"], reported["b"], len(reported["list"])) == (1, 2, (1 << 18) + 1)
    assert max(map(len, pieces)) < len(b"".join(pieces)) / 1.5


async def test_long_document_is_redacted_for_each_caller(aiohttp_client: MakeClient) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        VIEWER.set(SeesTeam() if "tenant" in request.query else SEES_ALL)
        pods = [OfPod(name, name, "hidden") for name in ("team", "hush")]
        return await document_answer(request, {"pods": pods * _PIECE_ITEMS, "one": pods[1]})

    app = web.Application()
    app.router.add_get("/pods", answer)
    client = await aiohttp_client(app)

    seen = await get(client, "/pods")
    of_tenant = await get(client, "/pods", tenant="yes")

    assert seen == {"pods": ["team", "hush"] * _PIECE_ITEMS, "one": "hush"}
    assert of_tenant == {"pods": ["team", "hidden"] * _PIECE_ITEMS, "one": "hidden"}
    assert write_json({}) == b"{}"
    assert b"".join(write_in_pieces({}, write_json)) == b"{}"


async def test_others_run_while_a_long_document_is_written(aiohttp_client: MakeClient) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal turns
        counting = asyncio.create_task(count())
        await asyncio.sleep(0)
        turns = 0
        response = await document_answer(request, {"items": [0] * (100 * _PIECE_ITEMS)})
        counting.cancel()
        return response

    app = web.Application()
    app.router.add_get("/items", answer)
    client = await aiohttp_client(app)

    assert len((await get(client, "/items"))["items"]) == 100 * _PIECE_ITEMS
    assert turns >= 100


class Maker:
    """Work that counts its runs; its clock only moves when a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.made = 0
        self.at_once = 0
        self.shared = _Shared[int](lambda: self.now, 5.0)

    async def make(self) -> int:
        self.at_once += 1
        assert self.at_once == 1
        await asyncio.sleep(0)
        self.at_once -= 1
        self.made += 1
        return self.made


@pytest.fixture
def maker() -> Maker:
    return Maker()


async def test_concurrent_and_soon_following_callers_share_the_result(maker: Maker) -> None:
    async with asyncio.TaskGroup() as group:
        askers = [group.create_task(maker.shared.get("a", maker.make)) for _ in range(10)]
    maker.now += 4.9

    assert {requester.result() for requester in askers} == {1}
    assert await maker.shared.get("a", maker.make) == 1


async def test_an_old_result_or_another_key_is_computed_again(maker: Maker) -> None:
    assert await maker.shared.get("a", maker.make) == 1
    assert await maker.shared.get("b", maker.make) == 2
    maker.now += 5
    assert await maker.shared.get("a", maker.make) == 3
    maker.now -= 60  # a clock that was set back gives no age
    assert await maker.shared.get("a", maker.make) == 4
    maker.shared.clear()
    assert await maker.shared.get("a", maker.make) == 5


async def test_few_results_are_kept(maker: Maker) -> None:
    for key in range(_MOST_KEPT + 1):
        await maker.shared.get(key, maker.make)

    assert await maker.shared.get(_MOST_KEPT, maker.make) == _MOST_KEPT + 1
    assert await maker.shared.get(0, maker.make) == _MOST_KEPT + 2


async def test_an_unused_result_is_dropped() -> None:
    maker = Maker()
    maker.shared = _Shared[int](lambda: maker.now, 0.01)
    await maker.shared.get("a", maker.make)

    async with asyncio.timeout(30):
        while maker.shared._entries:  # no event signals it
            await asyncio.sleep(0.01)


async def test_a_fault_stays_with_its_caller(maker: Maker) -> None:
    async def fail() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await maker.shared.get("a", fail)

    assert await maker.shared.get("a", maker.make) == 1
