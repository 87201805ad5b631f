"""A caller's pods with their GPUs, use and waits, one page at a time."""

from itertools import product
from typing import Any

import pytest

from extender.insight import pods
from extender.insight.pods import _MAX_WORDS
from testkit.api_requests import get
from testkit.builders import GPU
from testkit.cards import Gpu, card
from testkit.others import SeesTeam
from testkit.webhook_requests import Client, MakeClient
from testkit.world import MESSAGE, World, one_node

PATH = "/v1/pods"
CARDS = {
    "n-1": [card("team/nb", used_gib=2.0), card("team/nb", used_gib=3.0), card()],
    "n-2": [card("team/train", busy=0.9, used_gib=60.0), card("blue/other", busy=0.5)],
}


@pytest.fixture
def world() -> World:
    world = World()
    world.add(CARDS)
    world.hold("nb", "n-1", 2)
    world.hold("train", "n-2", 1, owner="Job train", memory_bytes=70 << 30)
    world.hold("other", "n-2", 1, namespace="blue")
    world.live(CARDS, 600.0)
    for name, created_at in (("young", world.now - 60.0), ("old", world.now - 600.0)):
        world.add_waiting(
            name,
            is_unscheduled=True,
            is_refused=True,
            message=MESSAGE,
            created_at=created_at,
            owner="Job sweep",
        )
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


async def names(client: Client, **query: Any) -> list[str]:
    answer = await get(client, PATH, **query)
    return [one["pod"] for one in answer["pods"]]


async def test_a_pod_that_holds_gpus_is_described(client: Client) -> None:
    answer = await get(client, PATH, search="nb")
    (pod,) = answer["pods"]

    assert (answer["total"], answer["holds"], answer["waits"]) == (1, 1, 0)
    assert answer["namespaces"] == ["blue", "team"]
    assert (answer["offset"], answer["at"]) == (0, "2027-01-15T08:10:30.000+00:00")
    idle_seconds = 540.0

    def device(index: int, gib: int) -> dict[str, object]:
        return {
            "index": index,
            "uuid": f"GPU-n-1-{index}",
            "gpu_instance_id": "",
            "mig_profile": "",
            "shares": 1,
            "tenants": 1,
            "utilization_ratio": 0.0,
            "memory_used_bytes": gib << 30,
        }

    assert pod == {
        "pod": "team/nb",
        "uid": "uid-nb",
        "owner": "StatefulSet notebook",
        "state": "holds",
        "is_deleting": False,
        "node": "n-1",
        "model": "H100 80GB HBM3",
        "resources": {GPU: 2},
        "gpus": 2,
        "gpus_unknown": 0,
        "devices": [device(0, 2), device(1, 3)],
        "utilization_ratio": 0.0,
        "memory_used_bytes": 5 << 30,
        "memory_declared_bytes": None,
        "gpus_idle": 2,
        "idle_seconds": idle_seconds,
        "is_at_least": True,
        "held_seconds": 1200.0,
        "wait": None,
    }


async def test_declared_memory_is_beside_the_used_one(client: Client) -> None:
    (pod,) = (await get(client, PATH, search="train n-2"))["pods"]

    assert (pod["memory_used_bytes"], pod["memory_declared_bytes"]) == (60 << 30, 70 << 30)
    assert pod["utilization_ratio"] == pytest.approx(0.9, abs=0.05)
    assert (pod["gpus_idle"], pod["idle_seconds"], pod["is_at_least"]) == (0, None, False)


async def test_a_waiting_pod_says_how_long_and_why(client: Client) -> None:
    answer = await get(client, PATH, state="waits")
    old, young = answer["pods"]

    assert (old["pod"], young["pod"], old["gpus"], old["node"]) == (
        "team/old",
        "team/young",
        2,
        None,
    )
    assert (old["state"], old["wait"]["state"], old["wait"]["waiting_seconds"]) == (
        "waits",
        "refused",
        600.0,
    )
    assert old["wait"]["by_us"][0]["reason"] == "node(s) had too few GPUs known to be idle"
    assert (answer["total"], answer["holds"], answer["waits"]) == (2, 3, 2)
    unknown = ("model", "devices", "gpus_unknown", "gpus_idle", "idle_seconds", "held_seconds")
    assert [old[name] for name in unknown] == ["", [], 0, None, None, None]
    assert (old["is_at_least"], old["memory_declared_bytes"]) == (False, None)


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("", ["old", "young", "other", "nb", "train"]),
        ("pod", ["other", "nb", "old", "train", "young"]),
        ("owner", ["old", "young", "train", "other", "nb"]),
        ("gpus", ["nb", "old", "young", "other", "train"]),
        ("use", ["train", "other", "nb", "old", "young"]),
        ("memory", ["train", "nb", "other", "old", "young"]),
        ("idle", ["nb", "other", "old", "train", "young"]),
        ("wait", ["old", "young", "other", "nb", "train"]),
    ],
)
async def test_pods_are_sorted_as_requested(
    client: Client, monkeypatch: pytest.MonkeyPatch, sort: str, order: list[str]
) -> None:
    monkeypatch.setattr(pods, "_PIECE_PODS", 2)  # several pieces are merged

    shown = await names(client, sort=sort)
    paged = [await names(client, sort=sort, limit="2", offset=str(at)) for at in (0, 2, 4, 6)]

    assert [name.partition("/")[2] for name in shown] == order
    assert [name for page in paged for name in page] == shown
    assert [len(page) for page in paged] == [2, 2, 1, 0]


