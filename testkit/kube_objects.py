"""Nodes and pods as JSON of the API server, as small as a test needs."""

from typing import Any

Object = dict[str, Any]

GPU = "nvidia.com/gpu"


def node(name: str, gpus: int = 8, **labels: str) -> Object:
    """Build a ready node."""
    counts = {GPU: str(gpus), "cpu": "64"}
    return {
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {},
        "status": {
            "allocatable": counts,
            "capacity": counts,
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pod(name: str, gpus: int = 1, *, uid: str = "", node: str = "", **status: object) -> Object:
    """Build a pod that requests GPUs; its UID is its name by default."""
    return {
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": uid or name,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "containers": [{"name": "main", "resources": {"limits": {GPU: str(gpus)}}}],
            "schedulerName": "idle",
            **({"nodeName": node} if node else {}),
        },
        "status": {"phase": "Pending", **status},
    }


def requesting(name: str, **resources: str) -> Object:
    """Build a waiting pod from resource counts by domain."""
    raw = pod(name, gpus=0)
    limits = {f"{domain}.com/gpu": count for domain, count in resources.items()}
    raw["spec"]["containers"][0]["resources"]["limits"] = limits
    return raw
