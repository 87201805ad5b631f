"""Test that a missing signal keeps its last valid value, which grows older."""

from dataclasses import replace

import numpy as np
import pytest

from extender.core.devices.readings import Readings, Signal
from extender.core.policy import Freshness, Policy
from extender.core.steps import finish
from extender.fleet import columns
from extender.fleet.latest_values import MEMORY_SIGNALS
from extender.fleet.store import DeviceStore
from testkit.builders import GIB, NOW
from tests.extender.fleet.stores import CARD, INSTANCE, NAN, estimated, free, readings, store_of

ACTIVITY, MEMORY = {"GRAPHICS_ACTIVE"}, {"MEMORY_USED", "MEMORY_FREE"}


def without(answer: Readings, names: set[str]) -> Readings:
    """Return an answer without these signals, as after failed queries."""
    lost = {Signal[name] for name in names}
    kept = {signal: column for signal, column in answer.columns.items() if signal not in lost}
    return replace(answer, columns=kept)


def later(store: DeviceStore, seconds: float, lost: set[str], **values: float) -> None:
    """Apply an answer without some signals."""
    at = NOW + seconds
    store.apply(without(readings(CARD, at=at, **values), lost), at)


@pytest.mark.parametrize("blank", [False, True], ids=["query-failed", "blank-value"])
def test_missing_utilization_fades_to_unknown_beside_fresh_signals(
    blank: bool,  # a parameter of the test
) -> None:
    store = store_of(CARD, GRAPHICS_ACTIVE=0.9)
    seen = []

    for seconds in range(30, 931, 30):
        if blank:
            later(store, seconds, set(), GRAPHICS_ACTIVE=NAN)
        else:
            later(store, seconds, ACTIVITY)
        telemetry = estimated(store, NOW + seconds)
        assert telemetry.memory_freshness[0] == 1.0
        seen.append((seconds, float(telemetry.freshness[0]), float(telemetry.latest[0])))

    freshness = {seconds: fresh for seconds, fresh, _ in seen}
    assert (freshness[120], freshness[270], freshness[420]) == (1.0, 0.5, 0.0)
    assert all(fresh == 0.0 for seconds, fresh in freshness.items() if seconds >= 420)
    assert {latest for _, fresh, latest in seen if fresh > 0} == {0.9}


def test_a_missing_memory_stays_then_fades_though_utilization_is_fresh() -> None:
    store = store_of(CARD, MEMORY_USED=60 * GIB, MEMORY_FREE=20 * GIB)

    for seconds, fresh, free_bytes in ((60, 1.0, 20 * GIB), (270, 0.5, 20 * GIB), (420, 0.0, 0.0)):
        later(store, seconds, MEMORY)
        telemetry = estimated(store, NOW + seconds)

        assert telemetry.freshness[0] == 1.0
        assert telemetry.memory_freshness[0] == pytest.approx(fresh)
        assert telemetry.memory_free_bytes[0] == free_bytes
        assert telemetry.memory_total_bytes[0] == 80 * GIB


@pytest.mark.parametrize("lost", ["MEMORY_USED", "MEMORY_FREE"])
def test_old_free_memory_is_never_combined_with_new_used_memory(lost: str) -> None:
    store = store_of(CARD)

    later(store, 30, {lost}, MEMORY_USED=60 * GIB, MEMORY_FREE=20 * GIB)

    telemetry = estimated(store, NOW + 30)
    assert telemetry.memory_free_bytes[0] == 20 * GIB
    assert telemetry.memory_used[0] == pytest.approx(0.75)


def test_blank_memory_values_keep_the_last_ones() -> None:
    store = store_of(CARD, MEMORY_USED=60 * GIB, MEMORY_FREE=20 * GIB)

    later(store, 30, set(), MEMORY_USED=0.0, MEMORY_FREE=0.0)

    assert estimated(store, NOW + 30).memory_free_bytes[0] == 20 * GIB
    later(store, 60, set(), MEMORY_USED=1.0, MEMORY_FREE=0.0)
    assert store.value(Signal.MEMORY_USED, 0) == 1.0


def test_one_kind_of_utilization_replaces_the_other_when_that_is_missing() -> None:
    store = store_of(CARD, GRAPHICS_ACTIVE=0.9, GPU_UTILIZATION=0.9)

    for seconds, latest in ((60, 0.9), (120, 0.9), (150, 0.1)):
        later(store, seconds, ACTIVITY, GPU_UTILIZATION=0.1)
        telemetry = estimated(store, NOW + seconds)

        assert telemetry.freshness[0] == 1.0
        assert telemetry.latest[0] == pytest.approx(latest)


