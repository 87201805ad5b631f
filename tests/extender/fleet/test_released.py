"""Test what ended pods and victims release, and what remains of them."""

import pytest

from extender.core.devices.readings import DeviceInfo, Signal
from testkit.agent.fleet_reports import Agents
from testkit.builders import GIB, GPU
from testkit.world import Device, World, one_node
from tests.extender.fleet.changes import reported, uses

MIG = "nvidia.com/mig-1g.10gb"

# --- nodes without some pods ----------------------------------------------------------------------


def test_a_pod_that_leaves_a_shared_device_releases_only_its_own_memory() -> None:
    world = one_node(1, replicas=4)
    declared = {"leaver": 20, "stays": 10, "unknown": None}
    for name, gib in declared.items():
        memory = None if gib is None else int(gib * GIB)
        world.bind(name, on=[world.card()], memory_bytes=memory)
    uses(world, 50 * GIB)
    world.read_after(600)

    leaving = world.fleet.leaving("node", frozenset({"uid-leaver"}))[GPU]

    assert leaving.freed == (False,)
    assert leaving.row.used == (2,)
    assert leaving.released_bytes == (20 * GIB,)
    assert leaving.released_others == (0.0,)


def test_the_last_pod_without_a_declaration_releases_all_undeclared_memory() -> None:
    world = one_node(1, replicas=4)
    world.bind("stays", on=[world.card()], memory_bytes=int(10 * GIB))
    world.bind("leaver", on=[world.card()])
    uses(world, 50 * GIB)
    world.read_after(600)

    leaving = world.fleet.leaving("node", frozenset({"uid-leaver"}))[GPU]

    assert leaving.freed == (False,)
    assert leaving.released_bytes == leaving.released_others == (40 * GIB,)


def test_memory_that_a_pod_was_seen_to_use_is_what_it_releases() -> None:
    world = one_node(1, replicas=4)
    for name in ("leaver", "stays"):
        world.bind(name, on=[world.card()], memory_bytes=int(10 * GIB))
    uses(world, 40 * GIB)
    key = world.card().info.key
    reported(world, (key, "ns/leaver", int(25 * GIB)), (key, "ns/stays", int(15 * GIB)))

    leaving = world.fleet.leaving("node", frozenset({"uid-leaver"}))[GPU]

    assert leaving.released_bytes == (25 * GIB,)
    assert leaving.released_others == (15 * GIB,)


def test_a_share_whose_holder_is_unknown_releases_its_declaration() -> None:
    world = one_node(1, replicas=4)
    world.is_mapped = False
    for name in ("leaver", "stays"):
        world.bind(name, memory_bytes=int(10 * GIB))
    uses(world, 15 * GIB)
    world.read_after(600)

    leaving = world.fleet.leaving("node", frozenset({"uid-leaver"}))[GPU]

    assert leaving.freed == (False,)
    assert leaving.released_bytes == (10 * GIB,)
    assert leaving.released_others == (0.0,)


def test_a_share_whose_holder_is_unknown_releases_what_no_pod_declared() -> None:
    world = one_node(1, replicas=4)
    world.is_mapped = False
    world.bind("leaver")
    world.bind("stays", memory_bytes=int(10 * GIB))
    uses(world, 50 * GIB)
    world.read_after(600)

    leaving = world.fleet.leaving("node", frozenset({"uid-leaver"}))[GPU]

    assert leaving.released_bytes == leaving.released_others == (40 * GIB,)


def test_the_last_pod_of_a_device_releases_all_but_foreign_memory() -> None:
    world = one_node(1, replicas=4)
    uses(world, 8 * GIB)
    world.read_after(30, times=3)
    world.bind("leaver", on=[world.card()])
    uses(world, 30 * GIB)
    world.read_after(600)

    leaving = world.fleet.leaving("node", frozenset({"uid-leaver"}))[GPU]

    assert leaving.freed == (True,)
    assert leaving.released_bytes == leaving.released_others == (22 * GIB,)
    assert leaving.foreign == (True,)


