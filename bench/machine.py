"""Description of the machine of a result, and output of results as Markdown and JSON."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import orjson
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

Verdict = Literal["met", "MISSED", "undecided"]

RESULTS: Final = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Machine on which a result was measured.

    Attributes:
        cpu: model of the processor.
        cores: number of processors that this process may use.
        memory_gib: total memory.
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
        """Describe the machine in one line."""
        return (
            f"{self.cores} cores of {self.cpu}, {self.memory_gib:.0f} GiB, "
            f"Linux {self.kernel}, Python {self.python}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Upper limit of a measured value.

    Attributes:
        what: name of the value.
        limit: largest allowed value.
        measured: measured value.
        unit: unit of both.
        between: confidence interval of the measured value; None without one. A limit inside the
            interval is neither met nor missed.
    """

    what: str
    limit: float
    measured: float
    unit: str
    between: tuple[float, float] | None = None

    @property
    def verdict(self) -> Verdict:
        """Return whether the bound was met, missed or undecided; an unmeasured bound is missed."""
        least, most = self.between or (self.measured, self.measured)
        if most <= self.limit:
            return "met"
        return "undecided" if least <= self.limit else "MISSED"

    @property
    def is_met(self) -> bool:
        """Return whether the bound was certainly met."""
        return self.verdict == "met"

    @override
    def __str__(self) -> str:
        """Describe the bound and by how much it was met or missed."""
        text = f"{self.what}: {self.measured:.4g} {self.unit}"
        if self.between is not None:
            text += " ({:.4g} to {:.4g})".format(*self.between)
        text += f", allowed {self.limit:g}: {self.verdict}"
        if self.verdict == "undecided":
            return text
        return f"{text} by {abs(self.limit - self.measured):.3g} {self.unit}"


def describe_machine() -> Machine:
    """Describe this machine."""
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
    """Return rows as a Markdown table with the columns of the first row."""
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
    command: str | None = None,
) -> bool:
    """Print a result, and write it as NAME.md and NAME.json.

    Args:
        name: base name of the files.
        title: heading.
        rows: the table.
        bounds: bounds of the result.
        notes: further lines for the reader.
        folder: folder of the files; None to only print.
        module: module of `bench` that was run, if it differs from the base name.
        command: command that was run, if it is not a module of `bench`.

    Returns:
        Whether no bound was missed.
    """
    machine = describe_machine()
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = command or " ".join(["python -m", f"bench.{module or name}", *sys.argv[1:]])
    text = "\n\n".join(
        [
            f"# {title}",
            f"{at}, `{command}`, on {machine}.",
            table(rows),
            *(["\n".join(f"- {bound}" for bound in bounds)] if bounds else []),
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
            "bounds": [{**asdict(bound), "verdict": bound.verdict} for bound in bounds],
            "notes": list(notes),
        }
        options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
        (folder / f"{name}.json").write_bytes(orjson.dumps(document, option=options) + b"\n")
    return all(bound.verdict != "MISSED" for bound in bounds)
