from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.report.contract import Verdict
from agent.report.verdict import DeviceEvaluator, DeviceFacts, VerdictPolicy, most_severe_xid
from extender.core.decision.health import judge, words
from extender.core.devices.readings import Signal
from extender.core.policy import Health, HealthAction, Thresholds

NOW = 1_800_000_000.0
GIB = float(1 << 30)


def verdict(
    verdict_policy: VerdictPolicy | None = None,
    *,
    source: str = "gpm",
    xid_at: float | None = None,
    **values: Any,
) -> Verdict:
    signals = {Signal[name].value: (value,) for name, value in values.items()}
    facts = DeviceFacts(sources=(source,), xid_at=(xid_at,), is_lost=(False,))
    (found,) = DeviceEvaluator(verdict_policy or VerdictPolicy()).evaluate(signals, facts, NOW)
    return found


IDLE: dict[str, Any] = {"GRAPHICS_ACTIVE": 0.02, "MEMORY_USED": GIB, "MEMORY_TOTAL": 80 * GIB}


def test_a_device_below_both_thresholds_is_idle_with_its_source() -> None:
    found = verdict(**IDLE)

    assert (found.is_idle, found.reason) == (True, "busy 2% (gpm), memory 1% used")
    assert (found.action, found.cause) == ("", "")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"GRAPHICS_ACTIVE": 0.45}, "busy 45% (gpm), idle is below 30%"),
        ({"MEMORY_USED": 60 * GIB}, "memory 75% used, idle is below 50%"),
        (
            {"GRAPHICS_ACTIVE": 0.3, "MEMORY_USED": 40 * GIB},
            "busy 30% (gpm), idle is below 30%; memory 50% used, idle is below 50%",
        ),
    ],
)
def test_a_device_that_is_not_idle_names_the_exceeded_threshold(
    values: dict[str, Any], reason: str
) -> None:
    found = verdict(**{**IDLE, **values})

    assert (found.is_idle, found.reason) == (False, reason)


def test_memory_traffic_overrides_a_low_utilization() -> None:
    loaded = {**IDLE, "GPU_UTILIZATION": 0.01, "MEMORY_COPY_UTILIZATION": 0.49}
    del loaded["GRAPHICS_ACTIVE"]

    found = verdict(source="samples", **loaded)

    assert found.is_idle is False
    assert found.reason.startswith("busy 49% (1% by samples, more by memory traffic)")


def test_power_alone_does_not_make_a_device_busy() -> None:
    hungry = {**IDLE, "POWER": 450.0, "POWER_LIMIT": 700.0}

    assert verdict(**hungry).is_idle is True


@pytest.mark.parametrize("missing", [("GRAPHICS_ACTIVE",), ("MEMORY_USED", "MEMORY_TOTAL")])
def test_unknown_values_leave_the_verdict_unknown(missing: tuple[str]) -> None:
    found = verdict(**{name: value for name, value in IDLE.items() if name not in missing})

    assert found.is_idle is None
    assert "unknown" in found.reason


def test_one_exceeded_threshold_is_enough_for_busy() -> None:
    assert verdict(GRAPHICS_ACTIVE=0.9).is_idle is False


def test_thresholds_are_settings() -> None:
    strict = VerdictPolicy(thresholds=Thresholds(utilization=0.01, memory=0.5))

    assert verdict(strict, **IDLE).is_idle is False


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "ROW_REMAP_FAILURE",
                "ECC_DOUBLE_BIT_VOLATILE",
                "UNCORRECTABLE_REMAPPED_ROWS",
                "ROWS_REMAPPED_LATELY",
                "RECOVERY_ACTION",
                "FABRIC_MANAGER_STATUS",
                "RETIRED_PAGES_PENDING",
                "SRAM_THRESHOLD_EXCEEDED",
                "FABRIC_HEALTH",
            ]
        ),
        st.integers(0, 600).map(float),
    )
)
def test_health_matches_the_extenders_evaluation(values: dict[str, Any]) -> None:
    columns = {Signal[name]: np.array([value]) for name, value in values.items()}
    by_extender = judge(columns, 1, Health(), np.array([False]), np.array([False]))

    found = verdict(**values)

    assert found.cause == words(int(by_extender.cause[0]))
    excluded = {HealthAction.EXCLUDE, HealthAction.EXCLUDE_NODE}
    assert (found.action in excluded) == bool(by_extender.is_excluded[0])


def test_health_actions_are_settings() -> None:
    lax = VerdictPolicy(health=Health(double_bit_error=HealthAction.PENALTY))

    assert verdict(ECC_DOUBLE_BIT_VOLATILE=1.0).action == "exclude"
    assert verdict(lax, ECC_DOUBLE_BIT_VOLATILE=1.0).action == "penalty"


def test_a_device_that_another_excludes_is_not_called_faulty() -> None:
    facts = DeviceFacts(sources=("gpm", "gpm"), xid_at=(NOW, None), is_lost=(False, False))

    faulty, other = DeviceEvaluator(VerdictPolicy()).evaluate(
        {Signal.XID.value: (79.0, None)}, facts, NOW
    )

    assert (faulty.action, other.action) == ("exclude-node", "excluded")
    assert other.cause == "another GPU of its node: XID 79: fallen off the bus"


