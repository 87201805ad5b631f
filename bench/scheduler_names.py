"""The cluster of the benchmark with kube-scheduler: who is called what, and what holds what.

API server and Prometheus are filled from here, by two processes that know nothing else of each
other. Every number is invented.
"""

import uuid
from typing import Final

GPUS: Final = 8
"""GPUs of each node."""
HELD: Final = 4
"""So many of them are held by the node's tenant: the first ones."""
TENANTS: Final = "tenants"
"""Namespace of the pods that hold GPUs all the time."""
MODEL: Final = "NVIDIA H100 80GB HBM3"
MEMORY_MIB: Final = 81559


def node_name(number: int) -> str:
    """Return a node's name, as long as those of cloud providers are.

    Example:
        >>> node_name(300)
        'ip-10-64-1-44.us-east-2.compute.internal'
    """
    return f"ip-10-64-{number >> 8}-{number & 255}.us-east-2.compute.internal"


def node_address(number: int) -> str:
    """Return a node's IP address."""
    return f"10.64.{number >> 8}.{number & 255}"


def tenant_name(number: int) -> str:
    """Return the name of the pod that holds GPUs of a node."""
    return f"training-{number:05d}"


def gpu_uuid(number: int, index: int) -> str:
    """Return a GPU's UUID, the same in every run."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{node_name(number)}')}"
