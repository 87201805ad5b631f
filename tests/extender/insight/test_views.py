import json
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.readings import DeviceInfo, Readings, Signal
from extender.core.nodes.inventory import NodeRecord
from extender.core.policy import Policy
from extender.core.request.request import PodRef, parse_request
from extender.insight.views import (
    _freshness_word,
    decision_view,
    gpus_of,
    node_views,
    node_with_gpus,
)
from extender.placement.history import DecisionRecord
from extender.server.redaction import write_json_in_full
from testkit.builders import GPU
from testkit.cards import BUSY, CARD_BYTES, IDLE, Gpu
from testkit.mig import mig_world
from testkit.webhook_requests import pod
from testkit.world import World

PROFILE = "1g.10gb"

SIGHTS = {
    "idle": (0.0, 0.0, 0.0),
    "busy": (0.9, 0.8, 0.0),
    "foreign": (0.9, 0.4, 0.0),
    "dead": (0.0, 0.0, 79.0),
    "silent": (np.nan, np.nan, np.nan),
}


"""Activity, ratio of used memory, and XID of each state."""

DEVICE = st.tuples(st.sampled_from(sorted(SIGHTS)), st.booleans())


"""State of a device, and whether a pod holds it."""

CARDS = st.lists(st.one_of(DEVICE, st.lists(DEVICE, min_size=1, max_size=7)), max_size=8)


"""Cards of a node: whole ones, or the instances of one in MIG mode."""


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


@pytest.mark.parametrize(
    ("freshness", "word"), [(1.0, "fresh"), (0.999, "stale"), (0.01, "stale"), (0.0, "missing")]
)
def test_freshness_has_three_words(freshness: float, word: str) -> None:
    assert _freshness_word(freshness) == word


def test_nodes_keep_the_requested_order(world: World) -> None:
    snapshot = world.fleet.snapshot()

    states = gpus_of(world.fleet, snapshot, ["idle", "busy"])

    assert list(states) == ["idle", "busy"]
    assert [gpu.uuid for gpu in states["busy"]] == ["GPU-busy-0", "GPU-busy-1"]
    assert [len(gpus) for gpus in states.values()] == [2, 2]


def test_expected_use_is_not_shown_as_measured() -> None:
    made = World()
    labels = {
        "nvidia.com/gpu.replicas": "4",
        "nvidia.com/gpu.sharing-strategy": "time-slicing",
    }
    made.add({"card": [Gpu(used_gib=5.0)]})
    offered = {GPU: 4}
    node = made.fleet.nodes["card"]
    made.fleet.apply_node(replace(node, allocatable=offered, capacity=offered, labels=labels))

    def why() -> tuple[str, str]:
        (gpu,) = gpus_of(made.fleet, made.fleet.snapshot(), ["card"])["card"]
        return gpu.state, gpu.why

    made.add_pod("a", "card", started=made.now)
    assert why() == (
        "idle",
        "utilization 10% (0% measured, the rest expected of new pods) is below 30%, "
        "memory 6% is below 50%",
    )
    made.add_pod("b", "card", started=made.now)
    assert why() == (
        "busy",
        "memory that its pods request or are expected to use is not below 50%, 6% is measured",
    )
    made.add_pod("c", "card", started=made.now)
    assert why() == (
        "busy",
        "utilization 30% (0% measured, the rest expected of new pods) is not below 30%",
    )


def test_nodes_of_different_sizes_show_each_its_own_gpus(world: World) -> None:
    world.add({"small": [IDLE], "large": [Gpu(used_gib=float(at) / 10) for at in range(8)]})

    states = gpus_of(world.fleet, world.fleet.snapshot(), ["large", "small", "idle"])

    assert [len(gpus) for gpus in states.values()] == [8, 1, 2]
    assert [gpu.index for gpu in states["large"]] == list(range(8))
    used = [gpu.memory_used_ratio for gpu in states["large"]]
    assert used == pytest.approx([at / 800 for at in range(8)])


