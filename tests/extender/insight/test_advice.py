"""Route for advice about a fleet that was observed."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import numpy as np
import pytest

from extender.core.devices.readings import DeviceKey
from extender.insight import advice
from extender.insight.advice_findings import (
    _MOST_KEPT,
    Measured,
    PrometheusCache,
    _devices,
    _Samples,
    find,
)
from extender.insight.last_hour import Values
from extender.runtime.fair_queue import FairQueue
from testkit.api_requests import get
from testkit.builders import telemetry_of
from testkit.cards import Gpu, card
from testkit.fake_kube import eventually
from testkit.others import SeesTeam
from testkit.webhook_requests import Client, MakeClient
from testkit.world import SHARED, World

HOUR = 3600.0
GIB = 1 << 30
KEPT = 0.0026
"""Accuracy: the recent history stores ratios in steps of half a percent."""


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


def share(world: World, pods: int, *, replicas: int = 4, **seen: float) -> dict[str, list[Gpu]]:
    """Let pods hold replicas of the only card of node s; return the card's telemetry."""
    world.add_shared("s", replicas)
    names = [world.have(f"p{number}", "s", resource=SHARED) for number in range(pods)]
    return {"s": [card(*names, **seen)]}


async def test_recommended_replicas_follow_the_joint_use_of_tenants(
    world: World, client: Client
) -> None:
    cards = share(world, 2, busy=0.3, used_gib=20.0)
    world.live(cards, HOUR)

    answer = await get(client, "/v1/advice")
    (found,) = answer["cards"]

    assert (answer["devices"], answer["sources"], answer["note"]) == (1, ["memory"], "")
    assert answer["samples"] == found["samples"] == 60
    assert answer["looked_seconds"] == found["looked_seconds"] == pytest.approx(59 * 60)
    assert (found["node"], found["index"], found["shared_by"]) == ("s", 0, "time-slicing")
    assert (found["replicas"], found["replicas_used"]) == (4, 2)
    assert found["memory_total_bytes"] == 80 * GIB
    assert found["activity_ratio"] == pytest.approx(0.3)
    assert found["memory_bytes"] == pytest.approx(20 * GIB)
    assert (found["verdict"], found["recommended_replicas"]) == ("more", 6)
    assert found["bound_by"] == "activity"
    assert found["why"] == (
        "2 of 4 replicas in use, which together use 30% busy and 20.0 GiB of 80.0 GiB full, 19 "
        "samples of 20: 6 fit, activity allows no more"
    )


async def test_both_ends_of_the_period_count(world: World, client: Client) -> None:
    world.live(share(world, 1), 2 * HOUR)

    assert (await get(client, "/v1/advice", over="1800"))["samples"] == 31


async def test_use_before_the_last_tenant_does_not_count(world: World, client: Client) -> None:
    cards = share(world, 1, busy=0.9, used_gib=10.0)
    world.live(cards, HOUR / 2)
    world.have("late", "s", resource=SHARED)
    cards = {"s": [card("team/p0", "team/late", busy=0.2, used_gib=10.0)]}
    world.live(cards, HOUR / 2)

    (found,) = (await get(client, "/v1/advice"))["cards"]

    assert found["activity_ratio"] == pytest.approx(0.2)
    assert found["samples"] == 30
    assert found["verdict"] == "more"


async def test_a_peak_in_twenty_does_not_count_and_two_do(world: World, client: Client) -> None:
    cards = share(world, 4, busy=0.5, used_gib=10.0)
    names = cards["s"][0].tenants
    peak = {"s": [card(*names, busy=1.0, used_gib=10.0)]}
    world.live(cards, 57 * 60)
    world.live(peak, 3 * 60)
    (calm,) = (await get(client, "/v1/advice", all="true"))["cards"]
    world.live(peak, 60)
    (busy,) = (await get(client, "/v1/advice", all="true"))["cards"]

    assert (calm["activity_ratio"], calm["recommended_replicas"]) == (0.5, 7)
    assert (busy["activity_ratio"], busy["verdict"]) == (1.0, "fewer")