@pytest.mark.parametrize(("cards", "released"), [(1, (30 * GIB,)), (2, (30 * GIB, 0.0))])
def test_an_ended_pod_of_an_unknown_share_held_the_device_that_it_was_assumed_on(
    cards: int, released: tuple[float, ...]
) -> None:
    world = one_node(cards, replicas=4)
    world.is_mapped = False
    leaver = world.bind("leaver", memory_bytes=int(30 * GIB))
    world.bind("stays", memory_bytes=int(10 * GIB))
    uses(world, 60 * GIB)
    world.read_after(600)

    world.end(leaver)

    leaving = world.row().leaving
    assert leaving is not None
    assert leaving.released_bytes == released


def test_shares_of_init_containers_that_no_source_shows_release_no_memory() -> None:
    world = one_node(1, replicas=4)
    world.is_mapped = False
    leaver = world.bind("leaver", count=3, lasting={GPU: 1}, memory_bytes=int(20 * GIB))
    world.bind("stays", memory_bytes=int(30 * GIB))
    uses(world, 50 * GIB)
    world.read_after(600)

    world.end(leaver)

    leaving = world.row().leaving
    assert leaving is not None
    assert leaving.released_bytes == (20 * GIB,)


def test_an_ended_pod_of_an_unknown_share_held_one_device_when_another_was_shown_later() -> None:
    world = World()
    world.add_node(cards=2, replicas=4)
    world.is_mapped = world.card(index=0).is_shown = False
    world.read()
    leaver, *_ = (world.bind(name, memory_bytes=int(20 * GIB)) for name in "abcd")
    world.card(index=0).is_shown = True
    uses(world, 40 * GIB)
    world.card(index=1).values.update(world.card(index=0).values)
    world.read_after(600)

    world.end(leaver)

    leaving = world.row().leaving
    assert leaving is not None
    assert sorted(leaving.released_bytes) == [0.0, 20 * GIB]


@pytest.mark.parametrize("count", [1, 2])
def test_whole_devices_of_an_unshown_pod_are_the_fullest_ones(count: int) -> None:
    world = one_node(4)
    world.is_mapped = False
    world.bind("leaver", count=count)
    for index, used in enumerate((1, 30, 2, 20)):
        world.card(index=index).values.update(
            {Signal.MEMORY_USED: used * GIB, Signal.MEMORY_FREE: (80 - used) * GIB}
        )
    world.read_after(30)

    leaving = world.fleet.leaving("node", frozenset({"uid-leaver"}))[GPU]

    assert leaving.freed == (False, True, False, count == 2)
    assert leaving.released_bytes[1] == 30 * GIB


def test_nothing_leaves_with_no_victim() -> None:
    world = one_node(2)
    world.bind("stays", on=[world.card()])
    uses(world, 30 * GIB)
    world.read_after(30)

    leaving = world.fleet.leaving("node", frozenset())[GPU]

    assert leaving.freed == (False, False)
    assert leaving.released_bytes == (0.0, 0.0)


@pytest.mark.parametrize(
    ("used", "released", "others"),
    [(50, 40, 40), (25, 15, 15), (70, 40, 40), (10, 0, 0)],
    ids=["all", "a part", "and more of others", "nothing"],
)
def test_memory_of_an_ended_pod_that_readings_still_show_will_be_free(
    used: float, released: float, others: float
) -> None:
    world = one_node(1, replicas=4)
    world.bind("stays", on=[world.card()], memory_bytes=int(10 * GIB))
    leaver = world.bind("leaver", on=[world.card()])
    uses(world, 50 * GIB)
    world.read_after(600)

    world.end(leaver)
    uses(world, used * GIB)
    world.read_after(5)

    leaving = world.row().leaving
    assert (leaving is None) is (released == 0)
    if leaving is not None:
        assert leaving.released_bytes == (released * GIB,)
        assert leaving.released_others == (others * GIB,)


