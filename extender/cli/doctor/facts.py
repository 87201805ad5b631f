"""Input of the checks: objects and answers as plain data (None means unknown), and their fields.

A malformed field counts as absent.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from extender.core.untyped import items_of, mapping_of, number_of, objects_of, text_of

Object = Mapping[str, object]
"""A Kubernetes object or another document, as decoded JSON."""

_LABELS: Final[Mapping[str, str]] = {
    "nodes": "nodes",
    "pods": "pods",
    "daemon_sets": "DaemonSets",
    "claims": "ResourceClaims",
    "config_maps": "ConfigMaps",
    "services": "Services of the extender's namespace",
    "version": "GET /version of the API server",
    "schedulers": "a KubeSchedulerConfiguration",
    "plugin_configs": "the device plugin's configuration",
    "settings": "the extender's settings file",
    "bypassed": "GET /v1/bypassed of the extender",
    "degraded": "GET /readyz of the extender",
    "devices": "GET /v1/gpus of the extender",
    "sources": "GET /v1/nodes of the extender",
    "metrics": "GET /metrics of the extender",
    "exporter": "metrics of a dcgm-exporter",
    "certificates": "certificates",
    "rights": "the rights of the extender's account",
}
"""Description of each fact in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of a Prometheus exposition."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """A KubeSchedulerConfiguration and its source: a file or a ConfigMap."""

    source: str
    config: Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Subject and expiry time of a certificate.

    Attributes:
        source: file, or Secret and key, that contains the certificate.
        subject: its distinguished name.
        ends_at: expiry time, seconds since the epoch.
    """

    source: str
    subject: str
    ends_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """An RBAC right that the extender's account needs, and whether the account has it.

    Attributes:
        account: `namespace/name` of the service account.
        verb: Kubernetes verb.
        group: API group, "" for the core group.
        resource: plural name of the resource.
        namespace: namespace of the right, "" for the whole cluster.
        name: name of a single object, "" for any.
        is_allowed: whether the account has the right.
        manifest: manifest that grants the right.
    """

    account: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    is_allowed: bool
    manifest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts about an installation; a check reads only these.

    Attributes:
        at: time of the check by this machine's clock, seconds since the epoch.
        extender_at: the same moment by the extender's clock, None if unknown.
        daemon_sets: DaemonSet objects.
        claims: ResourceClaim objects; none if the API server does not serve them.
        config_maps: ConfigMap objects that could be read.
        services: Service objects of the extender's namespace.
        version: the API server's version, such as v1.37.2.
        schedulers: kube-scheduler configurations.
        plugin_configs: configurations of NVIDIA's device plugin, by the key that a node's label
            `nvidia.com/device-plugin.config` names.
        settings: the extender's settings file.
        bypassed: answer of /v1/bypassed.
        degraded: cause by degraded component, from /readyz.
        devices: the GPUs of /v1/gpus.
        sources: state by telemetry source, from /v1/nodes.
        unreadable: names of objects that the extender cannot parse, by resource, from /v1/nodes.
        metrics: the extender's metrics.
        exporter: metrics of one or more dcgm-exporters.
        certificates: certificates that could be read.
        rights: RBAC rights that the extender's account needs.
        missing: reason why a fact is unknown, by the fact's name.
    """

    at: float
    extender_at: float | None = None
    nodes: tuple[Object, ...] | None = None
    pods: tuple[Object, ...] | None = None
    daemon_sets: tuple[Object, ...] | None = None
    claims: tuple[Object, ...] | None = None
    config_maps: tuple[Object, ...] | None = None
    services: tuple[Object, ...] | None = None
    version: str | None = None
    schedulers: tuple[Scheduler, ...] | None = None
    plugin_configs: Mapping[str, Object] | None = None
    settings: Object | None = None
    bypassed: Object | None = None
    degraded: Mapping[str, str] | None = None
    devices: tuple[Object, ...] | None = None
    sources: Mapping[str, Object] | None = None
    unreadable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metrics: tuple[Sample, ...] | None = None
    exporter: tuple[Sample, ...] | None = None
    certificates: tuple[Certificate, ...] | None = None
    rights: tuple[Right, ...] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    def why_missing(self, name: str) -> str:
        """Return the reason why a fact is unknown."""
        return f"{_LABELS[name]}: {self.missing.get(name, 'not given')}"


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
    """Check whether a resource is a GPU, a share of a GPU or a MIG instance.

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
