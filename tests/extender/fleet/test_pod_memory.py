"""Test the memory that pods were seen to use on shared devices."""

from typing import Final

import pytest

from extender.core.devices.readings import DeviceKey
from extender.core.nodes.inventory import PodPhase, PodRecord
from extender.fleet.pods import _MOST_DEVICES, KnownPods, PodMemory, Use

A: Final = DeviceKey(("GPU-0", ""))
B: Final = DeviceKey(("GPU-1", ""))


def pod(uid: str) -> PodRecord:
    return PodRecord(
        uid=uid,
        namespace="ns",
        name=uid,
        node="node",
        phase=PodPhase.RUNNING,
        resources={"nvidia.com/gpu": 1},
    )


@pytest.fixture
def pods() -> KnownPods:
    known = KnownPods()
    for uid in ("one", "two"):
        known.put(pod(uid))
    return known


@pytest.fixture
def memory(pods: KnownPods) -> PodMemory:
    return pods.memory


def test_the_maximum_is_kept_and_frequent_reports_are_one_sample(memory: PodMemory) -> None:
    for at, count in ((0.0, 5), (10.0, 9), (60.0, 3), (120.0, 4)):
        memory.note("node", [(A, "one", count), (A, "two", 1)], at)

    assert memory.use("one", [A]) == Use(memory_most_bytes=9.0, samples=3, seconds=120.0)


def test_the_fullest_device_and_the_fewest_samples_count(memory: PodMemory) -> None:
    memory.note("node", [(A, "one", 5)], 0.0)
    memory.note("node", [(A, "one", 5), (B, "one", 7)], 60.0)

    assert memory.use("one", [A, B]) == Use(memory_most_bytes=7.0, samples=1, seconds=0.0)
    assert memory.use("two", [A]) == Use()
    assert memory.use("one", [A, DeviceKey(("GPU-2", ""))]) == Use()


def test_an_agents_report_counts_only_for_the_pods_of_its_node(memory: PodMemory) -> None:
    memory.note("elsewhere", [(A, "one", 5)], 0.0)
    memory.note("node", [(A, "stranger", 5)], 0.0)

    assert memory.use("one", [A]) == memory.use("stranger", [A]) == Use()


def test_a_pod_that_is_gone_is_forgotten(pods: KnownPods, memory: PodMemory) -> None:
    memory.note("node", [(A, "one", 5)], 0.0)

    pods.pop("one")
    pods.put(pod("one"))

    assert memory.use("one", [A]) == Use()


def test_only_the_last_devices_of_a_pod_are_kept(memory: PodMemory) -> None:
    devices = [DeviceKey((f"GPU-{at}", "")) for at in range(_MOST_DEVICES + 1)]
    for device in devices:
        memory.note("node", [(device, "one", 7)], 0.0)

    assert memory.last("one", devices[0]) is None
    assert memory.use("one", devices[:1]) == Use()
    assert [memory.last("one", device) for device in devices[1:]] == [7] * _MOST_DEVICES
    assert memory.use("one", devices[1:]).memory_most_bytes == 7
