"""Pods that hold GPUs without using them."""

from datetime import UTC, datetime

import pytest

from extender.core.devices.readings import DeviceInfo, Signal
from extender.insight.holder_sums import HeldDevice
from extender.insight.holders import _device_view, _span
from testkit.api_requests import get
from testkit.builders import GPU
from testkit.cards import BUSY, HOUR, Gpu, card
from testkit.others import SeesTeam
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World


def at(text: str) -> float:
    return datetime.fromisoformat(text).astimezone(UTC).timestamp()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


async def test_pod_that_uses_no_gpu_is_listed(world: World, client: Client) -> None:
    cards = {"n": [card("team/nb", used_gib=2.0), card("team/nb"), card()]}
    world.add(cards)
    world.hold("nb", "n", 2)
    world.live(cards, 2 * HOUR)

    answer = await get(client, "/v1/holders")
    (holder,) = answer["holders"]

    assert (answer["total"], answer["unknown"], answer["idle_for_seconds"]) == (1, 0, 3600.0)
    assert (answer["active_from_ratio"], answer["is_priced"]) == (0.02, False)
    assert at(answer["watched_since"]) == pytest.approx(world.now - 2 * HOUR + 60)
    idle_seconds = 2 * HOUR - 60

    def device(index: int, used: int) -> dict[str, object]:
        return {
            "index": index,
            "uuid": f"GPU-n-{index}",
            "gpu_instance_id": "",
            "utilization_ratio": 0.0,
            "memory_used_bytes": used,
            "idle_seconds": idle_seconds,
            "tenants": 1,
            "processes": None,
        }

    assert holder == {
        "pod": "team/nb",
        "uid": "uid-nb",
        "owner": "StatefulSet notebook",
        "node": "n",
        "resources": {GPU: 2},
        "gpus": 2,
        "gpus_idle": 2,
        "gpus_in_use": 0,
        "mig_instances": 0,
        "mig_instances_idle": 0,
        "mig_instances_in_use": 0,
        "bound_at": "2027-01-15T07:50:30.000+00:00",
        "held_seconds": 2 * HOUR + 600,
        "idle_seconds": idle_seconds,
        "is_at_least": True,
        "gpu_hours": pytest.approx(2 * (2 + 1 / 6)),
        "gpu_hours_idle": pytest.approx(2 * (2 - 1 / 60)),
        "cost": None,
        "cost_used": None,
        "cost_idle": None,
        "memory_used_bytes": 2 << 30,
        "why": "no activity on 2 of 2 GPUs for at least 1 h 59 min, 2.0 GiB of memory held",
        "devices": [device(0, 2 << 30), device(1, 0)],
    }


@pytest.mark.parametrize(
    ("mib", "words"),
    [
        pytest.param((0, 127), "almost no memory held", id="less than 64 MiB each"),
        pytest.param((128, 0), "0.1 GiB of memory held", id="as much"),
        pytest.param((0, None), "almost no memory held", id="one unknown"),
        pytest.param((None, None), "memory unknown", id="both unknown"),
    ],
)
async def test_memory_that_the_driver_itself_uses_counts_as_none(
    world: World, client: Client, mib: tuple[int | None, ...], words: str
) -> None:
    used = [None if it is None else it / 1024 for it in mib]
    signs = {Signal.PROCESSES: 2.0}
    cards = {"n": [Gpu(used_gib=gib, tenants=("team/nb",), signs=signs) for gib in used]}
    world.add(cards)
    world.hold("nb", "n", 2)
    world.live(cards, 2 * HOUR)

    (holder,) = (await get(client, "/v1/holders"))["holders"]

    assert holder["why"].endswith(f"1 h 59 min, 4 processes there, {words}")