async def test_figures_match_values_measured_each_minute(world: World, client: Client) -> None:
    """An hour of two tenants with a different load each minute, computed here in another way."""
    minutes = np.random.default_rng(7)
    busy = minutes.beta(2, 5, 60).round(3)
    used_gib = minutes.uniform(8, 30, 60).round(2)
    world.add_shared("s", 4)
    names = [world.have(f"p{number}", "s", resource=SHARED) for number in range(2)]
    for share, gib in zip(busy.tolist(), used_gib.tolist(), strict=True):
        world.live({"s": [card(*names, busy=share, used_gib=gib)]}, 60)

    (found,) = (await get(client, "/v1/advice", all="true"))["cards"]

    # 57 of 60 values do not exceed it: activity and memory of all tenants together, without peaks.
    p95 = {name: float(np.sort(one)[56]) for name, one in (("busy", busy), ("gib", used_gib))}
    by_activity = int(0.9 * 2 / p95["busy"])
    by_memory = int((80 - 1) * 2 / p95["gib"])
    assert found["activity_ratio"] == pytest.approx(p95["busy"], abs=KEPT)
    assert found["memory_bytes"] == pytest.approx(p95["gib"] * GIB, abs=KEPT * 80 * GIB)
    assert found["memory_most_bytes"] == pytest.approx(used_gib.max() * GIB, abs=KEPT * 80 * GIB)
    assert (found["samples"], found["replicas_used"]) == (60, 2)
    assert found["recommended_replicas"] == min(by_activity, by_memory)
    assert found["bound_by"] == ("activity" if by_activity < by_memory else "memory")


@pytest.mark.parametrize(
    ("pods", "seen", "advice"),
    [
        (1, (0.95, 10.0), ("do-not-share", 1)),
        (4, (1.0, 40.0), ("fewer", 3)),
        (4, (0.85, 40.0), ("keep", 4)),
    ],
)
async def test_cards_that_are_shared_by_too_many_are_named(
    world: World, client: Client, pods: int, seen: tuple[float, float], advice: object
) -> None:
    world.live(share(world, pods, busy=seen[0], used_gib=seen[1]), HOUR)

    (found,) = (await get(client, "/v1/advice", all="true"))["cards"]
    listed = (await get(client, "/v1/advice"))["cards"]

    assert (found["verdict"], found["recommended_replicas"]) == advice
    assert listed == ([] if found["verdict"] == "keep" else [found])


@pytest.mark.parametrize(("pods", "minutes"), [(0, 1), (0, 60), (2, 5)])
async def test_without_history_of_pods_the_defaults_are_given(
    world: World, client: Client, pods: int, minutes: int
) -> None:
    world.live(share(world, pods), minutes * 60)

    (found,) = (await get(client, "/v1/advice"))["cards"]

    assert (found["verdict"], found["recommended_replicas"]) == ("not-measured", 2)
    assert (found["way"], found["mig_layout"]) == ("mig", "2x 3g.40gb")
    assert found["replica_memory_bytes"] == pytest.approx(39.5 * GIB)
    assert "1 GiB kept back" in found["why"]


async def test_a_card_whose_pod_leaves_room_for_another_should_be_shared(
    world: World, client: Client
) -> None:
    world.register_node("w", gpus=3)
    names = [world.have(name, "w") for name in ("small", "busy")]
    cards = {"w": [card(names[0], busy=0.2, used_gib=15.0), card(names[1], busy=0.8), card()]}
    world.live(cards, HOUR)

    (found,) = (await get(client, "/v1/advice"))["cards"]

    assert (await get(client, "/v1/advice"))["devices"] == 2  # no pod holds the third
    assert (found["index"], found["verdict"], found["shared_by"]) == (0, "share", None)
    assert (found["recommended_replicas"], found["bound_by"]) == (4, "activity")
    assert (found["way"], found["mig_layout"]) == ("mig", "4x 1g.20gb")


async def test_the_cards_of_a_pod_with_several_are_left_whole(world: World, client: Client) -> None:
    world.register_node("w", gpus=2)
    name = world.have("pair", "w", gpus=2)
    world.live({"w": [card(name, busy=0.2), card(name, busy=0.2)]}, HOUR)

    assert (await get(client, "/v1/advice"))["cards"] == []


