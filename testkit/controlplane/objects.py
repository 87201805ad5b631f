"""Kubernetes objects for tests: every default is a healthy node, a stock pod."""

from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]  # a Kubernetes object as JSON: its shape is the API server's to check

GPU = "nvidia.com/gpu"
IMAGE = "registry.k8s.io/pause:3.10"  # never pulled: nothing runs here


def node(
    name: str,
    gpus: Mapping[str, int | str] | int = 8,
    *,
    labels: Mapping[str, str] | None = None,
    address: str = "",
    taints: list[Object] | None = None,
) -> Object:
    """Describe a ready node, with its status, as one POST takes it.

    Args:
        name: the node's name, and its host name label.
        gpus: number of whole GPUs, or count by resource name; 0 or {} for a node without.
        labels: on top of the host name, e.g. GFD's.
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
    """Describe a stock pod that asks for GPUs and says nothing else.

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
            # Without kubelets no program confirms an end: a victim of preemption must go at once.
            "terminationGracePeriodSeconds": 0,
            **spec,
        },
    }


def priority_class(name: str, value: int) -> Object:
    """Describe a priority class whose pods may preempt others."""
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": value,
    }
