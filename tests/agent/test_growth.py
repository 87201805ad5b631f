import pytest

from agent.backend import Extra
from agent.growth import Growth, Remapped
from extender.core.readings import GROWTH_SECONDS, REMAPPED_SECONDS, Signal

START = 1_800_000_000.0


def replays(count: float) -> dict[str, float]:
    return {Extra.PCIE_REPLAYS: count, Extra.ENERGY: 7.0}


def test_at_first_nothing_is_known_of_growth() -> None:
    assert Growth().rates(replays(5000), START) == {}


def test_it_is_counted_from_what_there_was_before() -> None:
    growth = Growth()
    growth.rates(replays(5000), START)

    assert growth.rates(replays(5060), START + 120) == {Signal.PCIE_REPLAY_RATE: 0.5}


def test_one_error_in_some_seconds_is_no_storm() -> None:
    growth = Growth()
    growth.rates(replays(0), START)

    assert growth.rates(replays(1), START + 10) == {Signal.PCIE_REPLAY_RATE: 1 / 60}


def test_what_came_long_ago_is_forgotten() -> None:
    growth = Growth()
    for at in range(0, int(GROWTH_SECONDS) + 20, 10):
        rates = growth.rates(replays(0 if at == 0 else 3000), START + at)
        assert (rates.get(Signal.PCIE_REPLAY_RATE, 0.0) > 0) == (10 <= at <= GROWTH_SECONDS)


def test_a_driver_that_was_loaded_anew_begins_anew() -> None:
    growth = Growth()
    growth.rates(replays(5000), START)

    assert growth.rates(replays(3), START + 60) == {}
    assert growth.rates(replays(3), START + 120) == {Signal.PCIE_REPLAY_RATE: 0.0}


def test_of_two_counters_the_one_that_grows_faster_counts() -> None:
    growth = Growth()
    growth.rates({Extra.NVLINK_CRC_FLITS: 0.0, Extra.NVLINK_CRC_DATA: 0.0}, START)

    rates = growth.rates({Extra.NVLINK_CRC_FLITS: 60.0, Extra.NVLINK_CRC_DATA: 6000.0}, START + 60)

    assert rates == {Signal.NVLINK_CRC_RATE: 100.0}


@pytest.mark.parametrize("values", [{}, {Extra.ENERGY: 1.0}])
def test_what_a_card_does_not_count_is_missing(values: dict[str, float]) -> None:
    growth = Growth()
    growth.rates(values, START)

    assert growth.rates(values, START + 60) == {}


def test_a_pass_in_which_nothing_could_be_read_is_no_beginning() -> None:
    growth = Growth()
    growth.rates({}, START)
    growth.rates(replays(900), START + 60)

    assert growth.rates(replays(930), START + 120) == {Signal.PCIE_REPLAY_RATE: 0.5}


def test_a_counter_that_comes_later_grows_from_then_on() -> None:
    growth = Growth()
    growth.rates({}, START)

    assert growth.rates(replays(900), START + 60) == {}


def rows(count: float) -> dict[str, float]:
    return {Signal.UNCORRECTABLE_REMAPPED_ROWS: count}


def lately(added: float) -> dict[str, float]:
    return {Signal.ROWS_REMAPPED_LATELY: added}


def test_rows_that_were_remapped_before_are_not_new() -> None:
    remapped = Remapped()

    assert remapped.lately(rows(40), START) == {}
    assert remapped.lately(rows(40), START + REMAPPED_SECONDS / 2) == {}
    assert remapped.lately(rows(40), START + REMAPPED_SECONDS) == lately(0)


def test_rows_count_for_a_day_from_when_they_were_seen_to_be_remapped() -> None:
    remapped = Remapped()
    remapped.lately(rows(40), START)

    assert remapped.lately(rows(41), START + 100) == lately(1)
    assert remapped.lately(rows(43), START + 200) == lately(3)
    assert remapped.lately(rows(43), START + REMAPPED_SECONDS + 150) == lately(2)
    assert remapped.lately(rows(43), START + REMAPPED_SECONDS + 250) == lately(0)


def test_fewer_rows_or_an_earlier_time_begin_anew() -> None:
    remapped = Remapped()
    remapped.lately(rows(40), START)
    remapped.lately(rows(44), START + 100)

    assert remapped.lately(rows(0), START + 200) == {}
    assert remapped.lately(rows(1), START + 300) == lately(1)
    assert remapped.lately(rows(1), START) == {}


def test_a_card_that_does_not_remap_rows_says_nothing() -> None:
    assert Remapped().lately({}, START) == {}
