"""Input of the checks as plain data, collected elsewhere; None means unknown."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

Object = Mapping[str, object]
"""A Kubernetes object or another document, as decoded JSON."""

_NOTHING_KNOWN: Final[Mapping[str, str]] = MappingProxyType({})

LABELS: Final[Mapping[str, str]] = MappingProxyType(
    {
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
        nodes: Node objects.
        pods: Pod objects.
        daemon_sets: DaemonSet objects.
        claims: ResourceClaim objects; none if the API server does not serve them.
        config_maps: ConfigMap objects that could be read.
        services: Service objects of the extender's namespace.
        version: the API server's version, such as v1.37.2.
        schedulers: kube-scheduler configurations.
        plugin_configs: configurations of NVIDIA's device plugin, by the key that a node's label
            `nvidia.com/device-plugin.config` names.
        settings: the extender's settings file.
        unasked: answer of /v1/unasked.
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
    unasked: Object | None = None
    degraded: Mapping[str, str] | None = None
    devices: tuple[Object, ...] | None = None
    sources: Mapping[str, Object] | None = None
    unreadable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metrics: tuple[Sample, ...] | None = None
    exporter: tuple[Sample, ...] | None = None
    certificates: tuple[Certificate, ...] | None = None
    rights: tuple[Right, ...] | None = None
    missing: Mapping[str, str] = field(default_factory=lambda: _NOTHING_KNOWN)

    def why_missing(self, name: str) -> str:
        """Return the reason why a fact is unknown."""
        return f"{LABELS[name]}: {self.missing.get(name, 'not given')}"
