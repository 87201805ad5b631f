"""Test how the fleet uses reports of node agents, alone and beside Prometheus."""

from dataclasses import replace

import numpy as np
import pytest

from extender.answers.fleet import SourceAnswer
from extender.core.decision.filtering import Code
from extender.core.devices.readings import NO_INSTANCES, DeviceInfo, Signal
from extender.core.policy import Policy
from extender.core.steps import finish
from extender.fleet.registry import _MOST_ON_NODE
from extender.fleet.snapshots import _MAX_READ_NODES, _NEW_READINGS_SECONDS
from extender.insight.views import gpus_of
from testkit.agent.fleet_reports import HOLD, NAN, Agents, windows
from testkit.builders import GIB, GPU, NOW, request
from testkit.world import Device, World, one_node
from tests.extender.fleet.changes import columns


@pytest.fixture
def agents() -> Agents:
    made = World()
    made.add_node("node", 2)
    return Agents(made)


def source(world: World, device: Device, signal: Signal) -> str:
    row = world.fleet.store.row_of(device.info.key)
    assert row is not None
    found = world.fleet.store.reported([signal], row)
    return "" if found is None else found[0]


# --- one source -----------------------------------------------------------------------------------


def test_without_prometheus_agents_alone_are_enough(agents: Agents) -> None:
    agents.report(GRAPHICS_ACTIVE=0.9)

    made = agents.world
    assert made.estimated(made.card(), "latest") == pytest.approx(0.9)
    assert made.estimated(made.card(), "freshness") == 1.0
    assert made.fleet.sources["agent"].devices == 2


def test_an_agents_report_says_nothing_about_other_nodes(agents: Agents) -> None:
    made = agents.world
    made.add_node("other", 2)
    made.read(GRAPHICS_ACTIVE=0.4)

    agents.report("node", GRAPHICS_ACTIVE=0.9)

    assert made.estimated(made.card("other"), "latest") == pytest.approx(0.4)
    assert made.estimated(made.card("node"), "latest") == pytest.approx(0.9)


def test_a_device_that_prometheus_does_not_know_exists(agents: Agents) -> None:
    made = agents.world
    made.read()
    other = DeviceInfo(node="node", uuid="GPU-new", index=7, model="NVIDIA H200")

    agents.report("node", *(one.info for one in made.devices.values()), other)

    row = made.fleet.store.row_of(other.key)
    assert row is not None
    assert row in made.fleet.store.rows_of_node("node")


def test_a_card_with_mig_but_no_instances_takes_no_pod_and_its_health_counts(
    agents: Agents,
) -> None:
    made = agents.world
    undivided = DeviceInfo(node="node", uuid="GPU-mig", index=2, mig_profile=NO_INSTANCES)
    infos = [one.info for one in made.devices.values()]

    agents.report("node", *infos, undivided)
    shown = gpus_of(made.fleet, made.fleet.snapshot(), ["node"])["node"]
    assert [gpu.uuid for gpu in shown] == [info.uuid for info in infos]
    assert made.rank().feasible == 1
    agents.report("node", undivided, XID=79.0, xid_age=1.0)

    assert made.rank().codes.tolist() == [Code.UNHEALTHY]


# --- two sources ----------------------------------------------------------------------------------


def test_the_latest_measurement_counts_not_the_latest_answer(agents: Agents) -> None:
    made = agents.world
    agents.report(GRAPHICS_ACTIVE=0.0)

    made.read(
        measured_at=NOW - 45.0, GRAPHICS_ACTIVE=0.9, GPU_UTILIZATION=0.9, MEMORY_USED=60 * GIB
    )

    assert made.estimated(made.card(), "latest") == 0.0
    assert made.estimated(made.card(), "memory_used") == 0.0
    assert made.fleet.store.activity_sources(np.array([0]))[0] == ("agent",)