@pytest.mark.parametrize(
    ("processes", "used_gib", "reported"),
    [
        pytest.param(0.0, 0.0, "no process there, almost no memory held", id="none"),
        pytest.param(1.0, 3.0, "1 process there, 3.0 GiB of memory held", id="one"),
        pytest.param(2.0, None, "2 processes there, memory unknown", id="two"),
        # A source that lists no processes does not show that there are none.
        pytest.param(None, 0.0, "almost no memory held", id="not-listed"),
        pytest.param(None, None, "memory unknown", id="nothing-known"),
    ],
)
async def test_the_reason_for_idleness_states_only_observations(
    world: World, client: Client, processes: float | None, used_gib: float | None, reported: str
) -> None:
    signs = {} if processes is None else {Signal.PROCESSES: processes}
    cards = {"n": [Gpu(used_gib=used_gib, tenants=("team/nb",), signs=signs)]}
    world.add(cards)
    world.hold("nb", "n", 1)
    world.live(cards, 2 * HOUR)

    (holder,) = (await get(client, "/v1/holders"))["holders"]

    assert holder["why"] == f"no activity on 1 of 1 GPUs for at least 1 h 59 min, {reported}"
    assert holder["devices"][0]["processes"] == processes
    assert (holder["memory_used_bytes"] is None) == (used_gib is None)


async def test_processes_that_were_listed_long_ago_are_not_reported(
    world: World, client: Client
) -> None:
    cards = {"n": [Gpu(tenants=("team/nb",), signs={Signal.PROCESSES: 0.0})]}
    world.add(cards)
    world.hold("nb", "n", 1)
    world.live(cards, 2 * HOUR)
    world.live({"n": [card("team/nb")]}, 10 * 60)  # by a source that lists none

    (holder,) = (await get(client, "/v1/holders"))["holders"]

    assert "process" not in holder["why"]


@pytest.mark.parametrize(("age", "processes"), [(0.0, 0), (120.0, 0), (120.1, None)])
async def test_processes_count_as_long_as_their_reading_is_fresh(
    world: World, client: Client, age: float, processes: int | None
) -> None:
    assert world.policy.freshness.max_age_seconds == 120.0
    cards = {"n": [Gpu(tenants=("team/nb",), signs={Signal.PROCESSES: 0.0})]}
    world.add(cards)
    world.hold("nb", "n", 1)
    world.live(cards, 2 * HOUR)
    world.now += age

    (holder,) = (await get(client, "/v1/holders"))["holders"]

    assert holder["devices"][0]["processes"] == processes


async def test_activity_ends_idleness_and_idleness_counts_from_its_end(
    world: World, client: Client
) -> None:
    working, resting = {"n": [card("team/nb", busy=0.5)]}, {"n": [card("team/nb")]}
    world.add(resting)
    world.hold("nb", "n", 1)
    world.live(resting, 2 * HOUR)
    world.live(working, 60)

    assert (await get(client, "/v1/holders"))["holders"] == []

    world.live(resting, 2 * HOUR)
    (holder,) = (await get(client, "/v1/holders"))["holders"]

    assert holder["idle_seconds"] == pytest.approx(2 * HOUR, abs=60)
    assert holder["is_at_least"] is False


async def test_activity_between_two_sweeps_shows_in_the_mean(world: World, client: Client) -> None:
    resting = {"n": [card("team/nb")]}
    world.add(resting)
    world.hold("nb", "n", 1)
    world.live(resting, 2 * HOUR)
    world.now += 10
    world.report({"n": [card("team/nb", busy=1.0)]})
    world.live(resting, 120, every=10)

    assert (await get(client, "/v1/holders"))["holders"] == []


async def test_pod_that_uses_one_of_two_gpus_is_listed_only_on_request(
    world: World, client: Client
) -> None:
    cards = {"n": [card("team/nb"), card("team/nb", busy=0.9)]}
    world.add(cards)
    world.hold("nb", "n", 2)
    world.live(cards, 2 * HOUR)

    assert (await get(client, "/v1/holders"))["holders"] == []
    (holder,) = (await get(client, "/v1/holders", some="true"))["holders"]

    assert (holder["gpus_idle"], holder["gpus_in_use"]) == (1, 1)
    assert holder["gpu_hours_idle"] == pytest.approx(2 * 0.5 * 2, rel=0.02)


