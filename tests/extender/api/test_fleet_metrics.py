import json
import math
from collections.abc import Iterable

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extender.api.status_routes import FleetCollector
from extender.core.request.request import GpuRequest, PodRef, parse_pod_ref, parse_request
from extender.server.readiness import SourceStatus
from testkit.cards import BUSY, IDLE, Gpu
from testkit.webhook_requests import names_request, pod
from testkit.world import World

SOURCES = (
    SourceStatus(
        name="apiserver/nodes", last_success_at=None, failures=0, error="no request sent yet"
    ),
    SourceStatus(name="prometheus", last_success_at=1_800_000_000.0, failures=7, error=""),
)


@pytest.fixture
def world() -> World:
    world = World()
    world.add(
        {
            "idle": [IDLE, IDLE],
            "busy": [BUSY],
            "dead": [Gpu(xid=79.0)],
            "foreign": [Gpu(busy=0.0, used_gib=30.0)],
        }
    )
    world.add_pod("a", "busy")
    world.register_node("unseen", gpus=4)
    return world


def register(world: World, sources: Iterable[SourceStatus] = SOURCES) -> None:
    world.metrics.registry.register(
        FleetCollector(world.fleet, lambda: sources, lambda: 5, lambda: world.now)
    )


def test_devices_are_counted_by_state(world: World) -> None:
    register(world)

    states = ("idle", "busy", "unknown", "unhealthy", "excluded", "foreign")
    counts = [world.count("idlegpu_devices", state=state) for state in states]

    assert counts == [2, 1, 4, 1, 0, 1]


def test_unhealthy_gpus_are_counted_by_their_reason(world: World) -> None:
    register(world)
    world.add({"worse": [Gpu(xid=79.0), Gpu(xid=48.0), IDLE]})

    names = ("XID 79: fallen off the bus", "XID 48: double-bit memory error")
    counts = [world.count("idlegpu_unhealthy_gpus", reason=name) for name in names]

    assert counts == [2, 1]
    assert sum(counts) == world.count("idlegpu_devices", state="unhealthy")
    assert world.count("idlegpu_devices", state="excluded") == 1  # the idle one beside XID 79


def test_each_source_shows_age_failures_and_unmatched_series(world: World) -> None:
    register(world)

    assert world.count("idlegpu_source_up", source="prometheus") == 1
    assert world.count("idlegpu_source_up", source="apiserver/nodes") == 0
    assert world.count("idlegpu_source_age_seconds", source="prometheus") == 30
    assert world.count("idlegpu_source_failures_total", source="prometheus") == 7
    assert world.count("idlegpu_unmatched_series", source="prometheus") == 3
    registry = world.metrics.registry
    never = registry.get_sample_value("idlegpu_source_age_seconds", {"source": "apiserver/nodes"})
    assert never is None


def test_the_age_of_telemetry_counts_from_when_it_was_measured(world: World) -> None:
    register(world)
    ages = [Gpu(age=seconds) for seconds in (10.0, 20.0, 60.0)]
    world.register_node("old", gpus=3)
    world.report({"old": ages}, source="agent")
    world.now += 5

    name = "idlegpu_telemetry_age_seconds"
    assert world.count(name, source="agent", stat="median") == 25
    assert world.count(name, source="agent", stat="max") == 65
    assert world.count(name, source="prometheus", stat="max") == 5


def test_assumed_pods_nodes_and_dropped_events_are_counted(world: World) -> None:
    register(world)
    before = world.count("idlegpu_assumed_pods")

    world.placer.place("filter", *_ask(world), ("idle", "busy"))

    assert (before, world.count("idlegpu_assumed_pods")) == (0, 1)
    assert world.count("idlegpu_nodes") == 5
    assert world.count("idlegpu_gpu_pods") == 1
    assert world.count("idlegpu_events_dropped_total") == 5


def test_an_empty_fleet_has_metrics_too() -> None:
    world = World()
    register(world, ())

    assert world.count("idlegpu_devices", state="idle") == 0
    assert b"idlegpu_assumed_pods 0.0" in generate_latest(world.metrics.registry)


async def test_the_text_parses_and_every_metric_is_explained(world: World) -> None:
    register(world)
    body = _json(names_request("idle", "busy", "dead", "new", requester=pod(gpu_memory="x")))
    await world.webhooks().filter(body)
    await world.webhooks().prioritize(b"{")

    text = generate_latest(world.metrics.registry).decode()

    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {
        "idlegpu_requests",
        "idlegpu_request_duration_seconds",
        "idlegpu_candidates",
        "idlegpu_feasible",
        "idlegpu_rejections",
        "idlegpu_devices",
        "idlegpu_unmatched_series",
        "idlegpu_assumed_pods",
        "idlegpu_source_age_seconds",
        "idlegpu_telemetry_age_seconds",
    } <= families.keys()
    for family in families.values():
        if not family.name.endswith("_created"):
            assert family.documentation.endswith("."), family.name
        assert not any(math.isnan(sample.value) for sample in family.samples)
    labels = {label for family in families.values() for s in family.samples for label in s.labels}
    allowed = {"verb", "outcome", "reason", "state", "source", "stat", "annotation", "choice"}
    allowed |= {"direction", "task"}
    assert labels <= allowed | {"pool", "resource", "model", "size", "le"}


def _ask(world: World) -> tuple[PodRef, GpuRequest]:
    parsed = parse_request(pod(), resources=world.resources, defaults=world.policy)
    assert parsed.request is not None
    return parse_pod_ref(pod()), parsed.request


def _json(document: object) -> bytes:
    return json.dumps(document).encode()
