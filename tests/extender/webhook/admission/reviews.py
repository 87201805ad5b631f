"""Admission reviews."""

from typing import Any


def review(**changes: Any) -> dict[str, Any]:
    """Return a review as the API server sends it, with some fields of its request replaced."""
    request = {
        "uid": "705ab4f5",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "team",
        "operation": "CREATE",
        "object": {"kind": "Pod", "metadata": {"name": "a"}},
        "oldObject": None,
        "dryRun": False,
    }
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {**request, **changes},
    }
