"""Every waiting pod gets its turn, however many others have other needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.nodes.node_selection import read_selection
from extender.effects.wake_plan import _MAX_PROMISING, MAX_NEEDS, LookOrder
from extender.effects.waker import Waker, build_waker
from extender.kube.client import KubeClient
from extender.settings.service import WakeTarget
from testkit.builders import GPU
from testkit.fake_kube import FakeKube
from testkit.world import World
from tests.extender.effects.waking import (
    EAGER,
    IDLE_ONLY,
    QUICK,
    Clock,
    Recorder,
    count_ranks,
    turn_idle,
    waits,
    waker,
    wakes,
)

EACH = EAGER.model_copy(update={"target": WakeTarget.POD})
GATED = {"is_unscheduled": False, "is_refused": False, "is_gated": True, "awaits_room": True}
PODS = "/api/v1/namespaces/ns/pods"

Wants = Callable[[int], dict[str, Any]]


def too_much_memory(number: int) -> dict[str, Any]:
    return {"wishes": (*IDLE_ONLY, ("idlegpu.io/gpu-memory", f"{200 + number}Gi"))}


def elsewhere(number: int) -> dict[str, Any]:
    spec = {"nodeSelector": {"zone": f"zone-{number}"}}
    return {"selection": read_selection({"spec": spec})}


def too_many(number: int) -> dict[str, Any]:
    return {"resources": {GPU: 2 + number}}


def little_memory(number: int) -> dict[str, Any]:
    return {"wishes": (*IDLE_ONLY, ("idlegpu.io/gpu-memory", f"{1 + number}Mi"))}


@pytest.fixture(autouse=True)
def _restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pauses between steps, because no other work uses the event loop."""
    monkeypatch.setattr("extender.effects.waker._REST", 0.0)


def woken(kube: FakeKube) -> list[str]:
    return [path.removeprefix(f"{PODS}/") for _, path, _ in kube.writes]


async def look(waking: Waker, times: int) -> None:
    for _ in range(times):
        await waking.look()