def test_mig_instances_of_several_profiles_stand_card_by_card(world: World) -> None:
    offered = {"nvidia.com/mig-1g.5gb": 2, "nvidia.com/mig-3g.20gb": 2}
    world.fleet.apply_node(NodeRecord(name="m", allocatable=offered, capacity=offered))
    instances = [(card, *one) for card in (0, 1) for one in (("10", "1g.5gb"), ("2", "3g.20gb"))]
    world.fleet.apply_readings(
        Readings(
            source="prometheus",
            at=world.now,
            devices=tuple(
                DeviceInfo(
                    node="m",
                    uuid=f"GPU-{card}",
                    gpu_instance_id=instance,
                    index=card,
                    model="A100",
                    mig_profile=profile,
                )
                for card, instance, profile in instances
            ),
            columns={Signal.GRAPHICS_ACTIVE: np.zeros(4)},
            measured_at=np.full(4, world.now),
            tenants={},
        )
    )

    (gpus,) = gpus_of(world.fleet, world.fleet.snapshot(), ["m"]).values()

    reported = [(gpu.index, gpu.gpu_instance_id) for gpu in gpus]
    assert reported == [(0, "2"), (0, "10"), (1, "2"), (1, "10")]


@pytest.mark.parametrize(
    ("gpu", "state", "health"),
    [
        (IDLE, "idle", ""),
        (
            Gpu(xid=31.0, signs={Signal.ROW_REMAP_FAILURE: 1.0}),
            "unhealthy",
            "cannot work: row remapping failed (RMA)",
        ),
        (
            Gpu(signs={Signal.FABRIC_MANAGER_STATUS: 4.0}),
            "unhealthy",
            "cannot work: fabric manager failed",
        ),
        (
            Gpu(signs={Signal.RECOVERY_ACTION: 1.0}),
            "unhealthy",
            "cannot work: recovery action: reset",
        ),
        (
            Gpu(xid=94.0),
            "idle",
            "counts less: XID 94: contained memory error",
        ),
        (
            Gpu(signs={Signal.ROWS_REMAPPED_LATELY: 12.0}),
            "idle",
            "counts less: memory rows remapped within a day: 12",
        ),
        (
            Gpu(xid=74.0),
            "idle",
            "cannot work for pods with several GPUs: XID 74: NVLink error",
        ),
    ],
)
def test_gpu_states_its_health_problems(world: World, gpu: Gpu, state: str, health: str) -> None:
    world.add({"node": [gpu]})

    ((seen,),) = gpus_of(world.fleet, world.fleet.snapshot(), ["node"]).values()

    assert (seen.state, seen.health) == (state, health)
    assert seen.why == health if state == "unhealthy" else seen.why.startswith("utilization")


def test_a_gpu_that_is_missing_says_so(world: World) -> None:
    world.add({"node": [IDLE, IDLE]})
    world.register_node("node", gpus=3)

    ((_, _, lost),) = gpus_of(world.fleet, world.fleet.snapshot(), ["node"]).values()

    assert (lost.state, lost.health) == ("unknown", "counts less: missing among its siblings")


def test_node_states_a_withdrawn_gpu(world: World) -> None:
    world.add({"node": [IDLE, IDLE]})
    world.register_node("node", allocatable={GPU: 1}, capacity={GPU: 2})

    (seen,) = gpus_of(world.fleet, world.fleet.snapshot(), ["node"]).values()

    why = "counts less: the kubelet offers fewer GPUs than its node has"
    assert [gpu.health for gpu in seen] == [why, why]


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


def test_the_instances_of_a_card_are_counted_apart_from_gpus() -> None:
    mig = mig_world()
    gpus, instances = _counts(mig, "node-m")

    assert sum(gpus.values()) == 0
    assert sum(instances.values()) == 4
    assert (instances["idle"], instances["foreign"]) == (2, 2)


def test_a_node_without_gpus_has_none(world: World) -> None:
    world.register_node("plain", allocatable={}, capacity={})

    assert [sum(one.values()) for one in _counts(world, "plain")] == [0, 0]


def _counts(world: World, name: str) -> list[dict[str, int]]:
    """Return the counts of a node's GPUs, and those of its MIG instances."""
    node = node_with_gpus(world.fleet, world.fleet.snapshot(), name)
    shown = json.loads(write_json_in_full(node))
    return [shown["gpu_states"], shown["mig_states"]]


