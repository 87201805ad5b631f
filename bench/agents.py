"""Measure the cost of 5,000 node agents to the extender, and their effect on its latency.

`python -m bench.agents` places ten pods a second, first without agents, then while 5,000 agents
report from another process (`bench.agent_swarm`). Each agent has a connection over TLS, as in the
manifests (`--plain`: without TLS), and sends a heartbeat every 10 s; together they send 500 changes
a second. CPU is that of the extender's main process, from /proc. The agents' cost is the difference
in CPU with and without them, over twenty seconds without requests.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bench.agent import cpu_seconds
from bench.machine import Bound, report
from bench.noise import noise_server
from bench.placing import Placed, Scheduler, percentile
from bench.timing import Phase, place_and_free, request_noise
from bench.world import ROOT, FleetSpec, World, open_world, wait_until
from extender.server.certificates.issuing import Wanted, renewed
from extender.server.certificates.storing import write_folder
from testkit.controlplane.process import free_port

P99_LIMIT_MS: Final = 10.0
CORE_LIMIT: Final = 20.0
REPORT_LIMIT_US: Final = 200.0
KEPT: Final = 200
CONNECT_SECONDS: Final = 240.0
SETTLE_SECONDS: Final = 15.0
REST_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Resource use of the extender over a time span.

    Attributes:
        seconds: length of the span.
        cpu_seconds: CPU time of the extender's main process; agents do not use the worker process.
        reports: reports that it received.
    """

    seconds: float
    cpu_seconds: float
    reports: float

    @property
    def core_percent(self) -> float:
        """CPU use in percent of one core."""
        return 100 * self.cpu_seconds / self.seconds


@contextmanager
def certificates(*, is_wanted: bool) -> Iterator[dict[str, str]]:
    """Write a CA and the extender's certificate to files; yield their paths, or {} without TLS."""
    if not is_wanted:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="idlegpu-bench-") as folder:
        wanted = Wanted(names=("localhost",), addresses=("127.0.0.1",))
        write_folder(Path(folder), renewed({}, wanted, datetime.now(UTC)))
        own = Path(folder) / "extender"
        files = {"cert_file": "tls.crt", "key_file": "tls.key", "ca_file": "ca.crt"}
        yield {name: str(own / file) for name, file in files.items()}


