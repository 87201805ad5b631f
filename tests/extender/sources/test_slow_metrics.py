"""Fewer queries for slow-changing metrics give the same values as full ones."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.readings import Column, Signal
from extender.sources.prometheus.collector import _FULL_SECONDS, _SlowColumns
from extender.sources.prometheus.dcgm import DEFAULT_METRICS, Metric
from testkit.collecting import NOW, CollectorState
from testkit.prometheus.fake import FakePrometheus, Series, series, util

NAN = float("nan")
XID, TOTAL, TEMPERATURE = (
    next(metric for metric in DEFAULT_METRICS if metric.signal is signal)
    for signal in (Signal.XID, Signal.MEMORY_TOTAL, Signal.TEMPERATURE)
)


class Server:
    """Answers queries of a metric, and records them.

    Attributes:
        values: by device.
        state: for each query, whether it was only for values above 0.
    """

    def __init__(self, *values: float) -> None:
        self.values: Sequence[float] = values
        self.state: list[bool] = []

    def __call__(self, metric: Metric, *, is_above_zero: bool) -> Column:  # noqa: ARG002 - any
        self.state.append(is_above_zero)
        column = np.array(self.values)
        return np.where(column > 0, column, NAN) if is_above_zero else column


faults = st.lists(st.sampled_from([0.0, 0.0, 1.0, 79.0]), min_size=3, max_size=3)


@given(st.lists(st.tuples(faults, st.sampled_from([5.0, 20.0, 60.0])), min_size=1, max_size=8))
def test_faults_appear_and_disappear_in_the_same_round(
    rounds: list[tuple[list[float], float]],
) -> None:
    server, now = Server(), NOW
    slow_columns = _SlowColumns(server)
    for values, seconds in rounds:
        server.values = values
        now += seconds

        assert slow_columns.column(XID, now).tolist() == values


values = st.lists(st.sampled_from([NAN, 0.0, 1.0]), min_size=3, max_size=3)


@given(st.lists(values, min_size=1, max_size=8))
def test_a_missing_fault_is_not_a_fault_that_is_gone(rounds: list[list[float]]) -> None:
    server = Server()
    slow_columns = _SlowColumns(server)
    shown = np.full(3, NAN)  # as in the fleet: kept until another value is reported
    expected = np.full(3, NAN)
    for number, values_now in enumerate(rounds):
        server.values = values_now
        column = slow_columns.column(XID, NOW + 10 * number)
        shown = np.where(np.isnan(column), shown, column)
        expected = np.where(np.isnan(values_now), expected, values_now)

        assert (np.nan_to_num(shown) == np.nan_to_num(expected)).all()


def test_without_faults_most_queries_are_for_values_above_0() -> None:
    server = Server(0.0, 0.0)
    slow_columns = _SlowColumns(server)

    for number in range(6):
        slow_columns.column(XID, NOW + 10 * number)

    assert server.state == [False, True, True, True, True, False]


def test_sizes_are_queried_within_a_minute() -> None:
    server = Server(80.0, 40.0)
    slow_columns = _SlowColumns(server)
    slow_columns.column(TOTAL, NOW)
    server.values = (80.0, 96.0)

    before = slow_columns.column(TOTAL, NOW + _FULL_SECONDS - 1).tolist()
    after = slow_columns.column(TOTAL, NOW + _FULL_SECONDS).tolist()

    assert (before, after) == ([80.0, 40.0], [80.0, 96.0])
    assert server.state == [False, False]


def test_a_missing_size_is_queried_again() -> None:
    server = Server(80.0, NAN)
    slow_columns = _SlowColumns(server)
    slow_columns.column(TOTAL, NOW)
    server.values = (80.0, 40.0)

    assert slow_columns.column(TOTAL, NOW + 10).tolist() == [80.0, 40.0]


@pytest.mark.parametrize("metric", [XID, TOTAL])
def test_other_devices_are_queried_at_once(metric: Metric) -> None:
    server = Server(0.0, 0.0)
    slow_columns = _SlowColumns(server)
    slow_columns.column(metric, NOW)

    slow_columns.clear()
    slow_columns.column(metric, NOW + 1)

    assert server.state == [False, False]


def test_other_metrics_are_queried_in_every_round() -> None:
    server = Server(40.0)
    slow_columns = _SlowColumns(server)
    slow_columns.column(TEMPERATURE, NOW)
    server.values = (50.0,)

    assert slow_columns.column(TEMPERATURE, NOW + 1).tolist() == [50.0]
    assert server.state == [False, False]


async def test_a_collector_returns_faults_and_sizes_with_fewer_queries(
    fake: FakePrometheus,
) -> None:
    def said(xid: int, *uuids: str) -> list[Series]:
        return [
            one
            for uuid in uuids
            for one in (
                util(1, UUID=uuid),
                series("DCGM_FI_DEV_XID_ERRORS", xid, UUID=uuid, Hostname="gpu-1"),
                series("DCGM_FI_DEV_FB_TOTAL", 1, UUID=uuid, Hostname="gpu-1"),
            )
        ]

    state, found = CollectorState(fake.url), []
    for number, (xid, uuids) in enumerate(
        [(0, ["GPU-1"]), (79, ["GPU-1"]), (0, ["GPU-1"]), (0, ["GPU-1", "GPU-2"])]
    ):
        fake.series = said(xid, *uuids)
        await state.round(NOW + number)
        found.append([state.value(Signal.XID, uuid) for uuid in uuids])

    assert found == [[0], [79], [0], [0, 0]]
    assert state.value(Signal.MEMORY_TOTAL, "GPU-2") == 1 << 20
    sizes = [request for request in fake.queries if "FB_TOTAL" in request]
    assert len(sizes) == 2  # the first round, and the one with a new device
    assert any("XID_ERRORS{} > 0" in request for request in fake.queries)
