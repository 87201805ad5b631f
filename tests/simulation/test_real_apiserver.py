"""The fleet's objects in a real API server: accepted as they are, and followed there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kubernetes_asyncio.config import new_client_from_config

from simulation.demo_fleet import demo_fleet
from simulation.follow import follow_pods
from simulation.objects import node_object, pod_object, tenant_pods
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.waiting import wait_for

pytestmark = pytest.mark.e2e


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[ControlPlane]:
    control_plane = ControlPlane(tmp_path)
    await control_plane.start()
    yield control_plane
    control_plane.stop()


async def test_a_real_api_server_takes_nodes_and_tenants_and_the_fleet_follows(
    plane: ControlPlane,
) -> None:
    fleet = demo_fleet()
    tenants = list(tenant_pods(fleet, started_at=fleet.clock()))
    placed = set(fleet.placements)
    namespaces = {placement[0].pod.namespace for placement in fleet.placements.values()}

    async with (
        plane.client() as api,
        await new_client_from_config(str(plane.kubeconfig())) as api_client,
        asyncio.TaskGroup() as tasks,
    ):
        await api.create_all([node_object(node) for node in fleet.nodes.values()])
        for namespace in namespaces:
            await api.create_namespace(namespace)
        await api.create_all(tenants)
        task = tasks.create_task(follow_pods(api_client, fleet, retry_seconds=0.1))

        async def are_adopted() -> bool:
            return len(fleet.placements) == len(placed) and not placed & set(fleet.placements)

        await wait_for(are_adopted, "every tenant is known by the API server's UID")

        late = pod_object("late", 2)
        late["spec"] = {**late["spec"], "nodeName": "gpu-h100-01"}  # type: ignore[dict-item] # an object
        await api.create(late)

        async def is_placed() -> bool:
            return fleet.device("gpu-h100-01", 1).used_replicas == 1

        await wait_for(is_placed, "the bound pod holds two GPUs")
        nodes = await api.request("GET", "/api/v1/nodes")
        task.cancel()

    allocatable = {
        node["metadata"]["name"]: node["status"]["allocatable"] for node in nodes["items"]
    }
    assert allocatable["gpu-l40s-mps-01"]["nvidia.com/gpu.shared"] == "8"
    assert allocatable["gpu-a100-mig-01"]["nvidia.com/mig-1g.5gb"] == "4"
    assert fleet.device("gpu-h100-01", 2).used_replicas == 0
