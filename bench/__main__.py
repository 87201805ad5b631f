"""Run all benchmarks in sequence: `make bench`.

Each benchmark prints its table and the bounds that it met or missed. To run one alone, on a smaller
cluster: `python -m bench.webhooks --help`. Run nothing else on the machine.
"""

import argparse
import subprocess
import sys
import time
from typing import Final

BENCHMARKS: Final = (
    "head_start",
    "webhooks",
    "profile",
    "start",
    "memory",
    "ingest",
    "soak",
    "abuse",
    "faults",
    "scheduler",
    "wakeup",
    "agent",
    "agents",
    "page",
    "decision_log",
    "frames",
    "picks",
    "sharing",
    "churn",
    "packing",
    "bad_gpus",
    "day",
)


def main() -> int:
    """Run the benchmarks; return 1 if one failed or missed a bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    only: list[str] = parser.parse_args().only
    unknown = [name for name in only if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}: choose from {', '.join(BENCHMARKS)}")
    failed = []
    for name in only or BENCHMARKS:
        started = time.monotonic()
        sys.stdout.write(f"\n=== bench.{name}\n")
        sys.stdout.flush()
        done = subprocess.run([sys.executable, "-m", f"bench.{name}"], check=False)
        sys.stdout.write(f"=== bench.{name}: {time.monotonic() - started:.0f} s\n")
        if done.returncode:
            failed.append(name)
    if failed:
        sys.stdout.write(f"\nmissed a bound or failed: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
