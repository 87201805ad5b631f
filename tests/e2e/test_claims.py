"""GPUs that DRA serves: kube-scheduler allocates them, and claims show their holders.

No driver runs here. The tests create its ResourceSlices, and the exporters report no pods, so that
only claims show the pods' devices.
"""

from typing import Final

import pytest

from simulation.devices import Load
from simulation.models import GIB
from simulation.nodes import ExporterBuild
from testkit.controlplane.objects import GPU, Object, pod
from testkit.controlplane.world import World
from tests.e2e.console import by_url

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

API: Final = "resource.k8s.io/v1"
DRIVER: Final = "gpu.nvidia.com"
FOREIGN: Final = Load(utilization=0.85, memory_bytes=30 * GIB)
OUTSIDE: Final = "node(s) had GPUs in use by processes outside Kubernetes"
WITHOUT_PODS: Final = ExporterBuild(has_pods=False)


async def serve_by_dra(world: World, *nodes: str) -> None:
    """Serve the GPUs of nodes by DRA instead of the device plugin, also for `nvidia.com/gpu`."""
    gone = {"status": {offer: {GPU: None} for offer in ("capacity", "allocatable")}}
    for node in nodes:
        await world.client.patch({"kind": "Node", "metadata": {"name": node}}, gone, "status")
        devices = [
            {
                "name": f"gpu-{card.index}",
                "attributes": {"type": {"string": "gpu"}, "uuid": {"string": card.uuid}},
            }
            for card in world.fleet.node(node).cards
        ]
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        await create(
            world,
            "resourceslices",
            f"{node}-gpus",
            {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices},
        )
    ours = {"cel": {"expression": f"device.driver == {DRIVER!r}"}}
    await create(world, "deviceclasses", DRIVER, {"selectors": [ours], "extendedResourceName": GPU})


async def create(world: World, plural: str, name: str, spec: Object, space: str = "") -> None:
    kinds = {
        "resourceslices": "ResourceSlice",
        "deviceclasses": "DeviceClass",
        "resourceclaims": "ResourceClaim",
    }
    item = {"apiVersion": API, "kind": kinds[plural], "metadata": {"name": name}, "spec": spec}
    await world.client.request("POST", f"/apis/{API}/{space}{plural}", item)


async def claim(world: World, name: str, node: str, index: int) -> Object:
    """Create a claim for one GPU, and return a pod that uses only this claim."""
    uuid = world.fleet.card(node, index).uuid
    chosen = {"cel": {"expression": f"device.attributes[{DRIVER!r}].uuid == {uuid!r}"}}
    wanted = {"name": "gpu", "exactly": {"deviceClassName": DRIVER, "selectors": [chosen]}}
    spec = {"devices": {"requests": [wanted]}}
    await create(world, "resourceclaims", name, spec, "namespaces/default/")
    return pod(name, 0, resourceClaims=[{"name": "gpu", "resourceClaimName": name}])


async def held(world: World, node: str, index: int, *pods: str) -> None:
    """Wait until exactly these pods hold a GPU in the extender's view."""
    wanted = [f"default/{name}" for name in pods]
    await world.wait_gpu(node, index, lambda gpu: gpu["tenants"] == wanted, f"is held by {wanted}")


async def allocated(world: World, item: Object) -> str:
    """Return the device that kube-scheduler allocated to a pod that requests `nvidia.com/gpu`."""
    made = (await world.client.get(item))["status"]["extendedResourceClaimStatus"]
    path = f"/apis/{API}/namespaces/default/resourceclaims/{made['resourceClaimName']}"
    claim = await world.client.request("GET", path)
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    return str(result["device"])


async def test_a_pod_is_judged_by_the_gpus_that_claims_leave(world: World) -> None:
    left = world.add("left", 2, exporter=WITHOUT_PODS)
    right = world.add("right", 2, exporter=WITHOUT_PODS)
    await world.start(kubelets=False)
    await serve_by_dra(world, left, right)
    await world.fill_host(right)  # without the extender kube-scheduler prefers the other one

    by_claim = await claim(world, "by-claim", left, 1)
    assert await world.place(by_claim) == left
    await held(world, left, 1, "by-claim")
    world.fleet.set_foreign(left, 0, FOREIGN)
    await world.wait_state(left, 0, "foreign")

    requested = pod("asked")
    assert await world.place(requested) == right
    (decision, *_) = await world.decisions(requested)
    assert decision["nodes"][left]["rejection"] == OUTSIDE
    assert await allocated(world, requested) == "gpu-0"
    await held(world, right, 0, "asked")
    await held(world, right, 1)
    report = (await by_url(world).run("doctor", "-o", "json")).json
    (found,) = [one for one in report["findings"] if one["code"] == "IG306"]
    assert found["evidence"] == ["default/by-claim: claim by-claim with 1 GPU"]

    await world.client.delete(by_claim)
    await held(world, left, 1)
