"""The command line: serve, print one report, watch reports, or check the settings."""

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.metadata
import logging
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent import options as agent_options
from agent.options import Options
from agent.report import Device, Place, Process, Report, encode
from extender.core.devices.readings import NO_INSTANCES, Signal

# Render the report as a table for the terminal; import it only when needed: `rich` is large.

_GIB: Final = float(1 << 30)
_UNKNOWN: Final = "?"
_STALE_SECONDS: Final = 10.0
_VERDICT_WIDTH: Final = 16
_WORDS: Final = {True: ("idle", "green"), False: ("not idle", "red"), None: ("unknown", "yellow")}

_SHORT: Final = (("graphics", Signal.GRAPHICS_ACTIVE), ("SM", Signal.SM_ACTIVE))


def render(report: Report) -> RenderableType:
    """Return the report as a `rich` renderable."""
    at = datetime.fromtimestamp(report.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    driver = f"driver {report.driver_version}" if report.driver_version else "no driver"
    parts: list[RenderableType] = [Text(f"{report.node}, {driver}, {at}", style="bold")]
    if report.devices:
        parts.append(_table(report))
    if report.problem is not None:
        parts.append(Text(report.problem.text, style="yellow"))
    parts += [
        Text(device.problem.text, style="yellow")
        for device in report.devices
        if device.problem is not None
    ]
    unknown = (report.tenants_problem, report.processes_problem) if report.devices else ()
    parts += [Text(problem.text, style="dim") for problem in unknown if problem is not None]
    return Group(*parts)


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the table."""
    (console or Console()).print(render(report))


def _table(report: Report) -> Table:
    table = Table()
    with_holders = any(device.allocated_to is not None for device in report.devices)
    for name in ("GPU", "model", "busy", "memory GiB"):
        table.add_column(name)
    for name in ("power W", "°C"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("held by", "used by") if with_holders else ("used by",):
        table.add_column(name)
    table.add_column("idle?", min_width=_VERDICT_WIDTH)
    for row, device in enumerate(report.devices):
        values = report.signals_of(row)
        table.add_row(
            _name(device),
            device.model.removeprefix("NVIDIA "),
            _busy(device, values),
            _memory(values),
            _of(values, Signal.POWER, Signal.POWER_LIMIT),
            _number(values, Signal.TEMPERATURE),
            *((_holders(device),) if with_holders else ()),
            _users(device.used_by),
            _verdict(device),
        )
    return table


def _name(device: Device) -> str:
    index = _UNKNOWN if device.index is None else str(device.index)
    if device.mig_profile == NO_INSTANCES:
        return f"{index} MIG, no instance"
    if not device.gpu_instance_id:
        return index
    return f"{index}:{device.gpu_instance_id} {device.mig_profile}"


def _busy(device: Device, values: dict[str, float]) -> str:
    """Return the activity of a device by each source."""
    parts = [f"{values[signal]:.0%} {name}" for name, signal in _SHORT if signal in values]
    if Signal.GPU_UTILIZATION in values:
        parts.append(f"{values[Signal.GPU_UTILIZATION]:.0%} {device.activity_source}")
    extra = ((Signal.TENSOR_ACTIVE, "tensor"), (Signal.DRAM_ACTIVE, "memory"))
    parts += [f"{values[signal]:.0%} {name}" for signal, name in extra if values.get(signal)]
    return "\n".join(parts) or _UNKNOWN


def _memory(values: dict[str, float]) -> str:
    used, total = values.get(Signal.MEMORY_USED), values.get(Signal.MEMORY_TOTAL)
    return " / ".join(_UNKNOWN if one is None else f"{one / _GIB:.1f}" for one in (used, total))


def _number(values: dict[str, float], signal: Signal) -> str:
    return f"{values[signal]:.0f}" if signal in values else _UNKNOWN


def _of(values: dict[str, float], signal: Signal, limit: Signal) -> str:
    return f"{_number(values, signal)} / {_number(values, limit)}"


def _holders(device: Device) -> str:
    if device.allocated_to is None:
        return _UNKNOWN
    return "\n".join(f"{one.namespace}/{one.pod}" for one in device.allocated_to) or "no pod"


def _users(processes: Iterable[Process] | None) -> str:
    if processes is None:
        return _UNKNOWN
    return "\n".join(map(_user, processes)) or "no process"


def _user(process: Process) -> str:
    who = f"{process.name or 'process'} {process.pid}"
    if process.place is Place.POD:
        who = f"{process.namespace}/{process.pod}: {who}" if process.pod else f"pod: {who}"
    if process.memory_bytes is not None:
        who += f", {process.memory_bytes / _GIB:.1f} GiB"
    return who


def _verdict(device: Device) -> Text:
    if device.verdict is None:
        return Text(_UNKNOWN)
    verdict = device.verdict
    word, style = _WORDS[verdict.is_idle]
    lines = [(word if device.problem is not None else f"{word}: {verdict.reason}", style)]
    if verdict.action:
        lines.append((f"{verdict.action}: {verdict.cause}", "red"))
    if verdict.stress_cause:
        lines.append((f"counts less: {verdict.stress_cause}", "yellow"))
    if device.foreign is not None and (device.foreign.memory_bytes or device.foreign.pids):
        lines.append((f"foreign use: {device.foreign.memory_bytes / _GIB:.1f} GiB", "magenta"))
    if device.age_seconds is not None and device.age_seconds > _STALE_SECONDS:
        lines.append((f"values are {device.age_seconds:.0f} s old", "yellow"))
    return Text("\n").join(Text(*line) for line in lines)


logger = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_CANNOT_SERVE: Final = 1
EXIT_BAD_SETTINGS: Final = 2
EXIT_NO_GPU: Final = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; None for those of the process.

    Returns:
        Exit status: 0 for success, 1 if serving failed, 2 for bad arguments or settings, 3 if
            `--once` or `--watch` finds no readable GPU.
    """
    arguments = _build_parser().parse_args(argv)
    if arguments.check_config:
        return _configure("--check", "--config", str(arguments.check_config)).returncode
    if arguments.settings_table:
        return _configure("--table").returncode
    configured = _configure(*_config(arguments.config), capture=True)
    if configured.returncode:
        return configured.returncode
    options = agent_options.decode(configured.stdout)
    if arguments.dcgm_names:
        options = dataclasses.replace(options, dcgm_names=True)
    if not (arguments.watch or arguments.once or arguments.json):
        return _serve(options)
    logging.disable()  # the report contains the problems
    if not Path(options.kubelet_socket).parent.is_dir():  # no Kubernetes here
        options = dataclasses.replace(options, kubelet_socket="")
    return _watch(options) if arguments.watch else _print_once(options, as_json=arguments.json)


def _config(path: Path | None) -> tuple[str, ...]:
    return () if path is None else ("--config", str(path))


def _configure(*arguments: str, capture: bool = False) -> subprocess.CompletedProcess[bytes]:
    """Run `agent.config` in another process, to save memory in this one."""
    command = [sys.executable, "-m", "agent.config", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE if capture else None, check=False)


def _serve(options: Options) -> int:
    """Serve until a signal arrives."""
    # Imported here to keep the other commands fast.
    from agent.app import serve
    from agent.nvml import Nvml
    from extender.runtime import logs
    from extender.runtime.log_choices import LogFormat, LogLevel

    logs.configure(LogLevel(options.log_level), LogFormat(options.log_format))
    try:
        asyncio.run(serve(options, Nvml()))
    except OSError as error:
        sys.stderr.write(
            f"cannot serve on {options.host}:{options.port}: {error.strerror or error}: "
            "set listen (IDLEGPU_AGENT_LISTEN) to a free address of this machine\n"
        )
        return EXIT_CANNOT_SERVE
    except ExceptionGroup:
        logger.critical("a background task ended in a fault", exc_info=True)
        return EXIT_CANNOT_SERVE
    except KeyboardInterrupt:  # before the agent handles signals itself
        return EXIT_OK
    return EXIT_OK


def _print_once(options: Options, *, as_json: bool) -> int:
    """Print one report."""
    from agent.app import sample_once
    from agent.nvml import Nvml

    report = asyncio.run(sample_once(options, Nvml()))
    if as_json:
        sys.stdout.write(encode(report).decode() + "\n")
    else:
        from agent.command_line import print_report  # large

        print_report(report)
    return _status(report)


def _watch(options: Options) -> int:
    """Show every report in place until Ctrl-C."""
    from rich.live import Live  # large

    from agent.app import watch_reports
    from agent.command_line import render  # large
    from agent.nvml import Nvml

    shown: list[Report] = []
    with Live(auto_refresh=False) as live:

        def show(report: Report) -> None:
            shown[:] = [report]
            live.update(render(report), refresh=True)

        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(watch_reports(options, Nvml(), show))
    return _status(shown[0]) if shown else EXIT_NO_GPU


def _status(report: Report) -> int:
    return EXIT_OK if any(one.age_seconds is not None for one in report.devices) else EXIT_NO_GPU


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agent",
        description="Reads the GPUs of this machine through NVML: for idlegpu's extender, for "
        "Prometheus, and for you.",
        epilog="Variables IDLEGPU_AGENT_... of the environment come before the file.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="use these settings")
    parser.add_argument(
        "--dcgm-names", action="store_true", help="export the metrics of dcgm-exporter, too"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--once", action="store_true", help="print a table of the GPUs")
    action.add_argument("--json", action="store_true", help="print the report")
    action.add_argument("--watch", action="store_true", help="show the table, and refresh it")
    action.add_argument(
        "--check-config", type=Path, metavar="FILE", help="check the settings and show them"
    )
    action.add_argument(
        "--settings-table", action="store_true", help="print every setting as a Markdown table"
    )
    action.add_argument(
        "--version", action="version", version=importlib.metadata.version("idlegpu")
    )
    return parser
