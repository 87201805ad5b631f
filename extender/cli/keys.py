"""Keys that are pressed at a terminal while something is shown there."""

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_BYTES = 64
"""Read at a time: a key that is held down, or something that is pasted."""


@contextmanager
def pressed_keys() -> Iterator[Callable[[float], str]]:
    """Yield what waits for keys so many seconds at most, and returns those that were pressed.

    Where the input is no terminal there are none, and none in the background or where the output
    is read by a pager, which has keys of its own. Afterwards the terminal is as it was before.
    """
    try:
        import termios  # there is none on Windows
        import tty
    except ImportError:
        yield _wait
        return
    descriptor = _terminal()
    if descriptor is None:
        yield _wait
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # Ctrl-C still interrupts
        yield lambda seconds: _read(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _terminal() -> int | None:
    """Return the terminal that listens to us; None in its background: to set it would stop us."""
    try:
        descriptor = sys.stdin.fileno()
        is_ours = (
            os.isatty(descriptor)
            and sys.stdout.isatty()
            and os.tcgetpgrp(descriptor) == os.getpgrp()
        )
    except OSError:  # there is no such file, or it is nobody's terminal
        return None
    return descriptor if is_ours else None


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _read(descriptor: int, seconds: float) -> str:
    ready, _, _ = select.select([descriptor], [], [], seconds)
    if not ready:
        return ""
    # The end of the input is ready all the time.
    return os.read(descriptor, MOST_BYTES).decode(errors="replace") or _wait(seconds)
