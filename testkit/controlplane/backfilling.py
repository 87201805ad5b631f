"""Past samples for a real Prometheus, written as blocks before it starts."""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from testkit.controlplane.tools import binary

STEP_SECONDS = 60.0
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """Past series.

    Attributes:
        name: name of the metric.
        labels: labels of the series.
        value: returns the value at a number of seconds before now; None for a gap.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    value: Callable[[float], float | None]


def backfill(data: Path, lines: list[Line], *, now: float, seconds: float) -> None:
    """Write one sample per minute into the data folder of a stopped Prometheus.

    Args:
        data: `storage.tsdb.path`; created if it is missing.
        lines: series to write.
        now: time of the last sample, seconds since the epoch.
        seconds: length of the past.
    """
    text: list[str] = []
    for name in dict.fromkeys(line.name for line in lines):
        text.append(f"# TYPE {name} gauge")
        for line in lines:
            if line.name != name:
                continue
            labels = ",".join(f'{key}="{value}"' for key, value in line.labels.items())
            for step in range(round(seconds / STEP_SECONDS), 0, -1):
                value = line.value(step * STEP_SECONDS)
                if value is not None:
                    text.append(f"{name}{{{labels}}} {value} {now - step * STEP_SECONDS:.3f}")
    data.mkdir(parents=True, exist_ok=True)
    source = data.with_suffix(".openmetrics")
    source.write_text("\n".join([*text, "# EOF", ""]))
    done = subprocess.run(
        [
            str(binary("promtool")),
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            str(source),
            str(data),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
