import pytest

from agent.gpu.backend import Extra, ProcessRate
from agent.gpu.card_reader import _CounterRates, _ProcessRates, _RemappedRows
from agent.report.contract import Process
from extender.core.devices.readings import GROWTH_SECONDS, REMAPPED_SECONDS, Signal

START = 1_800_000_000.0


def replays(count: float) -> dict[str, float]:
    return {Extra.PCIE_REPLAYS: count, Extra.ENERGY: 7.0}


def test_the_first_reading_has_no_rate() -> None:
    assert _CounterRates().rates(replays(5000), START) == {}


def test_the_rate_is_the_growth_since_the_oldest_reading() -> None:
    growth = _CounterRates()
    growth.rates(replays(5000), START)

    assert growth.rates(replays(5060), START + 120) == {Signal.PCIE_REPLAY_RATE: 0.5}


def test_one_error_within_seconds_is_averaged_over_a_minute() -> None:
    growth = _CounterRates()
    growth.rates(replays(0), START)

    assert growth.rates(replays(1), START + 10) == {Signal.PCIE_REPLAY_RATE: 1 / 60}


def test_old_errors_do_not_count() -> None:
    growth = _CounterRates()
    for at in range(0, int(GROWTH_SECONDS) + 20, 10):
        rates = growth.rates(replays(0 if at == 0 else 3000), START + at)
        assert (rates.get(Signal.PCIE_REPLAY_RATE, 0.0) > 0) == (10 <= at <= GROWTH_SECONDS)


def test_a_reloaded_driver_starts_over() -> None:
    growth = _CounterRates()
    growth.rates(replays(5000), START)

    assert growth.rates(replays(3), START + 60) == {}
    assert growth.rates(replays(3), START + 120) == {Signal.PCIE_REPLAY_RATE: 0.0}


def test_a_counter_that_is_read_for_the_first_time_leaves_the_others_alone() -> None:
    growth = _CounterRates()
    growth.rates(replays(5000), START)

    rates = growth.rates({**replays(5060), Extra.NVLINK_REPLAYS: 0.0}, START + 120)

    assert rates == {Signal.PCIE_REPLAY_RATE: 0.5}


def test_a_clock_set_back_starts_over() -> None:
    growth = _CounterRates()
    growth.rates(replays(5000), START)

    assert growth.rates(replays(5060), START - 3600) == {}
    assert growth.rates(replays(5120), START - 3480) == {Signal.PCIE_REPLAY_RATE: 0.5}


def test_the_faster_growing_counter_counts() -> None:
    growth = _CounterRates()
    growth.rates({Extra.NVLINK_CRC_FLITS: 0.0, Extra.NVLINK_CRC_DATA: 0.0}, START)

    rates = growth.rates({Extra.NVLINK_CRC_FLITS: 60.0, Extra.NVLINK_CRC_DATA: 6000.0}, START + 60)

    assert rates == {Signal.NVLINK_CRC_RATE: 100.0}


@pytest.mark.parametrize("values", [{}, {Extra.ENERGY: 1.0}])
def test_an_unsupported_counter_has_no_rate(values: dict[str, float]) -> None:
    growth = _CounterRates()
    growth.rates(values, START)

    assert growth.rates(values, START + 60) == {}


def test_a_pass_without_counters_keeps_the_history() -> None:
    growth = _CounterRates()
    growth.rates({}, START)
    growth.rates(replays(900), START + 60)

    assert growth.rates(replays(930), START + 120) == {Signal.PCIE_REPLAY_RATE: 0.5}


def test_a_counter_that_appears_later_starts_then() -> None:
    growth = _CounterRates()
    growth.rates({}, START)

    assert growth.rates(replays(900), START + 60) == {}


def rows(count: float) -> dict[str, float]:
    return {Signal.UNCORRECTABLE_REMAPPED_ROWS: count}


def recent(added: float) -> dict[str, float]:
    return {Signal.ROWS_REMAPPED_LATELY: added}


def test_rows_remapped_before_the_start_are_not_recent() -> None:
    remapped = _RemappedRows()

    assert remapped.recent(rows(40), START) == {}
    assert remapped.recent(rows(40), START + REMAPPED_SECONDS / 2) == {}
    assert remapped.recent(rows(40), START + REMAPPED_SECONDS) == recent(0)


def test_remapped_rows_count_for_a_day() -> None:
    remapped = _RemappedRows()
    remapped.recent(rows(40), START)

    assert remapped.recent(rows(41), START + 100) == recent(1)
    assert remapped.recent(rows(43), START + 200) == recent(3)
    assert remapped.recent(rows(43), START + REMAPPED_SECONDS + 150) == recent(2)
    assert remapped.recent(rows(43), START + REMAPPED_SECONDS + 250) == recent(0)


def test_fewer_rows_or_an_earlier_time_start_over() -> None:
    remapped = _RemappedRows()
    remapped.recent(rows(40), START)
    remapped.recent(rows(44), START + 100)

    assert remapped.recent(rows(0), START + 200) == {}
    assert remapped.recent(rows(1), START + 300) == recent(1)
    assert remapped.recent(rows(1), START) == {}


def test_a_card_without_row_remapping_has_no_value() -> None:
    assert _RemappedRows().recent({}, START) == {}


def sample(pid: int, at: float, ratio: float) -> ProcessRate:
    return ProcessRate(pid=pid, at_microseconds=int(at * 1e6), utilization_ratio=ratio)


def test_first_samples_cover_a_second_and_later_ones_the_rest() -> None:
    rates = _ProcessRates()
    assert rates.since(START) == int((START - 1) * 1e6)

    rates.update([sample(7, START + 4, 0.5), sample(8, START + 2, 0.5)])
    assert rates.since(START + 5) == int((START + 4) * 1e6)
    rates.update([])
    assert rates.since(START + 9) == int((START + 4) * 1e6)


@pytest.mark.parametrize("ahead", [0.1, 600.0, 1e12], ids=["clock", "set-back", "malformed"])
def test_samples_from_the_future_do_not_hide_later_ones(ahead: float) -> None:
    rates = _ProcessRates()
    rates.update([sample(7, START + ahead, 0.5)])

    assert rates.since(START) == int((START - 1) * 1e6)
    rates.update([sample(7, START + 1, 0.2)])
    assert rates.since(START + 2) == int((START + 1) * 1e6)


def test_the_rate_of_a_process_is_the_mean_of_its_new_samples() -> None:
    rates = _ProcessRates()
    rates.update([sample(7, START, 0.9)])
    rates.update([sample(7, START + 1, 0.2), sample(7, START + 2, 0.6), sample(7, START + 3, 1.3)])

    busy, idle = rates.apply([Process(pid=7), Process(pid=8)])

    assert busy.utilization_ratio == pytest.approx(0.6), "a ratio above 1 counts as 1"
    assert idle.utilization_ratio is None
