"""Checks of every body, for all targets."""

import logging
import resource
import time
from collections.abc import Callable
from typing import Final

from typing_extensions import override

from extender.runtime.logs import JsonFormatter

Target = Callable[[bytes], bool]

MOST_LOGGED: Final = 64 << 10
"""Largest number of characters logged for one body."""

MOST_CPU_SECONDS: Final = 2.0
MOST_GROWN_KIB: Final = 256 << 10
"""Largest growth of peak memory by one body. CPU time is limited, not wall time, because of busy
machines."""


class FaultError(AssertionError):
    """Error of a product that breaks a guarantee; the message names it."""


class LogJudge(logging.Handler):
    """Log handler that raises if a fault or too much is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(JsonFormatter())
        self.trouble = ""
        self.characters = 0

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.characters += len(self.format(record))
        if record.levelno >= logging.ERROR or record.exc_info:
            self.trouble = self.trouble or self.format(record)

    def check(self) -> None:
        """Raise if a fault or too much was logged since the last call."""
        trouble, characters = self.trouble, self.characters
        self.trouble, self.characters = "", 0
        if trouble:
            raise FaultError(f"a fault was logged: {trouble}")
        if characters > MOST_LOGGED:
            raise FaultError(f"{characters} characters were logged")


def judged(target: Target) -> Target:
    """Return a target that fails if it logs a fault, or uses too much log, CPU or memory."""
    judge = LogJudge()
    root = logging.getLogger()

    def run(body: bytes) -> bool:
        level = root.level
        root.setLevel(logging.INFO)
        root.addHandler(judge)
        began, peak = time.process_time(), _peak_kib()
        try:
            is_understood = target(body)
        finally:
            root.removeHandler(judge)
            root.setLevel(level)
            judge.check()
        seconds, grown = time.process_time() - began, _peak_kib() - peak
        if seconds > MOST_CPU_SECONDS or grown > MOST_GROWN_KIB:
            raise FaultError(f"it took {seconds:.1f} s of CPU time and {grown} KiB")
        return is_understood

    return run


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
