"""Order of nodes for a pod of a group."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision.decision import Decision, decide
from extender.core.decision.device_sets import JOINED
from extender.core.decision.evaluation import Overlay
from extender.core.decision.filtering import Code
from extender.core.decision.group_fit import _QUARTERS, GroupNeed, Topology, _budget, _units
from extender.core.decision.scoring import (
    _LOAD,
    _MOST_FIT,
    _MOST_SHARED_STRANDED,
    _MOST_STRANDED,
    _SHARED_FULLNESS,
    _STRANDED,
    FIT,
    PRICE,
    SHARED,
    UNITS,
)
from extender.core.nodes.snapshot import Tenant
from extender.core.policy import Policy, PriceMode, Prices
from extender.core.request.request import GpuRequest
from testkit.builders import GPU, Gpu, Node, ranking, rejected, request, snapshot_of

BUSY = Gpu(utilization=0.9)


def nodes_of(free: Mapping[str, int], cards: int = 8) -> dict[str, Node]:
    """Return nodes with `cards` cards, of which the given numbers are free."""
    return {
        name: Node(gpus=tuple(Gpu(used=int(at >= left)) for at in range(cards)))
        for name, left in free.items()
    }


def need(
    nodes: Mapping[str, Node],
    *,
    size: int,
    count: int = 1,
    placed: Mapping[str, int] | None = None,
    **more: Any,
) -> GroupNeed:
    """Return a group's needs; the first letters of a node's name are its rack and zone."""
    names = sorted(nodes)
    topology = Topology.of(
        {"x/rack": [name[:2] for name in names], "x/zone": [name[0] for name in names]}
    )
    there = dict(placed or {})
    rest = (size - sum(there.values())) * count
    return replace(
        GroupNeed(name="JobSet train", size=size, placed=there, rest=rest, topology=topology),
        **more,
    )


def decided(
    nodes: Mapping[str, Node],
    group: GroupNeed | None,
    requested: GpuRequest | None = None,
    *,
    overlay: Overlay | None = None,
    candidates: Sequence[str] | None = None,
    policy: Policy | None = None,
) -> Decision:
    return decide(
        snapshot_of(nodes),
        requested or request(),
        tuple(nodes) if candidates is None else tuple(candidates),
        policy or Policy(),
        overlays={GPU: overlay or {}},
        group=group,
    )


def test_the_first_pod_goes_to_the_rack_that_has_room_for_all() -> None:
    # Without the group the pod would go to a1-x, where it leaves no free GPU.
    nodes = nodes_of({"a1-x": 1, "a1-y": 2, "a2-x": 2, "a2-y": 2})

    assert ranking(decided(nodes, None))[0] == "a1-x"
    assert ranking(decided(nodes, need(nodes, size=4)))[:2] == ["a2-x", "a2-y"]


def test_the_last_pod_of_a_group_goes_where_it_would_go_alone() -> None:
    nodes = nodes_of({"a1-x": 1, "a2-x": 2})

    assert ranking(decided(nodes, need(nodes, size=1))) == ranking(decided(nodes, None))


def test_a_single_node_with_room_for_all_is_nearest() -> None:
    nodes = nodes_of({"a1-x": 3, "a1-y": 1, "a2-x": 4})

    best = decided(nodes, need(nodes, size=4))

    assert ranking(best)[0] == "a2-x"
    assert best.group is not None
    assert [(one.label, one.name, one.pods) for one in best.group.fitting] == [("node", "a2-x", 4)]
    assert best.group.of(best.place_of("a2-x")).words == "node with room for the rest of its group"


def test_group_uses_the_roomiest_rack_of_a_zone_if_no_rack_has_room() -> None:
    nodes = nodes_of({"a1-x": 3, "a2-x": 1, "b1-x": 1, "b2-x": 1})

    best = decided(nodes, need(nodes, size=4))

    assert ranking(best)[:2] == ["a1-x", "a2-x"]
    assert best.group is not None
    assert [(one.label, one.name, one.pods) for one in best.group.fitting] == [("x/zone", "a", 4)]


def test_the_domain_with_most_room_comes_first_where_none_has_enough() -> None:
    nodes = nodes_of({"a1-x": 1, "b1-x": 3, "c1-x": 2})

    best = decided(nodes, need(nodes, size=9))

    assert ranking(best)[0] == "b1-x"
    assert best.group is not None
    assert best.group.fitting == ()
    assert best.group.of(best.place_of("b1-x")).words == "node with the most room for its group"


@pytest.mark.parametrize(
    ("placed", "expected"),
    [
        ({"a1-x": 1}, ["a1-x", "a1-y", "a2-x", "b1-x"]),
        ({"a2-x": 1}, ["a2-x", "a1-y", "a1-x", "b1-x"]),
        ({"b1-x": 2}, ["b1-x"]),
    ],
)
def test_later_pods_go_nearest_to_those_that_are_placed(
    placed: dict[str, int], expected: list[str]
) -> None:
    nodes = nodes_of({"a1-x": 4, "a1-y": 2, "a2-x": 3, "b1-x": 1})

    found = ranking(decided(nodes, need(nodes, size=4, placed=placed)))

    assert found[0] == expected[0]
    assert set(found[: len(expected)]) == set(expected)
    assert found[-1] == ("b1-x" if "b1-x" not in placed else found[-1])


def test_a_placed_pod_on_a_node_outside_the_candidates_counts() -> None:
    nodes = nodes_of({"a1-x": 0, "a1-y": 2, "a2-x": 1})
    group = need(nodes, size=2, placed={"a1-x": 1})

    found = decided(nodes, group, candidates=["a1-y", "a2-x"])

    assert ranking(found)[0] == "a1-y"
    assert found.group is not None
    assert found.group.of(found.place_of("a1-y")).words == "same rack as its group"


def test_nodes_without_a_label_are_in_no_domain_of_it() -> None:
    nodes = nodes_of({"far": 2, "other": 2, "placed": 2})
    topology = Topology.of({"x/rack": ["a", "", ""]})  # by name
    group = need(nodes, size=2, placed={"placed": 1}, topology=topology)

    found = decided(nodes, group, candidates=["far", "other"])

    assert found.group is not None
    units = {name: found.group.of(found.place_of(name)).units for name in ("far", "other")}
    assert units["far"] == units["other"]


def test_a_busy_node_near_the_group_comes_after_an_idle_one_far_from_it() -> None:
    nodes = {"a1-x": Node(gpus=(BUSY,)), "b1-x": Node(gpus=(Gpu(),))}

    assert ranking(decided(nodes, need(nodes, size=2, placed={"a1-x": 1}))) == ["b1-x", "a1-x"]


def test_pods_that_are_placed_and_not_seen_yet_take_room() -> None:
    nodes = nodes_of({"a1-x": 2, "a1-y": 2, "b1-x": 2, "b1-y": 2})
    overlay = {"a1-y": (Tenant(uid="other", count=2),)}

    found = ranking(decided(nodes, need(nodes, size=4), overlay=overlay))

    assert found[0].startswith("b1")


def test_a_shared_node_is_not_near_itself() -> None:
    shared = {
        name: Node(gpus=(Gpu(used=used),), replicas=4, is_shared=True)
        for name, used in {"a1-x": 1, "a1-y": 0, "b1-x": 0}.items()
    }
    none = need(shared, size=3, placed={"a1-x": 1}, topology=Topology())

    near = decided(shared, need(shared, size=3, placed={"a1-x": 1}))
    unknown = decided(shared, none)

    assert ranking(near) == ["a1-y", "a1-x", "b1-x"]
    assert ranking(unknown) == ranking(decided(shared, None)) == ["a1-y", "b1-x", "a1-x"]
    assert unknown.group is not None
    assert unknown.group.of(0).words == ""


def test_room_counts_whole_pods() -> None:
    nodes = nodes_of({"a1-x": 3, "a1-y": 3, "b1-x": 2, "b1-y": 2, "b1-z": 2})

    found = ranking(decided(nodes, need(nodes, size=3, count=2), request(2)))

    assert [name[0] for name in found] == ["b", "b", "b", "a", "a"]


def test_pods_of_different_sizes_count_by_devices() -> None:
    nodes = nodes_of({"a1-x": 1, "a1-y": 2, "b1-x": 2, "b1-y": 2})
    group = need(nodes, size=2, is_uniform=False, rest=4)

    assert ranking(decided(nodes, group))[0].startswith("b1")


def test_a_group_that_the_cluster_can_never_hold_is_refused_with_the_reason() -> None:
    nodes = nodes_of({"a1-x": 2, "a1-y": 2}, cards=2)
    group = need(nodes, size=5, total=5)

    found = decided(nodes, group)

    assert rejected(found) == dict.fromkeys(nodes, Code.GROUP_TOO_LARGE)
    assert found.group is not None
    assert found.group.too_few == 4


@pytest.mark.parametrize(("devices", "too_few"), [(8, None), (9, 4)])
def test_pods_with_several_devices_are_counted_whole(devices: int, too_few: int | None) -> None:
    nodes = nodes_of({"a1-x": 5}, cards=5) | nodes_of({"a1-y": 4}, cards=4)  # for 2 pods each
    group = need(nodes, size=5, count=2, total=devices)

    found = decided(nodes, group, request(2)).group

    assert found is not None
    assert found.too_few == too_few


@pytest.mark.parametrize(
    "changes",
    [{"total": None}, {"total": 5, "placed": {"a1-x": 1}}, {"total": 4}],
    ids=["opted out", "a pod is placed", "devices that others hold count"],
)
def test_a_group_is_not_refused(changes: dict[str, Any]) -> None:
    nodes = nodes_of({"a1-x": 1, "a1-y": 1}, cards=2)

    assert not rejected(decided(nodes, need(nodes, size=5, **changes)))


def test_a_node_that_is_not_known_yet_may_hold_a_group() -> None:
    nodes = nodes_of({"a1-x": 2}, cards=2)
    group = need(nodes, size=5, total=5)

    assert not rejected(decided(nodes, group, candidates=["a1-x", "new"]))


def test_excluded_nodes_hold_no_pod_of_the_group() -> None:
    nodes = nodes_of({"a1-x": 2, "a1-y": 2}, cards=2)
    group = need(nodes, size=4, total=4, may_go=np.array([True, False]))

    assert set(rejected(decided(nodes, group, candidates=["a1-x"])).values()) == {
        Code.GROUP_TOO_LARGE
    }


def test_too_small_cards_hold_no_pod_of_the_group() -> None:
    small = Node(gpus=(Gpu(memory_total_bytes=8 << 30, memory_free_bytes=8 << 30),) * 2)
    nodes = {"a1-x": Node(gpus=(Gpu(),) * 2), "a1-y": small}
    group = need(nodes, size=3, total=3)

    found = rejected(decided(nodes, group, request(memory_bytes=40 << 30)))

    assert found == {"a1-x": Code.GROUP_TOO_LARGE, "a1-y": Code.GPU_TOO_SMALL}


def test_fit_and_nearness_never_outweigh_certainty() -> None:
    whole = 2 * _STRANDED * _MOST_STRANDED + _MOST_FIT + _LOAD
    packed = 2 * _STRANDED * _MOST_SHARED_STRANDED + _SHARED_FULLNESS * _MOST_FIT + _LOAD

    for mode in PriceMode:
        price = PRICE if mode is PriceMode.PREFER else 0
        for fit in (SHARED, whole, packed):
            assert fit + price + JOINED + _budget(mode) < FIT


sizes = st.integers(2, 12)
frees = st.dictionaries(
    st.tuples(st.sampled_from("ab"), st.sampled_from("12"), st.sampled_from("xyz")).map(
        lambda parts: f"{parts[0]}{parts[1]}-{parts[2]}"
    ),
    st.integers(0, 8),
    min_size=1,
)


@given(frees, sizes, st.data())
def test_nearness_never_changes_a_digit_before_the_fit(
    free: dict[str, int], size: int, data: st.DataObject
) -> None:
    nodes = nodes_of(free)
    placed = data.draw(st.dictionaries(st.sampled_from(sorted(nodes)), st.just(1), max_size=1))
    mode = data.draw(st.sampled_from(PriceMode))
    policy = Policy(prices=Prices(mode=mode))

    alone = decided(nodes, None, policy=policy)
    grouped = decided(nodes, need(nodes, size=size, placed=placed), policy=policy)

    def digits(decision: Decision) -> Any:
        return np.floor(decision.scores * UNITS / FIT + 1e-9)

    assert (digits(alone) == digits(grouped)).all()
    assert ((grouped.scores >= 0) & (grouped.scores <= 1)).all()
    assert (alone.codes == grouped.codes).all()
    assert sorted(ranking(alone)) == sorted(ranking(grouped))


@given(frees, sizes)
def test_the_order_does_not_depend_on_the_order_of_the_candidates(
    free: dict[str, int], size: int
) -> None:
    nodes = nodes_of(free)
    group = need(nodes, size=size)

    assert ranking(decided(nodes, group)) == ranking(
        decided(nodes, group, candidates=sorted(nodes, reverse=True))
    )


@given(frees, sizes)
def test_the_first_choice_is_in_a_rack_with_room_if_a_rack_has_room(
    free: dict[str, int], size: int
) -> None:
    nodes = nodes_of({name: max(left, 1) for name, left in free.items()})
    racks: dict[str, int] = {}
    for name, left in free.items():
        racks[name[:2]] = racks.get(name[:2], 0) + max(left, 1)

    best = decided(nodes, need(nodes, size=size)).best

    assert best is not None
    if max(racks.values()) >= size:
        assert racks[best[:2]] >= size


def test_devices_of_pods_of_different_sizes_are_counted_before_a_group_is_refused() -> None:
    nodes = nodes_of({"a1-x": 3, "a1-y": 3}, cards=3)
    group = need(nodes, size=3, total=6, is_uniform=False, rest=6)

    assert not rejected(decided(nodes, group, request(2)))
    assert rejected(decided(nodes, replace(group, is_uniform=True), request(2)))


def test_room_of_a_node_orders_only_nodes_of_one_level() -> None:
    first, second, farther = _units(np.array([0, 1, _QUARTERS + 1]), most=10.0)

    assert farther == 0.0
    assert 0.9 * first < second < first <= 10.0
