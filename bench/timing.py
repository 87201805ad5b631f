"""Latencies of one phase of a benchmark, beside what the machine adds at the same time."""

from dataclasses import dataclass, field
from typing import Any, Final

from bench.asking import Connection, Placed, Scheduler, percentile

QUESTION_BYTES: Final = 64 << 10
"""About what the names of thousands of nodes weigh; `bench.noise` gets as much to read."""


@dataclass(slots=True)
class Phase:
    """What was measured in one phase, in milliseconds.

    Attributes:
        name: what was going on.
        filter_ms: of each filter.
        prioritize_ms: of each prioritize.
        noise_ms: of the process of `bench.noise`, asked after each; tables call it trivial, as do
            those that are kept.
        longest_step_ms: longest step of the extender's loop in CPU time; nan where not measured.
        long_steps: steps of more than 10 ms.
        longest_steps: the longest ones, with their names.
    """

    name: str
    filter_ms: list[float] = field(default_factory=list)
    prioritize_ms: list[float] = field(default_factory=list)
    noise_ms: list[float] = field(default_factory=list)
    longest_step_ms: float = float("nan")
    long_steps: int = 0
    longest_steps: list[dict[str, Any]] = field(default_factory=list)

    def note(self, placed: Placed) -> None:
        """Add a pod that was placed."""
        self.filter_ms.append(1000 * placed.filter_seconds)
        if placed.node:
            self.prioritize_ms.append(1000 * placed.prioritize_seconds)

    @property
    def answers_ms(self) -> list[float]:
        """All answers of the extender."""
        return [*self.filter_ms, *self.prioritize_ms]

    @property
    def by_verb(self) -> tuple[tuple[str, list[float]], ...]:
        """The answers to each verb: a bound holds for each, and the quicker one hides neither."""
        return ("filter", self.filter_ms), ("prioritize", self.prioritize_ms)

    def row(self) -> dict[str, object]:
        """Return the row of the table."""
        return {
            "phase": self.name,
            "answers": len(self.answers_ms),
            "filter p50 ms": percentile(self.filter_ms, 0.5),
            "filter p99 ms": percentile(self.filter_ms, 0.99),
            "prioritize p50 ms": percentile(self.prioritize_ms, 0.5),
            "prioritize p99 ms": percentile(self.prioritize_ms, 0.99),
            "all p99 ms": percentile(self.answers_ms, 0.99),
            "max ms": percentile(self.answers_ms, 1.0),
            "trivial p50 ms": percentile(self.noise_ms, 0.5),
            "trivial p99 ms": percentile(self.noise_ms, 0.99),
            "trivial max ms": percentile(self.noise_ms, 1.0),
        }


def ask_noise(connection: Connection, phase: Phase) -> None:
    """Ask the process of `bench.noise` once."""
    seconds, _ = connection.post("/", bytes(QUESTION_BYTES))
    phase.noise_ms.append(1000 * seconds)


def place_and_free(scheduler: Scheduler, keep: int, running: list[Placed]) -> Placed:
    """Place a pod, and delete the oldest where more than `keep` of the placed ones run."""
    placed = scheduler.place()
    if placed.node:
        running.append(placed)
    if len(running) > keep:
        scheduler.remove([running.pop(0)])
    return placed
