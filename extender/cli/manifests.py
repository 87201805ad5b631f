"""Read pods from manifest files, and build the Jobs and Pods that `run` and `smoke` create."""

import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from extender.cli.remote.errors import ClientError, Failure, cause_of
from extender.runtime.decoding import decode_with

Object = dict[str, Any]

_TEMPLATES: Final[Mapping[str, tuple[str, ...]]] = {
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
"""Path of the pod template in each kind of object."""

_SCHEDULER_TAINT: Final = "idlegpu.io/scheduler"
"""Key of the taint that reserves nodes for one scheduler; its value is the schedulerName."""

_NAME: Final = re.compile(r"[^a-z0-9]+")
_MAX_NAME: Final = 40
_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
"""Alphabet of Kubernetes' generated names, without vowels, so that no words appear."""
_SUFFIX: Final = 5
_SHM: Final = "/dev/shm"  # noqa: S108 - the container's shared memory


def read_pods(file: str) -> list[Object]:
    """Return the pods that the objects in a manifest file would create; `-` reads standard input.

    Raises:
        ClientError: the file cannot be read, or contains no pod.
    """
    pods = [pod for document in load_documents(file) for pod in pods_of(document)]
    if not pods:
        kinds = ", ".join(sorted(_TEMPLATES))
        raise ClientError(
            f"{file} holds no pod: must hold at least one object of kind {kinds}",
            Failure.BAD_REQUEST,
        )
    return pods


def load_documents(file: str) -> list[object]:
    """Return the documents of a YAML file; `-` reads standard input.

    Raises:
        ClientError: the file cannot be read.
    """
    from extender.runtime.yaml_documents import yaml_documents  # most commands need no YAML

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        return list(decode_with(yaml_documents, text))
    except (OSError, ValueError) as error:
        raise ClientError(f"cannot read {file}: {cause_of(error)}", Failure.BAD_REQUEST) from error


def pods_of(document: object) -> Iterator[Object]:
    """Yield the pods that an object would create."""
    if not isinstance(document, dict):
        return
    if str(document.get("kind", "")).endswith("List"):
        for item in document.get("items") or ():
            yield from pods_of(item)
        return
    path = _TEMPLATES.get(str(document.get("kind")))
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


def nested_pods(document: object) -> Iterator[Object]:
    """Yield a pod for each list of containers in an object of any kind, such as a RayService.

    Its pods get other names, so only namespace, images and requests are meaningful.
    """
    metadata = document.get("metadata") if isinstance(document, dict) else None
    namespace = (metadata or {}).get("namespace", "default")
    for spec in _specs_in(document):
        yield {"kind": "Pod", "metadata": {"namespace": namespace}, "spec": spec}


def _specs_in(document: object) -> Iterator[Object]:
    if isinstance(document, list):
        for item in document:
            yield from _specs_in(item)
    elif isinstance(document, dict):
        containers = document.get("containers")
        if containers and isinstance(containers, list):
            yield document
        for value in document.values():
            yield from _specs_in(value)


def owner_of(document: object) -> str:
    """Return a manifest's object as a pod's controller, KIND/NAME; "" if the object is a pod."""
    if not isinstance(document, dict) or document.get("kind") in {None, "Pod", "PodTemplate"}:
        return ""
    name = (document.get("metadata") or {}).get("name")
    return f"{document['kind']}/{name}" if name else ""


def name_for(words: list[str]) -> str:
    """Build a name prefix from the first two words of a command.

    Example:
        >>> name_for(["python", "/src/Train.py"])
        'python-train-py'
    """
    text = "-".join(word.rpartition("/")[2].lower() for word in words[:2])
    return _NAME.sub("-", text).strip("-")[:_MAX_NAME].rstrip("-") or "gpu"


def unique(name: str) -> str:
    """Append a random suffix to a name, because `kubectl apply` does not accept generateName."""
    return f"{name}-{''.join(secrets.choice(_LETTERS) for _ in range(_SUFFIX))}"


def gpu_pod(
    command: list[str],
    *,
    image: str,
    limits: Mapping[str, str],
    annotations: Mapping[str, str],
    scheduler: str = "",
) -> Object:
    """Build the pod template (metadata and spec) of a pod that runs a command on GPUs.

    Args:
        command: command of the container; empty for the image's own.
        image: image of the only container.
        limits: resource limits, as quantities.
        annotations: annotations of the pod.
        scheduler: `schedulerName`, "" for the cluster's default.
    """
    container: Object = {"name": "main", "image": image}
    if command:
        container["command"] = command
    container["resources"] = {"limits": dict(limits)}
    metadata = {"annotations": dict(annotations)} if annotations else {}
    spec: Object = {"restartPolicy": "Never"}
    # GPU nodes often have this taint, and not every cluster adds the toleration to GPU pods.
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if scheduler:
        spec["schedulerName"] = scheduler
        # The taint that reserves nodes for a second scheduler (docs/kube-scheduler.md).
        own = {"key": _SCHEDULER_TAINT, "operator": "Equal", "value": scheduler}
        tolerations.append({**own, "effect": "NoSchedule"})
    spec["tolerations"] = tolerations
    spec["containers"] = [container]
    return {**({"metadata": metadata} if metadata else {}), "spec": spec}


def adapted(
    template: Object,
    *,
    environment: Iterable[str] = (),
    shm: str | None = None,
    node: str = "",
    seconds: int | None = None,
) -> Object:
    """Return the template of `gpu_pod` with further settings.

    Args:
        template: metadata and spec of a pod with one container.
        environment: variables as NAME=VALUE.
        shm: size of /dev/shm as a quantity, None for the runtime's 64 MiB.
        node: the only acceptable node, "" for any.
        seconds: longest run, None for no limit.
    """
    (container,) = template["spec"]["containers"]
    spec = dict(template["spec"])
    pairs = (one.partition("=") for one in environment)
    variables = [{"name": name, "value": value} for name, _, value in pairs]
    container = {**container, **({"env": variables} if variables else {})}
    if shm:
        spec["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}}]
        container["volumeMounts"] = [{"name": "shm", "mountPath": _SHM}]
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    if seconds is not None:
        spec["activeDeadlineSeconds"] = seconds
    return {**template, "spec": {**spec, "containers": [container]}}


def job_of(template: Object, *, name: str, namespace: str) -> Object:
    """Build a Job that runs a pod template once and is deleted a day after it finishes."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _named(name, namespace),
        "spec": {"backoffLimit": 0, "ttlSecondsAfterFinished": 86_400, "template": template},
    }


def pod_of(template: Object, *, name: str, namespace: str) -> Object:
    """Build a Pod from a pod template."""
    metadata = {**_named(name, namespace), **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _named(name: str, namespace: str) -> Object:
    return {"name": name, **({"namespace": namespace} if namespace else {})}
