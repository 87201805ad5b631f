"""The model: who gets which device, and what its readings say."""

import pytest

from simulation.demo_fleet import DEMO_NODES, big_fleet, demo_fleet
from simulation.devices import Load, Loss, PodRef, card_uuid
from simulation.fleet import SimulatedFleet
from simulation.models import A100_40GB, GIB
from simulation.nodes import GPU_RESOURCE, Allocation, FleetError, NodeSpec, Sharing
from tests.simulation.builders import NOW, Clock, fleet, pod, spec

LAYOUT = (("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"),)


def utilizations(built: SimulatedFleet, node: str = "node-a") -> list[float]:
    return [view.utilization for view in built.views(node)]


def test_the_uuid_depends_on_node_and_index_alone() -> None:
    uuids = {card_uuid(node, index) for node in ("node-a", "node-b") for index in range(8)}

    assert len(uuids) == 16
    assert fleet().card("node-a", 1).uuid == card_uuid("node-a", 1)


def test_a_whole_gpu_goes_to_one_pod_alone() -> None:
    built = fleet(spec(cards=2))

    first = built.place(pod("a"), "node-a", GPU_RESOURCE)
    second = built.place(pod("b"), "node-a", GPU_RESOURCE)

    assert first.devices[0] is not second.devices[0]
    with pytest.raises(FleetError, match=r"cannot place team/c on node-a: 0 of 1 nvidia\.com/gpu"):
        built.place(pod("c"), "node-a", GPU_RESOURCE)


def test_a_refused_pod_takes_nothing() -> None:
    built = fleet(spec(cards=2))

    with pytest.raises(FleetError):
        built.place(pod(), "node-a", GPU_RESOURCE, 3)

    assert all(not device.tenants for device in built.node("node-a").devices)
    assert built.placements == {}


def test_shared_gpus_are_handed_out_to_the_one_with_fewest_pods() -> None:
    built = fleet(spec(cards=2, replicas=4))

    indices = [
        built.place(pod(str(number)), "node-a", GPU_RESOURCE).devices[0].card.index
        for number in range(4)
    ]

    assert indices == [0, 1, 0, 1]


def test_packed_allocation_fills_one_gpu_before_the_next() -> None:
    built = fleet(
        NodeSpec(
            name="node-a",
            model=A100_40GB,
            cards=2,
            sharing=Sharing.TIME_SLICING,
            replicas=2,
            allocation=Allocation.PACKED,
        )
    )

    indices = [
        built.place(pod(str(number)), "node-a", GPU_RESOURCE).devices[0].card.index
        for number in range(4)
    ]

    assert indices == [0, 0, 1, 1]


def test_a_released_replica_is_handed_out_again() -> None:
    built = fleet(spec(cards=1, replicas=2))
    for name in "ab":
        built.place(pod(name), "node-a", GPU_RESOURCE)

    assert built.release("uid-a")
    built.place(pod("c"), "node-a", GPU_RESOURCE)

    held = {tenant.pod.name: tenant.replica for tenant in built.device("node-a", 0).tenants}
    assert held == {"b": 1, "c": 0}
    assert not built.release("uid-a")


def test_pods_without_uid_are_identified_by_name() -> None:
    built = fleet(spec(cards=2))
    for name in "ab":
        built.place(PodRef(namespace="team", name=name), "node-a", GPU_RESOURCE)

    built.release("team/a")

    assert [len(device.tenants) for device in built.node("node-a").devices] == [0, 1]


def test_a_mig_pod_gets_an_instance_of_its_profile() -> None:
    built = fleet(spec(model=A100_40GB, cards=2, mig=LAYOUT))

    placement = built.place(pod(), "node-a", "nvidia.com/mig-2g.10gb")

    assert placement.devices[0].profile == "2g.10gb"
    assert built.node("node-a").resources() == (
        "nvidia.com/gpu",
        "nvidia.com/mig-1g.5gb",
        "nvidia.com/mig-2g.10gb",
        "nvidia.com/mig-3g.20gb",
    )
    with pytest.raises(FleetError, match="0 of 1"):
        built.place(pod("b"), "node-a", "nvidia.com/mig-2g.10gb")


def test_instance_ids_differ_within_a_card() -> None:
    built = fleet(spec(model=A100_40GB, cards=1, mig=LAYOUT))

    ids = [device.gpu_instance_id for device in built.node("node-a").devices]

    assert ids == ["1", "3", "7", "8"]


def test_an_unknown_mig_profile_is_refused_by_name() -> None:
    with pytest.raises(FleetError, match=r"node node-a: .* has no profile 9g\.5gb"):
        spec(model=A100_40GB, mig=(("9g.5gb",),))


