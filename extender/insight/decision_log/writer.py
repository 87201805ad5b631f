"""Write the decision log in a thread of its own, so that no answer waits for it."""

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from typing import Final

from extender.insight.decision_log.lines import LineWriter
from extender.placement.history import DecisionRecord
from extender.placement.placer import Weighed
from extender.settings.service import STDOUT, DecisionLog

logger = logging.getLogger(__name__)

_WAITING: Final = 512
"""Queue limit: each queued decision keeps its snapshot in memory."""

_GATHER_SECONDS: Final = 0.05
"""Delay before writing, so that filter and prioritize of one pod are written together. Otherwise
the thread would compete for the processor just when kube-scheduler sends its second request."""

_REST_SECONDS: Final = 0.002
"""Pause after each step of less than a millisecond. A decision then waits for at most one step."""

_CLOSE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Bound:
    """The binding of a pod to a node."""

    uid: str
    node: str
    at: float


@dataclass(frozen=True, slots=True, eq=False)
class _Decided:
    """A decision to write, with its inputs; of its record only immutable fields are written."""

    record: DecisionRecord
    weighed: Weighed


class DecisionLogWriter:
    """Writes decisions to a file or to standard output until it is closed.

    Args:
        settings: path, size limit and number of files.

    Attributes:
        written: number of decisions written.
        dropped: number of decisions lost to a full queue or a failed write.
        problem: reason why writing fails, "" while it works.
    """

    def __init__(self, settings: DecisionLog) -> None:
        self.written = 0
        self.dropped = 0
        self.problem = ""
        self._lines = LineWriter(self._rest)
        self._sink = _Stdout() if settings.path == STDOUT else _File(settings)
        self._waiting: deque[_Decided | _Bound] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decision log", daemon=True)
        self._thread.start()

    def note(self, record: DecisionRecord, weighed: Weighed) -> None:
        """Queue a decision for writing; never blocks."""
        if len(self._waiting) >= _WAITING:
            self.dropped += 1
            return
        self._add(_Decided(record, weighed))

    def note_bound(self, uid: str, node: str, at: float) -> None:
        """Queue the binding of a pod for writing."""
        self._add(_Bound(uid, node, at))

    def close(self) -> None:
        """Write the queued lines, for at most `_CLOSE_SECONDS`, and close the file."""
        self._closing.set()
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)

    def _add(self, noted: _Decided | _Bound) -> None:
        self._waiting.append(noted)
        if not self._wake.is_set():
            self._wake.set()

    def _run(self) -> None:
        while not (self._closing.is_set() and not self._waiting):
            self._wake.wait()
            if not self._closing.wait(_GATHER_SECONDS):
                self._wake.clear()
            while self._waiting:
                self._write(self._waiting.popleft())
                self._rest()
        with contextlib.suppress(OSError):
            self._sink.close()

    def _rest(self) -> None:
        """Pause to yield the processor, unless the log is being closed."""
        if not self._closing.is_set():
            self._closing.wait(_REST_SECONDS)

    def _write(self, noted: _Decided | _Bound) -> None:
        try:
            lines = self._lines_of(noted)
            if not self._sink.has_room_for(sum(map(len, lines))):
                self._sink.begin()
                self._lines.begin()
                lines = self._lines_of(noted)
            self._sink.write(lines)
            self.written += isinstance(noted, _Decided)
            self._note_problem("")
        except OSError as error:
            self._start_over()
            self._note_problem(f"cannot be written: {error.strerror or error}")
        except Exception:
            # A fault of the log must not affect decisions.
            self._start_over()
            logger.exception("internal error", extra={"verb": "decision log"})

    def _lines_of(self, noted: _Decided | _Bound) -> list[bytes]:
        if isinstance(noted, _Bound):
            return self._lines.bound(noted.uid, noted.node, noted.at)
        return self._lines.decision(noted.record, noted.weighed)

    def _start_over(self) -> None:
        """Count a loss and write the full state again: the last lines may be incomplete."""
        self.dropped += 1
        self._lines.begin()

    def _note_problem(self, problem: str) -> None:
        """Log a failure once, and the recovery once."""
        before, self.problem = self.problem, problem
        if problem and not before:
            logger.warning(
                "decision log has a problem", extra={"path": self._sink.name, "problem": problem}
            )
        elif before and not problem:
            logger.info("decision log is written again", extra={"path": self._sink.name})


class _Stdout:
    """Standard output as a sink, line by line because other logs may share it."""

    name: Final = STDOUT

    def has_room_for(self, _: int) -> bool:
        """Return True: standard output has no size limit."""
        return True

    def begin(self) -> None:
        """Do nothing: there is no next file."""

    def write(self, lines: Sequence[bytes]) -> None:
        """Write lines and flush."""
        for line in lines:
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Do nothing: standard output belongs to the process."""


class _File:
    """Log file that the standard library rotates before it grows too large."""

    def __init__(self, settings: DecisionLog) -> None:
        self.name = settings.path
        self._max_bytes = settings.max_size
        self._handler = RotatingFileHandler(
            settings.path, backupCount=settings.files, delay=True, encoding="utf-8"
        )
        self._is_begun = False

    def has_room_for(self, count: int) -> bool:
        """Check whether the current file can take this many bytes.

        The file of an earlier process is never appended to. Lines larger than the limit get a file
        of their own.
        """
        if not self._is_begun:
            return not self._size()
        size = self._size()
        return not size or size + count <= self._max_bytes

    def begin(self) -> None:
        """Rotate the file."""
        self._handler.doRollover()
        self._is_begun = True

    def write(self, lines: Sequence[bytes]) -> None:
        """Append lines to the file."""
        self._is_begun = True
        with open(self.name, "ab") as file:  # noqa: PTH123 - as the handler opens it
            file.writelines(lines)

    def close(self) -> None:
        """Close the handler."""
        self._handler.close()

    def _size(self) -> int:
        try:
            return os.stat(self.name).st_size  # noqa: PTH116 - likewise
        except FileNotFoundError:
            return 0
