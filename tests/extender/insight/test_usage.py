"""GPU-hours and costs of pods, including ended ones."""

import asyncio
from dataclasses import replace

import pytest

from extender.core.devices.readings import Signal
from extender.core.nodes.inventory import PodPhase
from extender.insight.usage import _HOUR, _SWEEP_SECONDS, UsageRecord, _Group
from extender.runtime.metrics import Metrics
from testkit.api_requests import get
from testkit.others import SeesTeam
from testkit.webhook_requests import MakeClient
from testkit.world import World

H100 = _Group("team", "Job", "H100 80GB HBM3")


def busy_and_idle() -> World:
    """Return a world where a Job keeps two GPUs busy, and a pod without an owner holds two."""
    world = World()
    for name in ("busy", "idle"):
        world.add_node(name, 2)
    train = world.bind("train", "busy", 2, on=[world.card("busy", 0), world.card("busy", 1)],
                       namespace="team", owner="Job train")  # fmt: skip
    for device in world.devices.values():
        device.values[Signal.GPU_UTILIZATION] = 0.9 if train.key in device.tenants else 0.0
    world.bind("notebook", "idle", 2, on=[world.card("idle", 0), world.card("idle", 1)],
               namespace="hidden")  # fmt: skip
    world.read()
    return world


def pass_time(world: World, record: UsageRecord, seconds: float) -> None:
    """Advance the clock, with readings and a sweep each minute."""
    for _ in range(int(seconds / _SWEEP_SECONDS)):
        world.read_after(_SWEEP_SECONDS)
        world.why.idleness.look()
        asyncio.run(record.sweep())


def test_hours_of_running_and_ended_pods_are_within_a_percent() -> None:
    world = busy_and_idle()
    metrics = Metrics()
    world.why.set_prices({"H100": 2.0})
    for device in world.devices.values():
        device.info = replace(device.info, model="NVIDIA H100 80GB HBM3")
    world.read()
    world.why.idleness.look()
    record = UsageRecord(world.fleet, world.why.holders, world.clock, metrics)

    pass_time(world, record, 2 * _HOUR)
    train = world.fleet.pods["uid-train"]
    world.clock.now += 30
    world.end(train)
    pass_time(world, record, _HOUR)

    found = record.since(24 * _HOUR)
    assert found[H100].gpu_hours == pytest.approx(2 * (2 + 30 / _HOUR), rel=0.01)
    assert found[H100].gpu_hours_idle == 0
    assert found[H100].cost == pytest.approx(2 * found[H100].gpu_hours)
    held = found[_Group("hidden", "none", "H100 80GB HBM3")]
    assert held.gpu_hours == pytest.approx(2 * (3 + 30 / _HOUR), rel=0.01)
    assert held.gpu_hours_idle == pytest.approx(held.gpu_hours, rel=0.02)
    labels = {"namespace": "team", "owner_kind": "Job", "model": "h100", "use": "used"}
    counted = metrics.registry.get_sample_value("idlegpu_gpu_hours_total", labels)
    assert counted == pytest.approx(found[H100].gpu_hours)
    assert held.cost == pytest.approx(2 * held.gpu_hours)
    assert found[H100].cost_idle == 0
    for namespace, group in (("team", found[H100]), ("hidden", held)):
        for use, hours in (
            ("idle", group.gpu_hours_idle),
            ("used", group.gpu_hours - group.gpu_hours_idle),
        ):
            labels = {"namespace": namespace, "use": use}
            assert counted_in(metrics, "idlegpu_gpu_hours_total", **labels) == pytest.approx(hours)
            cost = counted_in(metrics, "idlegpu_gpu_cost_total", **labels)
            assert cost == pytest.approx(2 * hours)


def test_only_whole_hours_from_the_requested_time_count() -> None:
    world = busy_and_idle()
    record = UsageRecord(world.fleet, world.why.holders, world.clock)
    pass_time(world, record, 5 * _HOUR)

    group = _Group("team", "Job", "other")
    hours = 2 + world.clock.now % _HOUR / _HOUR
    assert record.since(2 * _HOUR)[group].gpu_hours == pytest.approx(2 * hours, abs=0.05)
    assert record.since(24 * _HOUR)[group].gpu_hours == pytest.approx(2 * 5, rel=0.01)
    assert record.since(0)[group].gpu_hours == pytest.approx(2 * (hours - 2), abs=0.05)
    assert (record.since(0)[group].cost, record.since(0)[group].cost_idle) == (0, 0)


