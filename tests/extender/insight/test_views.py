import json
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.readings import DeviceInfo, DeviceKey, ForeignProcess, Readings, Signal
from extender.core.nodes.inventory import NodeRecord
from extender.insight.views import _freshness_word, gpus_of, node_views, node_with_gpus, order_of
from extender.server.redaction import write_json, write_json_in_full
from testkit.builders import GPU
from testkit.cards import BUSY, CARD_BYTES, IDLE, Gpu, card
from testkit.mig import mig_world
from testkit.world import SHARED, World

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
    labels = {"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "time-slicing"}
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
        (Gpu(xid=94.0), "idle", "counts less: XID 94: contained memory error"),
        (
            Gpu(signs={Signal.ROWS_REMAPPED_LATELY: 12.0}),
            "idle",
            "counts less: memory rows remapped within a day: 12",
        ),
        (Gpu(xid=74.0), "idle", "cannot work for pods with several GPUs: XID 74: NVLink error"),
    ],
)
def test_gpu_states_its_health_problems(world: World, gpu: Gpu, state: str, health: str) -> None:
    world.add({"node": [gpu]})

    ((seen,),) = gpus_of(world.fleet, world.fleet.snapshot(), ["node"]).values()

    assert (seen.state, seen.health) == (state, health)
    assert seen.why == health if state == "unhealthy" else seen.why.startswith("utilization")


def shown(world: World, node: str = "node") -> list[dict[str, Any]]:
    """Return a node's GPUs as an answer has them."""
    (gpus,) = gpus_of(world.fleet, world.fleet.snapshot(), [node]).values()
    return [json.loads(write_json_in_full(gpu)) for gpu in gpus]


def test_a_gpu_is_described_by_its_readings_and_its_pods() -> None:
    world = World()
    world.register_node("node", gpus=1)
    world.add_pod("a", "node")
    signs = {Signal.TEMPERATURE: 61.5, Signal.POWER: 310.0}
    of_pod = Gpu(used_gib=20.0, xid=43.0, signs=signs, tenants=("team/a",))
    busy = (0.5, 0.7, 0.5, 0.9)
    for each in busy:
        world.now += 10.0
        world.report({"node": [replace(of_pod, busy=each)]})
        world.fleet.snapshot()
    reported = {"source": "prometheus", "age_seconds": 0.0}

    (gpu,) = shown(world)

    assert gpu == {
        "node": "node",
        "resource": GPU,
        "index": 0,
        "uuid": "GPU-node-0",
        "gpu_instance_id": "",
        "mig_profile": "",
        "model": "H100 80GB HBM3",
        "state": "busy",
        "why": "utilization 90% is not below 30%",
        "health": "",
        "utilization_ratio": pytest.approx(np.mean(busy)),
        "utilization_latest_ratio": 0.9,
        "utilization_next_hour_ratio": None,  # the readings cover half a minute
        "utilization_next_hour_low_ratio": None,
        "utilization_next_hour_high_ratio": None,
        "memory_used_ratio": 0.25,
        "memory_free_bytes": 60 << 30,
        "memory_total_bytes": 80 << 30,
        "temperature_celsius": 61.5,
        "power_watts": 310.0,
        "xid": 43,
        "freshness": "fresh",
        "age_seconds": 0.0,
        "source": "prometheus",
        "replicas": 1,
        "replicas_used": 1,
        "assumed": 0,
        "tenants": ["team/a"],
        "signals": {"utilization": reported, "memory": reported},
        "foreign_processes": [],
    }


def test_the_forecast_of_a_gpu_with_a_pod_has_an_interval() -> None:
    world = World()
    world.register_node("node", gpus=1)
    world.add_pod("a", "node")
    for busy in (0.2, 0.6, 0.2, 0.6):
        world.now += 450.0
        world.report({"node": [Gpu(busy=busy, tenants=("team/a",))]})
        world.fleet.snapshot()

    (gpu,) = shown(world)

    low, high = (gpu[f"utilization_next_hour_{name}_ratio"] for name in ("low", "high"))
    assert 0.2 < low < gpu["utilization_next_hour_ratio"] < high


