"""Measure the time until a new replica is ready, and check that it never decides from partial data.

`python -m bench.start` starts the extender on clusters of two sizes, with and without a server at
Prometheus' address. The extender is ready once /readyz answers 200, which is polled as by a
kubelet. As soon as the port is open, filter is called repeatedly: at first every candidate must
pass, and the first answer that refuses nodes must come when all nodes and all GPU pods are known.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from math import nan
from typing import Final

import orjson

from bench.machine import Bound, report
from bench.placing import Connection
from bench.processes import cpu_seconds, watching_memory
from bench.requests import Wish, create_pod, names_json, request_body
from bench.world import BenchError, FleetSpec, World, open_world, wait_until

REQUEST_SECONDS: Final = 0.05
DECIDED_SECONDS: Final = 120.0
IMPOSSIBLE: Final = Wish(annotations={"gpu-memory": "1Ti"})
"""Memory request that no card satisfies: an extender that knows the nodes refuses them all."""
DOWN: Final[Mapping[str, object]] = {"prometheus": {"url": "http://127.0.0.1:1"}}
"""Settings without a reachable Prometheus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Measurements of one start.

    Attributes:
        listening_seconds: time until the port was open.
        ready_seconds: time until /readyz answered 200.
        decided_seconds: time until the first answer that refused nodes.
        readings_seconds: time until the first readings were applied; nan without readings.
        cpu: CPU time until the extender was ready, in seconds.
        answered_before: number of answers before the first decision.
        is_complete: whether all nodes and GPU pods were known at the first decision.
        rss_mib: resident memory when ready.
        peak_mib: peak of resident memory until the first readings.
    """

    listening_seconds: float
    ready_seconds: float
    decided_seconds: float
    readings_seconds: float
    cpu: float
    answered_before: int
    is_complete: bool
    rss_mib: float
    peak_mib: float


def measure(spec: FleetSpec, *, is_down: bool) -> Start:
    """Start an extender on a cluster, and call filter as soon as its port is open.

    Args:
        spec: size and composition of the cluster.
        is_down: whether Prometheus is unreachable.
    """
    settings = DOWN if is_down else None
    with (
        open_world(spec, settings=settings, is_started=False) as world,
        ThreadPoolExecutor(1, thread_name_prefix="readyz") as pool,
    ):
        names = names_json(world.nodes())
        _, pod = create_pod(world, IMPOSSIBLE)
        body = request_body(pod, names)
        with watching_memory(lambda: world.extender_pid) as peak:
            world.start_extender()
            ready = pool.submit(world.wait_ready)
            connection = _connect(world)
            world.connections.callback(connection.close)
            listening_seconds = _since(world)
            answered, decided_seconds, is_complete = _call_until_decided(
                world, connection, body, spec.nodes
            )
            ready_seconds = ready.result()
            cpu = cpu_seconds(world.extender_pid)
            rss_mib = world.memory().rss_mib
            readings_seconds = nan if is_down else _await_readings(world)
        return Start(
            listening_seconds=listening_seconds,
            ready_seconds=ready_seconds,
            decided_seconds=decided_seconds,
            readings_seconds=readings_seconds,
            cpu=cpu,
            answered_before=answered,
            is_complete=is_complete,
            rss_mib=rss_mib,
            peak_mib=peak.rss_mib,
        )


def _since(world: World) -> float:
    return time.perf_counter() - world.started_at


def _await_readings(world: World) -> float:
    world.rounds()
    wait_until(world.has_readings, "the first readings", 120.0, poll_seconds=0.25)
    return _since(world)


def _connect(world: World) -> Connection:
    found: list[Connection] = []

    def is_open() -> bool:
        try:
            found.append(Connection(world.url))
        except OSError:
            return False
        return True

    wait_until(is_open, "the extender listens", 60.0)
    return found[0]


def _call_until_decided(
    world: World, connection: Connection, body: bytes, nodes: int
) -> tuple[int, float, bool]:
    """Call filter until it refuses nodes; return the calls before, the time, and `is_complete`.

    Raises:
        BenchError: no answer refuses nodes.
    """
    answered = 0
    while _since(world) < DECIDED_SECONDS:
        _, answer = connection.post("/filter", body)
        passed = orjson.loads(answer)["NodeNames"]
        if len(passed) < nodes:
            decided_seconds = _since(world)
            known = world.metrics()
            state = world.state()
            is_complete = (
                known["idlegpu_nodes"] == state["nodes"]
                and known["idlegpu_gpu_pods"] == state["gpu_pods"]
            )
            return answered, decided_seconds, is_complete
        answered += 1
        time.sleep(REQUEST_SECONDS)
    raise BenchError(f"no answer refused a node within {DECIDED_SECONDS:g} s")


def main() -> int:
    """Run the benchmark and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpu-pods", type=int, default=10_000)
    parser.add_argument("--all-pods", type=int, default=150_000, help="of the second cluster")
    parser.add_argument("--runs", type=int, default=2, help="number of starts on each cluster")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    bounds = []
    sizes = ((options.gpu_pods, 15.0), (options.all_pods, 60.0))
    for (pods, limit_seconds), is_down in product(sizes, (False, True)):
        spec = FleetSpec(
            nodes=options.nodes, gpu_pods=options.gpu_pods, other_pods=pods - options.gpu_pods
        )
        starts = [measure(spec, is_down=is_down) for _ in range(options.runs)]
        rows += [
            {
                "nodes": options.nodes,
                "GPU pods": options.gpu_pods,
                "all pods": pods,
                "Prometheus": "down" if is_down else "answers",
                "listens after s": start.listening_seconds,
                "decides after s": start.decided_seconds,
                "ready after s": start.ready_seconds,
                "readings after s": start.readings_seconds,
                "CPU s until ready": start.cpu,
                "RSS MiB when ready": start.rss_mib,
                "peak MiB": start.peak_mib,
                "passed on before": start.answered_before,
                "complete at first decision": start.is_complete,
            }
            for start in starts
        ]
        where = f"{pods} pods{', Prometheus down' if is_down else ''}"
        slowest = max(start.ready_seconds for start in starts)
        incomplete = sum(not start.is_complete for start in starts)
        bounds += [
            Bound(what=f"ready with {where}", limit=limit_seconds, measured=slowest, unit="s"),
            Bound(
                what=f"starts with {where} that decided from an incomplete inventory",
                limit=0,
                measured=incomplete,
                unit="starts",
            ),
        ]
    is_met = report("start", "Start", rows=rows, bounds=bounds, notes=[__doc__.strip()])
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
