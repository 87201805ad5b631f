"""Read fields of Kubernetes objects for the checks; a malformed field counts as absent."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from extender.cli.doctor.facts import Facts, Object, Sample
from extender.core.untyped import items_of, mapping_of, number_of, objects_of, text_of

GPU: Final = "nvidia.com/gpu"
SHARED: Final = "nvidia.com/gpu.shared"
MIG: Final = "nvidia.com/mig-"

_PRESENT_LABELS: Final = (
    "nvidia.com/gpu.present",
    "feature.node.kubernetes.io/pci-10de.present",
    "feature.node.kubernetes.io/pci-0300_10de.present",
    "feature.node.kubernetes.io/pci-0302_10de.present",
)
"""Labels of gpu-feature-discovery and node-feature-discovery that are `true` on GPU nodes."""
_CLOUD_LABELS: Final = ("cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator")

EXPORTER_WORDS: Final = ("dcgm-exporter",)
AGENT_WORDS: Final = ("idlegpu-agent",)
NODE_LABELS: Final = ("Hostname", "hostname", "exported_hostname")
"""Metric labels in which dcgm-exporter reports its node."""

_OVER: Final = frozenset({"Succeeded", "Failed"})
_SHOWN: Final = 5


def name_of(item: Object) -> str:
    """Return an object's name."""
    return text_of(mapping_of(item.get("metadata")).get("name"))


def key_of(item: Object) -> str:
    """Return an object's `namespace/name`."""
    metadata = mapping_of(item.get("metadata"))
    return f"{text_of(metadata.get('namespace')) or 'default'}/{text_of(metadata.get('name'))}"


def labels_of(item: Object) -> Mapping[str, str]:
    """Return an object's labels."""
    return _texts(mapping_of(item.get("metadata")).get("labels"))


def annotations_of(item: Object) -> Mapping[str, str]:
    """Return an object's annotations."""
    return _texts(mapping_of(item.get("metadata")).get("annotations"))


def _texts(value: object) -> dict[str, str]:
    return {key: text_of(text) for key, text in mapping_of(value).items()}


def number(text: object) -> int:
    """Parse a whole number, as an integer or its text; 0 for anything else.

    Example:
        >>> number("8"), number(8), number("2k"), number(None)
        (8, 8, 0, 0)
    """
    if isinstance(text, int):
        return int(text)
    return number_of(text_of(text).strip()) or 0


def is_gpu(resource: str) -> bool:
    """Check whether a resource name stands for GPUs, GPU shares or MIG instances.

    Example:
        >>> is_gpu("nvidia.com/gpu.shared"), is_gpu("nvidia.com/mig-1g.5gb"), is_gpu("cpu")
        (True, True, False)
    """
    return resource in {GPU, SHARED} or resource.startswith(MIG)


def _gpu_counts(counts: object) -> dict[str, int]:
    return {name: number(count) for name, count in mapping_of(counts).items() if is_gpu(name)}


def capacity(node: Object) -> dict[str, int]:
    """Return the GPU resources in a node's capacity."""
    return _gpu_counts(mapping_of(node.get("status")).get("capacity"))


def allocatable(node: Object) -> dict[str, int]:
    """Return the GPU resources that a node can allocate to pods."""
    return _gpu_counts(mapping_of(node.get("status")).get("allocatable"))


def is_labelled(node: Object) -> bool:
    """Check whether a node has GPUs according to its labels."""
    labels = labels_of(node)
    return any(labels.get(name) == "true" for name in _PRESENT_LABELS) or any(
        labels.get(name) for name in _CLOUD_LABELS
    )


def is_ready(node: Object) -> bool:
    """Check whether a node's Ready condition is True or absent."""
    return condition_of(node, "Ready").get("status", "True") == "True"


def gpu_nodes(facts: Facts) -> list[Object]:
    """Return the nodes with GPUs, according to their labels or capacity."""
    return [node for node in facts.nodes or () if is_labelled(node) or any(capacity(node).values())]


def is_over(pod: Object) -> bool:
    """Check whether a pod has finished."""
    return text_of(mapping_of(pod.get("status")).get("phase")) in _OVER


