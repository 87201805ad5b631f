"""Simulated Prometheus of the benchmark with kube-scheduler, as a separate process.

`python -m bench.scheduler_prometheus --nodes 5000 --port 9090` serves metrics of the GPUs in
`bench.scheduler_names`. Values change every 10 s. Answers are those of `bench.backend_prometheus`.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from aiohttp import web

from bench.backend_fleet import BenchDevice, FleetSpec
from bench.backend_prometheus import Prometheus
from bench.scheduler_names import (
    GPUS,
    HELD,
    MEMORY_MIB,
    TENANTS,
    gpu_uuid,
    node_address,
    node_name,
    tenant_name,
)
from simulation.models import H100

SCRAPE_SECONDS: Final = 10.0
FOREIGN_EVERY: Final = 50
"""On one of so many nodes a process outside Kubernetes uses all GPUs that no pod holds."""


@dataclass(frozen=True, slots=True)
class Node:
    """Name and address of a node."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Tenant:
    """Pod that always holds GPUs."""

    namespace: str
    name: str


class SchedulerFleet:
    """GPUs of all nodes; a tenant holds the first ones of each node.

    Args:
        nodes: number of nodes.
    """

    def __init__(self, nodes: int) -> None:
        self.spec = FleetSpec(nodes=nodes)
        self.nodes = [Node(node_name(number), node_address(number)) for number in range(nodes)]
        self.devices = [
            BenchDevice(
                node=number,
                uuid=gpu_uuid(number, index),
                gpu_instance_id="",
                profile="",
                index=index,
                model=H100,
                memory_mib=MEMORY_MIB,
            )
            for number in range(nodes)
            for index in range(GPUS)
        ]
        self.tenants = [
            [Tenant(TENANTS, tenant_name(device.node))] if device.index < HELD else []
            for device in self.devices
        ]
        is_used = [
            device.index < HELD or device.node % FOREIGN_EVERY == FOREIGN_EVERY - 1
            for device in self.devices
        ]
        busy = np.random.default_rng(self.spec.seed).integers(550, 1000, len(self.devices))
        self.load = np.where(is_used, busy, 0)
        self._new: Iterable[int] = range(len(self.devices))

    def refresh(self) -> Iterable[int]:
        """Return the devices whose tenants changed: all at the first call, then none."""
        new, self._new = self._new, ()
        return new


def build_app(prometheus: Prometheus) -> web.Application:
    """Build the application of the HTTP API."""

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ready\n")

    async def refreshed(_: web.Application) -> AsyncIterator[None]:
        async def refresh() -> None:
            while True:
                await asyncio.sleep(SCRAPE_SECONDS)
                prometheus.refresh()

        task = asyncio.create_task(refresh(), name="refresh")
        yield
        task.cancel()

    app = web.Application()
    app.add_routes([*prometheus.routes(), web.get("/-/ready", ready)])
    app.cleanup_ctx.append(refreshed)
    return app


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler_prometheus")
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    prometheus = Prometheus(SchedulerFleet(arguments.nodes), scrape_seconds=SCRAPE_SECONDS)
    web.run_app(
        build_app(prometheus), host="127.0.0.1", port=arguments.port, print=None, access_log=None
    )


if __name__ == "__main__":
    main()
