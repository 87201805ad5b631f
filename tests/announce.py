"""Print the steps and the duration of a make target: `python -m tests.announce TARGET`.

It runs before the virtual environment exists, so it uses only the standard library.
"""

import sys
from pathlib import Path
from typing import Final

from testkit.controlplane.tools import CLUSTER, build_minutes, build_plan, missing, names_of

ENVIRONMENT: Final = Path(".venv/.dev")
INSTALL_MINUTES: Final = 1
START_MINUTES: Final = 1
CHECK_MINUTES: Final = 4
REAL_MINUTES: Final = 6
NEIGHBOUR_MINUTES: Final = 8
"""Duration on two cores; `bench/results/make-test.md` has the measurements."""


def steps(target: str) -> list[tuple[str, int]]:
    """List the steps of a target and the minutes of each.

    Args:
        target: `check`, `test`, `test-neighbours` or `cluster`.
    """
    found: list[tuple[str, int]] = []
    if not ENVIRONMENT.exists():
        found.append(("install Python packages into .venv", INSTALL_MINUTES))
    if target != "check":
        names = list(CLUSTER) if target == "cluster" else names_of(neighbours=False)
        if target == "test-neighbours":
            names += names_of(neighbours=True)
        to_build = missing(names)
        if to_build:
            found.append((build_plan(to_build), build_minutes(to_build)))
    if target == "cluster":
        found.append(("start the programs", START_MINUTES))
    if target in {"check", "test"}:
        found.append(("format, lint, types, imports, unit tests", CHECK_MINUTES))
    if target == "test":
        found.append(("tests with a real control plane, Prometheus and Chromium", REAL_MINUTES))
    if target == "test-neighbours":
        text = "installation by manifests; tests beside Karpenter, cert-manager and others; images"
        found.append((text, NEIGHBOUR_MINUTES))
    return found


def main(target: str) -> None:
    """Print the steps of a target."""
    planned = steps(target)
    total = sum(minutes for _, minutes in planned)
    lines = [f"make {target}: about {total} min on two cores"]
    lines += [f"  {minutes:3} min  {text}" for text, minutes in planned]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