def test_a_gpu_that_is_missing_has_no_values() -> None:
    world = World()
    world.add({"node": [IDLE, IDLE]})
    world.register_node("node", gpus=3)

    *_, lost = shown(world)

    known = {name: value for name, value in lost.items() if value not in (None, "", [], {})}
    assert known == {
        "node": "node",
        "resource": GPU,
        "state": "unknown",
        "why": "no source has shown it",
        "health": "counts less: missing among its siblings",
        "freshness": "missing",
        "source": "none",
        "replicas": 1,
        "replicas_used": 0,
        "assumed": 0,
    }


FOREIGN = "20.0 GiB and 40% in use, and no pod holds it"
TOO_OLD = "its last reading is too old, or older than its tenants: "


@pytest.mark.parametrize(
    ("gpu", "age", "state", "why"),
    [
        (Gpu(busy=0.4, used_gib=20.0), 0, "foreign", FOREIGN),
        (Gpu(busy=0.9), 0, "busy", "utilization 90% is not below 30%"),
        (Gpu(busy=0.3, tenants=("team/a",)), 0, "busy", "utilization 30% is not below 30%"),
        (Gpu(used_gib=40.0, tenants=("team/a",)), 0, "busy", "memory 50% is not below 50%"),
        (IDLE, 200, "stale", "its last reading is stale: it was measured 200 s ago"),
        (IDLE, 1000, "unknown", f"{TOO_OLD}1000 s"),
        (Gpu(busy=None, used_gib=1.0), 30, "unknown", f"{TOO_OLD}30 s"),
        (Gpu(busy=0.1, used_gib=None), 0, "unknown", "its memory in use is unknown"),
    ],
)  # fmt: skip
def test_each_state_has_its_reason(gpu: Gpu, age: float, state: str, why: str) -> None:
    world = World()
    world.add({"node": [gpu]})
    if gpu.tenants:
        world.add_pod("a", "node")
        world.live({"node": [gpu]}, 600)
    world.now += age

    (found,) = shown(world)

    assert (found["state"], found["why"], found["age_seconds"]) == (state, why, age)
    freshness = {0: "fresh", 30: "fresh", 200: "stale", 1000: "missing"}
    assert found["freshness"] == freshness[int(age)]
    unread = {"utilization_ratio": gpu.busy, "memory_used_ratio": gpu.used_gib}
    for name, value in unread.items():
        assert (found[name] is None) == (value is None or age == 1000)


def test_a_gpu_is_stale_if_only_its_memory_is() -> None:
    world = World()
    world.add({"node": [IDLE]})
    for _ in range(20):
        world.now += 10.0
        world.report({"node": [Gpu(used_gib=None)]})
        world.fleet.snapshot()

    (gpu,) = shown(world)

    assert (gpu["state"], gpu["why"]) == ("stale", "its last reading of memory is stale")
    assert gpu["signals"]["utilization"]["age_seconds"] == 0.0
    assert gpu["signals"]["memory"]["age_seconds"] == 200.0


def test_a_gpu_that_another_one_excludes_names_it() -> None:
    world = World()
    world.add({"node": [Gpu(xid=79.0), IDLE]})

    dead, other = shown(world)

    assert (dead["state"], dead["why"]) == ("unhealthy", "cannot work: XID 79: fallen off the bus")
    why = "excluded with its node: GPU 0 has XID 79: fallen off the bus"
    assert (other["state"], other["why"], other["health"]) == ("excluded", why, why)
    assert other["signals"]["health"] == {"source": "prometheus", "age_seconds": 0.0}


def test_a_gpu_without_an_index_is_named_as_another() -> None:
    world = World()
    world.add_node("node", 2)
    for at, device in enumerate(world.devices.values()):
        device.info = replace(device.info, index=None)
        device.values[Signal.XID] = 0.0 if at else 79.0
    world.read_after(10.0, 3)

    found = sorted(gpu["why"] for gpu in shown(world))

    assert found[1] == "excluded with its node: another GPU has XID 79: fallen off the bus"


