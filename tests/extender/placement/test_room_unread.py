"""Room of a shared GPU without readings for a long time."""

import pytest

from tests.extender.placement.rooms import LATER, REFUSED, refused, room, sliced, tenant, use


@pytest.mark.parametrize("seconds", [100.0, 300.0, 500.0, 800.0])
def test_the_last_measurement_counts_while_nothing_is_read(seconds: float) -> None:
    world = sliced(in_use=10)
    pod = tenant(world, "undeclared")
    use(world, 50, LATER)

    world.clock.now += seconds
    world.fleet.expire_silent()

    assert room(world) == pytest.approx(30)
    world.end(pod)
    assert refused(world, 31) == REFUSED
    use(world, 10)
    assert room(world) == pytest.approx(70)


def test_foreign_memory_counts_if_a_pod_ends_long_after_the_last_reading() -> None:
    world = sliced(in_use=40)
    pod = tenant(world, "a", 1)
    use(world, 41, LATER)

    world.clock.now += 800
    world.fleet.expire_silent()
    assert room(world) == pytest.approx(39)
    world.end(pod)

    assert room(world) == pytest.approx(40)
