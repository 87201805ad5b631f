"""Read how a node's kubelet aligns devices to NUMA nodes: the policy of its Topology Manager."""

from collections.abc import Mapping
from enum import IntFlag
from typing import Final

POLICY_LABEL: Final = "idlegpu.io/topology-policy"
SCOPE_LABEL: Final = "idlegpu.io/topology-scope"
"""Labels of a node with the kubelet's `topologyManagerPolicy` and `topologyManagerScope`."""

POLICIES: Final = ("none", "best-effort", "restricted", "single-numa-node")
SCOPES: Final = ("container", "pod")


class Alignment(IntFlag):
    """Pods that the kubelet refuses with TopologyAffinityError, as a number for columns."""

    NONE = 0
    """None: the policy is `none`, `best-effort` or unknown."""
    SINGLE = 1
    """`single-numa-node`: pods whose devices are not all on one NUMA node."""
    RESTRICTED = 2
    """`restricted`: pods that would be spread over more NUMA nodes than on an empty node."""
    BY_POD = 4
    """The devices of all containers are aligned together, else those of each container."""


_POLICIES: Final = {"single-numa-node": Alignment.SINGLE, "restricted": Alignment.RESTRICTED}


def alignment_by(policy: str, scope: str) -> Alignment:
    """Return the alignment by the kubelet's policy and scope; unknown words refuse no pod.

    Example:
        >>> alignment_by("single-numa-node", "container").name
        'SINGLE'
    """
    found = _POLICIES.get(policy, Alignment.NONE)
    return found | Alignment.BY_POD if found and scope == "pod" else found


def alignment_on(labels: Mapping[str, str]) -> Alignment | None:
    """Return the alignment by a node's labels, None without the label."""
    policy = labels.get(POLICY_LABEL)
    return None if policy is None else alignment_by(policy, labels.get(SCOPE_LABEL, ""))
