"""Measure how soon a freed GPU is assigned to a waiting pod, and the cost to kube-scheduler.

`python -m bench.wakeup` needs no cluster: it starts a real etcd, kube-apiserver, kube-scheduler
with the shipped configuration, kwok and Prometheus, and the extender as its own process. Each node
has one GPU, which a process outside Kubernetes uses. Pods with `idlegpu.io/require-idle` wait; then
these processes end one after the other, which only metrics show. A second after each end a pod
without GPUs is created: it waits behind the pods that kube-scheduler retries.

Three values are measured. The first is the time from when the extender's API shows the GPU as idle
to the binding of a pod there, by a watch of the API server. The second is the number of filter
calls for waiting pods per freed GPU, including the successful one. The third is the time from
creation to binding of the other pods. The ways to wake pods: `object`, the default, changes one
annotation that makes kube-scheduler retry all pods that the extender refused. `pod` changes the one
pod that has room. With `gated` the pods also have the scheduling gate `idlegpu.io/room`, which the
extender removes.

From Kubernetes 1.37 on kube-scheduler retries all pods that an extender refused whenever any pod is
bound, changed or deleted. So each binding, and each later change of the bound pod, wakes all pods
without a gate. Before 1.37 bindings do not. Pods that were refused a few times are retried only
when no other pod waits (`podMaxBackoffSeconds` of the shipped configuration); until then other pods
wait behind them. `others at first` is the longest wait of the first few pods without GPUs, which
are created one by one before the first GPU is freed.
"""

import argparse
import asyncio
import json
import os
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.machine import RESULTS, Bound, report
from bench.placing import percentile
from extender.core.request.request import GATE
from simulation.devices import Load
from simulation.exporter import run_exporter
from simulation.fleet import SimulatedFleet
from simulation.models import GIB, H100
from simulation.nodes import NodeSpec
from testkit.controlplane.client import ApiClient
from testkit.controlplane.deployed import ExtenderServer, grant_rights, scheduler_config
from testkit.controlplane.kubelets import kwok
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.plane import ADMIN, EXTENDER, ControlPlane
from testkit.controlplane.process import free_port
from testkit.controlplane.scheduler import kube_scheduler
from testkit.controlplane.simulated import following, register_nodes
from testkit.controlplane.telemetry import PrometheusServer
from testkit.controlplane.tools import (
    KUBERNETES_VERSION,
    OLDEST,
    OLDEST_KUBERNETES_VERSION,
    prepare,
)
from testkit.controlplane.waiting import wait_for

