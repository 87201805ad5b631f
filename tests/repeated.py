"""Run the tests with real parts several times in a row beside busy loops, and print a table.

`python -m tests.repeated RUNS -- COMMAND`: the command is pytest with its options. The exit status
is 1 if any run failed. The output of each run is stored in `out/`.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from testkit.controlplane.leash import leashed

LOOPS: Final = 2
OUT: Final = Path("out")
BUSY: Final = (sys.executable, "-c", "while True: pass")


@contextmanager
def busy_loop() -> Iterator[None]:
    """Keep one core busy while the context is open."""
    process = subprocess.Popen(leashed(BUSY))  # ends with this process, however that ends
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(command: Sequence[str], log: Path) -> tuple[str, bool]:
    """Run the tests once; return a row of the table, and whether they passed."""
    began, cpu = time.monotonic(), _cpu_seconds()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    log.write_text(done.stdout)
    lines = done.stdout.splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            say(line)
    summary = lines[-1].strip("= ") if lines else "no output"
    wall = time.monotonic() - began
    return f"{wall / 60:.1f} | {(_cpu_seconds() - cpu) / 60:.1f} | {summary}", not done.returncode


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _cpu_seconds() -> float:
    """Return the CPU seconds of all ended children; servers count once their parent has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run and print."""
    runs, _, *command = sys.argv[1:]
    passed = True
    OUT.mkdir(exist_ok=True)
    say("| run | minutes | CPU minutes | result |\n|---|---|---|---|")
    with ExitStack() as stack:
        for _ in range(LOOPS):
            stack.enter_context(busy_loop())
        for number in range(1, int(runs) + 1):
            row, is_good = run(command, OUT / f"run-{number}.log")
            passed = passed and is_good
            say(f"| {number} | {row} |")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
