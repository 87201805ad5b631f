"""Estimates of activity, memory and health from readings."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision.health import words
from extender.core.decision.signals import (
    MEASURED,
    SignalEvidence,
    activity,
    agreed_activity,
    board_power,
    busiest_signal,
    estimate,
    learn_rest,
    memory,
    shows_use,
    step_streak,
)
from extender.core.devices.gpu_models import normalize_model
from extender.core.devices.readings import Column, Signal
from extender.core.nodes.snapshot import Telemetry
from extender.core.policy import Foreign, Health, HealthAction, Policy
from testkit.builders import GIB, NOW

NAN = float("nan")


def one(**values: float) -> dict[Signal, Column]:
    return {Signal[name]: np.array([value]) for name, value in values.items()}


def busy(board_watts: float = 700.0, **values: float) -> float:
    return float(activity(one(**values), np.array([board_watts])).busiest[0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({}, NAN, id="nothing"),
        pytest.param({"GPU_UTILIZATION": 0.4}, 0.4, id="utilization"),
        pytest.param({"GRAPHICS_ACTIVE": 0.4}, 0.4, id="mig-has-graphics-activity-alone"),
        pytest.param({"GPU_UTILIZATION": 0.01, "GRAPHICS_ACTIVE": 0.3}, 0.3, id="the-busier"),
        pytest.param({"GPU_UTILIZATION": 0.3, "GRAPHICS_ACTIVE": 0.01}, 0.3, id="whichever"),
        pytest.param({"GRAPHICS_ACTIVE": 0.0, "SM_ACTIVE": 0.5}, 0.5, id="multiprocessors"),
        pytest.param({"GRAPHICS_ACTIVE": 0.0, "TENSOR_ACTIVE": 0.5}, 0.5, id="tensor-cores"),
        pytest.param({"GRAPHICS_ACTIVE": 0.0, "DRAM_ACTIVE": 0.5}, 0.5, id="memory-traffic"),
        pytest.param({"GPU_UTILIZATION": 0.0, "POWER": 350.0}, 2 / 7, id="power"),
        pytest.param({"GPU_UTILIZATION": 0.0, "POWER": 136.0}, 0.0, id="power-at-rest"),
        pytest.param({"POWER": 690.0}, NAN, id="power-alone-says-nothing"),
        pytest.param({"GPU_UTILIZATION": 1.7}, 1.0, id="never-above-one"),
        pytest.param(
            {"GPU_UTILIZATION": 0.0, "POWER": 100.0, "POWER_LIMIT": 100.0}, 1.0, id="its-own-limit"
        ),
        pytest.param(
            {"GPU_UTILIZATION": 0.0, "POWER": 700.0, "POWER_LIMIT": 0.0}, 1.0, id="limit-of-nothing"
        ),
    ],
)
def test_the_busiest_evidence_wins(values: dict[str, float], expected: float) -> None:
    assert busy(**values) == pytest.approx(expected, nan_ok=True)


def test_power_of_an_unknown_model_is_ignored() -> None:
    assert busy(board_watts=NAN, GPU_UTILIZATION=0.0, POWER=700.0) == 0.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"GPU_UTILIZATION": 0.0, "POWER": 530.0}, True),
        ({"GPU_UTILIZATION": 0.01, "DRAM_ACTIVE": 0.25}, True),
        ({"GPU_UTILIZATION": 0.06, "DRAM_ACTIVE": 0.9}, False),
        ({"GPU_UTILIZATION": 0.0, "DRAM_ACTIVE": 0.1}, False),
        ({"DRAM_ACTIVE": 0.9}, False),
    ],
)
def test_idle_by_utilization_and_busy_by_other_evidence_is_a_disagreement(
    values: dict[str, float], expected: bool
) -> None:
    assert bool(activity(one(**values), np.array([700.0])).disagree[0]) is expected


BOARD_POWERS = {
    "NVIDIA B200": 1000, "NVIDIA GH200 480GB": 900, "NVIDIA H200": 700, "NVIDIA H800": 700,
    "NVIDIA H100 80GB HBM3": 700, "NVIDIA H20": 500, "NVIDIA GeForce RTX 4090": 450,
    "NVIDIA A100-SXM4-80GB": 400, "NVIDIA A800-SXM4-80GB": 400, "NVIDIA H100 PCIe": 350,
    "NVIDIA L40S": 350, "NVIDIA GeForce RTX 3090": 350, "NVIDIA A100-PCIE-40GB": 300,
    "NVIDIA A100 80GB PCIe": 300, "NVIDIA A10G": 300, "NVIDIA A40": 300, "NVIDIA L40": 300,
    "Tesla V100-SXM2-16GB": 300, "Tesla P100-SXM2-16GB": 300, "Tesla V100-PCIE-32GB": 250,
    "NVIDIA A16": 250, "Tesla P40": 250, "NVIDIA A30": 165, "NVIDIA A10": 150, "NVIDIA L4": 72,
    "Tesla T4": 70, "NVIDIA A2": 60, "Quadro": NAN, "": NAN,
}  # fmt: skip


def test_board_power_goes_by_the_most_specific_words() -> None:
    powers = {model: board_power(normalize_model(model)) for model in BOARD_POWERS}

    assert powers == pytest.approx(BOARD_POWERS, nan_ok=True)


@pytest.mark.parametrize(
    ("values", "label", "expected"),
    [
        pytest.param({"MEMORY_USED": 10, "MEMORY_FREE": 70}, NAN, (10, 70, 80), id="the-sum"),
        pytest.param(
            {"MEMORY_USED": 10, "MEMORY_FREE": 69, "MEMORY_RESERVED": 1},
            99,
            (10, 69, 80),
            id="reserved",
        ),
        pytest.param({"MEMORY_USED": 10, "MEMORY_TOTAL": 80}, NAN, (10, 70, 80), id="no-free"),
        pytest.param(
            {"MEMORY_USED": 10, "MEMORY_TOTAL": 80, "MEMORY_RESERVED": 1},
            NAN,
            (10, 69, 80),
            id="no-free-beside-the-reserve",
        ),
        pytest.param(
            {"MEMORY_FREE": 69, "MEMORY_TOTAL": 80, "MEMORY_RESERVED": 1},
            NAN,
            (10, 69, 80),
            id="no-used-beside-the-reserve",
        ),
        pytest.param({"MEMORY_FREE": 90}, 80, (0, 90, 80), id="more-free-than-there-is"),
        pytest.param({"MEMORY_FREE": 70, "MEMORY_TOTAL": 80}, NAN, (10, 70, 80), id="no-used"),
        pytest.param({"MEMORY_USED": 10}, 80, (10, 70, 80), id="total-by-label"),
        pytest.param({"MEMORY_USED": 90}, 80, (90, 0, 80), id="more-used-than-there-is"),
        pytest.param({"MEMORY_USED": 10}, NAN, (10, NAN, NAN), id="total-unknown"),
        pytest.param({}, 80, (NAN, NAN, 80), id="nothing-but-the-label"),
        pytest.param(
            {"MEMORY_USED": 0, "MEMORY_FREE": 0}, 80, (NAN, NAN, 80), id="all-zero-is-blank"
        ),
        pytest.param(
            {"MEMORY_USED": 10, "MEMORY_FREE": 70, "MEMORY_TOTAL": 0},
            NAN,
            (10, 70, 80),
            id="no-total",
        ),
    ],
)
def test_missing_memory_value_follows_from_the_others(
    values: dict[str, float], label: float, expected: tuple[float, float, float]
) -> None:
    estimated = memory(one(**values), np.array([label]))

    assert [float(each[0]) for each in estimated] == pytest.approx(list(expected), nan_ok=True)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({}, NAN, id="nothing"),
        pytest.param({"GPU_UTILIZATION": 1.0}, NAN, id="one"),
        pytest.param(
            {"GPU_UTILIZATION": 1.0, "GRAPHICS_ACTIVE": 0.0}, 0.0, id="the-other-does-not"
        ),
        pytest.param({"GPU_UTILIZATION": 1.0, "GRAPHICS_ACTIVE": 0.4}, 0.4, id="both"),
        pytest.param({"SM_ACTIVE": 0.3, "DRAM_ACTIVE": 0.2}, 0.2, id="any-two"),
        pytest.param(
            {"GRAPHICS_ACTIVE": 0.1, "SM_ACTIVE": 0.3, "TENSOR_ACTIVE": 0.2},
            0.2,
            id="the-busiest-two",
        ),
        pytest.param({"GPU_UTILIZATION": 0.9, "POWER": 386.4}, 0.2, id="power-bears-it-out"),
        pytest.param(
            {"GPU_UTILIZATION": 1.0, "POWER": 294.0}, 0.0, id="idle-t4-without-persistence"
        ),
        pytest.param({"GPU_UTILIZATION": 0.9, "POWER": 100.0}, 0.0, id="power-at-rest-does-not"),
        pytest.param({"POWER": 690.0}, NAN, id="power-alone"),
    ],
)
def test_activity_is_agreed_on_as_far_as_two_signals_say(
    values: dict[str, float], expected: float
) -> None:
    seen = activity(one(**values), np.array([700.0])).agreed[0]
    reading: dict[str, float] = {Signal[name]: value for name, value in values.items()}
    reading[Signal.POWER_LIMIT] = 700.0
    agreed = agreed_activity(reading)

    assert seen == pytest.approx(expected, nan_ok=True)
    assert (NAN if agreed is None else agreed) == pytest.approx(expected, nan_ok=True)


signals = st.sampled_from([*MEASURED])


@given(st.dictionaries(signals, st.floats(0, 1)))
def test_the_agent_agrees_with_the_extender(values: dict[Signal, float]) -> None:
    reading: dict[Signal, float] = {**values, Signal.POWER_LIMIT: 700.0}
    if Signal.POWER in values:
        reading[Signal.POWER] *= 700.0
    columns = {signal: np.array([value]) for signal, value in reading.items()}

    agreed = agreed_activity({str(signal): value for signal, value in reading.items()})

    seen = activity(columns, np.array([NAN])).agreed[0]
    assert (NAN if agreed is None else agreed) == pytest.approx(seen, nan_ok=True)


@pytest.mark.parametrize(
    ("values", "rest_watts", "expected"),
    [
        ({"GPU_UTILIZATION": 0.5, "POWER": 700.0, "POWER_LIMIT": 700.0}, NAN, "POWER"),
        ({"GPU_UTILIZATION": 0.5, "POWER": 420.0, "POWER_LIMIT": 700.0}, NAN, "GPU_UTILIZATION"),
        ({"GPU_UTILIZATION": 0.5, "POWER": 420.0, "POWER_LIMIT": 700.0}, 100.0, "POWER"),
        ({"GPU_UTILIZATION": 0.5, "POWER": 700.0, "POWER_LIMIT": 0.0}, NAN, "GPU_UTILIZATION"),
        ({"GPU_UTILIZATION": 0.5, "POWER": 700.0}, NAN, "GPU_UTILIZATION"),
        ({"GPU_UTILIZATION": 0.5, "POWER_LIMIT": 700.0}, NAN, "GPU_UTILIZATION"),
        ({"POWER": 700.0, "POWER_LIMIT": 700.0}, NAN, None),
    ],
)
def test_the_busiest_signal_is_named(
    values: dict[str, float], rest_watts: float, expected: str | None
) -> None:
    found = busiest_signal({Signal[name]: value for name, value in values.items()}, rest_watts)

    assert found is (None if expected is None else Signal[expected])


@pytest.mark.parametrize(
    ("before", "watts", "measured", "mean", "count", "after"),
    [
        pytest.param(NAN, 100.0, 0.0, 0.0, 6, 100.0, id="first"),
        pytest.param(100.0, 120.0, 0.0, 0.0, 6, 102.0, id="rises-by-a-tenth"),
        pytest.param(100.0, 80.0, 0.019, 0.019, 9, 98.0, id="falls-by-a-tenth"),
        pytest.param(100.0, 120.0, 0.02, 0.0, 6, 100.0, id="active"),
        pytest.param(100.0, 120.0, 0.0, 0.02, 6, 100.0, id="active-lately"),
        pytest.param(100.0, 120.0, 0.0, 0.0, 5, 100.0, id="too-few-readings"),
        pytest.param(100.0, NAN, 0.0, 0.0, 6, 100.0, id="no-power"),
    ],
)
def test_idle_power_is_learned_from_devices_at_rest(
    before: float, watts: float, measured: float, mean: float, count: int, after: float
) -> None:
    recent = np.array([mean]), np.array([count])

    found = learn_rest(np.array([before]), np.array([watts]), np.array([measured]), recent)

    assert found.tolist() == [after]


def test_use_shows_by_memory_or_by_activity() -> None:
    used = np.array([0.5, 1.5, 0.5, NAN, NAN]) * GIB
    active = np.array([0.05, 0.05, 0.2, 0.2, NAN])

    assert shows_use(used, active, Foreign()).tolist() == [False, True, True, True, False]


def test_a_verdict_falls_and_is_lifted_by_as_many_readings() -> None:
    streak, verdict = np.array([0]), np.array([False])

    verdicts = []
    for shown in (True, True, False, True, False, False, True, False):
        streak, verdict = step_streak(streak, verdict, np.array([shown]), 2)
        verdicts.append(bool(verdict[0]))

    assert verdicts == [False, True, True, True, True, False, False, False]


# --- estimates -----------------------------------------------------------------------------------


def evidence(count: int = 1, **changes: Any) -> SignalEvidence:
    """Return the evidence of idle, healthy H100s, measured just now."""
    columns = {
        Signal.GRAPHICS_ACTIVE: np.zeros(count),
        Signal.MEMORY_USED: np.zeros(count),
        Signal.MEMORY_FREE: np.full(count, 80 * GIB),
    }
    described = SignalEvidence(
        columns=columns,
        measured_at=np.full(count, NOW),
        activity_at=changes.get("measured_at", np.full(count, NOW)),
        memory_at=changes.get("measured_at", np.full(count, NOW)),
        freed_at=np.full(count, -np.inf),
        withdrawn=np.zeros(count, dtype=np.intp),
        others_bytes=np.full(count, NAN),
        foreign_bytes=np.full(count, NAN),
        label_total_bytes=np.full(count, NAN),
        board_watts=np.full(count, 700.0),
        hour_mean=np.zeros(count),
        next_hour=np.zeros(count),
        hour_count=np.zeros(count, dtype=np.intp),
        rest_watts=np.full(count, NAN),
        recent_mean=np.zeros(count),
        recent_count=np.zeros(count, dtype=np.intp),
        has_tenants=np.zeros(count, dtype=np.bool_),
        is_unheld=np.ones(count, dtype=np.bool_),
        is_in_use=np.zeros(count, dtype=np.bool_),
        is_foreign=np.zeros(count, dtype=np.bool_),
        was_used=np.zeros(count, dtype=np.bool_),
        xid_since=np.full(count, NAN),
        xid_at=np.full(count, NAN),
        recovery_at=np.full(count, NAN),
        is_lost=np.zeros(count, dtype=np.bool_),
        node_row=np.zeros(count, dtype=np.intp),
    )
    return replace(described, **changes)


def reading(count: int = 1, **values: float | list[float]) -> dict[Signal, Column]:
    columns = dict(evidence(count).columns)
    for name, value in values.items():
        columns[Signal[name]] = np.broadcast_to(np.array(value, dtype=float), (count,)).copy()
    return columns


def estimated(
    seen: SignalEvidence, *, after: float = 0.0, policy: Policy | None = None
) -> Telemetry:
    return estimate(seen, policy or Policy(), NOW + after)[0]


@pytest.mark.parametrize(
    ("age", "expected"), [(0, 1.0), (-5, 1.0), (120, 1.0), (270, 0.5), (420, 0.0), (9999, 0.0)]
)
def test_a_value_is_fresh_then_fades_by_when_it_was_measured(age: float, expected: float) -> None:
    telemetry = estimated(evidence(), after=age)

    assert telemetry.freshness[0] == telemetry.memory_freshness[0] == pytest.approx(expected)


def test_a_device_that_was_never_measured_is_unknown() -> None:
    assert estimated(evidence(measured_at=np.array([NAN]))).freshness[0] == 0.0


@pytest.mark.parametrize(
    ("missing", "activity_fresh", "memory_fresh"),
    [("GRAPHICS_ACTIVE", 0.0, 1.0), ("MEMORY_USED", 1.0, 1.0)],
)
def test_each_signal_is_missing_for_itself(
    missing: str, activity_fresh: float, memory_fresh: float
) -> None:
    values: dict[str, Any] = {missing: NAN, "MEMORY_TOTAL": 80 * GIB}
    columns = reading(**values)

    telemetry = estimated(evidence(columns=columns))

    assert telemetry.freshness[0] == activity_fresh
    assert telemetry.memory_freshness[0] == memory_fresh


def test_memory_without_a_total_is_unknown() -> None:
    telemetry = estimated(evidence(columns=reading(MEMORY_FREE=NAN)))

    assert (telemetry.memory_freshness[0], telemetry.memory_total_bytes[0]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        pytest.param({"freed_at": np.array([NOW])}, 0.0, id="from-before-it-was-freed"),
        pytest.param({"measured_at": np.array([NAN])}, 0.0, id="never-measured"),
        pytest.param({}, 420.0, id="faded"),
    ],
)
@pytest.mark.parametrize("has_tenants", [False, True])
def test_values_that_do_not_count_are_zeros(
    changes: dict[str, Any], after: float, has_tenants: bool
) -> None:
    in_use = {"MEMORY_USED": 60 * GIB, "MEMORY_FREE": 20 * GIB}
    columns = reading(1, GRAPHICS_ACTIVE=0.8, TEMPERATURE=99.0, **in_use)
    window: dict[str, Any] = {
        **{name: np.array([0.7]) for name in ("hour_mean", "next_hour", "recent_mean")},
        **{name: np.array([9]) for name in ("hour_count", "recent_count")},
    }
    seen = evidence(
        1,
        columns=columns,
        has_tenants=np.array([has_tenants]),
        is_foreign=np.ones(1, dtype=np.bool_),
        was_used=np.ones(1, dtype=np.bool_),
        **window,
        **changes,
    )

    telemetry = estimated(seen, after=after)

    known = {"memory_total_bytes"} | ({"is_foreign"} if "freed_at" in changes else set())
    found = {each.name: getattr(telemetry, each.name)[0] for each in fields(telemetry)}
    assert {name for name, value in found.items() if value} - known == set()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, 1.0, id="just-freed"),
        pytest.param(
            {"freed_at": np.array([NOW - 270.0]), "measured_at": np.array([NOW - 270.0])},
            0.5,
            id="fades-as-a-reading-would",
        ),
        pytest.param({"freed_at": np.array([-np.inf])}, 0.0, id="never-freed"),
        pytest.param({"was_used": np.array([True])}, 0.0, id="used-while-it-was-free"),
        pytest.param({"has_tenants": np.array([True])}, 0.0, id="held-again"),
        pytest.param({"measured_at": np.array([NOW - 1.0])}, 0.0, id="read-since"),
        pytest.param({"measured_at": np.array([NAN])}, 0.0, id="no-source-ever-showed-it"),
        pytest.param({"measured_at": np.array([NOW - 600.0])}, 0.0, id="its-source-is-gone"),
    ],
)
def test_freed_device_is_presumed_idle_by_its_history(
    changes: dict[str, Any], expected: float
) -> None:
    freed = {"freed_at": np.array([NOW - 10.0]), "measured_at": np.array([NOW - 20.0])}

    assert estimated(evidence(**{**freed, **changes})).presumed[0] == expected


def test_the_hour_counts_for_held_devices_and_latest_value_for_free_ones() -> None:
    seen = evidence(
        2,
        columns=reading(2, GRAPHICS_ACTIVE=0.1),
        has_tenants=np.array([True, False]),
        hour_mean=np.full(2, 0.6),
        next_hour=np.full(2, 0.4),
        hour_count=np.full(2, 9),
    )

    telemetry = estimated(seen)

    assert telemetry.utilization.tolist() == [0.6, 0.1]
    assert telemetry.next_hour.tolist() == [0.4, 0.1]
    assert telemetry.latest.tolist() == [0.1, 0.1]


def test_one_reading_makes_no_window() -> None:
    seen = evidence(
        has_tenants=np.array([True]), hour_mean=np.array([0.6]), hour_count=np.array([1])
    )

    assert estimated(seen).utilization[0] == 0.0


def test_foreign_use_counts_where_no_pod_is_and_not_for_ever() -> None:
    foreign = np.ones(1, dtype=np.bool_)

    assert estimated(evidence(is_foreign=foreign)).is_foreign[0]
    assert not estimated(evidence(is_foreign=foreign, is_unheld=~foreign)).is_foreign[0]
    assert not estimated(evidence(is_foreign=foreign), after=421).is_foreign[0]
    assert not estimated(evidence(is_in_use=foreign), after=421).is_in_use[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, 0.0, id="free-of-use"),
        pytest.param({"is_foreign": np.array([True])}, 0.45, id="foreign-use"),
        pytest.param({"has_tenants": np.array([True])}, 0.45, id="tenants"),
        pytest.param(
            {"is_foreign": np.array([True]), "recent_count": np.array([1])}, 0.0, id="one-reading"
        ),
    ],
)
def test_a_pause_of_foreign_use_counts_like_a_pause_of_a_tenant(
    changes: dict[str, Any], expected: float
) -> None:
    seen = {"recent_mean": np.array([0.45]), "recent_count": np.array([9]), **changes}

    assert estimated(evidence(**seen)).peak[0] == expected


def test_old_ill_health_excludes_no_device_for_ever() -> None:
    broken = evidence(columns=reading(ROW_REMAP_FAILURE=1.0))

    assert estimated(broken, after=899).is_excluded[0]
    assert not estimated(broken, after=900).is_excluded[0]


def test_a_sticky_xid_counts_for_a_while_after_it_was_first_seen() -> None:
    fallen = evidence(
        columns=reading(XID=48.0), xid_since=np.array([NOW - 3599]), measured_at=np.array([NOW])
    )

    assert estimated(fallen).is_excluded[0]
    assert not estimated(fallen, after=1).is_excluded[0]


def test_a_card_that_has_fallen_off_the_bus_excludes_its_node_and_no_other() -> None:
    seen = evidence(
        3,
        columns=reading(3, XID=[79.0, 0.0, 0.0]),
        xid_since=np.array([NOW, NAN, NAN]),
        node_row=np.array([5, 5, 6]),
    )

    telemetry = estimated(seen)

    assert telemetry.is_excluded.tolist() == [True, True, False]
    assert telemetry.is_excluded_multi.tolist() == [True, True, False]


def test_penalty_affects_only_the_lost_or_silent_device() -> None:
    seen = evidence(
        4,
        is_lost=np.array([True, False, False, False]),
        measured_at=np.array([NAN, NOW - 421, NOW, NOW - 421]),
        node_row=np.array([1, 1, 1, 2]),
    )

    telemetry = estimated(seen)

    assert telemetry.penalty.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert not telemetry.is_excluded.any()


def causes_of(telemetry: Telemetry) -> list[str]:
    return [words(int(cause)) for cause in telemetry.cause]


def test_missing_devices_say_that_they_are_missing() -> None:
    seen = evidence(2, is_lost=np.array([True, False]))

    assert causes_of(estimated(seen)) == ["missing among its siblings", ""]


@pytest.mark.parametrize(
    ("action", "is_excluded"),
    [(HealthAction.EXCLUDE, [True, False]), (HealthAction.EXCLUDE_NODE, [True, True])],
)
def test_setting_decides_meaning_of_a_missing_device(
    action: HealthAction, is_excluded: list[bool]
) -> None:
    seen = evidence(2, is_lost=np.array([True, False]))
    policy = Policy(health=Health(missing_device=action))

    assert estimated(seen, policy=policy).is_excluded.tolist() == is_excluded


def test_withdrawn_devices_put_a_penalty_on_their_node() -> None:
    seen = evidence(3, withdrawn=np.array([1, 1, 0]), node_row=np.array([1, 1, 2]))

    telemetry = estimated(seen)

    assert telemetry.penalty.tolist() == [0.5, 0.5, 0.0]
    assert causes_of(telemetry)[::2] == ["the kubelet offers fewer GPUs than its node has", ""]


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": {Signal.ROW_REMAP_FAILURE: np.array([1.0, 0.0, 0.0])}},
        {"is_lost": np.array([True, False, False])},
        {"measured_at": np.array([NOW - 421, NOW, NOW])},
    ],
    ids=["excluded", "lost", "silent"],
)
def test_known_withdrawn_device_puts_no_penalty_on_siblings(changes: dict[str, object]) -> None:
    one_known = evidence(3, withdrawn=np.full(3, 1), **changes)
    one_unknown = evidence(3, withdrawn=np.full(3, 2), **changes)

    assert estimated(one_known).penalty.tolist()[1:] == [0.0, 0.0]
    assert estimated(one_unknown).penalty.tolist()[1:] == [0.5, 0.5]


def test_broken_lost_and_stale_devices_among_fresh_siblings_are_out() -> None:
    seen = evidence(
        5,
        columns=reading(5, ROW_REMAP_FAILURE=[1.0, 0.0, 0.0, 0.0, 0.0]),
        is_lost=np.array([False, True, False, False, False]),
        measured_at=np.array([NOW, NAN, NOW - 130, NOW, NOW - 130]),
        node_row=np.array([1, 1, 1, 1, 2]),
    )

    assert estimated(seen).is_out.tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("changes", "is_excluded"),
    [
        ({}, False),
        ({"withdrawn": np.full(2, 1)}, True),
        ({"is_lost": np.array([True, False])}, True),
        ({"measured_at": np.array([NOW - 421, NOW])}, True),
        ({"measured_at": np.array([NOW, NOW - 421])}, False),
    ],
    ids=["nothing", "kubelet-offers-fewer", "lost", "silent", "another-is-silent"],
)
def test_an_old_xid_counts_again_where_the_device_is_gone_besides(
    changes: dict[str, object], is_excluded: bool
) -> None:
    columns = {**reading(2), Signal.XID: np.array([48.0, 0.0])}
    seen = evidence(2, columns=columns, xid_since=np.array([NOW - 9999, NAN]), **changes)

    assert estimated(seen).is_excluded.tolist() == [is_excluded, False]


def test_without_devices_telemetry_is_empty() -> None:
    assert len(estimated(evidence(0)).utilization) == 0


def test_the_penalty_is_a_setting() -> None:
    seen = evidence(is_lost=np.array([True]))

    assert estimated(seen, policy=Policy(health=Health(penalty=0.2))).penalty[0] == 0.2
