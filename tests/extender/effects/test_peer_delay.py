"""Delay of another replica's messages, measured with clocks that differ."""

import pytest

from extender.effects.peers import _WINDOW_SECONDS, _Delay

APART = 12_345.0
"""Offset of the local clock from the other replica's."""


def measured(delay: _Delay, at: float, late: float, *, apart: float = APART) -> float:
    """Record a message that was sent at a local time; return the measured delay."""
    return delay.of(at - apart, at + late)


def test_the_quickest_message_of_late_is_the_measure() -> None:
    delay = _Delay()
    lateness = [0.3, 0.002, 0.05, 0.001, 0.7]

    found = [measured(delay, float(at), late) for at, late in enumerate(lateness)]

    assert found == pytest.approx([0.0, 0.0, 0.048, 0.0, 0.699])


def test_delay_is_kept_across_windows() -> None:
    delay = _Delay()
    measured(delay, 0.0, 0.0)

    assert measured(delay, _WINDOW_SECONDS + 1.0, 0.5) == pytest.approx(0.5)


@pytest.mark.parametrize("jump", [-60.0, 60.0], ids=["we stood still", "they stood still"])
def test_a_changed_clock_offset_is_soon_estimated_again(jump: float) -> None:
    delay = _Delay()
    for at in range(5):
        measured(delay, float(at), 0.0)

    apart = APART + jump
    found = [measured(delay, float(at), 0.0, apart=apart) for at in range(5, 40)]

    assert found[int(2 * _WINDOW_SECONDS) :] == pytest.approx(
        [0.0] * (35 - int(2 * _WINDOW_SECONDS))
    )


def test_after_a_long_silence_the_offset_is_estimated_again() -> None:
    delay = _Delay()
    measured(delay, 0.0, 0.0)

    assert measured(delay, 3 * _WINDOW_SECONDS, 0.5) == 0.0


def test_drifting_clocks_add_little_to_the_estimated_delay() -> None:
    delay = _Delay()
    drift = 0.001  # the largest drift that NTP corrects, on both sides

    found = [measured(delay, at / 10, 0.001, apart=APART + drift * at / 10) for at in range(1000)]

    assert 0.0 < max(found) <= 2 * _WINDOW_SECONDS * drift + 1e-6
