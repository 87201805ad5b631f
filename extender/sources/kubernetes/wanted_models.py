"""Which model of GPU a pod asks for: by its node selector, its affinity, or our annotation."""

from collections.abc import Iterator, Mapping
from typing import Final

from extender.core.devices.gpu_models import ANY, short_model
from extender.core.request.annotations import Annotation
from extender.core.untyped import items_of, mapping_of, objects_of, text_of

MODEL_LABELS: Final = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
"""Labels of nodes that name their GPUs' model."""


def wanted_model(raw: Mapping[str, object]) -> str:
    """Return the model that a Pod object asks for as one word of few, "" where it does not.

    What it must have comes before what it prefers; of several that would do the first counts.

    Example:
        >>> wanted_model({"spec": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"}}})
        'l4'
        >>> wanted_model({})
        ''
    """
    spec = mapping_of(raw.get("spec"))
    for model in (*_selected(spec), *_preferred(raw)):
        short = short_model(model)
        if short != ANY:  # it has no word that could be a model's
            return short
    return ""


def _selected(spec: Mapping[str, object]) -> Iterator[str]:
    selector = mapping_of(spec.get("nodeSelector"))
    yield from (text_of(selector.get(label)) for label in MODEL_LABELS)
    by_node = mapping_of(mapping_of(spec.get("affinity")).get("nodeAffinity"))
    required = mapping_of(by_node.get("requiredDuringSchedulingIgnoredDuringExecution"))
    for term in objects_of(required.get("nodeSelectorTerms")):
        for expression in objects_of(term.get("matchExpressions")):
            if expression.get("key") in MODEL_LABELS and expression.get("operator") == "In":
                yield from map(text_of, items_of(expression.get("values")))


def _preferred(raw: Mapping[str, object]) -> Iterator[str]:
    annotations = mapping_of(mapping_of(raw.get("metadata")).get("annotations"))
    yield from text_of(annotations.get(Annotation.PREFER_MODELS.value)).split(",")
