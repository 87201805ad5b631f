"""Checks that nodes have the labels by which groups are placed."""

from dataclasses import replace
from typing import Any

import pytest

from extender.cli.doctor.facts import Facts
from tests.extender.cli.doctor.described import at
from tests.extender.cli.doctor.things import evidence, found, node, pod, severities

RACK = "topology.kubernetes.io/rack"
JOBSET = "jobset.sigs.k8s.io/jobset-name"


def cluster(*labels: dict[str, str], settings: dict[str, Any] | None = None) -> Facts:
    """Return a cluster with a group, and a node for each set of labels."""
    nodes = tuple(node(f"node-{number}", labels=each) for number, each in enumerate(labels))
    facts = at(nodes[0], pod("p", 1, labels={JOBSET: "train"}), settings=settings or {})
    return replace(facts, nodes=nodes)


def test_a_label_that_no_node_has_is_named() -> None:
    facts = cluster({RACK: "a"}, {}, settings={"group_topology": [RACK, "x/row"]})

    assert severities("IG305", facts) == ["warning"]
    assert "x/row" in evidence("IG305", facts)
    assert RACK not in evidence("IG305", facts)


def test_groups_on_nodes_without_any_topology_are_named() -> None:
    facts = cluster({}, {})

    assert severities("IG305", facts) == ["info"]
    assert "team/JobSet train" in evidence("IG305", facts)


@pytest.mark.parametrize(
    "facts",
    [
        cluster({RACK: "a"}, {}),
        cluster({}, {}, settings={"group_topology": []}),
        cluster({}),
        replace(cluster({}, {}), pods=(pod("alone", 1),)),
        cluster({"x/row": "1"}, {}, settings={"group_topology": ["x/row"]}),
    ],
    ids=["a node has one", "switched off", "one node", "no group", "its own label"],
)
def test_all_is_well(facts: Facts) -> None:
    assert found("IG305", facts) == []
