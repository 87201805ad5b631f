"""Parse kube-scheduler's message about a pod that it cannot place, and give hints."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from extender.core.decision.filtering import SIGNATURE, Rejection

_HEAD: Final = re.compile(r"0/(?P<nodes>[0-9]{1,7}) nodes are available: ")
_COUNTED: Final = re.compile(r"(?P<count>[0-9]{1,7}) (?P<reason>\S.*)")
_PREEMPTION: Final = " preemption: "
_CLAIMS: Final = re.compile(r"[.,] (?:still not schedulable|no new claims to deallocate)\b")
_OURS: Final = tuple(Rejection)
_OF_NODES: Final = re.compile(r"Insufficient [\w./-]+|Too many pods|node\(s\) [^\"]+")
_OF_THE_POD: Final = "a reason that is the pod's own"
"""Replacement for a reason that may contain names from the pod's namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedReason:
    """A reason, and the number of nodes that it rules out."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchedulerMessage:
    """Parsed message of kube-scheduler.

    Attributes:
        nodes: number of evaluated nodes, None if the message has no number.
        by_scheduler: reasons of kube-scheduler's own filters, most frequent first.
        by_us: reasons of the extender, most frequent first.
        preemption: the message's part about preemption, "" if there is none.
    """

    nodes: int | None
    by_scheduler: tuple[CountedReason, ...]
    by_us: tuple[CountedReason, ...]
    preemption: str


def read_message(message: str) -> _SchedulerMessage:
    """Parse kube-scheduler's message; text that is not a count of nodes is left out.

    Example:
        >>> parsed = read_message("0/9 nodes are available: 4 Insufficient cpu, 5 node(s) had x.")
        >>> parsed.nodes, [(one.count, one.reason) for one in parsed.by_scheduler]
        (9, [(5, 'node(s) had x'), (4, 'Insufficient cpu')])
        >>> read_message("0/9 nodes are available: pod has unbound claims.").by_scheduler
        (CountedReason(count=9, reason='pod has unbound claims'),)
    """
    body, _, preemption = message.replace(SIGNATURE, "").partition(_PREEMPTION)
    head = _HEAD.match(body)
    if head is None:
        return _SchedulerMessage(nodes=None, by_scheduler=(), by_us=(), preemption=preemption)
    reasons = _CLAIMS.split(body[head.end() :])[0].rstrip(". ")
    nodes = int(head["nodes"])
    counted = [one for text in _split(reasons) if (one := _counted(text))]
    if not counted and reasons:
        # A reason that rules out every node, such as a missing volume claim, has no count.
        counted = [CountedReason(count=nodes, reason=reasons)]
    found = sorted(counted, key=lambda one: (-one.count, one.reason))
    return _SchedulerMessage(
        nodes=nodes,
        by_scheduler=tuple(one for one in found if not _is_ours(one.reason)),
        by_us=tuple(one for one in found if _is_ours(one.reason)),
        preemption=preemption,
    )


def _is_ours(reason: str) -> bool:
    """Check whether a reason is the extender's; extenders called later may append words."""
    return any(rejection.value in reason for rejection in _OURS)


def of_nodes(reasons: Iterable[CountedReason]) -> tuple[CountedReason, ...]:
    """Redact reasons that may contain names from the pod's namespace.

    Example:
        >>> of_nodes([CountedReason(count=2, reason='persistentvolumeclaim "data" not found')])
        (CountedReason(count=2, reason="a reason that is the pod's own"),)
    """
    return tuple(
        one
        if _OF_NODES.fullmatch(one.reason)
        else CountedReason(count=one.count, reason=_OF_THE_POD)
        for one in reasons
    )


def _split(reasons: str) -> list[str]:
    """Split reasons at commas that precede a count: a reason may itself contain commas (taints)."""
    return re.split(r", (?=[0-9]{1,7} \S)", reasons)


def _counted(text: str) -> CountedReason | None:
    match = _COUNTED.fullmatch(text)
    return (
        None if match is None else CountedReason(count=int(match["count"]), reason=match["reason"])
    )


