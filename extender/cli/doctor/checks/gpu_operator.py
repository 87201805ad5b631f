"""Check that the agent leaves a node when the GPU operator pauses it."""

from collections.abc import Iterator
from typing import Final

from extender.cli.doctor.facts import Facts, Object
from extender.cli.doctor.findings import Problem, Severity, check
from extender.cli.doctor.objects import (
    AGENT_WORDS,
    is_called,
    key_of,
    labels_of,
    live_pods,
    name_of,
    node_of,
)
from extender.core.nodes.node_selection import Operator, Requirement, read_selection
from extender.core.untyped import mapping_of

_DEPLOY: Final = "nvidia.com/gpu.deploy."
_PAUSED: Final = "paused-"
_PAUSES: Final = ("paused-for-driver-upgrade", "paused-for-mig-change")
_ALWAYS_PAUSED: Final = tuple(
    _DEPLOY + part for part in ("client", "device-plugin", "gpu-feature-discovery")
)
"""Labels that both the operator's driver manager and its MIG manager pause."""

_BLOCKS: Final = "NVML held open blocks the driver's upgrade, changes of the MIG layout, and resets"


@check(
    "IG406",
    "agents leave nodes that the GPU operator pauses",
    needs=("nodes", "pods", "daemon_sets"),
)
def _stays_in_the_way(facts: Facts) -> Iterator[Problem]:
    """Find agents that run, or would run, on nodes where the operator has paused GPU clients.

    An error if an agent runs on such a node, a warning if the DaemonSet's selector or any term of
    its affinity would keep it there. Clusters without `nvidia.com/gpu.deploy.*` labels have no
    finding.

    Remedy: the affinity of `manifests/agent/daemon-set.yaml`, for the reason in
    docs/gpu-operator.md.
    """
    paused = {name_of(node): label for node in facts.nodes or () for label in _paused(node)}
    staying = [
        f"{node_of(pod)}: {paused[node_of(pod)]}, and {key_of(pod)} runs"
        for pod in live_pods(facts, AGENT_WORDS)
        if node_of(pod) in paused and "deletionTimestamp" not in mapping_of(pod.get("metadata"))
    ]
    has_operator = any(
        label.startswith(_DEPLOY) for node in facts.nodes or () for label in labels_of(node)
    )
    deaf = [
        f"DaemonSet {key_of(item)}: runs on nodes with {label}={pause}"
        for item in facts.daemon_sets or ()
        if has_operator and is_called(item, AGENT_WORDS)
        for label in _ALWAYS_PAUSED
        for pause in _PAUSES
        if not _leaves(item, label, pause)
    ]
    if staying or deaf:
        yield Problem(
            severity=Severity.ERROR if staying else Severity.WARNING,
            what=f"the agent does not leave when the GPU operator pauses a node: {_BLOCKS}",
            evidence=(*staying, *deaf),
            remedy="the node affinity of manifests/agent/daemon-set.yaml, each of its terms: "
            "docs/gpu-operator.md",
        )


def _paused(node: Object) -> Iterator[str]:
    for label, value in labels_of(node).items():
        if label.startswith(_DEPLOY) and value.startswith(_PAUSED):
            yield f"{label}={value}"


def _leaves(item: Object, label: str, pause: str) -> bool:
    """Check whether a DaemonSet's selector or affinity excludes nodes with a paused label."""
    selection = read_selection(mapping_of(mapping_of(item.get("spec")).get("template")))
    if label in dict(selection.labels):
        return dict(selection.labels)[label] != pause
    return selection.terms is not None and all(
        any(_refuses(requirement, label, pause) for requirement in term.labels)
        for term in selection.terms
    )


def _refuses(requirement: Requirement, label: str, value: str) -> bool:
    if requirement.key != label:
        return False
    if requirement.operator is Operator.NOT_IN:
        return value in requirement.values
    if requirement.operator is Operator.IN:
        return value not in requirement.values
    return requirement.operator is Operator.DOES_NOT_EXIST
