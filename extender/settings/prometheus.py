"""Settings of Prometheus as a source of readings."""

import re
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from extender.core.devices.readings import Signal
from extender.settings.section import Section, ValueForm

_METRIC_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class MetricRow(Section):
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
    metrics: dict[str, MetricRow | None] = Field(
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
    def _check_metrics(cls, rows: dict[str, MetricRow | None]) -> dict[str, MetricRow | None]:
        for name, row in rows.items():
            if not _METRIC_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a metric")
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
                raise ValueError(f"{label!r} is no name of a label")
        return labels


def _is_url(url: str) -> bool:
    """Return whether a text is an http or https URL with a host."""
    try:
        parts = urlsplit(url)
        is_port = parts.port is None or parts.port > 0
    except ValueError:  # the port is too large, or the IPv6 address is malformed
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and is_port
