"""Read pods from manifest files, propose their GPUs, and build the objects of `run` and `smoke`."""

import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from extender.answers.holding import Size
from extender.cli.transports import ClientError, Failure, cause_of
from extender.core.policy import Policy
from extender.core.quantity import parse_quantity
from extender.core.request.annotations import Annotation, read_annotations
from extender.core.sizing import Measured, Proposal, propose, texts_in
from extender.core.untyped import mapping_of, objects_of
from extender.runtime.decoding import decode_with

Object = dict[str, Any]

_TEMPLATES: Final[Mapping[str, tuple[str, ...]]] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    **dict.fromkeys(
        ("Job", "Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "ReplicationController"),
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


def pods_of(document: object, namespace: str = "default") -> Iterator[Object]:
    """Yield the pods that an object would create, in a namespace unless it states one."""
    if not isinstance(document, dict):
        return
    if str(document.get("kind", "")).endswith("List"):
        for item in objects_of(document.get("items")):
            yield from pods_of(item, namespace)
        return
    path = _TEMPLATES.get(str(document.get("kind")))
    if path is None:
        return
    pod: object = document
    for key in path:
        pod = pod.get(key) if isinstance(pod, dict) else None
    if not isinstance(pod, dict) or not isinstance(pod.get("spec"), dict):
        return
    own, made = mapping_of(document.get("metadata")), mapping_of(pod.get("metadata"))
    names = {"name": own.get("name", ""), "namespace": own.get("namespace", namespace)}
    yield {**pod, "kind": "Pod", "apiVersion": "v1", "metadata": {**names, **made}}


def nested_pods(document: object, namespace: str) -> Iterator[Object]:
    """Yield a pod for each list of containers in an object of any kind, such as a RayService.

    Its pods get other names, so only namespace, images and requests are meaningful.
    """
    metadata = mapping_of(mapping_of(document).get("metadata"))
    names = {"namespace": metadata.get("namespace", namespace)}
    for spec in _specs_in(document):
        yield {"kind": "Pod", "metadata": names, "spec": spec}


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
    name = mapping_of(document.get("metadata")).get("name")
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


def _job_of(template: Object, *, name: str, namespace: str) -> Object:
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


IMAGE: Final = "nvidia/cuda:12.9.1-base-ubuntu24.04"
HOLD: Final = ("sleep", "infinity")
DEFAULT_SCHEDULER: Final = "default-scheduler"
"""Scheduler of pods without schedulerName."""
PATHS: Final = {"Job": "/apis/batch/v1/namespaces/{}/jobs", "Pod": "/api/v1/namespaces/{}/pods"}
"""Collection in the API by kind."""
_WISHES: Final = {
    Annotation.GPU_MEMORY: "memory",
    Annotation.PREFER_MODELS: "model",
    Annotation.REQUIRE_MODELS: "require_model",
    Annotation.STRATEGY: "strategy",
    Annotation.TARGET: "target",
}
"""Attribute of a job for each annotation that states its value."""
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuJob:
    """A command that runs on GPUs.

    Attributes:
        command: command of the container; () for the image's own.
        image: image of the container.
        env: environment variables.
        gpus: number of GPUs.
        resource: GPU resource.
        memory: memory needed on each GPU, as a quantity (`20Gi`).
        model: models to prefer, separated by commas (`H100,A100`).
        require_model: the only models to accept.
        target: node, and GPUs to prefer on it (`gpu-1::0,2`).
        strategy: `auto`, `spread` or `pack`.
        require_idle: wait for GPUs known to be idle.
        cpu: CPU, as a quantity.
        ram: main memory, as a quantity.
        shm: size of /dev/shm, as a quantity.
        node: the only acceptable node, "" for any.
        timeout_seconds: longest run, None for no limit.
        scheduler: schedulerName, "" for the cluster's default.
        name: name of the object; made from the command if "".
        namespace: namespace, "" for that of the kubeconfig.
        is_held: build an idle pod for interactive work instead of a Job.
    """

    command: Sequence[str] = ()
    image: str = IMAGE
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    resource: str = "nvidia.com/gpu"
    memory: str | None = None
    model: str | None = None
    require_model: str | None = None
    target: str | None = None
    strategy: str | None = None
    require_idle: bool = False
    cpu: str | None = None
    ram: str | None = None
    shm: str | None = None
    node: str = ""
    timeout_seconds: int | None = None
    scheduler: str = ""
    name: str = ""
    namespace: str = ""
    is_held: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ClientError: the command, a quantity, a variable's name, the number of GPUs or an
                annotation is invalid.
        """
        if isinstance(self.command, str):
            _refuse(
                f"command {self.command!r}: must be a list of words, such as ['python', 'a.py']"
            )
        for option in ("cpu", "ram", "shm"):
            try:
                parse_quantity(getattr(self, option) or "1")
            except ValueError as error:
                _refuse(f"{option}: {error}")
        for name in self.env:
            if not _VARIABLE.fullmatch(name):
                _refuse(f"env {name!r}: must be a variable's name, such as EPOCHS")
        if self.gpus < 1:
            _refuse(f"gpus {self.gpus}: must be at least 1")
        annotated = {"metadata": {"annotations": self._annotations()}}
        for problem in read_annotations(annotated, Policy()).problems:
            wish = _WISHES[Annotation(problem.annotation)]
            _refuse(f"{wish} {problem.value!r}: must be {problem.allowed}")

    def manifest(self) -> Object:
        """Build the Job or the Pod: a stock object with resources, annotations, schedulerName."""
        limits = {self.resource: str(self.gpus), "cpu": self.cpu, "memory": self.ram}
        words = list(self.command or (HOLD if self.is_held else ()))
        template = gpu_pod(
            words,
            image=self.image,
            limits={key: value for key, value in limits.items() if value},
            annotations=self._annotations(),
            scheduler=self.scheduler,
        )
        spec = template["spec"]
        (container,) = spec["containers"]
        if self.env:
            container["env"] = [{"name": name, "value": value} for name, value in self.env.items()]
        if self.shm:
            volume = {"medium": "Memory", "sizeLimit": self.shm}
            spec["volumes"] = [{"name": "shm", "emptyDir": volume}]
            container["volumeMounts"] = [{"name": "shm", "mountPath": _SHM}]
        if self.node:
            spec["nodeSelector"] = {"kubernetes.io/hostname": self.node}
        if self.timeout_seconds is not None:
            spec["activeDeadlineSeconds"] = self.timeout_seconds
        name = self.name or unique("hold" if self.is_held else name_for(words))
        build = pod_of if self.is_held else _job_of
        return build(template, name=name, namespace=self.namespace)

    def _annotations(self) -> dict[str, str]:
        wishes = {str(name): getattr(self, wish) for name, wish in _WISHES.items()}
        annotations = {name: value for name, value in wishes.items() if value is not None}
        if self.require_idle:
            annotations[str(Annotation.REQUIRE_IDLE)] = "true"
        return annotations


def _refuse(message: str) -> None:
    raise ClientError(message, Failure.BAD_REQUEST)


def only_scheduler(schedulers: Sequence[str]) -> str:
    """Return the only scheduler that calls the extender; "" for none, several or the default."""
    known = schedulers[0] if len(schedulers) == 1 else DEFAULT_SCHEDULER
    return "" if known == DEFAULT_SCHEDULER else known


_Measure = Callable[[Object, str | None], Size]
"""Returns the measured use of pods like a pod, or of an owner's pods (`Deployment chat`)."""


def propose_for(
    measure: _Measure,
    *,
    documents: Sequence[object] = (),
    text: str = "",
    command: str = "",
    image: str = "",
    owner: str = "",
    namespace: str = "default",
    on_unreachable: Callable[[ClientError], None] | None = None,
) -> Proposal:
    """Propose the GPUs of a task.

    Args:
        measure: queries the extender for measurements.
        documents: objects of the task's manifest.
        text: description of the task.
        command: its command, if no manifest has it.
        image: its image, to find similar pods.
        owner: controller of similar pods as KIND/NAME.
        namespace: namespace of similar pods, if no manifest states it.
        on_unreachable: receives the error if the extender cannot be reached; the proposal then uses
            the other inputs. None to raise it.

    Raises:
        ClientError: `owner` is malformed, or the extender does not answer.
    """
    found = [(pod, one) for one in documents for pod in pods_of(one, namespace)]
    found = found or [(pod, one) for one in documents for pod in nested_pods(one, namespace)]
    pod: Object = {"spec": {"containers": [{"image": image} if image else {}]}}
    pod["metadata"] = {"namespace": namespace}
    if found:
        pod, document = found[0]
        owner = owner or owner_of(document)
    measured = None
    notes: tuple[str, ...] = ()
    if found or image or owner:
        try:
            measured = _measured(measure, pod, owner)
            notes = () if measured else ("no similar pod was measured on a shared GPU",)
        except ClientError as error:
            if on_unreachable is None or error.failure is not Failure.UNREACHABLE:
                raise
            on_unreachable(error)
    proposal = propose(text, " ".join((command, *texts_in(documents))), measured)
    return replace(proposal, because=(*notes, *proposal.because))


def _measured(measure: _Measure, pod: Object, owner: str) -> Measured | None:
    kind, _, name = owner.partition("/")
    if owner and not (kind and name):
        raise ClientError(
            f"owner {owner!r}: must be KIND/NAME, such as Deployment/chat", Failure.BAD_REQUEST
        )
    kind = next((one for one in _TEMPLATES if one.lower() == kind.lower()), kind)
    used = measure(pod, f"{kind} {name}" if owner else None).measured
    if used is None:
        return None
    return Measured(by=used.by, pods=used.pods, memory_bytes=used.memory_bytes)
