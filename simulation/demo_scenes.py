"""The pods of the demo, scene by scene."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from simulation.kubelet import MEMORY_ANNOTATION, UTILIZATION_ANNOTATION
from simulation.objects import JsonObject, pod_object

GPU: Final = "nvidia.com/gpu"
SHARED: Final = "nvidia.com/gpu.shared"
MIG: Final = "nvidia.com/mig-1g.5gb"

_LIGHT: Final = {UTILIZATION_ANNOTATION: "0.15", MEMORY_ANNOTATION: "2Gi"}
"""Load of a pod on a shared GPU, for the simulation; other pods have the fleet's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One step of the demo.

    Attributes:
        title: description of the pods.
        point: statement that the step demonstrates.
        pods: names of the pods.
        gpus: devices by resource.
        annotations: annotations of each pod.
    """

    title: str
    point: str
    pods: tuple[str, ...]
    gpus: Mapping[str, int]
    annotations: Mapping[str, str] = field(default_factory=dict)

    def objects(self) -> Iterator[JsonObject]:
        """Build the pods."""
        for name in self.pods:
            yield pod_object(name, self.gpus, annotations=self.annotations)


SCENES: Final = (
    Scene(
        title="a stock pod: nvidia.com/gpu: 1",
        point="really idle GPUs, on the node where few are left over",
        pods=("stock",),
        gpus={GPU: 1},
    ),
    Scene(
        title="the same with idlegpu.io/strategy: spread",
        point="the node with the most idle GPUs: few neighbours",
        pods=("notebook",),
        gpus={GPU: 1},
        annotations={"idlegpu.io/strategy": "spread"},
    ),
    Scene(
        title="4 GPUs, idlegpu.io/prefer-models: V100",
        point="an old model is good enough for this pod",
        pods=("legacy-train",),
        gpus={GPU: 4},
        annotations={"idlegpu.io/prefer-models": "V100"},
    ),
    Scene(
        title="one GPU with room: idlegpu.io/gpu-memory: 60Gi",
        point="GPUs that are too small or too full are refused",
        pods=("big-model",),
        gpus={GPU: 1},
        annotations={"idlegpu.io/gpu-memory": "60Gi"},
    ),
    Scene(
        title="a share: nvidia.com/gpu.shared: 1, idlegpu.io/gpu-memory: 8Gi",
        point="four nodes have free shares: one is saturated, one is out of memory",
        pods=("inference",),
        gpus={SHARED: 1},
        annotations={"idlegpu.io/gpu-memory": "8Gi", UTILIZATION_ANNOTATION: "0.3"},
    ),
    Scene(
        title="a MIG instance: nvidia.com/mig-1g.5gb: 1",
        point="busy instances on the same GPU do not matter",
        pods=("slice",),
        gpus={MIG: 1},
        annotations=_LIGHT,
    ),
    Scene(
        title="8 pods at once: nvidia.com/gpu.shared: 1 each",
        point="no metric shows them yet; each counts from the moment of the answer",
        pods=tuple(f"burst-{number}" for number in range(8)),
        gpus={SHARED: 1},
        annotations=_LIGHT,
    ),
    Scene(
        title="a training job: nvidia.com/gpu: 6",
        point="six idle GPUs together: the pods above were placed around them",
        pods=("train",),
        gpus={GPU: 6},
    ),
    Scene(
        title='3 GPUs, idlegpu.io/require-idle: "true"',
        point="this pod waits rather than land beside foreign or unknown load",
        pods=("patient",),
        gpus={GPU: 3},
        annotations={"idlegpu.io/require-idle": "true"},
    ),
    Scene(
        title="a typo: idlegpu.io/gpu-memory: 20Gb",
        point="the pod is still placed; a warning event informs its owner",
        pods=("typo",),
        gpus={GPU: 1},
        annotations={"idlegpu.io/gpu-memory": "20Gb"},
    ),
)

PODS: Final = tuple(pod for scene in SCENES for pod in scene.objects())
"""All pods, in their order."""
