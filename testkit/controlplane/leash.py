"""Become another program that dies with the process that started it.

`python -I -S leash.py PARENT PROGRAM ARGUMENT...` asks the kernel to kill this process when its
parent ends for any reason, and then becomes PROGRAM. A program of its own and not a
`preexec_fn`, which may deadlock in a process that has threads. Without `prctl` (not Linux) it
only becomes PROGRAM.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def leashed(command: Sequence[str]) -> list[str]:
    """Return a command that runs another one, and lets it not outlive this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    """Tie this process to its parent and become the program in the arguments."""
    parent, program, *arguments = sys.argv[1:]
    with contextlib.suppress(AttributeError):  # no prctl here: the tests' own clean-up must do
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(f"cannot run {program}: the process that asked for it is gone")
    os.execv(program, [program, *arguments])  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
