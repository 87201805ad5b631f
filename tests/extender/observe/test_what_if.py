"""What a pod says of its nodes, however much it says."""

from typing import Any

import pytest
from typing_extensions import override  # in typing from Python 3.12 on

from extender.core.inventory import NodeRecord, Taint
from extender.observe.what_if import _tolerates, read_selection

MANY = 1000


class Labels(dict[str, str]):
    """Counts how often it is looked into."""

    looks = 0

    @override
    def __contains__(self, key: object) -> bool:
        self.looks += 1
        return super().__contains__(key)


def test_a_selector_of_many_labels_is_not_compared_with_each_node() -> None:
    labels = [Labels(zone="a") for _ in range(MANY)]
    nodes = {str(at): NodeRecord(name=str(at), labels=one) for at, one in enumerate(labels)}
    selector = {f"label-{at}": "x" for at in range(MANY)} | {"zone": "a"}

    selection = read_selection({"spec": {"nodeSelector": selector}}, nodes)

    assert selection.labels == {"zone": "a"}
    assert len([one for one in selection.not_checked if "label-" in one]) == MANY
    assert sum(one.looks for one in labels) <= MANY


@pytest.mark.parametrize(
    ("toleration", "tolerates"),
    [
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "effect": "NoSchedule"}, True),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "team", "operator": "Exists"}, True),
        ({"key": "team", "value": "x"}, True),
        ({"key": "team", "value": "x", "effect": "NoSchedule"}, True),
        ({"key": "team", "value": "x", "effect": "NoExecute"}, False),
        ({"key": "team", "value": "y"}, False),
        ({"key": "team"}, False),
        ({"value": "x"}, False),
        ({"key": 7, "value": "x"}, False),
        ({}, False),
    ],
)
def test_a_taint_is_tolerated_as_kubernetes_has_it(
    toleration: dict[str, Any], tolerates: bool
) -> None:
    others = [{"key": f"other-{at}"} for at in range(MANY)]
    pod = {"spec": {"tolerations": [*others, toleration]}}
    taint = Taint(key="team", value="x", effect="NoSchedule")

    selection = read_selection(pod, {})

    assert _tolerates(selection.tolerations, taint) is tolerates
    assert len(selection.tolerations) <= MANY + 1