def test_a_clock_that_is_set_back_adds_nothing() -> None:
    world = busy_and_idle()
    record = UsageRecord(world.fleet, world.why.holders, world.clock)
    pass_time(world, record, 600)
    before = record.since(_HOUR)[_Group("team", "Job", "other")].gpu_hours

    world.clock.now -= 300
    asyncio.run(record.sweep())

    assert record.since(_HOUR)[_Group("team", "Job", "other")].gpu_hours == before
    pass_time(world, record, 60)
    hours = record.since(_HOUR)[_Group("team", "Job", "other")].gpu_hours
    assert hours == pytest.approx(before + 2 * 60 / _HOUR)


def test_a_gpu_is_idle_from_the_last_sweep_that_saw_it_active() -> None:
    world = busy_and_idle()
    record = UsageRecord(world.fleet, world.why.holders, world.clock)
    group = _Group("team", "Job", "other")
    pass_time(world, record, 600)
    assert record.since(_HOUR)[group].gpu_hours_idle == 0

    world.card("busy", 0).values[Signal.GPU_UTILIZATION] = 0.0
    pass_time(world, record, 600)

    assert record.since(_HOUR)[group].gpu_hours == pytest.approx(2 * 1200 / _HOUR)
    assert record.since(_HOUR)[group].gpu_hours_idle == pytest.approx(600 / _HOUR)


def test_a_gpu_is_in_the_gauge_of_an_hours_idleness_after_just_an_hour() -> None:
    world = busy_and_idle()
    metrics = Metrics()
    record = UsageRecord(world.fleet, world.why.holders, world.clock, metrics)
    world.why.idleness.look()

    pass_time(world, record, _HOUR - 60)
    assert counted_in(metrics, "idlegpu_held_hour_idle_gpus") == 0
    pass_time(world, record, 60)
    assert counted_in(metrics, "idlegpu_held_hour_idle_gpus") == 2


def test_usage_is_kept_for_so_many_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extender.insight.usage._KEPT_HOURS", 2)
    world = busy_and_idle()
    record = UsageRecord(world.fleet, world.why.holders, world.clock)
    group = _Group("team", "Job", "other")

    pass_time(world, record, 600)
    assert record.since(24 * _HOUR)[group].gpu_hours == pytest.approx(2 * 600 / _HOUR)
    pass_time(world, record, 3 * _HOUR)

    hours = 1 + 600 / _HOUR  # the whole last one, and the part of the present one
    assert record.since(24 * _HOUR)[group].gpu_hours == pytest.approx(2 * hours, rel=0.02)


def test_the_groups_in_the_metrics_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extender.insight.usage._MAX_GROUPS", 1)
    world = busy_and_idle()
    record = UsageRecord(world.fleet, world.why.holders, world.clock)

    pass_time(world, record, 120)

    assert len(record.since(_HOUR)) == 2
    assert _Group("other", "other", "other") in record.since(_HOUR)


async def test_a_caller_sees_the_usage_of_the_namespaces_that_it_may_read(
    aiohttp_client: MakeClient,
) -> None:
    world = busy_and_idle()
    for _ in range(10):
        world.read_after(_SWEEP_SECONDS)
        world.why.idleness.look()
        await world.why.usage.sweep()
    client = await aiohttp_client(world.build_app(viewer=SeesTeam()))

    answer = await get(client, "/v1/usage", since="86400")

    assert [row["namespace"] for row in answer["usage"]] == ["team"]
    hours = pytest.approx(2 * 540 / _HOUR)
    figures = {"gpu_hours": hours, "gpu_hours_idle": 0.0, "cost": 0.0, "cost_idle": 0.0}
    assert answer == {
        "at": "2027-01-15T08:10:00.000+00:00",
        "since": "2027-01-15T08:01:00.000+00:00",
        "is_priced": False,
        "usage": [{**figures, "namespace": "team", "owner_kind": "Job", "model": "other"}],
        "sums": figures,
    }
    hidden = await get(client, "/v1/usage", namespace="hidden")
    assert (hidden["usage"], set(hidden["sums"].values())) == ([], {0.0})
    await get(client, "/v1/usage", 400, since="60")


