"""Test that nothing grows while nodes and pods come and go for weeks."""

from collections import deque
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType

import pytest

from testkit.agent.fleet_reports import Agents
from testkit.builders import GPU
from testkit.world import World

CYCLES = 24
PAUSE_SECONDS = 6 * 3600.0


def count_items(root: object) -> dict[str, int]:
    """Count the items of every container that an object reaches, by its path of attributes."""
    counts: dict[str, int] = {}
    seen, waiting = set[int](), [(root, "")]
    while waiting:
        found, path = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, dict | set | list | deque):
            counts[path] = counts.get(path, 0) + len(found)
        if isinstance(found, dict | MappingProxyType):
            waiting += [(value, f"{path}{{}}") for value in found.values()]
        elif isinstance(found, set | frozenset | list | tuple | deque):
            waiting += [(value, f"{path}[]") for value in found]
        elif type(found).__module__.startswith("extender."):
            slots = (getattr(kind, "__slots__", ()) for kind in type(found).__mro__)
            names = [*chain.from_iterable(slots), *getattr(found, "__dict__", ())]
            waiting += [(getattr(found, name, None), f"{path}.{name}") for name in names]
    return counts


def check_growth(before: dict[str, int], after: dict[str, int]) -> None:
    """Fail if former cycles left items: one in every second cycle would be enough."""
    grown = {path: (before.get(path, 0), after[path]) for path in after}
    assert sum(after.values()) - sum(before.values()) < CYCLES, {
        path: counts for path, counts in grown.items() if counts[1] > counts[0]
    }


def live_and_go(world: World, number: int, *, is_node_first: bool) -> None:
    """Add a node of a zone of its own with two pods; then remove all, and wait.

    A node that stays offers other instances each time.
    """
    node = f"node-{number}"
    record = world.add_node(node, 2)
    zone = {"topology.kubernetes.io/zone": f"zone-{number}"}
    world.fleet.apply_node(replace(record, labels={**record.labels, **zone}))
    world.read_after(30.0)
    pods = [
        world.bind(f"pod-{number}", node, on=[world.card(node)], owner="Job job"),
        world.bind(f"other-{number}", node, owner="Job job", is_failed_early=True),
    ]
    world.read_after(30.0)
    world.fleet.snapshot()
    removals = [
        partial(world.fleet.remove_node, node),
        *(partial(world.fleet.remove_pod, pod.uid, world.now) for pod in pods),
    ]
    for remove in removals if is_node_first else reversed(removals):
        remove()
    for index in range(2):
        world.remove_card(node, index)
    world.now += PAUSE_SECONDS
    offered = {GPU: 1, f"nvidia.com/mig-{number}g.5gb": 2}
    world.add_node("lasting", 1, allocatable=offered, capacity=offered)
    world.read()
    world.fleet.snapshot()


@pytest.mark.parametrize("is_node_first", [True, False], ids=["node-first", "pods-first"])
def test_state_of_the_fleet_does_not_grow_with_former_nodes_and_pods(
    *, is_node_first: bool
) -> None:
    world = World()
    for number in range(CYCLES):
        live_and_go(world, number, is_node_first=is_node_first)
    before = count_items(world.fleet)

    for number in range(CYCLES, 3 * CYCLES):
        live_and_go(world, number, is_node_first=is_node_first)

    check_growth(before, count_items(world.fleet))


def test_reports_of_agents_whose_nodes_were_just_removed_leave_nothing() -> None:
    world = World()
    agents = Agents(world)
    agents.replicas = {"": 4}

    def report_late(number: int) -> None:
        node = f"node-{number}"
        world.add_node(node, 1, replicas=4)
        agents.report(node)
        world.fleet.remove_node(node)
        agents.report(node)
        world.remove_card(node, 0)
        world.now += PAUSE_SECONDS
        world.add_node("lasting", 1)
        world.fleet.expire_silent()
        world.fleet.snapshot()

    for number in range(CYCLES):
        report_late(number)
    before = count_items(world.fleet)
    for number in range(CYCLES, 3 * CYCLES):
        report_late(number)

    check_growth(before, count_items(world.fleet))
