"""One server process: started, awaited until it answers, stopped, and explained when it fails."""

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
from typing import Final, TextIO

import aiohttp

from testkit.controlplane.leash import leashed

# Below the ports that kernels give to outgoing connections (Linux 32768, macOS and BSD 49152): a
# server that is stopped and started again would else find its port taken by a client.
PORTS: Final = range(20_000, 32_000)
_KEPT: Final[dict[int, TextIO]] = {}
"""Ports that were given away, each with the lock that keeps it."""
START_TIMEOUT_SECONDS: Final = 60.0
STOP_TIMEOUT_SECONDS: Final = 5.0
PROBE_TIMEOUT_SECONDS: Final = 2.0
POLL_SECONDS: Final = 0.05
LOG_LINES: Final = 25


class ProcessError(RuntimeError):
    """A server did not come up; the message ends with the last lines of its log."""


@dataclass(kw_only=True)
class ServerProcess:
    """A server that we start, and may kill and start again.

    It belongs to no event loop: one loop may start it and another stop it. It dies with the
    process that started it, however that one ends.

    Attributes:
        name: what messages and the log file call it.
        command: program and arguments.
        folder: where it runs, and where its log goes.
        ready_url: answers 200 once the server is ready; certificates are not verified.
        ready_headers: headers of that question.
        environment: variables on top of ours.
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
        """The file with everything it wrote, over all its starts."""
        return self.folder / f"{self.name}.log"

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process ID.

        Raises:
            ProcessError: it was never started.
        """
        if self._process is None:
            raise ProcessError(f"{self.name} was never started")
        return self._process.pid

    async def start(self, timeout_seconds: float = START_TIMEOUT_SECONDS) -> None:
        """Start it and wait until it is ready.

        Raises:
            ProcessError: it ended, or was not ready in time.
        """
        self.spawn()
        await self.wait_ready(timeout_seconds)

    def spawn(self) -> None:
        """Start it without waiting."""
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
                start_new_session=True,  # Ctrl-C is ours to handle: we stop it in order
            )

    async def wait_ready(self, timeout_seconds: float = START_TIMEOUT_SECONDS) -> None:
        """Wait until the server says that it is ready.

        Raises:
            ProcessError: it ended, or was not ready in time.
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
        """Ask it to end, and kill it where it does not; nothing happens if it does not run."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, timeout_seconds)
        self.kill()

    def kill(self) -> None:
        """End it at once, as a crash would; nothing happens if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Make it hang: it keeps its connections and answers nothing."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def describe(self) -> str:
        """Say how it is and what its log says last."""
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
    """Find a port on 127.0.0.1 without a listener, and that no other caller was given.

    Between this answer and the server's start anybody else would find the same port free: it is
    kept for this process by a locked file until the process ends.
    """
    folder = Path(tempfile.gettempdir()) / f"idlegpu-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for port in random.sample(PORTS, len(PORTS)):
        if port in _KEPT:
            continue
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _KEPT[port] = lock
        return port
    raise ProcessError(f"cannot find a free port: all of {PORTS} are taken")


def _probing_session() -> aiohttp.ClientSession:
    """Open a session that trusts any certificate: it asks only whether a server is there."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=False, force_close=True),
        timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_SECONDS),
    )
