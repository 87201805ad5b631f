"""Facts for tests of the doctor: by default a healthy cluster with one node of eight H100."""

from collections.abc import Iterable
from typing import Any, Final

from extender.cli.commands.doctor import CHECKS
from extender.cli.doctor.facts import Facts, Object, Sample, Scheduler
from extender.cli.doctor.findings import Finding, examine

NOW: Final = 1_800_000_000.0
"""Time 2027-01-15T08:00:00Z."""
NOON: Final = "2027-01-15T08:00:00Z"
GPU: Final = "nvidia.com/gpu"


def entry(**changes: object) -> dict[str, object]:
    """Return the extender's entry of a kube-scheduler configuration; None removes a field."""
    fields = {
        "urlPrefix": "https://idlegpu-extender.idlegpu.svc:8888",
        "filterVerb": "filter",
        "prioritizeVerb": "prioritize",
        "preemptVerb": "preempt",
        "weight": 1,
        "nodeCacheCapable": True,
        "httpTimeout": "1s",
        "managedResources": [{"name": GPU}, {"name": "nvidia.com/gpu.shared"}],
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def scheduler(
    *extenders: Object, profiles: Iterable[object] = ("default-scheduler",), source: str = "a.yaml"
) -> Scheduler:
    """Return a configuration; profiles are names or whole objects."""
    reported = [{"schedulerName": one} if isinstance(one, str) else one for one in profiles]
    return Scheduler(source=source, config={"profiles": reported, "extenders": list(extenders)})


def node(name: str = "node-1", **changes: Any) -> dict[str, Any]:  # parameters are parts of a node
    """Return a node.

    Args:
        name: name of the node.
        **changes: `labels` over the defaults (None removes one), `capacity`, `allocatable`,
            `taints`, `beat` and `noted`: its heartbeat by its own clock and by the API server's.
    """
    capacity = changes.get("capacity", {GPU: "8"})
    labels = {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.count": "8",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/cuda.driver-version.full": "580.95.05",
        "nvidia.com/cuda.runtime-version.major": "13",
        "nvidia.com/cuda.runtime-version.minor": "0",
        **changes.get("labels", {}),
    }
    managed = [{"manager": "kubelet", "subresource": "status", "time": changes.get("noted", NOON)}]
    if changes.get("noted", NOON) is None:
        managed = []
    return {
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {key: value for key, value in labels.items() if value is not None},
            "managedFields": managed,
        },
        "spec": {"taints": changes.get("taints", [])},
        "status": {
            "capacity": capacity,
            "allocatable": changes.get("allocatable", capacity),
            "addresses": [{"type": "InternalIP", "address": "10.0.0.7"}],
            "conditions": [
                {"type": "Ready", "status": "True", "lastHeartbeatTime": changes.get("beat", NOON)}
            ],
        },
    }


def pod(name: str = "train", gpus: dict[str, int] | int = 0, **changes: Any) -> dict[str, Any]:
    """Return a pod that runs on node-1.

    Args:
        name: name of the pod.
        gpus: GPU request by resource, or the number of `nvidia.com/gpu`.
        **changes: `namespace`, `node`, `phase`, `ready`, `annotations`, `labels`, `scheduler`,
            `image`, `command`, `env`, `conditions`, `statuses`.
    """
    counts = {GPU: gpus} if isinstance(gpus, int) else gpus
    limits = {key: str(count) for key, count in counts.items() if count}
    env = [{"name": key, "value": value} for key, value in changes.get("env", {}).items()]
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": changes.get("namespace", "team"),
            "annotations": changes.get("annotations", {}),
            "labels": changes.get("labels", {}),
        },
        "spec": {
            "nodeName": changes.get("node", "node-1"),
            "schedulerName": changes.get("scheduler", "default-scheduler"),
            "containers": [
                {
                    "name": "main",
                    "image": changes.get("image", "busybox"),
                    "command": changes.get("command", []),
                    "env": env,
                    "resources": {"limits": limits},
                }
            ],
        },
        "status": {
            "phase": changes.get("phase", "Running"),
            "reason": changes.get("reason", ""),
            "conditions": changes.get("conditions", []),
            "containerStatuses": changes.get("statuses", [{"ready": changes.get("ready", True)}]),
        },
    }


def claim(holder: str, *, uid: str = "", driver: str = "gpu.nvidia.com") -> dict[str, Any]:
    """Return a ResourceClaim with an allocated GPU that a pod of the namespace team holds."""
    results = [{"driver": driver, "pool": "node-1", "device": "gpu-0"}]
    return {
        "kind": "ResourceClaim",
        "metadata": {"name": f"{holder}-gpu", "namespace": "team"},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": holder, "uid": uid or f"uid-{holder}"}],
        },
    }


def kube_scheduler(version: str, *command: str) -> dict[str, Any]:
    """Return the pod of kube-scheduler on a control plane node."""
    image = f"registry.k8s.io/kube-scheduler:{version}"
    where: dict[str, Any] = {"namespace": "kube-system", "node": "control-plane"}
    return pod("kube-scheduler-control-plane", image=image, command=list(command), **where)


def device(index: int = 0, **changes: object) -> dict[str, object]:
    """Return a GPU as /v1/gpus shows it."""
    return {
        "node": "node-1",
        "resource": GPU,
        "index": index,
        "uuid": f"GPU-{index}",
        "gpu_instance_id": "",
        "mig_profile": "",
        "utilization_ratio": 0.0,
        "memory_used_ratio": 0.1,
        "freshness": "fresh",
        **changes,
    }


def sample(name: str, value: float = 1.0, **labels: str) -> Sample:
    """Return a sample of an exposition."""
    return Sample(name=name, labels=labels, value=value)


def found(code: str, facts: Facts) -> list[Finding]:
    """Return the findings of the check with a code; the facts must suffice for it."""
    (check,) = (one for one in CHECKS if one.code == code)
    report = examine(facts, [check])
    assert not report.not_run, report.not_run
    for finding in report.findings:
        assert finding.evidence
        assert finding.remedy
    return list(report.findings)


def severities(code: str, facts: Facts) -> list[str]:
    """Return the severities of the findings."""
    return [str(finding.severity) for finding in found(code, facts)]


def evidence(code: str, facts: Facts) -> str:
    """Return the evidence of the findings."""
    return "\n".join(line for finding in found(code, facts) for line in finding.evidence)