def test_an_agent_that_is_silent_for_lack_of_changes_still_counts(agents: Agents) -> None:
    made = agents.world
    agents.report(GRAPHICS_ACTIVE=0.0)
    made.clock.now += HOLD - 1.0

    made.read(GRAPHICS_ACTIVE=0.9)

    assert made.estimated(made.card(), "latest") == 0.0


def test_prometheus_replaces_a_silent_agent(agents: Agents) -> None:
    made = agents.world
    agents.report(GRAPHICS_ACTIVE=0.0)
    made.clock.now += HOLD + 1.0

    made.read(GRAPHICS_ACTIVE=0.9)

    assert made.estimated(made.card(), "latest") == pytest.approx(0.9)
    assert made.fleet.store.activity_sources(np.array([0]))[0] == ("prometheus",)
    agents.report(GRAPHICS_ACTIVE=0.2, GPU_UTILIZATION=0.2)
    assert made.estimated(made.card(), "latest") == pytest.approx(0.2)


def test_a_silent_agent_leaves_the_holders_of_its_devices_unknown_at_once() -> None:
    world = World(in_steps=True)
    world.add_node("node", 2)
    agents = Agents(world)
    for _ in range(3):
        world.clock.now += 10.0
        agents.report(GRAPHICS_ACTIVE=0.9, MEMORY_USED=60 * GIB, MEMORY_FREE=20 * GIB)
    world.bind("a")
    world.fleet.snapshot_of_all()
    assert world.estimated(world.card(), "is_foreign")
    world.clock.now += world.policy.freshness.max_age_seconds
    finish(world.fleet.refresh_in_steps())
    world.clock.now += 1.0

    world.fleet.expire_silent()
    finish(world.fleet.settle_in_steps())

    telemetry = world.fleet.snapshot().telemetry
    assert columns(telemetry) == columns(world.fleet.snapshot_of_all().telemetry)


def test_the_replacing_source_reports_foreign_use_and_fills_the_window(agents: Agents) -> None:
    made = agents.world
    for _ in range(3):
        made.clock.now += 1.0
        agents.report(GRAPHICS_ACTIVE=0.9, GPU_UTILIZATION=0.9)
    assert made.estimated(made.card(), "is_foreign") == 1.0

    made.read_after(10.0, 6, GRAPHICS_ACTIVE=0.0, GPU_UTILIZATION=0.0)

    assert made.estimated(made.card(), "is_foreign") == 0.0
    assert windows(made, made.card())[2] == 4  # values from before the takeover do not count


def test_a_silent_prometheus_does_not_affect_agents(agents: Agents) -> None:
    made = agents.world
    made.read(GRAPHICS_ACTIVE=0.9)
    for _ in range(60):
        made.clock.now += 10.0
        agents.report(GRAPHICS_ACTIVE=0.1, GPU_UTILIZATION=0.1)

    assert made.estimated(made.card(), "latest") == pytest.approx(0.1)
    assert made.estimated(made.card(), "freshness") == 1.0


def test_a_signal_of_only_one_source_comes_from_that_source(agents: Agents) -> None:
    made = agents.world
    agents.report(NVLINKS_DOWN=1.0)
    made.read(measured_at=NOW - 45.0, HEALTH_STATUS=10.0)

    assert source(made, made.card(), Signal.HEALTH_STATUS) == "prometheus"
    for signal in (Signal.NVLINKS_DOWN, Signal.GRAPHICS_ACTIVE, Signal.MEMORY_USED):
        assert source(made, made.card(), signal) == "agent"
    assert made.estimated(made.card(), "is_excluded_multi") == 1.0


def test_newer_activity_of_another_source_replaces_old_activity(agents: Agents) -> None:
    made = agents.world
    made.read(measured_at=NOW - 20.0, TENSOR_ACTIVE=0.9, GRAPHICS_ACTIVE=0.9)

    agents.report(GRAPHICS_ACTIVE=0.0)
    assert made.estimated(made.card(), "latest") == 0.0

    made.read(measured_at=NOW - 15.0)
    assert made.estimated(made.card(), "latest") == 0.0


