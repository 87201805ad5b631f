"""Build Kubernetes objects of the simulated fleet: nodes with GFD's labels, and stock pods."""

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from itertools import groupby
from typing import Final

import orjson

from simulation.devices import Device
from simulation.fleet import Placement, SimulatedFleet
from simulation.nodes import GPU_RESOURCE, Sharing, SimulatedNode

JsonObject = dict[str, object]


class Kind(StrEnum):
    """Kinds that can be listed and watched, by plural name."""

    NODES = "nodes"
    PODS = "pods"


_PER_NODE: Final = {
    "cpu": "128",
    "memory": "1056762036Ki",
    "ephemeral-storage": "1Ti",
    "pods": "110",
}


def timestamp(seconds: float) -> str:
    """Format seconds since the epoch as the API server does.

    Example:
        >>> timestamp(0.0)
        '1970-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def node_object(node: SimulatedNode, *, now: float = 0.0) -> JsonObject:
    """Build a Node as kubelet, device plugin and GFD would register it.

    A real API server accepts the same object, but adds the taint `node.kubernetes.io/not-ready`,
    which must be removed by a patch.

    Args:
        now: time of creation and heartbeat, seconds since the epoch.
    """
    resources = node.resources()
    capacity = _PER_NODE | {name: str(node.count(name)) for name in resources}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": node.name,
            "uid": str(uuid.uuid5(uuid.NAMESPACE_DNS, node.name)),
            "creationTimestamp": timestamp(now),
            "labels": node_labels(node),
        },
        "spec": {"providerID": f"simulated://{node.name}"},
        "status": {
            "capacity": capacity,
            "allocatable": dict(capacity),
            "addresses": [
                {"type": "InternalIP", "address": node.spec.address},
                {"type": "Hostname", "address": node.name},
            ],
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "KubeletReady",
                    "message": "simulated kubelet is posting ready status",
                    "lastHeartbeatTime": timestamp(now),
                    "lastTransitionTime": timestamp(now),
                }
            ],
            "nodeInfo": {
                "architecture": "amd64",
                "bootID": str(uuid.uuid5(uuid.NAMESPACE_DNS, f"boot.{node.name}")),
                "containerRuntimeVersion": "containerd://2.2.0",
                "kernelVersion": "6.8.0-simulated",
                "kubeProxyVersion": "",
                "kubeletVersion": "v1.37.2",
                "machineID": node.name,
                "operatingSystem": "linux",
                "osImage": "simulated",
                "systemUUID": node.name,
            },
        },
    }


def node_labels(node: SimulatedNode) -> dict[str, str]:
    """Return the labels that kubelet and GFD set on a node."""
    spec = node.spec
    product = spec.model.name.replace(" ", "-")
    is_shared = spec.sharing is not Sharing.NONE
    has_mig = any(spec.mig)
    if is_shared and not spec.is_renamed:
        product += "-SHARED"
    major, minor, revision = spec.driver_version.split(".")
    labels = {
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/hostname": node.name,
        "kubernetes.io/os": "linux",
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": product,
        "nvidia.com/gpu.count": str(spec.cards),
        "nvidia.com/gpu.replicas": "0" if has_mig else str(spec.replicas if is_shared else 1),
        "nvidia.com/gpu.sharing-strategy": str(spec.sharing),
        "nvidia.com/gpu.memory": str(spec.model.memory_mib),
        "nvidia.com/gpu.family": spec.model.family,
        "nvidia.com/gpu.compute.major": str(spec.model.compute[0]),
        "nvidia.com/gpu.compute.minor": str(spec.model.compute[1]),
        "nvidia.com/gpu.mode": "compute",
        "nvidia.com/mig.capable": str(bool(spec.model.mig_memory_mib)).lower(),
        "nvidia.com/mps.capable": str(spec.sharing is Sharing.MPS).lower(),
        "nvidia.com/cuda.driver-version.full": spec.driver_version,
        "nvidia.com/cuda.driver-version.major": major,
        "nvidia.com/cuda.driver-version.minor": minor,
        "nvidia.com/cuda.driver-version.revision": revision,
    }
    return labels | dict(spec.labels) | (_mig_labels(node) if has_mig else {})


def _mig_labels(node: SimulatedNode) -> dict[str, str]:
    """Return GFD's labels for the MIG strategy `mixed`."""
    labels = {
        "nvidia.com/mig.strategy": "mixed",
        "nvidia.com/mig.config": "custom",
        "nvidia.com/mig.config.state": "success",
    }
    product = node.spec.model.name.replace(" ", "-")
    instances = sorted((device for device in node.devices if device.profile), key=_profile)
    for profile, group in groupby(instances, key=_profile):
        devices = list(group)
        prefix = f"nvidia.com/mig-{profile}"
        labels |= {
            f"{prefix}.count": str(len(devices)),
            f"{prefix}.memory": str(devices[0].memory_mib),
            f"{prefix}.product": f"{product}-MIG-{profile}",
            f"{prefix}.replicas": str(devices[0].replicas),
            f"{prefix}.sharing-strategy": str(node.spec.sharing),
            f"{prefix}.slices.gi": profile[0],
            f"{prefix}.slices.ci": profile[0],
        }
    return labels


