"""Settings of the sources of readings: Prometheus, and the port to which node agents report."""

import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from extender.core.devices.readings import Signal
from extender.settings.api import is_loopback
from extender.settings.section import Section, ValueForm
from extender.settings.service import OptionalAddress, split_address

_METRIC_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class _MetricRow(Section):
    """One row of the metric table: the signal and unit of a metric."""

    signal: str = Field(description="the signal that the metric measures")
    unit: Literal["ratio", "percent", "bytes", "MiB", "watts", "milliwatts", "celsius", "count"] = (
        Field(description="unit of the metric's values")
    )


class Prometheus(Section):
    """Settings of the queries to Prometheus."""

    url: Annotated[str, ValueForm("a URL like http://prometheus:9090")] = Field(
        default="", description="base URL of Prometheus, Thanos or Mimir; empty: none"
    )
    interval_seconds: float = Field(
        default=10.0, ge=0.5, le=300, description="time between two queries"
    )
    timeout_seconds: float = Field(
        default=5.0,
        ge=0.1,
        le=60,
        description="limit for one query; all queries of one round together may take four times "
        "as long",
    )
    exporter_interval_seconds: float = Field(
        default=30.0,
        ge=0,
        le=600,
        description="collection interval of dcgm-exporter; a value may be older than its scrape "
        "by this time",
    )
    bearer_token_file: Path | None = Field(
        default=None, description="file with a bearer token, read again for each request"
    )
    username: str = Field(default="", description="user for basic authentication; empty: none")
    password_file: Path | None = Field(
        default=None, description="file with the password, read again for each request"
    )
    headers: dict[str, str] = Field(
        default={}, description="extra headers, e.g. X-Scope-OrgID for Mimir"
    )
    ca_file: Path | None = Field(
        default=None, description="CA bundle for https; empty: the system's"
    )
    cert_file: Path | None = Field(default=None, description="client certificate for https")
    key_file: Path | None = Field(default=None, description="key of prometheus.cert_file")
    insecure_skip_verify: bool = Field(
        default=False, description="do not verify the server's certificate"
    )
    selector: str = Field(
        default="", description='extra label matchers for every query, e.g. cluster="a"'
    )
    node_labels: tuple[str, ...] = Field(
        default=(
            "node",
            "kubernetes_node",
            "nodename",
            "Hostname",
            "hostname",
            "exported_hostname",
            "instance",
        ),
        description="labels that may name the node, tried in order; a value counts only if it is "
        "the name or an address of a node, or the address of a pod on it",
    )
    metrics: dict[str, _MetricRow | None] = Field(
        default={},
        description="rows added to the table of metrics, by metric name; null removes a row",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if url and not _is_url(url):
            raise PydanticCustomError("url", "no such URL")  # without the value: passwords
        return url

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, rows: dict[str, _MetricRow | None]) -> dict[str, _MetricRow | None]:
        for name, row in rows.items():
            if not _METRIC_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a metric's name")
            if row is not None and row.signal not in set(Signal):
                raise ValueError(
                    f"{name}: signal {row.signal!r} must be one of {', '.join(Signal)}"
                )
        return rows

    @field_validator("node_labels")
    @classmethod
    def _check_node_labels(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        for label in labels:
            if not _LABEL_NAME.fullmatch(label):
                raise ValueError(f"{label!r} is not a label's name")
        return labels


def _is_url(url: str) -> bool:
    """Return whether a text is an http or https URL with a host."""
    try:
        parts = urlsplit(url)
        is_port = parts.port is None or parts.port > 0
    except ValueError:  # the port is too large, or the IPv6 address is malformed
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and is_port


class Agents(Section):
    """Settings of the port to which node agents report."""

    listen: OptionalAddress = Field(
        default="",
        description="host:port to which node agents report; in a pod 0.0.0.0:9401 or [::]:9401; "
        "empty: no reports",
    )
    cert_file: Path | None = Field(
        default=None,
        description="certificate of the agents' port, with its intermediate certificates, from a "
        "CA that agents trust; may be that of the webhooks. Changes in the files apply within "
        "seconds",
    )
    key_file: Path | None = Field(default=None, description="key of agents.cert_file")
    allow_plain: bool = Field(
        default=False,
        description="accept reports without TLS from other machines too; tokens then cross the "
        "network unencrypted",
    )
    audience: Annotated[str, Field(min_length=1)] = Field(
        default="idlegpu-extender", description="audience that an agent's token must have"
    )
    service_accounts: Annotated[tuple[str, ...], ValueForm("a list of namespace/name")] = Field(
        default=("idlegpu-agent/idlegpu-agent",),
        min_length=1,
        description="service accounts (namespace/name) whose tokens are accepted",
    )
    hold_seconds: float = Field(
        default=25.0,
        ge=1,
        le=600,
        description="an agent's report is preferred to a reading of another source that is newer "
        "by less than this; agents report at least every reports.heartbeat_seconds, 10 s by "
        "default",
    )
    silence_seconds: float = Field(
        default=35.0,
        ge=2,
        le=600,
        description="a connection without a message for this long is closed; must be longer than "
        "the agents' reports.heartbeat_seconds",
    )
    max_connections: int = Field(
        default=10_000,
        ge=1,
        le=100_000,
        description="maximum number of open connections to agents.listen, one for each node; if "
        "the port is full, as for max_connections",
    )

    @field_validator("service_accounts")
    @classmethod
    def _check_accounts(cls, accounts: tuple[str, ...]) -> tuple[str, ...]:
        for account in accounts:
            namespace, slash, name = account.partition("/")
            if not (namespace and slash and name) or "/" in name or ":" in account:
                raise ValueError(f"{account!r} is not allowed: must be namespace/name")
        return accounts

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("agents.cert_file and agents.key_file belong together: set both")
        is_safe = self.is_tls or self.allow_plain or not self.listen
        if not is_safe and not is_loopback(self.address[0]):
            raise ValueError(
                f"agents.listen ({self.listen}) is reached from other machines and there is no "
                "TLS: set agents.cert_file and agents.key_file, or agents.allow_plain where the "
                "network protects tokens and reports"
            )
        return self

    @property
    def is_tls(self) -> bool:
        """Whether agents report over TLS."""
        return self.cert_file is not None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on, or ("", 0) if no port is set."""
        return split_address(self.listen) if self.listen else ("", 0)

    @property
    def usernames(self) -> frozenset[str]:
        """User names of the service accounts, as the API server reports them."""
        return frozenset(
            f"system:serviceaccount:{account.replace('/', ':')}"
            for account in self.service_accounts
        )
