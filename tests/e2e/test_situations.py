"""Small situations that share one world, each on its own nodes."""

from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio

from simulation.devices import Load
from simulation.models import GIB
from simulation.objects import timestamp
from testkit.controlplane.client import unschedulable
from testkit.controlplane.objects import GPU, Object, pod
from testkit.controlplane.services import Services
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World, open_world

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

IDLE_ALONE: Final = {"idlegpu.io/require-idle": "true"}
HOUR: Final = 3600
LARGE_IMAGE: Final = "registry.example.com/model:1"
DNS: Final = "ip-10-1-2-3.ec2.internal"
HOST: Final = "gpu-box-7"

NAMED: Final = {
    "upper": "{}-UPPER",
    "short": "{}-short.cluster.local",
    "full.cluster.local": "{}-full",
    "internal-dns": DNS.partition(".")[0],
    "host": HOST,
}
"""Names of nodes in their exporters; braces stand for the prefix of all nodes' names."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(services: Services) -> AsyncIterator[World]:
    """Yield a world without kwok: the tests set the phases of pods."""
    prefix = "one"
    async with open_world(services, prefix) as opened:
        for name in ("a-plain", "b-pulled", "end", "promised-foreign", "promised-broken"):
            opened.add(name, 1)
        for name in ("promised-silent", "b-clock"):
            opened.add(name, 1)
        opened.add("a-faulty", 2)
        opened.add("b-sound", 4)
        opened.add("init", 4)
        for name in ("young", "past", "gke"):
            opened.add_shared(name)
        for name, called in NAMED.items():
            opened.add(name, 1, hostname=called.format(prefix))
        opened.fleet.silence(of(opened, "promised-silent"))
        opened.fleet.set_xid(of(opened, "promised-broken"), 0, 79)
        opened.fleet.set_foreign(
            of(opened, "promised-foreign"), 0, Load(utilization=0.9, memory_bytes=30 * GIB)
        )
        await opened.register()
        await describe_nodes(opened)
        await opened.start(kubelets=False)
        yield opened


def of(world: World, name: str) -> str:
    """Return a node's full name."""
    (found,) = (node for node in world.fleet.nodes if node.endswith(f"-{name}"))
    return found


async def describe_nodes(world: World) -> None:
    """Set labels, taints and addresses of nodes as their kubelets and clouds do."""

    async def change(name: str, body: Object, subresource: str = "") -> None:
        item = {"kind": "Node", "metadata": {"name": of(world, name)}}
        await world.client.patch(item, body, subresource)

    images = [{"names": [LARGE_IMAGE], "sizeBytes": 40 * GIB}]
    await change("b-pulled", {"status": {"images": images}}, "status")
    for name, kind, address in (("internal-dns", "InternalDNS", DNS), ("host", "Hostname", HOST)):
        addresses = [{"type": kind, "address": address}]
        await change(name, {"status": {"addresses": addresses}}, "status")
    node = await world.client.get({"kind": "Node", "metadata": {"name": of(world, "gke")}})
    labels: dict[str, str | None] = {
        label: None for label in node["metadata"]["labels"] if label.startswith("nvidia.com/")
    }
    labels["cloud.google.com/gke-gpu-sharing-strategy"] = "time-sharing"
    labels["cloud.google.com/gke-max-shared-clients-per-gpu"] = "4"
    await change("gke", {"metadata": {"labels": labels}})


