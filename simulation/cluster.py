"""Run the whole simulated cluster in one event loop: exporter, Prometheus and API server."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from simulation.apiserver import run_apiserver
from simulation.control import SimulatedControlPlane
from simulation.exporter import run_exporter
from simulation.fleet import SimulatedFleet
from simulation.prometheus import SimulatedPrometheus, run_prometheus

_BACKFILL_SECONDS = 6600.0
"""Length of the simulated past: longer than the extender's window, for idle holders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCluster:
    """Running simulation of all servers that the extender uses.

    Attributes:
        fleet: the GPUs; may be changed at any time.
        control: pods and nodes; create, bind and end pods here or over HTTP.
        prometheus_url: base URL of the Prometheus.
        apiserver_url: base URL of the API server.
        kubeconfig: path of a kubeconfig for the API server.
    """

    fleet: SimulatedFleet
    control: SimulatedControlPlane
    prometheus_url: str
    apiserver_url: str
    kubeconfig: Path


@asynccontextmanager
async def run_cluster(
    fleet: SimulatedFleet, *, interval_seconds: float = 2.0
) -> AsyncIterator[SimulatedCluster]:
    """Run a simulated cluster on free ports of 127.0.0.1 while the context is open.

    Args:
        fleet: the nodes.
        interval_seconds: time between two scrapes.
    """
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory(prefix="idlegpu-simulation-"))
        control = SimulatedControlPlane(fleet=fleet)
        apiserver_url = await stack.enter_async_context(run_apiserver(control))
        exporter_url = await stack.enter_async_context(run_exporter(fleet))
        prometheus = SimulatedPrometheus(
            fleet=fleet, exporter_url=exporter_url, interval_seconds=interval_seconds
        )
        prometheus.backfill(_BACKFILL_SECONDS)
        prometheus_url = await stack.enter_async_context(run_prometheus(prometheus))
        kubeconfig = Path(directory) / "kubeconfig"
        kubeconfig.write_text(kubeconfig_text(apiserver_url), encoding="utf-8")
        yield SimulatedCluster(
            fleet=fleet,
            control=control,
            prometheus_url=prometheus_url,
            apiserver_url=apiserver_url,
            kubeconfig=kubeconfig,
        )


def kubeconfig_text(url: str) -> str:
    """Return a kubeconfig for an API server that requires no credentials."""
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "simulated", "cluster": {"server": url}}],
            "users": [{"name": "anonymous", "user": {}}],
            "contexts": [
                {"name": "simulated", "context": {"cluster": "simulated", "user": "anonymous"}}
            ],
            "current-context": "simulated",
        },
        sort_keys=False,
    )
