"""Reads objects of Kubernetes as the checks need them; what is malformed counts as absent."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from extender.core.untyped import items_of, mapping_of, objects_of, text_of
from extender.doctor.facts import Facts, Object, Sample

GPU: Final = "nvidia.com/gpu"
SHARED: Final = "nvidia.com/gpu.shared"
MIG: Final = "nvidia.com/mig-"

PRESENT_LABELS: Final = (
    "nvidia.com/gpu.present",
    "feature.node.kubernetes.io/pci-10de.present",
    "feature.node.kubernetes.io/pci-0300_10de.present",
    "feature.node.kubernetes.io/pci-0302_10de.present",
)
"""Labels of gpu-feature-discovery and node-feature-discovery: `true` where there is a GPU."""
CLOUD_LABELS: Final = ("cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator")

EXPORTER_WORDS: Final = ("dcgm-exporter",)
AGENT_WORDS: Final = ("idlegpu-agent",)
NODE_LABELS: Final = ("Hostname", "hostname", "exported_hostname")
"""Labels in which dcgm-exporter names its node."""

OVER: Final = frozenset({"Succeeded", "Failed"})
SHOWN: Final = 5


def name_of(item: Object) -> str:
    """Return an object's name."""
    return text_of(mapping_of(item.get("metadata")).get("name"))


def key_of(item: Object) -> str:
    """Return `namespace/name`."""
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
    """Return a count as Kubernetes writes it, 0 for anything else.

    Example:
        >>> number("8"), number(8), number("2k"), number(None)
        (8, 8, 0, 0)
    """
    if isinstance(text, int):
        return int(text)
    return int(text) if isinstance(text, str) and text.strip().isdigit() else 0


def is_gpu(resource: str) -> bool:
    """Whether a resource is GPUs, shares of them, or MIG instances.

    Example:
        >>> is_gpu("nvidia.com/gpu.shared"), is_gpu("nvidia.com/mig-1g.5gb"), is_gpu("cpu")
        (True, True, False)
    """
    return resource in {GPU, SHARED} or resource.startswith(MIG)


def gpu_counts(counts: object) -> dict[str, int]:
    """Return the GPU resources of a list of quantities."""
    return {name: number(count) for name, count in mapping_of(counts).items() if is_gpu(name)}


def capacity(node: Object) -> dict[str, int]:
    """Return the GPU resources that a node has."""
    return gpu_counts(mapping_of(node.get("status")).get("capacity"))


def allocatable(node: Object) -> dict[str, int]:
    """Return the GPU resources that a node offers."""
    return gpu_counts(mapping_of(node.get("status")).get("allocatable"))


def is_labelled(node: Object) -> bool:
    """Whether labels say that a node has GPUs."""
    labels = labels_of(node)
    return any(labels.get(name) == "true" for name in PRESENT_LABELS) or any(
        labels.get(name) for name in CLOUD_LABELS
    )


def is_ready(node: Object) -> bool:
    """Whether a node's kubelet is heard, as far as is known."""
    return condition_of(node, "Ready").get("status", "True") == "True"


def gpu_nodes(facts: Facts) -> list[Object]:
    """Return the nodes with GPUs, by labels or by what they offer."""
    return [node for node in facts.nodes or () if is_labelled(node) or any(capacity(node).values())]


def is_over(pod: Object) -> bool:
    """Whether a pod has ended."""
    return text_of(mapping_of(pod.get("status")).get("phase")) in OVER


def is_running(pod: Object) -> bool:
    """Whether a pod runs, all its containers ready as far as its status tells."""
    status = mapping_of(pod.get("status"))
    statuses = objects_of(status.get("containerStatuses"))
    return status.get("phase") == "Running" and all(
        one.get("ready") is not False for one in statuses
    )


def node_of(pod: Object) -> str:
    """Return the node that a pod is bound to, "" for none."""
    return text_of(mapping_of(pod.get("spec")).get("nodeName"))


def containers(pod: Object) -> Sequence[Object]:
    """Return a pod's containers, without those that only prepare it."""
    return objects_of(mapping_of(pod.get("spec")).get("containers"))


def asked_by(container: Object) -> dict[str, int]:
    """Return the GPU resources that a container asks for."""
    resources = mapping_of(container.get("resources"))
    found = gpu_counts(resources.get("limits")) or gpu_counts(resources.get("requests"))
    return {name: count for name, count in found.items() if count}


def asked(pod: Object) -> dict[str, int]:
    """Return the GPU resources that a pod asks for."""
    sums: dict[str, int] = {}
    for container in containers(pod):
        for name, count in asked_by(container).items():
            sums[name] = sums.get(name, 0) + count
    return sums


def gpu_pods(facts: Facts) -> Iterator[Object]:
    """Yield the pods that ask for GPUs and have not ended."""
    for pod in facts.pods or ():
        if not is_over(pod) and asked(pod):
            yield pod


def is_called(item: Object, words: Iterable[str]) -> bool:
    """Whether an object's name, or the label that says what it is, contains one of the words."""
    labels = labels_of(item)
    told = (
        name_of(item),
        *(labels.get(key, "") for key in ("app", "k8s-app", "app.kubernetes.io/name", "name")),
    )
    return any(word in text for word in words for text in told)


def live_pods(facts: Facts, words: Iterable[str]) -> Iterator[Object]:
    """Yield the pods that are called so and have not ended."""
    for pod in facts.pods or ():
        if is_called(pod, words) and not is_over(pod):
            yield pod


def environment_of(container: Object) -> dict[str, str]:
    """Return the variables that a container is given with a value of their own."""
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
    """Return the condition of a kind, an empty one where there is none."""
    for condition in objects_of(mapping_of(item.get("status")).get("conditions")):
        if condition.get("type") == kind:
            return condition
    return {}


def parse_time(value: object) -> float | None:
    """Return a time of Kubernetes in seconds since the epoch, None for anything else.

    Example:
        >>> parse_time("1970-01-01T00:01:00Z"), parse_time(None)
        (60.0, None)
    """
    try:
        return datetime.fromisoformat(text_of(value)).timestamp()
    except ValueError:
        return None


def setting(facts: Facts, path: str) -> object:
    """Return a value of the settings file, None where it is not set or the file not known."""
    found: object = facts.settings
    for part in path.split("."):
        found = mapping_of(found).get(part)
    return found


def number_setting(facts: Facts, path: str, default: float) -> float:
    """Return a number of the settings file, its default where it is not set."""
    value = setting(facts, path)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return default


def total(samples: Iterable[Sample] | None, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels."""
    return sum(
        sample.value
        for sample in samples or ()
        if sample.name == name
        and all(sample.labels.get(key) == value for key, value in labels.items())
    )


def some(names: Iterable[str]) -> str:
    """Return names for a sentence, not too many.

    Example:
        >>> some(["b", "a"]), some(str(number) for number in range(7))
        ('b, a', '0, 1, 2, 3, 4 and 2 more')
    """
    every = list(names)
    more = len(every) - SHOWN
    return ", ".join(every[:SHOWN]) + (f" and {more} more" if more > 0 else "")
