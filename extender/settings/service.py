"""Settings around the decision: answers, events, waking, records, logs, messages of replicas."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator

from extender.core.quantity import MIB, TIB
from extender.runtime.logs import LogFormat, LogLevel
from extender.settings.section import LABEL, AnyCase, Quantity, Section, ValueForm

STDOUT: Final = "-"


class Wire(Section):
    """Settings of the answers to kube-scheduler."""

    max_score: int = Field(
        default=400,
        ge=1,
        le=1_000_000,
        description="score of the best node. kube-scheduler adds score x weight x 10 to the "
        "points of its own plugins: with 400 and weight 1 one GPU of fit is 40 points, and idle "
        "instead of busy is more than all other points (docs/decision.md)",
    )
    shortlist: int = Field(
        default=100,
        ge=0,
        le=100_000,
        description="number of best nodes that pass filter, so that kube-scheduler scores only "
        "these; above 1 also every node that the pod's soft spread or preferred affinity could "
        "favor. 0: all nodes pass, which is needed if an extender that refuses nodes is called "
        "after this one",
    )


class Ready(Section):
    """Conditions under which a replica is ready."""

    wait_seconds: float = Field(
        default=10.0,  # plus some 3 s for 5,000 nodes: ready within 15 s even without Prometheus
        ge=0,
        le=300,
        description="longest time that a starting replica waits for first readings and for "
        "messages of other replicas before it is ready; it always waits for nodes and pods",
    )


class ClusterSettings(Section):
    """Settings of the lists and watches of nodes and pods."""

    max_backoff_seconds: float = Field(
        default=30.0,
        ge=1,
        le=600,
        description="longest wait before the next attempt to reach the API server after failures",
    )
    exporter_words: tuple[str, ...] = Field(
        default=("dcgm-exporter",),
        description="words in the name or app label of pods that export telemetry; the names and "
        "addresses of these pods identify the node of a series",
    )
    memory_limits: bool = Field(
        default=False,
        description="read variables and arguments that limit a framework's GPU memory, such as "
        "vLLM's --gpu-memory-utilization, as gpu-memory of pods without that annotation",
    )
    group_objects: bool = Field(
        default=False,
        description="watch PodGroups (Kubernetes, coscheduling, Volcano), Workloads (Kubernetes "
        "1.35) and JobSets for the sizes of pod groups; needs the rights of the component "
        "group-sizes",
    )


class Events(Section):
    """Settings of the Events that explain decisions in `kubectl describe pod`."""

    enabled: bool = Field(default=True, description="write Events that explain decisions")
    placements: bool = Field(
        default=True,
        description="write one Event on each bound pod with its node and the reasons; above five a "
        "second only on some pods",
    )

    @property
    def writes_placements(self) -> bool:
        """Whether the extender writes an Event for placements."""
        return self.enabled and self.placements


class DecisionsSettings(Section):
    """Settings of the history behind `GET /v1/decisions`."""

    history: int = Field(
        default=1000, ge=1, le=100_000, description="number of decisions that are remembered"
    )
    detailed_nodes: int = Field(
        default=20,
        ge=1,
        le=1000,
        description="number of best nodes that are remembered with all details for each decision",
    )


_KINDS: Final = frozenset({"node", "label"})
"""Prefixes of entries that name no model."""


def _check_entry(entry: str) -> str:
    kind, slash, name = entry.partition("/")
    if slash and kind not in _KINDS and kind.lower().removesuffix("s") in _KINDS:
        raise ValueError(f"{entry!r} is not allowed: must be node/NAME or label/NAME=VALUE")
    key, separator, _ = name.partition("=")
    if kind == "label" and slash and not (LABEL.fullmatch(key) and separator):
        raise ValueError(f"{entry!r} is not allowed: must be label/NAME=VALUE")
    if entry == "node/":
        raise ValueError(f"{entry!r} is not allowed: must be node/NAME")
    return entry


Prices = dict[Annotated[str, AfterValidator(_check_entry)], Annotated[float, Field(ge=0)]]


class Log(Section):
    """Settings of the log."""

    level: Annotated[LogLevel, AnyCase] = Field(
        default=LogLevel.INFO, description="lowest level of the lines that are written"
    )
    format: Annotated[LogFormat, AnyCase] = Field(
        default=LogFormat.JSON, description="one JSON object for each line, or text for people"
    )


class WakeTarget(StrEnum):
    """Object that is changed so that kube-scheduler tries rejected pods again."""

    OBJECT = "object"
    """Our own CSIStorageCapacity object, which no other component reads."""
    NODE = "node"
    """A node with room for the pod; needs the right to patch nodes."""
    POD = "pod"
    """The pod to wake, and no other; needs the right to patch pods."""


class Wake(Section):
    """Settings of waking: kube-scheduler tries pods again that the extender rejected."""

    enabled: bool = Field(
        default=True,
        description="wake rejected pods once a node has room for them; false: they wait for "
        "another change in the cluster, or for five minutes",
    )
    target: Annotated[WakeTarget, AnyCase] = Field(
        default=WakeTarget.OBJECT,
        description="object that is changed to wake pods. object: a CSIStorageCapacity object of "
        "idlegpu; node: a node; both make kube-scheduler try all pods that the extender rejected. "
        "pod: each pod that has room; wakes only that pod, and removes its gate idlegpu.io/room",
    )
    namespace: str = Field(
        default="",
        pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$",
        description="namespace of the CSIStorageCapacity object and of the Lease; empty: the "
        "pod's own, or idlegpu if a kubeconfig is set",
    )


class Mode(StrEnum):
    """Whether answers influence kube-scheduler."""

    ACTIVE = "active"
    """Answers filter and score nodes."""
    SHADOW = "shadow"
    """Decisions are made and recorded, but answers change nothing."""


class DecisionLog(Section):
    """Settings of the decision log, which `idlegpu replay` reads."""

    path: str = Field(
        default="",
        description="file that gets one line of JSON for each decision and each state of the "
        "fleet; -: standard output; empty: no log",
    )
    max_size: Annotated[Quantity, Field(ge=MIB, le=TIB)] = Field(
        default=256 * MIB,
        description="size at which the file is renamed to PATH.1 and a new one is started; "
        "standard output has no limit",
    )
    files: int = Field(default=4, ge=1, le=100, description="number of renamed files that are kept")


class RegretSettings(Section):
    """Settings of the regret watch, which compares placements with the load that followed."""

    pods: int = Field(
        default=1000,
        ge=0,
        le=100_000,
        description="largest number of pods that are watched after their binding, and of results "
        "that are kept; 0: none",
    )
    after_seconds: float = Field(
        default=3600.0,
        ge=60,
        le=86_400,
        description="time after a pod's binding at which its GPUs are compared with those of the "
        "first choice, and with the best node in hindsight",
    )


_MAX_PORT: Final = 65535
_ADDRESS_FORM: Final = f"host:port with a port from 1 to {_MAX_PORT}"

_LEAST_SECRET: Final = 16
"""Shortest allowed secret, in characters."""

_HOST: Final = re.compile(
    r"[0-9A-Za-z]([-.0-9A-Za-z]*[0-9A-Za-z])?\.?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\w+)?"
)
"""A host name, an IPv4 address, or an IPv6 address without brackets."""


def split_address(address: str, *, least_port: int = 1) -> tuple[str, int]:
    """Split host:port into host and port; an IPv6 address loses its brackets.

    Raises:
        ValueError: the text is not host:port; the message says what it must be.

    Example:
        >>> split_address("idlegpu-peers:8888"), split_address("[::1]:8888")
        (('idlegpu-peers', 8888), ('::1', 8888))
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or "", parts.port
        is_plain = parts.netloc == address and "@" not in address
    except ValueError:  # the port is not a number or too large, or the IPv6 address is malformed
        host, port, is_plain = "", None, False
    if port is None or port < least_port or not is_plain or not _HOST.fullmatch(host):
        raise ValueError(
            f"{address!r} is not allowed: must be host:port with a port from {least_port} to "
            f"{_MAX_PORT}, such as idlegpu-peers:8888 or [::1]:8888"
        )
    return host, port


