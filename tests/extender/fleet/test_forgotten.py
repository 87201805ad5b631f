"""Test that nothing stays of nodes, pods and devices that are gone."""

from collections.abc import Iterator
from dataclasses import fields, replace
from types import FunctionType, MethodType, ModuleType

import numpy as np

from extender.core.devices.readings import DeviceInfo, ForeignProcess, Signal
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.pod_groups import PodGroup
from extender.core.policy import Policy
from extender.fleet.store import DeviceStore
from testkit.agent.fleet_reports import Agents
from testkit.builders import GIB, NOW
from testkit.world import BUSY, World
from tests.extender.fleet.stores import CARD, INSTANCE, free, hold, readings

LEAF = (str, bytes, int, float, type, type(None), np.ndarray, FunctionType, MethodType, ModuleType)


def attributes_of(owner: object) -> Iterator[tuple[str, object]]:
    names = [*getattr(owner, "__dict__", ())]
    names += [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    yield from ((f".{name}", getattr(owner, name)) for name in names if hasattr(owner, name))


def parts_of(owner: object) -> Iterator[tuple[str, object]]:
    if isinstance(owner, dict):
        for key, value in owner.items():
            yield from ((".keys", key), (f"[{key}]", value))
    elif isinstance(owner, list | tuple | set | frozenset):
        yield from (("[]", part) for part in owner)
    else:
        yield from attributes_of(owner)


def mentions(root: object, word: str) -> set[str]:
    """Return where a text is below an object."""
    found: set[str] = set()
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        path, one = waiting.pop()
        for name, part in () if isinstance(one, LEAF) else parts_of(one):
            if isinstance(part, str) and word == part:
                found.add(path + name)
            elif id(part) not in seen:
                seen.add(id(part))
                waiting.append((path + name, part))
    return found


def busy_world() -> World:
    """Return a world with a second node, of which all parts of the fleet know something."""
    world = World()
    world.add_node("stays", 1)
    world.add_node("gone", 2, replicas=4)
    world.read()
    world.card("gone", 1).values |= BUSY
    world.read_after(30, times=3)
    world.bind("a", "gone", on=[world.card("gone")], group=PodGroup("JobSet", "ns", "train"))
    world.bind("b", "gone", on=[world.card("gone")], started_at=world.now)
    world.bind("unshown", "gone", memory_bytes=int(GIB))
    world.bind("failed", "gone", owner="Job train", is_failed_early=True)
    agents = Agents(world)
    agents.replicas = {"": 4}
    agents.pods = {world.card("gone").info.key: ("ns/a", "ns/b")}
    world.read_after(30)
    agents.report("gone")
    key = world.card("gone").info.key
    world.fleet.note_shares("gone", [(key, "uid-a", 5), (key, "uid-b", 6)], world.now)
    process = ForeignProcess(pid=7, name="x", memory_bytes=1, started_at=None, pod="", container="")
    world.fleet.note_foreign("gone", {key: (process,)})
    world.fleet.apply_host_use("gone", HostResources(millicores=5))
    world.fleet.snapshot()
    return world


KEPT = {
    "._allocations.offers._at.keys",  # it may come back with fewer devices
    "._allocations._requested.keys",  # its pods are removed one by one
    "._allocations._models._added.keys",  # it may not add more models when it comes back
}


def test_nothing_stays_of_a_removed_node_and_its_pods() -> None:
    world = busy_world()
    assert len(mentions(world.fleet, "gone")) > 20
    for name in ("a", "b", "unshown", "failed"):
        world.fleet.remove_pod(f"uid-{name}", world.now)

    world.fleet.remove_node("gone")
    world.fleet.snapshot()

    assert mentions(world.fleet, "gone") == KEPT


def test_nothing_stays_of_a_removed_pod() -> None:
    world = busy_world()
    pod = world.fleet.pods["uid-a"]
    world.fleet.apply_pod(replace(pod, is_deleting=True, last_started_at=world.now + 5))
    world.fleet.snapshot()

    world.fleet.remove_pod("uid-a", world.now)
    assert "uid-a" in world.fleet.ledger._gone
    world.clock.now += world.policy.freshness.forget_seconds
    world.card("gone").tenants = ("ns/b",)
    Agents(world).report("gone")
    world.read()
    world.fleet.snapshot()

    assert mentions(world.fleet, "uid-a") == set()
    assert mentions(world.fleet, "ns/a") == set()


def test_a_row_of_a_dropped_device_is_as_a_new_one() -> None:
    store = DeviceStore(Policy())
    everything = {signal.name: 1.0 for signal in Signal}
    for at in range(5):
        store.apply(readings(INSTANCE, at=NOW + at, **everything), NOW + at)
        free(store, 0)
    store.set_lost([0], is_lost=True)
    store.set_withdrawn([0], 3)
    hold(store, 0)
    store.restart_history([0], NOW + 4, is_freed=True)
    store.set_label_total([0], int(80 * GIB))

    store.drop([0])
    other = DeviceInfo(node="other", uuid="GPU-9", model=CARD.model)
    fresh = DeviceStore(Policy())
    for one in (store, fresh):
        one.apply(readings(other, at=NOW + 60), NOW + 60)
        one.forget_node("unknown")

    assert (len(store), store.info(0)) == (1, other)
    found, expected = store.evidence(np.array([0])), fresh.evidence(np.array([0]))
    for column in fields(found):
        one, wanted = getattr(found, column.name), getattr(expected, column.name)
        if isinstance(one, dict):
            known = {signal: one[signal] for signal in wanted}
            np.testing.assert_equal(known, wanted)
            assert all(np.isnan(one[signal]).all() for signal in one.keys() - wanted.keys())
        elif column.name != "node_row":
            np.testing.assert_equal(one, wanted, err_msg=column.name)
