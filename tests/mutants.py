"""Run mutation tests of a room's code with its own tests: `make mutants ROOM=core`.

A sample of mutants of the room's code, each with one change, is run with the room's own tests:
those that run the changed line, or, if it runs at import, all of them; those that run any line of
the file come first.
Everything happens in a copy of the tree. A mutant that no test detects survives. Mutants that are
equivalent to the original are listed with the reason in `bench/data/equivalent_mutants.txt`.

Mutants are written by `ast.unparse`, without comments, and so is the room's code in the copy when
all tests are run once without a change. Tests that fail then are not used, nor is a test that also
fails alone without the mutant. Results are stored by room.
"""

import argparse
import math
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

import orjson

from bench.machine import describe_machine, table
from tests.mutation.changes import Mutant, mutant_at, plain, sites_of
from tests.mutation.session import (
    IDLE_SECONDS,
    Learned,
    Outcome,
    TryAll,
    in_a_fork,
    limit_seconds,
    print_outcome,
    replaced,
)

ROOT: Final = Path(__file__).parent.parent
EQUIVALENT: Final = ROOT / "bench" / "data" / "equivalent_mutants.txt"
RESULTS: Final = ROOT / "bench" / "results" / "mutants"
COPIED: Final = (
    "agent",
    "bench",
    "charts",
    "docs",
    "extender",
    "manifests",
    "scheduler-config",
    "simulation",
    "testkit",
    "tests",
    "worker_device",
    "pyproject.toml",
    "CHANGELOG.md",
    "README.md",
)
MARKED: Final = "not prometheus and not e2e and not gpu and not page"
OUTPUT: Final = "pytest-output.txt"
LEAST_SHARE: Final = 0.9
TESTS_SPEAK: Final = (0, 1, 2, 4)
"""Exit codes of pytest with a verdict: tests passed, one failed, or one or `conftest.py` cannot be
imported."""
PYTEST_FAILED: Final = 70
STANDARD_DEVIATIONS: Final = 1.96
"""Width of the 95 % confidence interval, in standard deviations."""
HEAVY: Final = (
    "aiohttp",
    "cryptography.x509",
    "google.protobuf",
    "hypothesis",
    "kubernetes_asyncio",
    "msgspec",
    "numpy",
    "orjson",
    "prometheus_client",
    "pydantic",
    "pytest",
    "yaml",
)
"""Imported once, before a new pytest is forked for each mutant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Part of the code, and its tests.

    Attributes:
        name: name of the room.
        code: patterns of its files, relative to the root.
        tests: patterns of its tests.
        without: patterns of files that belong to another room.
    """

    name: str
    code: tuple[str, ...]
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()

    @property
    def files(self) -> list[str]:
        """Return the paths of its code."""
        return [
            path
            for path in _found(self.code)
            if "_pb2" not in path and path not in _found(self.without)
        ]

    @property
    def arguments(self) -> list[str]:
        """Return pytest's arguments: its tests, and the doctests in its code."""
        return [*_found(self.tests), *self.files]


def _found(patterns: Iterable[str]) -> list[str]:
    paths = (path for pattern in patterns for path in sorted(ROOT.glob(pattern)))
    return list(dict.fromkeys(str(path.relative_to(ROOT)) for path in paths))


def room_of(name: str) -> Room:
    """Return a room by its name."""
    tests: tuple[str, ...]
    match name:
        case "worker_device":
            tests = ("tests/worker_device/test_*.py",)
            return Room(name=name, code=("worker_device/*.py",), tests=tests)
        case "agent":
            return Room(name=name, code=("agent/**/*.py",), tests=("tests/agent/**/test_[!g]*.py",))
        case "admission":
            tests = ("tests/extender/webhook/admission/test_*.py",)
            return Room(name=name, code=("extender/webhook/admission.py",), tests=tests)
        case _:
            tests = (f"tests/extender/{name}/**/test_*.py",)
            return Room(name=name, code=(f"extender/{name}/**/*.py",), tests=tests)


