"""Check that node labels state the policy of the kubelet's Topology Manager."""

from collections.abc import Iterator
from typing import Final

from extender.cli.doctor.facts import Facts
from extender.cli.doctor.findings import Problem, Severity, check
from extender.cli.doctor.objects import key_of, labels_of, name_of, node_of
from extender.cli.doctor.remedies import named
from extender.core.devices.topology import (
    POLICIES,
    POLICY_LABEL,
    SCOPE_LABEL,
    SCOPES,
    alignment_on,
)
from extender.core.untyped import mapping_of

_REFUSED: Final = "TopologyAffinityError"
"""`status.reason` of a pod that the Topology Manager refuses."""


@check(
    "IG208", "labels name the policy of each kubelet's Topology Manager", needs=("nodes", "pods")
)
def _unlike_kubelet(facts: Facts) -> Iterator[Problem]:
    """Find labels with unknown values, and rejections by kubelets whose policy no label states.

    A rejected pod has the status reason `TopologyAffinityError`.

    Remedy: `kubectl label node NODE idlegpu.io/topology-policy=single-numa-node`
    (docs/agent.md#topology).
    """
    unknown: dict[str, str] = {}
    unlabelled: set[str] = set()
    for node in facts.nodes or ():
        labels, name = labels_of(node), name_of(node)
        for label, words in ((POLICY_LABEL, POLICIES), (SCOPE_LABEL, SCOPES)):
            if labels.get(label, words[0]) not in words:
                unknown[name] = (
                    f"{name}: {label}={labels[label]}, must be one of {', '.join(words)}"
                )
        if not alignment_on(labels):
            unlabelled.add(name)
    refused = {
        node_of(pod): f"{key_of(pod)}: {_REFUSED} on {node_of(pod)}"
        for pod in facts.pods or ()
        if mapping_of(pod.get("status")).get("reason") == _REFUSED and node_of(pod) in unlabelled
    }
    if unknown or refused:
        yield Problem(
            severity=Severity.WARNING,
            what="the policy of the kubelets' Topology Manager is not known: pods with several "
            "GPUs go to nodes on which the kubelet refuses them",
            evidence=(*unknown.values(), *refused.values()),
            remedy=f"kubectl label node {named([*unknown, *refused])} --overwrite "
            f"{POLICY_LABEL}=single-numa-node (topologyManagerPolicy in the kubelet's "
            f"configuration) and, if its topologyManagerScope is pod, {SCOPE_LABEL}=pod",
        )
