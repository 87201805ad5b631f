"""Real descheduler, run once, or periodically with a Prometheus."""

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
"""File of the cluster's CA in this build of the descheduler: see `tools.TOOLS`."""


async def deschedule(plane: ControlPlane, folder: Path, policy: Object) -> str:
    """Run the descheduler once, wait until evicted pods are gone, and return its log.

    Args:
        plane: control plane with the pods.
        folder: folder of its policy.
        policy: a DeschedulerPolicy.

    Raises:
        RuntimeError: the descheduler failed; the message is its log.
        TimeoutError: the descheduler hangs.
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
    """Describe a descheduler that runs periodically; `start` it.

    Args:
        plane: control plane with the pods.
        folder: folder of its policy and its log.
        policy: a DeschedulerPolicy.
        interval_seconds: interval of its runs.
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
