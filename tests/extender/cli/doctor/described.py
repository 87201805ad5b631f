"""Objects and answers for several of the doctor's checks."""

from typing import Any

from extender.cli.doctor.facts import Facts, Object, Right
from tests.extender.cli.doctor.things import GPU, NOW, node, pod

REPLICAS, STRATEGY = "nvidia.com/gpu.replicas", "nvidia.com/gpu.sharing-strategy"
SHARED = "nvidia.com/gpu.shared"
MIG = "nvidia.com/mig-1g.10gb"


def at(one: dict[str, Any], *pods: Any, **facts: Any) -> Facts:
    return Facts(at=NOW, nodes=(one,), pods=pods, **facts)


def bare(capacity: dict[str, str]) -> dict[str, Any]:
    """Return a node without any label."""
    one = node(capacity=capacity)
    one["metadata"]["labels"] = {}
    return one


def replica(
    suffix: str = "x", *, grace_seconds: int = 110, template: str = "1", **changes: Any
) -> dict[str, Any]:
    """Return a pod of the extender; changes as for any pod."""
    labels = {"app.kubernetes.io/name": "idlegpu-extender", "pod-template-hash": template}
    made = pod(f"idlegpu-extender-{suffix}", namespace="idlegpu", labels=labels, **changes)
    made["spec"]["terminationGracePeriodSeconds"] = grace_seconds
    return made


def service(address: str = "10.96.0.88") -> dict[str, Any]:
    """Return the extender's Service."""
    return {
        "kind": "Service",
        "metadata": {"name": "idlegpu-extender", "namespace": "idlegpu"},
        "spec": {"clusterIP": address},
    }


def second_scheduler(version: str, **changes: Any) -> dict[str, Any]:
    """Return a pod of the second scheduler; changes as for any pod."""
    image = f"registry.k8s.io/kube-scheduler:{version}"
    return pod("idlegpu-scheduler-x", namespace="idlegpu", image=image, **changes)


GROUP = {
    "scheduler": "default-scheduler",
    "resources": [GPU],
    "verdict": "not-called",
    "count": 3,
    "example": "team/train",
}


def bypassed(kind: str | None = None, **group: object) -> Object:
    causes = [] if kind is None else [{"kind": kind, "field": "x", "pods": 3, "text": "because"}]
    return {"bound": [{**GROUP, **group}] if kind else [], "likely_causes": causes}


def right(*, is_allowed: bool) -> Right:
    return Right(
        account="idlegpu/idlegpu-extender",
        verb="watch",
        group="",
        resource="pods",
        namespace="",
        name="",
        is_allowed=is_allowed,
        manifest="manifests/rbac",
    )
