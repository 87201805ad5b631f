"""The soak notices work that has stopped, and memory that grows."""

import math

import pytest

from bench.soak import SETTINGS, Slope, lost, slope_of, total
from bench.world import FleetSpec, World, open_world, wait_until

SPEC = FleetSpec(nodes=20, gpu_pods=30, other_pods=50)
HALTED = {
    "events": {"enabled": False},
    "unasked": {"enabled": False},
    "wake": {"enabled": False},
    "regret": {"pods": 0},
}


def ready(world: World) -> World:
    world.wait_ready()
    wait_until(world.has_readings, "the first readings", 180.0)
    return world


@pytest.mark.parametrize(
    ("halted", "stopped"),
    [
        ({}, []),
        (
            HALTED,
            [
                "the lease is renewed",
                "pods bound unasked are counted",
                "an event tells of a placement",
                "placements are judged",
            ],
        ),
    ],
    ids=["all goes on", "some is halted"],
)
def test_work_that_shows_no_result_any_more_is_named(
    halted: dict[str, object], stopped: list[str]
) -> None:
    settings = {**SETTINGS, **halted}
    with open_world(SPEC, settings=settings, scrape_seconds=1.0, refresh_seconds=1.0) as world:
        ready(world)

        def is_named() -> bool:  # on a busy machine other work is late too, but not for ever
            return lost(world, limit_seconds=5.0) == stopped

        wait_until(is_named, f"only {stopped} shows no result", 180.0)


def test_growth_is_told_from_what_comes_and_goes() -> None:
    flat = [(at / 10, 500.0 + 20.0 * math.sin(at / 40)) for at in range(3600)]
    growing = [(at, mib + at * 100 / 3600) for at, mib in flat]

    calm, grown = slope_of(flat), slope_of(growing)

    assert abs(calm.each_hour) < 2 * calm.spread
    assert grown.each_hour == pytest.approx(calm.each_hour + 100)
    assert grown.spread == pytest.approx(calm.spread)


def test_steady_growth_has_no_spread() -> None:
    slope = slope_of([(float(at), at / 60) for at in range(600)])

    assert (slope.each_hour, slope.spread) == pytest.approx((60, 0), abs=1e-6)


def test_a_slope_is_judged_by_its_upper_end() -> None:
    least, most = Slope(each_hour=70.0, spread=15.0).between

    assert (least, most) == (40.0, 100.0)


def test_series_of_a_metric_are_summed() -> None:
    assert total({'a{x="1"}': 2.0, "a": 1.0, "ab": 5.0, "b": 7.0}, ["a", "b"]) == 10.0
