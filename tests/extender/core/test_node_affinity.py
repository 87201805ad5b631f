"""Node selection of pods by labels and taints, as in kube-scheduler's own filters."""

from collections.abc import Iterator
from typing import Any

import pytest
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from extender.core.nodes.inventory import NodeRecord, Taint, may_go, selects, tolerates
from extender.core.nodes.node_selection import (
    ANYWHERE,
    Operator,
    Requirement,
    Selection,
    Term,
    read_selection,
)

LABELS = {"disk": "ssd", "cores": "64", "empty": "", "nvidia.com/gpu.product": "NVIDIA-L4"}
SSD = {"disk": "ssd"}
NODE = NodeRecord(name="n", labels=LABELS, hostname="host-n")


def having(*terms: dict[str, Any], **spec: object) -> Selection:
    """Return the selection of a pod with these terms of required node affinity."""
    required: dict[str, Any] = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*terms]}
    }
    affinity = {"affinity": {"nodeAffinity": required}} if terms else {}
    return read_selection({"spec": {**affinity, **spec}})


def labelled(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def named(operator: str, *values: str, key: str = "metadata.name") -> dict[str, Any]:
    return {"matchFields": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("term", "is_met"),
    [
        (labelled("disk", "In", "hdd", "ssd"), True),
        (labelled("disk", "In", "hdd"), False),
        (labelled("other", "In", "ssd"), False),
        (labelled("disk", "NotIn", "hdd"), True),
        (labelled("disk", "NotIn", "hdd", "ssd"), False),
        (labelled("other", "NotIn", "ssd"), True),
        (labelled("disk", "Exists"), True),
        (labelled("empty", "Exists"), True),
        (labelled("other", "Exists"), False),
        (labelled("disk", "DoesNotExist"), False),
        (labelled("empty", "DoesNotExist"), False),
        (labelled("other", "DoesNotExist"), True),
        (labelled("cores", "Gt", "63"), True),
        (labelled("cores", "Gt", "64"), False),
        (labelled("cores", "Gt", "-1"), True),
        (labelled("cores", "Lt", "65"), True),
        (labelled("cores", "Lt", "64"), False),
        (labelled("cores", "Lt", "9"), False),  # as numbers, not as texts
        (labelled("disk", "Gt", "1"), False),
        (labelled("other", "Lt", "1"), False),
        (labelled("cores", "Gt", "1", "2"), False),
        (labelled("cores", "Gt", "many"), False),
        (labelled("cores", "Gt", "6_3"), False),
        (labelled("cores", "Lt", str(1 << 63)), False),
        (labelled("kubernetes.io/hostname", "In", "host-n"), True),
        (labelled("kubernetes.io/hostname", "In", "n"), False),
        (named("In", "n"), True),
        (named("In", "m"), False),
        (named("NotIn", "m"), True),
        (named("NotIn", "n"), False),
        (named("Exists"), False),
        (named("In", "n", "m"), False),
        (named("In", "n", key="metadata.uid"), False),
        (labelled("disk", "Near", "ssd"), False),
        (labelled("disk", "In", "ssd") | named("In", "n"), True),
        (labelled("disk", "In", "ssd") | named("In", "m"), False),
        ({}, False),
    ],
)
def test_a_term_is_met_as_kubernetes_has_it(term: dict[str, Any], is_met: bool) -> None:
    assert selects(having(term), NODE) is is_met


def test_one_term_is_enough_and_all_its_requirements_count() -> None:
    bad, good = labelled("disk", "In", "hdd"), labelled("disk", "In", "ssd")
    both = {"matchExpressions": bad["matchExpressions"] + good["matchExpressions"]}

    assert selects(having(bad, good), NODE)
    assert not selects(having(both), NODE)
    assert not selects(having(bad, {}), NODE)


def test_required_affinity_without_terms_takes_no_node() -> None:
    required: dict[str, Any] = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}
    }
    pod = {"spec": {"affinity": {"nodeAffinity": required}}}

    assert not selects(read_selection(pod), NODE)


def test_preferred_affinity_excludes_no_node() -> None:
    preferred = [{"weight": 1, "preference": labelled("disk", "In", "hdd")}]
    by_node = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}

    assert selects(read_selection({"spec": {"affinity": {"nodeAffinity": by_node}}}), NODE)


@pytest.mark.parametrize(
    ("selector", "is_met"),
    [
        ({"disk": "ssd"}, True),
        ({"disk": "ssd", "cores": "64"}, True),
        ({"disk": "ssd", "cores": "32"}, False),
        ({"other": ""}, False),
        ({"empty": ""}, True),
        ({}, True),
        (None, True),
    ],
)
def test_each_label_of_the_selector_counts(selector: object, is_met: bool) -> None:
    assert selects(having(nodeSelector=selector), NODE) is is_met


def test_selector_and_affinity_count_both() -> None:
    good, bad = labelled("disk", "In", "ssd"), labelled("disk", "In", "hdd")

    assert not selects(having(good, nodeSelector={"disk": "hdd"}), NODE)
    assert not selects(having(bad, nodeSelector={"disk": "ssd"}), NODE)
    assert selects(having(good, nodeSelector={"disk": "ssd"}), NODE)


