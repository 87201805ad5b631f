"""Test what the store knows of each device between two answers of a source."""

from dataclasses import replace

import numpy as np
import pytest

from extender.core.devices.readings import DeviceInfo, DeviceKey, History, Signal
from extender.core.policy import Policy
from extender.core.steps import finish
from extender.fleet.store import DeviceStore
from testkit.builders import GIB, NOW
from tests.extender.fleet.stores import (
    CARD,
    INSTANCE,
    NAN,
    estimated,
    free,
    hold,
    readings,
    store_of,
)

# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonsense", [NAN, -1.0, float("inf")])
def test_impossible_values_are_missing(nonsense: float) -> None:
    store = store_of(CARD, GRAPHICS_ACTIVE=nonsense, MEMORY_USED=nonsense)

    assert store.value(Signal.GRAPHICS_ACTIVE, 0) is None
    assert estimated(store).freshness[0] == 0.0


def test_a_signal_that_was_never_reported_is_missing() -> None:
    store = store_of(CARD, TEMPERATURE=50.0)

    assert store.value(Signal.TEMPERATURE, 0) == 50.0
    assert store.value(Signal.POWER_LIMIT, 0) is None


def test_an_older_answer_makes_nothing_older() -> None:
    store = store_of(CARD)

    store.apply(readings(CARD, measured_at=NOW - 60), NOW)

    assert store.measured_at(0) == NOW


def test_the_power_of_a_card_says_nothing_of_its_instances() -> None:
    store = store_of(INSTANCE, POWER=700.0)

    assert estimated(store).latest[0] == 0.0
    assert store.value(Signal.POWER, 0) is None


def test_devices_with_contradictory_signals_are_returned() -> None:
    disagree = DeviceStore(Policy()).apply(readings(CARD, POWER=690.0), NOW).disagree

    assert disagree.tolist() == [True]


def test_a_device_names_its_source_and_its_age() -> None:
    store = store_of(CARD, DeviceInfo(node="node", uuid="GPU-1"))
    (stand_in,) = store.placeholders("node", "gpu", 1, None)
    store.apply(replace(readings(CARD, at=NOW + 10), source="agent"), NOW + 10)

    assert [store.source(row) for row in (0, 1, stand_in)] == ["agent", "prometheus", ""]
    assert {name: ages.tolist() for name, ages in store.ages(NOW + 30).items()} == {
        "prometheus": [30.0],
        "agent": [20.0],
    }


def test_windows_count_each_measurement_once() -> None:
    store = store_of(CARD, GRAPHICS_ACTIVE=0.5)
    hold(store, 0)

    for _ in range(3):
        store.apply(readings(CARD, at=NOW + 30, measured_at=NOW), NOW + 30)
    assert store.evidence().hour_count[0] == 1

    store.apply(readings(CARD, at=NOW + 60, GRAPHICS_ACTIVE=0.1), NOW + 60)
    assert estimated(store, NOW + 60).utilization[0] == pytest.approx(0.3)


# --- foreign use ----------------------------------------------------------------------------------


def use(store: DeviceStore, *amounts: float, start: float = 30.0) -> list[bool]:
    """Apply these activities, one per 30 s; return whether each leaves foreign use."""
    verdicts = []
    for number, amount in enumerate(amounts):
        at = NOW + start + 30 * number
        store.apply(readings(CARD, at=at, GRAPHICS_ACTIVE=amount, SM_ACTIVE=amount), at)
        verdicts.append(store.is_foreign(0))
    return verdicts


def test_setting_and_clearing_foreign_use_takes_two_measurements_each() -> None:
    store = store_of(CARD)

    assert use(store, 0.5, 0.5, 0.0, 0.5, 0.0, 0.0, 0.5) == [
        False, True, True, True, True, False, False,
    ]  # fmt: skip


def test_the_same_measurement_read_twice_is_one() -> None:
    store = store_of(CARD)

    for at in (NOW + 30, NOW + 45):
        store.apply(readings(CARD, at=at, measured_at=NOW + 30, MEMORY_USED=9 * GIB), at)

    assert not store.is_foreign(0)


