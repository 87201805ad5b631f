"""Room of GPUs whose pod becomes known after readings have shown the pod's memory."""

import pytest

from testkit.agent.fleet_reports import Agents
from testkit.builders import GIB, rejected, request
from testkit.world import BUSY, IDLE, World
from tests.extender.placement.rooms import LATER, room, sliced, tenant, use


@pytest.mark.parametrize(("before", "left"), [(0.0, 30.0), (10.0, 20.0)])
def test_declared_memory_of_a_pod_that_becomes_known_late_counts_once(
    before: float, left: float
) -> None:
    world = sliced()
    if before:
        tenant(world, "first", before)
    use(world, before, LATER)
    bound_at = world.now
    use(world, before + 40, LATER)
    use(world, before + 40)

    world.bind("late", on=[world.card()], memory_bytes=50 * int(GIB), bound_at=bound_at)
    use(world, before + 40)

    assert room(world) == pytest.approx(left)


def test_foreign_memory_stays_known_when_a_pod_comes_in_time() -> None:
    world = sliced(in_use=40)

    world.now += 1.0
    world.bind("pod", on=[world.card()], memory_bytes=20 * int(GIB), bound_at=world.now - 1.0)
    use(world, 40)

    assert room(world) == pytest.approx(20)


def test_a_gpu_is_not_foreign_after_a_pod_that_became_known_late() -> None:
    world = World()
    world.is_mapped = False
    world.add_node("node", 3)
    world.read_after(30.0)
    bound_at = world.now
    world.card().values.update(BUSY)
    world.read_after(30.0, times=3)

    late = world.bind("late", bound_at=bound_at, started_at=bound_at)
    world.read_after(30.0)
    world.end(late)
    world.card().values.update(IDLE)

    assert rejected(world.rank(request(3))) == {}


def test_memory_that_the_first_reading_with_its_pod_shows_counts_once() -> None:
    world = sliced(2)
    tenant(world, "pod", 30, on=world.card(index=1))
    assert world.row().used == (1, 0)  # until a source shows its card

    use(world, 25, index=1)

    card = world.placer.explain_nodes(request(), ["node"])[0].devices[1]
    assert card.free_bytes == pytest.approx(50 * GIB)


def test_foreign_memory_of_an_agent_stays_known_when_a_pod_becomes_known_late() -> None:
    world = sliced()
    world.now += LATER
    Agents(world).report(MEMORY_USED=20 * GIB, MEMORY_FREE=60 * GIB, foreign_bytes=20 * GIB)

    world.bind("late", memory_bytes=30 * int(GIB), bound_at=world.now - 200)

    assert room(world) == pytest.approx(30)


def test_memory_by_process_counts_beside_foreign_memory_of_an_agent() -> None:
    world = sliced()
    late, other = tenant(world, "late", 10), tenant(world, "other")
    agents, key = Agents(world), world.card().info.key
    agents.pods = {key: (late.key, other.key)}
    shares = [(key, late.uid, 0), (key, other.uid, int(25 * GIB))]

    world.now += LATER
    world.fleet.note_shares("node", shares, world.now)
    agents.report(MEMORY_USED=40 * GIB, MEMORY_FREE=40 * GIB, foreign_bytes=15 * GIB)

    assert room(world) == pytest.approx(30)
