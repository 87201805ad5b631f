"""Costs of the GPUs that pods hold, summed over the pods that the caller may see."""

from itertools import count
from random import Random

import numpy as np
import pytest

from extender.core.devices.readings import DeviceInfo, Readings, Signal
from extender.core.nodes.inventory import NodeRecord
from extender.insight.holder_sums import Sums
from extender.insight.holders import PIECE_PODS
from extender.insight.usage import _first, _GroupCosts
from testkit.api_requests import get, meanwhile
from testkit.cards import HOUR, card
from testkit.others import SeesTeam
from testkit.webhook_requests import Client, MakeClient
from testkit.world import SHARED, World

PRICE = 2.5


@pytest.fixture
def world() -> World:
    """Return a world where three pods of two tenants held a GPU for two hours, and one is busy."""
    world = World()
    cards = {"a": [card("team/nb-0"), card("team/nb-1", busy=0.9)], "b": [card("other/secret")]}
    world.add(cards)
    world.hold("nb-0", "a", 1, bound_at=world.now)
    world.hold("nb-1", "a", 1, bound_at=world.now)
    world.hold("secret", "b", 1, "other", bound_at=world.now, owner="Job hush")
    world.live(cards, 2 * HOUR)
    world.why.set_prices({"H100": PRICE, "A100": 9.0})
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


async def test_costs_are_summed_by_owner_most_idle_cost_first(client: Client) -> None:
    answer = await get(client, "/v1/costs")

    mine, other = sorted(answer["costs"], key=lambda one: -one["pods"])
    assert (mine["namespace"], mine["owner"], mine["pod"]) == ("team", "StatefulSet notebook", None)
    assert (mine["pods"], mine["gpus"], mine["gpus_idle"]) == (2, 2, 1)
    assert mine["gpu_hours"] == pytest.approx(4.0)
    assert mine["cost"] == pytest.approx(4 * PRICE)
    assert mine["cost_idle"] == pytest.approx(2 * PRICE, rel=0.02)
    assert mine["cost_used"] + mine["cost_idle"] == pytest.approx(mine["cost"])
    assert (other["namespace"], other["owner"]) == ("other", "Job hush")
    assert answer["costs"] == sorted(answer["costs"], key=lambda one: -one["cost_idle"])
    assert (answer["by"], answer["is_priced"], answer["idle_for_seconds"]) == ("owner", True, 0.0)
    sums = {
        "pods": 3,
        "gpus": 3,
        "gpus_idle": 2,
        "mig_instances": 0,
        "mig_instances_idle": 0,
        "gpu_hours": pytest.approx(6.0),
        "gpu_hours_used": pytest.approx(2 + 2 / 60, rel=0.02),
    }
    assert answer["sums"].items() >= sums.items()
    assert answer["sums"]["cost"] == pytest.approx(6 * PRICE)
    assert (answer["total"], answer["hidden_pods"], answer["unknown"]) == (2, 0, 0)
    assert answer["at"] == "2027-01-15T10:00:30.000+00:00"


async def test_each_grouping_has_the_same_total(client: Client) -> None:
    by_pod, by_owner, by_namespace = [
        await get(client, "/v1/costs", by=by) for by in ("pod", "owner", "namespace")
    ]

    assert by_pod["sums"] == by_owner["sums"] == by_namespace["sums"]
    for answer in (by_pod, by_owner, by_namespace):
        for name in ("pods", "gpu_hours", "gpu_hours_idle", "cost", "cost_used", "cost_idle"):
            assert sum(one[name] for one in answer["costs"]) == pytest.approx(answer["sums"][name])
    assert {one["pod"] for one in by_pod["costs"]} == {"team/nb-0", "team/nb-1", "other/secret"}
    assert {one["namespace"] for one in by_namespace["costs"]} == {"team", "other"}


async def test_the_list_of_holders_has_the_same_numbers(client: Client) -> None:
    by_pod = await get(client, "/v1/costs", by="pod")
    listed = await get(client, "/v1/holders", idle_for="0", limit="1")
    (first,) = listed["holders"]
    (same,) = [one for one in by_pod["costs"] if one["pod"] == first["pod"]]

    assert listed["sums"] == by_pod["sums"]
    for name in ("gpu_hours", "gpu_hours_idle", "cost", "cost_used", "cost_idle"):
        assert first[name] == pytest.approx(same[name])


