"""Cluster for manual trials with real programs and simulated nodes. `make cluster` runs it.

`python -m testkit.controlplane.cluster [--once]` starts etcd, kube-apiserver, kube-scheduler,
Prometheus and the extender on a simulated fleet, prints commands to use them, and ends them on
Ctrl-C.
"""

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from simulation.control import TENANT_AGE_SECONDS
from simulation.demo_fleet import demo_fleet
from simulation.exporter import run_exporter
from simulation.fleet import SimulatedFleet
from simulation.nodes import ExporterState
from testkit.controlplane.client import ApiClient
from testkit.controlplane.deployed import ExtenderServer, grant_rights, scheduler_config
from testkit.controlplane.gobuild import BuildError
from testkit.controlplane.kubelets import kwok
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ProcessError, ServerProcess
from testkit.controlplane.scheduler import kube_scheduler
from testkit.controlplane.simulated import following, register_nodes, register_tenants
from testkit.controlplane.telemetry import PrometheusServer
from testkit.controlplane.tools import CLUSTER, binary, prepare
from testkit.controlplane.waiting import wait_for

SCRAPE_SECONDS: Final = 2.0
EXAMPLE: Final = "example"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Running cluster.

    Attributes:
        plane: etcd and kube-apiserver.
        fleet: the simulated GPUs.
        client: client of the API server with administrator rights.
        example: file with an example pod.
    """

    plane: ControlPlane
    fleet: SimulatedFleet
    extender: ExtenderServer
    prometheus: PrometheusServer
    client: ApiClient
    example: Path


@asynccontextmanager
async def run_cluster(folder: Path) -> AsyncIterator[Cluster]:
    """Run a cluster on the demo's fleet while the context is open.

    Args:
        folder: empty folder for data, logs and kubeconfigs.

    Raises:
        ProcessError: one of its programs did not start.
    """
    async with AsyncExitStack() as stack:

        async def start(process: ServerProcess) -> None:
            say(f"starting {process.name} ...")
            stack.push_async_callback(process.stop)
            await process.start()

        fleet = demo_fleet()
        silent = _wake(fleet)
        plane = ControlPlane(folder)
        stack.callback(plane.stop)
        say("starting etcd and kube-apiserver ...")
        await plane.start()
        await grant_rights(plane)
        client = await stack.enter_async_context(plane.client())
        await register_nodes(client, fleet, fleet.nodes)
        await register_tenants(client, fleet, age_seconds=TENANT_AGE_SECONDS)

        exporter_url = await stack.enter_async_context(run_exporter(fleet))
        prometheus = PrometheusServer(
            folder, f"{exporter_url}/metrics", interval_seconds=SCRAPE_SECONDS
        )
        prometheus.set_targets(fleet.nodes)
        await start(prometheus.process)
        await stack.enter_async_context(following(plane, fleet))
        await start(kwok(plane))
        extender = ExtenderServer(plane)
        stack.push_async_callback(extender.process.stop)
        say("starting the extender ...")
        await extender.ensure(_settings(prometheus.url))
        await start(kube_scheduler(plane, scheduler_config(extender.url)))
        await wait_for(
            lambda: _is_seen(extender, fleet), "the extender sees every GPU", deadline_seconds=60
        )
        for name in silent:
            fleet.silence(name)
        stack.callback(say, "stopping everything ...")
        yield Cluster(
            plane=plane,
            fleet=fleet,
            extender=extender,
            prometheus=prometheus,
            client=client,
            example=_write_example(folder),
        )


async def place_example(cluster: Cluster) -> None:
    """Apply the example pod as a user would, and print its node and the reasons."""
    await cluster.plane.kubectl("apply", "-f", str(cluster.example))
    example = pod(EXAMPLE)
    node = await cluster.client.wait_bound(example)
    decisions = await cluster.extender.get("/v1/decisions", {"pod": f"default/{EXAMPLE}"})
    (decision, *_) = decisions["decisions"]
    say(
        f"pod {EXAMPLE} is on {node}; the extender's choice was {decision['node']}, of "
        f"{decision['feasible']} nodes"
    )


def usage(cluster: Cluster) -> str:
    """Return usage instructions: how to reach the cluster and what to try."""
    url = cluster.extender.url
    devices = [device for node in cluster.fleet.nodes.values() for device in node.devices]
    instances = sum(bool(device.profile) for device in devices)
    gpus = f"{len(devices) - instances} GPUs and {instances} MIG instances"
    return textwrap.dedent(
        f"""
        The cluster runs: {len(cluster.fleet.nodes)} nodes with {gpus}.
        Real: etcd, kube-apiserver, kube-scheduler, Prometheus and the extender.
        Simulated: nodes, GPUs and the processes in pods. There is no
        kube-controller-manager: create pods, not Deployments.

          export KUBECONFIG={shlex.quote(str(cluster.plane.kubeconfig()))}
          export PATH={shlex.quote(str(binary("kubectl").parent))}:$PATH

          kubectl apply -f {shlex.quote(str(cluster.example))}
          kubectl get pods -A -o wide
          kubectl describe pod {EXAMPLE}

        What the extender knows, and why it decided so:
          {url}/page/
          {url}/v1/nodes
          {url}/v1/gpus
          {url}/v1/best?gpus=2&memory=20Gi
          {url}/v1/decisions?pod=default/{EXAMPLE}
          {url}/metrics
        Prometheus: {cluster.prometheus.url}
        Logs: {cluster.plane.folder}/*.log
        """
    )


def say(message: str) -> None:
    """Print a message at once."""
    sys.stdout.write(f"cluster: {message}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a cluster until Ctrl-C; with `--once` until one pod is placed."""
    parser = argparse.ArgumentParser(
        prog="python -m testkit.controlplane.cluster", description=__doc__
    )
    parser.add_argument("--once", action="store_true", help="place one pod, and end")
    options = parser.parse_args(arguments)
    try:
        prepare(CLUSTER)
        with contextlib.suppress(asyncio.CancelledError):  # a signal below cancelled it
            asyncio.run(_run(once=options.once))
    except (BuildError, ProcessError) as error:
        say(str(error))
        return 1
    return 0


async def _run(*, once: bool) -> None:
    task = asyncio.current_task()
    for name in (signal.SIGINT, signal.SIGTERM):
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(name, task.cancel)
    with tempfile.TemporaryDirectory(prefix="idlegpu-cluster-") as folder:
        async with run_cluster(Path(folder)) as cluster:
            sys.stdout.write(usage(cluster))
            if once:
                await place_example(cluster)
                return
            say("Ctrl-C ends it")
            await asyncio.Event().wait()


def _settings(prometheus_url: str) -> Object:
    """Return the extender's settings: the defaults, with shorter intervals for a viewer."""
    return {
        "prometheus": {
            "url": prometheus_url,
            "interval_seconds": SCRAPE_SECONDS,
            "exporter_interval_seconds": 0,
        },
        "log": {"format": "text"},
    }


def _wake(fleet: SimulatedFleet) -> list[str]:
    """Restart the exporters that have stopped, and return the names of their nodes.

    Prometheus must have samples from before an exporter stopped, so that its GPUs become stale.
    """
    silent = [name for name, node in fleet.nodes.items() if node.silent_since is not None]
    for name in silent:
        node = fleet.node(name)
        node.silent_since, node.exporter = None, ExporterState.UP
        fleet.thaw(name)
    return silent


async def _is_seen(extender: ExtenderServer, fleet: SimulatedFleet) -> bool:
    """Return whether the extender has fresh readings of all GPUs that the exporters show."""
    gpus = (await extender.get("/v1/gpus"))["gpus"]
    fresh = {(gpu["uuid"], gpu["gpu_instance_id"]) for gpu in gpus if gpu["freshness"] == "fresh"}
    shown = {
        (view.uuid, view.gpu_instance_id) for name in fleet.nodes for view in fleet.views(name)
    }
    return shown <= fresh


def _write_example(folder: Path) -> Path:
    """Write a pod that only requests `nvidia.com/gpu: 1`, and return its file."""
    path = folder / "pod.yaml"
    path.write_text(yaml.safe_dump(pod(EXAMPLE, 1), sort_keys=False))
    return path


if __name__ == "__main__":
    sys.exit(main())
