"""Command line: print the GPU of a worker process."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Final

from worker_device.choice import Choice, choose_device
from worker_device.process_stat import process_stat

_USAGE_ERROR: Final = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a worker's device; return 2 for invalid arguments, else 0."""
    options = _parser().parse_args(arguments)
    try:
        pid = _caller_pid() if options.pid is None else _require_running(options.pid)
        choice = choose_device(options.worker_id, pid=pid)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return _USAGE_ERROR
    if not options.quiet:
        sys.stderr.write(choice.message + "\n")
    sys.stdout.write(_render(choice, options.form) + "\n")
    return 0


def _caller_pid() -> int:
    """Return the parent's pid: the calling shell outlives this process.

    The shell starts the worker as a child, or replaces itself with the worker by `exec`, which
    keeps the pid.
    """
    return os.getppid() or os.getpid()


def _require_running(pid: int) -> int:
    if process_stat(pid) is None:
        raise ValueError(f"--pid is {pid}: must be the pid of a running process")
    return pid


def _render(choice: Choice, form: str | None) -> str:
    if form == "index":
        return "" if choice.index is None else str(choice.index)
    if form == "uuid":
        return choice.selector
    if form == "env":
        return f"export CUDA_VISIBLE_DEVICES={shlex.quote(choice.selector)}"
    return choice.device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker_device",
        description="Choose a GPU for a worker process of this container, and print it.",
    )
    parser.add_argument(
        "--worker-id", default="", metavar="N", help="number of the worker, from 0 (default: 0)"
    )
    parser.add_argument(
        "--pid",
        type=int,
        help="process that will use the device; its end frees the device (default: the caller)",
    )
    form = parser.add_mutually_exclusive_group()
    for name, help_text in (
        ("index", "print 1 instead of cuda:1, and an empty line without a GPU"),
        ("uuid", "print the UUID, for CUDA_VISIBLE_DEVICES"),
        ("env", "print a line for eval that makes only this device visible, as cuda:0"),
    ):
        form.add_argument(
            f"--{name}", dest="form", action="store_const", const=name, help=help_text
        )
    parser.add_argument("--quiet", action="store_true", help="do not write the choice to stderr")
    return parser


if __name__ == "__main__":
    sys.exit(main())
