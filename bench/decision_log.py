"""Measure the cost of the decision log to kube-scheduler's requests.

`python -m bench.decision_log` calls filter and prioritize with 5,000 nodes as `bench.webhooks`
does, alternately with and without the decision log, which the settings file turns on and off while
the extender runs. CPU is that of the extender's main process, including the thread that encodes the
lines. The first line of each turn holds the whole fleet, and is written before the turn begins.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.agent import cpu_seconds
from bench.machine import Bound, report
from bench.placing import percentile
from bench.requests import EVERYDAY
from bench.webhooks import RequestSender, Times, trivial_handler
from bench.world import FleetSpec, World, open_world, wait_until

NODES: Final = 5000
TURNS: Final = 10
TRIES: Final = 100
RATIO_LIMIT: Final = 1.1
ON: Final = 'idlegpu_decision_log_decisions_total{outcome="written"}'


@dataclass(slots=True)
class Turns:
    """Measurements of all turns of one kind.

    Attributes:
        times: latencies by verb.
        cpu_seconds: CPU time of the extender.
        decisions: number of written lines.
        written_bytes: total size of the lines.
    """

    times: dict[str, Times] = field(
        default_factory=lambda: {verb: Times() for verb in ("filter", "prioritize")}
    )
    cpu_seconds: float = 0.0
    decisions: float = 0.0
    written_bytes: int = 0


def measure(nodes: int, turns: int, tries: int) -> dict[bool, Turns]:
    """Measure with and without the decision log; return the measurements by whether it was on."""
    found = {False: Turns(), True: Turns()}
    with (
        tempfile.TemporaryDirectory(prefix="idlegpu-decisions-") as folder,
        open_world(FleetSpec(nodes=nodes, gpu_pods=2 * nodes)) as world,
        trivial_handler() as trivial_url,
    ):
        world.wait_ready()
        world.wait_readings(1)
        world.wait_past()
        path, sender = Path(folder) / "decisions", RequestSender(world, trivial_url)
        unmeasured = Turns().times
        for number in range(turns):
            is_on = bool(number % 2)
            world.settle({"decision_log": {"path": str(path) if is_on else ""}})
            for wish in EVERYDAY:
                sender.place(wish, unmeasured)
            _wait_written(world, path, is_on=is_on)
            turn, size, written = found[is_on], _size(path), _written(world)
            cpu = cpu_seconds(world.extender_pid)
            for at in range(tries):
                sender.place(EVERYDAY[at % len(EVERYDAY)], turn.times)
            _wait_written(world, path, is_on=is_on)
            turn.cpu_seconds += cpu_seconds(world.extender_pid) - cpu
            turn.decisions += _written(world) - written
            turn.written_bytes += _size(path) - size
    return found


def _written(world: World) -> float:
    return world.metrics().get(ON, 0.0)


def _size(path: Path) -> int:
    """Return the total size of the current file and the rotated ones."""
    return sum(one.stat().st_size for one in path.parent.glob(f"{path.name}*"))


def _wait_written(world: World, path: Path, *, is_on: bool) -> None:
    """Wait until the log's size stops changing."""
    last = -1.0

    def is_still() -> bool:
        nonlocal last
        before, last = last, _written(world) + _size(path)
        return before == last and (last > 0 or not is_on)

    wait_until(is_still, "no decision is left to be written", 30.0, poll_seconds=0.5)


def main() -> int:
    """Run the benchmark, print and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--turns", type=int, default=TURNS, help="half of them with the log")
    parser.add_argument("--tries", type=int, default=TRIES, help="pods placed in each turn")
    arguments = parser.parse_args()
    began = time.perf_counter()
    found = measure(arguments.nodes, arguments.turns, arguments.tries)
    placed = arguments.tries * (arguments.turns // 2)
    rows: list[dict[str, object]] = [
        {
            "decision log": "on" if is_on else "off",
            "verb": verb,
            "requests": len(times.ours),
            "median ms": percentile(times.ours, 0.5),
            "p99 ms": percentile(times.ours, 0.99),
            "trivial p99 ms": percentile(times.trivial, 0.99),
            "CPU a pod ms": 1e3 * turn.cpu_seconds / placed,
            "KiB a decision": turn.written_bytes / 1024 / turn.decisions if is_on else 0,
        }
        for is_on, turn in found.items()
        for verb, times in turn.times.items()
    ]
    what = f"{arguments.nodes} nodes, decisions written"
    bounds = [
        Bound(
            what=f"{verb}, {what}: p99 by that without",
            limit=RATIO_LIMIT,
            measured=percentile(found[True].times[verb].ours, 0.99)
            / percentile(found[False].times[verb].ours, 0.99),
            unit="times",
        )
        for verb in ("filter", "prioritize")
    ]
    notes = [
        (__doc__ or "").partition("\n\n")[2].strip(),
        f"{found[True].decisions:.0f} decisions were written; it took "
        f"{time.perf_counter() - began:.0f} s.",
    ]
    title = "Requests with and without the decision log"
    is_met = report("decision_log", title, rows=rows, bounds=bounds, notes=notes)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
