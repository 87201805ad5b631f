"""What kube-scheduler says of a pod that it cannot place, taken apart, and what would help."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from extender.core.filtering import Rejection

_HEAD: Final = re.compile(r"0/(?P<nodes>[0-9]{1,7}) nodes are available: ")
_COUNTED: Final = re.compile(r"(?P<count>[0-9]{1,7}) (?P<reason>\S.*)")
_PREEMPTION: Final = " preemption: "
_CLAIMS: Final = re.compile(r"[.,] (?:still not schedulable|no new claims to deallocate)\b")
_OURS: Final = tuple(Rejection)
_OF_NODES: Final = re.compile(r"Insufficient [\w./-]+|Too many pods|node\(s\) [^\"]+")
OF_THE_POD: Final = "a reason that is the pod's own"
"""What others are told of a reason that may name something of the pod's namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A reason and how many nodes it holds back."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What kube-scheduler said.

    Attributes:
        nodes: how many nodes it looked at, None where it does not say.
        by_scheduler: its own filters' reasons, the commonest first.
        by_us: ours, likewise.
        preemption: what it says of preemption, "" where nothing.
        rest: what it says else, where it is no count of nodes.
    """

    nodes: int | None
    by_scheduler: tuple[Counted, ...]
    by_us: tuple[Counted, ...]
    preemption: str
    rest: str


def read_message(message: str) -> Told:
    """Take kube-scheduler's message apart; what is no count of nodes is kept as it is.

    Example:
        >>> told = read_message("0/9 nodes are available: 4 Insufficient cpu, 5 node(s) had x.")
        >>> told.nodes, [(one.count, one.reason) for one in told.by_scheduler]
        (9, [(5, 'node(s) had x'), (4, 'Insufficient cpu')])
        >>> read_message("0/9 nodes are available: pod has unbound claims.").by_scheduler
        (Counted(count=9, reason='pod has unbound claims'),)
    """
    told, _, preemption = message.partition(_PREEMPTION)
    head = _HEAD.match(told)
    if head is None:
        return Told(nodes=None, by_scheduler=(), by_us=(), preemption=preemption, rest=told)
    reasons = _CLAIMS.split(told[head.end() :])[0].rstrip(". ")
    nodes = int(head["nodes"])
    counted = [one for text in _split(reasons) if (one := _counted(text))]
    if not counted and reasons:
        # What keeps a pod from every node, such as a volume claim that is not there, has no count.
        counted = [Counted(count=nodes, reason=reasons)]
    found = sorted(counted, key=lambda one: (-one.count, one.reason))
    return Told(
        nodes=nodes,
        by_scheduler=tuple(one for one in found if not is_ours(one.reason)),
        by_us=tuple(one for one in found if is_ours(one.reason)),
        preemption=preemption,
        rest="",
    )


def is_ours(reason: str) -> bool:
    """Whether a reason is one of our rejections; extenders behind us may add words."""
    return any(rejection.value in reason for rejection in _OURS)


def of_nodes(reasons: Iterable[Counted]) -> tuple[Counted, ...]:
    """Return reasons as those may know them who may not read the pod.

    Example:
        >>> of_nodes([Counted(count=2, reason='persistentvolumeclaim "data" not found')])
        (Counted(count=2, reason="a reason that is the pod's own"),)
    """
    return tuple(
        one if _OF_NODES.fullmatch(one.reason) else Counted(count=one.count, reason=OF_THE_POD)
        for one in reasons
    )


def _split(reasons: str) -> list[str]:
    """Split at commas before a count: reasons may hold commas themselves (taints in braces)."""
    return re.split(r", (?=[0-9]{1,7} \S)", reasons)


def _counted(text: str) -> Counted | None:
    match = _COUNTED.fullmatch(text)
    return None if match is None else Counted(count=int(match["count"]), reason=match["reason"])


_HELP_OURS: Final = {
    Rejection.UNHEALTHY: "`idlegpu gpus NODE -o wide` says of each GPU what is wrong; reset it "
    "(docs/gpu-operator.md: drain the agent, too), or drain the node",
    Rejection.FOREIGN_USE: "processes that no pod accounts for use their GPUs: `idlegpu gpus "
    "NODE` shows which, `nvidia-smi` there shows whose",
    Rejection.GPU_TOO_SMALL: "the annotation idlegpu.io/gpu-memory asks for more than these GPUs "
    "have: lower it, or add nodes with larger GPUs",
    Rejection.NO_MEMORY: "other tenants declared or use the memory of the shared GPUs: wait until "
    "that is freed, or lower idlegpu.io/gpu-memory",
    Rejection.NOT_IDLE: "the pod says idlegpu.io/require-idle: it waits until GPUs are idle; "
    "`idlegpu holders` shows pods that hold GPUs without using them",
    Rejection.BUSY: "filter.load leaves busy nodes out while others are less busy: wait, or raise "
    "idlegpu.io/max-utilization",
    Rejection.RECONFIGURING: "their MIG layout is being changed: wait until that is done",
}
_HELP_VOLUMES: Final = "the pod's volumes cannot be used there: `kubectl describe pvc`"
_HELP_SCHEDULER: Final = (
    ("Insufficient nvidia.com/", "all such GPUs are held: `idlegpu holders` shows pods that do "
     "not use theirs; else wait, or add nodes"),
    ("Insufficient cpu", "the pod's CPU request does not fit: lower it, or free CPU there"),
    ("Insufficient memory", "the pod's memory request does not fit: lower it, or free some there"),
    ("Insufficient ", "that resource is used up there, or not offered at all"),
    ("-pressure", "these run out of memory, disk or processes: `kubectl describe node`"),
    # Newer ones do not name the taints.
    ("untolerated taint(s)", "`kubectl describe node` names the taints: add a toleration to the "
     "pod, or take them off; not-ready and pressure are troubles of the node's own"),
    ("untolerated taint", "add a toleration for that taint to the pod, or take the taint off"),
    ("didn't match Pod's node affinity", "the pod's nodeSelector or node affinity leaves these "
     "out: compare it with the nodes' labels"),
    ("affinity terms conflict", "no node can match the pod's node affinity: its terms contradict "
     "each other"),
    ("scheduler-enforced node affinity", "addedAffinity in kube-scheduler's own configuration "
     "leaves these out"),
    ("exceed max volume count", "these have as many volumes attached as they can"),
    # A volume has a node affinity, too: these stand before the pod's.
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


def hints(reasons: Iterable[Counted]) -> list[str]:
    """Return what would have to change, a sentence for each reason; the commonest first."""
    ordered = sorted(reasons, key=lambda one: -one.count)
    return [f"{one.count} {one.reason}: {_help(one.reason)}" for one in ordered]


def _help(reason: str) -> str:
    for rejection, text in _HELP_OURS.items():
        if rejection.value in reason:
            return text
    # What was tainted for not being ready says so in the taint's name.
    if "not-ready" in reason or "unreachable" in reason:
        return _HELP_SCHEDULER[-1][1]
    for word, text in _HELP_SCHEDULER:
        if word in reason:
            return text
    return "kube-scheduler's own filter says so: `kubectl describe pod` shows its events"