async def test_namespace_and_search_narrow_the_list(client: Client) -> None:
    assert await names(client, namespace="blue") == ["blue/other"]
    assert await names(client, namespace="none") == []
    assert await names(client, search="JOB Sweep") == ["team/old", "team/young"]
    assert await names(client, search="n-2 blue") == ["blue/other"]


async def test_a_caller_sees_only_the_pods_of_its_namespaces(
    world: World, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(world.build_app(viewer=SeesTeam()))
    answer = await get(client, PATH)

    assert answer["namespaces"] == ["team"]
    assert (answer["total"], answer["holds"], answer["waits"]) == (4, 2, 2)
    assert await names(client, search="other") == []
    assert await names(client, namespace="blue") == []


async def test_pods_of_other_namespaces_change_no_answer(aiohttp_client: MakeClient) -> None:
    queries = [
        {"sort": sort, "search": search, "namespace": namespace, "offset": offset}
        for sort, search, namespace, offset in product(
            ("pod", "node", "gpus", "use", "memory", "idle", "wait"),
            ("", "n-2", "other"),
            ("", "blue"),
            ("0", "1"),
        )
    ]
    answers = []
    for hidden in (False, True):
        world = World()
        world.add(CARDS)
        world.hold("nb", "n-1", 2)
        world.add_waiting("young", is_unscheduled=True, created_at=world.now)
        if hidden:
            world.hold("other", "n-2", 1, namespace="blue")
            world.add_waiting("old", namespace="blue", is_unscheduled=True, created_at=1.0)
        client = await aiohttp_client(world.build_app(viewer=SeesTeam()))
        answers.append([await get(client, PATH, 200, **query) | {"at": ""} for query in queries])

    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({"sort": "colour"}, "sort='colour' must be one of pod, owner"),
        ({"state": "dreams"}, "state='dreams' must be one of holds, waits"),
        ({"limit": "501"}, "limit='501' must be a whole number from 1 to 500"),
        ({"search": "x" * (_MAX_WORDS + 1)}, "must have at most 200 characters"),
        ({"search": " ".join("abcdefghijk")}, "must have at most 10 words"),
        ({"pod": "a"}, "pod='a' is not a parameter"),
    ],
)
async def test_bad_parameters_are_refused(
    client: Client, query: dict[str, str], problem: str
) -> None:
    response = await client.get(PATH, params=query)

    assert response.status == 400
    assert problem in (await response.json())["error"]


async def test_a_pod_whose_gpus_no_source_shows_is_listed(world: World, client: Client) -> None:
    world.hold("hidden", "n-1", 1)

    (pod,) = (await get(client, PATH, search="hidden"))["pods"]

    assert (pod["gpus"], pod["gpus_unknown"], pod["devices"]) == (1, 1, [])
    assert (pod["utilization_ratio"], pod["memory_used_bytes"]) == (None, None)
    assert (pod["gpus_idle"], pod["held_seconds"], pod["owner"]) == (
        None,
        None,
        "StatefulSet notebook",
    )


async def test_memory_of_a_pod_is_unknown_if_that_of_one_of_its_gpus_is(
    world: World, client: Client
) -> None:
    world.live({"n-1": [card("team/nb", used_gib=2.0), Gpu(used_gib=None, tenants=("team/nb",))]},
               3600.0)  # fmt: skip

    (pod,) = (await get(client, PATH, search="nb"))["pods"]

    assert [one["memory_used_bytes"] for one in pod["devices"]] == [2 << 30, None]
    assert pod["memory_used_bytes"] is None


async def test_use_of_a_pod_is_the_mean_of_the_gpus_that_are_known(
    world: World, client: Client
) -> None:
    world.hold("three", "n-3", 3)
    cards = [Gpu(busy=busy, tenants=("team/three",)) for busy in (0.2, 0.6, None)]
    world.add({"n-3": cards})
    world.live({"n-3": cards}, 600.0)

    (pod,) = (await get(client, PATH, search="three"))["pods"]

    shown = [one["utilization_ratio"] for one in pod["devices"]]
    assert shown == [pytest.approx(0.2), pytest.approx(0.6), None]
    assert pod["utilization_ratio"] == pytest.approx(0.4)


async def test_search_may_be_as_long_as_is_stated(client: Client) -> None:
    assert await names(client, search="n" * _MAX_WORDS) == []
    assert await names(client, search="n b n-1 t e a m s k l l l") != []  # ten different words


async def test_a_pod_on_a_shared_gpu_shows_its_own_memory(aiohttp_client: MakeClient) -> None:
    world = one_node(1, replicas=4)
    card = world.card()
    first, second = (world.bind(name, on=[card]) for name in ("a", "b"))
    world.read_after(10.0, 2)
    world.fleet.note_shares("node", [(card.info.key, first.uid, 5)], world.now)
    client = await aiohttp_client(world.build_app())

    shown = {one["pod"]: one for one in (await get(client, PATH))["pods"]}

    device = shown[first.key]["devices"][0]
    assert (device["shares"], device["tenants"], device["memory_used_bytes"]) == (4, 2, 5)
    assert shown[first.key]["memory_used_bytes"] == 5
    assert shown[second.key]["memory_used_bytes"] is None
