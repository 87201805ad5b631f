"""Test that applying an answer in pieces gives the same result as all at once."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.readings import Own, Readings, Signal
from extender.core.policy import Policy
from extender.core.steps import finish
from extender.fleet import intake
from extender.fleet.store import DeviceStore
from testkit.builders import GIB, NOW
from tests.extender.fleet.stores import CARD, NAN, free

CARDS = tuple(replace(CARD, uuid=f"GPU-{number}", index=number) for number in range(5))
ratios = st.sampled_from([0.0, 0.3, 1.0, NAN])
ages = st.sampled_from([0.0, 5.0, 40.0])
reports = st.lists(st.tuples(ratios, ratios, ages), min_size=len(CARDS), max_size=len(CARDS))
answers = st.lists(st.tuples(reports, st.booleans()), min_size=1, max_size=4)


def answer(said: Sequence[tuple[float, float, float]], at: float, *, is_own: bool) -> Readings:
    """Return an answer of Prometheus or of an agent: utilization, memory and age of each card."""
    utilization, memory, age = (np.array(column) for column in zip(*said, strict=True))
    own = Own(
        nodes=("node",),
        news=frozenset(),
        holders={},
        mean=utilization,
        mean_square=utilization**2,
        is_foreign=memory > 0,
        xid_age=age,
    )
    return Readings(
        source="agent" if is_own else "prometheus",
        at=at,
        devices=CARDS,
        columns={
            Signal.GPU_UTILIZATION: utilization,
            Signal.MEMORY_USED: 80 * GIB * memory,
            Signal.XID: 79 * np.nan_to_num(memory),
        },
        measured_at=at - age,
        tenants=None,
        own=own if is_own else None,
    )


def taken(sequence: Sequence[tuple[list[tuple[float, float, float]], bool]]) -> DeviceStore:
    store = DeviceStore(Policy())
    for number, (said, is_own) in enumerate(sequence):
        at = NOW + 10.0 * number
        store.apply(answer(said, at, is_own=is_own), at)
        for row in range(len(store)):
            free(store, row)
    return store


@given(answers)
def test_applying_in_pieces_gives_the_same_result(
    sequence: list[tuple[list[tuple[float, float, float]], bool]],
) -> None:
    whole = taken(sequence)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intake, "_PIECE_VALUES", 2)
        in_pieces = taken(sequence)

    one, other = whole.evidence(), in_pieces.evidence()
    for column in fields(one):
        np.testing.assert_equal(getattr(other, column.name), getattr(one, column.name))
    now = NOW + 60.0
    np.testing.assert_equal(in_pieces.ages(now), whole.ages(now))
    assert whole.activity_sources(np.arange(5))[0] == in_pieces.activity_sources(np.arange(5))[0]


def test_no_step_applies_more_devices_than_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_PIECE_VALUES", 2)
    store = DeviceStore(Policy())

    steps = store.apply_in_steps(answer([(0.3, 0.3, 0.0)] * 5, NOW, is_own=False), NOW)
    taken = {sum(store.measured_at(row) is not None for row in range(len(store))) for _ in steps}

    assert taken == {0, 2, 4, 5}


def test_signals_that_depend_on_no_other_are_applied_in_steps_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "_PIECE_VALUES", 10)
    said = answer([(0.3, 0.3, 0.0)] * 5, NOW, is_own=False)
    others = (Signal.TEMPERATURE, Signal.POWER, Signal.SM_ACTIVE, Signal.DRAM_ACTIVE)
    more = replace(said, columns={**said.columns, **{one: np.ones(5) for one in others}})

    few, many = (len(list(DeviceStore(Policy()).apply_in_steps(one, NOW))) for one in (said, more))

    assert many - few == 2, "two signals of five devices are one piece"


def test_no_step_applies_more_than_one_piece_while_devices_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "_PIECE_DEVICES", 2)
    store = DeviceStore(Policy())
    said = answer([(0.3, 0.3, 0.0)] * 5, NOW, is_own=False)
    store.apply(said, NOW)
    later = replace(said, at=NOW + 10.0, measured_at=said.measured_at + 10.0)
    gone = replace(CARD, uuid="GPU-gone", node="gone")

    taken = []
    steps = store.apply_in_steps(later, NOW + 10.0)
    for number, _ in enumerate(islice(steps, 100)):
        taken.append(sum(store.measured_at(row) == NOW + 10.0 for row in range(5)))
        one = replace(gone, uuid=f"GPU-gone-{number}")
        other = replace(said, source="agent", devices=(one,), columns={}, measured_at=np.zeros(1))
        store.apply(other, NOW)
        store.forget_node("gone")

    assert max(np.diff([0, *taken])) == 2
    assert taken[-1] == 5


def test_values_of_a_device_dropped_meanwhile_are_ignored() -> None:
    store = DeviceStore(Policy())
    said = answer([(0.3, 0.3, 0.0)] * 5, NOW, is_own=False)
    others = replace(CARD, uuid="GPU-other", node="other")
    devices = (*said.devices[:4], others)

    steps = store.apply_in_steps(replace(said, devices=devices), NOW)
    while store.row_of(others.key) is None:
        next(steps)
    row = store.row_of(others.key)
    next(steps)
    next(steps)  # the values are being applied
    store.forget_node("other")
    applied = finish(steps)

    assert row is not None
    assert store.row_of(others.key) is None
    assert store.value(Signal.GPU_UTILIZATION, row) is None
    assert [store.value(Signal.GPU_UTILIZATION, at) for at in range(4)] == [0.3] * 4
    assert len(applied.disagree) == 5


def test_each_device_keeps_its_own_xid_age_when_another_is_dropped_meanwhile() -> None:
    store = DeviceStore(Policy())
    seconds = [10.0, 20.0, 30.0, 40.0, 50.0]
    said = answer([(0.3, 1.0, age) for age in seconds], NOW, is_own=True)
    other = replace(CARD, uuid="GPU-other", node="other")

    steps = store.apply_in_steps(replace(said, devices=(other, *said.devices[1:])), NOW)
    while store.row_of(CARDS[-1].key) is None:
        next(steps)
    next(steps)
    next(steps)  # the values are being applied
    store.forget_node("other")
    finish(steps)

    rows = [store.row_of(card.key) for card in CARDS[1:]]
    happened = said.measured_at - seconds
    assert store.row_of(other.key) is None
    assert store.evidence(np.array(rows)).xid_since.tolist() == happened[1:].tolist()
