"""Build the Job or Pod of a command that runs on GPUs, for `idlegpu run` and `Client.submit`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from extender.cli.manifests import Object, adapted, gpu_pod, job_of, name_for, pod_of, unique
from extender.cli.remote.errors import ClientError, Failure
from extender.core.policy import Policy
from extender.core.request.annotations import Annotation, read_annotations

IMAGE: Final = "nvidia/cuda:12.9.1-base-ubuntu24.04"
HOLD: Final = ("sleep", "infinity")
DEFAULT_SCHEDULER: Final = "default-scheduler"
"""Scheduler of pods without schedulerName."""
PATHS: Final = {
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "Pod": "/api/v1/namespaces/{}/pods",
}
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
            ClientError: a variable's name, the number of GPUs or an annotation is invalid.
        """
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
        template = adapted(
            template,
            environment=[f"{name}={value}" for name, value in self.env.items()],
            shm=self.shm,
            node=self.node,
            seconds=self.timeout_seconds,
        )
        name = self.name or unique("hold" if self.is_held else name_for(words))
        build = pod_of if self.is_held else job_of
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
