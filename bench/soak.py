"""An hour's work in ten minutes: compressed rounds and scrapes, nodes and pods that come and go.

`python -m bench.soak` lets pods be placed all the time while Prometheus is asked six times as often
as by default, everything is listed anew every 100 seconds, nodes change, vanish and come back, and
pods of every kind are created and deleted. Looked at: whether memory stays flat once the history of
decisions is full, whether every task still does its work at the end, and the slowest answer.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from bench.asking import Connection, Placed, Scheduler
from bench.machine import Bound, report
from bench.noise import noise_server
from bench.processes import watching_memory
from bench.questions import EVERYDAY, distinct
from bench.timing import Phase, ask_noise, place_and_free
from bench.world import FleetSpec, World, open_world, wait_until

SETTINGS: Final = {
    "prometheus": {"interval_seconds": 1.7, "exporter_interval_seconds": 5},
    "cluster": {"resync_seconds": 100},
}
SCRAPE_SECONDS: Final = 2.5
REFRESH_SECONDS: Final = 1.7
CHURN_SECONDS: Final = 1.0
NODES_TOUCHED: Final = 100
NODES_AWAY: Final = 5
PODS_CHURNED: Final = 50
GPU_PODS_CHURNED: Final = 5
KEPT: Final = 200
PAUSE_SECONDS: Final = 0.05
LIMIT_MS: Final = 50.0
LIMIT_GROWTH_MIB: Final = 15.0
"""Memory that comes and goes with a round of readings is more than that; medians are compared."""
WARM_SHARE: Final = 0.4
"""By then the history of decisions is full."""
END_SHARE: Final = 0.2
END_SECONDS: Final = 20.0


@dataclass(slots=True)
class Churn:
    """What comes and goes besides the pods that are placed.

    Attributes:
        world: where.
        names: all nodes.
        away: nodes that are gone.
        others: UIDs of the pods that come and go.
    """

    world: World
    names: Sequence[str]
    away: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    _next_at: float = 0.0

    def go_on(self) -> None:
        """Change something if it is time."""
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
    """Keep everything going for so long."""
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
        ask_noise(noise, phase)
        time.sleep(PAUSE_SECONDS)
    if churn.away:
        world.control("add-nodes", nodes=churn.away)
    return phase


def lost(world: World) -> list[str]:
    """Say which background work has stopped: each must show a result anew."""
    before, log = world.state(), world.extender.log.read_text(errors="replace")

    def grows(name: str) -> Callable[[], bool]:
        return lambda: world.state()["writes"].get(name, 0) > before["writes"].get(name, 0)

    def is_followed() -> bool:
        known, state = world.metrics(), world.state()
        told = known["idlegpu_nodes"], known["idlegpu_gpu_pods"]
        return told == (state["nodes"], state["gpu_pods"])

    def asks() -> bool:
        return bool(world.state()["queries"] > before["queries"])

    checks: dict[str, Callable[[], bool]] = {
        "both watches are open": lambda: bool(world.state()["watches"] == 2),
        "nodes and pods are followed": is_followed,
        "Prometheus is asked": asks,
        "the lease is renewed": grows("PATCH leases"),
        "it says that it is ready": lambda: bool(world.get_status("/readyz")[0] == HTTPStatus.OK),
    }
    stopped = []
    for what, check in checks.items():
        try:
            wait_until(check, what, END_SECONDS, poll_seconds=0.25)
        except RuntimeError:
            stopped.append(what)
    if "Traceback" in log:
        stopped.append("its log has no traceback")
    return stopped


def main() -> int:
    """Soak, and say whether the bounds were met."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpu-pods", type=int, default=10_000)
    parser.add_argument("--all-pods", type=int, default=30_000)
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    spec = FleetSpec(
        nodes=options.nodes,
        gpu_pods=options.gpu_pods,
        other_pods=options.all_pods - options.gpu_pods,
    )
    with (
        noise_server() as noise,
        open_world(
            spec,
            settings=SETTINGS,
            scrape_seconds=SCRAPE_SECONDS,
            refresh_seconds=REFRESH_SECONDS,
        ) as world,
    ):
        world.wait_ready()
        wait_until(world.has_readings, "the first readings", 240.0, poll_seconds=0.5)
        with watching_memory(lambda: world.extender_pid) as peak:
            phase = soak(world, noise, options.seconds)
        stopped = lost(world)
    warm, end = _medians([rss for _, rss in peak.series])
    rows: list[dict[str, object]] = [
        {
            **phase.row(),
            "RSS MiB once warm": warm,
            "RSS MiB at the end": end,
            "peak RSS MiB": peak.rss_mib,
            "stopped": ", ".join(stopped) or "nothing",
        }
    ]
    bounds = [
        Bound(
            what="growth of RSS once warm", limit=LIMIT_GROWTH_MIB, measured=end - warm, unit="MiB"
        ),
        Bound(what="tasks lost", limit=0, measured=len(stopped), unit="tasks"),
        Bound(what="slowest answer", limit=LIMIT_MS, measured=max(phase.answers_ms), unit="ms"),
    ]
    is_met = report("soak", "Soak", rows=rows, bounds=bounds, notes=[__doc__.strip()])
    return 0 if is_met else 1


def _medians(series: Sequence[float]) -> tuple[float, float]:
    """Return the median memory once everything is warm, and that of the end."""
    begin, span = int(WARM_SHARE * len(series)), max(1, int(END_SHARE * len(series)))
    return statistics.median(series[begin : begin + span]), statistics.median(series[-span:])


if __name__ == "__main__":
    sys.exit(main())
