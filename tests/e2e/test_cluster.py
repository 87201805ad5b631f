"""`make cluster`, as a new user runs it."""

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from testkit.controlplane.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def cluster(*arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "testkit.controlplane.cluster",
        *arguments,
        cwd=ROOT,
        stdout=PIPE,
        stderr=STDOUT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def read_until(process: Process, text: str) -> str:
    assert process.stdout is not None
    said = ""
    while text not in said:
        line = await process.stdout.readline()
        assert line, f"it ended and said {said}"
        said += line.decode()
    return said


def processes_that_know(folder: str) -> list[str]:
    """Return the command lines of the processes that contain a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # the process has just ended
            continue
        if folder in command:
            found.append(command)
    return found


async def test_cluster_places_one_pod_and_ends() -> None:
    async with cluster("--once") as process:
        output, _ = await process.communicate()

    assert "pod example is on gpu-h200-01" in output.decode()
    assert process.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_its_commands_work_as_printed_and_ctrl_c_leaves_nothing_behind() -> None:
    async with cluster() as process:
        said = await read_until(process, "Ctrl-C ends it")
        commands = [
            line.strip()
            for line in said.splitlines()
            if line.startswith(("  export ", "  kubectl apply"))
        ]
        (link,) = re.findall(r"^ +(http://\S+/page/)$", said, re.MULTILINE)
        async with aiohttp.ClientSession() as session, session.get(link) as response:
            assert "<title>idlegpu" in await response.text()
        folder = commands[0].partition("=")[2].rpartition("/")[0]

        async def is_assigned() -> bool:
            shell = await asyncio.create_subprocess_shell(
                " && ".join([*commands, "kubectl describe pod example"]), stdout=PIPE
            )
            output, _ = await shell.communicate()
            return b"assigned default/example to gpu-h200-01" in output

        await wait_for(is_assigned, "kubectl describe has kube-scheduler's event of the binding")
        assert processes_that_know(folder)

        process.send_signal(signal.SIGINT)
        await read_until(process, "stopping everything")
        assert await process.wait() == 0

    assert not processes_that_know(folder)
    assert not await asyncio.to_thread(Path(folder).exists)