TOOLS: Final = ("etcd", "kube-apiserver", "kube-scheduler", "kubectl", "kwok", "prometheus")
WAYS: Final = ("object", "pod", "gated")
COUNTS: Final = (30, 1000)
GATED_COUNTS: Final = (*COUNTS, 5000)
"""Without a gate kube-scheduler retries thousands of pods for minutes after each binding, from 1.37
on."""
WAITING: Final = "waiting"
FOREIGN: Final = Load(utilization=0.85, memory_bytes=30 * GIB)
LOOK_SECONDS: Final = 0.05
QUIET_SECONDS: Final = 5.0
DEADLINE_SECONDS: Final = 900.0
OTHER_SECONDS: Final = 1.0
EARLY: Final = 8
"""Number of bindings, each of which wakes all refused pods, until their back-off is at its maximum.
"""
GOAL_SECONDS: Final = 3.0
GOAL_RETRIES: Final = 3.0
PATCH_PODS: Final[list[Object]] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one way to wake pods.

    Attributes:
        waiting: number of pods that wait at the start.
        freed: time from idle to bound of each freed GPU, in seconds.
        retries: filter calls for waiting pods per freed GPU.
        early: time from creation to binding, in seconds, of pods without GPUs that were created
            before the first GPU was freed.
        others: the same for those created after each freed GPU.
    """

    way: str
    waiting: int
    freed: Sequence[float]
    retries: float
    early: Sequence[float]
    others: Sequence[float]


class Bindings:
    """Times of the first binding to each node and of each pod's binding, from a watch."""

    def __init__(self) -> None:
        self.of_node: dict[str, float] = {}
        self.of_pod: dict[str, float] = {}

    async def follow(self, session: aiohttp.ClientSession) -> None:
        """Process the watch's events; resume the watch when the API server ends it."""
        parameters = {"watch": "true"}
        while True:
            async with session.get("/api/v1/namespaces/default/pods", params=parameters) as stream:
                async for line in stream.content:
                    item = json.loads(line)["object"]
                    self.take(item, time.monotonic())
                    parameters["resourceVersion"] = item["metadata"]["resourceVersion"]

    def take(self, item: Object, now: float) -> None:
        """Record the binding of a pod from a watch event."""
        node, name = item["spec"].get("nodeName"), item["metadata"]["name"]
        if node:
            self.of_pod.setdefault(name, now)
            if name.startswith(WAITING):
                self.of_node.setdefault(node, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Processes and clients of one measurement."""

    client: ApiClient
    fleet: SimulatedFleet
    extender: ExtenderServer
    bindings: Bindings

    async def is_idle(self, node: str) -> bool:
        """Return whether the extender reports a node's GPU as idle."""
        view = await self.extender.get(f"/v1/nodes/{node}")
        return bool(view["gpu_states"]["idle"])

    async def calls(self) -> float:
        """Return the number of filter calls."""
        async with self.extender.session() as session, session.get("/metrics") as response:
            text = await response.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "idlegpu_requests_total" and sample.labels["verb"] == "filter"
        )

    async def quiet(self) -> None:
        """Wait until kube-scheduler has retried all waiting pods."""
        last, since = -1.0, time.monotonic()
        while time.monotonic() - since < QUIET_SECONDS:
            calls = await self.calls()
            if calls != last:
                last, since = calls, time.monotonic()
            await asyncio.sleep(LOOK_SECONDS * 4)


def node_names(count: int) -> list[str]:
    """Return the names of the nodes."""
    return [f"node-{number:03d}" for number in range(count)]


def waiting_pod(number: int, *, is_gated: bool) -> Object:
    """Build a pod that waits for an idle GPU."""
    gates = [{"name": GATE}] if is_gated else []
    wish = {"idlegpu.io/require-idle": "true"}
    return pod(f"{WAITING}-{number:05d}", annotations=wish, schedulingGates=gates)


@asynccontextmanager
async def open_cluster(folder: Path, way: str, nodes: int, release: str) -> AsyncIterator[Cluster]:
    """Run all processes of a measurement while the context is open."""
    async with AsyncExitStack() as stack:
        plane = ControlPlane(folder, release=release)
        stack.callback(plane.stop)
        await plane.start()
        await grant_rights(plane)
        client = await stack.enter_async_context(plane.client())
        if way != "object":
            await stack.enter_async_context(client.granted(plane.users[EXTENDER], PATCH_PODS))
        fleet = SimulatedFleet()
        for number, name in enumerate(node_names(nodes)):
            address = f"10.20.{number // 250}.{number % 250 + 1}"
            fleet.add(NodeSpec(name=name, model=H100, cards=1, address=address))
            fleet.set_foreign(name, 0, FOREIGN)
        await register_nodes(client, fleet, node_names(nodes))
        port = free_port()
        await stack.enter_async_context(run_exporter(fleet, port))
        prometheus = PrometheusServer(
            folder, f"http://127.0.0.1:{port}/metrics", interval_seconds=0.5
        )
        stack.callback(prometheus.process.kill)
        await prometheus.process.start()
        prometheus.set_targets(node_names(nodes))
        kubelets = kwok(plane)
        stack.callback(kubelets.kill)
        await kubelets.start()
        await stack.enter_async_context(following(plane, fleet))
        extender = ExtenderServer(plane)
        stack.push_async_callback(extender.process.stop)
        await extender.ensure(
            {
                "prometheus": {
                    "url": prometheus.url,
                    "interval_seconds": 0.5,
                    "exporter_interval_seconds": 0,
                },
                "wake": {"target": "object" if way == "object" else "pod"},
            }
        )
        scheduler = kube_scheduler(plane, scheduler_config(extender.webhooks))
        stack.callback(scheduler.kill)
        await scheduler.start()
        bindings = await stack.enter_async_context(watch_bindings(plane))
        yield Cluster(client=client, fleet=fleet, extender=extender, bindings=bindings)


