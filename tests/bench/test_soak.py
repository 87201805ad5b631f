"""The soak test detects stopped background work and growing memory."""

from bench.soak import SETTINGS, lost
from bench.world import FleetSpec, World, open_world, wait_until

SPEC = FleetSpec(nodes=20, gpu_pods=30, other_pods=50)
HALTED = {
    "events": {"enabled": False},
    "bypassed": {"enabled": False},
    "wake": {"enabled": False},
    "regret": {"pods": 0},
}


def ready(world: World) -> World:
    world.wait_ready()
    wait_until(world.has_readings, "the first readings", 180.0)
    return world


def test_work_without_a_result_is_named() -> None:
    stopped = {
        "the lease is renewed",
        "bypassed pods are counted",
        "an event reports a placement",
        "placements are judged",
    }
    settings = {**SETTINGS, **HALTED}
    with open_world(SPEC, settings=settings, scrape_seconds=1.0, refresh_seconds=1.0) as world:
        ready(world)

        def is_named() -> bool:  # on a busy machine other work is late too, but not for ever
            return set(lost(world, limit_seconds=5.0, judged_seconds=5.0)) == stopped

        wait_until(is_named, f"only {stopped} shows no result", 180.0)