@pytest.mark.parametrize("confirmations", [1, 2])
@pytest.mark.parametrize("count", [MAX_NEEDS - 1, MAX_NEEDS, 3 * MAX_NEEDS])
@pytest.mark.parametrize("wants", [too_much_memory, elsewhere, too_many])
async def test_pods_that_fit_nowhere_keep_no_gated_pod_waiting(
    kube: FakeKube, client: KubeClient, world: World, wants: Wants, count: int, confirmations: int
) -> None:
    for number in range(count):
        waits(world, f"never-{number:03}", created_at=float(number), **{**GATED, **wants(number)})
    waits(world, "fits", created_at=1e3, **GATED)
    waking = waker(client, world, EACH, replace(QUICK, confirmations=confirmations))
    await look(waking, 2)
    turn_idle(world, "y")

    await look(waking, count // MAX_NEEDS + confirmations)

    assert woken(kube) == ["fits"]


@pytest.mark.parametrize("count", [MAX_NEEDS, 3 * MAX_NEEDS])
async def test_unplaceable_pods_do_not_delay_woken_pods(
    kube: FakeKube, client: KubeClient, world: World, count: int
) -> None:
    for number in range(count):
        waits(world, f"never-{number:03}", **too_much_memory(number))
    waits(world, "fits")
    waking = waker(client, world)
    turn_idle(world, "y")

    await look(waking, count // MAX_NEEDS + 1)

    assert wakes(kube) == ["1 waiting pod may fit: ns/fits on y"]


@pytest.mark.parametrize("looks", range(4))
async def test_room_goes_to_the_most_urgent_pod_in_every_check(
    kube: FakeKube, client: KubeClient, world: World, looks: int
) -> None:
    for number in range(4 * MAX_NEEDS):
        waits(
            world, f"p-{number:03}", created_at=float(number), **{**GATED, **little_memory(number)}
        )
    waits(world, "urgent", created_at=1e3, priority=1, **{**GATED, **little_memory(1000)})
    waking = waker(client, world, EACH, replace(QUICK, confirmations=2))
    await look(waking, looks)
    turn_idle(world, "y")

    await look(waking, 3)
    turn_idle(world, "x")
    await look(waking, 3)

    assert woken(kube) == ["urgent", "p-000"]


async def test_a_more_urgent_pod_that_may_not_use_a_node_does_not_block_it(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    count = 3 * MAX_NEEDS
    for number in range(count):
        changes = {**GATED, **elsewhere(number), **too_much_memory(number)}
        waits(world, f"never-{number:03}", priority=1, **changes)
    for number in range(count):
        waits(world, f"fits-{number:03}", **{**GATED, **little_memory(number)})
    waking = waker(client, world, EACH)
    turn_idle(world, "y")

    await look(waking, 2 * count // _MAX_PROMISING)

    (name,) = woken(kube)
    assert name.startswith("fits-")


async def test_a_check_examines_a_limited_number_of_requests(
    client: KubeClient, world: World
) -> None:
    for number in range(3 * MAX_NEEDS):
        waits(world, f"p-{number}", **{**GATED, **too_much_memory(number)})
    waking = waker(client, world, EACH)
    requested = count_ranks(world)
    turn_idle(world, "y")

    await waking.look()
    assert len(requested) == MAX_NEEDS
    await look(waking, 2)

    assert len(set(requested)) == 3 * MAX_NEEDS


async def test_pods_that_are_woken_repeatedly_without_effect_delay_no_other_pod(
    kube: FakeKube, client: KubeClient
) -> None:
    # Each of them has an idle node, and kube-scheduler never binds them, for example for lack of
    # CPU.
    world = World()
    count = 2 * MAX_NEEDS
    for number in range(count):
        zone = {"zone": f"zone-{number}"}
        world.add_node(f"n-{number:02}", other_labels=zone)
        waits(world, f"vain-{number:02}", priority=1, **{**GATED, **elsewhere(number)})
    world.add_node("last", other_labels={"zone": "last"})
    spec = {"nodeSelector": {"zone": "last"}}
    waits(world, "fits", **{**GATED, "selection": read_selection({"spec": spec})})
    world.read()
    clock = Clock()
    waking = waker(client, world, EACH, clock=clock)

    for _ in range(2 * count // (MAX_NEEDS - _MAX_PROMISING)):
        await waking.look()
        clock.now += 0.5
        for number in range(count):
            world.fleet.ledger.drop(f"uid-vain-{number:02}")

    assert "fits" in woken(kube)


# --- order of turns -------------------------------------------------------------------------------


def needs_of(uids: Sequence[str]) -> Mapping[object, Sequence[str]]:
    """Return a need for each pod, the most urgent first."""
    return {f"need of {uid}": [uid] for uid in uids}


def take(order: LookOrder, needs: Mapping[object, Sequence[str]]) -> list[str]:
    """Run one pass; return the pods that had their turn."""
    order.begin(uid for uids in needs.values() for uid in uids)
    taken = [uid for key in order.pick(needs) for uid in needs[key]]
    order.note(taken)
    return taken


def test_the_most_urgent_come_first_and_then_the_others_in_rotation() -> None:
    order = LookOrder()
    uids = [f"{number:03}" for number in range(3 * MAX_NEEDS)]

    looks = [take(order, needs_of(uids)) for _ in range(3)]

    assert [uid for taken in looks for uid in taken] == uids
    assert take(order, needs_of(uids)) == uids[:MAX_NEEDS]


def test_promising_requests_are_examined_each_time_beside_others() -> None:
    order = LookOrder()
    uids = [f"{number:03}" for number in range(100)]
    needs = needs_of(uids)
    promising = list(needs)[30:80]
    take(order, needs)
    order.note_promising([], promising)

    looks = [take(order, needs) for _ in range(100 // (MAX_NEEDS - _MAX_PROMISING) + 1)]

    always = set.intersection(*map(set, looks))
    assert always == set(uids[30 : 30 + _MAX_PROMISING])
    assert set.union(*map(set, looks)) == set(uids)


def test_a_request_that_is_no_longer_promising_waits_in_rotation() -> None:
    order = LookOrder()
    uids = [f"{number:03}" for number in range(2 * MAX_NEEDS)]
    needs = needs_of(uids)
    take(order, needs)
    order.note_promising([], ["need of 000"])
    assert "000" in take(order, needs)

    order.note_promising(["need of 000"], [])

    assert "000" not in take(order, needs)


@given(data=st.data())
def test_no_pod_waits_for_longer_than_all_the_others_take(data: st.DataObject) -> None:
    order = LookOrder()
    waiting = [f"old-{number}" for number in range(data.draw(st.integers(1, 120)))]
    late = data.draw(st.integers(0, 40))
    due = set(waiting)
    order.begin(waiting)  # they have waited since an earlier check

    for number in range(len(waiting) // (MAX_NEEDS - _MAX_PROMISING) + 1):
        # New pods with other needs arrive; the needs of others change, and some are promising.
        pods = [*(f"new-{number}-{each}" for each in range(late)), *waiting]
        needs: dict[object, Sequence[str]] = {(number, uid): [uid] for uid in pods}
        promising = data.draw(st.lists(st.sampled_from(list(needs)), max_size=40))
        order.note_promising([], promising)
        due -= set(take(order, needs))

    assert not due


def test_a_change_of_settings_keeps_the_rotation(world: World) -> None:
    before = build_waker(Recorder(), world.placer, EACH, kubeconfig=None)

    after = build_waker(Recorder(), world.placer, EACH, kubeconfig=None, before=before)

    assert after.order is before.order
