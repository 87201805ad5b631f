"""Run an hour's work in ten minutes: frequent scrapes, changing nodes and pods.

`python -m bench.soak` places pods all the time while Prometheus is queried six times as often as by
default, all objects are listed again every 100 seconds, nodes change, vanish and return, and pods
of every kind are created and deleted. It checks four things: that memory stays flat once the
decision history is full (by medians, and by the upper limit of the slope of all later samples); the
peak of memory; that every background task with a visible result still works at the end; and
latencies. A longer run (`--seconds 1500 --name soak-long`) shows whether growth ends: it keeps the
medians of each tenth of the time.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from bench.machine import Bound, report
from bench.noise import noise_server
from bench.placing import Connection, Placed, Scheduler, percentile
from bench.processes import watching_memory
from bench.requests import EVERYDAY, distinct
from bench.timing import Phase, place_and_free, request_noise
from bench.world import FleetSpec, World, open_world, wait_until
from extender.insight.shadow_mode import SAMPLE_SECONDS

FloatArray: TypeAlias = npt.NDArray[np.float64]

SETTINGS: Final = {
    "prometheus": {"interval_seconds": 1.7, "exporter_interval_seconds": 5},
    "regret": {"after_seconds": 180},
}
"""History of all GPUs' activity reaches a sixth further back than `after_seconds`. This history,
some 10 MiB, must be full before memory is compared."""
SCRAPE_SECONDS: Final = 2.5
REFRESH_SECONDS: Final = 1.7
CHURN_SECONDS: Final = 1.0
JUDGED: Final = "placements are judged"
JUDGED_SECONDS: Final = SAMPLE_SECONDS + 10.0
"""Longest time until placements are judged, which happens at every sample."""
NODES_TOUCHED: Final = 100
NODES_AWAY: Final = 5
PODS_CHURNED: Final = 50
GPU_PODS_CHURNED: Final = 5
KEPT: Final = 200
PAUSE_SECONDS: Final = 0.05
LIMIT_MS: Final = 50.0
LIMIT_GROWTH_MIB: Final = 15.0
"""Medians are compared, because memory varies by more than this within a round of readings."""
LIMIT_SLOPE_MIB: Final = 90.0
"""Per hour: 15 MiB in the ten minutes into which an hour's work is compressed."""
LIMIT_P99_MS: Final = 20.0
"""Twice the bound of `bench.webhooks`: an hour's changes happen in ten minutes."""
LIMIT_RSS_MIB: Final = 1024.0
"""Two thirds of the pod's memory limit in `manifests/`."""
SLOPE_PARTS: Final = 10
SPREADS: Final = 2.0
"""Width of the slope's interval, in standard errors to each side."""
HOUR_SECONDS: Final = 3600.0
WARM_SHARE: Final = 0.4
"""Share of the run after which the decision history is full."""
END_SHARE: Final = 0.2
END_SECONDS: Final = 20.0
POLL_SECONDS: Final = 0.25


@dataclass(slots=True)
class Churn:
    """Changes of nodes and pods besides the placed pods.

    Attributes:
        world: the simulated cluster.
        names: names of all nodes.
        away: removed nodes.
        others: UIDs of the created pods.
    """

    world: World
    names: Sequence[str]
    away: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    _next_at: float = 0.0

    def go_on(self) -> None:
        """Make the next change if it is due."""
        if time.perf_counter() < self._next_at:
            return
        self._next_at = time.perf_counter() + CHURN_SECONDS
        world = self.world
        world.control("touch", nodes=NODES_TOUCHED)
        if self.away:
            world.control("add-nodes", nodes=self.away)
        self.away = random.sample(self.names, NODES_AWAY)
        world.control("drop-nodes", nodes=self.away)
        world.control("delete", uids=self.others)
        self.others = [
            *world.control("pods", kind="web", count=PODS_CHURNED, life="running")["uids"],
            *world.control("pods", kind="gpu", count=GPU_PODS_CHURNED)["uids"],
        ]


