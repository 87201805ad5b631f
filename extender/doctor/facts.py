"""What the checks look at: plain data, gathered elsewhere. None is: not known."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

Object = Mapping[str, object]
"""An object of Kubernetes, or another document, as decoded JSON."""

NOTHING_KNOWN: Final[Mapping[str, str]] = MappingProxyType({})

LABELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "nodes": "nodes",
        "pods": "pods",
        "daemon_sets": "DaemonSets",
        "config_maps": "ConfigMaps",
        "schedulers": "a KubeSchedulerConfiguration",
        "plugin_configs": "the device plugin's configuration",
        "settings": "the extender's settings file",
        "unasked": "GET /v1/unasked of the extender",
        "degraded": "GET /readyz of the extender",
        "devices": "GET /v1/gpus of the extender",
        "sources": "GET /v1/nodes of the extender",
        "metrics": "GET /metrics of the extender",
        "exporter": "metrics of a dcgm-exporter",
        "certificates": "certificates",
        "rights": "the rights of the extender's account",
    }
)
"""What each of the facts is, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line of a Prometheus exposition."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """A KubeSchedulerConfiguration, and where it stands."""

    source: str
    config: Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A certificate, and where it stands.

    Attributes:
        source: a file, or a Secret and its key.
        subject: whom it names.
        ends_at: seconds since the epoch.
    """

    source: str
    subject: str
    ends_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """A right of the extender's account.

    Attributes:
        account: whose.
        verb: of Kubernetes.
        group: API group, "" for the core one.
        resource: plural.
        namespace: "" for the whole cluster.
        name: of the one object, "" for any.
        is_allowed: whether it is there.
        manifest: the file that grants it.
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
    """All that is known.

    Attributes:
        at: when, by this machine's clock, seconds since the epoch.
        extender_at: the same moment by the extender's clock, None where it was not asked.
        nodes: Node objects.
        pods: Pod objects.
        daemon_sets: DaemonSet objects.
        config_maps: ConfigMap objects that were readable.
        schedulers: kube-scheduler configurations.
        plugin_configs: configurations of NVIDIA's device plugin, by the key that a node's label
            `nvidia.com/device-plugin.config` names.
        settings: the extender's settings file.
        unasked: answer of /v1/unasked.
        degraded: what is wrong by /readyz.
        devices: the GPUs of /v1/gpus.
        sources: the sources of /v1/nodes.
        unreadable: objects that the extender cannot read, by resource, of /v1/nodes.
        metrics: the extender's metrics.
        exporter: metrics of one or more dcgm-exporters.
        certificates: certificates that were readable.
        rights: what the extender's account may do.
        missing: why something is not known, by its name.
    """

    at: float
    extender_at: float | None = None
    nodes: tuple[Object, ...] | None = None
    pods: tuple[Object, ...] | None = None
    daemon_sets: tuple[Object, ...] | None = None
    config_maps: tuple[Object, ...] | None = None
    schedulers: tuple[Scheduler, ...] | None = None
    plugin_configs: Mapping[str, Object] | None = None
    settings: Object | None = None
    unasked: Object | None = None
    degraded: Mapping[str, str] | None = None
    devices: tuple[Object, ...] | None = None
    sources: Mapping[str, Object] | None = None
    unreadable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metrics: tuple[Sample, ...] | None = None
    exporter: tuple[Sample, ...] | None = None
    certificates: tuple[Certificate, ...] | None = None
    rights: tuple[Right, ...] | None = None
    missing: Mapping[str, str] = field(default_factory=lambda: NOTHING_KNOWN)

    def why_missing(self, name: str) -> str:
        """Return why something is not known."""
        return f"{LABELS[name]}: {self.missing.get(name, 'not given')}"
