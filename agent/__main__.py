"""The command line: serve, print one report, watch reports, or check the settings."""

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# Otherwise NumPy starts one thread per CPU core, and GPU nodes have hundreds of cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from agent import options as agent_options
from agent.options import Options
from agent.report.contract import Report, encode

logger = logging.getLogger("agent")

EXIT_OK: Final = 0
"""The agent has stopped after a signal, or has printed what was requested."""
EXIT_CANNOT_SERVE: Final = 1
"""The agent cannot serve: its address is taken, or a fault."""
EXIT_BAD_SETTINGS: Final = 2
"""Arguments or settings are invalid."""
EXIT_NO_GPU: Final = 3
"""`--once` or `--watch` found no readable GPU; the text says why and what to do."""


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
    if not Path(options.kubelet_socket).parent.is_dir():  # the machine is not a Kubernetes node
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
    from agent.gpu.nvml import Nvml
    from extender.runtime import logs
    from extender.runtime.logs import LogFormat, LogLevel

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
        logger.critical("a background task failed", exc_info=True)
        return EXIT_CANNOT_SERVE
    except KeyboardInterrupt:  # before the agent has installed its signal handlers
        return EXIT_OK
    return EXIT_OK


def _print_once(options: Options, *, as_json: bool) -> int:
    from agent.app import sample_once
    from agent.gpu.nvml import Nvml

    report = asyncio.run(sample_once(options, Nvml()))
    if as_json:
        sys.stdout.write(encode(report).decode() + "\n")
    else:
        from agent.report.table import print_report  # large

        print_report(report)
    return _status(report)


def _watch(options: Options) -> int:
    """Show every report in place until Ctrl-C."""
    from rich.live import Live  # large

    from agent.app import watch_reports
    from agent.gpu.nvml import Nvml
    from agent.report.table import render  # large

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
        description="Read the GPUs of this machine through NVML. Without an action, serve metrics "
        "and report to idlegpu's extender.",
        epilog="Environment variables IDLEGPU_AGENT_... override the settings file.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file (YAML)")
    parser.add_argument(
        "--dcgm-names", action="store_true", help="also export the metrics of dcgm-exporter"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--once", action="store_true", help="print a table of the GPUs, and exit")
    action.add_argument("--json", action="store_true", help="print the report as JSON")
    action.add_argument(
        "--watch", action="store_true", help="show the table, and refresh it until Ctrl-C"
    )
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


if __name__ == "__main__":
    sys.exit(main())