async def test_a_placeholder_is_no_pod_that_should_use_more(world: World, client: Client) -> None:
    world.register_node("w", gpus=1)
    name = world.have("placeholder", "w", memory_bytes=40 * GIB, gives_way=True)
    world.live({"w": [card(name)]}, HOUR)

    answer = await get(client, "/v1/advice")

    assert (answer["cards"], answer["pods"], answer["pods_unjudged"]) == ([], [], 0)


async def test_a_pod_that_uses_a_tenth_of_its_gpus_is_named(world: World, client: Client) -> None:
    world.register_node("w", gpus=3)
    pair, other = world.have("pair", "w", gpus=2), world.have("other", "w")
    cards = {
        "w": [card(pair, busy=0.1, used_gib=8.0), card(pair, busy=0.05), card(other, busy=0.2)]
    }
    world.live(cards, HOUR)

    answer = await get(client, "/v1/advice")
    (found,) = answer["pods"]

    assert (answer["pods_total"], answer["pods_unjudged"]) == (1, 0)
    assert (found["pod"], found["kind"], found["gpus"]) == ("team/pair", "uses-a-tenth", 2)
    assert (found["owner"], found["node"]) == ("Deployment pair", "w")
    assert found["activity_ratio"] == pytest.approx(0.1)
    assert found["memory_bytes"] == pytest.approx(8 * GIB)
    assert (found["samples"], found["pods_per_gpu"]) == (60, 9)
    assert found["why"].startswith("none of its 2 GPUs is more than 10% busy and 8.0 GiB of")


@pytest.mark.parametrize(
    ("requested", "used", "kind", "suggested"),
    [
        (40.0, 8.0, "requests-too-much", 10),
        (10.0, 30.0, "requests-too-little", 36),
        (20.0, 15.0, "", 0),
    ],
)
async def test_pods_with_far_too_high_or_low_memory_requests_are_named(
    world: World, client: Client, requested: float, used: float, kind: str, suggested: int
) -> None:
    world.register_node("w", gpus=1)
    name = world.have("server", "w", memory_bytes=int(requested * GIB))
    world.live({"w": [card(name, busy=0.7, used_gib=used)]}, HOUR)

    found = (await get(client, "/v1/advice"))["pods"]

    assert [one["kind"] for one in found] == ([kind] if kind else [])
    if kind:
        assert found[0]["requested_memory_bytes"] == requested * GIB
        assert found[0]["suggested_memory_bytes"] == suggested * GIB
        assert found[0]["memory_most_bytes"] == pytest.approx(used * GIB, rel=0.02)
        assert f"{requested:.1f} GiB of each GPU" in found[0]["why"]


async def test_whose_memory_it_is_on_a_shared_card_is_not_guessed(
    world: World, client: Client
) -> None:
    world.add_shared("s", 4)
    names = [
        world.have(name, "s", resource=SHARED, memory_bytes=40 * GIB) for name in ("one", "two")
    ]
    world.live({"s": [card(*names, used_gib=3.0)]}, HOUR)

    answer = await get(client, "/v1/advice")

    assert (answer["pods"], answer["pods_unjudged"]) == ([], 2)


def report_memory(world: World, minutes: int, **used_gib: float) -> None:
    """Report each minute the card's memory that each pod holds; it grows to its maximum."""
    for minute in range(minutes):
        share = 1.0 if minute == minutes - 1 else 0.5
        reported = [
            (DeviceKey(("GPU-s-0", "")), f"uid-{name}", int(gib * share * GIB))
            for name, gib in used_gib.items()
        ]
        world.fleet.pod_memory.note("s", reported, world.now + 60.0 * minute)


