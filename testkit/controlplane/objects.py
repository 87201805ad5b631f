"""Kubernetes objects for tests: by default a healthy node, and a pod without annotations."""

from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]  # Kubernetes object as JSON; the API server validates it

GPU = "nvidia.com/gpu"
IMAGE = "registry.k8s.io/pause:3.10"  # never pulled: no container runs here


def node(
    name: str,
    gpus: Mapping[str, int | str] | int = 8,
    *,
    labels: Mapping[str, str] | None = None,
    address: str = "",
    taints: list[Object] | None = None,
) -> Object:
    """Build a ready node with its status, for a single POST.

    Args:
        name: name of the node, and value of its host name label.
        gpus: number of whole GPUs, or count by resource name; 0 or {} for a node without.
        labels: labels besides the host name, e.g. GFD's.
        address: the node's internal IP; empty for none.
        taints: the node's taints.
    """
    resources = {GPU: gpus} if isinstance(gpus, int) else gpus
    capacity = {
        "cpu": "64",
        "memory": "512Gi",
        "ephemeral-storage": "1Ti",
        "pods": "110",
        **{resource: str(count) for resource, count in resources.items() if count},
    }
    addresses = [{"type": "Hostname", "address": name}]
    if address:
        addresses.append({"type": "InternalIP", "address": address})
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                **(labels or {}),
            },
        },
        "spec": {"taints": taints or []},
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "addresses": addresses,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }


def pod(
    name: str,
    gpus: Mapping[str, int | str] | int = 1,
    *,
    namespace: str = "default",
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    **spec: object,
) -> Object:
    """Build a pod that requests GPUs, with no other wishes.

    Args:
        name: the pod's name.
        gpus: number of whole GPUs, or count by resource name; 0 or {} for none.
        namespace: the pod's namespace.
        annotations: the pod's annotations.
        labels: the pod's labels.
        **spec: further fields of the pod's spec, e.g. `schedulerName="idle"`.
    """
    resources = {GPU: gpus} if isinstance(gpus, int) else gpus
    limits = {resource: str(count) for resource, count in resources.items() if count}
    container = {"name": "main", "image": IMAGE, "resources": {"limits": limits}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": dict(labels or {}),
            "annotations": dict(annotations or {}),
        },
        "spec": {
            "containers": [container],
            # Without kubelets no program confirms the end of a pod, so a victim of preemption must
            # go at once.
            "terminationGracePeriodSeconds": 0,
            **spec,
        },
    }


def priority_class(name: str, value: int) -> Object:
    """Build a priority class whose pods may preempt others."""
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": value,
    }
