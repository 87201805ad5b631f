"""The benchmarks' world at a hundredth of its size: measurements agree with the events."""

from collections.abc import Iterator

import orjson
import pytest

from bench.machine import Bound
from bench.placing import Scheduler, percentile
from bench.requests import EVERYDAY, Wish, distinct
from bench.world import FleetSpec, World, open_world, wait_until

LIMIT_SECONDS = 60.0
SPEC = FleetSpec(nodes=20, gpu_pods=30, other_pods=50)
SETTINGS = {"prometheus": {"interval_seconds": 0.5, "exporter_interval_seconds": 0}}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world(
        SPEC, settings=SETTINGS, scrape_seconds=0.5, refresh_seconds=0.5, is_stepping=True
    ) as world:
        world.wait_ready(LIMIT_SECONDS)
        wait_until(world.has_readings, "readings", LIMIT_SECONDS)
        yield world


def gpus(world: World) -> list[dict[str, object]]:
    listed: list[dict[str, object]] = orjson.loads(world.get_status("/v1/gpus")[1])["gpus"]
    return listed


def follows(world: World) -> None:
    """Wait until the extender knows all nodes and GPU pods of the cluster."""

    def is_so() -> bool:
        known, state = world.metrics(), world.state()
        nodes, pods = known["idlegpu_nodes"], known["idlegpu_gpu_pods"]
        return bool(nodes == state["nodes"] and pods == state["gpu_pods"])

    wait_until(is_so, "the extender follows", LIMIT_SECONDS)


def test_every_device_is_seen_and_no_query_is_unknown(world: World) -> None:
    follows(world)
    assert len(gpus(world)) == world.state()["devices"]
    assert world.metrics()['idlegpu_source_failed_queries{source="prometheus"}'] == 0
    assert world.metrics()['idlegpu_unmatched_series{source="prometheus"}'] == 0


def test_placed_pods_are_bound_and_shown(world: World) -> None:
    before = world.state()["gpu_pods"]
    scheduler = Scheduler(world, EVERYDAY)

    placed = [scheduler.place() for _ in EVERYDAY]

    assert any(one.node for one in placed)
    assert all(one.node in world.nodes() for one in placed if one.node)
    assert all(0 < one.filter_seconds < LIMIT_SECONDS for one in placed)
    assert world.state()["gpu_pods"] == before + len(placed)
    follows(world)
    scheduler.remove(placed)
    assert world.state()["gpu_pods"] == before


@pytest.mark.parametrize("is_expired", [True, False])
def test_changes_are_followed_whatever_happens_to_watches(world: World, is_expired: bool) -> None:
    world.control("close-watches", expired=is_expired)
    created = world.control("pods", count=10, kind="gpu")["uids"]
    follows(world)
    world.control("delete", uids=created)
    world.control("touch")
    follows(world)
    wait_until(lambda: world.state()["watches"] == 2, "both watch again", LIMIT_SECONDS)


def offered(world: World) -> int:
    known = orjson.loads(world.get_status("/v1/nodes")[1])["nodes"]
    return sum(one["allocatable"] for node in known for one in node["resources"].values())


def test_nodes_with_a_broken_gpu_offer_one_less_and_then_all_again(world: World) -> None:
    before = offered(world)

    world.control("touch", broken=True)
    wait_until(lambda: offered(world) == before - SPEC.nodes, "each offers less", LIMIT_SECONDS)
    world.control("touch", broken=False)
    wait_until(lambda: offered(world) == before, "each offers all", LIMIT_SECONDS)


def test_of_mixed_pods_every_second_one_is_bound(world: World) -> None:
    bound = len(world.running_pods("gpu"))

    created = world.control("pods", count=10, kind="gpu", life="mixed")["uids"]

    assert len(world.running_pods("gpu")) == bound + 5
    follows(world)
    world.control("delete", uids=created)
    assert len(world.running_pods("gpu")) == bound


def test_nodes_that_go_are_missed_and_come_back(world: World) -> None:
    away = world.nodes()[:2]
    world.control("drop-nodes", nodes=away)
    wait_until(lambda: world.metrics()["idlegpu_nodes"] == 18, "two are gone", LIMIT_SECONDS)
    world.control("add-nodes", nodes=away)
    follows(world)


def test_memory_and_steps_are_reported(world: World) -> None:
    world.steps()
    Scheduler(world).place()

    memory, steps = world.memory(), world.steps()

    assert memory.rss_mib >= memory.pss_mib > 50
    assert steps["steps"] > 0
    assert steps["cpu_seconds"] > 0


def test_what_pods_wish_for_counts(world: World) -> None:
    follows(world)
    too_much = Wish(annotations={"gpu-memory": "1Ti"})

    wishful, plain = (Scheduler(world, wishes=[wish]).place() for wish in (too_much, Wish()))

    assert wishful.feasible < plain.feasible  # nodes of unknown size suffice for both


def test_no_two_distinct_wishes_are_alike() -> None:
    wishes = distinct(500)

    assert len({(one.gpus, *one.annotations.items()) for one in wishes}) == 500


def test_bound_that_could_not_be_measured_is_missed() -> None:
    assert not Bound(what="p99", limit=10.0, measured=percentile([], 0.99), unit="ms").is_met
    assert Bound(what="p99", limit=10.0, measured=10.0, unit="ms").is_met
