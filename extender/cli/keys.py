"""Read single key presses from the terminal while a live view is on screen."""

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MOST_BYTES = 64
"""Limit of one read: a key that repeats, or pasted text."""


@contextmanager
def pressed_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to a number of seconds and returns the pressed keys.

    It returns "" after the wait if standard input or output is no terminal (a pager reads the keys
    itself), or if the process runs in the background. On exit the terminal's mode is restored.
    """
    try:
        import termios  # missing on Windows
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
    """Return the descriptor of the terminal, or None if the process does not control it.

    Setting the terminal's mode from the background would stop the process.
    """
    try:
        descriptor = sys.stdin.fileno()
        is_ours = (
            os.isatty(descriptor)
            and sys.stdout.isatty()
            and os.tcgetpgrp(descriptor) == os.getpgrp()
        )
    except OSError:  # standard input is closed, or is no controlling terminal
        return None
    return descriptor if is_ours else None


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _read(descriptor: int, seconds: float) -> str:
    ready, _, _ = select.select([descriptor], [], [], seconds)
    if not ready:
        return ""
    # At end of file `select` always reports ready: wait here, or the loop would spin.
    return os.read(descriptor, _MOST_BYTES).decode(errors="replace") or _wait(seconds)