def test_a_clock_that_was_set_back_makes_no_ended_pod_older() -> None:
    world = one_node(1, replicas=4)
    world.bind("stays", on=[world.card()], memory_bytes=int(10 * GIB))
    leaver = world.bind("leaver", on=[world.card()])
    uses(world, 50 * GIB)
    world.read_after(600)
    world.end(leaver)
    world.fleet.snapshot()

    world.clock.now -= 300.0
    world.read_after(5)
    assert world.row().leaving is not None
    world.read_after(70)

    assert world.row().leaving is None


def test_an_ended_pod_held_no_device_that_took_the_row_of_a_former_one() -> None:
    world = World()
    world.add_node("node", 0, resource=MIG, allocatable={MIG: 1}, capacity={MIG: 1})
    former = repartitioned(world, "7")
    leaver = world.bind("leaver", on=[former], resources={MIG: 1})
    world.read_after(600, MEMORY_USED=9 * GIB, MEMORY_FREE=GIB)
    world.end(leaver)
    world.read_after(5)
    assert world.row(resource=MIG).leaving is not None

    repartitioned(world, "8")
    new = repartitioned(world, "9", GIB / 32)
    assert world.fleet.store.row_of(new.info.key) == 0
    world.bind("new", on=[new], resources={MIG: 1})
    world.read_after(5, MEMORY_USED=9 * GIB, MEMORY_FREE=GIB)

    assert world.row(resource=MIG).leaving is None


def repartitioned(world: World, instance: str, used: float = GIB / 64) -> Device:
    """Replace the MIG instances of the card by a new one."""
    world.remove_card("node", 0)
    info = DeviceInfo(
        node="node", uuid="GPU-node-0", gpu_instance_id=instance, index=0, mig_profile="1g.10gb"
    )
    world.show(info)
    world.read_after(5, MEMORY_USED=used, MEMORY_FREE=10 * GIB - used)
    return world.card(instance=instance)


# --- pods that are gone ---------------------------------------------------------------------------


def test_an_answer_about_a_deleted_pod_comes_too_late_for_a_while() -> None:
    world = one_node(2)
    world.add_waiting("a", "ns", resources={GPU: 1})
    world.fleet.remove_pod("uid-a", world.now)

    world.place("a")
    assert world.fleet.ledger.get("uid-a") is None
    world.clock.now += world.policy.assumed.tentative_seconds - 1.0
    world.fleet.snapshot()
    world.place("a")
    assert world.fleet.ledger.get("uid-a") is None
    world.clock.now += 1.0
    world.fleet.snapshot()
    world.place("a")

    assert world.fleet.ledger.get("uid-a") is not None


def test_devices_that_are_forgotten_are_missing_from_their_node() -> None:
    world = one_node(2)
    world.fleet.snapshot()
    world.clock.now += world.policy.freshness.forget_seconds + 1.0

    world.fleet.expire_silent()

    assert not world.fleet.is_settled
    infos = [world.fleet.store.info(slot) for slot in world.row().slots]
    assert [info and info.uuid for info in infos] == ["", ""]


def test_a_silent_agent_and_a_forgotten_device_both_change_their_nodes() -> None:
    world = World()
    for name in ("by-agent", "forgotten"):
        world.add_node(name, 1)
    world.read()
    agents = Agents(world)
    world.clock.now += world.policy.freshness.forget_seconds - 130.0
    agents.report("by-agent")
    world.fleet.snapshot()
    world.clock.now += 131.0

    world.fleet.expire_silent()

    assert world.fleet._late == {"by-agent", "forgotten"}


@pytest.mark.parametrize(
    ("used", "released"), [(30, 0), (35, 5), (45, 10)], ids=["nothing", "a part", "all"]
)
def test_an_ended_pod_releases_what_it_used_of_its_declaration(
    used: float, released: float
) -> None:
    world = one_node(1, replicas=4)
    world.bind("others", on=[world.card()])
    uses(world, 30 * GIB)
    world.read_after(600)
    leaver = world.bind("leaver", on=[world.card()], memory_bytes=int(10 * GIB))
    uses(world, used * GIB)
    world.read_after(600)

    world.end(leaver)
    world.fleet.snapshot()

    row = world.fleet.store.row_of(world.card().info.key)
    assert world.fleet.store._float["released_bytes"][row] == released * GIB