def test_a_missing_reading_neither_sets_nor_clears_foreign_use() -> None:
    store = store_of(CARD)
    blank = dict.fromkeys(("GRAPHICS_ACTIVE", "SM_ACTIVE", "MEMORY_USED", "MEMORY_FREE"), NAN)

    assert use(store, 0.5) == [False]
    store.apply(readings(CARD, at=NOW + 45, **blank), NOW + 45)
    assert use(store, 0.5, start=60) == [True]
    for step in range(1, 9):
        store.apply(readings(CARD, at=NOW + 60 + step, **blank), NOW + 60 + step)
    assert store.is_foreign(0)


def test_use_before_the_last_tenants_end_is_the_tenants() -> None:
    store = store_of(CARD)

    store.restart_history((0,), NOW + 60, is_freed=True)

    assert use(store, 0.5, 0.5, 0.5, start=30) == [False, False, False]
    assert use(store, 0.5, start=120) == [True]


def test_use_that_may_belong_to_a_new_pod_is_not_foreign() -> None:
    store = store_of(CARD)
    free(store, 0, for_sure=False)
    assert use(store, 0.5, 0.5, 0.5) == [False, False, False]
    assert store.evidence().is_in_use[0]

    known = store_of(CARD)
    use(known, 0.5, 0.5)
    free(known, 0, for_sure=False)

    assert use(known, 0.5, 0.0, 0.0, start=90) == [True, True, False]


def arrive(store: DeviceStore, at: float) -> None:
    """Add a pod to the device, with readings of it."""
    store.restart_history((0,), at, is_freed=False)
    hold(store, 0)


def leave(store: DeviceStore, at: float) -> None:
    """End this pod."""
    store.restart_history((0,), at, is_freed=True)
    free(store, 0)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param([0.0, 0.0], 1.0, id="idle-before"),
        pytest.param([0.5, 0.5], 0.0, id="used-from-outside-before"),
        pytest.param([0.5, 0.5, 0.0, 0.0], 1.0, id="that-was-over-when-the-pod-came"),
        pytest.param([], 1.0, id="not-read-since-it-is-known"),
    ],
)
def test_a_freed_device_is_presumed_to_be_as_before_its_pod(
    before: list[float], expected: float
) -> None:
    store = store_of(CARD)
    use(store, *before)
    arrive(store, NOW + 200)
    use(store, 0.9, 0.9, 0.9, start=300)

    leave(store, NOW + 400)

    assert estimated(store, NOW + 400).presumed[0] == expected


@pytest.mark.parametrize(("active", "presumed"), [(0.5, 0.0), (Policy().foreign.utilization, 1.0)])
def test_freed_device_is_not_presumed_idle_if_one_signal_was_busy(
    active: float, presumed: float
) -> None:
    store = store_of(CARD)
    for at in (NOW + 30, NOW + 60):
        store.apply(readings(CARD, at=at, GRAPHICS_ACTIVE=active), at)
    assert not store.is_foreign(0)
    arrive(store, NOW + 200)
    use(store, 0.0, start=300)

    leave(store, NOW + 400)

    assert estimated(store, NOW + 400).presumed[0] == presumed
    assert not store.was_used(0)


def test_a_reading_of_a_freed_device_ends_the_presumption() -> None:
    store = store_of(CARD)
    arrive(store, NOW + 30)
    leave(store, NOW + 60)

    use(store, 0.0, start=90)

    telemetry = estimated(store, NOW + 90)
    assert (telemetry.presumed[0], telemetry.freshness[0]) == (0.0, 1.0)


def test_a_new_tenant_restarts_the_history_of_a_device() -> None:
    store = store_of(CARD)
    use(store, 0.5, 0.5)

    store.restart_history((0,), NOW + 90, is_freed=False)

    assert not store.is_foreign(0)
    assert store.evidence().hour_count[0] == 0
    assert estimated(store, NOW + 90).freshness[0] == 1.0


# --- sticky XIDs and history ----------------------------------------------------------------------


