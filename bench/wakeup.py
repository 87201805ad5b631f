"""How soon a freed GPU is given to one of many waiting pods, and what that costs kube-scheduler.

`python -m bench.wakeup` needs no cluster: it starts a real etcd, kube-apiserver, kube-scheduler
with the shipped configuration, kwok and Prometheus, and the extender as its own process. Each node
has one GPU, which a process outside Kubernetes uses. So many pods with `idlegpu.io/require-idle`
wait; then one such process after the other ends, which only metrics show. A second after each a pod
without GPUs is created: it waits behind the pods that kube-scheduler tries again.

Measured are the time from the moment when the extender's API shows the GPU idle to the binding of a
pod there, by a watch of the API server; how often kube-scheduler asked filter about a
waiting pod, for each freed GPU, the time that helped included; and the time from the creation of
the other pods to their binding. The ways: `object` is the default, one annotation that has
kube-scheduler try all pods that we refused. `pod` changes the one pod that there is room for. With
`gated` the pods have the scheduling gate `idlegpu.io/room`, too, which this way takes from them.

From Kubernetes 1.37 on kube-scheduler tries all pods that an extender refused whenever any pod is
bound, changes or goes: each binding, and what becomes of the pod after it, is a wake for all that
have no gate, whatever we do. Before 1.37 bindings are not. Pods that have been refused a few times
are tried while nothing else is to be placed (`podMaxBackoffSeconds` of the shipped configuration);
while they have not, others wait behind them: `others at first` is the longest that one of the
first few pods without GPUs waited, which are created one by one before the first GPU is freed.
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

from bench.asking import percentile
from bench.machine import RESULTS, Bound, report
from extender.core.request.scheduled_condition import GATE
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
"""Without a gate kube-scheduler tries thousands for minutes after each binding, from 1.37 on."""
WAITING: Final = "waiting"
FOREIGN: Final = Load(utilization=0.85, memory_bytes=30 * GIB)
LOOK_SECONDS: Final = 0.05
QUIET_SECONDS: Final = 5.0
DEADLINE_SECONDS: Final = 900.0
OTHER_SECONDS: Final = 1.0
EARLY: Final = 8
"""So many bindings that wake all refused pods make their back-off the longest there is."""
GOAL_SECONDS: Final = 3.0
GOAL_RETRIES: Final = 3.0
PATCH_PODS: Final[list[Object]] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one way came to.

    Attributes:
        way: one of `WAYS`.
        waiting: pods that waited at first.
        freed: from idle to bound, in seconds, of each freed GPU.
        retries: questions about waiting pods, for each freed GPU.
        early: from creation to binding, in seconds, of pods without GPUs before any was freed ...
        others: ... and after each.
    """

    way: str
    waiting: int
    freed: Sequence[float]
    retries: float
    early: Sequence[float]
    others: Sequence[float]


class Bindings:
    """When a pod was first bound to a node, and when each pod was bound, by a watch."""

    def __init__(self) -> None:
        self.of_node: dict[str, float] = {}
        self.of_pod: dict[str, float] = {}

    async def follow(self, session: aiohttp.ClientSession) -> None:
        """Take the watch's events; where the API server ends it, from there on again."""
        parameters = {"watch": "true"}
        while True:
            async with session.get("/api/v1/namespaces/default/pods", params=parameters) as stream:
                async for line in stream.content:
                    item = json.loads(line)["object"]
                    self.take(item, time.monotonic())
                    parameters["resourceVersion"] = item["metadata"]["resourceVersion"]

    def take(self, item: Object, now: float) -> None:
        """Take a pod as the watch shows it."""
        node, name = item["spec"].get("nodeName"), item["metadata"]["name"]
        if node:
            self.of_pod.setdefault(name, now)
            if name.startswith(WAITING):
                self.of_node.setdefault(node, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What runs during one measurement."""

    client: ApiClient
    fleet: SimulatedFleet
    extender: ExtenderServer
    bindings: Bindings

    async def is_idle(self, node: str) -> bool:
        """Return whether the extender takes a node's GPU to be idle."""
        view = await self.extender.get(f"/v1/nodes/{node}")
        return bool(view["gpu_states"]["idle"])

    async def questions(self) -> float:
        """Return how often filter was asked."""
        async with self.extender.session() as session, session.get("/metrics") as response:
            text = await response.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "idlegpu_requests_total" and sample.labels["verb"] == "filter"
        )

    async def quiet(self) -> None:
        """Wait until kube-scheduler has tried all that it wants to try."""
        last, since = -1.0, time.monotonic()
        while time.monotonic() - since < QUIET_SECONDS:
            asked = await self.questions()
            if asked != last:
                last, since = asked, time.monotonic()
            await asyncio.sleep(LOOK_SECONDS * 4)


