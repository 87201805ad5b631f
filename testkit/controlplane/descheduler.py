"""The real descheduler, run once, or again and again where it asks a Prometheus."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Final

from testkit.controlplane.leash import leashed
from testkit.controlplane.objects import Object
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.tools import binary

RUN_TIMEOUT_SECONDS: Final = 60.0
VERBOSITY: Final = 2
CA: Final = "ca.crt"
"""Where ours looks for the cluster's CA: see `tools.TOOLS`."""


async def deschedule(plane: ControlPlane, folder: Path, policy: Object) -> str:
    """Run the descheduler once, and return its log; whom it evicts is gone then.

    Args:
        plane: whose pods it looks at.
        folder: where its policy goes.
        policy: a DeschedulerPolicy.

    Raises:
        RuntimeError: it failed; the message is its log.
        TimeoutError: it hangs.
    """
    process = await asyncio.create_subprocess_exec(
        *leashed([*_command(plane, folder, policy), "--secure-port=0"]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_TIMEOUT_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    log = output.decode()
    if process.returncode != 0:
        raise RuntimeError(f"cannot deschedule: {log}")
    return log


def descheduler(
    plane: ControlPlane, folder: Path, policy: Object, *, interval_seconds: float
) -> ServerProcess:
    """Describe a descheduler that goes on; `start` it.

    Args:
        plane: whose pods it looks at.
        folder: where its policy and its log go.
        policy: a DeschedulerPolicy.
        interval_seconds: time from one look to the next.
    """
    port = free_port()
    shutil.copy(plane.ca_file, folder / CA)
    return ServerProcess(
        name="descheduler",
        command=[
            *_command(plane, folder, policy),
            f"--descheduling-interval={round(interval_seconds * 1000)}ms",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={folder / 'certificates'}",
        ],
        folder=folder,
        ready_url=f"https://127.0.0.1:{port}/healthz",
    )


def _command(plane: ControlPlane, folder: Path, policy: Object) -> list[str]:
    file = folder / "policy.json"
    file.write_text(json.dumps(policy))
    return [
        str(binary("descheduler")),
        f"--kubeconfig={plane.kubeconfig()}",
        f"--policy-config-file={file}",
        f"--v={VERBOSITY}",
    ]
