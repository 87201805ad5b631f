"""Pods that hold devices of a node, and the node's row."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from extender.core.decision.allocation import DeviceTenancy, allocate
from extender.core.decision.landing import NONE_OUT
from extender.core.devices.expected_devices import Expected, ExpectedDevice
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import PodPhase, PodRecord
from extender.core.nodes.snapshot import PoolRow
from extender.core.policy import Assumed, SharedPolicy
from testkit.builders import GPU, NOW

WARM_UP = 120.0
TENANCY = DeviceTenancy(
    is_mapped=True,
    assumed=Assumed(warm_up_seconds=WARM_UP, loading_seconds=0.0),
    shared_policy=SharedPolicy.DISTRIBUTED,
    is_out=NONE_OUT,
)


def pod(name: str, count: int = 1, **changes: Any) -> PodRecord:
    """Return a pod that has been running long enough to appear in readings."""
    described = PodRecord(
        uid=name,
        namespace="ns",
        name=name,
        node="node",
        resources={GPU: count} if count else {},
        phase=PodPhase.RUNNING,
        bound_at=NOW - WARM_UP,
        started_at=NOW - WARM_UP,
    )
    return replace(described, **changes)


def young(name: str, count: int = 1, **changes: Any) -> PodRecord:
    return pod(name, count, **{"bound_at": NOW - 1, "started_at": NOW - 1, **changes})


def row_of(
    devices: int | list[tuple[str, ...]],
    *pods: PodRecord,
    replicas: int = 1,
    tenancy: DeviceTenancy = TENANCY,
    measured_at: float | tuple[float, ...] | None = NOW,
    allocatable: int | None = None,
    serving: Mapping[str, Any] = MappingProxyType({}),
    free: HostResources | None = None,
) -> PoolRow:
    """Build a node with its devices.

    Args:
        devices: number of devices, or the names of each device's pods in the mapping.
        pods: the pods on the node.
        replicas: replicas of each device.
        tenancy: known holders of devices.
        measured_at: time of every device's measurement, or one time for each.
        allocatable: number of allocatable devices; by default all.
        serving: further expectations of the node.
        free: CPU, memory and storage of the node that no pod requests.
    """
    shown = [()] * devices if isinstance(devices, int) else devices
    full = len(shown) * replicas
    return allocate(
        replace(
            Expected(resource=GPU, count=len(shown), replicas=replicas, is_shared=replicas > 1),
            **serving,
        ),
        [
            ExpectedDevice(
                row=row,
                tenants=tuple(f"ns/{name}" for name in names),
                measured_at=measured_at[row] if isinstance(measured_at, tuple) else measured_at,
            )
            for row, names in enumerate(shown)
        ],
        pods,
        tenancy,
        allocatable=full if allocatable is None else allocatable,
        capacity=full,
        free=free,
    )
