import pytest

from agent.backend import Extra
from agent.rates import CounterRates, RemappedRows
from extender.core.readings import GROWTH_SECONDS, REMAPPED_SECONDS, Signal

START = 1_800_000_000.0


def replays(count: float) -> dict[str, float]:
    return {Extra.PCIE_REPLAYS: count, Extra.ENERGY: 7.0}


def test_the_first_reading_has_no_rate() -> None:
    assert CounterRates().rates(replays(5000), START) == {}


def test_the_rate_is_the_growth_since_the_oldest_reading() -> None:
    growth = CounterRates()
    growth.rates(replays(5000), START)

    assert growth.rates(replays(5060), START + 120) == {Signal.PCIE_REPLAY_RATE: 0.5}


def test_one_error_within_seconds_is_averaged_over_a_minute() -> None:
    growth = CounterRates()
    growth.rates(replays(0), START)

    assert growth.rates(replays(1), START + 10) == {Signal.PCIE_REPLAY_RATE: 1 / 60}


def test_old_errors_do_not_count() -> None:
    growth = CounterRates()
    for at in range(0, int(GROWTH_SECONDS) + 20, 10):
        rates = growth.rates(replays(0 if at == 0 else 3000), START + at)
        assert (rates.get(Signal.PCIE_REPLAY_RATE, 0.0) > 0) == (10 <= at <= GROWTH_SECONDS)


def test_a_reloaded_driver_starts_over() -> None:
    growth = CounterRates()
    growth.rates(replays(5000), START)

    assert growth.rates(replays(3), START + 60) == {}
    assert growth.rates(replays(3), START + 120) == {Signal.PCIE_REPLAY_RATE: 0.0}


def test_the_faster_growing_counter_counts() -> None:
    growth = CounterRates()
    growth.rates({Extra.NVLINK_CRC_FLITS: 0.0, Extra.NVLINK_CRC_DATA: 0.0}, START)

    rates = growth.rates({Extra.NVLINK_CRC_FLITS: 60.0, Extra.NVLINK_CRC_DATA: 6000.0}, START + 60)

    assert rates == {Signal.NVLINK_CRC_RATE: 100.0}


@pytest.mark.parametrize("values", [{}, {Extra.ENERGY: 1.0}])
def test_an_unsupported_counter_has_no_rate(values: dict[str, float]) -> None:
    growth = CounterRates()
    growth.rates(values, START)

    assert growth.rates(values, START + 60) == {}


def test_a_pass_without_counters_keeps_the_history() -> None:
    growth = CounterRates()
    growth.rates({}, START)
    growth.rates(replays(900), START + 60)

    assert growth.rates(replays(930), START + 120) == {Signal.PCIE_REPLAY_RATE: 0.5}


def test_a_counter_that_appears_later_starts_then() -> None:
    growth = CounterRates()
    growth.rates({}, START)

    assert growth.rates(replays(900), START + 60) == {}


def rows(count: float) -> dict[str, float]:
    return {Signal.UNCORRECTABLE_REMAPPED_ROWS: count}


def recent(added: float) -> dict[str, float]:
    return {Signal.ROWS_REMAPPED_LATELY: added}


def test_rows_remapped_before_the_start_are_not_recent() -> None:
    remapped = RemappedRows()

    assert remapped.recent(rows(40), START) == {}
    assert remapped.recent(rows(40), START + REMAPPED_SECONDS / 2) == {}
    assert remapped.recent(rows(40), START + REMAPPED_SECONDS) == recent(0)


def test_remapped_rows_count_for_a_day() -> None:
    remapped = RemappedRows()
    remapped.recent(rows(40), START)

    assert remapped.recent(rows(41), START + 100) == recent(1)
    assert remapped.recent(rows(43), START + 200) == recent(3)
    assert remapped.recent(rows(43), START + REMAPPED_SECONDS + 150) == recent(2)
    assert remapped.recent(rows(43), START + REMAPPED_SECONDS + 250) == recent(0)


def test_fewer_rows_or_an_earlier_time_start_over() -> None:
    remapped = RemappedRows()
    remapped.recent(rows(40), START)
    remapped.recent(rows(44), START + 100)

    assert remapped.recent(rows(0), START + 200) == {}
    assert remapped.recent(rows(1), START + 300) == recent(1)
    assert remapped.recent(rows(1), START) == {}


def test_a_card_without_row_remapping_has_no_value() -> None:
    assert RemappedRows().recent({}, START) == {}