def among(world: World, name: str, *nodes: str, gpus: int = 1, **more: Any) -> Object:
    """Build a pod that may run only on some nodes."""
    hosts = [of(world, node) for node in nodes]
    term = {"key": "kubernetes.io/hostname", "operator": "In", "values": hosts}
    required = {"nodeSelectorTerms": [{"matchExpressions": [term]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return pod(name, gpus, affinity=affinity, **more)


async def set_status(world: World, item: Object, phase: str, state: Object) -> None:
    """Set the phase and container state of a pod, as its kubelet would."""
    statuses = [
        {
            "name": "main",
            "image": "image",
            "imageID": "image",
            "restartCount": 0,
            "ready": phase == "Running",
            "state": state,
        }
    ]
    await world.client.patch(
        item, {"status": {"phase": phase, "containerStatuses": statuses}}, "status"
    )


async def test_the_image_decides_among_equal_nodes(world: World) -> None:
    await world.scheduler_synced(of(world, "b-pulled"))
    asks = among(world, "image", "a-plain", "b-pulled")
    asks["spec"]["containers"][0]["image"] = LARGE_IMAGE

    assert await world.place(asks) == of(world, "b-pulled")


@pytest.mark.parametrize(
    ("node", "annotations", "reason"),
    [
        ("promised-foreign", {}, "GPUs in use by processes outside Kubernetes"),
        ("promised-broken", {}, "too few working GPUs"),
        ("promised-silent", IDLE_ALONE, "too few GPUs known to be idle"),
    ],
)
async def test_a_node_that_is_named_in_expectation_lets_no_pod_pass(
    world: World, node: str, annotations: dict[str, str], reason: str
) -> None:
    if node == "promised-foreign":
        await world.wait_state(of(world, node), 0, "foreign")
    item = among(world, f"expects-{node}", node, annotations=annotations)
    await world.client.create(item)
    assert reason in await world.client.wait_unschedulable(item)

    for _ in range(2):
        tried = len(await world.decisions(item))
        nominated = {"status": {"nominatedNodeName": of(world, node)}}
        await world.client.patch(item, nominated, "status")
        await world.touch(of(world, node))
        await world.decided(item, more_than=tried)

    assert {decision["feasible"] for decision in await world.decisions(item)} == {0}
    waiting = await world.client.get(item)
    assert not waiting["spec"].get("nodeName")
    assert reason in unschedulable(waiting)


async def test_start_by_a_slow_node_clock_still_has_a_warm_up(world: World) -> None:
    now = world.fleet.clock()
    for node, at in (("young", now), ("past", now - HOUR)):
        (tenant,) = await world.tenants(of(world, node), 1)
        await set_status(world, tenant, "Running", {"running": {"startedAt": timestamp(at)}})
    set_at = world.fleet.clock()

    async def is_read() -> bool:
        gpus = [await world.gpu(of(world, node)) for node in ("young", "past")]
        return all(world.fleet.clock() - gpu["age_seconds"] > set_at + 1 for gpu in gpus)

    await wait_for(is_read, "readings are newer than the starts")

    assert [(await world.gpu(of(world, node)))["assumed"] for node in ("young", "past")] == [1, 1]


async def test_an_end_in_the_future_of_a_nodes_clock_frees_its_gpu_now(world: World) -> None:
    (busy,) = await world.tenants(of(world, "end"), 1, utilization=0.9, memory="60Gi")
    started = timestamp(world.fleet.clock())
    await set_status(world, busy, "Running", {"running": {"startedAt": started}})
    await world.wait_state(of(world, "end"), 0, "busy")

    ended = {"startedAt": started, "finishedAt": timestamp(world.fleet.clock() + HOUR)}
    await set_status(world, busy, "Succeeded", {"terminated": {"exitCode": 0, **ended}})

    asks = among(world, "after-its-end", "end", annotations=IDLE_ALONE)
    assert await world.place(asks) == of(world, "end")


async def test_nodes_are_known_by_whatever_name_their_exporters_call_them(world: World) -> None:
    asks = [
        among(world, f"named-{at}", node, annotations=IDLE_ALONE) for at, node in enumerate(NAMED)
    ]

    assert await world.place_all(asks) == [of(world, node) for node in NAMED]


async def test_gkes_labels_alone_show_that_gpus_are_shared(world: World) -> None:
    gke = of(world, "gke")

    def asking(name: str, memory: str) -> Object:
        return among(world, name, "gke", annotations={"idlegpu.io/gpu-memory": memory})

    assert await world.place(asking("first-16", "16Gi")) == gke
    large = asking("second-10", "10Gi")
    await world.client.create(large)
    assert "too little free GPU memory" in await world.client.wait_unschedulable(large)
    assert await world.place(asking("second-4", "4Gi")) == gke


async def test_node_stays_readable_if_an_init_container_requests_more(world: World) -> None:
    init = of(world, "init")
    more = [{"name": "prepares", "image": "image", "resources": {"limits": {GPU: "2"}}}]
    item = pod("prepared", nodeName=init, initContainers=more)
    await world.client.create(item)
    started = {"running": {"startedAt": timestamp(world.fleet.clock() - HOUR)}}
    await set_status(world, item, "Running", started)
    await world.wait_gpu(init, 0, lambda gpu: gpu["tenants"], "shows its pod")

    asks = among(world, "beside", "init", gpus=2, annotations=IDLE_ALONE)

    assert await world.place(asks) == init


async def test_a_failure_with_an_xid_at_that_time_counts_at_once(world: World) -> None:
    faulty, sound = of(world, "a-faulty"), of(world, "b-sound")
    assert await world.place(among(world, "fits-best", "a-faulty", "b-sound")) == faulty
    fails = pod("fails", nodeName=faulty)
    await world.client.create(fails)
    now = world.fleet.clock()
    world.fleet.set_xid(faulty, 0, 74)  # which alone is no fault for one GPU
    await set_status(world, fails, "Running", {"running": {"startedAt": timestamp(now)}})

    ended = {"startedAt": timestamp(now), "finishedAt": timestamp(now + 1), "exitCode": 1}
    await set_status(world, fails, "Failed", {"terminated": ended})

    async def is_counted() -> bool:
        answer = await world.services.extender.get("/v1/best", {"limit": "100"})
        return any(one["node"] == faulty and one["suspicion"] > 0 for one in answer["best"])

    await wait_for(is_counted, "the failure counts against its node")
    assert await world.place(among(world, "next", "a-faulty", "b-sound")) == sound
