"""Comparison of the extender's view of the fleet with the exporters' data."""

from collections.abc import Iterable, Mapping
from typing import Final

from simulation.devices import DeviceView
from simulation.fleet import SimulatedFleet
from simulation.models import MIB
from testkit.controlplane.objects import Object

TOLERANCE: Final = 0.02
"""Largest difference of equal ratios, because exporters round."""

Gpus = Mapping[tuple[str, str, str], Object]
"""The extender's view of each GPU, by node, UUID and GPU instance ID."""


def first_difference(fleet: SimulatedFleet, nodes: Iterable[str], seen: Gpus) -> str:
    """Describe the first difference between the extender's view and exporters, "" without one."""
    for node in sorted(nodes):
        if fleet.node(node).silent_since is not None:
            continue
        for view in fleet.views(node):
            gpu = seen.get((node, view.uuid, view.gpu_instance_id))
            difference = "not seen" if gpu is None else _differs(gpu, view)
            if difference:
                return f"GPU {view.index} {view.gpu_instance_id} of {node}: {difference}"
    return ""


def _differs(gpu: Object, view: DeviceView) -> str:
    """Describe the difference between the extender's view and an exporter's, "" without one."""
    if gpu["freshness"] != "fresh" or gpu["memory_used_ratio"] is None:
        return f"is {gpu['freshness']}"
    used = view.memory_used_bytes / ((view.memory_mib - view.reserved_mib) * MIB)
    for name, is_now, shown in (
        ("utilization", gpu["utilization_latest_ratio"], view.utilization),
        ("memory", gpu["memory_used_ratio"], used),
    ):
        if is_now is None or abs(is_now - shown) > TOLERANCE:
            return f"{name} is {is_now}, shown is {shown:.3f}"
    tenants = sorted(tenant.pod.key for tenant in view.tenants)
    if sorted(gpu["tenants"]) != tenants:
        return f"tenants are {gpu['tenants']}, shown are {tenants}"
    return ""
