"""Every setting of the agent: unit, default, bounds. Nothing else reads the environment.

What reads and checks settings takes 11 MiB and is needed once. So the agent has a process of its
own do it (`python -m agent.config`), and takes its answer.
"""

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from agent import options
from agent.foreign import Threshold
from agent.options import Options, ReportOptions
from agent.session import Cadence
from agent.verdict import Judgement
from extender.settings import decision, service
from extender.settings.changes import show_value
from extender.settings.layers import Layer, Values, read_environment, read_file, without
from extender.settings.peers import ADDRESS_FORM, split_address
from extender.settings.problems import Origin, describe
from extender.settings.section import MIB, TIB, Form, Percent, Quantity, Section
from extender.settings.spec import Setting, list_settings
from extender.settings.table import render_table

PREFIX: Final = "IDLEGPU_AGENT_"

EXIT_OK: Final = 0
EXIT_BAD_SETTINGS: Final = 2

_DEFAULT: Final = Options()
_ALWAYS_SHOWN: Final = frozenset(
    {
        *("listen", "node", "period_seconds", "reports.service"),
        *("thresholds.utilization", "thresholds.memory"),
    }
)


class ConfigError(ValueError):
    """The settings cannot be used; the message has a line for each problem."""


class Foreign(Section):
    """From where on use that no pod accounts for is called foreign."""

    memory: Annotated[Quantity, Field(ge=MIB, le=TIB)] = Field(
        default=_DEFAULT.foreign.memory_bytes,
        description="more memory than this in use on a GPU that no pod holds is foreign use; so is "
        "that much beyond the memory of its holders' processes",
    )
    utilization: Percent = Field(
        default=_DEFAULT.foreign.utilization * 100, description="so is more activity than this"
    )

    def value(self) -> Threshold:
        """Return what the agent takes."""
        return Threshold(memory_bytes=self.memory, utilization=self.utilization / 100)


class Reports(Section):
    """How the extender is told."""

    service: Annotated[str, Form(ADDRESS_FORM)] = Field(
        default=_DEFAULT.reports.service,
        description="host:port of a headless Service of all replicas of the extender: each is told "
        "what this node's GPUs do; empty: none",
    )
    token_file: Path = Field(
        default=Path(_DEFAULT.reports.token_file),
        description="file with the projected service-account token that proves which node this "
        "is; read anew for each connection",
    )
    ca_file: Path | None = Field(
        default=None,
        description="report over TLS, to an extender whose certificate is of one of the CAs in "
        "this file; read anew for each connection; null: without TLS",
    )
    server_name: str = Field(
        default=_DEFAULT.reports.server_name,
        description="name that the certificate must have; empty: that of the service",
    )
    allow_plain: bool = Field(
        default=_DEFAULT.reports.allow_plain,
        description="report without TLS to other machines, too: the token crosses the network in "
        "the clear",
    )
    heartbeat_seconds: float = Field(
        default=_DEFAULT.reports.heartbeat_seconds,
        ge=1,
        le=60,
        description="where nothing changes, that is told this often",
    )
    utilization_step: Percent = Field(
        default=_DEFAULT.reports.utilization_step * 100,
        description="a change of a GPU's activity by so much is told at once; so are new tenants, "
        "a GPU that becomes idle or busy, foreign use and ill health",
    )
    memory_step: Percent = Field(
        default=_DEFAULT.reports.memory_step * 100,
        description="so is a change of its memory in use by this share of it",
    )
    resolve_seconds: float = Field(
        default=_DEFAULT.reports.resolve_seconds,
        ge=0.1,
        le=300,
        description="the service's addresses are looked up this often",
    )
    timeout_seconds: float = Field(
        default=_DEFAULT.reports.timeout_seconds,
        ge=0.1,
        le=60,
        description="limit for a connection to be granted, and for a report to leave",
    )
    reconnect_seconds: float = Field(
        default=_DEFAULT.reports.reconnect_seconds,
        ge=0.1,
        le=60,
        description="a connection that is lost is opened anew within this time, at random: all "
        "agents lose it together",
    )
    max_backoff_seconds: float = Field(
        default=_DEFAULT.reports.max_backoff_seconds,
        ge=1,
        le=600,
        description="longest wait before the next try after failures",
    )

    @field_validator("service")
    @classmethod
    def _check_service(cls, service: str) -> str:
        if service:
            split_address(service)
        return service

    def value(self) -> ReportOptions:
        """Return what the agent takes."""
        return ReportOptions(
            service=self.service,
            token_file=str(self.token_file),
            ca_file=str(self.ca_file or ""),
            server_name=self.server_name,
            allow_plain=self.allow_plain,
            heartbeat_seconds=self.heartbeat_seconds,
            utilization_step=self.utilization_step / 100,
            memory_step=self.memory_step / 100,
            resolve_seconds=self.resolve_seconds,
            timeout_seconds=self.timeout_seconds,
            reconnect_seconds=self.reconnect_seconds,
            max_backoff_seconds=self.max_backoff_seconds,
        )


