"""Server process: start, wait until it answers, stop, and describe failures."""

import asyncio
import contextlib
import fcntl
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from testkit.controlplane.leash import leashed

# Below the ephemeral ports of kernels (Linux 32768, macOS and BSD 49152); otherwise a client could
# take the port of a server that restarts.
PORTS: Final = range(20_000, 32_000)
_KEPT: Final[dict[int, int]] = {}
"""Returned ports, each with the descriptor of the locked file that reserves it."""
START_TIMEOUT_SECONDS: Final = 60.0
STOP_TIMEOUT_SECONDS: Final = 30.0
PROBE_TIMEOUT_SECONDS: Final = 2.0
POLL_SECONDS: Final = 0.05
LOG_LINES: Final = 25


class ProcessError(RuntimeError):
    """Error of a server that did not start; the message ends with the last lines of its log."""


@dataclass(kw_only=True)
class ServerProcess:
    """Server that tests may kill and start again.

    It is not bound to an event loop: one loop may start it and another stop it. The kernel kills it
    when the process that started it ends.

    Attributes:
        name: name in messages and of the log file.
        command: program and arguments.
        folder: working directory and folder of the log.
        ready_url: URL that answers 200 once the server is ready; its certificate is not verified.
        ready_headers: headers of requests to `ready_url`.
        environment: environment variables besides this process' own.
    """

    name: str
    command: Sequence[str]
    folder: Path
    ready_url: str
    ready_headers: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    @property
    def log(self) -> Path:
        """File with the server's output, over all its starts."""
        return self.folder / f"{self.name}.log"

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process ID.

        Raises:
            ProcessError: the process was never started.
        """
        if self._process is None:
            raise ProcessError(f"{self.name} was never started")
        return self._process.pid

    async def start(self, timeout_seconds: float = START_TIMEOUT_SECONDS) -> None:
        """Start the server and wait until it is ready.

        Raises:
            ProcessError: the server ended, or was not ready in time.
        """
        self.spawn()
        await self.wait_ready(timeout_seconds)

    def spawn(self) -> None:
        """Start the server without waiting."""
        if self.is_running:
            raise ProcessError(f"cannot start {self.name}: it runs already: stop it first")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                leashed(self.command),
                cwd=self.folder,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # this process handles Ctrl-C, and stops its servers in order
                start_new_session=True,
            )

    async def wait_ready(self, timeout_seconds: float = START_TIMEOUT_SECONDS) -> None:
        """Wait until the server is ready.

        Raises:
            ProcessError: the server ended, or was not ready in time.
        """
        deadline = time.monotonic() + timeout_seconds
        async with _probing_session() as session:
            while not await self._is_ready(session):
                if not self.is_running:
                    raise ProcessError(f"cannot start {self.name}: it ended: {self.describe()}")
                if time.monotonic() > deadline:
                    raise ProcessError(
                        f"cannot start {self.name}: not ready after {timeout_seconds} s: "
                        f"{self.describe()}"
                    )
                await asyncio.sleep(POLL_SECONDS)

    async def stop(self, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> None:
        """Stop the server, and kill it if it does not end in time; ignore a stopped server."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, timeout_seconds)
        self.kill()

    def kill(self) -> None:
        """Kill the server as a crash would; do nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Stop the process by SIGSTOP: it keeps its connections and answers nothing."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process after `pause`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def describe(self) -> str:
        """Describe the server's state, with the last lines of its log."""
        state = "never started"
        if self._process is not None:
            code = self._process.poll()
            state = "running" if code is None else f"exit status {code}"
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n  ".join([f"{state}; the end of {self.log}:", *lines[-LOG_LINES:]])

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(self.ready_url, headers=self.ready_headers) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False


def free_port() -> int:
    """Return a port on 127.0.0.1 without a listener that no other caller got.

    Until the server starts, other processes would find the same port free. So a locked file
    reserves the port for this process until it ends.
    """
    folder = Path(tempfile.gettempdir()) / f"idlegpu-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for port in random.sample(PORTS, len(PORTS)):
        if port in _KEPT:
            continue
        lock = os.open(folder / str(port), os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            os.close(lock)
            continue
        _KEPT[port] = lock
        return port
    raise ProcessError(f"cannot find a free port: all of {PORTS} are taken")


def _probing_session() -> aiohttp.ClientSession:
    """Open a session that accepts any certificate, because it only probes readiness."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=False, force_close=True),
        timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_SECONDS),
    )