def sample(files: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draw some mutants of files; the same seed and code give the same mutants."""
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in files}
    sites = [site for path, text in texts.items() for site in sites_of(path, text)]
    chosen = random.Random(seed).sample(sites, min(count, len(sites)))
    return [mutant_at(site, texts[site.path]) for site in chosen]


class Bench:
    """Copy of the tree in which mutants are tested.

    Args:
        folder: folder of the copy.
        room: room of the mutants.
        seconds: CPU time limit for the tests of one mutant.
        only: stem of a file; only the tests named after it are run, if there are any.
    """

    def __init__(self, folder: Path, room: Room, seconds: float, *, only: str = "") -> None:
        self._folder = folder
        self._room = room
        self._seconds = seconds
        own = [one for one in room.arguments if only and f"test_{only}" in one]
        self._tests = own or room.arguments
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, folder / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, folder / name)
        for path in room.files:
            text = (ROOT / path).read_text(encoding="utf-8")
            (folder / path).write_text(plain(text), encoding="utf-8")

    def try_all(self, mutants: Sequence[Mutant], until: float) -> list[Outcome]:
        """Test mutants in their order until the time is up; those begun are all judged.

        Raises:
            RuntimeError: the tests cannot be collected.
        """
        target = self._folder / "outcomes"
        with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
            plugin = TryAll(
                self._folder,
                self._room.files,
                mutants,
                seconds=self._seconds,
                until=until,
                output=output,
            )
            _pytest(self._folder, self._tests, plugins=[plugin], limit=math.inf)
        if not target.exists():
            raise RuntimeError(self.output)
        learned, outcomes = cast("tuple[Learned, list[Outcome]]", pickle.loads(target.read_bytes()))  # noqa: S301 - of our own process
        for name in HEAVY:
            __import__(name)
        for at, (mutant, outcome) in enumerate(zip(mutants, outcomes, strict=False)):
            if outcome.verdict == "import":
                outcomes[at] = self._try_in_new_pytest(mutant, learned)
                print_outcome(sys.stdout, mutant, outcomes[at])
        return outcomes

    def _try_in_new_pytest(self, mutant: Mutant, learned: Learned) -> Outcome:
        tests = learned.order(learned.of_file(mutant), mutant, self._seconds)
        # Others may use what the file defines, such as a default, without a function of it.
        others = set(learned.seconds).difference(tests, learned.failed)
        tests += learned.order(others, mutant, self._seconds)
        limit = 2 * limit_seconds(learned, tests)  # imports come on top
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        left_out = [f"--deselect={test}" for test in learned.failed]
        with replaced(self._folder / mutant.path, mutant.text):
            code = _pytest(self._folder, ["-x", *files, *left_out], limit=limit)
        if code is None:
            return Outcome(verdict="hangs")
        if code not in TESTS_SPEAK:
            return Outcome(verdict="import")
        if code != 1:
            return Outcome(verdict="killed" if code else "survives")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", self.output, re.MULTILINE)
        alone = _pytest(self._folder, failed[:1], limit=limit) if failed else 0
        return Outcome(verdict="import" if alone else "killed", test="".join(failed[:1]))

    @property
    def output(self) -> str:
        """Last lines of pytest's output."""
        return (self._folder / OUTPUT).read_text(encoding="utf-8", errors="replace")[-9000:]


def _pytest(
    folder: Path, arguments: Sequence[str], *, limit: float, plugins: Sequence[object] = ()
) -> int | None:
    """Run pytest in a process forked from this one; return its exit code, None if it hangs."""
    result = folder / "exit-code"
    result.unlink(missing_ok=True)
    # frees nothing that was imported before the fork
    once = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-q", "-p", "no:cacheprovider", "-W", once, "-m", MARKED]

    def run() -> None:
        import pytest  # noqa: PLC0415 - the copy's tests are imported by this process alone

        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)
        sys.path[:] = [str(folder), *(one for one in sys.path if one not in {"", str(ROOT)})]
        sys.dont_write_bytecode = not plugins  # a mutant's bytecode is not stored
        for name in list(sys.modules):
            if name.partition(".")[0] in COPIED and not name.startswith("tests.mutation"):
                del sys.modules[name]
        with (folder / OUTPUT).open("w", encoding="utf-8") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        code = PYTEST_FAILED
        try:
            code = int(pytest.main([*options, *arguments], plugins=list(plugins)))
        finally:
            sys.stdout.flush()
            result.write_text(str(code), encoding="utf-8")

    idle = math.inf if plugins else IDLE_SECONDS  # while its child processes are at work
    if not in_a_fork(run, limit_seconds=limit, idle_seconds=idle):
        return None
    return int(result.read_text(encoding="utf-8")) if result.exists() else PYTEST_FAILED


def equivalent() -> dict[str, str]:
    """Return the reasons of equivalent mutants, by key."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    pairs = (line.split(" # ", 1) for line in lines if line and not line.startswith("#"))
    return dict(pairs)


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share (Wilson).

    Example:
        >>> [round(share, 3) for share in wilson(6, 60)]
        [0.047, 0.201]
    """
    if not total:
        return 0.0, 1.0
    square, share = STANDARD_DEVIATIONS**2, count / total
    middle = share + square / (2 * total)
    spread = STANDARD_DEVIATIONS * math.sqrt(
        share * (1 - share) / total + square / (4 * total * total)
    )
    return (middle - spread) / (1 + square / total), (middle + spread) / (1 + square / total)


