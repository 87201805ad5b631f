"""Checks that nodes offer their GPUs."""

from typing import Any

import pytest

from tests.extender.cli.doctor.described import MIG, REPLICAS, SHARED, STRATEGY, at, bare
from tests.extender.cli.doctor.things import GPU, device, evidence, found, node, pod, severities

CONFIG = "nvidia.com/device-plugin.config"


# --- IG201 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [{}, {GPU: "0"}])
def test_a_node_with_gpus_that_offers_none_is_reported(capacity: dict[str, str]) -> None:
    facts = at(node(capacity=capacity), pod("nvidia-device-plugin-x", phase="Pending"))

    assert severities("IG201", facts) == ["error"]
    assert "team/nvidia-device-plugin-x is Pending" in evidence("IG201", facts)
    assert "no pod of the device plugin" in evidence("IG201", at(node(capacity=capacity)))


def test_a_node_that_offered_gpus_once_is_reported_without_labels_too() -> None:
    assert severities("IG201", at(bare({GPU: "0"}))) == ["error"]
    assert "capacity nvidia.com/gpu: 0" in evidence("IG201", at(bare({GPU: "0"})))
    assert found("IG201", at(bare({"cpu": "8"}))) == []
    assert found("IG201", at(bare({GPU: "8"}))) == []
    assert found("IG201", at(bare({GPU: "0", MIG: "7"}))) == []
    assert found("IG201", at(bare({GPU: "0", SHARED: "32"}))) == []


def test_a_node_that_offers_gpus_or_has_none_is_well() -> None:
    cpu = node(capacity={}, labels={"nvidia.com/gpu.present": "false"})
    served = pod("dra-driver-nvidia-gpu-kubelet-plugin-x")

    assert found("IG201", at(node())) == []
    assert found("IG201", at(node(capacity={MIG: "7"}))) == []
    assert found("IG201", at(cpu)) == []
    assert found("IG201", at(node(capacity={}), served)) == []
    for name, value in (
        ("nvidia.com/gpu.workload.config", "vm-passthrough"),
        ("nvidia.com/gpu.deploy.device-plugin", "false"),
    ):
        assert found("IG201", at(node(capacity={}, labels={name: value}))) == []


# --- IG202 --------------------------------------------------------------------------------------


def shared(replicas: str, capacity: str, **changes: Any) -> dict[str, Any]:
    labels = {REPLICAS: replicas, STRATEGY: "time-slicing", **changes}
    return node(labels=labels, capacity={SHARED: capacity})


def test_a_capacity_unlike_the_labels_is_reported() -> None:
    facts = at(shared("4", "8"))

    assert severities("IG202", facts) == ["error"]
    assert "nvidia.com/gpu.replicas=4, so 32 expected; capacity is 8" in evidence("IG202", facts)


def test_labels_unlike_the_plugins_configuration_are_reported() -> None:
    sharing = {"timeSlicing": {"resources": [{"name": GPU, "replicas": 10}]}}
    configs = {"sliced": {"version": "v1", "sharing": sharing}}
    facts = at(shared("4", "32", **{CONFIG: "sliced"}), plugin_configs=configs)

    assert severities("IG202", facts) == ["error"]
    assert "time-slicing with 4 replicas" in evidence("IG202", facts)
    assert "configuration says time-slicing with 10" in evidence("IG202", facts)


def test_equal_and_unknown_values_are_no_finding() -> None:
    sharing = {"mps": {"resources": [{"name": GPU, "replicas": 4}]}}
    configs = {"mps": {"version": "v1", "sharing": sharing}, "whole": {"version": "v1"}}
    mig = node(labels={REPLICAS: "0", "nvidia.com/mig.strategy": "mixed"}, capacity={MIG: "56"})

    part = node(labels={REPLICAS: "1"}, capacity={GPU: "6", MIG: "7"})
    bare = node(labels={"nvidia.com/gpu.count": None})

    assert found("IG202", at(node())) == []
    assert found("IG202", at(part)) == []
    assert found("IG202", at(bare)) == []
    # Another check covers a node that offers no GPU.
    assert found("IG202", at(node(capacity={}))) == []
    assert found("IG202", at(shared("4", "32"), plugin_configs=configs)) == []
    assert found("IG202", at(shared("4", "32", **{CONFIG: "gone"}), plugin_configs=configs)) == []
    same = shared("4", "32", **{CONFIG: "mps", STRATEGY: "mps"})
    assert found("IG202", at(same, plugin_configs=configs)) == []
    assert found("IG202", at(node(labels={CONFIG: "whole"}), plugin_configs=configs)) == []
    assert found("IG202", at(mig)) == []