class Settings(Section):
    """All settings of the agent."""

    listen: Annotated[str, Form(ADDRESS_FORM)] = Field(
        default=f"{_DEFAULT.host}:{_DEFAULT.port}",
        description="host:port of metrics, health and the report, in plain HTTP; in a pod "
        "0.0.0.0:9402 or [::]:9402",
    )
    loads_listen: Annotated[str, Form(ADDRESS_FORM)] = Field(
        default="",
        description="host:port of the GPUs' loads alone, in plain HTTP, for IDLEGPU_AGENT_URL of "
        "any pod: no pod and no process is in them; in a pod 0.0.0.0:9403 or [::]:9403; empty: "
        "nowhere",
    )
    node: str = Field(
        default="",
        description="name of the Kubernetes node, from the pod's spec.nodeName; empty: the "
        "machine's host name",
    )
    period_seconds: float = Field(
        default=_DEFAULT.period_seconds, ge=0.25, le=60, description="time between two passes"
    )
    slow_seconds: float = Field(
        default=_DEFAULT.cadence.slow_seconds,
        ge=1,
        le=600,
        description="what costs more and changes slowly (health, clocks, MIG layout) is read this "
        "often",
    )
    process_seconds: float = Field(
        default=_DEFAULT.cadence.process_seconds,
        ge=1,
        le=600,
        description="what each process does is read this often",
    )
    call_seconds: float = Field(
        default=_DEFAULT.call_seconds,
        ge=0.1,
        le=60,
        description="a call of NVML that takes longer is given up, and its GPU left alone until "
        "it returns",
    )
    start_seconds: float = Field(
        default=_DEFAULT.cadence.start_limit_seconds,
        ge=1,
        le=600,
        description="the same for starting NVML, which takes seconds without persistence mode",
    )
    retry_seconds: float = Field(
        default=_DEFAULT.cadence.retry_seconds,
        ge=1,
        le=600,
        description="a driver that is not there is looked for at least this often",
    )
    hung_calls: int = Field(
        default=_DEFAULT.hung_calls,
        ge=1,
        le=16,
        description="so many calls may be given up at once before nothing is read any more",
    )
    liveness_seconds: float = Field(
        default=_DEFAULT.liveness_seconds,
        ge=5,
        le=3600,
        description="/healthz fails once the GPUs cannot be read for so long for a cause that a "
        "new container may mend; a driver that is not there is none",
    )
    dcgm_names: bool = Field(
        default=_DEFAULT.dcgm_names,
        description="export the metrics of dcgm-exporter, too, for dashboards and alerts",
    )
    kubelet_socket: Path | None = Field(
        default=Path(_DEFAULT.kubelet_socket),
        description="socket of the kubelet's pod-resources API; null: do not ask who holds what",
    )
    proc: Path | None = Field(
        default=Path(_DEFAULT.proc),
        description="where the machine's processes are seen; null: do not look whose they are",
    )
    pod_logs: Path | None = Field(
        default=Path(_DEFAULT.pod_logs),
        description="directory whose entries name the node's pods; null: none",
    )
    reports: Reports = Reports()
    thresholds: decision.Thresholds = decision.Thresholds()
    foreign: Foreign = Foreign()
    health: decision.Health = decision.Health()
    log: service.Log = service.Log()

    @field_validator("listen", "loads_listen")
    @classmethod
    def _check_listen(cls, listen: str, info: ValidationInfo) -> str:
        if listen or info.field_name == "listen":
            split_address(listen)
        return listen

    def value(self) -> Options:
        """Return what the agent takes."""
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
            hung_calls=self.hung_calls,
            liveness_seconds=self.liveness_seconds,
            dcgm_names=self.dcgm_names,
            kubelet_socket=str(self.kubelet_socket or ""),
            proc=str(self.proc or ""),
            pod_logs=str(self.pod_logs or ""),
            judgement=Judgement(thresholds=self.thresholds.value(), health=self.health.value()),
            foreign=self.foreign.value(),
            reports=self.reports.value(),
            log_level=self.log.level,
            log_format=self.log.format,
        )


def all_settings() -> dict[tuple[str, ...], Setting]:
    """Return every setting by path, as people read about it."""
    return list_settings(Settings, PREFIX)


def load_settings(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Return the settings: the environment's before the file's before the defaults.

    Args:
        path: the settings file, None for none.
        environ: variables by name; those that start with IDLEGPU_AGENT_ count.

    Raises:
        ConfigError: with every problem that was found.
    """
    settings = all_settings()
    file = read_file(path) if path is not None else Layer()
    environment = read_environment(environ, settings, PREFIX)
    problems = [*file.problems, *environment.problems]
    origin = Origin(file="" if path is None else str(path), variables=environment.variables)
    values = _merged(without(file.values, environment.variables), environment.values)
    try:
        loaded = Settings.model_validate(values)
    except ValidationError as error:
        problems += [
            describe(details, origin, settings) for details in error.errors(include_url=False)
        ]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from error
    if problems:
        raise ConfigError("\n".join(problems))
    return loaded


def describe_settings(settings: Settings) -> str:
    """Return a line for each setting that matters or differs from its default."""
    lines = []
    for setting in all_settings().values():
        shown = show_value(settings, setting)
        if setting.name in _ALWAYS_SHOWN or shown != setting.default:
            lines.append(f"  {setting.name}: {shown or '(none)'}\n")
    return "".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the settings for the agent, or show them.

    Returns:
        Exit status: 0, or 2 where settings are bad.
    """
    parser = argparse.ArgumentParser(prog="python -m agent.config", description=__doc__)
    parser.add_argument("--config", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="show them for people")
    parser.add_argument("--table", action="store_true", help="print them as a Markdown table")
    arguments = parser.parse_args(argv)
    if arguments.table:
        sys.stdout.write(render_table(all_settings().values()))
        return EXIT_OK
    try:
        settings = load_settings(arguments.config, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_SETTINGS
    if arguments.check:
        sys.stdout.write(f"{arguments.config}: ok\n{describe_settings(settings)}")
    else:
        sys.stdout.buffer.write(options.encode(settings.value()))
    return EXIT_OK


def _merged(under: Values, over: Values) -> Values:
    """Return values with others put over them; sections, which hold no sections, name by name."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        if isinstance(below, dict) and isinstance(value, dict):
            merged[name] = {**below, **value}
        else:
            merged[name] = value
    return merged


if __name__ == "__main__":
    sys.exit(main())
