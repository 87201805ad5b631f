"""Measure latency while data arrives: Prometheus answers, bursts of nodes and pods, a full resync.

`python -m bench.ingest` places pods almost without a pause while the backend sends bursts of data.
The first part measures latencies as kube-scheduler sees them. The second part (`--steps`, included
by default) measures the CPU time of each step of the extender's event loop, which other processes
on the machine do not affect: a request that arrives during a step waits until its end.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from bench.machine import Bound, report
from bench.noise import noise_server
from bench.placing import Placed, Scheduler, percentile
from bench.timing import Phase, place_and_free, request_noise
from bench.world import FleetSpec, World, open_world, wait_until

LIMIT_MS: Final = 10.0
PAUSE_SECONDS: Final = 0.004
"""Kube-scheduler's own time for a pod, at the least."""
KEPT: Final = 200
"""Number of placed pods that keep running; older ones are deleted."""
INTERVAL_SECONDS: Final = 10.0

Act = Callable[[World], None]


def acts(nodes: int, pods: int) -> dict[str, Act]:
    """Return the event of each phase, which starts with the phase in the background.

    A heartbeat does not affect decisions; a broken GPU changes the node's devices. Every second pod
    with GPUs is bound at once.
    """
    created: list[str] = []

    def create(world: World, kind: str, life: str) -> None:
        created[:] = world.control("pods", count=pods, kind=kind, life=life)["uids"]

    def breaking(world: World, *, is_broken: bool) -> None:
        world.control("touch", broken=is_broken)

    def delete(world: World) -> None:
        world.control("delete", uids=created)

    return {
        "rounds of Prometheus": lambda _: None,
        f"heartbeats of {nodes} nodes": lambda world: world.control("touch") and None,
        f"{nodes} nodes offer a GPU less": lambda world: breaking(world, is_broken=True),
        "... and all again": lambda world: breaking(world, is_broken=False),
        f"{pods} GPU pods created, half of them bound": lambda world: create(world, "gpu", "mixed"),
        "... and deleted": delete,
        f"{pods} other pods created and started": lambda world: create(world, "web", "running"),
        "... and deleted again": delete,
        "full resync": lambda world: world.control("close-watches", expired=True) and None,
    }


@contextmanager
def acting(world: World, act: Act, seconds: float) -> Iterator[None]:
    """Start an event in the background shortly after the context was opened."""
    thread = threading.Timer(0.05 * seconds, act, [world])
    thread.start()
    try:
        yield
    finally:
        thread.join()


def run(spec: FleetSpec, seconds: float, pods: int, *, is_stepping: bool) -> list[Phase]:
    """Measure all phases."""
    settings = {"prometheus": {"interval_seconds": INTERVAL_SECONDS}}
    phases: list[Phase] = []
    with (
        noise_server() as noise,
        open_world(spec, settings=settings, is_stepping=is_stepping) as world,
    ):
        world.wait_ready()
        wait_until(world.has_readings, "the first readings", 240.0, poll_seconds=0.5)
        world.wait_past()
        scheduler, running = Scheduler(world), list[Placed]()
        for _ in range(KEPT):
            place_and_free(scheduler, KEPT, running)
        for name, act in acts(spec.nodes, pods).items():
            phase = Phase(name)
            if is_stepping:
                world.steps()
            with acting(world, act, seconds):
                deadline = time.perf_counter() + seconds
                while time.perf_counter() < deadline:
                    phase.note(place_and_free(scheduler, KEPT, running))
                    request_noise(noise, phase)
                    time.sleep(PAUSE_SECONDS)
            if is_stepping:
                steps = world.steps()
                phase.longest_step_ms = max((one["ms"] for one in steps["longest"]), default=0.0)
                phase.long_steps = steps.get("over_10_ms", 0)
                phase.longest_steps = steps["longest"]
            phases.append(phase)
    return phases


def main() -> int:
    """Run the benchmark and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.ingest", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpu-pods", type=int, default=10_000)
    parser.add_argument("--other-pods", type=int, default=140_000)
    parser.add_argument("--burst-pods", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=25.0, help="of each phase")
    parser.add_argument("--no-steps", action="store_true", help="latencies alone")
    options = parser.parse_args()
    spec = FleetSpec(nodes=options.nodes, gpu_pods=options.gpu_pods, other_pods=options.other_pods)
    phases = run(spec, options.seconds, options.burst_pods, is_stepping=False)
    rows = [phase.row() for phase in phases]
    bounds = [
        Bound(
            what=f"p99 of {verb} during: {phase.name}",
            limit=LIMIT_MS,
            measured=percentile(answers_ms, 0.99),
            unit="ms",
        )
        for phase in phases
        for verb, answers_ms in phase.by_verb
    ]
    notes = [__doc__.strip()]
    if not options.no_steps:
        timed = run(spec, options.seconds, options.burst_pods, is_stepping=True)
        for row, phase in zip(rows, timed, strict=True):
            row |= {"longest step CPU ms": phase.longest_step_ms, "steps > 10 ms": phase.long_steps}
        notes += [_describe(phase) for phase in timed]
    is_met = report("ingest", "Ingest beside answers", rows=rows, bounds=bounds, notes=notes)
    return 0 if is_met else 1


def _describe(phase: Phase) -> str:
    longest = [f"    {one['ms']:6.1f} ms  {one['name']}" for one in phase.longest_steps[:5]]
    return "\n".join([f"Longest steps (CPU) during: {phase.name}", "", *longest])


if __name__ == "__main__":
    sys.exit(main())
