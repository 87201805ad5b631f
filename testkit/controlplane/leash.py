"""Run a program that is killed when its parent process ends.

`python -I -S leash.py PARENT PROGRAM ARGUMENT...` has the kernel kill this process when its
parent ends for any reason, and then executes PROGRAM. It is a separate program, because a
`preexec_fn` may deadlock in a process with threads. Without `prctl` (not Linux) it only executes
PROGRAM.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def leashed(command: Sequence[str]) -> list[str]:
    """Return a command that runs another one and ends with this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    """Tie this process to its parent and execute the program in the arguments."""
    parent, program, *arguments = sys.argv[1:]
    # no prctl here: only the tests' own cleanup ends the program
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(f"cannot run {program}: the process that requested it is gone")
    os.execv(program, [program, *arguments])  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
