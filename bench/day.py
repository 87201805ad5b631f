"""One simulated day, placed by kube-scheduler alone and with idlegpu: `make day`.

20 nodes of 8 GPUs, 96 CPUs and 384 GiB: 16 with whole GPUs, 4 with GPUs shared in 4 replicas. The
3,300 pods of 20 days of Alibaba's trace arrive in one, in the trace's bursts; processes outside
Kubernetes use GPUs of four nodes, and cards break (`bench.day_pods` says what is drawn and what is
assumed). The fleet is empty when the day begins. Steps last 15 s; in each, every waiting pod is
tried, oldest first, and nothing is preempted. Pods on one GPU slow each other down, and a card
over its memory ends its youngest pod (`bench.sharing_day`). A pod on a broken card fails after
30 s. A failed pod starts from the beginning after the Job controller's back-off.

Both placements see the same pods, processes and faults. kube-scheduler is a model: the fit of GPUs,
CPU and memory, and the default scores of Kubernetes 1.37, checked against the real one on a sample
of these requests (`tests/bench/test_day_scheduler.py`). Owners do not spread pods: all count as
pods of Jobs. With idlegpu, its own filter and prioritize answer with default settings, from
readings of Prometheus each minute that are 15 s to 75 s old, and kube-scheduler adds their score
(weight 1) to its own. Wait and slowdown count from arrival; pods that have not started wait until
the end of the day, and pods that have not ended go on alone from there.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from bench.arguments import at_least
from bench.day_figure import Pair, draw, shown
from bench.day_placements import KubeScheduler, WithIdlegpu
from bench.day_pods import LARGEST
from bench.day_run import FleetDay
from bench.machine import RESULTS, report

SEEDS: Final = 4
STOCK: Final = "kube-scheduler alone"
OURS: Final = "with idlegpu"
WAYS: Final[Mapping[str, Callable[[int], KubeScheduler]]] = {
    STOCK: KubeScheduler,
    OURS: WithIdlegpu,
}
PICTURE: Final = Path(__file__).parent.parent / "docs" / "pictures" / "day.svg"

SMALL_MEAN: Final = "1-GPU pods: mean wait"
LARGE_MEAN: Final = "8-GPU pods: mean wait"
LARGE_SHUT_OUT: Final = "8-GPU pods: no node, 8 GPUs free"
SHARED_MEAN: Final = "pods on shared GPUs: mean wait"
SHARED_SLOWDOWN: Final = "pods on shared GPUs: slowdown"
OUT_OF_MEMORY: Final = "out-of-memory ends"
ON_BROKEN: Final = "starts on a broken GPU"
ON_FOREIGN: Final = "starts on a whole GPU in foreign use"
IDLE: Final = "idle GPUs while pods waited"
UNITS: Final = {
    SMALL_MEAN: "min",
    "1-GPU pods: p95 wait": "min",
    "1-GPU pods: slowdown": "times",
    LARGE_MEAN: "min",
    "8-GPU pods: p95 wait": "min",
    LARGE_SHUT_OUT: "%",
    SHARED_MEAN: "min",
    "pods on shared GPUs: p95 wait": "min",
    SHARED_SLOWDOWN: "times",
    "pods on shared GPUs: p99 slowdown": "times",
    OUT_OF_MEMORY: "",
    ON_BROKEN: "",
    ON_FOREIGN: "",
    "starts on a shared GPU in foreign use": "",
    IDLE: "GPU-hours",
}
"""Unit of each figure, in the order of the table."""

DRAWN: Final = {
    LARGE_MEAN: "minutes",
    SMALL_MEAN: "minutes",
    LARGE_SHUT_OUT: "% of these pods at their arrival",
    IDLE: "GPU-hours",
    ON_BROKEN: "pods",
    ON_FOREIGN: "pods",
    OUT_OF_MEMORY: "pods",
    SHARED_SLOWDOWN: "times the duration alone",
    SHARED_MEAN: "minutes",
}
"""Figures of the picture, with their units there."""


def run(seed: int, name: str) -> dict[str, float]:
    """Run one day; return its figures."""
    day = FleetDay(seed)
    placement = WAYS[name](seed)
    outcome = day.run(placement)
    placement.close()
    pods, wait, counts = day.fleet_pods, outcome.wait_seconds / 60, day.counts
    small, large = pods.is_whole & (pods.gpus == 1), pods.gpus == LARGEST
    shared = ~pods.is_whole
    values = [
        wait[small].mean(),
        np.percentile(wait[small], 95),
        outcome.slowdown[small].mean(),
        wait[large].mean(),
        np.percentile(wait[large], 95),
        100 * counts.shut_out / large.sum(),
        wait[shared].mean(),
        np.percentile(wait[shared], 95),
        outcome.slowdown[shared].mean(),
        np.percentile(outcome.slowdown[shared], 99),
        outcome.ooms,
        counts.on_broken,
        counts.on_foreign,
        counts.beside_foreign,
        counts.idle_hours,
    ]
    return {figure: float(value) for figure, value in zip(UNITS, values, strict=True)}


Days = Mapping[str, Sequence[Mapping[str, float]]]
"""By placement, the figures of each seed."""


def rows(days: Days) -> list[dict[str, object]]:
    """Return the table: mean, lowest and highest value over the seeds."""
    table: list[dict[str, object]] = []
    for figure, unit in UNITS.items():
        cells: dict[str, object] = {"figure": f"{figure}, {unit}" if unit else figure}
        for name, seeds in days.items():
            values = [day[figure] for day in seeds]
            mean, least, most = map(shown, (float(np.mean(values)), min(values), max(values)))
            cells[name] = f"{mean} ({least} to {most})"
        table.append(cells)
    return table


def picture(days: Days) -> str:
    """Return the SVG document of the days."""
    pairs = [
        Pair(
            label=figure,
            unit=unit,
            stock=[day[figure] for day in days[STOCK]],
            ours=[day[figure] for day in days[OURS]],
        )
        for figure, unit in DRAWN.items()
    ]
    count = len(days[STOCK])
    about = (
        "20 nodes, 160 GPUs, 3,300 pods of Alibaba's trace; bars are means of "
        f"{count} simulated days, lines their spread. Less is better."
    )
    return draw("The same day, placed twice", about, pairs)


def main() -> int:
    """Run all days; print the result, and write it with its picture."""
    parser = argparse.ArgumentParser(prog="python -m bench.day", description=__doc__)
    parser.add_argument("--seeds", type=at_least(1), default=SEEDS, help="number of days")
    parser.add_argument("--quick", action="store_true", help="one day; nothing is written")
    parser.add_argument("--processes", type=at_least(1), default=os.cpu_count(), help="at once")
    options = parser.parse_args()
    seeds = range(1 if options.quick else options.seeds)
    began = time.perf_counter()
    sys.stderr.write(f"{len(seeds)} days, each placed twice: half a minute of one core each ...\n")
    with ProcessPoolExecutor(options.processes) as pool:
        running = {name: [pool.submit(run, seed, name) for seed in seeds] for name in WAYS}
        days = {name: [day.result() for day in each] for name, each in running.items()}
    report(
        "day",
        "A day with whole and shared GPUs",
        rows=rows(days),
        bounds=[],
        notes=[
            "Means of the days, the least and the most day in brackets. Less is better.",
            __doc__.strip(),
            f"{len(seeds)} days; {time.perf_counter() - began:.0f} s in all.",
        ],
        folder=None if options.quick else RESULTS,
    )
    if not options.quick:
        PICTURE.write_text(picture(days), encoding="utf-8")
        sys.stdout.write(f"\nPicture: {PICTURE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