def _check_address(address: str) -> str:
    split_address(address)
    return address


Address = Annotated[str, ValueForm(_ADDRESS_FORM), AfterValidator(_check_address)]
"""A host and a port, as host:port."""

OptionalAddress = Annotated[
    str, ValueForm(_ADDRESS_FORM), AfterValidator(lambda text: text and _check_address(text))
]
"""An address, or "" for none."""


class PeersSettings(Section):
    """Settings of the messages in which replicas share requests and placements."""

    service: OptionalAddress = Field(
        default="",
        description="host:port of a headless Service of all replicas: they share the requests that "
        "they receive and their placements; empty: there is one replica",
    )
    addresses: Annotated[tuple[str, ...], ValueForm(f"a list of {_ADDRESS_FORM}")] = Field(
        default=(), description="addresses of replicas, in addition to those of the service"
    )
    secret_file: Path | None = Field(
        default=None,
        description="file with a secret that all replicas share; replicas without TLS need it, "
        "and ignore messages without it. With TLS, certificates identify replicas",
    )

    @field_validator("addresses")
    @classmethod
    def _check_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            split_address(address)
        return addresses

    def secret(self) -> str:
        """Read the shared secret, or return "" if no file is set.

        Raises:
            ValueError: the file cannot be read, or the secret is too short.
        """
        if self.secret_file is None:
            return ""
        try:
            secret = self.secret_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"peers.secret_file {self.secret_file}: {error}") from error
        if len(secret) < _LEAST_SECRET:
            raise ValueError(
                f"peers.secret_file {self.secret_file} holds {len(secret)} characters: must hold "
                f"at least {_LEAST_SECRET}, such as `openssl rand -hex 32` prints"
            )
        return secret

    @property
    def is_used(self) -> bool:
        """Whether other replicas are configured."""
        return bool(self.service or self.addresses)


class BypassSettings(Section):
    """Settings of the check for pods that were bound without a request to any replica."""

    enabled: bool = Field(
        default=True,
        description="count GPU pods that were bound although kube-scheduler called no replica "
        "for them",
    )
    schedulers: tuple[str, ...] = Field(
        default=(),
        description="values of spec.schedulerName whose pods the extender should be called for; "
        "empty: all",
    )
