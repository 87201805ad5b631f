"""Command line of the extender: run the server, or check the settings and exit."""

import argparse
import gc
import importlib.metadata
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# numpy would start one thread for each core, in this process and in the worker process. Those
# threads do no work here, but they use memory and compete with the event loop for the CPU.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from extender.runtime import logs
from extender.settings.config import Settings, all_settings, load
from extender.settings.loading import ConfigError, Loaded
from extender.settings.spec import render_table, show_value

logger = logging.getLogger("extender")

EXIT_OK: Final = 0
"""The server has stopped after a signal, or the settings are valid."""
EXIT_CANNOT_SERVE: Final = 1
"""The server cannot run: an address, a certificate, the kubeconfig, or a fault."""
EXIT_BAD_SETTINGS: Final = 2
"""Arguments or settings are invalid."""

_ALWAYS_SHOWN: Final = frozenset(
    {
        "listen",
        "kubeconfig",
        "prometheus.url",
        "thresholds.utilization",
        "thresholds.memory",
        "strategy",
        "resources",
    }
)
_IF_UNSET: Final = {
    "kubeconfig": "(none: the service account of the pod)",
    "prometheus.url": "(none: no telemetry)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, then run the server or print the requested text.

    Args:
        argv: command-line arguments, None for those of the process.

    Returns:
        Exit status, one of `EXIT_...`.
    """
    arguments = _build_parser().parse_args(argv)
    if arguments.settings_table:
        sys.stdout.write(render_table(all_settings().values()))
        return EXIT_OK
    path: Path | None = arguments.check_config or arguments.config
    try:
        loaded = load(path, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_SETTINGS
    if arguments.check_config:
        warnings = "".join(f"warning: {warning}\n" for warning in loaded.warnings)
        if path is not None and not path.read_bytes().strip():
            warnings += (
                f"warning: {path}: is empty: write {{}}, an extender reloads no empty file\n"
            )
        sys.stdout.write(f"{path}: ok\n{warnings}{_describe_settings(loaded.settings)}")
        return EXIT_OK
    return _serve(loaded, path)


def _describe_settings(settings: Settings) -> str:
    """Format settings as lines: the important ones and all that differ from their default.

    Secrets are masked.
    """
    lines = []
    for setting in all_settings().values():
        shown = show_value(settings, setting)
        if setting.name in _ALWAYS_SHOWN or shown != setting.default:
            lines.append(f"  {setting.name}: {shown or _IF_UNSET.get(setting.name, '')}\n")
    return "".join(lines)


def _serve(loaded: Loaded[Settings], path: Path | None) -> int:
    """Run the server until SIGTERM or SIGINT; reload the settings file when it changes."""
    # Imported here, so that --check-config starts quickly.
    # The imports create no garbage; searching for it would take a tenth of the start.
    gc.disable()
    import uvloop

    from extender.app import serve
    from extender.kube.kubeconfig import KubeConfigError
    from extender.server.listener import raise_descriptor_limit
    from extender.server.tls import TlsError
    from extender.settings.reload import SettingsFile, log_warnings

    gc.enable()
    settings = loaded.settings
    logs.configure(settings.log.level, settings.log.format, in_background=True)
    log_warnings(loaded.warnings)
    wanted = settings.most_connections
    if (allowed := raise_descriptor_limit(wanted)) < wanted:
        logger.warning(
            "there are fewer file descriptors than allowed connections: raise the limit (ulimit "
            "-n), or lower max_connections; the webhooks' port keeps the last ones",
            extra={"connections": wanted, "allowed": allowed},
        )
    try:
        uvloop.run(serve(settings, SettingsFile(path, os.environ) if path else None))
    except (KubeConfigError, TlsError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CANNOT_SERVE
    except OSError as error:
        sys.stderr.write(
            f"cannot serve on {settings.listen}: {error.strerror or error}: "
            "set listen (IDLEGPU_LISTEN) to a free address of this machine\n"
        )
        return EXIT_CANNOT_SERVE
    except ExceptionGroup:
        logger.critical("a background task failed", exc_info=True)
        return EXIT_CANNOT_SERVE
    except KeyboardInterrupt:  # the server has not installed its signal handlers yet
        return EXIT_OK
    return EXIT_OK


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m extender",
        description="A kube-scheduler extender that places GPU pods on idle GPUs.",
        epilog="Environment variables IDLEGPU_... override the file.",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--config", type=Path, metavar="FILE", help="serve with these settings")
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
