"""Check that other schedulers, autoscalers and the GPU operator do not conflict with idlegpu."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from extender.cli.doctor.checks.schedulers import DOCUMENTATION
from extender.cli.doctor.facts import (
    AGENT_WORDS,
    Facts,
    Object,
    annotations_of,
    condition_of,
    gpu_pods,
    is_called,
    is_over,
    key_of,
    labels_of,
    live_pods,
    name_of,
    node_of,
    setting,
    some,
)
from extender.cli.doctor.findings import MOST, Problem, Severity, check, named
from extender.core.nodes.node_selection import Operator, Requirement, read_selection
from extender.core.untyped import mapping_of, objects_of, text_of

_REFUSALS: Final = (
    "node(s) had too few working GPUs",
    "node(s) had GPUs in use by processes outside Kubernetes",
    "node(s) had GPUs with less memory than the pod requests",
    "node(s) had too little free GPU memory",
    "node(s) had too few GPUs known to be idle",
    "node(s) had busier GPUs than other nodes",
    "node(s) had GPUs that are being reconfigured",
    "node(s) had GPUs of other models than the pod requires",
    "node(s) were not named in the pod's idlegpu.io/target",
    "node(s) had more expensive GPUs than other suitable nodes",
    "node(s) had too few free GPUs on one NUMA node for their kubelet's policy",
    "node(s) could not hold the pod's whole group, even without other pods",
)
"""Rejection reasons of the extender, as kube-scheduler counts them in a pod's condition."""
_REQUIRES_IDLE: Final = "idlegpu.io/require-idle"
AUTOSCALERS: Final = ("cluster-autoscaler", "karpenter")


@check("IG007", "one scheduler places GPU pods on a node", needs=("pods",))
def _two_schedulers(facts: Facts) -> Iterator[Problem]:
    """Find nodes on which several schedulers place GPU pods.

    A warning if the schedulers may be profiles of one process, which is not a fault: pass its
    configuration.

    Remedy: reserve nodes for each scheduler, by label and taint.
    """
    by_node: defaultdict[str, set[str]] = defaultdict(set)
    for pod in gpu_pods(facts):
        if node_of(pod):
            by_node[node_of(pod)].add(_scheduler_name(pod))
    homes = _homes(facts)
    mixed: dict[str, set[str]] = {}
    unsure: dict[str, set[str]] = {}
    for node, names in by_node.items():
        known = {homes[name] for name in names if name in homes}
        unknown = {name for name in names if name not in homes}
        if len(known) > 1 or (known and unknown):
            mixed[node] = names
        elif len(unknown) > 1:
            unsure[node] = names
    lost = [key_of(pod) for pod in facts.pods or () if _is_lost(pod)]
    evidence = (f"UnexpectedAdmissionError: {some(lost)}",) if lost else ()
    for found, severity, doubt in (
        (mixed, Severity.ERROR, ""),
        (unsure, Severity.WARNING, ", unless these are profiles of one kube-scheduler"),
    ):
        if found:
            yield Problem(
                severity=severity,
                what="several schedulers place GPU pods on the same nodes: two may assign the last "
                f"GPU, and the kubelet rejects the second pod{doubt}",
                evidence=(
                    *(f"{node}: pods of {some(sorted(names))}" for node, names in found.items()),
                    *evidence,
                ),
                remedy="reserve nodes for the second scheduler, for example: "
                f"kubectl label node {named(found)} "
                f"idlegpu.io/scheduler=idlegpu-scheduler && kubectl taint node {named(found)} "
                f"idlegpu.io/scheduler=idlegpu-scheduler:NoSchedule ({DOCUMENTATION})",
            )


def _scheduler_name(pod: Object) -> str:
    return text_of(mapping_of(pod.get("spec")).get("schedulerName")) or "default-scheduler"


def _homes(facts: Facts) -> dict[str, str]:
    """Return the configuration of each scheduler name; one configuration is one process."""
    return {
        text_of(profile.get("schedulerName")) or "default-scheduler": scheduler.source
        for scheduler in facts.schedulers or ()
        for profile in objects_of(scheduler.config.get("profiles")) or [{}]
    }


def _is_lost(pod: Object) -> bool:
    return mapping_of(pod.get("status")).get("reason") == "UnexpectedAdmissionError"


@check("IG008", "the autoscaler adds nodes for waiting pods", needs=("pods",))
def _no_new_nodes(facts: Facts) -> Iterator[Problem]:
    """Find pods that wait because the extender rejects nodes that the autoscaler expects to fit.

    Also found if an autoscaler runs while idlegpu refuses nodes for load (`load_filter.enabled`).

    Remedy: add a node by hand, or remove the cause.
    """
    found = sorted({*_autoscalers(facts)})
    if not found:
        return
    waiting: list[str] = []
    picky: list[str] = []
    for pod in gpu_pods(facts):
        message = text_of(condition_of(pod, "PodScheduled").get("message"))
        ours = [reason for reason in _REFUSALS if reason in message]
        if ours and not node_of(pod):
            waiting.append(f"{key_of(pod)} waits: {'; '.join(ours)}")
            if _REQUIRES_IDLE in annotations_of(pod):
                namespace, _, name = key_of(pod).partition("/")
                picky.append(f"kubectl annotate pod -n {namespace} {name} {_REQUIRES_IDLE}-")
    if waiting:
        yield Problem(
            severity=Severity.WARNING,
            what="pods wait because the extender rejects nodes, and the autoscaler adds none: it "
            "does not call extenders, and counts these nodes as fitting",
            evidence=(f"autoscaler: {some(found)}", *waiting),
            remedy="add a node by hand, or remove the reason: repair or cordon the nodes that "
            "`idlegpu pending` names"
            + (f"; if a busy GPU is acceptable: {'; '.join(picky[:MOST])}" if picky else ""),
        )
    if setting(facts, "load_filter.enabled") is True:
        yield Problem(
            severity=Severity.WARNING,
            what="nodes are rejected because of load, and the autoscaler does not add any for that",
            evidence=(f"autoscaler: {some(found)}", "settings: load_filter.enabled: true"),
            remedy="load_filter: {enabled: false} in the extender's settings: load then only "
            "orders nodes",
        )


def _autoscalers(facts: Facts) -> Iterable[str]:
    for pod in facts.pods or ():
        if is_called(pod, AUTOSCALERS) and not is_over(pod):
            yield f"pod {key_of(pod)}"
    for item in facts.config_maps or ():
        if name_of(item) == "cluster-autoscaler-status":
            yield f"ConfigMap {key_of(item)}"


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

    Remedy: use the affinity of `manifests/agent/daemon-set.yaml` (docs/gpu-operator.md has the
    reason).
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