def _profile(device: Device) -> str:
    return device.profile


def pod_object(
    name: str,
    gpus: Mapping[str, int] | int = 1,
    *,
    namespace: str = "default",
    annotations: Mapping[str, str] | None = None,
) -> JsonObject:
    """Build a stock GPU pod without idlegpu-specific fields other than `annotations`.

    Args:
        name: name of the pod.
        gpus: number of `nvidia.com/gpu`, or numbers by resource name.
        annotations: annotations, None to omit the field.
    """
    counts = {GPU_RESOURCE: gpus} if isinstance(gpus, int) else gpus
    metadata: JsonObject = {"name": name, "namespace": namespace}
    if annotations:
        metadata["annotations"] = dict(annotations)
    spec: JsonObject = {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "main",
                "image": "registry.k8s.io/pause:3.10",
                "resources": {
                    "limits": {resource: str(count) for resource, count in counts.items()}
                },
            }
        ],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def bound_pod_object(pod: JsonObject, *, uid: str, node: str, bound_at: float) -> JsonObject:
    """Copy a pod in the state that the API server shows while it runs on its node.

    Args:
        pod: the pod as created.
        bound_at: time of creation, binding and start, seconds since the epoch.
    """
    running = copy_json(pod)
    metadata, spec = child(running, "metadata"), child(running, "spec")
    metadata["uid"] = uid
    metadata.setdefault("creationTimestamp", timestamp(bound_at))
    spec.setdefault("schedulerName", "default-scheduler")
    spec["nodeName"] = node
    running["status"] = {
        "phase": "Running",
        "startTime": timestamp(bound_at),
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": timestamp(bound_at)}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ],
        "containerStatuses": [
            {
                "name": "main",
                "image": "registry.k8s.io/pause:3.10",
                "imageID": "",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": timestamp(bound_at)}},
            }
        ],
    }
    return running


def tenant_pods(fleet: SimulatedFleet, *, started_at: float) -> tuple[JsonObject, ...]:
    """Build the pods that already run on the fleet, bound and running since `started_at`."""
    return tuple(
        bound_pod_object(
            _stock_pod(placements), uid=uid, node=placements[0].node, bound_at=started_at
        )
        for uid, placements in fleet.placements.items()
    )


def _stock_pod(placements: tuple[Placement, ...]) -> JsonObject:
    pod = placements[0].pod
    counts = {placement.resource: placement.count for placement in placements}
    return pod_object(pod.name, counts, namespace=pod.namespace)


def child(parent: JsonObject, name: str) -> JsonObject:
    """Return the object under a key; a missing one is created empty."""
    value = parent.setdefault(name, {})
    if not isinstance(value, dict):
        raise TypeError(f"$.{name} is {value!r}, must be an object")
    return value


def copy_json(value: JsonObject) -> JsonObject:
    """Return a deep copy of a JSON object."""
    copied = orjson.loads(orjson.dumps(value))
    if not isinstance(copied, dict):
        raise TypeError(f"{value!r} is not a JSON object")
    return copied
