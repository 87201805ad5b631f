import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extender.api.status_routes import (
    FleetCollector,
    export_ports,
    export_state,
    health_routes,
    metrics_route,
)
from extender.core.devices.readings import Signal
from extender.core.nodes.host_resources import PlacedPod
from extender.core.request.request import GpuRequest, PodRef, parse_pod_ref, parse_request
from extender.core.steps import finish
from extender.server.listener import Listener, _Figures
from extender.server.readiness import SourceStatus
from extender.settings.config import Settings
from extender.sources.agents.source import AgentStatus
from extender.sources.source_manager import SourceManager
from testkit.cards import BUSY, IDLE, Gpu
from testkit.certificates import issue, settings_for
from testkit.webhook_requests import MakeClient, names_request, pod
from testkit.world import World

SOURCES = (
    SourceStatus(
        name="apiserver/nodes", last_success_at=None, failures=0, error="no request sent yet"
    ),
    SourceStatus(
        name="prometheus",
        last_success_at=1_800_000_000.0,
        failures=7,
        error="",
        failed_queries=2,
        partial_answers=3,
        restarts=4,
        unreadable=5,
    ),
)
AGENTS = AgentStatus(
    connections=1,
    agents=2,
    devices=3,
    reports=4,
    unknown_nodes=5,
    refused={"full": 6},
    reviews=7,
    contested=8,
    last_at=None,
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
    (family,) = (
        one for one in world.metrics.registry.collect() if one.name == "idlegpu_unhealthy_gpus"
    )
    assert {sample.labels["reason"] for sample in family.samples} == set(names)
    assert sum(counts) == world.count("idlegpu_devices", state="unhealthy")
    assert world.count("idlegpu_devices", state="excluded") == 1  # the idle one beside XID 79


def test_each_source_shows_age_failures_and_unmatched_series(world: World) -> None:
    register(world)

    assert world.count("idlegpu_source_up", source="prometheus") == 1
    assert world.count("idlegpu_source_up", source="apiserver/nodes") == 0
    assert world.count("idlegpu_source_age_seconds", source="prometheus") == 30
    assert world.count("idlegpu_source_failures_total", source="prometheus") == 7
    assert world.count("idlegpu_source_failed_queries", source="prometheus") == 2
    assert world.count("idlegpu_source_partial_answers_total", source="prometheus") == 3
    assert world.count("idlegpu_source_worker_restarts_total", source="prometheus") == 4
    assert world.count("idlegpu_unreadable_objects_total", source="prometheus") == 5
    assert world.count("idlegpu_unmatched_series", source="prometheus") == 3
    world.now -= 60.0  # the clock went back
    assert world.count("idlegpu_source_age_seconds", source="prometheus") == 0
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


def test_gpus_whose_signals_disagree_are_counted(world: World) -> None:
    register(world)
    world.add({"node": [Gpu(busy=0.0, signs={Signal.SM_ACTIVE: 0.9})]})

    assert world.count("idlegpu_signal_disagreements", source="prometheus") == 1


@dataclass
class Sources:
    """Source manager of one replica."""

    agents: AgentStatus | None = None

    def states(self) -> Iterable[SourceStatus]:
        return SOURCES

    def agent_status(self) -> AgentStatus | None:
        return self.agents

    def host_pods(self) -> Mapping[str, PlacedPod]:
        return {}


def export(world: World, sources: Sources, **settings: Any) -> FleetCollector:
    served = Settings(**settings)
    manager = cast("SourceManager", sources)
    return export_state(world.metrics, served, world.fleet, manager, lambda: 5, lambda: world.now)


def test_reports_of_agents_are_exported_where_agents_are_accepted(world: World) -> None:
    sources = Sources()
    export(world, sources)
    names = (
        "idlegpu_agent_connections",
        "idlegpu_agents",
        "idlegpu_agent_devices",
        "idlegpu_agent_reports_total",
        "idlegpu_agent_unknown_nodes",
        "idlegpu_agent_token_reviews_total",
        "idlegpu_agent_contested_devices_total",
    )
    assert b"idlegpu_agent" not in generate_latest(world.metrics.registry)

    sources.agents = AGENTS

    assert [world.count(name) for name in names] == [1, 2, 3, 4, 5, 7, 8]
    assert world.count("idlegpu_agent_refusals_total", reason="full") == 6


def test_state_sources_and_certificates_are_exported_together(world: World, tmp_path: Path) -> None:
    issue(tmp_path)
    export(world, Sources(), tls=settings_for(tmp_path), status_listen="127.0.0.1:8889")

    assert world.count("idlegpu_devices", state="idle") == 2
    assert world.count("idlegpu_source_up", source="prometheus") == 1
    ends = world.count("idlegpu_certificate_end_timestamp_seconds", certificate="webhooks")
    assert ends > 0


def test_new_settings_name_the_pools_by_other_labels(world: World) -> None:
    collector = export(world, Sources(), pool_labels=("team",))
    assert collector.pool_labels == ("team",)

    collector.adopt(Settings(pool_labels=("queue",)))

    assert collector.pool_labels == ("queue",)


async def test_metrics_are_counted_in_steps_before_they_are_rendered(
    world: World, aiohttp_client: MakeClient
) -> None:
    yielded: list[bool] = []

    async def yield_loop() -> None:
        yielded.append(True)

    collector = export(world, Sources())
    app = web.Application()
    app.router.add_routes([metrics_route(world.metrics, collector, yield_loop)])
    client = await aiohttp_client(app)
    with mock.patch.object(collector, "count_in_steps", wraps=collector.count_in_steps) as counted:
        text = await (await client.get("/metrics")).text()

    assert 'idlegpu_devices{state="idle"} 2.0' in text
    assert counted.call_count == 1
    assert yielded


def test_counts_in_steps_serve_one_scrape(world: World) -> None:
    collector = export(world, Sources())
    finish(collector.count_in_steps())
    world.add({"more": [IDLE]})

    assert world.count("idlegpu_devices", state="idle") == 2
    assert world.count("idlegpu_devices", state="idle") == 3


@pytest.mark.parametrize("is_tls", [True, False])
def test_connections_and_refusals_are_exported_by_port(world: World, is_tls: bool) -> None:
    figures = _Figures(connections=3)
    figures.refusals["full"] = 4
    figures.failures["timeout"] = 5
    port = SimpleNamespace(name="webhooks", figures=figures, is_tls=is_tls)

    export_ports(world.metrics, [cast("Listener", port)])

    assert world.count("idlegpu_connections", port="webhooks") == 3
    assert world.count("idlegpu_connection_refusals_total", port="webhooks", reason="full") == 4
    failures = world.count(
        "idlegpu_tls_handshake_failures_total", port="webhooks", reason="timeout"
    )
    assert failures == (5 if is_tls else 0)


@pytest.mark.parametrize(
    ("state", "causes", "status", "shown"),
    [
        ("ready", {}, 200, "ready"),
        ("ready", {"prometheus": "no answer"}, 200, "degraded"),
        ("starting", {}, 503, "starting"),
        ("starting", {"prometheus": "no answer"}, 503, "starting"),
    ],
)
async def test_the_kubelet_learns_whether_the_extender_answers(
    aiohttp_client: MakeClient, state: str, causes: dict[str, str], status: int, shown: str
) -> None:
    app = web.Application()
    app.add_routes(health_routes(lambda: state, lambda: causes))
    client = await aiohttp_client(app)

    answer = await client.get("/readyz")

    assert answer.status == status
    assert await answer.json() == {"status": shown, "degraded": causes}
    assert await (await client.get("/healthz")).text() == "ok\n"


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