def test_foreign_use_of_a_shared_gpu_is_stated_beside_its_state() -> None:
    world = World()
    world.add_shared("s", 4)
    cards = {"s": [card("team/a", used_gib=20.0)]}
    world.live(cards, 60)
    world.have("a", "s", resource=SHARED)
    world.live(cards, 60)
    assert "outside" not in shown(world, "s")[0]["why"]
    world.live({"s": [card(used_gib=20.0)]}, 600)
    processes = (
        ForeignProcess(
            pid=4711,
            name="python3",
            memory_bytes=1 << 28,
            started_at=0.0,
            pod="team/a",
            container="main",
        ),
        ForeignProcess(
            pid=4712, name="x", memory_bytes=None, started_at=None, pod="", container=""
        ),
    )
    world.fleet.note_foreign("s", {DeviceKey(("GPU-s-0", "")): processes})

    (gpu,) = shown(world, "s")
    (gpus,) = gpus_of(world.fleet, world.fleet.snapshot(), ["s"]).values()

    assert [json.loads(write_json(one))["foreign_processes"] for one in gpus] == [[]]  # to no one
    assert (gpu["replicas"], gpu["replicas_used"]) == (4, 1)
    assert gpu["foreign_processes"] == [
        {
            "pid": 4711,
            "name": "python3",
            "memory_bytes": 1 << 28,
            "started_at": "1970-01-01T00:00:00.000+00:00",
            "pod": "team/a",
            "container": "main",
        },
        {
            "pid": 4712,
            "name": "x",
            "memory_bytes": None,
            "started_at": None,
            "pod": "",
            "container": "",
        },
    ]


def test_a_node_is_described_by_its_gpus_and_pods() -> None:
    world = World()
    world.register_node("node", gpus=2)
    for name in ("b", "a"):
        world.add_pod(name, "node")
    world.add({"node": [Gpu(busy=0.4, used_gib=8.0, tenants=("team/a",)),
                        Gpu(busy=None, used_gib=16.0)]})  # fmt: skip

    node = json.loads(
        write_json_in_full(node_with_gpus(world.fleet, world.fleet.snapshot(), "node"))
    )

    assert [gpu["index"] for gpu in node.pop("gpus")] == [0, 1]
    none = {"idle": 0, "held_idle": 0, "busy": 0, "foreign": 0, "unhealthy": 0, "excluded": 0}
    none |= {"unknown": 0}
    assert node == {
        "name": "node",
        "model": "H100 80GB HBM3",
        "driver_version": "580.95.05",
        "is_ready": True,
        "is_unschedulable": False,
        "resources": {GPU: {"capacity": 2, "allocatable": 2, "held": 2, "assumed": 0}},
        "gpu_states": none | {"busy": 1, "unknown": 1},
        "mig_states": none,
        "utilization_mean_ratio": pytest.approx(0.4),
        "memory_used_mean_ratio": pytest.approx(0.15),
        "early_failures": 0,
        "pods": ["team/a", "team/b"],
    }


def test_a_node_without_readings_has_no_mean() -> None:
    world = World()
    world.register_node("node", gpus=1, allocatable={}, capacity={GPU: 1}, is_ready=False)

    node = node_with_gpus(world.fleet, world.fleet.snapshot(), "node")

    assert (node.utilization_mean_ratio, node.memory_used_mean_ratio) == (None, None)
    assert (node.model, node.driver_version, node.is_ready) == ("", "", False)
    counts = node.resources[GPU]
    assert (counts.capacity, counts.allocatable, counts.held) == (1, 0, 0)


def test_cards_of_unknown_index_and_instances_have_their_place() -> None:
    infos = [
        DeviceInfo(node="n", uuid="GPU-b", index=0, gpu_instance_id=instance)
        for instance in ("", "0", "1", "10")
    ]
    infos += [
        DeviceInfo(node="n", uuid="GPU-a", index=1),
        DeviceInfo(node="n", uuid=""),
        DeviceInfo(node="n", uuid="GPU-a"),
        DeviceInfo(node="n", uuid="GPU-c"),
    ]

    turned = infos[::-1]
    assert sorted(turned, key=order_of) == infos


def test_node_states_a_withdrawn_gpu(world: World) -> None:
    world.add({"node": [IDLE, IDLE]})
    world.register_node("node", allocatable={GPU: 1}, capacity={GPU: 2})

    (seen,) = gpus_of(world.fleet, world.fleet.snapshot(), ["node"]).values()

    why = "counts less: the kubelet offers fewer GPUs than its node has"
    assert [gpu.health for gpu in seen] == [why, why]


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
def test_each_device_counts_once_and_mig_instances_count_apart(nodes: list[list[Any]]) -> None:
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