def test_activity_of_the_same_moment_is_combined(agents: Agents) -> None:
    made = agents.world
    agents.report(GRAPHICS_ACTIVE=0.0)

    made.read(measured_at=NOW - 1.0, TENSOR_ACTIVE=0.9, GRAPHICS_ACTIVE=0.0)

    assert made.estimated(made.card(), "latest") == pytest.approx(0.9)


def test_activity_that_an_agent_cannot_measure_does_not_replace_its_own(agents: Agents) -> None:
    made = agents.world
    made.read(GPU_UTILIZATION=0.9, GRAPHICS_ACTIVE=0.9)
    for age in (0.0, 1.5, 1.5, 5.0, 5.0):
        made.clock.now += 2.0

        agents.report(age=age, GPU_UTILIZATION=0.2, GRAPHICS_ACTIVE=NAN)
        made.read(measured_at=made.clock.now, GPU_UTILIZATION=0.9, GRAPHICS_ACTIVE=0.9)

        assert source(made, made.card(), Signal.GPU_UTILIZATION) == "agent"
        assert made.fleet.store.activity_sources(np.array([0]))[0] == ("agent",)

    assert made.estimated(made.card(), "latest") == pytest.approx(0.2)


def test_newer_evidence_beside_an_agents_activity_does_not_name_its_source(agents: Agents) -> None:
    made = agents.world
    agents.report(GRAPHICS_ACTIVE=0.0)
    made.clock.now += 1.0

    made.read(measured_at=made.clock.now, GRAPHICS_ACTIVE=0.0, TENSOR_ACTIVE=0.0)

    (gpu, _) = gpus_of(made.fleet, made.fleet.snapshot(), ["node"])["node"]
    assert gpu.source == "agent"
    assert gpu.signals["utilization"].source == "agent"
    assert gpu.signals["utilization"].age_seconds == pytest.approx(1.0)


def test_used_and_free_memory_come_from_one_source(agents: Agents) -> None:
    made = agents.world
    made.read(measured_at=NOW - 45.0, MEMORY_USED=10 * GIB, MEMORY_FREE=70 * GIB)

    agents.report(MEMORY_USED=60 * GIB, MEMORY_FREE=20 * GIB)
    made.read(measured_at=NOW - 40.0)

    assert made.estimated(made.card(), "memory_used") == pytest.approx(0.75)
    assert made.estimated(made.card(), "memory_free_bytes") == 20 * GIB


def test_the_api_names_source_and_age_of_activity_and_memory(agents: Agents) -> None:
    made = agents.world
    agents.report(age=2.0, GRAPHICS_ACTIVE=0.3)
    made.read(measured_at=NOW - 45.0)

    (gpu, _) = gpus_of(made.fleet, made.fleet.snapshot(), ["node"])["node"]

    assert (gpu.source, gpu.age_seconds) == ("agent", 2.0)
    measured = SourceAnswer(source="agent", age_seconds=2.0)
    assert (gpu.signals["utilization"], gpu.signals["memory"]) == (measured, measured)


def test_two_descriptions_of_a_device_do_not_alternate(agents: Agents) -> None:
    made = agents.world
    infos = [
        replace(one.info, model="NVIDIA H100 80GB HBM3", driver_version="")
        for one in made.devices.values()
    ]
    for one in made.devices.values():
        one.info = replace(one.info, driver_version="580")
    agents.report("node", *infos)
    made.read()
    info = made.fleet.store.info(0)
    made.fleet.snapshot()
    changed = []
    for _ in range(3):
        made.clock.now += 1.0
        before = made.row()
        agents.report("node", *infos)
        made.read(measured_at=made.clock.now - 45.0)
        changed.append(made.row() is not before)

    assert info is not None
    assert (info.model, info.driver_version) == ("NVIDIA H100 80GB HBM3", "580")
    assert made.fleet.store.info(0) == info
    assert changed == [False] * 3


