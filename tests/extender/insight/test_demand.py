"""Metrics for autoscalers: requested GPUs of waiting pods, and idle GPUs by node pool."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.api.page.device_index import GROUP_LABELS
from extender.api.status_routes import FleetCollector
from extender.core.decision.assessment import DeviceRequest, assess
from extender.core.decision.evaluation import estimates
from extender.core.devices.gpu_models import _NAMES
from extender.core.nodes.batches import current_batch
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import POOL_LABELS, NodeRecord, PodPhase, is_shown
from extender.insight.demand import _MOST_POOLS, Supply, _pool_of, size_of
from extender.insight.stranded import TypicalNeeds
from extender.sources.kubernetes.records import _wanted_model
from testkit.builders import GPU
from testkit.cards import BUSY, IDLE, Gpu, card
from testkit.world import SHARED, World

POOL = "karpenter.sh/nodepool"


@pytest.fixture
def world() -> World:
    world = World()
    world.metrics.registry.register(
        FleetCollector(world.fleet, tuple, lambda: 0, lambda: world.now)
    )
    return world


def waiting(world: World, name: str, gpus: int = 1, **rest: Any) -> None:
    world.add_waiting(name, resources={GPU: gpus}, **{"is_unscheduled": True, **rest})


def demand(world: World, model: str, size: str) -> tuple[float, float]:
    labels = {"resource": GPU, "model": model, "size": size}
    return world.count("idlegpu_waiting_pods", **labels), world.count(
        "idlegpu_waiting_gpus", **labels
    )


def supply(
    world: World, pool: str, resource: str = GPU, model: str = "h100"
) -> tuple[float, float]:
    labels = {"pool": pool, "resource": resource, "model": model}
    return world.count("idlegpu_pool_gpus", **labels), world.count(
        "idlegpu_pool_idle_gpus", **labels
    )


# --- demand ---------------------------------------------------------------------------------------


def test_pods_without_a_node_are_counted_by_request(world: World) -> None:
    waiting(world, "a", 1)
    waiting(world, "b", 8, wanted_model="h100")
    waiting(world, "c", 6, wanted_model="h100", is_refused=True)
    waiting(world, "d", 16)

    assert demand(world, "any", "1") == (1, 1)
    assert demand(world, "h100", "8") == (2, 14)
    assert demand(world, "any", "more") == (1, 16)


@pytest.mark.parametrize(
    "state",
    [
        {"is_unscheduled": False},
        {"is_gated": True},
        {"nominated_node": "n"},
        {"is_deleting": True},
        {"node": "n"},
        {"gives_way": True},
        {"phase": PodPhase.FAILED},
    ],
    ids=["not tried", "gated", "nominated", "deleted", "bound", "placeholder", "ended"],
)
def test_pods_that_need_no_further_node_are_no_demand(world: World, state: dict[str, Any]) -> None:
    waiting(world, "a", 1, **state)

    assert demand(world, "any", "1") == (0, 0)


def test_a_resource_that_no_pod_waits_for_has_a_series_of_zero(world: World) -> None:
    world.add({"n": [IDLE]})
    value = world.metrics.registry.get_sample_value
    labels = {"resource": GPU, "model": "any", "size": "1"}

    assert value("idlegpu_waiting_gpus", labels) == value("idlegpu_waiting_pods", labels) == 0
    waiting(world, "a", 8)
    assert value("idlegpu_waiting_gpus", labels) is None
    assert value("idlegpu_waiting_gpus", {**labels, "size": "8"}) == 8


@pytest.mark.parametrize(
    ("spec", "annotation", "model"),
    [
        ({"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}}, "", "a100"),
        ({"nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-l4"}}, "H100", "l4"),
        ({}, "H100,A100", "h100"),
        ({}, " ", ""),
        ({"nodeSelector": {"nvidia.com/gpu.product": "Ours-9000"}}, "", "other"),
        (
            {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {
                                    "matchExpressions": [
                                        {"key": "zone", "operator": "In", "values": ["t4"]},
                                        {
                                            "key": "nvidia.com/gpu.product",
                                            "operator": "NotIn",
                                            "values": ["Tesla-T4"],
                                        },
                                        {
                                            "key": "nvidia.com/gpu.product",
                                            "operator": "In",
                                            "values": ["NVIDIA-H200", "NVIDIA-L4"],
                                        },
                                    ]
                                }
                            ]
                        }
                    }
                }
            },
            "",
            "h200",
        ),
    ],
    ids=["selector", "selector before annotation", "annotation", "blank", "unknown", "affinity"],
)
def test_model_label_is_the_required_else_the_preferred_model(
    spec: dict[str, Any], annotation: str, model: str
) -> None:
    raw = {"metadata": {"annotations": {"idlegpu.io/prefer-models": annotation}}, "spec": spec}

    assert _wanted_model(raw) == model


@given(st.text(max_size=40))
def test_nothing_that_a_pod_says_becomes_a_label(text: str) -> None:
    raw = {"spec": {"nodeSelector": {"nvidia.com/gpu.product": text}}}

    assert _wanted_model(raw) in _NAMES | {"other", ""}


@given(st.integers(1, 1000))
def test_a_size_is_the_least_step_that_holds_it(count: int) -> None:
    size = size_of(count)

    if size == "more":
        assert count > 8
    else:
        assert int(size) / 2 < count <= int(size)


# --- supply ---------------------------------------------------------------------------------------


def test_gpus_are_counted_by_pool_and_those_that_a_pod_could_get(world: World) -> None:
    held = world.have("quiet", "a")
    cards = {"a": [IDLE, BUSY, card(held)], "b": [IDLE], "c": [IDLE], "d": [Gpu(xid=79.0)]}
    world.add(cards)
    world.register_node("a", gpus=3, labels={POOL: "blue"})
    world.register_node("b", gpus=1, labels={POOL: "blue"})
    world.live(cards, 120)

    assert supply(world, "blue") == (4, 2)
    assert supply(world, "none") == (2, 1)


def test_a_gpu_that_an_unknown_pod_holds_is_not_idle(world: World) -> None:
    world.add({"a": [IDLE], "b": [IDLE, IDLE]})
    world.have("hidden", "a")
    world.have("another", "b")
    world.live({"a": [IDLE], "b": [IDLE, IDLE]}, 60)

    assert supply(world, "none") == (3, 1)


def test_foreign_use_takes_whole_gpus_and_not_shared_ones(world: World) -> None:
    foreign = Gpu(used_gib=20.0)
    world.add_shared("s", 2)
    cards = {"a": [foreign, IDLE], "s": [foreign]}
    world.add({"a": cards["a"]})
    world.live(cards, 600)
    telemetry = world.fleet.snapshot().telemetry
    assert telemetry.is_foreign.sum() == 2

    assert supply(world, "none") == (2, 1)
    assert supply(world, "none", SHARED) == (1, 1)


@pytest.mark.parametrize("state", [{"is_ready": False}, {"is_unschedulable": True}])
def test_idle_gpus_of_a_node_that_takes_no_pods_are_not_offered(
    world: World, state: dict[str, Any]
) -> None:
    cards = {"a": [IDLE, IDLE]}
    world.add(cards)
    assert supply(world, "none") == (2, 2)
    world.register_node("a", gpus=2, **state)

    assert supply(world, "none") == (2, 0)


def test_stranded_gpus_are_no_idle_room_and_are_counted_apart(world: World) -> None:
    world.add({"a": [IDLE] * 4})
    record = world.fleet.nodes["a"]
    world.fleet.apply_node(replace(record, host=HostResources(16_000, 64 << 30)))
    world.fleet.apply_host_use("a", HostResources(13_000, 0))
    world.live({"a": [IDLE] * 4}, 60)
    labels = {"pool": "none", "resource": GPU, "model": "h100"}

    assert supply(world, "none") == (4, 1)
    assert world.count("idlegpu_pool_stranded_gpus", **labels) == 3


def test_each_gpu_of_a_node_with_several_models_counts_under_its_own(world: World) -> None:
    world.add_node("mixed", 3, labels={})
    for index, model in enumerate(["Tesla T4", "NVIDIA A2", "NVIDIA A2"]):
        device = world.card("mixed", index)
        device.info = replace(device.info, model=model)
    world.read()
    assert supply(world, "none", model="a2") == (2, 2)
    assert supply(world, "none", model="t4") == (1, 1)

    world.bind("holder", "mixed", on=[world.card("mixed")])
    world.read_after(60)

    assert supply(world, "none", model="a2") == (2, 2)
    assert supply(world, "none", model="t4") == (1, 0)

    host = HostResources(30_000, 64 << 30)  # for 1 of 3 GPUs beside the pod on the third
    world.fleet.apply_node(replace(world.fleet.nodes["mixed"], host=host))
    world.fleet.apply_host_use("mixed", HostResources(25_000))
    world.read_after(60)

    labels = {"pool": "none", "resource": GPU}
    assert supply(world, "none", model="a2") == (2, 1)
    assert world.count("idlegpu_pool_stranded_gpus", **labels, model="a2") == 1
    assert world.count("idlegpu_pool_stranded_gpus", **labels, model="t4") == 0


def test_gpus_without_a_model_count_under_that_of_their_node(world: World) -> None:
    world.add_node("labelled", 2, labels={"nvidia.com/gpu.product": "Tesla-T4"})
    device = world.card("labelled", 1)
    device.info = replace(device.info, model="NVIDIA A2")
    world.read()

    assert supply(world, "none", model="a2") == (1, 1)
    assert sum(supply(world, "none", model=model)[0] for model in ("t4", "other")) == 1


def test_node_that_returns_during_a_count_is_counted_next_time(world: World) -> None:
    world.add({"a": [IDLE]})
    snapshot = world.fleet.snapshot()
    pool, nodes = snapshot.pools[GPU], dict(world.fleet.nodes)
    back = nodes.pop("a")
    supply = Supply(nodes, snapshot.models, world.fleet.store.model_of, TypicalNeeds({}))
    batch = current_batch(pool, snapshot.telemetry)
    device_request = DeviceRequest(
        count=1, memory_bytes=0.0, thresholds=world.fleet.policy.thresholds
    )
    counting = supply.add_in_steps(
        pool, batch, assess(batch, device_request.columns, estimates(world.fleet.policy))
    )
    next(counting)
    nodes["a"] = back

    assert list(counting) == []
    assert [metric.samples for metric in supply.metrics()] == [[], [], []]


def test_nodes_are_counted_in_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extender.insight.demand._PIECE_NODES", 2)
    world.add({f"n{number}": [IDLE] for number in range(5)})
    snapshot = world.fleet.snapshot()
    pool = snapshot.pools[GPU]
    supply = Supply(
        world.fleet.nodes, snapshot.models, world.fleet.store.model_of, TypicalNeeds({})
    )
    batch = current_batch(pool, snapshot.telemetry)
    device_request = DeviceRequest(
        count=1, memory_bytes=0.0, thresholds=world.fleet.policy.thresholds
    )
    assessment = assess(batch, device_request.columns, estimates(world.fleet.policy))

    assert sum(1 for _ in supply.add_in_steps(pool, batch, assessment)) == 3


def test_a_shared_card_is_offered_as_long_as_a_replica_is_free(world: World) -> None:
    world.add_shared("s", 2)
    world.live({"s": [IDLE]}, 60)
    assert supply(world, "none", SHARED) == (1, 1)
    names = [world.have("a", "s", resource=SHARED)]
    world.live({"s": [card(*names)]}, 600)
    assert supply(world, "none", SHARED) == (1, 1)
    names.append(world.have("b", "s", resource=SHARED))
    world.live({"s": [card(*names)]}, 600)

    assert supply(world, "none", SHARED) == (1, 0)


@pytest.mark.parametrize("label", POOL_LABELS)
def test_a_label_that_names_pools_does_so_everywhere(label: str) -> None:
    assert _pool_of(NodeRecord(name="a", labels={label: "h100"})) == "h100"
    labelled = NodeRecord(name="a", labels={label: "h100", "team": "blue"})
    assert _pool_of(labelled, ("squad", "team")) == "blue"
    assert is_shown(label)
    assert label in GROUP_LABELS


def test_labels_that_the_settings_name_come_first() -> None:
    world = World()
    collector = FleetCollector(world.fleet, tuple, lambda: 0, lambda: world.now)
    world.metrics.registry.register(collector)
    world.add({"a": [IDLE, IDLE]})
    world.register_node("a", gpus=2, labels={POOL: "blue", "team": "vision"})
    world.live({"a": [IDLE, IDLE]}, 10)

    collector.pool_labels = ("team",)

    assert supply(world, "vision") == (2, 2)


def test_more_pools_than_are_distinguished_are_one(world: World) -> None:
    for number in range(_MOST_POOLS + 3):
        world.register_node(f"n{number:03}", gpus=1, labels={POOL: f"p{number:03}"})
    world.live({f"n{number:03}": [IDLE] for number in range(_MOST_POOLS + 3)}, 60)

    pools = {
        sample.labels["pool"]
        for family in world.metrics.registry.collect()
        if family.name == "idlegpu_pool_gpus"
        for sample in family.samples
    }

    assert len(pools) == _MOST_POOLS + 1
    assert supply(world, "other") == (3, 3)