async def test_sums_go_over_all_pods_however_few_are_listed(world: World, client: Client) -> None:
    pods = {f"n-{node}": [f"many-{node}-{at}" for at in range(8)] for node in range(150)}
    cards = {node: [card(f"team/{name}") for name in names] for node, names in pods.items()}
    world.add(cards, readings=1)
    for node, names in pods.items():
        for name in names:
            world.hold(name, node, 1, owner="Job many")
    world.report(cards)
    world.fleet.snapshot()
    world.why.idleness.look()

    by_pod = await get(client, "/v1/costs", by="pod", limit="1")
    by_owner = await get(client, "/v1/costs")

    assert (len(by_pod["costs"]), by_pod["total"]) == (1, 1203)
    (many,) = [one for one in by_owner["costs"] if one["owner"] == "Job many"]
    assert many["pods"] == 1200
    assert many["cost"] == pytest.approx(1200 * PRICE * 600 / HOUR)
    assert by_pod["sums"]["pods"] == 1203


async def test_the_first_of_very_many_are_found_in_steps() -> None:
    chance = Random(7)
    groups = [
        _GroupCosts(namespace="team", name=f"p-{at}", sums=Sums(gpu_hours_idle=chance.random()))
        for at in range(5 * PIECE_PODS)
    ]
    turns = count()

    async with meanwhile(lambda: next(turns)):
        first = await _first(groups, 200)

    assert first == sorted(groups, key=lambda group: group.rank)[:200]
    assert next(turns) >= 5


def test_groups_are_ranked_by_idle_cost_then_idle_hours_then_name() -> None:
    ranked = [
        _GroupCosts(namespace=namespace, name=name, sums=Sums(cost_idle=cost, gpu_hours_idle=hours))
        for cost, hours, namespace, name in (
            (2.0, 1.0, "z", "z"),
            (1.0, 3.0, "z", "z"),
            (1.0, 2.0, "a", "z"),
            (1.0, 2.0, "b", "a"),
            (1.0, 2.0, "b", "b"),
        )
    ]

    turned = ranked[::-1]
    assert sorted(turned, key=lambda group: group.rank) == ranked


async def test_pods_without_an_owner_are_one_group_of_their_namespace(
    world: World, client: Client
) -> None:
    cards = {"d": [card("other/x"), card("other/y"), card()]}
    world.add(cards)
    cards |= {"a": [card("team/nb-0"), card("team/nb-1")], "b": [card("other/secret")]}
    for name in ("x", "y", "unknown"):
        world.hold(name, "d", 1, "other", owner="", bound_at=world.now)
    world.live(cards, HOUR)

    answer = await get(client, "/v1/costs")
    of_team = await get(client, "/v1/costs", namespace="team")

    (alone,) = [one for one in answer["costs"] if one["owner"] is None]
    assert (alone["namespace"], alone["pod"], alone["pods"]) == ("other", None, 2)
    assert (answer["unknown"], of_team["unknown"]) == (1, 0)
    assert {one["namespace"] for one in of_team["costs"]} == {"team"}


async def test_a_share_of_a_gpu_costs_its_part_of_the_card(world: World, client: Client) -> None:
    world.add_shared("s", 4)
    names = [world.have(name, "s", resource=SHARED) for name in ("x", "y")]
    world.live({"s": [card(*names)]}, HOUR)

    answer = await get(client, "/v1/costs", by="pod")

    costs = {one["pod"]: one for one in answer["costs"]}
    for name in names:
        assert costs[name]["gpu_hours"] == pytest.approx(1 / 4)
        assert costs[name]["cost"] == pytest.approx(PRICE / 4)


