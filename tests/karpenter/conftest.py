"""Control plane with the real Karpenter, whose nodes are Node objects without machines."""

import json
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from testkit.controlplane.apart import services_on
from testkit.controlplane.client import ApiClient, ApiError
from testkit.controlplane.objects import GPU, Object
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.services import Services
from testkit.controlplane.tools import binary
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World, open_world

POOLS: Final = "/apis/karpenter.sh/v1/nodepools"
CLAIMS: Final = "/apis/karpenter.sh/v1/nodeclaims"
KINDS: Final = (
    ("karpenter.sh", "v1", "NodePool"),
    ("karpenter.sh", "v1", "NodeClaim"),
    ("karpenter.sh", "v1alpha1", "NodeOverlay"),
    ("karpenter.kwok.sh", "v1alpha1", "KWOKNodeClass"),
)
CLASSES: Final = "/apis/karpenter.kwok.sh/v1alpha1/kwoknodeclasses"
DEFINITIONS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CONFLICT: Final = 409
ZONE: Final = "test-zone-a"
INSTANCE_TYPE: Final = {
    "name": "gpu-1x",
    "architecture": "amd64",
    "operatingSystems": ["linux"],
    "resources": {"cpu": "16", "memory": "128Gi", "ephemeral-storage": "100Gi", GPU: "1"},
    "offerings": [
        {
            "Price": 1.0,
            "Available": True,
            "Requirements": [
                {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
                {"key": "topology.kubernetes.io/zone", "operator": "In", "values": [ZONE]},
            ],
        }
    ],
}
NODE_CLASS: Final[Object] = {
    "apiVersion": "karpenter.kwok.sh/v1alpha1",
    "kind": "KWOKNodeClass",
    "metadata": {"name": "default"},
}
CLASS_IS_READY: Final = {
    "type": "Ready",
    "status": "True",
    "reason": "Ready",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}
"""Condition that a cloud provider sets on a NodeClass; the simulated provider does not."""
NODE_POOL: Final[Object] = {
    "apiVersion": "karpenter.sh/v1",
    "kind": "NodePool",
    "metadata": {"name": "gpus"},
    "spec": {
        "template": {
            "spec": {
                "requirements": [
                    {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}
                ],
                "nodeClassRef": {
                    "group": "karpenter.kwok.sh",
                    "kind": "KWOKNodeClass",
                    "name": "default",
                },
                "expireAfter": "Never",
            }
        },
        "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "Never"},
    },
}

_numbers = count(1)


def _definition(group: str, version: str, kind: str) -> Object:
    """Build a custom resource of Karpenter without a schema."""
    plural = f"{kind.lower()}s".replace("classs", "classes")
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Cluster",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": anything},
                    "subresources": {"status": {}},
                }
            ],
        },
    }


def karpenter(plane: ControlPlane, folder: Path) -> ServerProcess:
    """Describe Karpenter with its provider of simulated nodes; `start` it."""
    types = folder / "instance-types.json"
    types.write_text(json.dumps([INSTANCE_TYPE]))
    port = free_port()
    return ServerProcess(
        name="karpenter",
        command=[str(binary("karpenter"))],
        folder=folder,
        ready_url=f"http://127.0.0.1:{port}/readyz",
        environment={
            "KUBECONFIG": str(plane.kubeconfig()),
            "SYSTEM_NAMESPACE": "default",
            "INSTANCE_TYPES_FILE_PATH": str(types),
            "DISABLE_LEADER_ELECTION": "true",
            "HEALTH_PROBE_PORT": str(port),
            "METRICS_PORT": str(free_port()),
            "BATCH_IDLE_DURATION": "200ms",
            "BATCH_MAX_DURATION": "1s",
        },
    )


@pytest.fixture(scope="package")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Yield services on a control plane of their own: Karpenter evaluates every pod."""
    with services_on(ControlPlane(tmp_path_factory.mktemp("plane"))) as running:
        yield running


@pytest_asyncio.fixture
async def world(services: Services, tmp_path: Path) -> AsyncIterator[World]:
    """Yield an empty cluster with Karpenter and one node pool."""
    async with open_world(services, f"k{next(_numbers)}") as opened:
        for kind in KINDS:
            await _have(opened.client, DEFINITIONS, _definition(*kind))
        await _have(opened.client, CLASSES, NODE_CLASS)
        await opened.client.request(
            "PATCH",
            f"{CLASSES}/default/status",
            {"status": {"conditions": [CLASS_IS_READY]}},
            content_type="application/merge-patch+json",
        )
        await _have(opened.client, POOLS, NODE_POOL)
        program = karpenter(services.plane, tmp_path)
        await program.start()
        try:
            yield opened
        finally:
            await program.stop()
            await _release(opened.client)


async def _have(client: ApiClient, path: str, item: Object) -> None:
    """Create an object unless it exists, once the API server knows its kind."""

    async def is_there() -> bool:
        try:
            await client.request("POST", path, item)
        except ApiError as error:
            return error.status == CONFLICT
        return True

    await wait_for(is_there, f"{path} has {item['metadata']['name']}")


async def _release(client: ApiClient) -> None:
    """Remove Karpenter's finalizers after it has ended."""
    for path in (CLAIMS, "/api/v1/nodes"):
        for item in (await client.request("GET", path))["items"]:
            name = item["metadata"]["name"]
            free: Object = {"metadata": {"finalizers": None}}
            kind = "application/merge-patch+json"
            await client.request("PATCH", f"{path}/{name}", free, content_type=kind)
            if path == CLAIMS:
                await client.request("DELETE", f"{path}/{name}")
