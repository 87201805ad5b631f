"""A program at a terminal of its own, as a user sits before it."""

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
"""What no program writes."""
CONTROL: Final = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")
"""What moves the cursor, colours, or switches screens."""
AT_TERMINAL: Final = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # so that Ctrl-C reaches it
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


class Terminal:
    """A terminal with a program at it.

    Attributes:
        process: the program.
        before: how the terminal was set before it began.
        raw: all that it has written.
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
        """How the terminal is set."""
        return termios.tcgetattr(self._descriptor)

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def read_until(self, words: str, *, since: int = 0, seconds: float = WAIT_SECONDS) -> str:
        """Read until it has written these words after so many bytes; return what it wrote then."""
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
        """Wait until it has ended, and read the rest; return its status."""
        status = self.process.wait(seconds)
        # Where its end has hung the terminal up, reading ends by an error once all of it is read.
        with contextlib.suppress(OSError):
            os.write(self._its, END)  # what it wrote comes before, however late
        with contextlib.suppress(OSError):
            while END not in self.raw:
                self.raw += os.read(self._descriptor, 1 << 16)
        return status


@contextlib.contextmanager
def at_terminal(*command: str, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Run a program at a terminal while the context is open."""
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