def test_load_shows_after_the_warm_up() -> None:
    clock = Clock()
    built = fleet(spec(cards=1), clock=clock)
    built.warm_up_seconds = 30.0
    built.place(pod(), "node-a", GPU_RESOURCE, load=Load(utilization=0.8, memory_bytes=20 * GIB))

    cold = built.views("node-a")[0]
    clock.now = NOW + 30.0
    warm = built.views("node-a")[0]

    assert (cold.utilization, cold.memory_used_bytes) == (0.0, 0)
    assert (warm.utilization, warm.memory_used_bytes) == (0.8, 20 * GIB)
    assert cold.tenants[0].pod.name == "pod-a"


def test_readings_add_up_and_never_exceed_the_device() -> None:
    built = fleet(spec(cards=1, replicas=4))
    built.set_utilization("node-a", 0, 0.3)
    built.set_memory_used("node-a", 0, 60 * GIB)
    built.set_foreign("node-a", 0, Load(utilization=0.2, memory_bytes=30 * GIB))

    before = built.views("node-a")[0]
    built.place(pod(), "node-a", GPU_RESOURCE, load=Load(utilization=0.9))
    after = built.views("node-a")[0]

    room_bytes = (before.memory_mib - before.reserved_mib) << 20
    assert before.utilization == pytest.approx(0.5)
    assert before.memory_used_bytes == room_bytes
    assert after.utilization == 1.0


def test_foreign_load_ends() -> None:
    built = fleet()
    built.set_foreign("node-a", 1, Load(utilization=0.9, memory_bytes=GIB))

    built.set_foreign("node-a", 1, None)

    assert utilizations(built) == [0.0, 0.0]


def test_power_and_heat_follow_the_load_unless_set() -> None:
    built = fleet()
    built.set_utilization("node-a", 0, 1.0)
    built.card("node-a", 1).temperature_celsius = 93.0
    built.card("node-a", 1).power_watts = 500.0

    busy, hot = built.views("node-a")

    assert (busy.power_watts, busy.temperature_celsius) == (700.0, 78)
    assert (hot.power_watts, hot.temperature_celsius) == (500.0, 93)


def test_frozen_readings_show_no_placement_until_thawed() -> None:
    built = fleet(spec(), spec("node-b"))
    built.freeze("node-a")
    for node in ("node-a", "node-b"):
        built.place(pod(node), node, GPU_RESOURCE, load=Load(utilization=0.7))

    frozen, live = utilizations(built, "node-a"), utilizations(built, "node-b")
    built.thaw()

    assert frozen == [0.0, 0.0]
    assert live == [0.7, 0.0]
    assert utilizations(built, "node-a") == [0.7, 0.0]


def test_a_vanished_gpu_is_not_seen_any_more() -> None:
    built = fleet(spec(cards=3))

    built.kill_device("node-a", 1)

    assert [view.index for view in built.views("node-a")] == [0, 2]


def test_a_gpu_lost_with_xid_79_is_seen_with_it() -> None:
    built = fleet(spec(cards=2))

    built.kill_device("node-a", 1, Loss.XID_79)

    assert [view.xid for view in built.views("node-a")] == [0, 79]


def test_a_loss_that_the_kubelet_noticed_leaves_allocatable_and_is_never_handed_out() -> None:
    built = fleet(spec(cards=2))

    built.kill_device("node-a", 0, is_noticed=True)

    node = built.node("node-a")
    assert node.count(GPU_RESOURCE) == 2
    assert node.count(GPU_RESOURCE, is_allocatable=True) == 1
    assert built.place(pod(), "node-a", GPU_RESOURCE).devices[0].card.index == 1


@pytest.mark.parametrize("node", ["nowhere", ""], ids=["unknown", "empty"])
def test_an_unknown_node_is_named(node: str) -> None:
    with pytest.raises(FleetError, match="no such node"):
        fleet().views(node)


def test_the_demo_has_a_dozen_nodes_that_say_what_they_are() -> None:
    built = demo_fleet(Clock())

    assert len(built.nodes) == len(DEMO_NODES) == 12
    assert all(node.spec.description for node in built.nodes.values())
    assert len({node.spec.address for node in built.nodes.values()}) == 12
    assert built.node("gpu-v100-02").silent_since == NOW - 240.0
    assert max(utilizations(built, "gpu-h100-01")) == 0.0
    assert min(utilizations(built, "gpu-h100-02")) > 0.9


def test_a_big_fleet_is_the_same_for_the_same_seed() -> None:
    first, second = big_fleet(nodes=20, gpus=4), big_fleet(nodes=20, gpus=4)

    loads = [[utilizations(built, node) for node in built.nodes] for built in (first, second)]
    assert loads[0] == loads[1]
    assert {resource for node in first.nodes.values() for resource in node.resources()} == {
        "nvidia.com/gpu",
        "nvidia.com/mig-1g.5gb",
        "nvidia.com/mig-2g.10gb",
        "nvidia.com/mig-3g.20gb",
    }