async def test_nothing_is_claimed_of_a_gpu_that_no_source_measures(
    world: World, client: Client
) -> None:
    cards = {"n": [card("team/nb")]}
    world.add(cards)
    world.hold("nb", "n", 1)
    world.live(cards, 60)
    world.watch(2 * HOUR)  # no reading any more

    assert (await get(client, "/v1/holders"))["holders"] == []


async def test_a_pod_whose_gpus_no_source_names_is_unknown(world: World, client: Client) -> None:
    cards = {"n": [card(), card()]}
    world.add(cards)
    world.hold("nb", "n", 1)
    world.live(cards, 2 * HOUR)

    answer = await get(client, "/v1/holders")

    assert (answer["unknown"], answer["holders"]) == (1, [])
    unknown = [(await get(client, "/v1/holders", namespace=it))["unknown"] for it in ("team", "b")]
    assert unknown == [1, 0]


async def test_pod_with_an_unnamed_gpu_may_be_in_use(world: World, client: Client) -> None:
    cards = {"n": [card("team/nb"), card()]}
    world.add(cards)
    world.hold("nb", "n", 2)
    world.live(cards, 2 * HOUR)

    assert (await get(client, "/v1/holders"))["holders"] == []


async def test_a_pod_is_idle_no_longer_than_it_is_there(world: World, client: Client) -> None:
    cards = {"n": [card("team/nb")]}
    world.add(cards)
    world.live(cards, 5 * HOUR)
    world.hold("nb", "n", 1, bound_at=world.now - 60)

    assert (await get(client, "/v1/holders"))["holders"] == []
    (holder,) = (await get(client, "/v1/holders", idle_for="60"))["holders"]
    assert holder["is_at_least"] is False


async def test_every_holder_can_be_listed_and_says_whether_it_works(
    world: World, client: Client
) -> None:
    cards = {"n": [card("team/busy", busy=0.9)], "m": [card("team/idle")]}
    world.add(cards)
    world.hold("busy", "n", 1)
    world.hold("idle", "m", 1)
    world.live(cards, HOUR)

    idle, busy = (await get(client, "/v1/holders", idle_for="0"))["holders"]

    assert (idle["pod"], idle["gpus_idle"]) == ("team/idle", 1)
    assert (busy["pod"], busy["gpus_idle"], busy["why"]) == ("team/busy", 0, "uses its GPUs")
    assert (busy["idle_seconds"], busy["is_at_least"]) == (0.0, False)
    (longest,) = (await get(client, "/v1/holders", idle_for="0", limit="1"))["holders"]
    assert longest["pod"] == "team/idle"


async def test_a_pod_with_gpus_and_mig_instances_has_both(world: World, client: Client) -> None:
    resource = "nvidia.com/mig-3g.40gb"
    counts = {GPU: 1, resource: 1}
    world.add_node("n", 1, allocatable=counts, capacity=counts)
    world.add_instances("n", 1, ["3g.40gb"])
    on = [world.card("n"), world.card("n", 1, "7")]
    world.bind("both", "n", namespace="team", resources=counts, on=on)
    world.bind("lacks", "n", namespace="team", resources={resource: 2}, on=on[1:])
    world.read()
    for _ in range(3):
        world.read_after(60.0)
        world.why.idleness.look()

    holders = (await get(client, "/v1/holders", idle_for="0"))["holders"]

    both, lacks = sorted(holders, key=lambda one: one["pod"])
    assert (both["gpus"], both["mig_instances"]) == (1, 1)
    assert (both["gpus_idle"], both["mig_instances_idle"]) == (1, 1)
    assert both["why"].startswith("no activity on 1 of 1 GPUs and 1 of 1 MIG instances for ")
    assert [one["tenants"] for one in both["devices"]] == [1, 2]
    assert (lacks["gpus"], lacks["mig_instances"], lacks["mig_instances_idle"]) == (0, 2, 1)
    assert lacks["mig_instances_in_use"] == 1
    assert both["gpu_hours"] == pytest.approx((1 + 3 / 7) * 180 / HOUR)


