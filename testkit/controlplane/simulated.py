"""Simulated fleet in a real cluster: its nodes, its pods, and their effects on GPUs."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final

from kubernetes_asyncio.config import new_client_from_config

from simulation.fleet import SimulatedFleet
from simulation.follow import follow_pods
from simulation.objects import node_object, tenant_pods
from testkit.controlplane.client import ApiClient
from testkit.controlplane.plane import ControlPlane

RETRY_SECONDS: Final = 0.1


async def register_nodes(client: ApiClient, fleet: SimulatedFleet, names: Iterable[str]) -> None:
    """Create the Node objects, as the kubelets would."""
    now = fleet.clock()
    await client.create_all(node_object(fleet.node(name), now=now) for name in names)


async def register_tenants(client: ApiClient, fleet: SimulatedFleet, *, age_seconds: float) -> None:
    """Create the fleet's initial pods as running since `age_seconds` ago.

    Call it before kwok runs and before the fleet watches the pods.
    """
    pods = tenant_pods(fleet, started_at=fleet.clock() - age_seconds)
    for namespace in sorted({placed[0].pod.namespace for placed in fleet.placements.values()}):
        await client.create_namespace(namespace)
    for pod in pods:
        await client.create(pod)
        # the API server drops the status at creation
        await client.patch(pod, {"status": pod["status"]}, "status")


@asynccontextmanager
async def following(plane: ControlPlane, fleet: SimulatedFleet) -> AsyncIterator[None]:
    """Watch pods, and let bound ones load the fleet's GPUs until they end."""
    async with await new_client_from_config(str(plane.kubeconfig())) as api_client:
        follower = asyncio.create_task(
            follow_pods(api_client, fleet, retry_seconds=RETRY_SECONDS), name="follow pods"
        )
        try:
            yield
        finally:
            follower.cancel()
            await asyncio.wait([follower])
        if not follower.cancelled():
            follower.result()  # report a failure of the watch