def soak(world: World, noise: Connection, seconds: float) -> Phase:
    """Place pods and change the cluster for a time."""
    phase = Phase("soak")
    churn = Churn(world, world.nodes())
    everyday, unusual = Scheduler(world, EVERYDAY), Scheduler(world, distinct(200))
    running: list[Placed] = []
    deadline = time.perf_counter() + seconds
    number = 0
    while time.perf_counter() < deadline:
        churn.go_on()
        scheduler = unusual if number % 4 == 0 else everyday
        number += 1
        phase.note(place_and_free(scheduler, KEPT, running))
        request_noise(noise, phase)
        time.sleep(PAUSE_SECONDS)
    if churn.away:
        world.control("add-nodes", nodes=churn.away)
    return phase


def lost(
    world: World, limit_seconds: float = END_SECONDS, judged_seconds: float = JUDGED_SECONDS
) -> list[str]:
    """Return the background work that has stopped: each must show a new result.

    Args:
        world: the simulated cluster and the extender.
        limit_seconds: time limit for each result except judged placements.
        judged_seconds: time limit for placements to be judged.
    """
    before, first = world.state(), world.metrics()
    read_at = _read_at(first)
    scheduler = Scheduler(world)
    placed = scheduler.place()
    # half of them are bound without a call of the extender
    world.control("pods", kind="gpu", count=2, life="mixed")

    def writes(name: str) -> Callable[[], bool]:
        return lambda: world.state()["writes"].get(name, 0) > before["writes"].get(name, 0)

    def counts(*names: str) -> Callable[[], bool]:
        return lambda: total(world.metrics(), names) > total(first, names)

    def is_followed() -> bool:
        known, state = world.metrics(), world.state()
        shown = known["idlegpu_nodes"], known["idlegpu_gpu_pods"]
        return shown == (state["nodes"], state["gpu_pods"])

    def is_reloaded() -> bool:
        world.settle({"decisions": {"history": 999}})
        return True

    def is_judged() -> bool:
        scheduler.remove([placed])  # an ended pod is evaluated at the next pass
        return counts("idlegpu_placement_activity_count", "idlegpu_regret_left_out_pods_total")()

    checks: dict[str, Callable[[], bool]] = {
        "both watches are open": lambda: bool(world.state()["watches"] == 2),
        "nodes and pods are followed": is_followed,
        "Prometheus is queried": lambda: bool(world.state()["queries"] > before["queries"]),
        "its answers are taken over": lambda: _read_at(world.metrics()) > read_at + 0.5,
        "GPUs are judged by them": lambda: _states(world.metrics()) != _states(first),
        "the lease is renewed": writes("PATCH leases"),
        "bound pods are counted": counts("idlegpu_bound_pods_total"),
        "bypassed pods are counted": counts("idlegpu_pods_bypassed_total"),
        "an event reports a placement": writes("POST events"),
        JUDGED: is_judged,
        "settings are taken over": is_reloaded,
        "/readyz answers 200": lambda: bool(world.get_status("/readyz")[0] == HTTPStatus.OK),
    }
    started, stopped = time.monotonic(), list[str]()
    while checks:
        checks = {what: check for what, check in checks.items() if not check()}
        waited = time.monotonic() - started
        late = [
            what
            for what in checks
            if waited > (judged_seconds if what == JUDGED else limit_seconds)
        ]
        stopped += late
        checks = {what: check for what, check in checks.items() if what not in late}
        time.sleep(POLL_SECONDS)
    if "Traceback" in world.extender.log.read_text(errors="replace"):
        stopped.append("its log has no traceback")
    return stopped


def total(metrics: Mapping[str, float], names: Collection[str]) -> float:
    """Return the sum of all series of some metrics.

    Example:
        >>> total({'a{x="1"}': 2.0, 'a{x="2"}': 3.0, "b": 9.0}, ["a"])
        5.0
    """
    return sum(value for name, value in metrics.items() if name.partition("{")[0] in names)


def _read_at(metrics: Mapping[str, float]) -> float:
    """Return the time of Prometheus' last answer, seconds since the epoch."""
    return time.time() - metrics['idlegpu_source_age_seconds{source="prometheus"}']