@pytest.mark.parametrize("operator", ["In", "NotIn", "Exists", "DoesNotExist", "Gt"])
def test_labels_that_are_not_stored_exclude_no_node(operator: str) -> None:
    key = "feature.node.kubernetes.io/cpu-model.id"
    selection = having(labelled(key, operator, "1"), nodeSelector={key: "1"})

    assert selects(selection, NODE)


@pytest.mark.parametrize(
    "node",
    [NodeRecord(name="n", labels=SSD), NodeRecord(name="n", other_labels=SSD)],
    ids=["labels", "other labels"],
)
def test_labels_match_in_every_field_that_stores_them(node: NodeRecord) -> None:
    assert selects(having(nodeSelector={"disk": "ssd"}), node)
    assert not selects(having(nodeSelector={"disk": "hdd"}), node)


@pytest.mark.parametrize(
    ("toleration", "is_tolerated"),
    [
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "effect": "NoSchedule"}, True),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "team", "operator": "Exists"}, True),
        ({"key": "team", "value": "x"}, True),
        ({"key": "team", "operator": "Equal", "value": "x"}, True),
        ({"key": "team", "value": "x", "effect": "NoSchedule"}, True),
        ({"key": "team", "value": "x", "effect": "NoExecute"}, False),
        ({"key": "team", "value": "y"}, False),
        ({"key": "team"}, False),
        ({"key": "team", "operator": "Gt", "value": "1"}, True),
        ({"value": "x"}, False),
        ({"key": 7, "value": "x"}, False),
        ({}, False),
    ],
)
def test_a_taint_is_tolerated_as_kubernetes_has_it(
    toleration: dict[str, Any], is_tolerated: bool
) -> None:
    others = [{"key": f"other-{at}"} for at in range(100)]
    selection = having(tolerations=[*others, toleration])

    assert tolerates(selection, Taint(key="team", value="x")) is is_tolerated


@pytest.mark.parametrize(
    ("effect", "goes"), [("NoSchedule", False), ("NoExecute", False), ("PreferNoSchedule", True)]
)
def test_taints_that_repel_keep_a_pod_away(effect: str, goes: bool) -> None:
    node = NodeRecord(name="n", taints=(Taint(key="team", value="x", effect=effect),))

    assert may_go(Selection(), node) is goes
    assert may_go(having(tolerations=[{"key": "team", "operator": "Exists"}]), node)


def test_every_taint_must_be_tolerated() -> None:
    node = NodeRecord(name="n", taints=(Taint(key="team"), Taint(key="spot")))

    assert not may_go(having(tolerations=[{"key": "team"}]), node)
    assert may_go(having(tolerations=[{"key": "team"}, {"key": "spot"}]), node)


def test_a_cordoned_node_takes_only_pods_that_tolerate_it() -> None:
    key = "node.kubernetes.io/unschedulable"
    node = NodeRecord(name="n", is_unschedulable=True, taints=(Taint(key=key),))
    not_yet_tainted = NodeRecord(name="n", is_unschedulable=True)
    daemon = having(tolerations=[{"key": key, "operator": "Exists", "effect": "NoSchedule"}])

    for cordoned in (node, not_yet_tainted):
        assert not may_go(Selection(), cordoned)
        assert may_go(daemon, cordoned)
        assert may_go(ANYWHERE, cordoned)
    assert may_go(ANYWHERE, NodeRecord(name="n", taints=(Taint(key="k", value="v"),)))


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {"nodeSelector": [], "affinity": 7, "tolerations": {}},
        {"nodeSelector": {"disk": 7}, "affinity": {"nodeAffinity": []}, "tolerations": [None]},
        {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": 7}}},
    ],
)
def test_pods_of_any_shape_are_taken(spec: object) -> None:
    selection = read_selection({"spec": spec})

    assert selection.terms is None
    assert not selection.tolerations


def test_the_size_grows_with_every_condition() -> None:
    small = having(labelled("disk", "In", "a"), nodeSelector={"a": "b"}, tolerations=[{"key": "k"}])
    sizes = [
        having(labelled("disk", "In", "a", "b"), nodeSelector={"a": "b"}).size,
        having(labelled("disk", "In", "a"), nodeSelector={"a": "b", "c": "d"}).size,
        having(named("In", "a"), named("In", "b"), nodeSelector={"a": "b"}).size,
    ]

    assert Selection().size == 0
    assert small.size > having(labelled("disk", "In", "a"), nodeSelector={"a": "b"}).size
    assert min(sizes) > having(labelled("disk", "In", "a"), nodeSelector={"a": "b"}).size


class Unread(frozenset[str]):
    """Mapping that fails if its values are read one by one."""

    @override
    def __iter__(self) -> Iterator[str]:
        raise AssertionError


def test_a_comparison_with_more_than_one_value_is_refused_by_their_count() -> None:
    requirement = Requirement(key="disk", operator=Operator.GT, values=Unread(("1", "2")))

    assert not selects(Selection(terms=(Term(labels=(requirement,)),)), NODE)