async def test_an_agent_reports_each_pods_memory_on_a_shared_card(
    world: World, client: Client
) -> None:
    world.add_shared("s", 4)
    names = [
        world.have(name, "s", resource=SHARED, memory_bytes=requested * GIB)
        for name, requested in (("greedy", 40), ("short", 4), ("right", 10))
    ]
    world.live({"s": [card(*names, used_gib=20.0)]}, HOUR)
    report_memory(world, 20, greedy=5.0, short=6.0, right=9.0)

    answer = await get(client, "/v1/advice")

    assert answer["pods_unjudged"] == 0
    found = {one["pod"]: one for one in answer["pods"]}
    assert {name: one["kind"] for name, one in found.items()} == {
        "team/greedy": "requests-too-much",
        "team/short": "requests-too-little",
    }
    greedy = found["team/greedy"]
    assert (greedy["source"], greedy["samples"]) == ("agent", 20)
    assert greedy["memory_most_bytes"] == 5 * GIB
    assert greedy["suggested_memory_bytes"] == 6 * GIB
    assert (greedy["activity_ratio"], greedy["memory_bytes"]) == (None, None)
    assert greedy["looked_seconds"] == 19 * 60
    assert "never used more than 5.0 GiB" in greedy["why"]


@pytest.mark.parametrize(("minutes", "unjudged"), [(14, 2), (15, 0)])
async def test_too_few_samples_of_an_agent_give_no_advice(
    world: World, client: Client, minutes: int, unjudged: int
) -> None:
    world.add_shared("s", 4)
    names = [
        world.have(name, "s", resource=SHARED, memory_bytes=40 * GIB) for name in ("one", "two")
    ]
    world.live({"s": [card(*names, used_gib=3.0)]}, HOUR)
    report_memory(world, minutes, one=1.0, two=2.0)

    answer = await get(client, "/v1/advice")

    assert (len(answer["pods"]), answer["pods_unjudged"]) == (2 - unjudged, unjudged)


async def test_a_device_without_telemetry_yet_is_left_out(world: World) -> None:
    world.live(share(world, 2), 60)
    snapshot = world.fleet.snapshot()

    assert len(list(_devices(world.fleet, snapshot, "s"))) == 1
    new = replace(snapshot, telemetry=telemetry_of({}))
    assert list(_devices(world.fleet, new, "s")) == []


async def test_a_pod_that_no_caller_may_read_has_no_name_and_no_wishes(
    world: World, aiohttp_client: MakeClient
) -> None:
    world.register_node("w", gpus=1)
    name = world.have("secret", "w", memory_bytes=40 * GIB, namespace="hidden")
    world.live({"w": [card(name, busy=0.01)]}, HOUR)
    client = await aiohttp_client(world.build_app(viewer=SeesTeam()))

    answer = await get(client, "/v1/advice")
    (found,) = answer["pods"]

    assert (found["pod"], found["uid"], found["owner"]) == ("another pod", None, None)
    assert (found["kind"], found["requested_memory_bytes"]) == ("uses-a-tenth", None)
    assert "secret" not in str(answer)
    named = await get(client, "/v1/advice", namespace="hidden")
    assert (named["pods"], named["pods_unjudged"]) == ([], 0)


async def test_advice_can_be_limited_to_a_node_or_namespace(world: World, client: Client) -> None:
    cards = {}
    for node, namespace in (("a", "team"), ("b", "other")):
        world.register_node(node, gpus=1)
        cards[node] = [card(world.have(f"on-{node}", node, namespace=namespace))]
    world.live(cards, HOUR)

    by_node = await get(client, "/v1/advice", node="a")
    by_namespace = await get(client, "/v1/advice", namespace="other")

    assert [one["node"] for one in by_node["cards"]] == ["a"]
    assert [one["pod"] for one in by_node["pods"]] == ["team/on-a"]
    assert [one["pod"] for one in by_namespace["pods"]] == ["other/on-b"]
    assert [one["node"] for one in (await get(client, "/v1/advice", limit="1"))["cards"]] == ["a"]
    assert {one["pods_per_gpu"] for one in by_node["pods"]} == {16}
    everything = await get(client, "/v1/advice", limit="1")
    assert (everything["cards_total"], everything["pods_total"]) == (2, 2)