# --- the node of a device -------------------------------------------------------------------------


def test_a_node_cannot_take_another_nodes_device(agents: Agents) -> None:
    made = agents.world
    made.add_node("evil", 1)
    agents.report("node")
    stolen = replace(made.card("node").info, node="evil")

    agents.report("evil", made.card("evil").info, stolen, GRAPHICS_ACTIVE=0.9)

    assert made.estimated(made.card("node"), "latest") == 0.0
    assert made.estimated(made.card("evil"), "latest") == pytest.approx(0.9)
    assert made.fleet.contested == 1
    assert made.fleet.store.rows_of_node("node") == [0, 1]


def test_a_contested_device_hides_no_other_of_the_report(agents: Agents) -> None:
    made = agents.world
    made.add_node("other", 2)
    agents.report("node")
    agents.report("other")
    first = made.card("node").info
    assert made.fleet.store.row_of(first.key) == 0

    stolen = replace(made.card("other").info, node="node")
    agents.report("node", first, stolen, made.card("node", 1).info, GRAPHICS_ACTIVE=0.9)

    latest = [
        made.estimated(made.card(node, index), "latest")
        for node in ("node", "other")
        for index in (0, 1)
    ]
    assert latest == pytest.approx([0.9, 0.9, 0.0, 0.0])
    assert made.fleet.contested == 1


def test_moved_card_appears_once_the_first_node_lacks_it(agents: Agents) -> None:
    made = agents.world
    made.add_node("other", 0)
    agents.report("node")
    made.clock.now += Policy().freshness.max_age_seconds + 1.0
    moved = replace(made.card("node").info, node="other")

    agents.report("other", moved)

    assert made.fleet.contested == 0
    assert len(made.fleet.store.rows_of_node("other")) == 1


def test_labels_with_the_wrong_node_do_not_move_an_agents_devices(agents: Agents) -> None:
    made = agents.world
    made.add_node("other", 0)
    agents.report("node")
    for one in made.devices.values():
        one.info = replace(one.info, node="other")

    made.read()

    assert made.fleet.store.rows_of_node("node") == [0, 1]
    assert made.fleet.store.rows_of_node("other") == []


def test_older_series_do_not_undo_a_mig_layout_change_that_an_agent_reports(agents: Agents) -> None:
    made = agents.world
    made.read()
    card = made.card().info
    parts = [replace(card, gpu_instance_id=str(number), mig_profile="3g.40gb") for number in (1, 2)]
    made.clock.now += 10.0
    agents.report("node", *parts, made.card(index=1).info)
    made.read(measured_at=NOW - 20.0)
    agents.report("node", *parts, made.card(index=1).info)

    shown = [made.fleet.store.info(row) for row in made.fleet.store.rows_of_node("node")]
    assert [one.gpu_instance_id for one in shown if one is not None] == ["1", "2", ""]


# --- windows --------------------------------------------------------------------------------------


def test_windows_take_an_agents_means_with_their_spread(agents: Agents) -> None:
    for _ in range(4):
        agents.world.clock.now += 10.0
        agents.report(GRAPHICS_ACTIVE=1.0, mean=(0.5, 0.5))

    mean, spread, count = windows(agents.world, agents.world.card())
    assert (mean, spread, count) == pytest.approx((0.5, 0.5, 4))


def test_a_prometheus_value_of_the_same_time_is_not_counted_again(agents: Agents) -> None:
    made = agents.world
    for _ in range(6):
        made.clock.now += 10.0
        agents.report(GRAPHICS_ACTIVE=0.2, GPU_UTILIZATION=0.2, mean=(0.2, 0.04))
        made.read(measured_at=made.clock.now - 45.0, GRAPHICS_ACTIVE=1.0)
        made.clock.now += 3.0
        made.read(measured_at=made.clock.now, GRAPHICS_ACTIVE=1.0)

    mean, _, count = windows(made, made.card())
    assert (mean, count) == pytest.approx((0.2, 6))


