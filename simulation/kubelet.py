"""Simulate kubelets: bound pods put load on the fleet, and ended pods remove it."""

import re
from collections.abc import Mapping
from typing import Final

from simulation.devices import Load, PodRef
from simulation.fleet import SimulatedFleet
from simulation.models import GIB, MIB
from simulation.nodes import FleetError
from simulation.objects import JsonObject

UTILIZATION_ANNOTATION: Final = "simulation.idlegpu.io/utilization"
"""Activity of the pod on each of its devices, as a ratio; only the simulation reads it."""

MEMORY_ANNOTATION: Final = "simulation.idlegpu.io/memory"
"""Memory of the pod on each of its devices, such as `20Gi`; only the simulation reads it."""

_ASKED_MEMORY_ANNOTATION: Final = "idlegpu.io/gpu-memory"
_UNITS: Final = {"Gi": GIB, "Mi": MIB, "G": 10**9, "M": 10**6, "": 1}
_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Gi|Mi|G|M|)")


def observe_pod(fleet: SimulatedFleet, pod: JsonObject, *, is_deleted: bool = False) -> str:
    """Update the fleet from one state of a pod; a repeated state changes nothing.

    If the fleet has placed a pod of the same name on that node, it is the same pod.

    Args:
        pod: the pod object from the API server.
        is_deleted: whether the pod was deleted.

    Returns:
        The reason why the kubelet rejects the pod, or "".
    """
    ref = pod_ref(pod)
    phase = _mapping(pod, "status").get("phase")
    if is_deleted or phase in {"Succeeded", "Failed"}:
        fleet.release(ref.uid)
        return ""
    node = _mapping(pod, "spec").get("nodeName")
    if not isinstance(node, str) or node not in fleet.nodes or ref.uid in fleet.placements:
        return ""
    if fleet.adopt(ref, node):
        return ""
    for resource, count in requested(pod).items():
        try:
            fleet.place(ref, node, resource, count, load_of(fleet, pod))
        except FleetError as error:
            fleet.release(ref.uid)
            return str(error)
    return ""


def pod_ref(pod: JsonObject) -> PodRef:
    """Return a pod's identity; the UID of a pod without one is `namespace/name`."""
    metadata = _mapping(pod, "metadata")
    namespace = str(metadata.get("namespace", "default"))
    name = str(metadata.get("name", ""))
    containers = _containers(pod)
    return PodRef(
        namespace=namespace,
        name=name,
        uid=str(metadata.get("uid") or f"{namespace}/{name}"),
        container=str(containers[0].get("name", "main")) if containers else "main",
    )


def requested(pod: JsonObject) -> dict[str, int]:
    """Sum a pod's GPU resources over its containers, without init containers."""
    counts: dict[str, int] = {}
    for container in _containers(pod):
        resources = _mapping(container, "resources")
        amounts = {**_mapping(resources, "requests"), **_mapping(resources, "limits")}
        for name, amount in amounts.items():
            if name.startswith("nvidia.com/") and int(str(amount)) > 0:
                counts[name] = counts.get(name, 0) + int(str(amount))
    return counts


def load_of(fleet: SimulatedFleet, pod: JsonObject) -> Load:
    """Return a pod's load from its annotations, or the fleet's default.

    A pod with `idlegpu.io/gpu-memory` uses nine tenths of that memory.
    """
    annotations = _mapping(_mapping(pod, "metadata"), "annotations")
    utilization = annotations.get(UTILIZATION_ANNOTATION)
    memory_bytes = _bytes(annotations.get(MEMORY_ANNOTATION))
    requested_bytes = _bytes(annotations.get(_ASKED_MEMORY_ANNOTATION))
    if memory_bytes is None and requested_bytes is not None:
        memory_bytes = requested_bytes * 9 // 10
    default = fleet.default_load
    return Load(
        utilization=default.utilization if utilization is None else float(str(utilization)),
        memory_bytes=default.memory_bytes if memory_bytes is None else memory_bytes,
    )


def _bytes(quantity: object) -> int | None:
    match = _QUANTITY.fullmatch(str(quantity))
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def _mapping(parent: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = parent.get(name)
    return value if isinstance(value, dict) else {}


def _containers(pod: JsonObject) -> list[Mapping[str, object]]:
    containers = _mapping(pod, "spec").get("containers")
    return containers if isinstance(containers, list) else []
