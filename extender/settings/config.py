"""Every setting of the extender with its unit, default and bounds.

No other module reads the environment.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from extender.core.policy import Policy, PriceMode, Prices, SharedPolicy, Strategy
from extender.core.quantity import MIB, TIB
from extender.core.request.gpu_resources import DEFAULT_NAMES, ResourceNames
from extender.settings import decision, service
from extender.settings.api import Admission, ApiSettings, Tls, is_loopback
from extender.settings.loading import Loaded, load_model
from extender.settings.section import AnyCase, Quantity, Section, Unit, ValueForm, check_label
from extender.settings.service import BypassSettings, PeersSettings, split_address
from extender.settings.sources import Agents, Prometheus
from extender.settings.spec import Setting, list_settings

MAX_CONNECTIONS: Final = 500
"""Maximum number of connections to the status port, and to the admission port: those of the API
servers, of a Prometheus, and of the people who look at the page."""

_MOST_LEVELS: Final = 8
"""Maximum number of topology labels: each decision about a group sums the room of each level."""

_Topology = Annotated[
    tuple[Annotated[str, AfterValidator(check_label)], ...],
    Field(max_length=_MOST_LEVELS),
    ValueForm(f"a list of up to {_MOST_LEVELS} names of labels"),
]

_PoolLabels = Annotated[
    tuple[Annotated[str, AfterValidator(check_label)], ...],
    ValueForm("a list of names of labels, such as pool or example.com/pool"),
]


class Settings(Section):
    """All settings. The constructor reads no file and no environment: `load_settings` does."""

    listen: Annotated[str, ValueForm("host:port with a port from 0 to 65535")] = Field(
        default="127.0.0.1:8888",
        description="host:port of the webhooks, and of health, metrics, API and page if "
        "status_listen is not set; in a pod 0.0.0.0:8888 or [::]:8888, with tls",
    )
    status_listen: Annotated[str, ValueForm("host:port with a port from 0 to 65535")] = Field(
        default="",
        description="host:port of health, metrics, API and page, over TLS if api.cert_file or "
        "tls is set; without TLS only on loopback, unless api.allow_plain is set; empty: as "
        "listen",
    )
    allow_plain: bool = Field(
        default=False,
        description="serve the webhooks without TLS to other machines too; every client that "
        "reaches the port can then call them, and can send messages as a replica",
    )
    tls: Tls = Tls()
    kubeconfig: Path | None = Field(
        default=None, description="kubeconfig file; empty: the service account of the pod"
    )
    resources: Annotated[tuple[str, ...], ValueForm("a list of at least one name")] = Field(
        default=DEFAULT_NAMES,
        description="names of GPU resources, most important first; a trailing * matches any "
        "rest, so nvidia.com/mig-* also matches the shared forms",
    )
    mode: Annotated[service.Mode, AnyCase] = Field(
        default=service.Mode.ACTIVE,
        description="active: answers filter and score nodes. shadow: decisions are made and "
        "recorded, but every candidate passes without a score, so that kube-scheduler places "
        "pods as without the extender",
    )
    thresholds: decision.ThresholdSettings = decision.ThresholdSettings()
    strategy: Annotated[Strategy, AnyCase] = Field(
        default=decision.DEFAULT.strategy,
        description="order of nodes that are equally certain to have idle GPUs. auto: whole GPUs "
        "go where the fewest usable ones are left over, shared GPUs where the load is lowest; "
        "spread: most idle GPUs first; pack: fewest free GPUs first",
    )
    shared_policy: Annotated[SharedPolicy, AnyCase] = Field(
        default=decision.DEFAULT.shared_policy,
        description="order in which the device plugin hands out shared GPUs, as in its "
        "shared-devices-allocation-policy. distributed: fewest replicas in use first; packed: "
        "most replicas in use first",
    )
    mps_share: Annotated[Quantity, Field(ge=MIB, le=TIB)] | None = Field(
        default=decision.DEFAULT.mps_share_bytes,
        description="memory that a pod may use of a GPU that is shared with MPS; empty: an even "
        "share",
    )
    recent_seconds: float = Field(
        default=decision.DEFAULT.recent_seconds,
        ge=10,
        le=3600,
        description="time over which activity is averaged to decide whether a GPU with tenants "
        "is idle or busy",
    )
    prometheus: Prometheus = Prometheus()
    agents: Agents = Agents()
    api: ApiSettings = ApiSettings()
    admission: Admission = Admission()
    freshness: decision.FreshnessSettings = decision.FreshnessSettings()
    foreign: decision.ForeignSettings = decision.ForeignSettings()
    assumed: decision.AssumedSettings = decision.AssumedSettings()
    early_failures: decision.EarlyFailureSettings = decision.EarlyFailureSettings()
    health: decision.HealthSettings = decision.HealthSettings()
    weights: decision.WeightSettings = decision.WeightSettings()
    load_filter: decision.LoadFilterSettings = decision.LoadFilterSettings()
    wire: service.Wire = service.Wire()
    ready: service.Ready = service.Ready()
    cluster: service.ClusterSettings = service.ClusterSettings()
    events: service.Events = service.Events()
    wake: service.Wake = service.Wake()
    peers: PeersSettings = PeersSettings()
    bypassed: BypassSettings = BypassSettings()
    decisions: service.DecisionsSettings = service.DecisionsSettings()
    decision_log: service.DecisionLog = service.DecisionLog()
    regret: service.RegretSettings = service.RegretSettings()
    prices: service.Prices = Field(
        default={},
        description="price of a GPU-hour by words of the model, e.g. {H100: 2.5, A100 80GB: "
        "1.4}, by label of the node (label/pool=cheap: 0.9) or by node (node/gpu-7: 0.5), in any "
        "currency: page, API and `idlegpu costs` then show the cost of pods. A node's entry "
        "counts before a label's, a label's before a model's; of several matches of one kind the "
        "longest counts",
    )
    price: Annotated[PriceMode, AnyCase] = Field(
        default=PriceMode.IGNORE,
        description="effect of prices on the choice of a node for pods that name no model: "
        "ignore; prefer: of nodes as likely to have idle GPUs the cheaper one first; strict: "
        "only the cheapest of the nodes that would do",
    )
    spot_share: Annotated[float, Field(gt=0, le=1), Unit("ratio")] = Field(
        default=1.0,
        description="part of a model's price that spot nodes cost, known by the labels of "
        "Karpenter, EKS, GKE and AKS and by node.kubernetes.io/lifecycle=spot",
    )
    group_topology: _Topology = Field(
        default=decision.DEFAULT.group_topology,
        description="labels that show which nodes are near each other, from the nearest domain "
        "(NVLink) to the widest (zone): among equally suitable nodes those near a pod's group "
        "come first (docs/decision.md). Labels that no node has do not count. Empty: groups do "
        "not count at all",
    )
    pool_labels: _PoolLabels = Field(
        default=(),
        description="labels whose value names a node's pool, for groups on the page and for "
        "metrics by pool; they are checked before the labels of cloud providers, which are built "
        "in",
    )
    log: service.Log = service.Log()
    max_connections: Annotated[int, Field(ge=10, le=100_000)] = Field(
        default=1000,
        description="maximum number of open connections to listen. If the port is full, a new "
        "connection replaces one that has sent nothing or has not finished its TLS handshake; "
        "otherwise one of the address that holds the most connections, the one that is silent "
        "longest first. The other ports reserve file descriptors for this number",
    )
    drain_seconds: float = Field(
        default=5.0,
        ge=0,
        le=300,
        description="time after SIGTERM during which new requests are still answered, because a "
        "Service keeps sending them for a while; each answer closes its connection. 0: stop at "
        "once",
    )
    shutdown_seconds: float = Field(
        default=95.0,
        ge=0,
        le=300,
        description="time after drain_seconds to answer accepted requests, and for "
        "kube-scheduler to close idle connections, which takes 90 s; drain_seconds plus this "
        "must be less than the pod's terminationGracePeriodSeconds",
    )

    @field_validator("listen", "status_listen")
    @classmethod
    def _check_listen(cls, listen: str, info: ValidationInfo) -> str:
        if listen or info.field_name == "listen":
            split_address(listen, least_port=0)
        return listen

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return ResourceNames(names).names

    @model_validator(mode="after")
    def _check_age(self) -> Self:
        """Reject an age limit that is shorter than the time between two Prometheus values."""
        source = self.prometheus
        normal_seconds = source.exporter_interval_seconds + source.interval_seconds
        if source.url and self.freshness.max_age_seconds < normal_seconds:
            raise ValueError(
                f"freshness.max_age_seconds ({self.freshness.max_age_seconds:g}) must be at least "
                "prometheus.exporter_interval_seconds + prometheus.interval_seconds "
                f"({normal_seconds:g}): else no value would ever be fresh"
            )
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        """Reject two ports with the same address; port 0 is any free one."""
        names: dict[str, str] = {}
        for name, address in (
            ("listen", self.listen),
            ("status_listen", self.status_listen),
            ("agents.listen", self.agents.listen),
            ("admission.listen", self.admission.listen),
        ):
            other = names.setdefault(address, name)
            if address and other != name and split_address(address, least_port=0)[1]:
                raise ValueError(f"{name} ({address}) must differ from {other}")
        return self

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        """Reject ports that other machines can reach without TLS, unless a setting allows it."""
        if self.admission.listen:
            self.admission.files(self.tls)
        if self.tls.is_used and not self.status_listen:
            raise ValueError(
                "status_listen must be set with tls: clients of health and metrics have no "
                "client certificate"
            )
        if self.api.cert_file and not self.status_listen:
            raise ValueError(
                "status_listen must be set with api.cert_file, which is the certificate of that "
                "port: the webhooks' is tls.cert_file"
            )
        is_plain = self.api.files(self.tls) is None and not self.api.allow_plain
        if self.status_listen and is_plain and not is_loopback(self.status_address[0]):
            raise ValueError(
                f"status_listen ({self.status_listen}) is reached from other machines and there is "
                "no TLS: set tls.*, or api.cert_file and api.key_file, or api.allow_plain where "
                "the network protects tokens and answers"
            )
        if not (self.tls.is_used or self.allow_plain or is_loopback(self.listen_address[0])):
            raise ValueError(
                f"listen ({self.listen}) is reached from other machines and there is no TLS: set "
                "tls.*, or allow_plain where the network restricts the clients"
            )
        if self.peers.is_used and not (self.tls.is_used or self.peer_secret()):
            raise ValueError(
                "peers without TLS need peers.secret_file: otherwise any client that reaches the "
                "port can claim placements"
            )
        return self

    def peer_secret(self) -> str:
        """Return the secret that authenticates replicas, "" if TLS is used or no secret is set.

        Raises:
            ValueError: the secret file cannot be read.
        """
        return "" if self.tls.is_used else self.peers.secret()

    @property
    def listen_address(self) -> tuple[str, int]:
        """Host and port of `listen`; an IPv6 address has no brackets."""
        return split_address(self.listen, least_port=0)

    @property
    def status_address(self) -> tuple[str, int]:
        """Host and port of health, metrics and API: those of `listen` without `status_listen`."""
        return split_address(self.status_listen or self.listen, least_port=0)

    @property
    def resource_patterns(self) -> ResourceNames:
        """Names and patterns of the GPU resources, as the core matches them."""
        return ResourceNames(self.resources)

    @property
    def most_connections(self) -> int:
        """Sum of the connection limits of all ports that are used."""
        return (
            self.max_connections
            + (MAX_CONNECTIONS if self.status_listen else 0)
            + (MAX_CONNECTIONS if self.admission.listen else 0)
            + (self.agents.max_connections if self.agents.listen else 0)
        )

    def policy(self) -> Policy:
        """Build the core's policy from the settings that decide placements."""
        return Policy(
            thresholds=self.thresholds.value(),
            strategy=self.strategy,
            shared_policy=self.shared_policy,
            freshness=self.freshness.value(),
            foreign=self.foreign.value(),
            assumed=self.assumed.value(),
            early_failures=self.early_failures.value(),
            health=self.health.value(),
            weights=self.weights.value(),
            load_filter=self.load_filter.value(),
            prices=Prices(
                mode=self.price, entries=MappingProxyType(self.prices), spot_share=self.spot_share
            ),
            group_topology=self.group_topology,
            mps_share_bytes=self.mps_share,
            reads_memory_limits=self.cluster.memory_limits,
            recent_seconds=self.recent_seconds,
        )


def all_settings() -> Mapping[tuple[str, ...], Setting]:
    """Return every setting by path, with its type, default, bounds and description."""
    return list_settings(Settings)


def load_settings(
    path: Path | None, environ: Mapping[str, str], content: bytes | None = None
) -> Settings:
    """Load the settings like `load`, without the warnings.

    Raises:
        ConfigError: a setting is invalid; the message lists every problem found.
    """
    return load(path, environ, content).settings


def load(
    path: Path | None, environ: Mapping[str, str], content: bytes | None = None
) -> Loaded[Settings]:
    """Load the settings: environment variables override the file, the file overrides defaults.

    Args:
        path: the settings file, or None for no file.
        environ: environment variables by name; only those that start with IDLEGPU_ are read.
        content: content of the file if it was read already.

    Raises:
        ConfigError: a setting is invalid; the message lists every problem found.
    """
    return load_model(Settings, path, environ, content=content)
