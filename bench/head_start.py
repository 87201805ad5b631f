"""How long after the API server's event of a pod kube-scheduler calls filter for it.

`python -m bench.head_start` needs no cluster. For each size it starts a real etcd, kube-apiserver
and kube-scheduler with the shipped configuration, registers nodes with 8 GPUs each, half of them
held, and has kube-scheduler ask `bench.noting`: one process that follows the API server with the
extender's own sources and answers as `bench.trivial` does, the names of a hundred nodes. By that
process' clock the head start of a pod is the time from the watch's event to the moment when the
first bytes of filter's question are read; below 0 where the question came first.

Pods come one after the other, each created once the one before is bound; and then many at once, so
that most wait for their turn in kube-scheduler's queue. Those that warm up do not count. All of it
shares this machine's cores; where kube-scheduler has more of them to itself, it asks sooner.

Then `bench.webhooks` asks the same process, with the same event from the API server, about pods of
its own: what it gives is measured as what kube-scheduler gives. It waits before it asks; at most as
long as the head start that nine of ten pods have that come one by one, and not at all where one of
ten has none. It never asks first: what pods of which the event is late wait for, it does not show.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import orjson

from bench.asking import Connection, percentile
from bench.machine import Bound, report
from bench.noting import HEAD_STARTS
from bench.questions import EVERYDAY
from bench.scheduler import TOOLS
from bench.scheduler_cluster import (
    PODS,
    Bindings,
    delete_pods,
    gpu_pod,
    register,
    watch_bindings,
)
from bench.trivial_process import ROOT, STATE, base_url
from bench.webhooks import SIZES, VERBS, Asker, Times, head_start_seconds, trivial_handler
from bench.world import FleetSpec, open_world
from testkit.controlplane.client import ApiClient
from testkit.controlplane.deployed import grant_rights, scheduler_config
from testkit.controlplane.plane import EXTENDER, ControlPlane
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.scheduler import kube_scheduler
from testkit.controlplane.tools import KUBERNETES_VERSION, prepare

TRIES: Final = 200
BURST: Final = 300
"""With a hundred nodes four hundred GPUs are free."""
WARM_UP: Final = 20
SHORTLIST: Final = 100
"""The extender's default of `wire.shortlist`."""
DEADLINE_SECONDS: Final = 300.0
LOOK_SECONDS: Final = 0.2
SETTLE_SECONDS: Final = 2.0
"""Time for kube-scheduler to process the end of the pods before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Head starts in one size of cluster, in seconds.

    Attributes:
        nodes: how many.
        single: those of pods that came one by one.
        burst: those of pods that came at once.
        webhooks: those that `bench.webhooks` gives.
    """

    nodes: int
    single: Sequence[float]
    burst: Sequence[float]
    webhooks: Sequence[float]


async def measure_scheduler(
    folder: Path, nodes: int, *, tries: int, burst: int
) -> tuple[list[float], list[float]]:
    """Have the real kube-scheduler ask; return the head starts of pods one by one, and at once.

    Raises:
        ProcessError: a server did not come up.
        TimeoutError: kube-scheduler did not ask about each pod, or did not place it.
    """
    async with AsyncExitStack() as stack:
        plane = ControlPlane(folder)
        stack.callback(plane.stop)
        await plane.start()
        await grant_rights(plane)
        client = await stack.enter_async_context(plane.client())
        await register(client, nodes)
        noting = noting_process(folder, plane.kubeconfig(EXTENDER))
        stack.callback(noting.kill)
        await noting.start()
        scheduler = kube_scheduler(plane, scheduler_config(base_url(noting)))
        stack.callback(scheduler.kill)
        await scheduler.start()
        async with watch_bindings(plane, client) as bindings:
            await place_singly(client, bindings, "warm-up", WARM_UP)
            await take_all(noting, WARM_UP)
            await place_singly(client, bindings, "single", tries)
        single = await take_all(noting, tries)
        await delete_pods(client)
        await asyncio.sleep(SETTLE_SECONDS)
        await client.create_all(gpu_pod(f"burst-{number:04d}", PODS, 1) for number in range(burst))
        return single, await take_all(noting, burst)


async def place_singly(client: ApiClient, bindings: Bindings, prefix: str, count: int) -> None:
    """Create pods, each once the one before is bound."""
    for number in range(count):
        name = f"{prefix}-{number:04d}"
        await client.create(gpu_pod(name, PODS, 1))
        await bindings.times([name], DEADLINE_SECONDS)