@pytest.mark.parametrize("active", [0.0, 0.25, 0.8])
def test_other_evidence_never_replaces_a_missing_utilization(active: float) -> None:
    store = store_of(CARD, DRAM_ACTIVE=0.0)

    later(store, 150, ACTIVITY, DRAM_ACTIVE=active)
    assert estimated(store, NOW + 150).freshness[0] == pytest.approx(0.9)

    later(store, 450, ACTIVITY, DRAM_ACTIVE=active)
    assert estimated(store, NOW + 450).freshness[0] == 0.0


def test_other_evidence_counts_if_there_never_was_a_utilization() -> None:
    store = DeviceStore(Policy())
    store.apply(without(readings(CARD, SM_ACTIVE=0.4), ACTIVITY), NOW)

    assert estimated(store).freshness[0] == 1.0
    assert estimated(store).latest[0] == pytest.approx(0.4)


def test_a_temperature_that_is_no_longer_reported_is_soon_forgotten() -> None:
    store = store_of(CARD, TEMPERATURE=95.0)

    later(store, 120, set())
    assert estimated(store, NOW + 120).stress[0] == 1.0

    later(store, 150, set())
    assert estimated(store, NOW + 150).stress[0] == 0.0
    assert store.value(Signal.TEMPERATURE, 0) is None


def test_activity_is_as_old_as_its_newest_kind() -> None:
    store = store_of(CARD, GRAPHICS_ACTIVE=0.9, GPU_UTILIZATION=0.9)

    later(store, 100, ACTIVITY, GPU_UTILIZATION=0.1)

    assert estimated(store, NOW + 200).freshness[0] == 1.0


def test_the_source_of_activity_is_that_of_utilization_or_else_of_other_evidence() -> None:
    store = DeviceStore(Policy())
    store.apply(without(readings(CARD), ACTIVITY), NOW)
    assert store.reported_activity(0) is None

    store.apply(without(readings(CARD, at=NOW + 10, SM_ACTIVE=0.4), ACTIVITY), NOW + 10)
    assert store.reported_activity(0) == ("prometheus", NOW + 10)

    store.apply(replace(readings(CARD, at=NOW + 20), source="agent"), NOW + 20)
    later(store, 30, ACTIVITY, SM_ACTIVE=0.4)
    assert store.reported_activity(0) == ("agent", NOW + 20)


def test_values_stay_when_rows_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_LEAST", 1)
    store = store_of(CARD, TEMPERATURE=50.0)
    others = [replace(CARD, uuid=f"GPU-{number}", index=number) for number in range(1, 9)]

    store.apply(without(readings(*others, at=NOW + 10), MEMORY), NOW + 10)

    values = [store.value(Signal.TEMPERATURE, row) for row in range(9)]
    assert values == [50.0, *[None] * 8]
    assert store.reported([Signal.TEMPERATURE], 0) == ("prometheus", NOW)
    assert [store.reported(MEMORY_SIGNALS, row) for row in range(1, 9)] == [None] * 8


def test_an_adopted_age_limit_counts_for_values_that_are_no_longer_reported() -> None:
    store = store_of(CARD, TEMPERATURE=95.0)
    finish(store.adopt_in_steps(Policy(freshness=Freshness(max_age_seconds=300.0))))

    later(store, 300, set())
    assert store.value(Signal.TEMPERATURE, 0) == 95.0

    later(store, 330, set())
    assert store.value(Signal.TEMPERATURE, 0) is None


@pytest.mark.parametrize(
    ("name", "unhealthy"),
    [
        ("XID", 48.0),
        ("ROW_REMAP_FAILURE", 1.0),
        ("ECC_DOUBLE_BIT_VOLATILE", 2.0),
        ("RECOVERY_ACTION", 1.0),
        ("FABRIC_MANAGER_STATUS", 1.0),
        ("HEALTH_STATUS", 20.0),
    ],
)
def test_unreported_health_problem_stays_as_long_as_the_device(name: str, unhealthy: float) -> None:
    store = store_of(CARD, **{name: unhealthy})

    for seconds, is_excluded in ((30, True), (600, True), (900, True), (930, False)):
        later(store, seconds, set())

        assert bool(estimated(store, NOW + seconds).is_excluded[0]) is is_excluded, seconds


