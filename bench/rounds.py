"""Measure the worker's CPU time per round of Prometheus queries: `python -m bench.rounds`.

The worker's code queries the simulated Prometheus for 40,000 cards in this process, so that its CPU
time includes nothing else. Between two rounds all readings change and some pods come and go; the
collector's clock advances ten seconds a round.
"""

import argparse
import gc
import os
import random
import statistics
import sys
import time
from typing import Final

from bench.machine import report
from bench.world import FleetSpec, World, open_world
from extender.runtime import native_memory
from extender.settings.sources import Prometheus
from extender.sources.prometheus import protocol
from extender.sources.prometheus.collector import Collector
from extender.sources.prometheus.node_identity import NodeIdentity
from extender.sources.prometheus.worker import round_frames

INTERVAL_SECONDS: Final = 10.0
YOUNGER: Final = 1
"""Generation of Python's garbage collector that the worker collects after nearly every round."""


def churn(world: World, nodes: list[str], live: list[str], pods: int) -> None:
    """Create `pods` pods and delete as many; `live` holds the UIDs of all."""
    chance = random.Random(len(live))
    created = world.control("pods", count=pods, kind="gpu")["uids"] if pods else []
    for uid in created:
        world.control("bind", uid=uid, node=chance.choice(nodes))
    gone = [live.pop(chance.randrange(len(live))) for _ in created]
    live.extend(created)
    if gone:
        world.control("delete", uids=gone)


def measure(world: World, rounds: int, pods: int) -> list[float]:
    """Return the CPU time of each round in milliseconds."""
    nodes = world.nodes()
    live = world.running_pods("gpu")
    identity = NodeIdentity(names=frozenset(nodes))
    settings = Prometheus(url=f"{world.backend_url}/prometheus", timeout_seconds=60)
    collector, begun = Collector(settings), time.time()
    spent = []
    with open(os.devnull, "wb") as pipe:  # noqa: PTH123 - a device, not a path of ours
        for number in range(rounds):
            churn(world, nodes, live, pods)
            world.control("refresh")
            before = time.process_time()
            found = collector.collect(identity, begun + INTERVAL_SECONDS * number)
            for frame in round_frames(found):
                protocol.write(pipe, frame)
            del found
            gc.collect(YOUNGER)
            native_memory.give_back()
            spent.append(1000 * (time.process_time() - before))
    collector.close()
    return spent


def main() -> int:
    """Run the benchmark and print the result; it has no bounds."""
    parser = argparse.ArgumentParser(prog="python -m bench.rounds", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpu-pods", type=int, default=10_000)
    parser.add_argument(
        "--rounds", type=int, default=19, help="number of rounds; the first one does not count"
    )
    parser.add_argument(
        "--pods",
        type=int,
        default=50,
        help="number of pods that are created and deleted in each round",
    )
    options = parser.parse_args()
    spec = FleetSpec(nodes=options.nodes, gpu_pods=options.gpu_pods)
    gc.disable()
    native_memory.prefer_small()
    with open_world(spec, is_started=False, refresh_seconds=0) as world:
        first, *spent = measure(world, options.rounds, options.pods)
    row = {
        "rounds": len(spent),
        "mean ms": statistics.fmean(spent),
        "least ms": min(spent),
        "most ms": max(spent),
        "the first ms": first,
    }
    report("rounds", "CPU of a round", rows=[row], bounds=[], notes=[__doc__ or ""], folder=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