ROOMS: Final = (
    "core",
    "placement",
    "fleet",
    "effects",
    "webhook",
    "admission",
    "sources",
    "insight",
    "api",
    "server",
    "kube",
    "runtime",
    "settings",
    "cli",
    "agent",
    "worker_device",
)
"""Rooms in the order of the result."""


def result_of(
    room: str, seed: int, tried: Sequence[tuple[Mutant, Outcome]], known: Mapping[str, str]
) -> dict[str, Any]:
    """Return the stored result of a room."""
    judged = [(mutant, outcome) for mutant, outcome in tried if outcome.verdict != "import"]
    survivors = [mutant for mutant, outcome in judged if outcome.verdict == "survives"]
    same = [mutant for mutant in survivors if mutant.key in known]
    left = [mutant for mutant in survivors if mutant.key not in known]
    killed = len(judged) - len(survivors)
    counted = killed + len(left)
    least, most = wilson(killed, counted)
    return {
        "row": {
            "room": room,
            "seed": seed,
            "mutants": len(tried),
            "not judged": len(tried) - len(judged),
            "equivalent": len(same),
            "killed": killed,
            "by a time limit": sum(outcome.verdict == "hangs" for _, outcome in judged),
            "survive": len(left),
            "killed of those that count": f"{killed / max(counted, 1):.0%}",
            "95 % confidence": f"{least:.0%} to {most:.0%}",
        },
        "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"python -m tests.mutants {' '.join(sys.argv[1:])}",
        "machine": asdict(describe_machine()),
        "survivors": [f"line {mutant.line}: `{mutant.key}`" for mutant in left],
        "equivalent": {mutant.key: known[mutant.key] for mutant in same},
        "not judged": [one.key for one, outcome in tried if outcome.verdict == "import"],
    }


def keep(result: dict[str, Any]) -> None:
    """Store a room's result in place of its last one, unless the time was up before any verdict."""
    if result["row"]["mutants"] == result["row"]["not judged"]:
        return
    file = RESULTS.with_suffix(".json")
    results = orjson.loads(file.read_bytes()) if file.exists() else {}
    results[result["row"]["room"]] = result
    file.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2) + b"\n")
    RESULTS.with_suffix(".md").write_text(rendered(results), encoding="utf-8")


def rendered(results: Mapping[str, Any]) -> str:
    """Return the results of all rooms as Markdown."""
    measured = [results[room] for room in ROOMS if room in results]
    parts = [
        "# Mutants by room",
        "A room's own tests must kill at least 90 % of its non-equivalent mutants. Each "
        "row is a random sample; the last column is the confidence interval for all of "
        "the room's mutants.",
        table([one["row"] for one in measured]),
        f"Not measured: {', '.join(room for room in ROOMS if room not in results) or 'none'}.",
    ]
    for one in measured:
        lines = [
            *(f"- survives, {text}" for text in one["survivors"]),
            *(f"- equivalent: `{key}`: {reason}" for key, reason in one["equivalent"].items()),
            *(f"- not judged, pytest failed or time was up: `{key}`" for key in one["not judged"]),
        ]
        parts += [f"## {one['row']['room']}", f"{one['at']}, `{one['command']}`."]
        parts += ["\n".join(lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Test a sample, store and print the result; return 1 if too many survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "room", help="agent, worker_device, server, or a folder of extender such as core"
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="then no other is tried")
    parser.add_argument("--seconds", type=float, default=60, help="of CPU for a mutant's tests")
    parser.add_argument("--only", default="", help="of one file, by its stem; keeps no result")
    options = parser.parse_args()
    room = room_of(options.room)
    files = [path for path in room.files if options.only in ("", Path(path).stem)]
    mutants = sample(files, options.count, options.seed)
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="idlegpu-mutants-") as folder:
        bench = Bench(Path(folder).resolve(), room, options.seconds, only=options.only)
        outcomes = bench.try_all(mutants, until)
    if options.only:
        return 0
    if not outcomes:
        sys.stdout.write("no time was left for a mutant; the room's last result stays\n")
        return 1
    tried = list(zip(mutants, outcomes, strict=False))
    result = result_of(room.name, options.seed, tried, equivalent())
    keep(result)
    sys.stdout.write(table([result["row"]]) + "\n" + "\n".join(result["survivors"]) + "\n")
    row = result["row"]
    return 0 if row["killed"] >= LEAST_SHARE * (row["killed"] + row["survive"]) else 1


if __name__ == "__main__":
    sys.exit(main())
