"""The extender's end of the worker process: starts it, asks it, and kills it when it is late."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import extender
from extender.settings.config import Prometheus
from extender.sources.prometheus import frames
from extender.sources.prometheus.common import PATHS
from extender.sources.prometheus.frames import Frame

logger = logging.getLogger(__name__)

_MODULE: Final = "extender.sources.prometheus.worker"
_ROOT: Final = Path(extender.__file__).resolve().parent.parent
_BUFFER_BYTES: Final = 1 << 24
_END_SECONDS: Final = 1.0


class WorkerError(Exception):
    """The worker process gave no answer: it died, or was killed because it was late."""


class WorkerProcess:
    """One worker process; one question at a time. Owned by one task.

    Attributes:
        starts: how often a process was started; after each, nothing is remembered there.

    Args:
        settings: how to ask.
        starts: of processes with other settings before.
    """

    def __init__(self, settings: Prometheus, *, starts: int = 0) -> None:
        self.starts = starts
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a process is there that remembers former rounds."""
        return self._process is not None and self._process.returncode is None

    async def ask(self, question: Mapping[str, Any], limit_seconds: float) -> list[Frame]:
        """Ask, and collect the frames of the answer.

        A process that does not answer in time, or dies, is killed; the next question starts a
        fresh one. So is one whose answer is not awaited: nobody could tell it from the next.

        Raises:
            WorkerError: no complete answer came.
        """
        is_complete = False
        try:
            async with asyncio.timeout(limit_seconds):
                answer = await self._exchange(Frame(header=question))
            is_complete = True
        except TimeoutError as error:
            raise WorkerError(
                f"cannot get an answer of the worker process: none within {limit_seconds:g} s: "
                "it is restarted; see what Prometheus does meanwhile"
            ) from error
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise WorkerError(
                f"cannot get an answer of the worker process: {type(error).__name__} {error}: "
                "it is restarted; its standard error says why it ended"
            ) from error
        finally:
            if not is_complete:
                await self.stop()
        return answer

    async def _exchange(self, question: Frame) -> list[Frame]:
        stdin, stdout = await self._pipes()
        for part in frames.encode(question):
            stdin.write(part)
        await stdin.drain()
        answer: list[Frame] = []
        while not answer or answer[-1].header.get("more"):
            header_bytes, body_bytes = frames.sizes(await stdout.readexactly(frames.PREFIX_BYTES))
            header = frames.decode_header(await stdout.readexactly(header_bytes))
            answer.append(Frame(header=header, body=await stdout.readexactly(body_bytes)))
            await asyncio.sleep(0)  # what is buffered already is read without a pause
        return answer

    async def stop(self) -> None:
        """End the process, and wait until it is gone."""
        process, self._process = self._process, None
        if process is not None:
            self._ending = asyncio.create_task(_end(process), name="end prometheus worker")
        if self._ending is not None:
            # Shielded, and awaited again by the next call: a task that is cancelled while it waits
            # here must not leave a process behind.
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
            start_new_session=True,  # Ctrl-C is for us: we end it
        )
        self.starts += 1
        logger.info("prometheus worker started", extra={"pid": process.pid})
        if process.stdin is not None:
            for part in frames.encode(Frame(header=_portable(self._settings))):
                process.stdin.write(part)
        return process


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the pipe, which ends a healthy worker at once, and kill any other."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.communicate()  # reads the pipes to their ends, so that they close


def _portable(settings: Prometheus) -> Mapping[str, Any]:
    """Write the settings for a process that may run in another directory."""
    document = settings.model_dump(mode="json")
    for name in PATHS:
        if document[name] is not None:
            document[name] = str(Path(document[name]).resolve())
    return document
