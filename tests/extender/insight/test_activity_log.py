"""Mean activity of devices over a recent period."""

from dataclasses import replace

import numpy as np
import pytest

from extender.core.nodes.snapshot import Ratios, Telemetry
from extender.insight.regret_watch import PIECES, ActivityLog

EVERY = 60.0
SPAN = PIECES * EVERY


def seen(*latest: float, freshness: tuple[float, ...] = (1.0, 1.0)) -> Telemetry:
    blank = Telemetry.missing(len(latest))
    return replace(blank, latest=np.array(latest), freshness=np.array(freshness))


def means(*looks: Telemetry, since: float = 0.0) -> Ratios:
    """Record two devices repeatedly; return their mean activity."""
    log = ActivityLog(SPAN)
    for number, telemetry in enumerate(looks):
        log.look(telemetry, number * EVERY)
    return log.means(np.array([0, 1]), since)


def test_reading_counts_for_the_time_since_the_last_one() -> None:
    found = means(seen(1.0, 1.0), seen(0.0, 0.6), seen(0.5, 0.0))

    assert found == pytest.approx([0.25, 0.3])


@pytest.mark.parametrize("freshness", [0.99, 0.5, 0.0])
def test_a_reading_that_is_stale_counts_neither_as_busy_nor_as_seen(freshness: float) -> None:
    stale = seen(0.9, 0.9, freshness=(freshness, 1.0))

    found = means(seen(0.0, 0.0), seen(0.2, 0.2), stale, stale)

    assert found == pytest.approx([0.2, (0.2 + 0.9 + 0.9) / 3])


def test_the_activity_of_a_device_without_fresh_readings_is_unknown() -> None:
    stale = seen(0.9, 0.9, freshness=(0.99, 1.0))

    assert np.isnan(means(stale, stale)).tolist() == [True, False]


def test_time_without_samples_counts_as_one_piece_at_most() -> None:
    log = ActivityLog(SPAN)
    for at, busy in ((0.0, 0.0), (EVERY, 0.0), (100 * EVERY, 1.0)):
        log.look(seen(busy, busy), at)

    assert log.means(np.array([0]), 0.0) == pytest.approx([0.5])


def test_devices_that_come_later_count_from_then_on() -> None:
    log = ActivityLog(SPAN)
    log.look(seen(0.5, freshness=(1.0,)), 0.0)
    for number in (1, 2):
        log.look(seen(0.5, 0.8), number * EVERY)

    assert log.means(np.array([0, 1]), 0.0) == pytest.approx([0.5, 0.8])


def test_mean_starts_no_earlier_than_the_span() -> None:
    log = ActivityLog(SPAN)
    busy = [*[1.0] * 10, *[0.0] * (PIECES + 2)]
    for number, share in enumerate(busy):
        log.look(seen(share, share), number * EVERY)

    assert log.means(np.array([0]), 0.0) == pytest.approx([0.0])


def test_nothing_is_known_of_the_time_since_the_last_look() -> None:
    log = ActivityLog(SPAN)
    for number in range(3):
        log.look(seen(0.5, 0.5), number * EVERY)

    assert np.isnan(log.means(np.array([0]), 3 * EVERY)).all()


def test_each_look_counts_by_the_time_since_the_look_before() -> None:
    log = ActivityLog(SPAN)
    for at, busy in ((0.0, 0.0), (10.0, 1.0), (40.0, 0.0)):
        log.look(seen(busy, busy), at)

    assert log.means(np.array([0]), 0.0) == pytest.approx([10 / 40])
