"""Test holders, foreign use and health from the reports of node agents."""

from typing import Any

import pytest

from extender.core.policy import Policy
from testkit.agent.fleet_reports import HOLD, Agents
from testkit.builders import GIB, NOW
from testkit.world import World


@pytest.fixture
def agents() -> Agents:
    made = World()
    made.add_node("node", 2)
    return Agents(made)


# --- device holders -------------------------------------------------------------------------------


def test_an_agent_says_which_pod_holds_which_device(agents: Agents) -> None:
    made = agents.world
    pod = made.bind("a")
    agents.pods = {made.card(index=1).info.key: (pod.key,)}
    agents.uids = {pod.key: pod.uid}
    made.clock.now += 1.0
    agents.report()

    assert made.row().used == (0, 1)
    assert made.fleet.tenants_of(1) == (pod.key,)
    assert made.row().is_agreed


def test_the_uid_distinguishes_pods_of_the_same_name(agents: Agents) -> None:
    made = agents.world
    pod = made.bind("a")
    agents.pods, agents.uids = {made.card().info.key: (pod.key,)}, {pod.key: "uid-of-the-former"}
    made.clock.now += 60.0
    agents.report()

    assert made.fleet.tenants_of(0) == ()


def test_without_uids_a_newer_pod_only_shares_the_name(agents: Agents) -> None:
    made = agents.world
    made.clock.now += 10.0
    pod = made.bind("a")
    agents.pods = {made.card().info.key: (pod.key,)}
    made.clock.now += 2.0
    agents.report(holders_age=5.0)
    assert made.fleet.tenants_of(0) == ()

    made.clock.now += 10.0
    agents.report(holders_age=5.0)
    made.fleet.snapshot()
    assert made.fleet.tenants_of(0) == (pod.key,)


def test_the_mapping_of_prometheus_counts_if_an_agent_reports_none(agents: Agents) -> None:
    made = agents.world
    pod = made.bind("a", on=[made.card(index=1)])
    made.clock.now += 1.0
    agents.pods = None
    made.read()
    agents.report()

    assert made.fleet.tenants_of(1) == (pod.key,)


def test_an_agents_mapping_beats_prometheus_until_it_is_silent(agents: Agents) -> None:
    made = agents.world
    pod = made.bind("a", on=[made.card(index=0)])
    agents.pods, agents.uids = {made.card(index=1).info.key: (pod.key,)}, {pod.key: pod.uid}
    made.clock.now += 1.0
    agents.report()
    made.read(measured_at=made.clock.now - 45.0)
    made.fleet.snapshot()
    assert made.fleet.tenants_of(1) == (pod.key,)

    made.clock.now += HOLD + 1.0
    made.read()
    made.fleet.expire_silent()
    made.fleet.snapshot()
    assert made.fleet.tenants_of(0) == (pod.key,)


# --- foreign use ----------------------------------------------------------------------------------


def test_use_without_a_tenant_is_foreign_from_the_second_report_on(agents: Agents) -> None:
    made = agents.world
    agents.report()
    made.clock.now += 1.0
    agents.report(MEMORY_USED=20 * GIB, MEMORY_FREE=60 * GIB)
    assert made.estimated(made.card(), "is_foreign") == 0.0

    made.clock.now += 1.0
    agents.report(MEMORY_USED=20 * GIB, MEMORY_FREE=60 * GIB)
    assert made.estimated(made.card(), "is_foreign") == 1.0


def test_one_reading_from_two_sources_counts_once(agents: Agents) -> None:
    made = agents.world
    agents.report()
    made.clock.now += 1.0
    agents.report(MEMORY_USED=20 * GIB, MEMORY_FREE=60 * GIB)
    made.read(measured_at=made.clock.now, MEMORY_USED=20 * GIB, MEMORY_FREE=60 * GIB)

    assert made.estimated(made.card(), "is_foreign") == 0.0


def test_use_before_the_last_tenants_end_is_not_foreign(agents: Agents) -> None:
    made = agents.world
    pod = made.bind("a")
    key = made.card().info.key
    agents.pods, agents.uids = {key: (pod.key,)}, {pod.key: pod.uid}
    made.clock.now += 1.0
    agents.report(MEMORY_USED=20 * GIB, MEMORY_FREE=60 * GIB)
    made.clock.now += 5.0
    made.end(pod)
    agents.pods, agents.uids = {}, {}
    agents.report(age=3.0, MEMORY_USED=20 * GIB, MEMORY_FREE=60 * GIB)
    agents.report(age=2.0, MEMORY_USED=20 * GIB, MEMORY_FREE=60 * GIB)

    assert made.estimated(made.card(), "is_foreign") == 0.0
    assert made.estimated(made.card(), "freshness") == 0.0


def test_an_agent_reports_foreign_use_while_a_new_pod_is_not_placed_yet(agents: Agents) -> None:
    made = agents.world
    agents.report()
    made.bind("unsettled")
    for _ in range(2):
        made.clock.now += 1.0
        agents.report(MEMORY_USED=20 * GIB, MEMORY_FREE=60 * GIB, is_foreign=True)

    row = made.fleet.store.row_of(made.card().info.key)
    assert row is not None
    assert made.fleet.store.is_foreign(row)


# --- health ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signal", "value"),
    [("SRAM_THRESHOLD_EXCEEDED", 1.0), ("FABRIC_HEALTH", 2.0), ("TEMPERATURE_SHUTDOWN", 40.0)],
)
def test_a_health_problem_that_only_nvml_sees_excludes_a_device(
    agents: Agents, signal: str, value: float
) -> None:
    made = agents.world
    values: dict[str, Any] = {signal: value, "TEMPERATURE": 45.0}
    agents.report(**values)
    made.read(measured_at=NOW - 30.0)

    assert made.estimated(made.card(), "is_excluded") == 1.0


def test_a_repeated_xid_counts_from_its_last_time(agents: Agents) -> None:
    made = agents.world
    seconds = Policy().health.xid_seconds
    agents.report(XID=48.0, xid_age=0.0)

    made.clock.now += seconds - 10.0
    agents.report(XID=48.0, xid_age=5.0)
    made.clock.now += 30.0
    agents.report(XID=48.0, xid_age=35.0)
    assert made.estimated(made.card(), "is_excluded") == 1.0

    made.clock.now += seconds
    agents.report(XID=48.0, xid_age=seconds + 35.0)
    assert made.estimated(made.card(), "is_excluded") == 0.0


def test_an_xid_in_the_future_counts_from_its_first_report(agents: Agents) -> None:
    made = agents.world
    seconds = Policy().health.xid_seconds
    agents.report(XID=48.0, xid_age=-600.0)
    assert made.estimated(made.card(), "is_excluded") == 1.0

    made.clock.now += seconds + 1.0
    agents.report(XID=48.0, xid_age=-600.0)
    assert made.estimated(made.card(), "is_excluded") == 0.0


def test_an_xid_counts_from_the_time_it_happened(agents: Agents) -> None:
    made = agents.world
    seconds = Policy().health.xid_seconds
    agents.report(XID=48.0, xid_age=seconds - 10.0)
    assert made.estimated(made.card(), "is_excluded") == 1.0

    made.clock.now += 20.0
    agents.report(XID=48.0, xid_age=seconds + 10.0)
    assert made.estimated(made.card(), "is_excluded") == 0.0
