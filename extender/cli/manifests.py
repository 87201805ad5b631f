"""Pods in manifest files, and the stock Jobs and Pods that the command line makes."""

import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from extender.decoding import decode_with
from extender.remote.errors import ClientError, Failure
from extender.yaml_documents import yaml_documents

Object = dict[str, Any]

TEMPLATES: Final[Mapping[str, tuple[str, ...]]] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    **dict.fromkeys(
        (
            "Job",
            "Deployment",
            "StatefulSet",
            "DaemonSet",
            "ReplicaSet",
            "ReplicationController",
        ),
        ("spec", "template"),
    ),
}
"""Where the pod stands in each kind of object."""

SCHEDULER_TAINT: Final = "idlegpu.io/scheduler"
"""Key of the taint of nodes that one scheduler has for itself; the value is its name."""

_NAME: Final = re.compile(r"[^a-z0-9]+")
MAX_NAME: Final = 40
LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
"""Those that Kubernetes itself ends names with: they spell nothing."""
SUFFIX: Final = 5


def read_pods(file: str) -> list[Object]:
    """Return the pods that the objects in a file would make; `-` reads standard input.

    Raises:
        ClientError: it cannot be read, or no pod is in it.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        documents = decode_with(yaml_documents, text)
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise ClientError(f"cannot read {file}: {cause}", Failure.BAD_QUESTION) from error
    pods = [pod for document in documents for pod in _pods_of(document)]
    if not pods:
        kinds = ", ".join(sorted(TEMPLATES))
        raise ClientError(
            f"{file} holds no pod: must hold at least one object of kind {kinds}",
            Failure.BAD_QUESTION,
        )
    return pods


def _pods_of(document: object) -> Iterator[Object]:
    """Yield the pods that an object would make."""
    if not isinstance(document, dict):
        return
    if str(document.get("kind", "")).endswith("List"):
        for item in document.get("items") or ():
            yield from _pods_of(item)
        return
    path = TEMPLATES.get(str(document.get("kind")))
    if path is None:
        return
    pod: object = document
    for key in path:
        pod = pod.get(key) if isinstance(pod, dict) else None
    if not isinstance(pod, dict) or not isinstance(pod.get("spec"), dict):
        return
    own, made = document.get("metadata") or {}, pod.get("metadata") or {}
    names = {"name": own.get("name", ""), "namespace": own.get("namespace", "default")}
    yield {**pod, "kind": "Pod", "apiVersion": "v1", "metadata": {**names, **made}}


def name_for(words: list[str]) -> str:
    """Return what a name for what runs a command begins with.

    Example:
        >>> name_for(["python", "/src/Train.py"])
        'python-train-py'
    """
    text = "-".join(word.rpartition("/")[2].lower() for word in words[:2])
    return _NAME.sub("-", text).strip("-")[:MAX_NAME].rstrip("-") or "gpu"


def unique(name: str) -> str:
    """Return a name that nothing else has: `kubectl apply` takes no generateName."""
    return f"{name}-{''.join(secrets.choice(LETTERS) for _ in range(SUFFIX))}"


def gpu_pod(
    command: list[str],
    *,
    image: str,
    limits: Mapping[str, str],
    annotations: Mapping[str, str],
    scheduler: str = "",
) -> Object:
    """Return metadata and spec of a pod that runs a command on GPUs, as a template has them.

    Args:
        command: what runs; nothing for the image's own.
        image: of its one container.
        limits: resources, as a manifest has them.
        annotations: under `idlegpu.io/`.
        scheduler: `schedulerName`, "" for the cluster's default.
    """
    container: Object = {"name": "main", "image": image}
    if command:
        container["command"] = command
    container["resources"] = {"limits": dict(limits)}
    metadata = {"annotations": dict(annotations)} if annotations else {}
    spec: Object = {"restartPolicy": "Never"}
    # The taint that keeps other pods off GPU nodes: not every cluster adds this by itself.
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if scheduler:
        spec["schedulerName"] = scheduler
        # The taint that leaves nodes to a second scheduler (docs/kube-scheduler.md).
        own = {"key": SCHEDULER_TAINT, "operator": "Equal", "value": scheduler}
        tolerations.append({**own, "effect": "NoSchedule"})
    spec["tolerations"] = tolerations
    spec["containers"] = [container]
    return {**({"metadata": metadata} if metadata else {}), "spec": spec}


def job_of(template: Object, *, name: str, namespace: str) -> Object:
    """Return a Job that runs a pod once, and goes a day after its end."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _named(name, namespace),
        "spec": {"backoffLimit": 0, "ttlSecondsAfterFinished": 86_400, "template": template},
    }


def pod_of(template: Object, *, name: str, namespace: str) -> Object:
    """Return a Pod made from a template."""
    metadata = {**_named(name, namespace), **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _named(name: str, namespace: str) -> Object:
    return {"name": name, **({"namespace": namespace} if namespace else {})}
