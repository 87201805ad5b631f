"""What is asked for less often, or of fewer devices, is told as if it were asked in full."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.readings import Column, Signal
from extender.sources.prometheus.collector import FULL_SECONDS, SlowColumns
from extender.sources.prometheus.dcgm import DEFAULT_METRICS, Metric
from extender.sources.prometheus.collector import FULL_SECONDS, SlowColumns
from testkit.collecting import NOW, Asked
from testkit.fake_prometheus import FakePrometheus, Series, series, util

NAN = float("nan")
XID, TOTAL, TEMPERATURE = (
    next(metric for metric in DEFAULT_METRICS if metric.signal is signal)
    for signal in (Signal.XID, Signal.MEMORY_TOTAL, Signal.TEMPERATURE)
)


class Server:
    """Answers of a metric, and which were asked for.

    Attributes:
        values: by device.
        asked: per question, whether it was for what is above 0 alone.
    """

    def __init__(self, *values: float) -> None:
        self.values: Sequence[float] = values
        self.asked: list[bool] = []

    def __call__(self, metric: Metric, *, is_above_zero: bool) -> Column:  # noqa: ARG002 - any
        self.asked.append(is_above_zero)
        column = np.array(self.values)
        return np.where(column > 0, column, NAN) if is_above_zero else column


faults = st.lists(st.sampled_from([0.0, 0.0, 31.0, 79.0]), min_size=3, max_size=3)


@given(st.lists(st.tuples(faults, st.sampled_from([5.0, 20.0, 60.0])), min_size=1, max_size=8))
def test_faults_come_and_go_in_the_very_round(rounds: list[tuple[list[float], float]]) -> None:
    server, now = Server(), NOW
    slow_columns = SlowColumns(server)
    for values, seconds in rounds:
        server.values = values
        now += seconds

        assert slow_columns.column(XID, now).tolist() == values


values = st.lists(st.sampled_from([NAN, 0.0, 79.0]), min_size=3, max_size=3)


@given(st.lists(values, min_size=1, max_size=8))
def test_a_fault_that_is_not_told_is_never_taken_for_one_that_has_gone(
    rounds: list[list[float]],
) -> None:
    server = Server()
    slow_columns = SlowColumns(server)
    shown = np.full(3, NAN)  # as the fleet keeps it: until another value is told
    expected = np.full(3, NAN)
    for number, told in enumerate(rounds):
        server.values = told
        column = slow_columns.column(XID, NOW + 10 * number)
        shown = np.where(np.isnan(column), shown, column)
        expected = np.where(np.isnan(told), expected, told)

        assert (np.nan_to_num(shown) == np.nan_to_num(expected)).all()


def test_without_faults_only_what_is_above_0_is_asked_for_most_of_the_time() -> None:
    server = Server(0.0, 0.0)
    slow_columns = SlowColumns(server)

    for number in range(6):
        slow_columns.column(XID, NOW + 10 * number)

    assert server.asked == [False, True, True, True, True, False]


def test_sizes_are_asked_for_within_a_minute() -> None:
    server = Server(80.0, 40.0)
    slow_columns = SlowColumns(server)
    slow_columns.column(TOTAL, NOW)
    server.values = (80.0, 96.0)

    before = slow_columns.column(TOTAL, NOW + FULL_SECONDS - 1).tolist()
    after = slow_columns.column(TOTAL, NOW + FULL_SECONDS).tolist()

    assert (before, after) == ([80.0, 40.0], [80.0, 96.0])
    assert server.asked == [False, False]


def test_a_size_that_a_device_lacks_is_asked_for_again() -> None:
    server = Server(80.0, NAN)
    slow_columns = SlowColumns(server)
    slow_columns.column(TOTAL, NOW)
    server.values = (80.0, 40.0)

    assert slow_columns.column(TOTAL, NOW + 10).tolist() == [80.0, 40.0]


@pytest.mark.parametrize("metric", [XID, TOTAL])
def test_other_devices_are_asked_for_at_once(metric: Metric) -> None:
    server = Server(0.0, 0.0)
    slow_columns = SlowColumns(server)
    slow_columns.column(metric, NOW)

    slow_columns.clear()
    slow_columns.column(metric, NOW + 1)

    assert server.asked == [False, False]


def test_anything_else_is_asked_for_in_every_round() -> None:
    server = Server(40.0)
    slow_columns = SlowColumns(server)
    slow_columns.column(TEMPERATURE, NOW)
    server.values = (50.0,)

    assert slow_columns.column(TEMPERATURE, NOW + 1).tolist() == [50.0]
    assert server.asked == [False, False]


async def test_a_collector_asks_so_and_tells_faults_and_sizes_all_the_same(
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

    asked, told = Asked(fake.url), []
    for number, (xid, uuids) in enumerate(
        [(0, ["GPU-1"]), (79, ["GPU-1"]), (0, ["GPU-1"]), (0, ["GPU-1", "GPU-2"])]
    ):
        fake.series = said(xid, *uuids)
        await asked.round(NOW + number)
        told.append([asked.value(Signal.XID, uuid) for uuid in uuids])

    assert told == [[0], [79], [0], [0, 0]]
    assert asked.value(Signal.MEMORY_TOTAL, "GPU-2") == 1 << 20
    sizes = [question for question in fake.questions if "FB_TOTAL" in question]
    assert len(sizes) == 2  # at first, and when there was another device
    assert any("XID_ERRORS{} > 0" in question for question in fake.questions)
