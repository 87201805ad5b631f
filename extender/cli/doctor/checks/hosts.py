"""Check the CPU, memory and labels of nodes with GPUs."""

from collections.abc import Iterator
from typing import Final

from extender.cli.doctor.facts import (
    Facts,
    Object,
    allocatable,
    gpu_nodes,
    gpu_pods,
    is_over,
    key_of,
    labels_of,
    name_of,
    node_of,
    requested_gpus,
    setting,
    some,
)
from extender.cli.doctor.findings import Problem, Severity, check, named
from extender.core.devices.topology import POLICIES, POLICY_LABEL, SCOPE_LABEL, SCOPES, alignment_on
from extender.core.nodes.host_resources import (
    CPU,
    MEMORY,
    NONE,
    HostResources,
    read_quantities,
    requested,
)
from extender.core.nodes.pod_groups import read_group
from extender.core.policy import GROUP_TOPOLOGY
from extender.core.untyped import items_of, mapping_of, objects_of, text_of

_TAINT: Final = "nvidia.com/gpu"
_ENOUGH: Final = 0.5
"""Fraction of a GPU's even share of the node's CPU and memory that is enough to use the GPU."""
_KEEPS_OUT: Final = frozenset({"NoSchedule", "NoExecute"})


@check("IG207", "nodes with free GPUs have free CPU and memory", needs=("nodes", "pods"))
def _filled(facts: Facts) -> Iterator[Problem]:
    """Find free GPUs that are unusable because pods without GPUs hold the node's CPU or memory.

    A node counts if less than half of the free GPUs' even share of its CPU or memory is left. Pods
    of DaemonSets do not count.

    Remedy: taint the nodes with `nvidia.com/gpu=present:NoSchedule`.
    """
    evidence, nodes = [], []
    pods: dict[str, list[Object]] = {}
    for pod in facts.pods or ():
        if node_of(pod) and not is_over(pod):
            pods.setdefault(node_of(pod), []).append(pod)
    for node in facts.nodes or ():
        shortage = _shortage(node, pods.get(name_of(node), []))
        if shortage and not _is_tainted(node):
            nodes.append(name_of(node))
            evidence.append(f"{name_of(node)}: {shortage}")
    if evidence:
        yield Problem(
            severity=Severity.WARNING,
            what="pods without GPUs fill GPU nodes: GPUs are free, but no CPU or memory is left to "
            "use them",
            evidence=tuple(evidence),
            remedy=f"kubectl taint node {named(nodes)} {_TAINT}=present:NoSchedule: pods that "
            "request GPUs tolerate it if the admission plugin ExtendedResourceToleration is on, "
            "others need a toleration; then restart the pods on these nodes",
        )


def _shortage(node: Object, pods: list[Object]) -> str:
    """Return the pods that hold the CPU or memory that a node's free GPUs need, "" if none."""
    gpus = sum(allocatable(node).values())
    free = gpus - sum(sum(requested_gpus(pod).values()) for pod in pods)
    offered = mapping_of(mapping_of(node.get("status")).get("allocatable"))
    host = read_quantities(offered.get(CPU), offered.get(MEMORY))
    if free <= 0 or not (host.millicores and host.memory_bytes):
        return ""
    others = [pod for pod in pods if not requested_gpus(pod) and not _is_of_daemon_set(pod)]
    left = host.less(_sum(pods))
    usable, without = (_usable(host, rest, gpus) for rest in (left, left.plus(_sum(others))))
    if usable >= free or without <= usable:
        return ""
    taken = _sum(others)
    by_need = sorted(others, key=requested, reverse=True)
    cpus, gib = host.millicores / 1000, host.memory_bytes / (1 << 30)
    return (
        f"{free - max(usable, 0)} of {free} free GPUs cannot be used: "
        f"{some([key_of(pod) for pod in by_need])} "
        f"request {taken.millicores / 1000:g} of {cpus:g} CPUs and "
        f"{taken.memory_bytes / (1 << 30):.0f} of {gib:.0f} GiB"
    )


def _usable(host: HostResources, left: HostResources, gpus: int) -> int:
    """Return the number of GPUs that the node's remaining CPU and memory can serve.

    Ephemeral storage does not count: few pods request any. `idlegpu advise` counts it for pods
    that do.
    """
    pairs = ((left.millicores, host.millicores), (left.memory_bytes, host.memory_bytes))
    return min(int(rest * gpus / (whole * _ENOUGH)) for rest, whole in pairs)


def _sum(pods: list[Object]) -> HostResources:
    total = NONE
    for pod in pods:
        total = total.plus(requested(pod))
    return total


def _is_of_daemon_set(pod: Object) -> bool:
    owners = objects_of(mapping_of(pod.get("metadata")).get("ownerReferences"))
    return any(owner.get("kind") == "DaemonSet" for owner in owners)


def _is_tainted(node: Object) -> bool:
    """Check whether a taint already keeps pods without GPUs off the node."""
    taints = objects_of(mapping_of(node.get("spec")).get("taints"))
    return any(
        "gpu" in text_of(taint.get("key")) and taint.get("effect") in _KEEPS_OUT for taint in taints
    )


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
            if labels.get(label) not in {None, *words}:
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