def is_running(pod: Object) -> bool:
    """Check whether a pod runs and all its containers are ready."""
    status = mapping_of(pod.get("status"))
    statuses = objects_of(status.get("containerStatuses"))
    return status.get("phase") == "Running" and all(
        one.get("ready") is not False for one in statuses
    )


def node_of(pod: Object) -> str:
    """Return the name of the node that a pod is bound to, "" for none."""
    return text_of(mapping_of(pod.get("spec")).get("nodeName"))


def containers(pod: Object) -> Sequence[Object]:
    """Return a pod's containers, without init containers."""
    return objects_of(mapping_of(pod.get("spec")).get("containers"))


def requested_by(container: Object) -> dict[str, int]:
    """Return the GPU resources that a container requests."""
    resources = mapping_of(container.get("resources"))
    found = _gpu_counts(resources.get("limits")) or _gpu_counts(resources.get("requests"))
    return {name: count for name, count in found.items() if count}


def requested_gpus(pod: Object) -> dict[str, int]:
    """Return the GPU resources that a pod's containers request in total."""
    sums: dict[str, int] = {}
    for container in containers(pod):
        for name, count in requested_by(container).items():
            sums[name] = sums.get(name, 0) + count
    return sums


def gpu_pods(facts: Facts) -> Iterator[Object]:
    """Yield the unfinished pods that request GPUs."""
    for pod in facts.pods or ():
        if not is_over(pod) and requested_gpus(pod):
            yield pod


def is_called(item: Object, words: Iterable[str]) -> bool:
    """Check whether an object's name or app label contains one of the words."""
    labels = labels_of(item)
    names = (
        name_of(item),
        *(labels.get(key, "") for key in ("app", "k8s-app", "app.kubernetes.io/name", "name")),
    )
    return any(word in text for word in words for text in names)


def live_pods(facts: Facts, words: Iterable[str]) -> Iterator[Object]:
    """Yield the unfinished pods whose name or app label contains one of the words."""
    for pod in facts.pods or ():
        if is_called(pod, words) and not is_over(pod):
            yield pod


def environment_of(container: Object) -> dict[str, str]:
    """Return a container's environment variables that have a literal value."""
    return {
        text_of(entry.get("name")): text_of(entry.get("value"))
        for entry in objects_of(container.get("env"))
        if "valueFrom" not in entry
    }


def command_of(container: Object) -> list[str]:
    """Return a container's command and arguments."""
    return [
        text_of(word)
        for part in ("command", "args")
        for word in items_of(container.get(part))
        if text_of(word)
    ]


def condition_of(item: Object, kind: str) -> Object:
    """Return an object's status condition of a type, or an empty mapping."""
    for condition in objects_of(mapping_of(item.get("status")).get("conditions")):
        if condition.get("type") == kind:
            return condition
    return {}


def parse_time(value: object) -> float | None:
    """Parse a Kubernetes timestamp into seconds since the epoch; None if it is malformed.

    Example:
        >>> parse_time("1970-01-01T00:01:00Z"), parse_time(None)
        (60.0, None)
    """
    try:
        return datetime.fromisoformat(text_of(value)).timestamp()
    except ValueError:
        return None


def setting(facts: Facts, path: str) -> object:
    """Return a value from the extender's settings file, None if it is not set."""
    found: object = facts.settings
    for part in path.split("."):
        found = mapping_of(found).get(part)
    return found


def number_setting(facts: Facts, path: str, default: float) -> float:
    """Return a number from the extender's settings file, or the default if it is not set."""
    value = setting(facts, path)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return default


def total(samples: Iterable[Sample] | None, name: str, **labels: str) -> float:
    """Sum the samples of a metric that have the given labels."""
    return sum(
        sample.value
        for sample in samples or ()
        if sample.name == name
        and all(sample.labels.get(key) == value for key, value in labels.items())
    )


def some(names: Iterable[str]) -> str:
    """Join the first names with commas and add the number of the remaining ones.

    Example:
        >>> some(["b", "a"]), some(str(number) for number in range(7))
        ('b, a', '0, 1, 2, 3, 4 and 2 more')
    """
    every = list(names)
    more = len(every) - _SHOWN
    return ", ".join(every[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