@pytest.mark.parametrize(
    ("seconds", "is_excluded"),
    [(90, False), (150, True), (600, True)],
    ids=["fresh", "old", "older"],
)
def test_an_earlier_recovery_action_says_nothing_about_a_later_xid(
    seconds: float, is_excluded: bool
) -> None:
    store = store_of(CARD, XID=0.0, RECOVERY_ACTION=0.0)

    later(store, seconds, set(), XID=154.0)
    assert bool(estimated(store, NOW + seconds).is_excluded[0]) is is_excluded

    later(store, seconds + 30, set(), XID=154.0, RECOVERY_ACTION=0.0)
    assert not estimated(store, NOW + seconds + 30).is_excluded[0]


def test_reported_good_health_clears_the_verdict_at_once() -> None:
    store = store_of(CARD, XID=48.0)
    later(store, 30, set())

    later(store, 60, set(), XID=0.0)

    assert not estimated(store, NOW + 60).is_excluded[0]


def test_values_stay_when_the_server_dies_during_a_round() -> None:
    store = store_of(CARD, GRAPHICS_ACTIVE=0.9, MEMORY_USED=60 * GIB, MEMORY_FREE=20 * GIB, XID=79)
    before = estimated(store, NOW + 30)
    later(store, 30, {"GRAPHICS_ACTIVE", "MEMORY_FREE", "MEMORY_USED", "XID"}, TEMPERATURE=40.0)

    for seconds, fresh in ((30, 1.0), (120, 1.0), (270, 0.5)):
        after = estimated(store, NOW + seconds)
        assert after.freshness[0] == after.memory_freshness[0] == pytest.approx(fresh)
        assert after.memory_free_bytes[0] == before.memory_free_bytes[0]
        assert after.is_excluded[0]

    recovered = readings(CARD, at=NOW + 300, XID=0.0)
    store.apply(recovered, NOW + 300)
    assert estimated(store, NOW + 300).latest[0] == 0.0
    assert estimated(store, NOW + 300).memory_free_bytes[0] == 80 * GIB
    assert not estimated(store, NOW + 300).is_excluded[0]


def test_values_from_before_a_device_was_freed_count_for_no_pod() -> None:
    store = store_of(CARD, GRAPHICS_ACTIVE=0.9, MEMORY_USED=60 * GIB, MEMORY_FREE=20 * GIB)
    store.restart_history((0,), NOW + 10, is_freed=True)

    later(store, 30, ACTIVITY | MEMORY, TEMPERATURE=40.0)

    telemetry = estimated(store, NOW + 30)
    assert telemetry.freshness[0] == telemetry.memory_freshness[0] == 0.0


def test_kept_values_fill_no_window_and_show_no_foreign_use() -> None:
    store = store_of(CARD, GRAPHICS_ACTIVE=0.9)
    free(store, 0)

    for seconds in (30, 60, 90):
        later(store, seconds, ACTIVITY, DRAM_ACTIVE=0.0)

    assert store.evidence().hour_count[0] == 1
    assert not store.is_foreign(0)


def test_load_is_measured_once_activity_and_memory_are_reported() -> None:
    store = store_of(CARD)

    later(store, 300, MEMORY)
    assert store.reported_at(0) == NOW

    later(store, 330, set())
    assert store.reported_at(0) == NOW + 330


def test_an_instance_without_utilization_does_not_wait_for_it() -> None:
    store = DeviceStore(Policy())
    store.apply(without(readings(INSTANCE), ACTIVITY), NOW)

    assert store.reported_at(0) == NOW


def test_a_signal_may_be_missing_for_some_devices() -> None:
    other = replace(CARD, uuid="GPU-1", index=1)
    store = store_of(CARD, other, GRAPHICS_ACTIVE=0.5, XID=48.0)
    answer = readings(CARD, other, at=NOW + 60)
    columns = {
        **answer.columns,
        Signal.GRAPHICS_ACTIVE: np.array([NAN, 0.2]),
        Signal.XID: np.array([0.0, NAN]),
    }

    store.apply(replace(answer, columns=columns), NOW + 60)

    assert estimated(store, NOW + 60).latest.tolist()[:2] == [0.5, 0.2]
    assert estimated(store, NOW + 60).is_excluded.tolist()[:2] == [False, True]
    assert estimated(store, NOW + 150).freshness.tolist()[:2] == [pytest.approx(0.9), 1.0]
