"""Test nodes whose GPUs get another resource name while pods of the former one run."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.decision.filtering import Code
from extender.core.devices.readings import Signal
from extender.core.request.request import GpuRequest
from testkit.builders import GIB, GPU
from testkit.world import BUSY, World, one_node

SHARED = "nvidia.com/gpu.shared"


def offer(made: World, allocatable: dict[str, int], capacity: dict[str, int] | None = None) -> None:
    """Make the node offer other resources."""
    before = made.fleet.nodes["node"]
    made.fleet.apply_node(
        replace(before, allocatable=allocatable, capacity=capacity or allocatable)
    )


def use(made: World, *cards: int, **changes: Any) -> None:
    """Bind a pod to each of these cards, with readings that show its use for a long time."""
    for card in cards:
        made.bind(f"p{card}", on=[made.card(index=card)], **changes)
        made.card(index=card).values.update(BUSY)
    made.read_after(60.0, times=5)


def code(made: World, resource: str, memory_bytes: int | None = None) -> Code:
    """Return the rejection code of the node for a pod that requests one device of a resource."""
    requested = GpuRequest(resource=resource, count=1, memory_bytes=memory_bytes)
    return Code(int(made.rank(requested).codes[0]))


@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "unmapped"])
@pytest.mark.parametrize("former", [0, 2], ids=["former-name-gone", "former-name-left"])
def test_pods_of_the_former_resource_are_not_foreign(former: int, is_mapped: bool) -> None:
    made = one_node(2)
    made.is_mapped = is_mapped
    use(made, 0, 1)

    offer(made, {SHARED: 20}, {SHARED: 20, GPU: former})
    made.read_after(60.0, times=5)

    assert code(made, SHARED) is Code.PASSES
    assert code(made, SHARED, memory_bytes=int(40 * GIB)) is Code.NO_MEMORY


def test_a_resource_name_without_devices_says_nothing_about_them() -> None:
    made = one_node(2)
    offer(made, {GPU: 2, SHARED: 0}, {GPU: 2, SHARED: 20})
    use(made, 0)

    assert made.estimated(made.card(), "penalty") == 0.0
    assert not made.estimated(made.card(), "is_foreign")
    assert made.estimated(made.card(), "utilization") == pytest.approx(0.9)


def test_readings_of_a_pod_under_the_old_resource_count_for_none() -> None:
    made = one_node(1)
    made.is_mapped = False
    made.card().values.update(BUSY)
    pod = made.bind("a")
    made.read_after(60.0, times=5)
    offer(made, {SHARED: 10})
    made.read_after(60.0)

    made.clock.now += 30.0
    made.end(pod)
    for age in (20.0, 10.0):
        made.read(measured_at=made.clock.now - age)

    assert not made.estimated(made.card(), "is_foreign")


@pytest.mark.parametrize("former", [0, 20], ids=["former-name-gone", "former-name-left"])
def test_shared_pods_that_keep_running_are_not_foreign_on_whole_cards(former: int) -> None:
    made = one_node(2)
    offer(made, {SHARED: 20})
    use(made, 0, 1, resources={SHARED: 1})

    offer(made, {GPU: 2, SHARED: 0}, {GPU: 2, SHARED: former})
    made.read_after(60.0, times=5)

    assert code(made, GPU) is Code.PASSES


def test_whole_and_shared_cards_of_a_node_are_held_by_pods_of_either() -> None:
    made = one_node(2)
    offer(made, {GPU: 1, SHARED: 10})
    use(made, 0)
    use(made, 1, resources={SHARED: 1})

    assert [made.estimated(made.card(index=card), "is_foreign") for card in (0, 1)] == [0.0, 0.0]


def test_use_without_a_pod_of_any_resource_is_still_foreign() -> None:
    made = one_node(2)
    use(made, 0)
    offer(made, {SHARED: 20})
    made.card(index=1).values[Signal.MEMORY_USED] = 40 * GIB

    made.read_after(60.0, times=5)

    assert made.estimated(made.card(index=1), "is_foreign")
