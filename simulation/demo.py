"""Run the demo: send stock pods to a real extender, exactly as kube-scheduler would.

GPUs, kubelets, API server and Prometheus are simulated. The extender and its sources are real, and
unaware of the simulation.
"""

import argparse
import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from rich.console import Console
from rich.text import Text

from extender.app import start
from extender.settings.config import Prometheus, Settings
from extender.settings.wake import Wake
from simulation.cluster import SimulatedCluster, run_cluster
from simulation.demo_fleet import demo_fleet
from simulation.demo_view import LEGEND, FleetWatcher
from simulation.kube_scheduler import Placement, SimulatedScheduler
from simulation.objects import child, pod_object

GPU, SHARED, MIG = "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb"
PORT = 8888
NARROWEST = 112
"""Columns that the output needs; a narrower terminal gets them, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One step of the demo.

    Attributes:
        title: description of the pods.
        point: what the step shows.
        pods: names of the pods.
        gpus: devices by resource.
        annotations: annotations of each pod.
    """

    title: str
    point: str
    pods: tuple[str, ...]
    gpus: Mapping[str, int]
    annotations: Mapping[str, str] = field(default_factory=dict)


SCENES = (
    Scene(
        title="a stock pod: nvidia.com/gpu: 1",
        point="six nodes have free GPUs; here they are really idle, and few are left over",
        pods=("stock",),
        gpus={GPU: 1},
    ),
    Scene(
        title="the same with idlegpu.io/strategy: spread",
        point="the node with the most idle GPUs, so that the pod has few neighbours",
        pods=("notebook",),
        gpus={GPU: 1},
        annotations={"idlegpu.io/strategy": "spread"},
    ),
    Scene(
        title="4 GPUs, idlegpu.io/prefer-models: V100",
        point="an old model is good enough for this one",
        pods=("legacy-train",),
        gpus={GPU: 4},
        annotations={"idlegpu.io/prefer-models": "V100"},
    ),
    Scene(
        title="one GPU with room: idlegpu.io/gpu-memory: 60Gi",
        point="cards that are too small are refused, and so are cards that are too full",
        pods=("big-model",),
        gpus={GPU: 1},
        annotations={"idlegpu.io/gpu-memory": "60Gi"},
    ),
    Scene(
        title="a share of a GPU: nvidia.com/gpu.shared: 1, idlegpu.io/gpu-memory: 8Gi",
        point="all four nodes have free replicas; one is saturated, one has no memory left",
        pods=("inference",),
        gpus={SHARED: 1},
        annotations={"idlegpu.io/gpu-memory": "8Gi"},
    ),
    Scene(
        title="a MIG slice: nvidia.com/mig-1g.5gb: 1",
        point="the slices that are busy belong to others and are not in the way",
        pods=("slice",),
        gpus={MIG: 1},
    ),
    Scene(
        title="8 pods at once: nvidia.com/gpu.shared: 1 each",
        point="no metric shows them yet; each counts from the moment of the answer",
        pods=tuple(f"burst-{number}" for number in range(8)),
        gpus={SHARED: 1},
    ),
    Scene(
        title="a training job: nvidia.com/gpu: 6",
        point="six GPUs together; the pods placed above count although no metric shows them",
        pods=("train",),
        gpus={GPU: 6},
    ),
    Scene(
        title='3 GPUs, idlegpu.io/require-idle: "true"',
        point="this pod waits rather than share its node with foreign or unknown load",
        pods=("patient",),
        gpus={GPU: 3},
        annotations={"idlegpu.io/require-idle": "true"},
    ),
    Scene(
        title="a typo: idlegpu.io/gpu-memory: 20Gb",
        point="a warning event informs the owner; the pod is placed all the same",
        pods=("typo",),
        gpus={GPU: 1},
        annotations={"idlegpu.io/gpu-memory": "20Gb"},
    ),
)