async def test_groups_with_most_idle_hours_come_first_equal_ones_by_name(
    aiohttp_client: MakeClient,
) -> None:
    world = busy_and_idle()
    for node, namespace in (("other-1", "z"), ("other-2", "a")):
        world.add_node(node, 1)
        world.bind(f"pod-{namespace}", node, on=[world.card(node)], namespace=namespace)
    world.why.set_prices({"H100": 2.0})
    for device in world.devices.values():
        device.info = replace(device.info, model="NVIDIA H100 80GB HBM3")
    world.read()
    for _ in range(5):
        world.read_after(_SWEEP_SECONDS)
        world.why.idleness.look()
        await world.why.usage.sweep()
    client = await aiohttp_client(world.build_app())

    answer = await get(client, "/v1/usage")
    named = await get(client, "/v1/usage", namespace="z")

    assert [row["namespace"] for row in answer["usage"]] == ["hidden", "a", "z", "team"]
    assert [row["namespace"] for row in named["usage"]] == ["z"]
    for name, value in answer["sums"].items():
        assert 0 < value == pytest.approx(sum(row[name] for row in answer["usage"]))
    assert answer["since"] == "2027-01-15T08:00:00.000+00:00"  # when the record began


@pytest.mark.parametrize(
    ("ended_after", "seconds"),
    [
        pytest.param(6.0, 6.0, id="in-between"),
        pytest.param(-3.0, 0.0, id="before-the-last-sweep"),
        pytest.param(90.0, 60.0, id="later-by-its-nodes-clock"),
        pytest.param(None, 30.0, id="unknown"),
    ],
)
def test_a_pod_that_ends_between_sweeps_counts_up_to_its_end(
    ended_after: float | None, seconds: float
) -> None:
    world = busy_and_idle()
    record = UsageRecord(world.fleet, world.why.holders, world.clock)
    pass_time(world, record, 60)
    train = world.fleet.pods["uid-train"]
    if ended_after is None:
        world.fleet.remove_pod(train.uid, world.now)
    else:
        world.end(train, phase=PodPhase.FAILED, ended_at=world.now + ended_after)
    world.clock.now += 60
    world.read()
    asyncio.run(record.sweep())

    hours = record.since(_HOUR)[_Group("team", "Job", "other")].gpu_hours
    assert hours == pytest.approx(2 * (60 + seconds) / _HOUR)


def counted_in(metrics: Metrics, name: str, **labels: str) -> float:
    """Sum a metric over its series with these labels."""
    return sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def test_metrics_match_costs_and_holders(aiohttp_client: MakeClient) -> None:
    world = busy_and_idle()
    metrics = Metrics()
    record = UsageRecord(world.fleet, world.why.holders, world.clock, metrics)
    client = await aiohttp_client(world.build_app())
    for _ in range(round(4 * _HOUR / _SWEEP_SECONDS)):
        world.read_after(_SWEEP_SECONDS)
        world.why.idleness.look()
        await record.sweep()

    costs = (await get(client, "/v1/costs"))["sums"]
    idle_for_an_hour = (await get(client, "/v1/holders", some="true"))["sums"]

    assert counted_in(metrics, "idlegpu_held_gpus") == costs["gpus"] == 4
    assert counted_in(metrics, "idlegpu_held_idle_gpus") == costs["gpus_idle"] == 2
    hour_idle = counted_in(metrics, "idlegpu_held_hour_idle_gpus")
    assert hour_idle == idle_for_an_hour["gpus_idle"] == 2
    hours = counted_in(metrics, "idlegpu_gpu_hours_total")
    assert hours == pytest.approx(costs["gpu_hours"], rel=0.01)
    idle_hours = counted_in(metrics, "idlegpu_gpu_hours_total", use="idle")
    assert idle_hours == pytest.approx(costs["gpu_hours_idle"], rel=0.01)
    assert counted_in(metrics, "idlegpu_held_idle_gpus", namespace="team") == 0


def test_mig_instances_have_gauges_apart_from_gpus() -> None:
    world = busy_and_idle()
    device = world.card("idle", 1)
    device.info = replace(device.info, mig_profile="3g.40gb")
    world.read()
    metrics = Metrics()
    record = UsageRecord(world.fleet, world.why.holders, world.clock, metrics)

    pass_time(world, record, 120)

    assert counted_in(metrics, "idlegpu_held_gpus", namespace="hidden", device="gpu") == 1
    assert counted_in(metrics, "idlegpu_held_gpus", namespace="hidden", device="mig") == 1


def test_a_group_without_pods_has_no_gauges() -> None:
    world = busy_and_idle()
    metrics = Metrics()
    record = UsageRecord(world.fleet, world.why.holders, world.clock, metrics)
    pass_time(world, record, 120)
    assert counted_in(metrics, "idlegpu_held_gpus", namespace="team") == 2

    world.end(world.fleet.pods["uid-train"])
    pass_time(world, record, 60)

    assert counted_in(metrics, "idlegpu_held_gpus", namespace="team") == 0
    assert counted_in(metrics, "idlegpu_held_gpus") == 2
