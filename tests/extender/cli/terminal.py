"""Pseudo-terminal with a program, as a user sees it."""

import contextlib
import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

LINES, COLUMNS = 24, 100
WAIT_SECONDS: Final = 60.0
END: Final = b"\0end"
"""Marker that no program writes."""
CONTROL: Final = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")
"""Escape sequences that move the cursor, set colors, or switch screens."""
AT_TERMINAL: Final = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # a session of its own, so that Ctrl-C reaches it
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


class Terminal:
    """Terminal in which a program runs.

    Attributes:
        process: process of the program.
        before: the terminal's settings before the start.
        raw: the program's whole output.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes]", descriptor: int, its: int, before: list[Any]
    ) -> None:
        self.process = process
        self.before = before
        self.raw = b""
        self._descriptor = descriptor
        self._its = its

    @property
    def settings(self) -> list[Any]:
        """Current settings of the terminal."""
        return termios.tcgetattr(self._descriptor)

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def read_until(self, words: str, *, since: int = 0, seconds: float = WAIT_SECONDS) -> str:
        """Read until these words appear after an offset; return the output from there."""
        until = time.monotonic() + seconds
        while words not in (text := CONTROL.sub(b"", self.raw[since:]).decode(errors="replace")):
            left = until - time.monotonic()
            ready = left > 0 and select.select([self._descriptor], [], [], left)[0]
            try:
                more = os.read(self._descriptor, 1 << 16) if ready else b""
            except OSError:  # the program has ended, and no other process uses the terminal
                more = b""
            if not more:
                raise AssertionError(f"it did not show {words!r}: {text}")
            self.raw += more
        return text

    def wait(self, seconds: float = WAIT_SECONDS) -> int:
        """Wait until the program has ended, and read the rest; return its exit status."""
        status = self.process.wait(seconds)
        # After its end has closed the terminal, a read fails once all output was read.
        with contextlib.suppress(OSError):
            os.write(self._its, END)  # its output comes before the error, however late
        with contextlib.suppress(OSError):
            while END not in self.raw:
                self.raw += os.read(self._descriptor, 1 << 16)
        return status


@contextlib.contextmanager
def at_terminal(*command: str, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Run a program in a terminal while the context is open."""
    mine, its = os.openpty()
    termios.tcsetwinsize(its, (LINES, COLUMNS))
    before = termios.tcgetattr(its)
    process = subprocess.Popen(
        [sys.executable, "-c", AT_TERMINAL, *command],
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    try:
        yield Terminal(process, mine, its, before)
    finally:
        process.kill()
        process.wait()
        os.close(its)
        os.close(mine)