@asynccontextmanager
async def watch_bindings(plane: ControlPlane) -> AsyncIterator[Bindings]:
    """Watch all pods while the context is open."""
    bindings = Bindings()
    async with (
        aiohttp.ClientSession(
            plane.server,
            headers=plane.users[ADMIN].headers,
            connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=plane.ca_file)),
            timeout=aiohttp.ClientTimeout(total=None),
            raise_for_status=True,
            read_bufsize=1 << 22,
        ) as session,
        asyncio.TaskGroup() as group,
    ):
        follower = group.create_task(bindings.follow(session), name="watch bindings")
        yield bindings
        follower.cancel()


async def measure(
    folder: Path, way: str, *, waiting: int, freed: int, period_seconds: float, release: str
) -> Measured:
    """Measure one way.

    Raises:
        TimeoutError: no pod was bound to a freed GPU in time, or another pod was not bound.
    """
    async with open_cluster(folder, way, freed, release) as cluster:
        for name in node_names(freed):
            await _until(cluster, name, is_idle=False)
        await cluster.client.create_all(
            waiting_pod(number, is_gated=way == "gated") for number in range(waiting)
        )
        await cluster.quiet()
        early = [await _other(cluster, f"early-{number}") for number in range(EARLY)]
        await cluster.quiet()
        before = await cluster.calls()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number, name in enumerate(node_names(freed)):
                tasks.append(group.create_task(_free(cluster, name, number)))
                await asyncio.sleep(period_seconds)
        await cluster.quiet()
        calls = await cluster.calls() - before
        found = [task.result() for task in tasks]
        return Measured(
            way=way,
            waiting=waiting,
            freed=[taken for taken, _ in found],
            retries=calls / freed,
            early=early,
            others=[other for _, other in found],
        )


async def _free(cluster: Cluster, node: str, number: int) -> tuple[float, float]:
    """Free a GPU, and create another pod soon after; return the time until each is bound."""
    async with asyncio.TaskGroup() as group:
        other = group.create_task(_other(cluster, f"other-{number}"))
        cluster.fleet.set_foreign(node, 0, None)
        await _until(cluster, node, is_idle=True)
        idle_at = time.monotonic()
        bound_at = await _bound(cluster.bindings.of_node, node)
    # If kube-scheduler is retrying pods just then, a pod may be bound before the API shows the GPU
    # idle.
    return max(bound_at - idle_at, 0.0), other.result()


async def _other(cluster: Cluster, name: str) -> float:
    await asyncio.sleep(OTHER_SECONDS)
    created_at = time.monotonic()
    await cluster.client.create(pod(name, 0))
    return await _bound(cluster.bindings.of_pod, name) - created_at


async def _until(cluster: Cluster, node: str, *, is_idle: bool) -> None:
    async def is_so() -> bool:
        return node in cluster.bindings.of_node or await cluster.is_idle(node) is is_idle

    expected = f"{node} is {'idle' if is_idle else 'in use'}"
    await wait_for(is_so, expected, deadline_seconds=DEADLINE_SECONDS)


async def _bound(times: dict[str, float], name: str) -> float:
    async def at() -> float | None:
        return times.get(name)

    return await wait_for(at, f"{name} in time", deadline_seconds=DEADLINE_SECONDS)


def row(measured: Measured) -> dict[str, object]:
    """Return the table's row of one way."""
    return {
        "way": measured.way,
        "waiting": measured.waiting,
        "freed": len(measured.freed),
        "idle to bound: median s": median(measured.freed),
        "p95 s": percentile(measured.freed, 0.95),
        "filter calls per freed GPU": f"{measured.retries:.1f}",
        "other pods: median s": median(measured.others),
        "other p95 s": percentile(measured.others, 0.95),
        "others at first: max s": max(measured.early),
    }