class Demo:
    """Shows the fleet, schedules the pods of each scene, and shows the fleet again."""

    def __init__(
        self, cluster: SimulatedCluster, url: str, session: aiohttp.ClientSession, console: Console
    ) -> None:
        self._cluster = cluster
        self._watcher = FleetWatcher(cluster, url, session)
        self._console = console
        self._scheduler = SimulatedScheduler(url=url, control=cluster.control, session=session)

    async def play(self) -> None:
        """Run the whole demo once."""
        say = self._console.print
        say("\n[bold]idlegpu[/bold] places stock GPU pods on GPUs that are really idle.")
        say(
            "[yellow]Simulated[/yellow]: GPUs, kubelets, API server, Prometheus and "
            "kube-scheduler. Real: the extender.\n"
        )
        await self._watcher.wait_ready()
        say(await self._watcher.table("The fleet before"), LEGEND)
        placements = []
        for number, scene in enumerate(SCENES, start=1):
            say(f"\n[bold cyan]{number}. {scene.title}[/bold cyan]")
            say(f"   [dim]{scene.point}[/dim]")
            for name in scene.pods:
                pod = pod_object(name, scene.gpus, annotations=scene.annotations)
                placement = await self._scheduler.schedule(pod)
                placements.append(placement)
                await self._print_placement(placement, is_brief=len(scene.pods) > 1)
        await self._print_events()
        await self._watcher.wait_shown(placements)
        say(await self._watcher.table("\nThe fleet after"), LEGEND)

    async def _print_placement(self, placement: Placement, *, is_brief: bool) -> None:
        """Print a pod's node, and the reasons unless `is_brief`."""
        line = Text(f"   {placement.pod:<13}", style="bold")
        if placement.node:
            line.append(f"-> {placement.node:<16}", style="bold green")
        else:
            line.append("stays Pending      ", style="bold yellow")
        line.append(
            f" {placement.asked} candidates, {placement.feasible} feasible,"
            f" {placement.seconds * 1000:.0f} ms",
            style="dim",
        )
        self._console.print(line)
        if not is_brief:
            for text in await self._watcher.why(placement):
                self._console.print(f"      {text}")

    async def _print_events(self) -> None:
        """Print the Events that the extender wrote."""
        events = await self._watcher.wait_events()
        self._console.print("\n[bold]What the owner of a pod sees[/bold] (kubectl describe pod)")
        for event in events:
            subject = child(event, "regarding")
            self._console.print(
                f"   {event.get('type')}  {event.get('reason')}  {subject.get('name')}: "
                f"{event.get('note')}"
            )


def _free_port(wanted: int) -> int:
    """Return the port if it is free, else 0 for any port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return 0
    return wanted


@asynccontextmanager
async def playing(console: Console, port: int = 0) -> AsyncIterator[str]:
    """Play the demo, then keep serving while the context is open.

    Args:
        console: receives the output.
        port: port of the extender on 127.0.0.1, 0 for any.

    Yields:
        URL of the extender.
    """
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(run_cluster(demo_fleet()))
        settings = Settings(
            listen=f"127.0.0.1:{port}",
            kubeconfig=cluster.kubeconfig,
            prometheus=Prometheus(url=cluster.prometheus_url, interval_seconds=1.0),
            wake=Wake(enabled=False),  # the simulated kube-scheduler tries each pod once
        )
        extender = await stack.enter_async_context(start(settings))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = extender.addresses[0]
        await Demo(cluster, url, session, console).play()
        yield url


async def run(*, once: bool) -> None:
    """Run the demo; then serve until interrupted, unless `once`."""
    console = Console(highlight=False)
    console.width = max(console.width, NARROWEST)
    async with playing(console, 0 if once else _free_port(PORT)) as url:
        if once:
            return
        console.print(
            "\n[bold]Still serving.[/bold] Look around, Ctrl-C ends it:\n"
            f"   {url}/page/ in a browser\n"
            f"   curl {url}/v1/nodes/gpu-h100-03\n"
            f"   curl '{url}/v1/best?gpus=2&memory=20Gi'\n"
            f"   curl '{url}/v1/decisions?pod=default/stock'\n"
            f"   curl {url}/metrics"
        )
        await asyncio.Event().wait()


def main() -> None:
    """Run the demo from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="end after the run")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # the demo shows what the log would
    try:
        asyncio.run(run(once=arguments.once))
    except KeyboardInterrupt:
        print("\nbye")  # noqa: T201 - the answer to Ctrl-C


if __name__ == "__main__":
    main()
