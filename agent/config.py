"""Define every setting of the agent: unit, default, bounds. Only this module reads the environment.

Reading and checking the settings takes 11 MiB of memory and happens once. So the agent runs
`python -m agent.config` in another process, and decodes its output.
"""

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from agent import options
from agent.gpu.session import Cadence
from agent.options import Options, ReportOptions
from agent.report.verdict import VerdictPolicy
from agent.tenants.foreign import Threshold
from extender.core.quantity import MIB, TIB
from extender.settings import decision, service
from extender.settings.loading import ConfigError, Loaded, load_model, removed_in
from extender.settings.section import Percent, Quantity, Section
from extender.settings.service import Address, OptionalAddress, split_address
from extender.settings.spec import Setting, list_settings, render_table, show_value

_PREFIX: Final = "IDLEGPU_AGENT_"

EXIT_OK: Final = 0
EXIT_BAD_SETTINGS: Final = 2

_DEFAULT: Final = Options()
_REMOVED: Final = removed_in("health")
"""Removed settings of the section that the extender has, too."""
_ALWAYS_SHOWN: Final = frozenset(
    {
        *("listen", "node", "period_seconds", "reports.service"),
        *("thresholds.utilization", "thresholds.memory"),
    }
)


class Foreign(Section):
    """Limits above which use by no pod counts as foreign."""

    memory: Annotated[Quantity, Field(ge=MIB, le=TIB)] = Field(
        default=_DEFAULT.foreign.memory_bytes,
        description="foreign use starts above this memory in use on a free GPU, or on a held GPU "
        "above this memory beyond that of its holders' processes",
    )
    utilization: Percent = Field(
        default=_DEFAULT.foreign.utilization * 100,
        description="foreign use starts above this activity of a free GPU",
    )

    def value(self) -> Threshold:
        """Convert to the agent's threshold, in bytes and as a ratio."""
        return Threshold(memory_bytes=self.memory, utilization=self.utilization / 100)


class Reports(Section):
    """Settings of reports to the extender."""

    service: OptionalAddress = Field(
        default=_DEFAULT.reports.service,
        description="host:port of a headless Service of all replicas of the extender, which all "
        "receive the reports of this node; empty: send no reports",
    )
    token_file: Path = Field(
        default=Path(_DEFAULT.reports.token_file),
        description="file with the projected service-account token that authenticates this node; "
        "read again for each connection",
    )
    ca_file: Path | None = Field(
        default=None,
        description="report over TLS, to an extender whose certificate is signed by a CA in this "
        "file; read again for each connection; null: without TLS",
    )
    server_name: str = Field(
        default=_DEFAULT.reports.server_name,
        description="name that the certificate must have; empty: the name of the service",
    )
    allow_plain: bool = Field(
        default=_DEFAULT.reports.allow_plain,
        description="allow reports without TLS to other machines: the token crosses the network "
        "unencrypted",
    )
    heartbeat_seconds: float = Field(
        default=_DEFAULT.reports.heartbeat_seconds,
        ge=1,
        le=60,
        description="interval of reports without changes",
    )
    utilization_step: Percent = Field(
        default=_DEFAULT.reports.utilization_step * 100,
        description="report a change of a GPU's activity by this much at once; new tenants, a GPU "
        "that becomes idle or busy, foreign use and ill health are always reported at once",
    )
    memory_step: Percent = Field(
        default=_DEFAULT.reports.memory_step * 100,
        description="report a change of a GPU's memory in use by this share of its memory at once",
    )
    resolve_seconds: float = Field(
        default=_DEFAULT.reports.resolve_seconds,
        ge=0.1,
        le=300,
        description="interval of DNS look-ups of the service",
    )
    timeout_seconds: float = Field(
        default=_DEFAULT.reports.timeout_seconds,
        ge=0.1,
        le=60,
        description="time limit for opening a connection, and for sending a report",
    )
    reconnect_seconds: float = Field(
        default=_DEFAULT.reports.reconnect_seconds,
        ge=0.1,
        le=60,
        description="a lost connection is reopened after a random delay of at most this time, "
        "because all agents lose it together",
    )
    max_backoff_seconds: float = Field(
        default=_DEFAULT.reports.max_backoff_seconds,
        ge=1,
        le=600,
        description="longest delay between connection attempts after failures",
    )

    def value(self) -> ReportOptions:
        """Convert to the agent's options."""
        values = self.model_dump() | {
            "token_file": str(self.token_file),
            "ca_file": str(self.ca_file or ""),
            "utilization_step": self.utilization_step / 100,
            "memory_step": self.memory_step / 100,
        }
        return ReportOptions(**values)


