"""Writes log lines from a thread of its own: whoever reads them slowly keeps no answer waiting."""

import contextlib
import logging
import threading
from collections import deque
from typing import Final, TextIO

from typing_extensions import override  # in typing from Python 3.12 on

WAITING_LINES: Final = 20_000
"""So many lines may wait to be written; the ones after them are dropped and counted."""

GATHER_SECONDS: Final = 0.05
"""Lines that come so soon after another are written with it: to wake a thread costs more than to
format a line."""

CLOSE_SECONDS: Final = 2.0
"""At the end the last lines get so long to be written."""


class BackgroundHandler(logging.StreamHandler[TextIO]):
    """A stream handler that only ever waits for its own thread's lock, never for the stream."""

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
        """Format a record, and leave it to the thread."""
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
        """Write what waits, for a while."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)
        super().close()

    def _write(self) -> None:
        """Write lines as they come until the end."""
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
                with contextlib.suppress(OSError, ValueError):  # nobody reads them any more
                    self.stream.write("".join(f"{line}\n" for line in lines))
                    self.stream.flush()