async def test_only_so_many_findings_of_a_kind_are_kept(world: World) -> None:
    cards = {}
    for node in ("a", "b", "c"):
        world.register_node(node, gpus=1)
        cards[node] = [card(world.have(f"on-{node}", node))]
    world.live(cards, HOUR)
    measured = Measured(world.fleet, world.memory, None, HOUR, PrometheusCache(world.clock))

    found = await find(world.fleet, measured, most=2)

    assert [len(some) for some in found.cards.values() if some] == [2]
    assert [len(some) for some in found.pods.values() if some] == [2]
    assert (found.counts["share"], found.counts["uses-a-tenth"]) == (3, 3)


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ({"over": "60"}, 400, "over='60' must be a whole number from 900 to 2592000"),
        ({"over": "7200"}, 400, "over='7200' must be at most 3600: nothing older is known"),
        ({"node": "gone"}, 404, "node 'gone' is not known"),
        ({"limit": "0"}, 400, "limit='0' must be a whole number from 1 to 1000"),
        ({"all": "maybe"}, 400, "all='maybe' must be"),
        ({"what": "x"}, 400, "what='x' is not a parameter of this path"),
    ],
)
async def test_bad_parameter_is_refused_with_allowed_values(
    client: Client, query: dict[str, str], status: int, message: str
) -> None:
    error = (await get(client, "/v1/advice", status, **query))["error"]

    assert error.startswith(message)


async def test_a_fleet_without_gpus_gets_no_advice(client: Client) -> None:
    answer = await get(client, "/v1/advice")

    assert (answer["cards"], answer["pods"], answer["devices"]) == ([], [], 0)
    assert (answer["samples"], answer["sources"]) == (0, [])


@dataclass
class PastAnswer:
    times: tuple[float, ...]
    activity: Mapping[DeviceKey, Values]
    memory_bytes: Mapping[DeviceKey, Values]
    error: str = ""


@dataclass
class FakePlots:
    """Stand-in for the queries to Prometheus."""

    world: World
    error: str = ""
    requested: list[tuple[int, float]] = field(default_factory=list)
    is_configured: bool = True
    hold: asyncio.Event | None = None

    async def hour(self, devices: Sequence[DeviceKey]) -> Any:
        raise AssertionError(devices)

    async def past(self, devices: Sequence[DeviceKey], *, seconds: float, steps: int) -> PastAnswer:
        self.requested.append((len(devices), seconds))
        if self.hold is not None:
            await self.hold.wait()
        if self.error:
            return PastAnswer((), {}, {}, self.error)
        start = self.world.now - seconds
        times = tuple(start + seconds * step / (steps - 1) for step in range(steps))
        return PastAnswer(
            times,
            {key: [0.4] * steps for key in devices},
            {key: [30.0 * GIB] * steps for key in devices},
        )


async def test_periods_over_an_hour_come_from_prometheus(
    world: World, aiohttp_client: MakeClient
) -> None:
    plots = FakePlots(world)
    world.plots = plots
    world.add_shared("s", 4)
    name = world.have("p", "s", resource=SHARED)
    world.live({"s": [card(name, busy=0.1)]}, 12 * HOUR, every=600)
    client = await aiohttp_client(world.build_app())

    answer = await get(client, "/v1/advice", over="86400")
    (found,) = answer["cards"]

    assert plots.requested == [(1, 86400.0)]
    assert (answer["sources"], found["source"]) == (["prometheus"], "prometheus")
    assert (found["activity_ratio"], found["memory_bytes"]) == (0.4, 30 * GIB)
    # In half of the day the card had other tenants.
    assert found["looked_seconds"] == pytest.approx(12 * HOUR, abs=720)
    assert found["samples"] == pytest.approx(121, abs=2)


