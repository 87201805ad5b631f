"""Latencies of one phase of a benchmark, and the latency of the machine at the same time."""

from dataclasses import dataclass, field
from typing import Any, Final

from bench.placing import Connection, Placed, Scheduler, percentile

REQUEST_BYTES: Final = 64 << 10
"""Approximate size of thousands of node names; the body for `bench.noise` has the same size."""


@dataclass(slots=True)
class Phase:
    """Measurements of one phase, in milliseconds.

    Attributes:
        name: name in the table.
        filter_ms: latency of each filter call.
        prioritize_ms: latency of each prioritize call.
        noise_ms: latency of `bench.noise`, called after each; tables call it trivial.
        longest_step_ms: longest step of the extender's loop in CPU time; nan if unmeasured.
        long_steps: number of steps longer than 10 ms.
        longest_steps: the longest steps, with their names.
    """

    name: str
    filter_ms: list[float] = field(default_factory=list)
    prioritize_ms: list[float] = field(default_factory=list)
    noise_ms: list[float] = field(default_factory=list)
    longest_step_ms: float = float("nan")
    long_steps: int = 0
    longest_steps: list[dict[str, Any]] = field(default_factory=list)

    def note(self, placed: Placed) -> None:
        """Add the latencies of a placed pod."""
        self.filter_ms.append(1000 * placed.filter_seconds)
        if placed.node:
            self.prioritize_ms.append(1000 * placed.prioritize_seconds)

    @property
    def answers_ms(self) -> list[float]:
        """Latencies of all answers of the extender."""
        return [*self.filter_ms, *self.prioritize_ms]

    @property
    def by_verb(self) -> tuple[tuple[str, list[float]], ...]:
        """Latencies by verb: each verb must meet the bound by itself."""
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


def request_noise(connection: Connection, phase: Phase) -> None:
    """Call `bench.noise` once and record the latency."""
    seconds, _ = connection.post("/", bytes(REQUEST_BYTES))
    phase.noise_ms.append(1000 * seconds)


def place_and_free(scheduler: Scheduler, keep: int, running: list[Placed]) -> Placed:
    """Place a pod, and delete the oldest placed pod if more than `keep` of them run."""
    placed = scheduler.place()
    if placed.node:
        running.append(placed)
    if len(running) > keep:
        scheduler.remove([running.pop(0)])
    return placed
