"""Start, query and stop the worker process, from the extender's side."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import extender
from extender.settings.sources import Prometheus
from extender.sources.prometheus import protocol
from extender.sources.prometheus.protocol import PATH_SETTINGS, Frame

logger = logging.getLogger(__name__)

_MODULE: Final = "extender.sources.prometheus.worker"
_ROOT: Final = Path(extender.__file__).resolve().parent.parent
_BUFFER_BYTES: Final = 1 << 24
_END_SECONDS: Final = 5.0
"""Longest wait for the end of a killed process."""


class WorkerError(Exception):
    """The worker process gave no answer: it died, or was killed after the time limit."""


class WorkerProcess:
    """A worker process that answers one request at a time; used by one task.

    Attributes:
        starts: number of processes started; a new process has no state of earlier rounds.

    Args:
        starts: number of processes started earlier with other settings.
    """

    def __init__(self, settings: Prometheus, *, starts: int = 0) -> None:
        self.starts = starts
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process runs, and has the state of earlier rounds."""
        return self._process is not None and self._process.returncode is None

    async def send(self, request: Mapping[str, Any], limit_seconds: float) -> list[Frame]:
        """Send a request, and return the frames of the answer.

        A process that dies or does not answer in time is killed, and the next request starts a new
        one. The same happens if the caller is cancelled: otherwise the next request would read this
        answer.

        Raises:
            WorkerError: no complete answer came.
        """
        is_complete = False
        try:
            async with asyncio.timeout(limit_seconds):
                answer = await self._exchange(Frame(header=request))
            is_complete = True
        except TimeoutError as error:
            raise WorkerError(
                f"the worker process gave no answer within {limit_seconds:g} s: "
                "it is restarted; check the load of Prometheus"
            ) from error
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise WorkerError(
                f"the worker process gave no answer: {type(error).__name__} {error}: "
                "it is restarted; see its standard error for the cause"
            ) from error
        finally:
            if not is_complete:
                await self.stop()
        return answer

    async def _exchange(self, request: Frame) -> list[Frame]:
        stdin, stdout = await self._pipes()
        for part in protocol.encode(request):
            stdin.write(part)
        await stdin.drain()
        answer: list[Frame] = []
        while not answer or answer[-1].header.get("more"):
            header_bytes, body_bytes = protocol.sizes(
                await stdout.readexactly(protocol.PREFIX_BYTES)
            )
            header = protocol.decode_header(await stdout.readexactly(header_bytes))
            answer.append(Frame(header=header, body=await stdout.readexactly(body_bytes)))
            await asyncio.sleep(0)  # reading buffered data does not yield
        return answer

    async def stop(self) -> None:
        """End the process, and wait until it has ended, for at most five seconds."""
        process, self._process = self._process, None
        if process is not None:
            self._ending = asyncio.create_task(_terminate(process), name="end prometheus worker")
        if self._ending is not None:
            # Shielded, and awaited again by the next call: cancelling the caller must not leave a
            # process behind.
            await asyncio.shield(self._ending)

    async def _pipes(self) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
        process = self._process
        if process is None or process.returncode is not None:
            await self.stop()
            process = self._process = await self._start()
        if process.stdin is None or process.stdout is None:
            raise BrokenPipeError("the worker process has no pipes")
        return process.stdin, process.stdout

    async def _start(self) -> asyncio.subprocess.Process:
        # A plain interpreter, not multiprocessing: that would import the extender's main module,
        # with the server and the Kubernetes client, a second time.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=_ROOT,
            limit=_BUFFER_BYTES,
            start_new_session=True,  # Ctrl-C must reach the extender only, which ends the worker
        )
        self.starts += 1
        logger.info("prometheus worker started", extra={"pid": process.pid})
        if process.stdin is not None:
            for part in protocol.encode(Frame(header=_serialize_settings(self._settings))):
                process.stdin.write(part)
        return process


async def _terminate(process: asyncio.subprocess.Process) -> None:
    """Kill a process: it has nothing to save.

    A killed process ends only when it gets CPU time, and this one has a low priority. On a busy
    machine the extender must not wait long for that when it shuts down.
    """
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            await process.communicate()  # reads the pipes to the end, so that they close


def _serialize_settings(settings: Prometheus) -> Mapping[str, Any]:
    """Serialize the settings, with absolute paths: the worker has another working directory."""
    document = settings.model_dump(mode="json")
    for name in PATH_SETTINGS:
        if document[name] is not None:
            document[name] = str(Path(document[name]).resolve())
    return document
