"""Shortlists of nodes for kube-scheduler, which must contain nodes for its own constraints."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision.decision import Decision, decide
from extender.core.decision.filtering import Code
from extender.core.decision.scoring import UNITS
from extender.core.nodes.node_selection import has_preferences
from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import parse_request
from testkit.builders import Node, busy, gpu, node, request, snapshot_of

COUNT = 12


def decided(
    fleet: dict[str, Node], *, like: list[str] | None = None, ranked: int = COUNT
) -> Decision:
    snapshot = snapshot_of(fleet)
    requested = like or list(fleet)
    return decide(snapshot, request(), requested, Policy(), overlays={}, ranked=ranked)


def fleet_of(zones: str, **changes: Any) -> dict[str, Node]:
    """Return a node for each letter, which is its zone."""
    return {
        f"n{number:03}": node(gpu(), gpu(), zone_id=ord(zone), **changes)
        for number, zone in enumerate(zones)
    }


def zones_of(decision: Decision, fleet: dict[str, Node], rows: Any) -> Counter[str]:
    return Counter(chr(fleet[decision.candidates[at]].zone_id) for at in rows.tolist())


@pytest.mark.parametrize(
    ("zones", "expected"),
    [
        ("a" * 100 + "b" * 100 + "c" * 100, {"a": 4, "b": 4, "c": 4}),
        # the first node is always included
        ("a" * 290 + "b" * 2 + "c" * 8, {"a": 6, "b": 2, "c": 4}),
        ("a" * 300, {"a": 12}),
        ("abc" * 100, {"a": 4, "b": 4, "c": 4}),
    ],
    ids=["in-a-row", "few-of-one", "one-zone", "in-turns"],
)
def test_equal_nodes_of_each_zone_are_listed_in_equal_numbers(
    zones: str, expected: dict[str, int]
) -> None:
    fleet = fleet_of(zones)
    decision = decided(fleet)

    rows = decision.shortlist(COUNT, 0.0)

    assert zones_of(decision, fleet, rows) == expected
    assert decision.order[0] in rows


def test_better_nodes_are_listed_from_any_zone() -> None:
    fleet = fleet_of("a" * 100 + "b" * 10)
    for number in range(4):  # fewer GPUs stay free together there
        fleet[f"n{number:03}"] = replace(fleet[f"n{number:03}"], gpus=(gpu(),))
    decision = decided(fleet)

    rows = decision.shortlist(COUNT, 0.0)

    assert set(range(4)) <= set(rows.tolist())
    assert zones_of(decision, fleet, rows) == {"a": 8, "b": 4}


def test_shortlist_prefers_equal_nodes_to_one_that_fits_worse() -> None:
    fleet = fleet_of("a" * 50 + "b" * 50)
    for number in range(50, 100):
        fleet[f"n{number:03}"] = replace(fleet[f"n{number:03}"], gpus=(gpu(),) * 3)

    decision = decided(fleet)

    assert zones_of(decision, fleet, decision.shortlist(COUNT, 0.0)) == {"a": COUNT}


def test_an_unknown_node_among_the_candidates_changes_no_list() -> None:
    fleet = fleet_of("ab" * 30)
    known = decided(fleet)

    found = decided(fleet, like=["unknown", *fleet])

    names = {found.candidates[at] for at in found.shortlist(COUNT, 0.0).tolist()}
    assert names - {"unknown"} <= {
        known.candidates[at] for at in known.shortlist(COUNT, 0.0).tolist()
    }
    assert len(names) == COUNT


def test_nodes_just_within_reach_are_listed() -> None:
    decision = Decision(
        candidates=("a", "b", "c", "d"),
        codes=np.zeros(4, dtype=np.uint8),
        scores=np.array([0.25, 0.75, 0.5, 0.125]),
        order=np.array([1, 2], dtype=np.intp),
        zones=np.zeros(4, dtype=np.intp),
    )

    assert decision.shortlist(1, 0.5).tolist() == [0, 1, 2]


@given(st.permutations(range(60)))
def test_the_same_nodes_are_listed_in_any_order_of_the_request(order: list[int]) -> None:
    fleet = fleet_of("ab" * 30)
    names = list(fleet)
    first = decided(fleet)
    other = decided(fleet, like=[names[at] for at in order])

    assert {names[at] for at in first.shortlist(COUNT, 0.0).tolist()} == {
        other.candidates[at] for at in other.shortlist(COUNT, 0.0).tolist()
    }
    assert first.best == other.best


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(1, 3)),
        min_size=14,
        max_size=40,
    ),
    st.integers(1, 13),
    st.sampled_from([0.0, 3.5, 120.0]),
)
def test_shortlist_has_the_best_feasible_nodes(
    described: list[tuple[str, bool, int]], count: int, reach: float
) -> None:
    fleet = {
        f"n{number:03}": node(
            *[busy() if is_busy else gpu()] * cards, zone_id=ord(zone), is_reconfiguring=number == 3
        )
        for number, (zone, is_busy, cards) in enumerate(described)
    }
    decision = decided(fleet, ranked=count)
    rows = decision.shortlist(count, reach / UNITS)
    scores, passes = decision.scores, decision.codes == Code.PASSES
    best = scores[passes].max()

    assert len(set(rows.tolist())) == len(rows) >= count
    assert passes[rows].all()
    assert decision.order[0] in rows
    assert rows.tolist() == sorted(rows.tolist())
    if reach:
        within = np.flatnonzero(passes & (scores >= best - reach / UNITS))
        assert set(within.tolist()) <= set(rows.tolist())
    else:
        assert len(rows) == count
    least = scores[rows].min()
    missed = [at for at in np.flatnonzero(passes).tolist() if at not in rows]
    assert all(scores[at] <= least + 2 * 3 / UNITS + 1e-12 for at in missed)


ANTI = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}
HARD = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, False),
        ({"affinity": {"podAntiAffinity": ANTI}}, True),
        ({"affinity": {"nodeAffinity": ANTI, "podAffinity": HARD}}, True),
        ({"affinity": {"podAntiAffinity": HARD}}, False),
        ({"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]}, False),
        ({"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]}, True),
        ({"affinity": "zone", "topologySpreadConstraints": [None, 7]}, False),
        ({"affinity": {"nodeAffinity": []}}, False),
    ],
)
def test_preferences_are_not_requirements(spec: dict[str, object], expected: bool) -> None:
    container = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    pod = {"spec": {"containers": [container], **spec}}

    parsed = parse_request(pod, resources=ResourceNames(), defaults=Policy())

    assert has_preferences(pod) is expected
    assert parsed.request is not None
    assert parsed.request.has_preferences is expected
