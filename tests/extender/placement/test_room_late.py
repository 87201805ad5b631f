"""What room a shared GPU has where pods load late, and where nothing is read for long."""

import pytest

from tests.builders import GIB, request
from tests.extender.placement.test_room import (
    LATER,
    READY,
    REFUSED,
    refused,
    room,
    sliced,
    tenant,
    use,
)
from tests.worlds import World


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_pod_without_a_declaration_that_loads_late_keeps_its_share_until_it_has_it(
    is_mapped: bool,
) -> None:
    world = sliced(in_use=5)
    world.is_mapped = is_mapped
    tenant(world, "late")

    for gib, expected in ((0, 65), (1, 65), (4, 65), (9, 66), (25, 50), (3, 72)):
        use(world, 5 + gib, 130)
        assert room(world) == pytest.approx(expected), gib


def test_what_pods_like_it_use_is_kept_for_a_pod_that_loads_late() -> None:
    world = sliced(2)
    first = world.bind("first", on=[world.card(index=1)], owner="Job train")
    use(world, 32, LATER, index=1)
    world.end(first)
    use(world, 0, index=1)
    tenant(world, "other")
    use(world, 20, READY)

    world.bind("second", on=[world.card()], owner="Job train")
    use(world, 21, LATER)  # it holds a little already

    assert in_use_by_card(world) == pytest.approx([20 + 32, 0], abs=1)
    use(world, 21, READY)
    assert in_use_by_card(world) == pytest.approx([21, 0])


def in_use_by_card(world: World) -> list[float]:
    """Return what is no room on each card, in GiB."""
    devices = world.placer.explain_nodes(request(), ["node"])[0].devices
    return [80 - (device.free_bytes or 0) / GIB for device in devices]


# --- while nothing is read ------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [100.0, 300.0, 500.0, 800.0])
def test_what_was_last_measured_counts_however_long_nothing_is_read(seconds: float) -> None:
    world = sliced(in_use=10)
    pod = tenant(world, "undeclared")
    use(world, 50, LATER)

    world.clock.now += seconds
    world.fleet.look_after_silent()

    assert room(world) == pytest.approx(30)
    world.end(pod)
    assert refused(world, 31) == REFUSED
    use(world, 10)
    assert room(world) == pytest.approx(70)


def test_what_foreign_processes_held_counts_as_a_pod_ends_long_after_the_last_reading() -> None:
    world = sliced(in_use=40)
    pod = tenant(world, "a", 1)
    use(world, 41, LATER)

    world.clock.now += 800
    world.fleet.look_after_silent()
    assert room(world) == pytest.approx(39)
    world.end(pod)

    assert room(world) == pytest.approx(40)
