"""Views of decisions: the request, the verdicts and their devices."""

import json

import msgspec
import pytest

from extender.core.devices.readings import Signal
from extender.core.policy import Policy, Strategy, Thresholds
from extender.core.request.annotations import Target, TargetPolicy
from extender.core.request.request import PodRef, parse_request
from extender.insight.views import (
    PIECE_VERDICTS,
    decision_in_steps,
    decision_view,
    node_with_gpus,
    request_view,
)
from extender.placement.history import DecisionRecord
from extender.server.redaction import write_json_in_full
from testkit.builders import GPU, request
from testkit.cards import BUSY, IDLE, Gpu
from testkit.webhook_requests import pod
from testkit.world import World


@pytest.fixture
def world() -> World:
    world = World()
    world.add({"idle": [IDLE, IDLE], "busy": [BUSY, BUSY]})
    world.add_pod("a", "busy", gpus=2)
    return world


def place(world: World, *nodes: str, verb: str = "filter") -> DecisionRecord:
    parsed = parse_request(pod(), resources=world.resources, defaults=Policy())
    assert parsed.request is not None
    requester = PodRef(uid="uid-requester", namespace="team", name="requester")
    record = world.placer.place(verb, requester, parsed.request, nodes)
    world.placer.detail(record)
    return record


def test_decision_states_problems_of_a_gpu(world: World) -> None:
    world.add({"dead": [IDLE, Gpu(xid=79.0)], "idle": [IDLE, Gpu(xid=94.0)]})

    view = json.loads(write_json_in_full(decision_view(place(world, "dead", "idle"), brief=False)))

    assert view["nodes"]["dead"]["rejection"] == "node(s) had too few working GPUs"
    assert [device["health"] for device in view["explained"][0]["devices"]] == [
        "",
        "counts less: XID 94: contained memory error",
    ]


def test_an_assumed_pod_shows_on_its_node(world: World) -> None:
    place(world, "idle", "busy")

    node = node_with_gpus(world.fleet, world.fleet.snapshot(), "idle")

    assert json.loads(write_json_in_full(node))["resources"][GPU] == {
        "capacity": 2,
        "allocatable": 2,
        "held": 0,
        "assumed": 1,
    }


def test_decision_shows_the_request_and_each_verdict(world: World) -> None:
    record = place(world, "busy", "idle")

    view = json.loads(write_json_in_full(decision_view(record, brief=False)))

    assert (view["pod"], view["uid"], view["verb"]) == ("team/requester", "uid-requester", "filter")
    assert (view["candidates"], view["feasible"]) == (2, 2)
    assert (view["node"], view["runner_up"]) == ("idle", "busy")
    assert view["request"]["max_utilization_ratio"] == 0.3
    assert view["at"] == "2027-01-15T08:00:30.000+00:00"
    assert list(view["nodes"]) == ["busy", "idle"]
    assert [entry["node"] for entry in view["explained"]] == ["idle", "busy"]
    assert view["bound_node"] is view["is_followed"] is None


def test_a_decision_names_its_devices_for_good(world: World) -> None:
    record = place(world, "idle")
    world.fleet.remove_node("idle")
    world.now += 10
    world.add({"other": [BUSY, BUSY]})

    view = json.loads(write_json_in_full(decision_view(record, brief=False)))

    devices = view["explained"][0]["devices"]
    assert [(device["index"], device["uuid"]) for device in devices] == [
        (0, "GPU-idle-0"),
        (1, "GPU-idle-1"),
    ]
    assert {device["source"] for device in devices} == {"prometheus"}
    assert {device["age_seconds"] for device in devices} == {0.0}
    assert {device["freshness"] for device in devices} == {"fresh"}


