"""Fuzz every decoder, guided by coverage (Atheris): `make fuzz MINUTES=10`.

Each target runs in its own processes, starting from the corpus. A body fails if the product raises
an untyped error, logs a fault, answers nodes outside the request, takes more CPU time than
`MOST_CPU_SECONDS`, or more memory than `MOST_MIB`. Failed bodies are stored in `.fuzz/`.
"""

import argparse
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from bench.machine import RESULTS, Bound, report
from testkit.controlplane.leash import leashed
from tests.fuzz.corpus import corpus
from tests.fuzz.judging import MOST_CPU_SECONDS
from tests.fuzz.targets import NAMES

HANGS_SECONDS: Final = 600
"""Timeout by the wall clock, long because of busy machines; the judge limits CPU time."""
MOST_MIB: Final = 1024
BODIES_PER_PROCESS: Final = 5_000
LONGEST_BODY: Final = 16384
FAILED: Final = Path(".fuzz")
_STAT: Final = re.compile(r"stat::(\w+):\s+(\d+)")
_COVERED: Final = re.compile(r"cov: (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Result of fuzzing one target.

    Attributes:
        target: name of the target.
        bodies: number of judged bodies.
        seconds: duration.
        covered: number of covered edges of the product's code.
        slowest_seconds: longest time of a body, rounded down.
        peak_mib: peak memory of the process.
        failed: whether a body failed; `output` has the reason.
        output: output of the process.
    """

    target: str
    bodies: int
    seconds: float
    covered: int
    slowest_seconds: int
    peak_mib: int
    failed: bool
    output: str


def fuzz(target: str, *, seconds: float = math.inf, bodies: float = math.inf) -> Run:
    """Fuzz one target for a time or a number of bodies.

    Several processes run one after another, because Atheris itself takes more memory with each
    body. Each starts from the bodies that the earlier ones found.
    """
    FAILED.mkdir(exist_ok=True)
    rounds: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        for at, body in enumerate(corpus()[target]):
            Path(folder, f"{at:03}").write_bytes(body)
        while not (rounds and rounds[-1].failed):
            seconds_left = seconds - sum(run.seconds for run in rounds)
            bodies_left = bodies - sum(run.bodies for run in rounds)
            if min(seconds_left, bodies_left) < 1:
                break
            limits = [f"-runs={min(BODIES_PER_PROCESS, bodies_left)}"]
            if seconds_left < math.inf:
                limits.append(f"-max_total_time={round(seconds_left)}")
            rounds.append(_fuzz_in_one_process(target, [*limits, folder]))
    return Run(
        target=target,
        bodies=sum(run.bodies for run in rounds),
        seconds=sum(run.seconds for run in rounds),
        covered=max(run.covered for run in rounds),
        slowest_seconds=max(run.slowest_seconds for run in rounds),
        peak_mib=max(run.peak_mib for run in rounds),
        failed=rounds[-1].failed,
        output=rounds[-1].output,
    )


def _fuzz_in_one_process(target: str, limits: Sequence[str]) -> Run:
    options = [
        f"-artifact_prefix={FAILED}/{target}-",
        f"-timeout={HANGS_SECONDS}",
        f"-rss_limit_mb={MOST_MIB}",
        f"-max_len={LONGEST_BODY}",
        "-print_final_stats=1",
        *limits,
    ]
    command = [sys.executable, "-m", "tests.fuzz.one", target, *options]
    started = time.monotonic()
    done = subprocess.run(leashed(command), capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    stats = {name: int(value) for name, value in _STAT.findall(output)}
    return Run(
        target=target,
        bodies=stats.get("number_of_executed_units", 0),
        seconds=time.monotonic() - started,
        covered=max(map(int, _COVERED.findall(output)), default=0),
        slowest_seconds=stats.get("slowest_unit_time_sec", 0),
        peak_mib=stats.get("peak_rss_mb", 0),
        failed=done.returncode != 0,
        output=output,
    )


def keep(runs: Sequence[Run], folder: Path | None) -> None:
    """Print the results, and write them into a folder."""
    rows: list[dict[str, object]] = [
        {
            "target": run.target,
            "bodies": run.bodies,
            "seconds": round(run.seconds),
            "edges reached": run.covered,
            "slowest, s": run.slowest_seconds,
            "peak MiB": run.peak_mib,
            "failed": "yes" if run.failed else "no",
        }
        for run in runs
    ]
    failed = sum(run.failed for run in runs)
    report(
        "fuzz",
        "Fuzzing",
        rows=rows,
        bounds=[
            Bound(what="targets with a body that failed", limit=0, measured=failed, unit="targets")
        ],
        notes=[
            f"{sum(run.bodies for run in runs):,} bodies, made by Atheris from the corpus of "
            "`tests/fuzz` and guided by coverage. A target whose row says no answered each of them "
            f"with a typed error or rightly, within {MOST_CPU_SECONDS:g} s of CPU time and "
            f"{MOST_MIB} MiB."
        ],
        folder=folder,
        command=" ".join(["python -m tests.fuzz", *sys.argv[1:]]),
    )


def main() -> int:
    """Fuzz all targets; return 1 if a body failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--bodies", type=int, help="of all targets together, in place of minutes")
    parser.add_argument("--keep", action="store_true", help="write bench/results/fuzz.md")
    parser.add_argument("only", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}")
    arguments = parser.parse_args()
    names: list[str] = arguments.only or list(NAMES)
    if find_spec("atheris") is None:
        sys.stdout.write("fuzz: Atheris is there for Python 3.11 to 3.14 on Linux x86-64 alone\n")
        return 1
    runs = []
    for name in names:
        if arguments.bodies:
            run = fuzz(name, bodies=-(-arguments.bodies // len(names)))
        else:
            run = fuzz(name, seconds=max(1.0, 60 * arguments.minutes / len(names)))
        runs.append(run)
        sys.stdout.write(f"{name:22} {run.bodies:9,} bodies in {run.seconds:5.0f} s\n")
        if run.failed:
            sys.stdout.write(run.output[-4000:])
        sys.stdout.flush()
    keep(runs, RESULTS if arguments.keep else None)
    return 1 if any(run.failed for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
