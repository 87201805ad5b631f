"""Free GPUs whose node lacks CPU or memory for them, and the pods that hold it."""

from dataclasses import replace

import pytest

from extender.core.nodes.host_resources import HostResources, PlacedPod
from extender.core.nodes.inventory import ClaimedDevice, NodeRecord, PodPhase
from extender.core.steps import finish
from extender.insight import stranded
from extender.insight.stranded import (
    TypicalNeeds,
    count_stranded,
    count_usable,
    find_needs,
    find_stranded,
)
from testkit.api_requests import get
from testkit.builders import GPU, gpu, node
from testkit.cards import card
from testkit.others import SeesTeam
from testkit.webhook_requests import Client, MakeClient
from testkit.world import SHARED, World

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
        web=HostResources(30_000, 256 * GIB),
        batch=HostResources(80_000, 256 * GIB, 9 * GIB),
    )

    answer = await get(client, "/v1/advice")

    assert (answer["stranded_gpus"], answer["stranded_total"]) == (6, 1)
    assert answer["stranded"] == [
        {
            "node": "full",
            "resource": GPU,
            "stranded_gpus": 6,
            "free_gpus": 8,
            "lacks": ["cpu"],  # there is memory left for just 8 GPUs
            "left": {"cpus": 18.0, "memory_bytes": 512 * GIB, "storage_bytes": 1015 * GIB},
            "need": {"cpus": 8.0, "memory_bytes": 64 * GIB, "storage_bytes": 0},
            "is_need_assumed": True,
            "holders_total": 2,
            "holders": [
                {
                    "pod": "team/batch",
                    "gpus": 0,
                    "part": 0.625,
                    "requests": {"cpus": 80.0, "memory_bytes": 256 * GIB, "storage_bytes": 9 * GIB},
                },
                {
                    "pod": "team/web",
                    "gpus": 0,
                    "part": pytest.approx(30 / 128),
                    "requests": {"cpus": 30.0, "memory_bytes": 256 * GIB, "storage_bytes": 0},
                },
            ],
            "remedy": "keep pods without GPUs off the node (kubectl taint node full "
            "nvidia.com/gpu=present:NoSchedule), and restart the pods listed here elsewhere",
        }
    ]


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


@pytest.mark.parametrize(
    ("first", "remedy"),
    [
        (
            "trains",
            "lower the requests of the pods listed here to 60 CPUs, 2 GiB of memory, 3 GiB of "
            "storage for each GPU",
        ),
        ("web", "keep pods without GPUs off the node"),
    ],
)
async def test_the_remedy_is_for_the_pod_that_holds_most(
    world: World, client: Client, first: str, remedy: str
) -> None:
    world.have("trains", "full")
    cpus = {"trains": 60_000, "web": 40_000 if first == "trains" else 50_000}
    needs = {name: HostResources(it, 2 * GIB, 3 * GIB) for name, it in cpus.items()}
    request(world, "full", **needs)

    (found,) = (await get(client, "/v1/advice"))["stranded"]

    assert found["holders"][0]["pod"] == f"team/{first}"
    assert found["remedy"].startswith(remedy)


async def test_at_most_ten_pods_are_listed_equal_ones_by_name(world: World, client: Client) -> None:
    pods = {f"p{number:02}": HostResources(9_000) for number in reversed(range(12))}
    request(world, "full", **pods)

    (found,) = (await get(client, "/v1/advice"))["stranded"]

    assert found["holders_total"] == 12
    assert [one["pod"] for one in found["holders"]] == [f"team/p{at:02}" for at in range(10)]


async def test_nodes_with_most_stranded_gpus_come_first(world: World, client: Client) -> None:
    for name, left in (("z", 16_000), ("one", 56_000), ("a", 16_000)):
        add(world, name, HOST)
        request(world, name, **{f"web-{name}": HostResources(128_000 - left)})
    request(world, "full", idle=HostResources())

    answer = await get(client, "/v1/advice")
    named = await get(client, "/v1/advice", node="one")

    found = [(one["node"], one["stranded_gpus"]) for one in answer["stranded"]]
    assert found == [("a", 6), ("z", 6), ("one", 1)]
    assert [one["node"] for one in named["stranded"]] == ["one"]


async def test_replicas_are_stranded_as_whole_gpus(world: World, client: Client) -> None:
    world.add_shared("s", 4, gpus=2)
    host = HostResources(16_000, 1024 * GIB)
    world.fleet.apply_node(replace(world.fleet.nodes["s"], host=host))
    world.fleet.apply_host_use("s", HostResources(13_000))
    world.live({"s": [card(), card()]}, 60)

    (found,) = (await get(client, "/v1/advice", node="s"))["stranded"]

    assert (found["resource"], found["stranded_gpus"], found["free_gpus"]) == (SHARED, 1, 2)
    assert found["need"]["cpus"] == 1.0
    assert found["remedy"] == (
        "no pod holds more than its even share: the node has too little for its GPUs"
    )


