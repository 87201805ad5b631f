"""Which labels of nodes are kept, and which of them are for people, too."""

from functools import lru_cache
from typing import Final

HOSTNAME: Final = "kubernetes.io/hostname"

POOL_LABELS: Final = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
)
"""Labels by which clouds and Karpenter name a node's pool; Cluster Autoscaler has none."""

ZONE: Final = "topology.kubernetes.io/zone"

LABELS_SHOWN: Final = frozenset(
    {
        *POOL_LABELS,
        "cloud.google.com/gke-accelerator",
        "cloud.google.com/gke-gpu-partition-size",
        "cloud.google.com/gke-gpu-sharing-strategy",
        "cloud.google.com/gke-max-shared-clients-per-gpu",
        "k8s.amazonaws.com/accelerator",
        "karpenter.k8s.aws/instance-gpu-count",
        "karpenter.k8s.aws/instance-gpu-memory",
        "karpenter.k8s.aws/instance-gpu-name",
        "kubernetes.azure.com/accelerator",
        "node.kubernetes.io/instance-type",
        ZONE,
    }
)
NVIDIA_PREFIX: Final = "nvidia.com/"
DROPPED_PREFIXES: Final = (
    "nvidia.com/gfd.timestamp",  # changes every minute and says nothing
    "nvidia.com/gpu.deploy.",  # which parts of the operator run there
    "feature.node.kubernetes.io/",  # a hundred for each node
)
DROPPED_NVIDIA_WORDS: Final = (".engines.", ".slices.", ".multiprocessors")
"""Details of MIG profiles, a dozen labels for each, that no decision needs."""

MAX_CACHED: Final = 4096


@lru_cache(maxsize=MAX_CACHED)
def is_kept(label: str) -> bool:
    """Tell whether a label of nodes is kept: of one that is not, nobody knows which have it.

    Example:
        >>> is_kept("disk"), is_kept("feature.node.kubernetes.io/cpu-cpuid.AVX512F")
        (True, False)
    """
    if label.startswith(DROPPED_PREFIXES):
        return False
    return not label.startswith(NVIDIA_PREFIX) or not any(
        word in label for word in DROPPED_NVIDIA_WORDS
    )


@lru_cache(maxsize=MAX_CACHED)
def is_shown(label: str) -> bool:
    """Tell whether a label speaks of GPUs, pool or zone.

    Example:
        >>> is_shown("nvidia.com/gpu.product"), is_shown("disk")
        (True, False)
    """
    return label in LABELS_SHOWN or (label.startswith(NVIDIA_PREFIX) and is_kept(label))