def test_the_driver_is_reported_by_telemetry_else_by_labels(world: World) -> None:
    label = {"nvidia.com/cuda.driver-version.full": "570.1.2"}
    world.register_node("labelled", gpus=1, labels=label)
    world.register_node("idle", gpus=2, labels=label)

    views = node_views(world.fleet, world.fleet.snapshot(), ["labelled", "idle"])

    assert [node.driver_version for node, _ in views] == ["570.1.2", "580.95.05"]


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


def test_a_binding_is_shown_with_whether_it_followed_us(world: World) -> None:
    record = place(world, "busy", "idle")

    world.history.note_bound("uid-requester", "idle")
    view = decision_view(record, brief=True)

    assert (view["bound_node"], view["is_followed"]) == ("idle", True)
    assert "nodes" not in view


def test_no_value_of_telemetry_breaks_a_view(world: World) -> None:
    odd = Gpu(busy=float("inf"), used_gib=1e300, xid=float("inf"))
    world.add(
        {"odd": [odd, Gpu(busy=-1.0, used_gib=-1.0, xid=-3.0), Gpu(busy=None, used_gib=None)]}
    )

    node = node_with_gpus(world.fleet, world.fleet.snapshot(), "odd")

    text = write_json_in_full(node).decode()
    assert "NaN" not in text
    assert "Infinity" not in text


@given(st.lists(CARDS, min_size=1, max_size=3))
def test_each_device_counts_once_and_mig_instances_count_apart(
    nodes: list[list[Any]],
) -> None:
    world = _world(nodes)
    names = [f"node-{at}" for at in range(len(nodes))]
    snapshot = world.fleet.snapshot()

    views = node_views(world.fleet, snapshot, names)

    for cards, (node, _) in zip(nodes, views, strict=True):
        whole = sum(not isinstance(card, list) for card in cards)
        instances = sum(len(card) for card in cards if isinstance(card, list))
        assert [node.gpu_states.total, node.mig_states.total] == [whole, instances]
    shown = [gpu for gpus in gpus_of(world.fleet, snapshot, names).values() for gpu in gpus]
    total: Counter[str] = Counter()
    for node, _ in views:
        for one in (node.gpu_states, node.mig_states):
            total.update(msgspec.structs.asdict(one))
    held = [gpu for gpu in shown if gpu.state == "idle" and gpu.replicas_used]
    assert total["held_idle"] == len(held)
    for state in ("busy", "foreign", "unhealthy", "excluded"):
        assert total[state] == sum(gpu.state == state for gpu in shown)


def _world(nodes: list[list[Any]]) -> World:
    """Return a world with these nodes, after three readings of their devices."""
    world = World()
    infos, sights, tenants = [], [], {}
    for at, cards in enumerate(nodes):
        node, resources = f"node-{at}", Counter[str]()
        for index, one in enumerate(cards):
            parts = one if isinstance(one, list) else [one]
            for number, (sight, is_held) in enumerate(parts, 7):
                is_part = isinstance(one, list)
                info = DeviceInfo(
                    node=node,
                    uuid=f"GPU-{at}-{index}",
                    index=index,
                    gpu_instance_id=str(number) if is_part else "",
                    mig_profile=PROFILE if is_part else "",
                    model="NVIDIA H100 80GB HBM3",
                )
                resources[f"nvidia.com/mig-{PROFILE}" if is_part else "nvidia.com/gpu"] += 1
                infos.append(info)
                sights.append(SIGHTS[sight])
                if is_held:
                    tenants[info.key] = (f"team/pod-{at}-{index}-{number}",)
        world.fleet.apply_node(NodeRecord(name=node, allocatable=resources, capacity=resources))
    columns = np.array(sights).reshape(-1, 3).T
    for _ in range(3):
        world.now += 10.0
        world.fleet.apply_readings(
            Readings(
                source="prometheus",
                at=world.now,
                devices=tuple(infos),
                columns={
                    Signal.GPU_UTILIZATION: columns[0],
                    Signal.MEMORY_USED: columns[1] * CARD_BYTES,
                    Signal.MEMORY_TOTAL: np.full(len(infos), float(CARD_BYTES)),
                    Signal.XID: columns[2],
                },
                measured_at=np.full(len(infos), world.now),
                tenants=tenants,
            )
        )
    return world