async def test_without_prometheus_the_last_hour_counts_with_a_note(
    world: World, aiohttp_client: MakeClient
) -> None:
    plots = FakePlots(world, error="cannot query Prometheus: HTTP 503")
    world.plots = plots
    for node in ("s", "t"):
        world.add_shared(node, 4, gpus=40)
    name = world.have("p", "s", resource=SHARED)
    world.live({"s": [card(name, busy=0.1)] + [card()] * 39, "t": [card()] * 40}, HOUR)
    client = await aiohttp_client(world.build_app())

    answer = await get(client, "/v1/advice", over="86400")

    assert (
        len(plots.requested) == 1
    )  # 80 cards in two batches: after a failed query no other is sent
    assert (answer["sources"], answer["note"]) == (["memory"], "cannot query Prometheus: HTTP 503")
    assert answer["samples"] == 60


@pytest.fixture
def reported(world: World) -> FakePlots:
    """Return the fake queries for a world with a shared card in use."""
    world.plots = plots = FakePlots(world)
    world.add_shared("s", 4)
    world.live({"s": [card(world.have("p", "s", resource=SHARED), busy=0.1)]}, HOUR)
    return plots


async def test_prometheus_is_queried_once_a_minute_for_all_callers(
    world: World, reported: FakePlots, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(world.build_app())

    spans = {
        (await get(client, "/v1/advice", over=str(over)))["over_seconds"]
        for over in range(70_000, 86_401, 100)
    }

    assert spans == {86400.0}
    assert reported.requested == [(1, 86400.0)]
    world.now += 60.0
    await get(client, "/v1/advice", over="86400")
    assert len(reported.requested) == 2
    for over in range(3_601, 2_592_001, 9_973):
        await get(client, "/v1/advice", over=str(over))
    assert len(reported.requested) <= 2 + 10


def test_the_oldest_answer_of_prometheus_is_the_first_to_go() -> None:
    cache = PrometheusCache(lambda: 0.0)
    empty = np.zeros((0, 0))
    samples = _Samples(source="", times=np.zeros(0), activity=empty, memory_bytes=empty)

    for at in range(_MOST_KEPT + 1):
        cache.put((float(at), ()), samples)

    found = [cache.get((float(at), ())) for at in range(_MOST_KEPT + 1)]
    assert found == [None, *[samples] * _MOST_KEPT]


@pytest.mark.parametrize(
    ("over", "hours"),
    [
        (3_601, 2),
        (7_201, 3),
        (10_801, 6),
        (21_601, 12),
        (43_201, 24),
        (86_401, 48),
        (172_801, 72),
        (259_201, 7 * 24),
        (604_801, 14 * 24),
        (1_209_601, 30 * 24),
    ],
)
async def test_a_period_is_rounded_up_so_that_callers_share_answers(
    world: World, reported: FakePlots, aiohttp_client: MakeClient, over: int, hours: int
) -> None:
    client = await aiohttp_client(world.build_app())

    answers = [
        (await get(client, "/v1/advice", over=str(it)))["over_seconds"]
        for it in (over, hours * 3600)
    ]

    assert answers == [hours * 3600.0] * 2
    assert len(reported.requested) == 1


async def test_a_span_of_our_own_memory_is_taken_as_it_is(
    world: World, reported: FakePlots, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(world.build_app())

    answer = await get(client, "/v1/advice", over="1000")

    assert (answer["over_seconds"], reported.requested) == (1000.0, [])


async def test_a_caller_with_too_many_requests_is_refused_and_others_are_answered(
    world: World, reported: FakePlots, aiohttp_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[FairQueue] = []

    def seen(*arguments: Any, **options: Any) -> FairQueue:
        turns.append(FairQueue(*arguments, **options))
        return turns[-1]

    monkeypatch.setattr(advice, "FairQueue", seen)
    client = await aiohttp_client(world.build_app())
    other = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    reported.hold = asyncio.Event()
    async with aiohttp.ClientSession(connector=other) as session:
        url = client.make_url("/v1/advice?over=86400")
        greedy = [asyncio.create_task(client.get(url.path_qs)) for _ in range(10)]
        await eventually(lambda: sum(task.done() for task in greedy) == 4)
        modest = asyncio.create_task(session.get(url))
        await eventually(lambda: "127.0.0.2" in turns[0]._queues)

        reported.hold.set()
        statuses = [(await task).status for task in greedy]
        assert (await modest).status == 200

    assert sorted(statuses) == [200] * 6 + [429] * 4
