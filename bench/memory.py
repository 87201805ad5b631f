"""Measure resident memory of the extender and its worker process, at rest and at its peak.

`python -m bench.memory` lets the extender watch a full cluster, fills its decision history with
different requests, each followed by a binding, and makes it list all objects again. The result is
the proportional set size (PSS) of all its processes together: pages that they share count once, as
in the limit of a container. In the resident set size (RSS) they count once for each process.
"""

import argparse
import statistics
import sys
import time
from typing import Final

from bench.machine import Bound, report
from bench.placing import Scheduler
from bench.processes import Memory, Peak, watching_memory
from bench.requests import distinct
from bench.world import FleetSpec, World, open_world, wait_until

LIMIT_MIB: Final = 450.0
LOOK_SECONDS: Final = 0.5
FREED_SHARE: Final = 0.7
"""Share of the placed pods that are deleted again, so that there is room until the end."""


class Ledger:
    """Table with one row for each stage.

    Args:
        world: the measured extender and its cluster.
        peak: peak of the memory since the last row.
    """

    def __init__(self, world: World, peak: Peak) -> None:
        self.rows: list[dict[str, object]] = []
        self.peak_mib = 0.0
        self._world = world
        self._peak = peak

    def note(self, stage: str, memory: Memory | None = None) -> Memory:
        """Add a row with the current memory."""
        memory = memory or self._world.memory()
        peak_mib = max(self._peak.pss_mib, memory.pss_mib)
        self.peak_mib = max(self.peak_mib, peak_mib)
        self.rows.append(
            {
                "stage": stage,
                "PSS MiB": memory.pss_mib,
                "peak PSS MiB meanwhile": peak_mib,
                "RSS MiB": memory.rss_mib,
                "peak RSS MiB meanwhile": self._peak.rss_mib,
                "RSS of the main process": memory.processes[0],
                "of others": " + ".join(f"{one:.0f}" for one in memory.processes[1:]),
            }
        )
        self._peak.rss_mib = self._peak.pss_mib = 0.0
        return memory


def settled(world: World, seconds: float) -> Memory:
    """Return the median memory over some time of normal work."""
    seen = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        seen.append(world.memory())
        time.sleep(LOOK_SECONDS)
    middle = statistics.median_low(memory.rss_mib for memory in seen)
    return next(memory for memory in seen if memory.rss_mib == middle)


def decide(world: World, count: int) -> None:
    """Make the extender decide `count` requests, all of them different."""
    scheduler = Scheduler(world, wishes=distinct(count))
    for number in range(count // 2):  # filter and prioritize count as one decision each
        placed = scheduler.place()
        if placed.node and number % 10 < 10 * FREED_SHARE:
            scheduler.remove([placed])


def measure(spec: FleetSpec, decisions: int, rest_seconds: float) -> tuple[Ledger, Memory]:
    """Measure at each stage; return the table, and the memory at the end."""
    with open_world(spec, is_started=False) as world:
        with watching_memory(lambda: world.extender_pid, has_pss=True) as peak:
            ledger = Ledger(world, peak)
            world.start_extender()
            world.wait_ready()
            ledger.note("ready")
            wait_until(world.has_readings, "the first readings", 120.0, poll_seconds=0.25)
            ledger.note("first readings")
            world.wait_past()
            ledger.note("past of an hour", settled(world, rest_seconds))
            decide(world, decisions)
            ledger.note(f"{decisions} decisions", settled(world, rest_seconds))
            world.control("close-watches", expired=True)
            time.sleep(rest_seconds)
            last = ledger.note("everything listed again", settled(world, rest_seconds))
        return ledger, last


def main() -> int:
    """Run the benchmark and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpu-pods", type=int, default=10_000)
    parser.add_argument("--all-pods", type=int, default=150_000)
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument("--rest-seconds", type=float, default=20.0, help="of each stage")
    parser.add_argument("--mig", action="store_true", help="a tenth of the nodes cut up by MIG")
    options = parser.parse_args()
    spec = FleetSpec(
        nodes=options.nodes,
        gpu_pods=options.gpu_pods,
        other_pods=options.all_pods - options.gpu_pods,
        has_mig=options.mig,
    )
    ledger, last = measure(spec, options.decisions, options.rest_seconds)
    bounds = [
        Bound(what="PSS of all processes", limit=LIMIT_MIB, measured=last.pss_mib, unit="MiB"),
        Bound(what="their RSS", limit=LIMIT_MIB, measured=last.rss_mib, unit="MiB"),
        Bound(what="peak PSS since start", limit=LIMIT_MIB, measured=ledger.peak_mib, unit="MiB"),
    ]
    is_met = report("memory", "Memory", rows=ledger.rows, bounds=bounds, notes=[__doc__.strip()])
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