def excluded(store: DeviceStore, at: float) -> bool:
    return bool(estimated(store, at).is_excluded[0])


def test_a_sticky_xid_stops_counting_though_it_is_still_reported() -> None:
    store = store_of(CARD, XID=48.0)
    store.apply(readings(CARD, at=NOW + 3599, XID=48.0), NOW + 3599)
    assert excluded(store, NOW + 3599)

    store.apply(readings(CARD, at=NOW + 3601, XID=48.0), NOW + 3601)

    assert not excluded(store, NOW + 3601)


def test_another_xid_counts_from_when_it_was_first_seen() -> None:
    store = store_of(CARD, XID=13.0)

    store.apply(readings(CARD, at=NOW + 9000, XID=48.0), NOW + 9000)

    assert excluded(store, NOW + 9000)


@pytest.mark.parametrize(
    ("gap", "counts_again"), [(60.0, False), (1200.0, True)], ids=["a-missed-answer", "a-reset"]
)
def test_an_old_xid_counts_again_only_if_it_was_gone(gap: float, counts_again: bool) -> None:
    store = store_of(CARD, XID=48.0)
    later = NOW + 4000
    for at in (later, later + gap / 2, later + gap):
        store.apply(readings(CARD, at=at, XID=NAN if at > later else 48.0), at)

    back = later + gap + 1
    store.apply(readings(CARD, at=back, XID=48.0), back)

    assert excluded(store, back) is counts_again


def history(utilization: list[float], xid: list[float] | None = None) -> History:
    """Return a reading per minute until now, of the card and of an unknown one."""
    times = NOW - 60.0 * np.arange(len(utilization), dtype=np.float64)[::-1]
    columns = np.column_stack([utilization, np.ones(len(utilization))])
    return History(
        times=times,
        devices=(CARD.key, DeviceKey(("GPU-unknown", ""))),
        utilization=columns,
        xid=None if xid is None else np.column_stack([xid, np.full(len(xid), 79.0)]),
    )


def test_history_fills_the_windows_once_at_start() -> None:
    store = store_of(CARD)
    arrive(store, 0.0)

    finish(store.history_in_steps(history([0.4, NAN, -1.0, 0.8, 5.0])))

    mean, count = store.evidence().hour_mean[0], store.evidence().hour_count[0]
    assert (count, mean) == (4, pytest.approx((0.0 + 0.4 + 0.8 + 1.0) / 4))


def test_history_from_before_the_tenant_does_not_count_for_it() -> None:
    for first in ("tenant", "history"):
        store = store_of(CARD)
        if first == "tenant":
            arrive(store, NOW - 150)
        finish(store.history_in_steps(history([0.9] * 30 + [0.2, 0.2])))
        arrive(store, NOW - 150)

        assert store.evidence().hour_mean[0] < 0.5, first


def test_history_shows_the_age_of_a_sticky_xid() -> None:
    store = store_of(CARD, XID=48.0)

    finish(store.history_in_steps(history([0.0] * 61, [48.0] * 61)))

    assert not excluded(store, NOW + 1)


@pytest.mark.parametrize(
    "xids",
    [[13.0] * 60 + [48.0], [48.0] * 60 + [0.0], [NAN] * 60 + [48.0], [48.0, NAN] * 30 + [48.0]],
    ids=["new", "gone-and-back", "absent-before", "with-gaps"],
)
def test_history_does_not_age_a_new_xid(xids: list[float]) -> None:
    store = store_of(CARD, XID=48.0)

    finish(store.history_in_steps(history([0.0] * 61, xids)))

    store.apply(readings(CARD, at=NOW + 3000, XID=48.0), NOW + 3000)
    assert excluded(store, NOW + 3000)


@pytest.mark.parametrize("steps", [0, 3])
def test_history_without_xids_or_without_steps_is_applied(steps: int) -> None:
    store = store_of(CARD)

    finish(store.history_in_steps(history([0.0] * steps)))
    finish(store.history_in_steps(history([0.0] * steps, [0.0] * steps)))

    assert store.evidence().hour_count[0] == 1 + 2 * steps