# --- IG203 --------------------------------------------------------------------------------------


def test_gpus_that_are_not_offered_are_reported() -> None:
    facts = at(node(allocatable={GPU: "7"}))

    assert severities("IG203", facts) == ["warning"]
    assert evidence("IG203", facts) == "node-1: nvidia.com/gpu: capacity 8, allocatable 7"
    assert found("IG203", at(node())) == []
    assert found("IG203", at(node(capacity={"cpu": "8"}, allocatable={"cpu": "7"}))) == []


# --- IG204 --------------------------------------------------------------------------------------


MPS = node(labels={REPLICAS: "4", STRATEGY: "mps"}, capacity={GPU: "32"})
DAEMON = "nvidia-device-plugin-mps-control-daemon-x"


def test_a_dead_mps_daemon_is_reported() -> None:
    crashing = [
        {"ready": False, "restartCount": 9, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    ]
    facts = at(MPS, pod(DAEMON, statuses=crashing))

    assert severities("IG204", facts) == ["error"]
    assert "is Running, CrashLoopBackOff, 9 restarts" in evidence("IG204", facts)
    assert "no pod of the MPS control daemon" in evidence("IG204", at(MPS))
    pending = pod(DAEMON, phase="Pending", statuses=[])
    assert f"team/{DAEMON} is Pending" in evidence("IG204", at(MPS, pending))
    assert severities("IG204", at(MPS, pod(DAEMON, node="node-2"))) == ["error"]


def test_a_daemon_that_runs_or_that_no_node_needs_is_well() -> None:
    assert found("IG204", at(MPS, pod(DAEMON))) == []
    assert found("IG204", at(node())) == []


# --- IG206 --------------------------------------------------------------------------------------


def test_pods_that_share_a_gpu_without_saying_their_memory_are_reported() -> None:
    facts = at(shared("4", "32"), pod("a", {SHARED: 1}), pod("b", {SHARED: 1}))

    assert severities("IG206", facts) == ["warning"]
    assert evidence("IG206", facts) == "node-1: team/a, team/b"


def test_pods_that_say_it_or_share_nothing_are_well() -> None:
    sliced = shared("4", "32")
    says = pod("a", {SHARED: 1}, annotations={"idlegpu.io/gpu-memory": "8Gi"})

    assert found("IG206", at(sliced, says)) == []
    assert found("IG206", at(sliced, pod("none"))) == []
    assert found("IG206", at(sliced, pod("over", {SHARED: 1}, phase="Succeeded"))) == []
    assert found("IG206", at(node(), pod("whole", 1))) == []
    assert found("IG206", at(MPS, pod("capped", 1))) == []


def cut(count: str, capacity: str, **labels: str) -> dict[str, Any]:
    reported = {f"{MIG}.count": count, f"{MIG}.replicas": "1", REPLICAS: "0", **labels}
    return node(labels=reported, capacity={MIG: capacity})


def test_instances_that_differ_from_the_offer_are_reported() -> None:
    facts = at(cut("7", "4"))

    assert severities("IG205", facts) == ["error"]
    assert f"{MIG}.count=7 with 1 replicas, capacity {MIG}: 4" in evidence("IG205", facts)


def test_instances_that_differ_from_telemetry_are_reported() -> None:
    seen = tuple(device(0, gpu_instance_id=str(n), mig_profile="1g.10gb") for n in range(5))

    facts = at(cut("7", "7"), devices=seen)

    assert "telemetry shows 5 instances" in evidence("IG205", facts)


def test_a_layout_that_failed_is_reported() -> None:
    failed = cut("7", "7", **{"nvidia.com/mig.config.state": "failed"})
    invalid = node(labels={"nvidia.com/gpu.product": "NVIDIA-A100-MIG-INVALID"})

    assert severities("IG205", at(failed)) == ["error"]
    assert severities("IG205", at(invalid)) == ["error"]


def test_layouts_that_are_alike_or_being_made_are_well() -> None:
    seen = tuple(device(0, gpu_instance_id=str(n), mig_profile="1g.10gb") for n in range(7))
    shares = cut("7", "14", **{f"{MIG}.replicas": "2"})

    assert found("IG205", at(cut("7", "7"), devices=seen)) == []
    assert found("IG205", at(shares)) == []
    assert found("IG205", at(cut("7", "4", **{"nvidia.com/mig.config.state": "pending"}))) == []
    assert found("IG205", at(node())) == []


# --- MIG's strategy `single`: instances are called GPUs -------------------------------------------


def single(count: str, capacity: dict[str, str], **labels: str) -> dict[str, Any]:
    reported = {
        "nvidia.com/gpu.count": count,
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb",
        "nvidia.com/mig.strategy": "single",
        **labels,
    }
    return node(labels=reported, capacity=capacity)


def instances(count: int, cards: int = 1) -> tuple[dict[str, object], ...]:
    return tuple(
        device(0, uuid=f"GPU-{n % cards}", gpu_instance_id=str(n), mig_profile="1g.10gb")
        for n in range(count)
    )


def test_instances_named_gpus_that_differ_from_the_offer_are_reported() -> None:
    facts = at(single("7", {GPU: "4"}))

    assert severities("IG205", facts) == ["error"]
    assert "nvidia.com/gpu.count=7 instances with 1 replicas, capacity nvidia.com/gpu: 4" in (
        evidence("IG205", facts)
    )


def test_instances_named_gpus_that_differ_from_telemetry_are_reported() -> None:
    facts = at(single("7", {GPU: "7"}), devices=instances(5))

    assert "nvidia.com/gpu.count=7, telemetry shows 5 instances" in evidence("IG205", facts)


def test_without_labels_the_capacity_has_to_be_that_of_the_instances() -> None:
    facts = at(bare({GPU: "4"}), devices=instances(7))

    assert severities("IG205", facts) == ["error"]
    assert "capacity nvidia.com/gpu: 4, telemetry shows 7 instances" in evidence("IG205", facts)


@pytest.mark.parametrize(
    ("one", "shown"),
    [
        pytest.param(single("7", {GPU: "7"}), instances(7), id="single"),
        pytest.param(single("7", {GPU: "7"}), (), id="single-nothing-shown"),
        pytest.param(single("7", {SHARED: "14"}, **{REPLICAS: "2"}), instances(7), id="shared"),
        pytest.param(bare({GPU: "7"}), instances(7), id="no-labels"),
        pytest.param(bare({GPU: "14"}), instances(7), id="no-labels-replicas"),
        pytest.param(bare({GPU: "2"}), instances(14, cards=2), id="strategy-none"),
        pytest.param(bare({GPU: "1", MIG: "7"}), (*instances(7), device(1)), id="mixed"),
        pytest.param(bare({GPU: "8"}), tuple(map(device, range(8))), id="whole"),
    ],
)
def test_instances_called_gpus_that_are_alike_are_well(
    one: dict[str, Any], shown: tuple[Any, ...]
) -> None:
    assert found("IG205", at(one, devices=shown)) == []
    assert found("IG107", at(one, devices=shown)) == []
    assert found("IG202", at(one, devices=shown)) == []


# --- remedies, and evidence of odd values ---------------------------------------------------------


def test_remedies_depend_on_whether_the_pod_is_there() -> None:
    bare_node = node(capacity={})
    plugin = pod("nvidia-device-plugin-x", phase="Pending")
    (without,), (broken,) = (found("IG201", at(bare_node, *pods)) for pods in ((), (plugin,)))
    assert without.remedy.startswith("helm upgrade -i nvdp")
    assert broken.remedy.startswith("kubectl -n team logs nvidia-device-plugin-x")

    (without,), (broken,) = (
        found("IG204", at(MPS, *pods)) for pods in ((), (pod(DAEMON, ready=False),))
    )
    assert without.remedy == (
        "kubectl label node node-1 nvidia.com/mps.capable=true --overwrite, because its DaemonSet "
        "selects by this label"
    )
    assert broken.remedy.startswith(f"kubectl -n team logs {DAEMON}")
    assert "mps.capable" not in broken.remedy


@pytest.mark.parametrize("name", ["dra-driver-nvidia-gpu-x", "nvidia-dra-driver-gpu-x"])
def test_a_node_with_a_dra_driver_needs_no_plugin(name: str) -> None:
    assert found("IG201", at(node(capacity={}), pod(name))) == []
    assert severities("IG201", at(node(capacity={}), pod(name, node="node-2"))) == ["error"]


def test_a_label_that_is_not_set_is_one_replica() -> None:
    sharing = {"mps": {"resources": [{"name": GPU, "replicas": 4}]}}
    configs = {"mps": {"sharing": sharing}, "whole": {}}
    unset = {REPLICAS: None}

    assert evidence("IG202", at(node(labels=unset, capacity={GPU: "4"}))) == (
        "node-1: nvidia.com/gpu.count=8, nvidia.com/gpu.replicas=not set, so 8 expected; capacity "
        "is 4"
    )
    # The labels are compared with the configuration only if both are there.
    other = node(labels={**unset, CONFIG: "mps", STRATEGY: "mps"})
    assert found("IG202", at(other, plugin_configs=configs)) == []
    zero = node(labels={REPLICAS: "0", CONFIG: "whole"})
    assert found("IG202", at(zero, plugin_configs=configs)) == []


def test_a_resource_that_is_not_allocatable_at_all_is_reported() -> None:
    facts = at(node(capacity={GPU: "1"}, allocatable={}))

    assert evidence("IG203", facts) == "node-1: nvidia.com/gpu: capacity 1, allocatable 0"


def test_a_daemon_that_has_not_restarted_is_reported_with_its_reason() -> None:
    waiting = [{"ready": False, "state": {"waiting": {"reason": "ImagePullBackOff"}}}]

    assert "is Running, ImagePullBackOff, 0 restarts" in evidence(
        "IG204", at(MPS, pod(DAEMON, statuses=waiting))
    )


def test_instances_on_a_time_sliced_node_share_no_memory() -> None:
    assert found("IG206", at(shared("4", "32"), pod("mig", {MIG: 1}))) == []
    assert severities("IG206", at(shared("4", "32"), pod("whole", 1))) == ["warning"]


@pytest.mark.parametrize("state", ["pending", "rebooting"])
def test_a_layout_that_is_being_made_is_skipped(state: str) -> None:
    assert found("IG205", at(cut("7", "4", **{"nvidia.com/mig.config.state": state}))) == []


def test_a_failed_layout_is_described_by_its_labels() -> None:
    failed = cut("7", "7", **{"nvidia.com/mig.config.state": "failed"})

    assert evidence("IG205", at(failed)) == (
        "node-1: nvidia.com/mig.config.state=failed, nvidia.com/mig.config=not set, "
        "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3"
    )


def test_shares_of_instances_count_under_either_name() -> None:
    labels = {f"{MIG}.count": "7", f"{MIG}.replicas": "2", REPLICAS: "0"}
    renamed = node(labels=labels, capacity={f"{MIG}.shared": "14"})
    without = node(labels={**labels, f"{MIG}.replicas": None}, capacity={})

    assert found("IG205", at(renamed)) == []
    assert evidence("IG205", at(without)) == (
        f"node-1: {MIG}.count=7 with 1 replicas, capacity {MIG}: none"
    )


def test_only_fresh_readings_say_which_instances_there_are() -> None:
    stale = tuple({**one, "freshness": "stale"} for one in instances(5))

    assert found("IG205", at(single("7", {GPU: "7"}), devices=stale)) == []
    assert found("IG205", at(cut("7", "7"), devices=stale)) == []


@pytest.mark.parametrize(
    ("capacity", "shown"),
    [
        pytest.param({"cpu": "8"}, instances(7), id="nothing offered"),
        pytest.param({GPU: "4"}, (*instances(7), device(1)), id="a whole card as well"),
        pytest.param({GPU: "4", MIG: "7"}, instances(7), id="instances offered as such"),
        pytest.param({GPU: "4"}, (), id="nothing shown"),
    ],
)
def test_without_labels_instances_are_not_judged_if_anything_else_explains_them(
    capacity: dict[str, str], shown: tuple[Any, ...]
) -> None:
    assert found("IG205", at(bare(capacity), devices=shown)) == []
