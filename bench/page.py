"""Measure the cost of open pages to kube-scheduler's requests.

`python -m bench.page` calls filter and prioritize with 5,000 nodes as `bench.webhooks` does,
alternately with and without ten open pages. The pages send the requests of real pages at each
view's own rate, and read all answers (`bench.page_viewers`). Two pages show the fleet, two a node,
two the decisions with each runner-up's reasons, two the waiting pods and two the idle holders. They
run in a process with the lowest CPU priority, because real browsers run on other machines.
Prometheus' values of every device change each ten seconds, so each page receives the whole fleet
repeatedly.

A percentile of latencies also depends on the load of the machine. So a second part times each step
of the extender's event loop in CPU time (`bench.stepping`): the share of a core that the pages'
tasks use, and the longest time for which they block the loop.
"""

import argparse
import sys
import time
from typing import Final

from bench.machine import Bound, report, table
from bench.page_viewers import PageTraffic, pages
from bench.placing import percentile
from bench.requests import EVERYDAY
from bench.stepping import REQUEST_TASK
from bench.webhooks import RequestSender, Times, trivial_handler
from bench.world import FleetSpec, World, open_world

NODES: Final = 5000
PAGES: Final = 10
TURNS: Final = 10
TRIES: Final = 400
SETTLE_SECONDS: Final = 4.0
"""Time after which a new page has received the whole fleet; only open pages are measured."""
RATIO_LIMIT: Final = 1.1
CORE_LIMIT_PERCENT: Final = 3.0
STEP_LIMIT_MS: Final = 1.0
STEP_SECONDS: Final = 60.0
TASKS: Final = ("page news", "page replicas", "page viewer", REQUEST_TASK)
"""Prefixes of the names of tasks in `bench.stepping` that run only for open pages."""

Turns = dict[bool, dict[str, Times]]
"""Latencies by whether pages were open, and by verb."""


def _opened(world: World, trivial_url: str) -> RequestSender:
    """Return a caller of the webhooks, after the extender is ready and warmed up."""
    world.wait_ready()
    world.wait_readings(1)
    world.wait_past()
    sender = RequestSender(world, trivial_url)
    warm = {verb: Times() for verb in ("filter", "prioritize")}
    for wish in EVERYDAY * 3:
        sender.place(wish, warm)
    return sender


def measure(nodes: int, turns: int, tries: int) -> tuple[Turns, PageTraffic]:
    """Return the latencies and the traffic of the pages."""
    times: Turns = {
        is_open: {verb: Times() for verb in ("filter", "prioritize")} for is_open in (False, True)
    }
    traffic = PageTraffic()
    with (
        open_world(FleetSpec(nodes=nodes, gpu_pods=2 * nodes)) as world,
        trivial_handler() as trivial_url,
    ):
        sender = _opened(world, trivial_url)
        for turn in range(turns):
            is_open = bool(turn % 2)
            with pages(world.url, PAGES if is_open else 0) as read:
                time.sleep(SETTLE_SECONDS)
                for number in range(tries):
                    sender.place(EVERYDAY[number % len(EVERYDAY)], times[is_open])
            traffic.bytes += read.bytes
            traffic.requests += read.requests
            traffic.failures += read.failures
    return times, traffic


def measure_steps(nodes: int, seconds: float) -> list[dict[str, object]]:
    """Measure the CPU time of the pages' tasks; return rows with and without webhook calls."""
    rows: list[dict[str, object]] = []
    with (
        open_world(FleetSpec(nodes=nodes, gpu_pods=2 * nodes), is_stepping=True) as world,
        trivial_handler() as trivial_url,
    ):
        sender = _opened(world, trivial_url)
        times = {verb: Times() for verb in ("filter", "prioritize")}
        for is_placing in (False, True):
            with pages(world.url, PAGES):
                time.sleep(SETTLE_SECONDS)
                world.steps()
                began, number = time.perf_counter(), 0
                while (passed := time.perf_counter() - began) < seconds:
                    if is_placing:
                        sender.place(EVERYDAY[number % len(EVERYDAY)], times)
                        number += 1
                    else:
                        time.sleep(0.1)
                steps = world.steps()
            rows += [
                {
                    "pods/s": number / passed,
                    "task": name,
                    "CPU, % of a core": 100 * task["seconds"] / passed,
                    "longest step ms": task["longest_ms"],
                    "steps/s": task["steps"] / passed,
                }
                for name, task in sorted(steps["by_task"].items())
                if name.startswith(TASKS)
            ]
    return rows


def main() -> int:
    """Run the benchmark, print and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--turns", type=int, default=TURNS, help="half of them with pages open")
    parser.add_argument("--tries", type=int, default=TRIES, help="pods placed in each turn")
    parser.add_argument("--seconds", type=float, default=STEP_SECONDS, help="of timing steps")
    arguments = parser.parse_args()
    times, traffic = measure(arguments.nodes, arguments.turns, arguments.tries)
    steps = measure_steps(arguments.nodes, arguments.seconds)
    rows: list[dict[str, object]] = [
        {
            "pages": PAGES if is_open else 0,
            "verb": verb,
            "requests": len(of_verb.ours),
            "median ms": percentile(of_verb.ours, 0.5),
            "p99 ms": percentile(of_verb.ours, 0.99),
            "trivial p99 ms": percentile(of_verb.trivial, 0.99),
        }
        for is_open, verbs in times.items()
        for verb, of_verb in verbs.items()
    ]
    what = f"{arguments.nodes} nodes, {PAGES} pages open"
    bounds = [
        Bound(
            what=f"{verb}, {what}: p99 by that without",
            limit=RATIO_LIMIT,
            measured=percentile(times[True][verb].ours, 0.99)
            / percentile(times[False][verb].ours, 0.99),
            unit="times",
        )
        for verb in ("filter", "prioritize")
    ]
    bounds += [
        Bound(
            what=f"{what}, {'pods placed' if is_placing else 'without requests'}: CPU of the pages",
            limit=CORE_LIMIT_PERCENT,
            measured=sum(
                float(str(row["CPU, % of a core"]))
                for row in steps
                if bool(row["pods/s"]) is is_placing
            ),
            unit="% of a core",
        )
        for is_placing in (False, True)
    ]
    bounds.append(
        Bound(
            what=f"{what}: longest step of the loop for them, in CPU time",
            limit=STEP_LIMIT_MS,
            measured=max(float(str(row["longest step ms"])) for row in steps),
            unit="ms",
        )
    )
    notes = [
        f"The pages received {traffic.bytes / 1e6:.0f} MB in all, and requested "
        + ", ".join(f"{path} {count} times" for path, count in sorted(traffic.requests.items()))
        + f"; {traffic.failures} of these requests failed.",
        f"What the pages' tasks take, in CPU time:\n\n{table(steps)}",
    ]
    is_met = report("page", "Requests while pages are open", rows=rows, bounds=bounds, notes=notes)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
