"""Select the node labels that are stored, and those that are shown to users."""

from functools import lru_cache
from typing import Final

from extender.core.nodes.topology_manager import POLICY_LABEL, SCOPE_LABEL

HOSTNAME: Final = "kubernetes.io/hostname"

POOL_LABELS: Final = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
)
"""Labels for the node pool, set by cloud providers and Karpenter; Cluster Autoscaler sets none."""

MODEL_LABELS: Final = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
"""Labels with the model of a node's GPUs, the most exact first."""

ZONE: Final = "topology.kubernetes.io/zone"

_LABELS_SHOWN: Final = frozenset(
    {
        *POOL_LABELS,
        *MODEL_LABELS,
        "cloud.google.com/gke-gpu-partition-size",
        "cloud.google.com/gke-gpu-sharing-strategy",
        "cloud.google.com/gke-max-shared-clients-per-gpu",
        "karpenter.k8s.aws/instance-gpu-count",
        "karpenter.k8s.aws/instance-gpu-memory",
        "kubernetes.azure.com/accelerator",
        "node.kubernetes.io/instance-type",
        POLICY_LABEL,
        SCOPE_LABEL,
        ZONE,
    }
)
_NVIDIA_PREFIX: Final = "nvidia.com/"
_DROPPED_PREFIXES: Final = (
    "nvidia.com/gfd.timestamp",  # changes every minute, without information
    "nvidia.com/gpu.deploy.",  # operator components on the node
    "feature.node.kubernetes.io/",  # about a hundred per node
)
_DROPPED_NVIDIA_WORDS: Final = (".engines.", ".slices.", ".multiprocessors")
"""Parts of labels with MIG profile details, a dozen per profile; no decision needs them."""

_MAX_CACHED: Final = 4096


@lru_cache(maxsize=_MAX_CACHED)
def is_kept(label: str) -> bool:
    """Return whether a node label is stored.

    Example:
        >>> is_kept("disk"), is_kept("feature.node.kubernetes.io/cpu-cpuid.AVX512F")
        (True, False)
    """
    if label.startswith(_DROPPED_PREFIXES):
        return False
    return not label.startswith(_NVIDIA_PREFIX) or not any(
        word in label for word in _DROPPED_NVIDIA_WORDS
    )


@lru_cache(maxsize=_MAX_CACHED)
def is_shown(label: str) -> bool:
    """Return whether a node label describes GPUs, node pool or zone.

    Example:
        >>> is_shown("nvidia.com/gpu.product"), is_shown("disk")
        (True, False)
    """
    return label in _LABELS_SHOWN or (label.startswith(_NVIDIA_PREFIX) and is_kept(label))