@contextmanager
def swarm(
    port: int, ca_file: str, options: argparse.Namespace
) -> Iterator["subprocess.Popen[str]"]:
    """Start the agents' process; it connects once a line is written to its standard input."""
    command = [
        *(sys.executable, "-m", "bench.agent_swarm", "--port", str(port)),
        *("--nodes", str(options.nodes), "--gpu-pods", str(options.gpu_pods)),
        *("--changes", str(options.changes), "--heartbeat", str(options.heartbeat)),
        *("--ca", ca_file),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(ROOT)
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit("the agents did not start")
            yield process
        finally:
            process.kill()


def measure(
    world: World,
    phase: Phase,
    running: list[Placed],
    scheduler: Scheduler,
    options: argparse.Namespace,
) -> Span:
    """Place pods for a time; return the extender's resource use during it."""
    pid = world.extender_pid
    with noise_server() as noise:
        before, cpu, began = reports(world), cpu_seconds(pid), time.perf_counter()
        while time.perf_counter() - began < options.seconds:
            due = time.perf_counter() + options.pause
            phase.note(place_and_free(scheduler, KEPT, running))
            request_noise(noise, phase)
            time.sleep(max(due - time.perf_counter(), 0.0))
        taken, seconds = cpu_seconds(pid) - cpu, time.perf_counter() - began
    return Span(seconds=seconds, cpu_seconds=taken, reports=reports(world) - before)


def measure_idle(world: World) -> Span:
    """Measure the extender's resource use without requests."""
    pid = world.extender_pid
    before, cpu, began = reports(world), cpu_seconds(pid), time.perf_counter()
    time.sleep(REST_SECONDS)
    taken, seconds = cpu_seconds(pid) - cpu, time.perf_counter() - began
    return Span(seconds=seconds, cpu_seconds=taken, reports=reports(world) - before)


def reports(world: World) -> float:
    """Return the number of reports that the extender has received."""
    return world.metrics().get("idlegpu_agent_reports_total", 0.0)


def connect(
    world: World, process: "subprocess.Popen[str]", nodes: int, place: Callable[[], object]
) -> tuple[float, float]:
    """Connect all agents; return the seconds that this takes, and the extender's CPU time."""
    assert process.stdin is not None
    began, cpu = time.perf_counter(), cpu_seconds(world.extender_pid)
    process.stdin.write("go\n")
    process.stdin.flush()

    def are_there() -> bool:
        place()  # the server closes a connection that is idle for long
        return world.metrics().get("idlegpu_agents", 0.0) >= nodes

    wait_until(are_there, f"{nodes} agents are connected", CONNECT_SECONDS, poll_seconds=1.0)
    return time.perf_counter() - began, cpu_seconds(world.extender_pid) - cpu


def run(
    options: argparse.Namespace,
) -> tuple[list[Phase], list[Span], list[Span], dict[str, float]]:
    """Measure both phases, and the idle extender before each."""
    port = free_port()
    spec = FleetSpec(nodes=options.nodes, gpu_pods=options.gpu_pods)
    phases = [Phase("without agents"), Phase(f"{options.nodes} agents report")]
    with (
        certificates(is_wanted=not options.plain) as own,
        swarm(port, own.get("ca_file", ""), options) as process,
        open_world(
            spec,
            settings={
                "agents": {
                    "listen": f"127.0.0.1:{port}",
                    **{name: own[name] for name in ("cert_file", "key_file") if own},
                }
            },
        ) as world,
    ):
        world.wait_ready()
        wait_until(world.has_readings, "the first readings", 240.0, poll_seconds=0.5)
        scheduler, running = Scheduler(world), list[Placed]()
        for _ in range(KEPT):
            place_and_free(scheduler, KEPT, running)
        time.sleep(SETTLE_SECONDS)
        mib = world.memory().rss_mib
        rests = [measure_idle(world)]
        spans = [measure(world, phases[0], running, scheduler, options)]
        seconds, cpu = connect(
            world, process, options.nodes, lambda: place_and_free(scheduler, KEPT, running)
        )
        time.sleep(SETTLE_SECONDS)
        rests.append(measure_idle(world))
        spans.append(measure(world, phases[1], running, scheduler, options))
        figures = {
            "connect seconds": seconds,
            "connect cpu": cpu,
            "memory": world.memory().rss_mib - mib,
        }
        figures |= {
            name.partition('"')[2].rstrip('"}'): value
            for name, value in world.metrics().items()
            if name.startswith("idlegpu_agent_refusals_total") and value
        }
    return phases, spans, rests, figures


def main() -> int:
    """Run the benchmark and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.agents", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpu-pods", type=int, default=10_000)
    parser.add_argument("--heartbeat", type=float, default=10.0, help="seconds between two")
    parser.add_argument("--changes", type=float, default=500.0, help="a second, on all nodes")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument(
        "--pause", type=float, default=0.1, help="interval between pods, in seconds"
    )
    parser.add_argument("--plain", action="store_true", help="without TLS")
    options = parser.parse_args()
    phases, spans, rests, figures = run(options)
    rows = []
    for phase, span, still in zip(phases, spans, rests, strict=True):
        rows.append(
            {
                **phase.row(),
                "reports a second": span.reports / span.seconds,
                "extender % of a core": span.core_percent,
                "at rest % of a core": still.core_percent,
            }
        )
    asides = {"connect seconds", "connect cpu", "memory", "busy"}
    refused = {name: count for name, count in figures.items() if name not in asides}
    sys.stdout.write(f"refused: {refused}, refused as busy: {figures.get('busy', 0):.0f}\n")
    more = rests[1].core_percent - rests[0].core_percent
    each = 1e4 * more * rests[1].seconds / max(rests[1].reports, 1.0)
    is_met = report(
        "agents",
        f"{options.nodes} node agents",
        rows=rows,
        bounds=[
            Bound(what="CPU for agents", limit=CORE_LIMIT, measured=more, unit="% of a core"),
            Bound(what="CPU of a report", limit=REPORT_LIMIT_US, measured=each, unit="us"),
            Bound(
                what="p99 of all answers while agents report",
                limit=P99_LIMIT_MS,
                measured=percentile(phases[1].answers_ms, 0.99),
                unit="ms",
            ),
            Bound(what="refused agents", limit=0.0, measured=sum(refused.values()), unit="agents"),
        ],
        notes=[
            __doc__.strip(),
            f"All {options.nodes} agents connected in {figures['connect seconds']:.0f} s (the "
            "API server reviews 200 tokens a second), which took "
            f"{figures['connect cpu']:.1f} s of CPU. With them the extender holds "
            f"{figures['memory']:.0f} MiB more.",
        ],
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