class Settings(Section):
    """All settings of the agent."""

    listen: Address = Field(
        default=f"{_DEFAULT.host}:{_DEFAULT.port}",
        description="host:port of metrics, health and the report, in plain HTTP; in a pod "
        "0.0.0.0:9402 or [::]:9402",
    )
    loads_listen: OptionalAddress = Field(
        default="",
        description="host:port of a report with the GPUs' loads only, without pods and processes, "
        "in plain HTTP, for IDLEGPU_AGENT_URL of any pod; in a pod 0.0.0.0:9403 or [::]:9403; "
        "empty: do not serve it",
    )
    node: str = Field(
        default="",
        description="name of the Kubernetes node, from the pod's spec.nodeName; empty: the "
        "machine's host name",
    )
    period_seconds: float = Field(
        default=_DEFAULT.period_seconds,
        ge=0.25,
        le=60,
        description="interval of passes over the GPUs",
    )
    slow_seconds: float = Field(
        default=_DEFAULT.cadence.slow_seconds,
        ge=1,
        le=600,
        description="interval of reads of slow-changing values (health, clocks, MIG layout), which "
        "cost more",
    )
    process_seconds: float = Field(
        default=_DEFAULT.cadence.process_seconds,
        ge=1,
        le=600,
        description="interval of reads of process utilization",
    )
    call_seconds: float = Field(
        default=_DEFAULT.call_seconds,
        ge=0.1,
        le=60,
        description="time limit of an NVML call; the agent abandons a call that takes longer, and "
        "skips its GPU until the call returns, and for a minute at least",
    )
    start_seconds: float = Field(
        default=_DEFAULT.cadence.start_limit_seconds,
        ge=1,
        le=600,
        description="time limit for starting NVML, which takes seconds without persistence mode",
    )
    retry_seconds: float = Field(
        default=_DEFAULT.cadence.retry_seconds,
        ge=1,
        le=600,
        description="longest interval between attempts to start NVML while no driver is loaded",
    )
    liveness_seconds: float = Field(
        default=_DEFAULT.liveness_seconds,
        ge=5,
        le=3600,
        description="/healthz fails after the GPUs have been unreadable for this time for a cause "
        "that a new container may fix; a missing driver is not such a cause",
    )
    dcgm_names: bool = Field(
        default=_DEFAULT.dcgm_names,
        description="also export the metrics of dcgm-exporter, for dashboards and alerts",
    )
    kubelet_socket: Path | None = Field(
        default=Path(_DEFAULT.kubelet_socket),
        description="socket of the kubelet's pod-resources API; null: holders of GPUs stay unknown",
    )
    proc: Path | None = Field(
        default=Path(_DEFAULT.proc),
        description="mount point of the host's /proc; null: pods of processes stay unknown",
    )
    pod_logs: Path | None = Field(
        default=Path(_DEFAULT.pod_logs),
        description="the kubelet's directory of pod logs, from which pod names are read; null: pod "
        "names stay unknown",
    )
    reports: Reports = Reports()
    thresholds: decision.ThresholdSettings = decision.ThresholdSettings()
    foreign: Foreign = Foreign()
    health: decision.HealthSettings = decision.HealthSettings()
    log: service.Log = service.Log()

    def value(self) -> Options:
        """Convert to the agent's options."""
        host, port = split_address(self.listen)
        loads_host, loads_port = split_address(self.loads_listen) if self.loads_listen else ("", 0)
        return Options(
            host=host,
            port=port,
            loads_host=loads_host,
            loads_port=loads_port,
            node=self.node or socket.gethostname(),
            period_seconds=self.period_seconds,
            cadence=Cadence(
                slow_seconds=self.slow_seconds,
                process_seconds=self.process_seconds,
                start_limit_seconds=self.start_seconds,
                retry_seconds=self.retry_seconds,
            ),
            call_seconds=self.call_seconds,
            liveness_seconds=self.liveness_seconds,
            dcgm_names=self.dcgm_names,
            kubelet_socket=str(self.kubelet_socket or ""),
            proc=str(self.proc or ""),
            pod_logs=str(self.pod_logs or ""),
            verdict_policy=VerdictPolicy(
                thresholds=self.thresholds.value(), health=self.health.value()
            ),
            foreign=self.foreign.value(),
            reports=self.reports.value(),
            log_level=self.log.level,
            log_format=self.log.format,
        )


def all_settings() -> Mapping[tuple[str, ...], Setting]:
    """Return the description of every setting by path."""
    return list_settings(Settings, _PREFIX)


def load(path: Path | None, environ: Mapping[str, str]) -> Loaded[Settings]:
    """Load the settings; the environment overrides the file, the file overrides the defaults.

    Args:
        path: the settings file; None without one.
        environ: environment variables; only names that start with IDLEGPU_AGENT_ are used.

    Raises:
        ConfigError: the settings are invalid; the message lists every problem found.
    """
    return load_model(Settings, path, environ, prefix=_PREFIX, removed=_REMOVED)


def _describe_settings(settings: Settings) -> str:
    """Return a line for each setting that matters or differs from its default."""
    lines = []
    for setting in all_settings().values():
        shown = show_value(settings, setting)
        if setting.name in _ALWAYS_SHOWN or shown != setting.default:
            lines.append(f"  {setting.name}: {shown or '(none)'}\n")
    return "".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the settings: encoded for the agent, as readable lines, or as a Markdown table.

    Returns:
        Exit status: 0, or 2 for invalid settings.
    """
    parser = argparse.ArgumentParser(prog="python -m agent.config", description=__doc__)
    parser.add_argument("--config", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="print readable lines")
    parser.add_argument("--table", action="store_true", help="print them as a Markdown table")
    arguments = parser.parse_args(argv)
    if arguments.table:
        sys.stdout.write(render_table(all_settings().values()))
        return EXIT_OK
    try:
        loaded = load(arguments.config, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_SETTINGS
    for warning in loaded.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    if arguments.check:
        sys.stdout.write(f"{arguments.config}: ok\n{_describe_settings(loaded.settings)}")
    else:
        sys.stdout.buffer.write(options.encode(loaded.settings.value()))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
