"""Runs the trivial handler as a process of its own."""

import sys
from pathlib import Path
from typing import Final

from testkit.controlplane.process import ServerProcess, free_port

ROOT: Final = Path(__file__).parents[1]
STATE: Final = "/healthz"
"""Says about how many pods filter was answered in time."""


def trivial_process(folder: Path, shortlist: int = 0) -> ServerProcess:
    """Describe it; it is ready where it says its state.

    Args:
        folder: where its log goes.
        shortlist: so many of the first nodes are named, 0 for all.
    """
    port = free_port()
    return ServerProcess(
        name="trivial",
        command=[
            sys.executable,
            "-m",
            "bench.trivial",
            f"--port={port}",
            f"--shortlist={shortlist}",
        ],
        folder=folder,
        ready_url=f"http://127.0.0.1:{port}{STATE}",
        environment={"PYTHONPATH": str(ROOT)},
    )


def base_url(process: ServerProcess) -> str:
    """Return where it is asked."""
    return process.ready_url.removesuffix(STATE)