async def test_gpus_of_claims_count_for_each_of_their_pods(world: World, client: Client) -> None:
    world.add_node("n", 2)
    device = world.card("n")
    for name, on in (("one", [device]), ("two", [device, world.card("n", 1)])):
        world.bind(name, "n", namespace="team", resources={}, has_claims=True, on=on)
    world.read()
    for _ in range(3):
        world.read_after(60.0)
        world.why.idleness.look()

    holders = (await get(client, "/v1/holders", idle_for="0"))["holders"]

    hours = {one["pod"]: one["gpu_hours"] for one in holders}
    assert hours["team/one"] == pytest.approx(0.5 * 180 / HOUR)
    assert hours["team/two"] == pytest.approx(1.5 * 180 / HOUR)
    assert (await get(client, "/v1/holders"))["unknown"] == 0


async def test_a_gpu_that_is_newer_than_the_snapshot_has_no_values(world: World) -> None:
    world.add({"n": [BUSY]})
    snapshot = world.fleet.snapshot()
    device = HeldDevice(
        row=len(snapshot.telemetry.latest),
        info=DeviceInfo(node="n", uuid="GPU-new"),
        idle_seconds=0.0,
        is_at_least=False,
        tenants=1,
    )

    view = _device_view(device, snapshot, None)

    assert (view.utilization_ratio, view.memory_used_bytes) == (None, None)


async def test_pods_that_the_caller_may_not_read_have_no_names(
    world: World, aiohttp_client: MakeClient
) -> None:
    cards = {"n": [card("other/secret")]}
    world.add(cards)
    world.hold("secret", "n", 1, "other")
    world.live(cards, 2 * HOUR)
    client = await aiohttp_client(world.build_app(viewer=SeesTeam()))

    answer = await get(client, "/v1/holders")
    (holder,) = answer["holders"]

    assert "secret" not in str(answer)
    assert (holder["pod"], holder["owner"]) == ("another pod", None)
    assert answer["sums"]["pods"] == 0
    named = await get(client, "/v1/holders", namespace="other")
    assert (named["holders"], named["unknown"], named["total"]) == ([], 0, 0)


@pytest.mark.parametrize("value", ["-1", "x", "1e9", "99999999"])
async def test_bad_time_is_refused_with_allowed_values(client: Client, value: str) -> None:
    error = (await get(client, "/v1/holders", 400, idle_for=value))["error"]

    assert error == f"idle_for={value!r} must be a whole number from 0 to 2592000"


def test_changing_devices_keep_the_idle_times_of_others(world: World) -> None:
    world.add({"n": [card("team/nb")]})
    world.why.idleness.look()
    world.add({"m": [BUSY]})
    world.why.idleness.look()

    assert world.why.idleness.last_used(0)[1] is True
    assert world.why.idleness.last_used(1) == (world.now, False)
    assert world.why.idleness.last_used(10_000) == (world.now, True)


@pytest.mark.parametrize(("busy", "is_used"), [(0.02, True), (0.019, False)])
def test_a_new_gpu_is_used_from_two_percent(world: World, busy: float, is_used: bool) -> None:
    world.add({"n": [card("team/nb", busy=busy)]})

    world.why.idleness.look()

    assert world.why.idleness.last_used(0) == (world.now, not is_used)


def test_a_gpu_is_used_while_its_mean_rises(world: World) -> None:
    idleness = world.why.idleness
    cards = {"n": [card("team/nb", busy=0.018), card("team/nb")]}
    world.add({"n": [card("team/nb"), card("team/nb")]})
    idleness.look()
    began = world.now
    world.now += 10.0
    world.report(cards)
    idleness.look()
    assert idleness.last_used(0) == (world.now, False)  # more than before
    assert idleness.last_used(1) == (began, True)

    world.now += 10.0
    assert idleness.idle_rows(10.0) == [0, 1]
    assert idleness.idle_rows(10.1) == [1]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (61, "1 min 1 s"), (7200, "2 h"), (86_400 * 3 + 5, "3 d")]
)
def test_time_spans_have_two_units_at_most(seconds: float, words: str) -> None:
    assert _span(seconds) == words