def test_throttling_is_stress_and_not_ill_health() -> None:
    found = verdict(**IDLE, CLOCK_EVENT_REASONS=float(0x40), TEMPERATURE=84.0)

    assert (found.is_idle, found.action, found.cause) == (True, "", "")
    assert (found.stress_ratio, found.stress_cause) == (1.0, "hardware thermal slowdown, 84 °C")


def test_heat_is_relative_to_the_slowdown_temperature() -> None:
    assert verdict(TEMPERATURE=82.0).stress_ratio == 0.2
    assert verdict(TEMPERATURE=82.0, TEMPERATURE_SLOWDOWN=89.0).stress_ratio == 0.3
    assert verdict(TEMPERATURE=82.0, TEMPERATURE_SLOWDOWN=100.0).stress_ratio == 0.0


def test_a_device_at_its_shutdown_temperature_is_evaluated_every_time() -> None:
    judge_of_node = DeviceEvaluator(VerdictPolicy())
    facts = DeviceFacts(sources=("gpm",), xid_at=(None,), is_lost=(False,))

    def reported(celsius: float) -> tuple[str, str]:
        signals = {Signal.TEMPERATURE.value: (celsius,), Signal.TEMPERATURE_SHUTDOWN.value: (95.0,)}
        (found,) = judge_of_node.evaluate(signals, facts, NOW)
        return found.action, found.cause

    assert reported(94.0) == ("", "")
    assert reported(95.0) == ("exclude", "95 °C, at which it switches itself off")
    assert reported(96.0) == ("exclude", "96 °C, at which it switches itself off")
    assert reported(90.0) == ("", "")


@pytest.mark.parametrize(
    ("is_lost", "expected"),
    [
        ((True, False), [("penalty", "missing among its siblings"), ("", "")]),
        ((True, True), [("", ""), ("", "")]),
        ((True,), [("", "")]),
    ],
)
def test_an_unreadable_device_counts_as_missing_besides_readable_ones(
    is_lost: tuple[bool, ...], expected: list[tuple[str, str]]
) -> None:
    count = len(is_lost)
    facts = DeviceFacts(sources=("",) * count, xid_at=(None,) * count, is_lost=is_lost)

    found = DeviceEvaluator(VerdictPolicy()).evaluate({}, facts, NOW)

    assert [(one.action, one.cause) for one in found] == expected


def test_an_xid_counts_for_a_while() -> None:
    assert verdict(XID=48.0, xid_at=NOW - 3599).action == "exclude"
    assert verdict(XID=48.0, xid_at=NOW - 3601).action == ""


def test_an_application_error_does_not_hide_an_earlier_hardware_error() -> None:
    events = ((NOW - 20, 13), (NOW - 10, 48), (NOW - 1, 43))

    assert most_severe_xid(events, Health(), NOW) == (NOW - 10, 48)


def test_of_equally_severe_xids_the_last_one_counts() -> None:
    events = ((NOW - 20, 48), (NOW - 10, 62))

    assert most_severe_xid(events, Health(), NOW) == (NOW - 10, 62)


@pytest.mark.parametrize("reads_recovery", [True, False])
def test_a_recovery_action_xid_does_not_hide_its_cause(*, reads_recovery: bool) -> None:
    events = ((NOW - 20, 95), (NOW - 10, 154))

    assert most_severe_xid(events, Health(), NOW, reads_recovery=reads_recovery) == (NOW - 20, 95)


def test_a_recovery_action_xid_hides_nothing_if_the_action_is_read() -> None:
    events = ((NOW - 20, 74), (NOW - 10, 154))

    assert most_severe_xid(events, Health(), NOW) == (NOW - 10, 154)
    assert most_severe_xid(events, Health(), NOW, reads_recovery=True) == (NOW - 20, 74)
    assert most_severe_xid(events[1:], Health(), NOW, reads_recovery=True) == (NOW - 10, 154)


def test_without_recent_xids_the_last_one_is_reported() -> None:
    events = ((NOW - 9000, 48), (NOW - 8000, 43))

    assert most_severe_xid(events, Health(), NOW) == (NOW - 8000, 43)
    assert most_severe_xid((), Health(), NOW) is None


def test_a_node_without_devices_has_no_verdicts() -> None:
    assert (
        DeviceEvaluator(VerdictPolicy()).evaluate(
            {}, DeviceFacts(sources=(), xid_at=(), is_lost=()), NOW
        )
        == ()
    )


def test_changed_health_is_evaluated_again() -> None:
    judge_of_node = DeviceEvaluator(VerdictPolicy())
    facts = DeviceFacts(sources=("gpm",), xid_at=(NOW,), is_lost=(False,))

    def action(now: float, **values: float) -> str:
        signals = {Signal[name].value: (value,) for name, value in values.items()}
        (found,) = judge_of_node.evaluate(signals, facts, now)
        return found.action

    assert action(NOW) == ""
    assert action(NOW, XID=48.0) == "exclude"
    assert action(NOW + 3601, XID=48.0) == "", "it counts no more, though nothing else changed"
    assert action(NOW + 3601, XID=48.0, ROW_REMAP_PENDING=1.0) == "penalty"
    assert action(NOW + 3601, XID=48.0, ROW_REMAP_FAILURE=1.0) == "exclude"
    assert action(NOW + 3601) == ""