def _states(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the number of GPUs in each state."""
    return {key: value for key, value in metrics.items() if key.startswith("idlegpu_devices{")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Growth of memory in MiB an hour.

    Attributes:
        each_hour: slope of the regression line through all samples.
        spread: standard error of the slope.
    """

    each_hour: float
    spread: float

    @property
    def between(self) -> tuple[float, float]:
        """Lower and upper limit of the slope."""
        return self.each_hour - SPREADS * self.spread, self.each_hour + SPREADS * self.spread


def slope_of(series: Sequence[tuple[float, float]]) -> Slope:
    """Return the slope of samples of (seconds, MiB).

    Memory varies with each round of readings, so adjacent samples are correlated. The standard
    error is therefore a jackknife over tenths of the time.
    """
    parts = np.array_split(np.array(series), SLOPE_PARTS)

    def slope(some: Sequence[FloatArray]) -> float:
        seconds, mib = np.concatenate(some).T
        return float(np.polyfit(seconds - seconds.mean(), mib, 1)[0]) * HOUR_SECONDS

    without = np.array([slope(parts[:at] + parts[at + 1 :]) for at in range(SLOPE_PARTS)])
    spread = np.sqrt((SLOPE_PARTS - 1) * np.mean((without - without.mean()) ** 2))
    return Slope(each_hour=slope(parts), spread=float(spread))


def tenths(series: Sequence[tuple[float, float]]) -> list[float]:
    """Return the median memory of each tenth of samples of (seconds, MiB).

    Example:
        >>> tenths([(float(at), 500.0 + at // 2) for at in range(20)])[:3]
        [500.0, 501.0, 502.0]
    """
    return [float(np.median(part[:, 1])) for part in np.array_split(np.array(series), 10)]


def main() -> int:
    """Run the soak test and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpu-pods", type=int, default=10_000)
    parser.add_argument("--all-pods", type=int, default=30_000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--name", default="soak", help="base name of the result's files")
    options = parser.parse_args()
    spec = FleetSpec(
        nodes=options.nodes,
        gpu_pods=options.gpu_pods,
        other_pods=options.all_pods - options.gpu_pods,
    )
    with (
        noise_server() as noise,
        open_world(
            spec, settings=SETTINGS, scrape_seconds=SCRAPE_SECONDS, refresh_seconds=REFRESH_SECONDS
        ) as world,
    ):
        world.wait_ready()
        wait_until(world.has_readings, "the first readings", 240.0, poll_seconds=0.5)
        with watching_memory(lambda: world.extender_pid) as peak:
            phase = soak(world, noise, options.seconds)
        stopped = lost(world)
    warm, end = _medians([rss for _, rss in peak.series])
    slope = slope_of(peak.series[int(WARM_SHARE * len(peak.series)) :])
    rows: list[dict[str, object]] = [
        {
            **phase.row(),
            "RSS MiB once warm": warm,
            "RSS MiB at the end": end,
            "RSS slope MiB/h": slope.each_hour,
            "its spread": slope.spread,
            "peak RSS MiB": peak.rss_mib,
            "RSS MiB by tenths of the time": ", ".join(map("{:.0f}".format, tenths(peak.series))),
            "stopped": ", ".join(stopped) or "nothing",
        }
    ]
    bounds = [
        Bound(
            what="growth of RSS once warm", limit=LIMIT_GROWTH_MIB, measured=end - warm, unit="MiB"
        ),
        Bound(
            what="growth of RSS with time",
            limit=LIMIT_SLOPE_MIB,
            measured=slope.each_hour,
            unit="MiB/h",
            between=slope.between,
        ),
        Bound(what="most RSS", limit=LIMIT_RSS_MIB, measured=peak.rss_mib, unit="MiB"),
        Bound(what="tasks lost", limit=0, measured=len(stopped), unit="tasks"),
        Bound(
            what="p99 of the answers",
            limit=LIMIT_P99_MS,
            measured=percentile(phase.answers_ms, 0.99),
            unit="ms",
        ),
        Bound(what="slowest answer", limit=LIMIT_MS, measured=max(phase.answers_ms), unit="ms"),
    ]
    is_met = report(
        options.name, "Soak", rows=rows, bounds=bounds, notes=[__doc__.strip()], module="soak"
    )
    return 0 if is_met else 1


def _medians(series: Sequence[float]) -> tuple[float, float]:
    """Return the median memory after warm-up, and at the end."""
    begin, span = int(WARM_SHARE * len(series)), max(1, int(END_SHARE * len(series)))
    return statistics.median(series[begin : begin + span]), statistics.median(series[-span:])


if __name__ == "__main__":
    sys.exit(main())
