"""Names and GPU assignments of the cluster in the benchmark with kube-scheduler.

The processes that fill the API server and Prometheus share only this module. Every number is
invented.
"""

import uuid
from typing import Final

GPUS: Final = 8
"""Number of GPUs of each node."""
HELD: Final = 4
"""Number of GPUs of each node that its tenant holds: the first ones."""
TENANTS: Final = "tenants"
"""Namespace of the pods that always hold GPUs."""
MODEL: Final = "NVIDIA H100 80GB HBM3"
MEMORY_MIB: Final = 81559


def node_name(number: int) -> str:
    """Return a node's name, as long as cloud providers' names.

    Example:
        >>> node_name(300)
        'ip-10-64-1-44.us-east-2.compute.internal'
    """
    return f"ip-10-64-{number >> 8}-{number & 255}.us-east-2.compute.internal"


def node_address(number: int) -> str:
    """Return a node's IP address."""
    return f"10.64.{number >> 8}.{number & 255}"


def tenant_name(number: int) -> str:
    """Return the name of the pod that holds a node's GPUs."""
    return f"training-{number:05d}"


def gpu_uuid(number: int, index: int) -> str:
    """Return a GPU's UUID, which is the same in every run."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{node_name(number)}')}"