def measure_webhooks(nodes: int, tries: int) -> list[float]:
    """Have `bench.webhooks` ask; return the head starts that it gives.

    Raises:
        ProcessError: a server did not come up.
        TimeoutError: it did not ask about each pod.
    """
    with (
        open_world(FleetSpec(nodes=nodes, gpu_pods=2 * nodes), is_started=False) as world,
        trivial_handler() as trivial_url,
    ):
        noting = noting_process(world.config.parent, Path(str(world.settings["kubeconfig"])))
        try:
            asyncio.run(noting.start())
            world.url = base_url(noting)
            asker = Asker(world, trivial_url)
            times = {verb: Times() for verb in VERBS}
            for turn in range(tries):
                asker.place(EVERYDAY[turn % len(EVERYDAY)], times)
            return asyncio.run(take_all(noting, tries))
        finally:
            noting.kill()


def noting_process(folder: Path, kubeconfig: Path) -> ServerProcess:
    """Describe the process that is asked; it is ready once it knows all nodes and pods.

    Args:
        folder: where its log goes.
        kubeconfig: which API server it follows, and as whom.
    """
    port = free_port()
    options = [f"--kubeconfig={kubeconfig}", f"--port={port}", f"--shortlist={SHORTLIST}"]
    return ServerProcess(
        name="noting",
        command=[sys.executable, "-m", "bench.noting", *options],
        folder=folder,
        ready_url=f"http://127.0.0.1:{port}{STATE}",
        environment={"PYTHONPATH": str(ROOT)},
    )


def take(noting: ServerProcess) -> list[float]:
    """Take the head starts of the pods since the last time, in seconds."""
    connection = Connection(base_url(noting))
    _, body = connection.get(HEAD_STARTS)
    connection.close()
    seconds: list[float] = orjson.loads(body)
    return seconds


async def take_all(noting: ServerProcess, pods: int) -> list[float]:
    """Wait until filter was asked about so many pods; return their head starts.

    Raises:
        TimeoutError: it was not in time; the message says about how many.
    """
    seconds: list[float] = []
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(seconds) < pods:
                await asyncio.sleep(LOOK_SECONDS)
                seconds += take(noting)
    except TimeoutError as error:
        raise TimeoutError(
            f"filter was asked about {len(seconds)} of {pods} pods after {DEADLINE_SECONDS:.0f} s"
        ) from error
    return seconds


def rows(measured: Measured) -> list[dict[str, object]]:
    """Return a row for each way to ask: how head starts are spread, in milliseconds."""
    wait = head_start_seconds(measured.nodes) * 1e3
    asked = {
        "kube-scheduler, one by one": measured.single,
        f"kube-scheduler, {len(measured.burst)} at once": measured.burst,
        f"bench.webhooks, which waits {wait:.1f} ms": measured.webhooks,
    }
    return [
        {
            "nodes": measured.nodes,
            "asked by": name,
            "pods": len(seconds),
            "least ms": min(seconds) * 1e3,
            "p10 ms": percentile(seconds, 0.1) * 1e3,
            "median ms": median(seconds) * 1e3,
            "p90 ms": percentile(seconds, 0.9) * 1e3,
            "asked before the event": f"{sum(value < 0 for value in seconds) / len(seconds):.1%}",
        }
        for name, seconds in asked.items()
    ]


def bound(measured: Measured) -> Bound:
    """Return what is due: `bench.webhooks` waits no longer than nine of ten pods have."""
    return Bound(
        what=f"wait of bench.webhooks, {measured.nodes} nodes, by kube-scheduler's p10 one by one",
        limit=max(0.0, percentile(measured.single, 0.1)) * 1e3,
        measured=head_start_seconds(measured.nodes) * 1e3,
        unit="ms",
    )


def measure(nodes: int, *, tries: int, burst: int) -> Measured:
    """Measure one size of cluster."""
    with tempfile.TemporaryDirectory(prefix="idlegpu-bench-") as folder:
        single, at_once = asyncio.run(
            measure_scheduler(Path(folder), nodes, tries=tries, burst=burst)
        )
    webhooks = measure_webhooks(nodes, tries)
    return Measured(nodes=nodes, single=single, burst=at_once, webhooks=webhooks)


def load() -> str:
    """Return the load averages of 1, 5 and 15 minutes."""
    return ", ".join(f"{average:.1f}" for average in os.getloadavg())


def main() -> int:
    """Measure, print and write the result; return 1 where a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.head_start", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--tries", type=int, default=TRIES, help="pods one by one")
    parser.add_argument("--burst", type=int, default=BURST, help="pods at once")
    options = parser.parse_args()
    prepare(TOOLS)
    before = load()
    started = time.monotonic()
    found = [measure(nodes, tries=options.tries, burst=options.burst) for nodes in options.nodes]
    notes = [
        f"kube-scheduler {KUBERNETES_VERSION}; it took {(time.monotonic() - started) / 60:.0f} "
        f"minutes. The load average was {before} before and {load()} at the end (1, 5 and 15 "
        "minutes).",
        (__doc__ or "").partition("\n\n")[2].strip(),
    ]
    is_met = report(
        "head_start",
        "Head start of the extender before kube-scheduler's question",
        rows=[row for one in found for row in rows(one)],
        bounds=[bound(one) for one in found],
        notes=notes,
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
