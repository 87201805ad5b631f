"""Write log lines from a separate thread, so that a slow reader of the log delays no request."""

import contextlib
import logging
import threading
from collections import deque
from typing import Final, TextIO

from typing_extensions import override  # in typing from Python 3.12 on

WAITING_LINES: Final = 20_000
"""Most lines that wait to be written; further lines are dropped and counted."""

GATHER_SECONDS: Final = 0.05
"""Time to collect lines for one write: waking a thread costs more than formatting a line."""

CLOSE_SECONDS: Final = 2.0
"""Longest wait for the last lines at shutdown."""


class BackgroundHandler(logging.StreamHandler[TextIO]):
    """A stream handler whose `emit` never waits for the stream: a thread writes the lines."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Format a record and queue the line for the thread."""
        if len(self._lines) >= WAITING_LINES:
            self._dropped += 1
            return
        try:
            self._lines.append(self.format(record))
        except Exception:  # noqa: BLE001 - as logging has it: a log line is worth no failure
            self.handleError(record)
        if not self._wake.is_set():
            self._wake.set()

    @override
    def close(self) -> None:
        """Write the queued lines within `CLOSE_SECONDS`, and stop the thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)
        super().close()

    def _write(self) -> None:
        while not (self._closing.is_set() and not self._lines):
            self._wake.wait()
            if not self._closing.wait(GATHER_SECONDS):
                self._wake.clear()
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            dropped, self._dropped = self._dropped, 0
            if dropped:
                lines.append(
                    self.format(
                        logging.LogRecord(
                            __name__,
                            logging.WARNING,
                            __file__,
                            0,
                            "log lines dropped: they came faster than they were read: %d",
                            (dropped,),
                            None,
                        )
                    )
                )
            if lines:
                with contextlib.suppress(OSError, ValueError):  # the reader is gone
                    self.stream.write("".join(f"{line}\n" for line in lines))
                    self.stream.flush()