async def test_a_gpu_pod_with_more_than_its_share_is_named(world: World, client: Client) -> None:
    world.have("greedy", "full")
    world.have("modest", "full")
    request(world, "full", greedy=HostResources(100_000, GIB), modest=HostResources(16_000, GIB))

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


def test_a_node_that_goes_meanwhile_has_no_pods(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stranded, "_PIECE_PODS", 1)
    request(world, "full", web=HostResources(120_000))
    steps = find_stranded(world.fleet, world.host_pods)
    next(steps)
    world.fleet.remove_node("full")

    (found,) = finish(steps)

    assert (found.node, found.holders) == ("full", ())


def test_gpus_of_claims_count_as_the_pods_gpus(world: World) -> None:
    claimed = (ClaimedDevice(uuid="GPU-full-0"), ClaimedDevice(uuid="GPU-full-1"))
    world.bind("trains", "full", namespace="team", resources={}, claimed=claimed, has_claims=True)
    request(world, "full", trains=HostResources(120_000))

    (found,) = finish(find_stranded(world.fleet, world.host_pods))

    assert [(one.key, one.gpus) for one in found.holders] == [("team/trains", 2)]


def test_fleets_are_searched_in_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece in ("_PIECE_PODS", "_PIECE_GPU_PODS", "_PIECE_NODES"):
        monkeypatch.setattr(stranded, piece, 2)
    for name in ("a", "b", "c", "d"):
        add(world, name, HOST)
    for number in range(5):
        world.have(f"p{number}", "full")
        world.host_pods[f"team/p{number}"] = PlacedPod("full", HostResources(25_000))
    world.fleet.apply_host_use("full", HostResources(125_000))
    world.live({"full": [card() for _ in range(8)]}, 60)

    assert sum(1 for _ in find_stranded(world.fleet, world.host_pods)) == 2 + 2 + 2


# --- usable GPUs, and what a GPU needs ------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "room", "usable", "left_out"),
    [
        pytest.param(2, (9_000, 20), 4, 2, id="cpu-is-scarce"),
        pytest.param(2, (90_000, 12), 3, 3, id="memory-is-scarce"),
        pytest.param(6, (9_000, 20), 2, 0, id="enough-of-both"),
        pytest.param(9, (0, 0), 0, 0, id="more-are-held-than-offered"),
    ],
)
def test_a_node_has_as_many_usable_gpus_as_its_scarcest_resource_serves(
    held: int, room: tuple[int, int], usable: int, left_out: int
) -> None:
    row = node(*[gpu()] * 8, held=held, free_millicores=room[0], free_bytes=room[1] * GIB).row(0)
    needs = TypicalNeeds({GPU: HostResources(2_000, 4 * GIB)})
    record = NodeRecord(name="n", host=HOST)

    assert count_usable(record, GPU, row, needs) == usable
    assert count_stranded(record, GPU, row, needs) == left_out
    assert count_stranded(NodeRecord(name="n"), GPU, row, needs) == 0


def test_a_gpu_needs_the_median_of_the_pods_requests(world: World) -> None:
    for name, gpus in (("two", 2), ("one", 1), ("no-request", 1)):
        world.have(name, "full", gpus=gpus)
    world.have("placeholder", "full", gives_way=True)
    world.have("over", "full", phase=PodPhase.SUCCEEDED)
    world.add_waiting("waits", resources={GPU: 1}, host=HostResources(1_000, GIB))
    placed = {
        "two": HostResources(3_001, 4 * GIB),
        "one": HostResources(4_000, 3 * GIB),
        "no-request": HostResources(),
        "placeholder": HostResources(9_000, GIB),
        "over": HostResources(9_000, GIB),
        "waits": HostResources(9_000, GIB),
    }
    pods = {f"team/{name}": PlacedPod("full", needs) for name, needs in placed.items()}

    needs = finish(find_needs(world.fleet, pods))

    assert needs.by_resource == {GPU: HostResources(1_501, 2 * GIB, 0)}


def test_what_no_pod_requests_is_assumed_to_be_half_of_the_even_share() -> None:
    host = HostResources(16_000, 64 * GIB, 500 * GIB)

    unknown = TypicalNeeds({}).of(GPU, host, 8)
    in_part = TypicalNeeds({GPU: HostResources(0, 7 * GIB, 9 * GIB)}).of(GPU, host, 8)

    assert unknown == (HostResources(1_000, 4 * GIB, 0), {"cpu", "memory"})
    assert in_part == (HostResources(1_000, 7 * GIB, 9 * GIB), {"cpu"})
