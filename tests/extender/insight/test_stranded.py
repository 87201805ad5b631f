"""Free GPUs whose node lacks CPU or memory for them, and the pods that hold it."""

from dataclasses import replace

import pytest

from extender.core.nodes.host_resources import HostResources, PlacedPod
from testkit.api_requests import get
from testkit.cards import card
from testkit.others import SeesTeam
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World

GIB = 1 << 30
HOST = HostResources(128_000, 1024 * GIB, 1024 * GIB)


@pytest.fixture
def world() -> World:
    world = World()
    add(world, "full", HOST)
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


def add(world: World, name: str, host: HostResources, gpus: int = 8) -> None:
    world.register_node(name, gpus=gpus)
    world.fleet.apply_node(replace(world.fleet.nodes[name], host=host))
    world.live({name: [card() for _ in range(gpus)]}, 60)


def request(world: World, node: str, **pods: HostResources) -> None:
    """Set the host resources that pods request of a node."""
    total = HostResources()
    for name, needs in pods.items():
        world.host_pods[f"team/{name}"] = PlacedPod(node, needs)
        total = total.plus(needs)
    world.fleet.apply_host_use(node, total)
    world.live({node: [card() for _ in range(8)]}, 60)


async def test_gpus_without_cpu_are_stranded_by_the_pods_that_hold_it(
    world: World, client: Client
) -> None:
    request(
        world,
        "full",
        web=HostResources(30_000, 8 * GIB),
        batch=HostResources(80_000, 8 * GIB),
    )

    answer = await get(client, "/v1/advice")
    (found,) = answer["stranded"]

    assert (answer["stranded_gpus"], answer["stranded_total"]) == (6, 1)
    assert (found["node"], found["stranded_gpus"], found["free_gpus"]) == ("full", 6, 8)
    assert (found["lacks"], found["left"]["cpus"], found["need"]["cpus"]) == (["cpu"], 18, 8)
    assert found["is_need_assumed"]
    assert [one["pod"] for one in found["holders"]] == ["team/batch", "team/web"]
    assert found["holders"][0]["part"] == pytest.approx(0.625)
    assert "kubectl taint node full nvidia.com/gpu=present:NoSchedule" in found["remedy"]


async def test_needs_of_a_gpu_follow_the_requests_of_gpu_pods(world: World, client: Client) -> None:
    world.have("trains", "full")
    request(
        world,
        "full",
        trains=HostResources(2_000, GIB, 100 * GIB),
        logs=HostResources(1_000, GIB, 720 * GIB),
    )

    (found,) = (await get(client, "/v1/advice"))["stranded"]

    assert (found["stranded_gpus"], found["free_gpus"], found["lacks"]) == (
        5,
        7,
        ["ephemeral-storage"],
    )
    assert found["need"] == {"cpus": 2.0, "memory_bytes": GIB, "storage_bytes": 100 * GIB}
    assert [one["pod"] for one in found["holders"]] == ["team/logs"]
    assert not found["is_need_assumed"]


async def test_a_gpu_pod_with_more_than_its_share_is_named(world: World, client: Client) -> None:
    world.have("greedy", "full")
    world.have("modest", "full")
    request(
        world,
        "full",
        greedy=HostResources(100_000, GIB),
        modest=HostResources(16_000, GIB),
    )

    (found,) = (await get(client, "/v1/advice"))["stranded"]

    assert [(one["pod"], one["gpus"]) for one in found["holders"]] == [("team/greedy", 1)]
    assert found["remedy"].startswith("lower the requests of the pods listed here to ")


async def test_a_pod_with_gpus_of_another_resource_is_no_pod_without_gpus(
    world: World, client: Client
) -> None:
    small, large = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
    counts = {small: 8, large: 2}
    world.register_node("mig", allocatable=counts, capacity=counts)
    world.fleet.apply_node(replace(world.fleet.nodes["mig"], host=HOST))
    world.have("large", "mig", resource=large)
    request(world, "mig", large=HostResources(120_000, GIB))

    found = (await get(client, "/v1/advice"))["stranded"]

    assert {one["resource"] for one in found} >= {small}
    for one in found:
        assert [(pod["pod"], pod["gpus"]) for pod in one["holders"]] == [("team/large", 1)]
        assert one["remedy"].startswith("lower the requests of the pods listed here to ")


async def test_nodes_with_enough_left_or_closed_nodes_are_no_finding(
    world: World, client: Client
) -> None:
    request(world, "full", small=HostResources(4_000, GIB))
    add(world, "closed", HostResources(1_000, GIB))
    world.fleet.apply_node(replace(world.fleet.nodes["closed"], is_unschedulable=True))

    answer = await get(client, "/v1/advice")

    assert (answer["stranded_gpus"], answer["stranded"]) == (0, [])


@pytest.mark.parametrize("path", ["/v1/advice", "/v1/best", "/v1/defrag?gpus=8"])
async def test_a_node_that_states_no_cpu_and_memory_costs_no_answer(
    world: World, client: Client, path: str
) -> None:
    add(world, "empty", HostResources())

    response = await client.get(path)

    assert response.status == 200, await response.text()


async def test_pods_of_other_namespaces_keep_their_names(
    world: World, aiohttp_client: MakeClient
) -> None:
    request(world, "full", web=HostResources(120_000, GIB))
    world.host_pods["other/db"] = PlacedPod("full", HostResources(7_000, GIB))
    client = await aiohttp_client(world.build_app(viewer=SeesTeam()))

    (found,) = (await get(client, "/v1/advice"))["stranded"]

    assert [one["requests"] is None for one in found["holders"]] == [False, True]
    assert "other/db" not in str(found)
