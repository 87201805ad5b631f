"""The log of decisions: a thread of its own makes the lines and writes them, no answer waits."""

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from typing import Final

from extender.placement.history import DecisionRecord
from extender.placement.placer import Weighed
from extender.records.lines import LineWriter
from extender.settings.trying import STDOUT, DecisionLog

logger = logging.getLogger(__name__)

WAITING: Final = 512
"""So many decisions may wait to be written: each keeps what it was made from in memory."""

GATHER_SECONDS: Final = 0.05
"""Decisions that come so soon after another are written with it, once kube-scheduler has both its
answers: else the thread would want the processor just when the second question comes."""

REST_SECONDS: Final = 0.002
"""After each piece of less than a millisecond the thread lets others have their turn: whoever
decides meanwhile then waits for one such piece at most."""

CLOSE_SECONDS: Final = 5.0

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Bound:
    """A pod that was bound."""

    uid: str
    node: str
    at: float


@dataclass(frozen=True, slots=True, eq=False)
class _Decided:
    """A decision; its record is looked at for what never changes."""

    record: DecisionRecord
    weighed: Weighed


class DecisionLogWriter:
    """Writes decisions to a file or the standard output until it is closed.

    Args:
        settings: where to, and how much.

    Attributes:
        written: lines about decisions that were written.
        dropped: decisions that came faster than they were written.
        problem: why nothing can be written, "" while it can.
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
        """Have a decision written; takes no time."""
        if len(self._waiting) >= WAITING:
            self.dropped += 1
            return
        self._add(_Decided(record, weighed))

    def note_bound(self, uid: str, node: str, at: float) -> None:
        """Have it written where a pod was bound."""
        self._add(_Bound(uid, node, at))

    def close(self) -> None:
        """Write what waits, for a while, and close the file."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)

    def _add(self, noted: _Decided | _Bound) -> None:
        self._waiting.append(noted)
        if not self._wake.is_set():
            self._wake.set()

    def _run(self) -> None:
        """Write as it comes until the end."""
        while not (self._closing.is_set() and not self._waiting):
            self._wake.wait()
            if not self._closing.wait(GATHER_SECONDS):
                self._wake.clear()
            while self._waiting:
                self._write(self._waiting.popleft())
                self._rest()
        with contextlib.suppress(OSError):
            self._sink.close()

    def _rest(self) -> None:
        """Let others have their turn, unless the end is near."""
        if not self._closing.is_set():
            self._closing.wait(REST_SECONDS)

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
            # A log that fails costs no pod its node.
            self._start_over()
            logger.exception("fault", extra={"verb": "decision log"})

    def _lines_of(self, noted: _Decided | _Bound) -> list[bytes]:
        if isinstance(noted, _Bound):
            return self._lines.bound(noted.uid, noted.node, noted.at)
        return self._lines.decision(noted.record, noted.weighed)

    def _start_over(self) -> None:
        """State everything anew: what was made of the last lines nobody may have."""
        self.dropped += 1
        self._lines.begin()

    def _note_problem(self, problem: str) -> None:
        """Say once that something is wrong, and once that it is right again."""
        before, self.problem = self.problem, problem
        if problem and not before:
            logger.warning("decision log", extra={"path": self._sink.name, "problem": problem})
        elif before and not problem:
            logger.info("decision log is written again", extra={"path": self._sink.name})


class _Stdout:
    """The standard output, which other logs may share: a line at a time."""

    name: Final = STDOUT

    def has_room_for(self, _: int) -> bool:
        """It is endless."""
        return True

    def begin(self) -> None:
        """There is no other."""

    def write(self, lines: Sequence[bytes]) -> None:
        """Write lines."""
        for line in lines:
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """It belongs to the process."""


class _File:
    """A file that is begun anew before it grows too large; the standard library renames the old.

    Args:
        settings: which file, how large, and how many are kept.
    """

    def __init__(self, settings: DecisionLog) -> None:
        self.name = settings.path
        self._max_bytes = settings.max_size
        self._handler = RotatingFileHandler(
            settings.path, backupCount=settings.files, delay=True, encoding="utf-8"
        )
        self._is_begun = False

    def has_room_for(self, count: int) -> bool:
        """Whether so many bytes may be written to the file that is open.

        Nothing is added to a file of before: what it says is of another process. Lines too large
        for any file get one of their own.
        """
        if not self._is_begun:
            return not self._size()
        size = self._size()
        return not size or size + count <= self._max_bytes

    def begin(self) -> None:
        """Begin a new file."""
        self._handler.doRollover()
        self._is_begun = True

    def write(self, lines: Sequence[bytes]) -> None:
        """Write lines."""
        self._is_begun = True
        with open(self.name, "ab") as file:  # noqa: PTH123 - as the handler opens it
            file.writelines(lines)

    def close(self) -> None:
        """Close what is open."""
        self._handler.close()

    def _size(self) -> int:
        try:
            return os.stat(self.name).st_size  # noqa: PTH116 - likewise
        except FileNotFoundError:
            return 0
