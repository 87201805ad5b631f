"""Process of the trivial handler."""

import sys
from pathlib import Path
from typing import Final

from testkit.controlplane.process import ServerProcess, free_port

ROOT: Final = Path(__file__).parents[1]
STATE: Final = "/healthz"
"""Path that answers the number of pods whose filter call was answered in time."""


def trivial_process(folder: Path, shortlist: int = 0) -> ServerProcess:
    """Describe the process; it is ready once `STATE` answers.

    Args:
        folder: folder of its log.
        shortlist: number of nodes in filter's answer, 0 for all.
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
    """Return the process' base URL."""
    return process.ready_url.removesuffix(STATE)
