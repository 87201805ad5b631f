"""Event with the GPUs of a bound pod."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from extender.core.nodes.inventory import PodRecord
from extender.core.request.request import PodRef
from extender.effects.events import _MAX_WAITING, EventWriter, PlacementEvents, _describe
from extender.kube.client import KubeClient
from extender.placement.binding_attribution import BindingAttribution, InventoryTap
from extender.placement.bypassed_pods import BypassedPods
from extender.placement.history import _EXPLAINABLE, DecisionRecord
from extender.runtime.metrics import Metrics
from extender.server.request_tracker import RequestTracker
from extender.settings.service import BypassSettings
from testkit.builders import GPU
from testkit.cards import BUSY, IDLE, Gpu
from testkit.fake_kube import FakeKube, eventually
from testkit.webhook_requests import names_request, pod
from testkit.world import World
from tests.extender.effects.waking import Recorder
from tests.extender.effects.warned import POD, PROBLEM

HELD = Gpu(busy=0.9, used_gib=60.0, tenants=("team/tenant",))
CARDS = {"node-7": [IDLE, IDLE, HELD, HELD], "node-8": [Gpu(busy=0.06, used_gib=19.0)] * 2}


@pytest.fixture
def placed() -> World:
    world = World()
    world.register_node("node-7", gpus=4)
    world.add_pod("tenant", "node-7", gpus=2)
    world.add_pod("tenant-8", "node-8", gpus=0)
    world.add(CARDS)
    return world


async def decide(
    world: World, *nodes: str, verb: str = "prioritize", gpus: int = 2, target: str = ""
) -> None:
    requester = pod("p", gpus=gpus, **({"target": target} if target else {}))
    request = json.dumps(names_request(*nodes, requester=requester)).encode()
    webhooks = world.webhooks()
    await (webhooks.prioritize if verb == "prioritize" else webhooks.filter)(request)


def bind(world: World, node: str) -> DecisionRecord:
    record = world.history.note_bound("uid-p", node)
    assert record is not None
    return record


async def test_event_describes_the_gpus_of_the_pod(placed: World) -> None:
    await decide(placed, "node-7")

    assert _describe(bind(placed, "node-7")) == (
        "GPU placement: node-7, idlegpu's first choice: certain to get 2 idle GPUs; leaves none of "
        "4 usable. At that time 2 of its 4 GPUs were idle; GPUs open to the pod: mean activity 0 "
        "%, 80 GiB free each"
    )


async def test_the_event_shows_the_fullest_of_different_cards_and_their_mean_activity() -> None:
    world = World()
    world.add({"n": [Gpu(busy=0.1, used_gib=10.0), Gpu(busy=0.2, used_gib=30.0)]})
    await decide(world, "n", gpus=2)

    assert _describe(bind(world, "n")).endswith(": mean activity 15 %, 50 GiB free each")


async def test_an_event_about_a_single_card_does_not_say_each() -> None:
    world = World()
    world.add({"n": [Gpu(used_gib=10.0)]})
    await decide(world, "n", gpus=1)

    assert _describe(bind(world, "n")).endswith(", 70 GiB free")


async def test_an_event_states_that_kube_scheduler_chose_another_node(placed: World) -> None:
    await decide(placed, "node-7", "node-8")
    first = placed.history.last_of("uid-p")
    assert first is not None
    other = "node-8" if first.decision.best == "node-7" else "node-7"

    text = _describe(bind(placed, other))

    preferred = f"idlegpu's first choice was {first.decision.best}"
    assert text.startswith(f"GPU placement: {other}; {preferred}. At that time 2 of its ")


async def test_the_event_shows_the_readings_of_the_decision() -> None:
    world = World()
    world.add({"n": [IDLE, IDLE]})
    await decide(world, "n", gpus=1)
    world.report({"n": [BUSY, BUSY]})

    assert "2 of its 2 GPUs were idle" in _describe(bind(world, "n"))


@pytest.mark.parametrize(
    ("target", "gpus", "text"),
    [
        ("node-7::0,1", 2, "It gets GPU 0,1 as requested"),
        ("node-7::0,1,3", 1, "It gets 1 of GPU 0,1 as requested"),
        ("node-7::1", 1, "It requested GPU 1, and the kubelet chooses from GPU 0,1"),
        ("node-7::2", 1, "It requested GPU 2, and the kubelet chooses from GPU 0,1"),
    ],
)
async def test_whether_the_pod_gets_the_gpus_that_it_named(
    placed: World, target: str, gpus: int, text: str
) -> None:
    await decide(placed, "node-7", "node-8", gpus=gpus, target=target, verb="filter")

    assert _describe(bind(placed, "node-7")).endswith(f". {text}")


async def test_an_event_promises_no_gpus_without_an_index() -> None:
    world = World()
    world.register_node("dark", gpus=1)
    await decide(world, "dark", gpus=1, target="dark::0")

    assert _describe(bind(world, "dark")).endswith(
        "It is unknown whether it gets the requested GPU 0"
    )


async def test_event_says_that_the_node_is_unknown() -> None:
    world = World()
    world.register_node("dark", gpus=1)
    await decide(world, "dark", gpus=1)

    assert _describe(bind(world, "dark")) == (
        "GPU placement: dark, idlegpu's first choice: nothing is known of its GPUs; leaves none of "
        "1 usable. At that time 0 of its 1 GPUs were idle; GPUs open to the pod: activity unknown"
    )


def tapped(world: World, decisions: list[DecisionRecord]) -> InventoryTap:
    bypassed_pods = BypassedPods(world.request_log, Metrics(), BypassSettings())
    binding_attribution = BindingAttribution(world.request_log, world.history, world.metrics)
    return InventoryTap(
        world.fleet, world.history, binding_attribution, bypassed_pods, on_bound=decisions.append
    )


async def decide_and_bind(world: World, *, others: int, seconds: float) -> DecisionRecord:
    """Decide about p, then about other pods for a time; bind p to its second choice."""
    world.placer.detailed = 1
    await decide(world, "node-7", "node-8")
    record = world.history.last_of("uid-p")
    assert record is not None
    world.placer.detail(record)
    other = "node-8" if record.decision.best == "node-7" else "node-7"
    world.now += seconds
    for number in range(others):
        request = json.dumps(names_request("node-7", requester=pod(f"other-{number}"))).encode()
        await world.webhooks().filter(request)
    decisions: list[DecisionRecord] = []
    bound = PodRecord(
        uid="uid-p", namespace="team", name="p", node=other, resources={GPU: 2}, bound_at=world.now
    )
    tapped(world, decisions).apply_pod(bound)
    (decided,) = decisions
    assert decided is record
    return decided


@pytest.mark.parametrize(
    ("others", "seconds", "is_late"),
    [
        pytest.param(_EXPLAINABLE - 1, 0.5, False, id="soon"),
        pytest.param(_EXPLAINABLE + 10, 2.0, True, id="after-many-others"),
        pytest.param(1, 60.0, True, id="much-later"),
        pytest.param(0, 60.0, True, id="much-later-and-nothing-between"),
    ],
)
async def test_the_event_describes_a_node_that_was_not_among_the_best(
    placed: World, others: int, seconds: float, *, is_late: bool
) -> None:
    record = await decide_and_bind(placed, others=others, seconds=seconds)

    assert _describe(record).startswith(f"GPU placement: {record.bound_node}; idlegpu's first ")
    (verdict,) = (one for one in record.details if one.node == record.bound_node)
    assert verdict.is_late is is_late
    # A pod is no neighbor of its own: its GPUs were free for it.
    assert (verdict.landing, verdict.idle) == (2, 2)


async def test_without_a_record_no_event_is_written(placed: World) -> None:
    await decide(placed, "node-7")
    record = replace(bind(placed, "node-7"), packed=())

    assert _describe(record) == ""


# --- writing --------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extender.effects.events._PER_SECOND", 1000.0)


@asynccontextmanager
async def writing(
    client: KubeClient, *, is_on: bool = True
) -> AsyncIterator[tuple[PlacementEvents, EventWriter]]:
    events = EventWriter(client, instance="extender-0")
    placements = PlacementEvents(events, lambda: is_on, RequestTracker().wait_for_quiet)
    tasks = [asyncio.create_task(one.run()) for one in (events, placements)]
    try:
        yield placements, events
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.mark.usefixtures("quick")
async def test_one_event_is_written_at_the_binding(
    placed: World, kube: FakeKube, client: KubeClient
) -> None:
    await decide(placed, "node-7", "node-8", verb="filter")
    await decide(placed, "node-7", "node-8")
    async with writing(client) as (placements, events):
        bypassed_pods = BypassedPods(placed.request_log, Metrics(), BypassSettings())
        binding_attribution = BindingAttribution(
            placed.request_log, placed.history, placed.metrics, on_own=(placements.note,)
        )
        tap = InventoryTap(placed.fleet, placed.history, binding_attribution, bypassed_pods)
        uid = placed.add_pod("p", "node-7", gpus=2)
        bound = placed.fleet.pods[uid]
        tap.apply_pod(replace(bound, node=""))  # it still waits, and changes
        for _ in range(3):  # the kubelet adds to its status
            tap.apply_pod(bound)
        await eventually(lambda: events.counts.written)

    ((method, _, event),) = kube.writes
    assert method == "POST"
    assert (event["type"], event["reason"]) == ("Normal", "GPUPlacement")
    assert event["regarding"]["name"] == "p"
    assert event["note"].startswith("GPU placement: node-7, idlegpu's first choice: certain ")


@pytest.mark.usefixtures("quick")
async def test_a_placement_that_cannot_be_described_is_counted(
    placed: World, client: KubeClient
) -> None:
    await decide(placed, "node-7")
    record = replace(bind(placed, "node-7"), packed=())
    async with writing(client) as (placements, events):
        placements.note(record)
        await eventually(lambda: events.counts.dropped)

    assert events.counts.dropped == 1


@pytest.mark.usefixtures("quick")
async def test_filter_causes_an_event_only_if_it_left_one_node(
    placed: World, kube: FakeKube, client: KubeClient
) -> None:
    async with writing(client) as (placements, events):
        await decide(placed, "node-7", "node-8", verb="filter")
        placements.note(bind(placed, "node-7"))
        await decide(placed, "node-8", verb="filter")
        placements.note(bind(placed, "node-8"))
        await eventually(lambda: events.counts.written)

    assert [event["note"].split(",")[0] for _, _, event in kube.writes] == ["GPU placement: node-8"]


@pytest.mark.usefixtures("quick")
async def test_turned_off_nothing_is_written(
    placed: World, kube: FakeKube, client: KubeClient
) -> None:
    async with writing(client, is_on=False) as (placements, events):
        await decide(placed, "node-7")
        placements.note(bind(placed, "node-7"))
        events.warn_annotation(POD, PROBLEM)
        await eventually(lambda: events.counts.written)

    assert [event["reason"] for _, _, event in kube.writes] == ["InvalidAnnotation"]


def note_posts(events: EventWriter, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str]]:
    """Return a growing list of the times and pods of posted Events."""
    posts: list[tuple[float, str]] = []

    def post(pod: PodRef, *_: object) -> None:
        posts.append((asyncio.get_running_loop().time(), pod.name))

    monkeypatch.setattr(events, "post", post)
    return posts


@asynccontextmanager
async def running(placements: PlacementEvents) -> AsyncIterator[None]:
    task = asyncio.create_task(placements.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.looptime
async def test_burst_of_bindings_has_events_for_the_newest_and_a_count(
    placed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = EventWriter(Recorder(), instance="extender-0")
    placements = PlacementEvents(events, lambda: True, RequestTracker().wait_for_quiet)
    await decide(placed, "node-7")
    record = bind(placed, "node-7")

    pods = [replace(record.pod, name=f"p-{number}") for number in range(_MAX_WAITING + 100)]
    for pod_ in pods:
        placements.note(replace(record, pod=pod_))
    assert events.counts.dropped == 100
    posts = note_posts(events, monkeypatch)
    async with running(placements):
        await asyncio.sleep(600.0)

    assert [name for _, name in posts] == [pod_.name for pod_ in pods[-_MAX_WAITING:]]


async def at_once() -> None:
    """Detect no burst."""


@pytest.mark.looptime
async def test_placement_events_are_written_at_the_rate_of_events(
    placed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.effects.events._PER_SECOND", 2.0)
    events = EventWriter(Recorder(), instance="extender-0")
    placements = PlacementEvents(events, lambda: True, at_once)
    await decide(placed, "node-7")
    record = bind(placed, "node-7")
    posts = note_posts(events, monkeypatch)
    for name in "abc":
        placements.note(replace(record, pod=replace(record.pod, name=name)))

    async with running(placements):
        await asyncio.sleep(60.0)

    first = posts[0][0]
    assert [(at - first, name) for at, name in posts] == [(0.0, "a"), (0.5, "b"), (1.0, "c")]


@pytest.mark.looptime
async def test_during_a_burst_no_event_is_written(
    placed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = asyncio.Event()

    async def calm() -> None:
        await is_over.wait()

    events = EventWriter(Recorder(), instance="extender-0")
    placements = PlacementEvents(events, lambda: True, calm)
    await decide(placed, "node-7")
    posts = note_posts(events, monkeypatch)
    placements.note(bind(placed, "node-7"))

    async with running(placements):
        await asyncio.sleep(60.0)
        assert posts == []
        is_over.set()
        await asyncio.sleep(60.0)

    assert [name for _, name in posts] == ["p"]


async def test_while_many_events_wait_none_is_noted_and_each_is_counted(placed: World) -> None:
    events = EventWriter(Recorder(), instance="extender-0")
    placements = PlacementEvents(events, lambda: True, RequestTracker().wait_for_quiet)
    await decide(placed, "node-7")
    record = bind(placed, "node-7")
    for number in range(_MAX_WAITING):
        events.warn_annotation(replace(POD, uid=f"uid-{number}"), PROBLEM)

    placements.note(record)

    assert (len(placements._waiting), events.counts.dropped) == (0, 1)