_HELP_OURS: Final = {
    Rejection.UNHEALTHY: "`idlegpu gpus NODE -o wide` shows the fault of each GPU; reset it "
    "(docs/gpu-operator.md: drain the agent, too), or drain the node",
    Rejection.FOREIGN_USE: "end these processes, or taint the node: `idlegpu gpus NODE` shows the "
    "GPUs, and with the node agent the processes; `nvidia-smi` on the node shows them, too",
    Rejection.GPU_TOO_SMALL: "the annotation idlegpu.io/gpu-memory requests more than these GPUs "
    "have: lower it, or add nodes with larger GPUs",
    Rejection.NO_MEMORY: "other tenants declared or use the memory of the shared GPUs: wait until "
    "that is freed, or lower idlegpu.io/gpu-memory",
    Rejection.NOT_IDLE: "the pod sets idlegpu.io/require-idle: it waits until GPUs are idle; "
    "`idlegpu holders` shows pods that hold GPUs without using them",
    Rejection.BUSY: "load_filter rejects busy nodes while others are less busy: wait, or raise "
    "idlegpu.io/max-utilization",
    Rejection.RECONFIGURING: "their MIG layout is being changed: wait until that is done",
    Rejection.WRONG_MODEL: "the pod sets idlegpu.io/require-models: `idlegpu best --model MODEL` "
    "shows whether such GPUs exist and are free",
    Rejection.DEARER: "price is strict, and cheaper nodes would do: they were full for other "
    "reasons; idlegpu.io/prefer-models names the models that may cost more",
    Rejection.MISALIGNED: "the kubelet's Topology Manager wants all GPUs of a container on one "
    "NUMA node, and other pods hold some of each: wait, or request fewer GPUs per container",
    Rejection.GROUP_TOO_LARGE: "the nodes that could take the pod have too few GPUs for all pods "
    "of its group: make the group smaller, add nodes, or set idlegpu.io/group-policy to "
    '"prefer" to start the pods that fit',
    Rejection.NOT_TARGET: "the pod names its nodes in idlegpu.io/target and none can take it now: "
    'wait, name others, or set idlegpu.io/target-policy to "prefer"',
}
_HELP_VOLUMES: Final = "the pod's volumes cannot be used there: `kubectl describe pvc`"
_HELP_SCHEDULER: Final = (
    ("Insufficient nvidia.com/", "all such GPUs are held: `idlegpu holders` shows pods that do "
     "not use theirs; else wait, or add nodes"),
    ("Insufficient cpu", "the pod's CPU request does not fit: lower it, or free CPU there"),
    ("Insufficient memory", "the pod's memory request does not fit: lower it, or free some there"),
    ("Insufficient ", "that resource is used up there, or not offered at all"),
    ("-pressure", "these run out of memory, disk or processes: `kubectl describe node`"),
    # Newer versions of kube-scheduler do not name the taints.
    ("untolerated taint(s)", "`kubectl describe node` names the taints: add a toleration to the "
     "pod, or remove them; not-ready and pressure are problems of the node itself"),
    ("untolerated taint", "add a toleration for that taint to the pod, or remove the taint"),
    ("didn't match Pod's node affinity", "the pod's nodeSelector or node affinity leaves these "
     "out: compare it with the nodes' labels"),
    ("affinity terms conflict", "no node can match the pod's node affinity: its terms contradict "
     "each other"),
    ("scheduler-enforced node affinity", "addedAffinity in kube-scheduler's own configuration "
     "leaves these out"),
    ("exceed max volume count", "these have as many volumes attached as they can"),
    # Volumes have node affinity too, so these entries precede the pod's affinity.
    ("volume", _HELP_VOLUMES),
    ("PersistentVolume", _HELP_VOLUMES),
    ("persistentvolume", _HELP_VOLUMES),
    ("pvc(s)", _HELP_VOLUMES),
    ("enough free storage", _HELP_VOLUMES),
    ("available disk", _HELP_VOLUMES),
    ("were unschedulable", "these are cordoned: `kubectl uncordon NODE`"),
    ("anti-affinity", "the anti-affinity of this or another pod leaves these out"),
    ("pod affinity", "the pod's affinity for other pods leaves these out"),
    ("topology spread", "the pod's topologySpreadConstraints leave these out"),
    ("Too many pods", "these run as many pods as their kubelet allows"),
    ("free ports", "the pod's hostPort is taken there"),
    ("didn't match the requested node name", "the pod names another node"),
    ("not-ready", "these are not ready: `kubectl describe node`"),
)  # fmt: skip


def hints(
    reasons: Iterable[CountedReason], examples: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return a hint for each reason, most frequent first.

    Args:
        reasons: reasons and the number of nodes for each.
        examples: a node for each reason, as far as one is known.
    """
    ordered = sorted(reasons, key=lambda one: -one.count)
    return [_hint(one, examples.get(one.reason)) for one in ordered]


def _hint(one: CountedReason, node: str | None) -> str:
    text = _help(one.reason)
    if node is None:
        return f"{one.count} {one.reason}: {text}"
    such_as = "such as " if one.count > 1 else ""
    return f"{one.count} {one.reason} ({such_as}{node}): {text.replace('NODE', node)}"


def _help(reason: str) -> str:
    for rejection, text in _HELP_OURS.items():
        if rejection.value in reason:
            return text
    # The taint of a node that is not ready contains the cause in its name.
    if "not-ready" in reason or "unreachable" in reason:
        return _HELP_SCHEDULER[-1][1]
    for word, text in _HELP_SCHEDULER:
        if word in reason:
            return text
    return "kube-scheduler's own filter refuses it: `kubectl describe pod` shows its events"