def test_a_verdict_has_each_device_as_the_decision_saw_it() -> None:
    world = World()
    world.register_node("x", gpus=2)
    world.add_pod("a", "x", gpus=1)
    signs = {
        Signal.TEMPERATURE: 61.5,
        Signal.MEMORY_TEMPERATURE: 70.0,
        Signal.CLOCK_EVENT_REASONS: float(0x20),
    }
    cards = [Gpu(busy=0.4, used_gib=8.0, tenants=("team/a",), signs=signs), Gpu(xid=94.0)]
    world.add({"x": cards, "y": [BUSY]})
    record = place(world, "x", "y")

    view = json.loads(write_json_in_full(decision_view(record, brief=False)))

    verdict, other = view["explained"]
    reported = {"source": "prometheus", "age_seconds": 0.0}
    activity = reported | {"signal": "gpu_utilization_ratio"}
    usual = {
        "freshness": "fresh",
        "assumed": 0,
        "memory_total_bytes": 80 << 30,
        "free_bytes": 80 << 30,
        "declared_bytes": 0,
        "others_bytes": 0,
        "gpu_instance_id": "",
        "source": "prometheus",
        "age_seconds": 0.0,
    }
    assert verdict.pop("devices") == [
        usual
        | {
            "can_land": False,
            "state": "busy",
            "utilization_ratio": pytest.approx(0.4),
            "memory_used_ratio": 0.1,
            "used": 1,
            "memory_free_bytes": 72 << 30,
            "index": 0,
            "uuid": "GPU-x-0",
            "health": "",
            "temperature_celsius": 61.5,
            "memory_temperature_celsius": 70.0,
            "throttling": "software thermal slowdown",
            "signals": {
                "utilization": activity,
                "memory": reported,
                "temperature": reported,
                "throttling": reported,
            },
        },
        usual
        | {
            "can_land": True,
            "state": "idle",
            "utilization_ratio": 0.0,
            "memory_used_ratio": 0.0,
            "used": 0,
            "memory_free_bytes": 80 << 30,
            "index": 1,
            "uuid": "GPU-x-1",
            "health": "counts less: XID 94: contained memory error",
            "temperature_celsius": None,
            "memory_temperature_celsius": None,
            "throttling": None,
            "signals": {"utilization": activity, "memory": reported, "health": reported},
        },
    ]
    parts, factors = verdict.pop("parts"), verdict.pop("factors")
    assert sum(part["adds"] for part in parts) == pytest.approx(verdict.pop("score"))
    for part in parts:
        assert part["adds"] == pytest.approx(part["share"] * part["value"])
    for factor in factors:
        assert factor["keeps"] == pytest.approx(1 - factor["value"])
    assert verdict == {
        "node": "x",
        "resource": GPU,
        "rejection": None,
        "landing": 1,
        "idle": 1,
        "needed": 1,
        "taken": 0,
        "chance": 1.0,
        "is_agreed": True,
        "suspicion": 0.0,
        "model": "H100 80GB HBM3",
        "is_late": False,
        "band": "likely",
        "reason": "certain to get an idle GPU; ill health costs 50 %; leaves none of 2 usable",
    }
    assert other["rejection"] == "node(s) had GPUs in use by processes outside Kubernetes"
    assert view["runner_up"] is None


def test_the_request_is_shown_as_the_pod_made_it() -> None:
    whole = request(
        memory_bytes=1 << 30,
        memory_share=0.25,
        memory_source="MEMORY",
        requires_idle=True,
        thresholds=Thresholds(utilization=0.2, memory=0.7),
        strategy=Strategy.PACK,
        preferred_models=("H100",),
        required_models=("H100", "A100"),
        targets=(Target("n", (0, 1)),),
        target_policy=TargetPolicy.PREFER,
    )

    assert msgspec.to_builtins(request_view(whole)) == {
        "resources": {GPU: 1},
        "gpu_memory_bytes": 1 << 30,
        "gpu_memory_share": 0.25,
        "gpu_memory_from": "MEMORY",
        "require_idle": True,
        "max_utilization_ratio": 0.2,
        "max_memory_ratio": 0.7,
        "strategy": "pack",
        "prefer_models": ["H100"],
        "require_models": ["H100", "A100"],
        "targets": ["n::0,1"],
        "target_policy": "prefer",
    }
    plain = request_view(request())
    assert (plain.gpu_memory_share, plain.gpu_memory_from) == (None, None)


def test_a_decision_in_full_takes_a_step_for_every_few_nodes(world: World) -> None:
    world.placer.detailed = 2 * PIECE_VERDICTS
    nodes = {f"n{at:02}": [IDLE] for at in range(2 * PIECE_VERDICTS)}
    world.add(nodes)
    record = place(world, *nodes)
    rendered = sum(1 for _ in record.details_in_steps())

    steps = sum(1 for _ in decision_in_steps(record, brief=False))

    assert steps - rendered <= 2 + 1 + 1  # verdicts, names, and what frees the details


def test_a_binding_is_shown_with_whether_it_followed_us(world: World) -> None:
    record = place(world, "busy", "idle")

    world.history.note_bound("uid-requester", "idle")
    view = decision_view(record, brief=True)

    assert (view["bound_node"], view["is_followed"]) == ("idle", True)
    assert not {"nodes", "explained"} & view.keys()