def node_names(count: int) -> list[str]:
    """Return the names of the nodes."""
    return [f"node-{number:03d}" for number in range(count)]


def waiting_pod(number: int, *, is_gated: bool) -> Object:
    """Describe a pod that waits for an idle GPU."""
    gates = [{"name": GATE}] if is_gated else []
    wish = {"idlegpu.io/require-idle": "true"}
    return pod(f"{WAITING}-{number:05d}", annotations=wish, schedulingGates=gates)


@asynccontextmanager
async def open_cluster(folder: Path, way: str, nodes: int, release: str) -> AsyncIterator[Cluster]:
    """Have everything run while the context is open."""
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
    """Follow all pods while the context is open."""
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
        TimeoutError: a freed GPU was not taken in time, or another pod not bound.
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
        before = await cluster.questions()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number, name in enumerate(node_names(freed)):
                tasks.append(group.create_task(_free(cluster, name, number)))
                await asyncio.sleep(period_seconds)
        await cluster.quiet()
        asked = await cluster.questions() - before
        found = [task.result() for task in tasks]
        return Measured(
            way=way,
            waiting=waiting,
            freed=[taken for taken, _ in found],
            retries=asked / freed,
            early=early,
            others=[other for _, other in found],
        )


async def _free(cluster: Cluster, node: str, number: int) -> tuple[float, float]:
    """Free a GPU, and create another pod soon after; return how long each took to be bound."""
    async with asyncio.TaskGroup() as group:
        other = group.create_task(_other(cluster, f"other-{number}"))
        cluster.fleet.set_foreign(node, 0, None)
        await _until(cluster, node, is_idle=True)
        idle_at = time.monotonic()
        bound_at = await _bound(cluster.bindings.of_node, node)
    # Where kube-scheduler is trying all of them just then, it may be bound before that is seen.
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
    """Return the row of one way."""
    return {
        "way": measured.way,
        "waiting": measured.waiting,
        "freed": len(measured.freed),
        "idle to bound: median s": median(measured.freed),
        "p95 s": percentile(measured.freed, 0.95),
        "questions a freed GPU": f"{measured.retries:.1f}",
        "other pods: median s": median(measured.others),
        "other p95 s": percentile(measured.others, 0.95),
        "others at first: max s": max(measured.early),
    }


def bounds(measured: Sequence[Measured], *, bindings_wake: bool = True) -> list[Bound]:
    """Return what is due: of other pods always, of those that wait where each is woken by itself.

    Args:
        measured: what each way came to.
        bindings_wake: kube-scheduler tries all refused pods after each binding (1.37 and later):
            then we say only how often those with a gate are tried.
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
                    what=f"questions a freed GPU, {beside}",
                    limit=GOAL_RETRIES,
                    measured=one.retries,
                    unit="",
                )
            )
    return found


def plan(ways: Sequence[str], counts: Sequence[int] | None) -> list[tuple[int, str]]:
    """Return how many pods are to wait by which way, the smallest first.

    Args:
        ways: some of `WAYS`.
        counts: pods that wait, None for what is measured by default.
    """
    chosen = [
        (count, WAYS.index(way))
        for way in ways
        for count in counts or (GATED_COUNTS if way == "gated" else COUNTS)
    ]
    return [(count, WAYS[place]) for count, place in sorted(chosen)]


def main() -> int:
    """Measure, print and write the result; return 1 where a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.wakeup", description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--waiting",
        type=int,
        nargs="+",
        help="pods that wait, by each way; each count is measured by itself (default: "
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
            f"was {before:.1f} before and {os.getloadavg()[0]:.1f} at the end: times are the "
            "longer the more else ran on the machine, questions are not.",
            (__doc__ or "").partition("\n\n")[2].strip(),
        ],
        folder=None if options.dry else RESULTS,
        module="wakeup",
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
