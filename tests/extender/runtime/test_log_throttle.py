"""Limits of repeated log lines, and of all log lines."""

from extender.runtime.log_throttle import LogThrottle


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_equal_line_is_logged_later_with_the_number_skipped() -> None:
    clock = Clock()
    throttle = LogThrottle(60.0, 10, clock)

    assert [throttle.due("full", "a") for _ in range(4)] == [0, None, None, None]
    assert throttle.due("full", "b") == 0
    clock.now = 60.0
    assert [throttle.due("full", "a") for _ in range(2)] == [3, None]


def test_the_number_of_different_lines_is_limited() -> None:
    clock = Clock()
    throttle = LogThrottle(60.0, 10, clock)

    assert [throttle.due(thing) for thing in range(1000)].count(0) == 10
    clock.now = 60.0
    assert [throttle.due(thing) for thing in range(1000, 2000)][:2] == [990, 0]
    clock.now = 120.0
    assert sum(throttle.due(thing) is not None for thing in range(2000, 3000)) == 10
