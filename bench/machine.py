"""Describes the machine that a result comes from, and writes results as Markdown and JSON."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import orjson
from typing_extensions import override  # in typing from Python 3.12 on

RESULTS: Final = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a result comes from.

    Attributes:
        cpu: model of the processor.
        cores: processors that this process may use.
        memory_gib: memory in all.
        kernel: kernel release.
        python: version of Python.
    """

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str

    @override
    def __str__(self) -> str:
        """Describe it in one line."""
        return (
            f"{self.cores} cores of {self.cpu}, {self.memory_gib:.0f} GiB, "
            f"Linux {self.kernel}, Python {self.python}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What was promised, and what was measured.

    Attributes:
        what: what is bounded.
        limit: most that is allowed.
        measured: what it was.
        unit: of both.
    """

    what: str
    limit: float
    measured: float
    unit: str

    @property
    def is_met(self) -> bool:
        """Whether it was kept; what could not be measured was not."""
        return self.measured <= self.limit

    @override
    def __str__(self) -> str:
        """Say by how much it was met or missed."""
        verdict = "met" if self.is_met else "MISSED"
        margin = abs(self.limit - self.measured)
        return (
            f"{self.what}: {self.measured:.4g} {self.unit}, allowed {self.limit:g}: "
            f"{verdict} by {margin:.3g} {self.unit}"
        )


def describe_machine() -> Machine:
    """Return what this machine is."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=pages / (1 << 30),
        kernel=platform.release(),
        python=platform.python_version(),
    )


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a Markdown table; all have the columns of the first."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_shown(row[name]) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def report(
    name: str,
    title: str,
    *,
    rows: Sequence[Mapping[str, object]],
    bounds: Sequence[Bound],
    notes: Sequence[str] = (),
    folder: Path | None = RESULTS,
    module: str = "",
) -> bool:
    """Print a result, and write it as NAME.md and NAME.json.

    Args:
        name: name of the files.
        title: heading.
        rows: the table.
        bounds: what was promised.
        notes: what the reader has to know besides.
        folder: where to; None: only print.
        module: what of `bench` was run, where it is not called as the files are.

    Returns:
        Whether every bound was met.
    """
    machine = describe_machine()
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = " ".join(["python -m", f"bench.{module or name}", *sys.argv[1:]])
    text = "\n\n".join(
        [
            f"# {title}",
            f"{at}, `{command}`, on {machine}.",
            table(rows),
            "\n".join(f"- {bound}" for bound in bounds),
            *notes,
        ]
    )
    sys.stdout.write(f"{text}\n")
    if folder is not None:
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.md").write_text(f"{text}\n", encoding="utf-8")
        document = {
            "at": at,
            "command": command,
            "machine": asdict(machine),
            "rows": list(rows),
            "bounds": [{**asdict(bound), "is_met": bound.is_met} for bound in bounds],
            "notes": list(notes),
        }
        options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
        (folder / f"{name}.json").write_bytes(orjson.dumps(document, option=options) + b"\n")
    return all(bound.is_met for bound in bounds)