def test_a_report_that_repeats_a_measurement_counts_once(agents: Agents) -> None:
    made = agents.world
    agents.report(mean=(0.2, 0.04))
    made.clock.now += 5.0
    agents.report(age=5.0, mean=(0.2, 0.04))

    assert windows(made, made.card())[2] == 1


def test_a_mean_from_before_the_tenants_changed_does_not_count_for_them(agents: Agents) -> None:
    made = agents.world
    agents.report(mean=(0.9, 0.81))
    pod = made.bind("a")
    made.clock.now += 2.0
    agents.pods = {made.card().info.key: (pod.key,)}
    agents.uids = {pod.key: pod.uid}
    agents.report(mean=(0.9, 0.81))
    made.clock.now += 3.0
    agents.report(GRAPHICS_ACTIVE=0.1, GPU_UTILIZATION=0.1, mean=(0.9, 0.81))

    mean, _, count = windows(made, made.card())
    assert count == 2  # measured after the pod came: 0 and 0.1
    assert mean == pytest.approx(0.05)


# --- snapshots ------------------------------------------------------------------------------------


def test_new_readings_of_few_nodes_are_estimated_at_once() -> None:
    made = World(in_steps=True)
    made.add_node("node", 2)
    made.add_node("other", 2)
    agents = Agents(made)
    agents.report("node")
    agents.report("other")
    finish(made.fleet.refresh_in_steps())
    before = made.fleet.snapshot()

    agents.report("node", GRAPHICS_ACTIVE=0.9)

    assert made.estimated(made.card("node"), "latest") == pytest.approx(0.9)
    after = made.fleet.snapshot().pools[GPU]
    assert after.version == before.pools[GPU].version  # dirty rows, no refresh


def test_new_readings_of_many_nodes_wait_for_a_refresh() -> None:
    made = World(in_steps=True)
    names = [f"node-{number}" for number in range(_MAX_READ_NODES + 3)]
    for name in names:
        made.add_node(name, 1)
    agents = Agents(made)
    for name in names:
        agents.report(name)
    made.fleet.snapshot()
    made.clock.now += _NEW_READINGS_SECONDS
    finish(made.fleet.refresh_in_steps())

    for name in names:
        agents.report(name, GRAPHICS_ACTIVE=0.9)

    at_once = [made.estimated(made.card(name), "latest") for name in names]
    assert at_once.count(0.0) == 3
    made.clock.now += _NEW_READINGS_SECONDS
    finish(made.fleet.refresh_in_steps())
    assert {made.estimated(made.card(name), "latest") for name in names} == {0.9}


def test_a_node_that_turns_busy_is_ranked_behind(agents: Agents) -> None:
    made = agents.world
    made.add_node("other", 2)
    agents.report("node")
    agents.report("other", age=5.0)
    first = made.rank(request()).best
    assert first is not None

    agents.report(first, GRAPHICS_ACTIVE=0.9, GPU_UTILIZATION=0.9)

    assert made.rank(request()).best not in {None, first}


def test_one_source_alone_gives_the_same_result() -> None:
    made = one_node()
    made.read_after(10.0, 3, GRAPHICS_ACTIVE=0.4)

    assert made.estimated(made.card(), "latest") == pytest.approx(0.4)
    assert windows(made, made.card())[2] == 4


def test_a_node_that_reports_ever_new_devices_keeps_only_the_last_ones(agents: Agents) -> None:
    store = agents.world.fleet.store
    for report in range(6):
        shown = [
            DeviceInfo(node="node", uuid=f"GPU-{report}-{at}", index=at)
            for at in range(_MOST_ON_NODE // 2)
        ]
        agents.report("node", *shown)

        known = {info.uuid for row in store.rows_of_node("node") if (info := store.info(row))}
        assert known >= {info.uuid for info in shown}
        assert len(known) <= _MOST_ON_NODE
        agents.world.clock.now += 1
    assert len(store) <= 2 * _MOST_ON_NODE