async def test_pods_of_others_are_neither_listed_nor_summed(
    world: World, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(world.build_app(viewer=SeesTeam()))

    for by in ("pod", "owner", "namespace"):
        answer = await get(client, "/v1/costs", by=by)
        assert {one["namespace"] for one in answer["costs"]} == {"team"}
        assert answer["sums"]["cost"] == pytest.approx(4 * PRICE)
        assert answer["hidden_pods"] == 1
        assert "other" not in str(answer)
        assert "hush" not in str(answer)
    assert (await get(client, "/v1/costs", namespace="other"))["sums"]["pods"] == 0
    listed = await get(client, "/v1/holders", idle_for="0")
    assert listed["sums"]["cost"] == pytest.approx(4 * PRICE)
    (hidden,) = [one for one in listed["holders"] if one["pod"] == "another pod"]
    assert (hidden["cost"], hidden["cost_used"], hidden["cost_idle"]) == (None, None, None)


async def test_without_a_price_list_hours_are_reported_alone(world: World, client: Client) -> None:
    world.why.set_prices({})

    answer = await get(client, "/v1/costs", by="namespace")

    assert answer["is_priced"] is False
    assert {one["cost"] for one in answer["costs"]} == {None}
    assert answer["sums"]["gpu_hours"] == pytest.approx(6.0)


async def test_pods_on_cards_without_a_price_are_counted(world: World, client: Client) -> None:
    world.why.set_prices({"A100": 9.0})

    answer = await get(client, "/v1/costs", by="namespace")

    assert answer["is_priced"] is True
    assert (answer["sums"]["cost"], answer["sums"]["unpriced_pods"]) == (None, 3)


async def test_costs_can_be_limited_to_long_idle_pods(client: Client) -> None:
    idle = await get(client, "/v1/costs", idle_for="3600", by="pod")

    assert {one["pod"] for one in idle["costs"]} == {"team/nb-0", "other/secret"}


async def test_each_gpu_is_idle_for_its_own_time(world: World, client: Client) -> None:
    world.add({"c": []})
    cards = {"c": [card("team/both"), card("team/both", busy=0.9)]}
    world.register_node("c", gpus=2)
    world.hold("both", "c", 2, bound_at=world.now)
    world.live(cards, HOUR)
    world.live({"c": [card("team/both")] * 2}, 600)

    answer = await get(client, "/v1/costs", by="pod")

    (both,) = [one for one in answer["costs"] if one["pod"] == "team/both"]
    assert (both["gpus"], both["gpus_idle"]) == (2, 2)
    assert both["gpu_hours_idle"] == pytest.approx((HOUR + 2 * 600) / HOUR, rel=0.05)


@pytest.mark.parametrize("offered", [2, 0], ids=["offered", "offered no more"])
async def test_a_mig_instance_costs_its_part_of_a_card(
    world: World, client: Client, offered: int
) -> None:
    resource = "nvidia.com/mig-3g.40gb"
    world.fleet.apply_node(
        NodeRecord(name="cut", allocatable={resource: offered}, capacity={resource: offered})
    )
    infos = tuple(
        DeviceInfo(
            node="cut",
            uuid="GPU-cut",
            index=0,
            gpu_instance_id=str(instance),
            mig_profile="3g.40gb",
            model="NVIDIA H100 80GB HBM3",
        )
        for instance in (1, 2)
    )
    world.hold("part", "cut", 1, resources={resource: 1}, bound_at=world.now - HOUR)
    for _ in range(3):
        world.fleet.apply_readings(
            Readings(
                source="prometheus",
                at=world.now,
                devices=infos,
                columns={Signal.GRAPHICS_ACTIVE: np.array([0.0, 0.0])},
                measured_at=np.array([world.now] * 2),
                tenants={infos[0].key: ("team/part",)},
            )
        )
        world.fleet.snapshot()
        world.why.idleness.look()

    (part,) = [
        one
        for one in (await get(client, "/v1/costs", by="pod"))["costs"]
        if one["pod"] == "team/part"
    ]

    assert (part["gpus"], part["mig_instances"]) == (0, 1)
    assert part["gpu_hours"] == pytest.approx(3 / 7)
    assert part["cost"] == pytest.approx(PRICE * 3 / 7)
    holders = (await get(client, "/v1/holders", idle_for="0"))["holders"]
    assert ("team/part", "uses its MIG instances") in [(one["pod"], one["why"]) for one in holders]


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({"by": "team"}, "by='team' must be one of pod, owner, namespace"),
        ({"idle_for": "-1"}, "idle_for='-1' must be a whole number from 0 to 2592000"),
        ({"limit": "0"}, "limit='0' must be a whole number from 1 to 1000"),
    ],
)
async def test_bad_parameter_is_refused_with_allowed_values(
    client: Client, query: dict[str, str], error: str
) -> None:
    assert (await get(client, "/v1/costs", 400, **query))["error"] == error
