"""Check that nodes have the labels by which the pods of a group are placed near each other."""

from collections.abc import Iterator
from typing import Final

from extender.cli.doctor.facts import Facts
from extender.cli.doctor.findings import Problem, Severity, check
from extender.cli.doctor.objects import gpu_nodes, gpu_pods, labels_of, setting, some
from extender.core.nodes.pod_groups import read_group
from extender.core.policy import GROUP_TOPOLOGY
from extender.core.untyped import items_of, text_of

_SETTING: Final = "group_topology"


@check(
    "IG305", "nodes have the labels by which groups are placed", needs=("nodes", "pods", "settings")
)
def _unknown_topology(facts: Facts) -> Iterator[Problem]:
    """Find labels of `group_topology` that no GPU node has.

    Info for groups in a cluster without any of the default labels.

    Remedy: correct or set `group_topology`, or label the nodes.
    """
    nodes = gpu_nodes(facts)
    known = {label for node in nodes for label in labels_of(node)}
    own = setting(facts, _SETTING)
    absent = [label for label in map(text_of, items_of(own)) if label not in known]
    if nodes and absent:
        yield Problem(
            severity=Severity.WARNING,
            what=f"{_SETTING} lists labels that no GPU node has",
            evidence=tuple(absent),
            remedy=f"correct {_SETTING} (kubectl get nodes --show-labels), or label the nodes",
        )
    groups = {group.key for pod in gpu_pods(facts) if (group := read_group(pod)) is not None}
    if groups and own is None and len(nodes) > 1 and known.isdisjoint(GROUP_TOPOLOGY):
        yield Problem(
            severity=Severity.INFO,
            what="the pods of groups are not placed near each other: no GPU node has a label that "
            f"{_SETTING} lists by default",
            evidence=(some(sorted(groups)),),
            remedy=f"set {_SETTING} to the labels that name the nodes' racks or NVLink domains, "
            f"nearest first, or to [] if there is no topology (docs/decision.md)",
        )