def bounds(measured: Sequence[Measured], *, bindings_wake: bool = True) -> list[Bound]:
    """Return the bounds: on other pods always, on waiting pods if each is woken by itself.

    Args:
        measured: measurements of each way.
        bindings_wake: whether kube-scheduler retries all refused pods after each binding (1.37 and
            later). If so, retries are bounded only for gated pods.
    """
    found: list[Bound] = []
    for one in measured:
        beside = f"{one.waiting} waiting pods, {one.way}"
        found.append(
            Bound(
                what=f"p95 of other pods from creation to binding, {beside}",
                limit=GOAL_SECONDS,
                measured=percentile(one.others, 0.95),
                unit="s",
            )
        )
        if one.way != "object":
            found.append(
                Bound(
                    what=f"p95 from idle to bound, {beside}",
                    limit=GOAL_SECONDS,
                    measured=percentile(one.freed, 0.95),
                    unit="s",
                )
            )
        if one.way == "gated" or (one.way == "pod" and not bindings_wake):
            found.append(
                Bound(
                    what=f"filter calls per freed GPU, {beside}",
                    limit=GOAL_RETRIES,
                    measured=one.retries,
                    unit="",
                )
            )
    return found


def plan(ways: Sequence[str], counts: Sequence[int] | None) -> list[tuple[int, str]]:
    """Return the measurements as pairs of number of waiting pods and way, the smallest first.

    Args:
        counts: numbers of waiting pods, None for the defaults.
    """
    chosen = [
        (count, WAYS.index(way))
        for way in ways
        for count in counts or (GATED_COUNTS if way == "gated" else COUNTS)
    ]
    return [(count, WAYS[place]) for count, place in sorted(chosen)]


def main() -> int:
    """Run the benchmark, print and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.wakeup", description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--waiting",
        type=int,
        nargs="+",
        help="numbers of waiting pods, each measured separately by each way (default: "
        f"{', '.join(map(str, COUNTS))}, gated {', '.join(map(str, GATED_COUNTS))})",
    )
    parser.add_argument("--freed", type=int, default=30, help="GPUs that are freed")
    parser.add_argument("--period", type=float, default=10.0, help="seconds between two of them")
    parser.add_argument("--oldest", action="store_true", help="with the oldest kube-scheduler")
    parser.add_argument("--dry", action="store_true", help="print the table, write no files")
    options = parser.parse_args()
    planned = plan(options.ways, options.waiting)
    if min(waiting for waiting, _ in planned) < options.freed:
        parser.error(f"--waiting must be at least --freed ({options.freed}): each takes a pod")
    release = OLDEST if options.oldest else ""
    prepare([f"{release}{name}" if name.startswith("kube-") else name for name in TOOLS])
    before = os.getloadavg()[0]
    found = []
    for waiting, way in planned:
        with tempfile.TemporaryDirectory(prefix="idlegpu-bench-") as folder:
            one = asyncio.run(
                measure(
                    Path(folder),
                    way,
                    waiting=waiting,
                    freed=options.freed,
                    period_seconds=options.period,
                    release=release,
                )
            )
        found.append(one)
        sys.stdout.write(f"{row(one)}\n")
        sys.stdout.flush()
    version = OLDEST_KUBERNETES_VERSION if options.oldest else KUBERNETES_VERSION
    is_met = report(
        "wakeup-oldest" if options.oldest else "wakeup",
        "Waking waiting pods",
        rows=[row(one) for one in found],
        bounds=bounds(found, bindings_wake=not options.oldest),
        notes=[
            f"Kubernetes {version}; a GPU was freed each {options.period:g} s. The load average "
            f"was {before:.1f} before and {os.getloadavg()[0]:.1f} at the end: other load on "
            "the machine makes times longer, but not the number of calls.",
            (__doc__ or "").partition("\n\n")[2].strip(),
        ],
        folder=None if options.dry else RESULTS,
        module="wakeup",
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
