"""Measure the time from the API server's event of a pod to kube-scheduler's filter call.

`python -m bench.head_start` needs no cluster. For each size it starts a real etcd, kube-apiserver
and kube-scheduler with the shipped configuration, registers nodes with 8 GPUs each, half of them
held, and lets kube-scheduler call `bench.noting`: a process that watches the API server with the
extender's own sources and answers the names of a hundred nodes, as `bench.trivial` does. The head
start of a pod is the time, by that process' clock, from the watch's event to the first bytes of the
filter request; it is negative if the request came first.

First pods are created one after the other, each once the previous one is bound; then many at once,
so that most wait in kube-scheduler's queue. Warm-up pods do not count. All processes share this
machine's cores; on a machine of its own kube-scheduler calls sooner.

Then `bench.webhooks` calls the same process about its own pods, and its head starts are measured in
the same way. Its pause before a call must not exceed the 10th percentile of kube-scheduler's head
starts of pods that are created one by one, and is 0 if that percentile is not positive. It never
calls before the event; so it does not show the wait of pods whose event is late.
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

from bench.machine import Bound, report
from bench.noting import HEAD_STARTS
from bench.placing import Connection, percentile
from bench.requests import EVERYDAY
from bench.scheduler import TOOLS
from bench.scheduler_cluster import PODS, Bindings, delete_pods, gpu_pod, register, watch_bindings
from bench.trivial_process import ROOT, STATE, base_url
from bench.webhooks import SIZES, VERBS, RequestSender, Times, head_start_seconds, trivial_handler
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
"""Time for kube-scheduler to process the end of the previous pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Head starts in one size of cluster, in seconds.

    Attributes:
        nodes: number of nodes.
        single: of pods that were created one by one.
        burst: of pods that were created at once.
        webhooks: of the calls of `bench.webhooks`.
    """

    nodes: int
    single: Sequence[float]
    burst: Sequence[float]
    webhooks: Sequence[float]


async def measure_scheduler(
    folder: Path, nodes: int, *, tries: int, burst: int
) -> tuple[list[float], list[float]]:
    """Measure kube-scheduler's head starts; return those of single pods and of a burst.

    Raises:
        ProcessError: a server did not come up.
        TimeoutError: kube-scheduler did not call filter for each pod, or did not place it.
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
    """Create pods, each once the previous one is bound."""
    for number in range(count):
        name = f"{prefix}-{number:04d}"
        await client.create(gpu_pod(name, PODS, 1))
        await bindings.times([name], DEADLINE_SECONDS)


def measure_webhooks(nodes: int, tries: int) -> list[float]:
    """Measure the head starts of `bench.webhooks`.

    Raises:
        ProcessError: a server did not come up.
        TimeoutError: it did not call filter for each pod.
    """
    with (
        open_world(FleetSpec(nodes=nodes, gpu_pods=2 * nodes), is_started=False) as world,
        trivial_handler() as trivial_url,
    ):
        noting = noting_process(world.config.parent, Path(str(world.settings["kubeconfig"])))
        try:
            asyncio.run(noting.start())
            world.url = base_url(noting)
            sender = RequestSender(world, trivial_url)
            times = {verb: Times() for verb in VERBS}
            for turn in range(tries):
                sender.place(EVERYDAY[turn % len(EVERYDAY)], times)
            return asyncio.run(take_all(noting, tries))
        finally:
            noting.kill()


def noting_process(folder: Path, kubeconfig: Path) -> ServerProcess:
    """Describe the process of `bench.noting`; it is ready once it knows all nodes and pods.

    Args:
        folder: folder of its log.
        kubeconfig: address and credentials of the API server.
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
    """Fetch the head starts of the pods since the last call, in seconds."""
    connection = Connection(base_url(noting))
    _, body = connection.get(HEAD_STARTS)
    connection.close()
    seconds: list[float] = orjson.loads(body)
    return seconds


async def take_all(noting: ServerProcess, pods: int) -> list[float]:
    """Wait until filter was called for `pods` pods; return their head starts.

    Raises:
        TimeoutError: the calls did not come in time; the message has their number.
    """
    seconds: list[float] = []
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(seconds) < pods:
                await asyncio.sleep(LOOK_SECONDS)
                seconds += take(noting)
    except TimeoutError as error:
        raise TimeoutError(
            f"filter was called for {len(seconds)} of {pods} pods within {DEADLINE_SECONDS:.0f} s"
        ) from error
    return seconds


def rows(measured: Measured) -> list[dict[str, object]]:
    """Return a row for each kind of call, with the distribution of head starts in milliseconds."""
    wait = head_start_seconds(measured.nodes) * 1e3
    delays = {
        "kube-scheduler, one by one": measured.single,
        f"kube-scheduler, {len(measured.burst)} at once": measured.burst,
        f"bench.webhooks, which waits {wait:.1f} ms": measured.webhooks,
    }
    return [
        {
            "nodes": measured.nodes,
            "caller": name,
            "pods": len(seconds),
            "least ms": min(seconds) * 1e3,
            "p10 ms": percentile(seconds, 0.1) * 1e3,
            "median ms": median(seconds) * 1e3,
            "p90 ms": percentile(seconds, 0.9) * 1e3,
            "called before the event": f"{sum(value < 0 for value in seconds) / len(seconds):.1%}",
        }
        for name, seconds in delays.items()
    ]


def bound(measured: Measured) -> Bound:
    """Return the bound of the pause of `bench.webhooks`: the 10th percentile of head starts."""
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
    """Run the benchmark, print and write the result; return 1 if a bound was missed."""
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
        "Head start of the extender before kube-scheduler's call",
        rows=[row for one in found for row in rows(one)],
        bounds=[bound(one) for one in found],
        notes=notes,
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
