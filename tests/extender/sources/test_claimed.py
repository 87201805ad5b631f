"""GPUs that pods hold through ResourceClaims and ResourceSlices of an API server."""

import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extender.core.nodes.inventory import ClaimedDevice, PodRecord
from extender.core.request.gpu_resources import ResourceNames
from extender.sources.kubernetes.claims import _DeviceName, _reduce_claim, _reduce_slice
from extender.sources.kubernetes.records import reduce_pod
from extender.sources.kubernetes.reflector import _MAX_FAILURES
from testkit.fake_kube import FakeKube, eventually, refusal, running_kube
from testkit.kube_objects import Object, pod
from tests.extender.sources.watched_cluster import FAST, Sink, watched_cluster

FAST_RESYNC = replace(FAST, resync_seconds=0.05)
DRIVER = "gpu.nvidia.com"
ONE = ClaimedDevice(uuid="GPU-1", name="gpu-0")
TWO = ClaimedDevice(uuid="GPU-2", name="gpu-1")
UNTOLD_ONE, UNTOLD_TWO = replace(ONE, uuid=""), replace(TWO, uuid="")


def claim(
    name: str, *pods: str, devices: Iterable[str] = ("gpu-0",), driver: str = DRIVER, **result: Any
) -> Object:
    """Return a claim of node `n` that is allocated to pods."""
    results = [
        {"request": "r", "driver": driver, "pool": "n", "device": device, **result}
        for device in devices
    ]
    holders = [{"resource": "pods", "name": uid, "uid": uid} for uid in pods]
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": f"claim-{name}"},
        "spec": {"devices": {"requests": [{"name": "r"}]}},
        "status": {"allocation": {"devices": {"results": results}}, "reservedFor": holders},
    }


def resource_slice(
    name: str = "s", generation: int = 1, driver: str = DRIVER, **devices: dict[str, str]
) -> Object:
    """Return a slice of node `n`; devices by name, with underscores for dashes."""
    return {
        "metadata": {"name": name, "uid": f"slice-{name}"},
        "spec": {
            "driver": driver,
            "nodeName": "n",
            "pool": {"name": "n", "generation": generation, "resourceSliceCount": 1},
            "devices": [
                {
                    "name": device.replace("_", "-"),
                    "attributes": {key: {"string": text} for key, text in attributes.items()},
                }
                for device, attributes in devices.items()
            ],
        },
    }


TWO_CARDS = resource_slice(
    gpu_0={"type": "gpu", "uuid": "GPU-1"}, gpu_1={"type": "gpu", "uuid": "GPU-2"}
)


def holder(name: str, node: str = "n") -> Object:
    """Return a pod that has a claim and requests nothing else."""
    raw = pod(name, gpus=0, node=node, phase="Running" if node else "Pending")
    raw["spec"]["resourceClaims"] = [{"name": "gpu"}]
    return raw


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    async with running_kube() as server:
        server.dra_refusal = None
        yield server


def held(sink: Sink, uid: str = "p") -> tuple[ClaimedDevice, ...] | None:
    return sink.pods[uid].claimed


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(claim("nic", "p", driver="dra.net"), id="a network driver's"),
        pytest.param(claim("free"), id="not reserved"),
        pytest.param(claim("looks", "p", adminAccess=True), id="only looked at"),
        pytest.param({"metadata": {"uid": "u"}, "status": {}}, id="not allocated"),
        pytest.param({"status": {"allocation": 7, "reservedFor": "x"}}, id="no claim"),
    ],
)
def test_claims_without_a_held_gpu_are_not_stored(raw: Object) -> None:
    assert _reduce_claim(raw) is None


def test_gpus_and_pods_of_a_claim_are_stored() -> None:
    raw = claim("c", "a", "b", devices=["gpu-0", "gpu-3"])
    raw["status"]["reservedFor"].append({"apiGroup": "x", "resource": "pods", "uid": "other"})

    record = _reduce_claim(raw)

    assert record is not None
    assert record.pods == ("a", "b")
    assert record.devices == (_DeviceName("n", "gpu-0"), _DeviceName("n", "gpu-3"))


def test_a_slice_has_the_uuid_of_a_card_and_the_profile_of_an_instance() -> None:
    instance = {"type": "mig", "uuid": "MIG-1", "parentUUID": "GPU-1", "profile": "1g.10gb"}
    qualified = {f"{DRIVER}/uuid": "GPU-2"}

    record = _reduce_slice(resource_slice(gpu_0_mig=instance, gpu_1=qualified, gpu_2={}))

    assert record is not None
    assert record.devices == {
        "gpu-0-mig": ClaimedDevice(uuid="GPU-1", mig_profile="1g.10gb", name="gpu-0-mig"),
        "gpu-1": TWO,
        "gpu-2": ClaimedDevice(uuid="", name="gpu-2"),
    }


def test_slices_of_other_drivers_are_not_stored() -> None:
    assert _reduce_slice(resource_slice(driver="nic.example.com", a={})) is None


async def test_pods_are_reported_with_the_gpus_that_they_hold(
    kube: FakeKube, tmp_path: Path
) -> None:
    kube.put("resourceslices", TWO_CARDS)
    kube.put("resourceclaims", claim("c", "p", devices=["gpu-1"]))
    kube.put("resourceclaims", claim("other", "nic", driver="dra.net"))
    kube.put("pods", holder("p"))
    kube.put("pods", holder("nic"))
    kube.put("pods", pod("plain", node="n"))
    async with watched_cluster(kube, tmp_path, watches=4) as (source, sink):
        assert (held(sink), held(sink, "nic"), held(sink, "plain")) == ((TWO,), (), None)
        assert source.status.keys() == {"nodes", "pods", "resourceclaims", "resourceslices"}


async def test_devices_of_an_unknown_driver_may_be_gpus(kube: FakeKube, tmp_path: Path) -> None:
    kube.put("resourceslices", TWO_CARDS)
    kube.put("resourceclaims", claim("c", "p", driver="gpu.example.com"))
    kube.put("resourceclaims", claim("d", "both", driver="gpu.example.com"))
    kube.put("resourceclaims", claim("e", "both"))
    for name in ("p", "both", "q"):
        kube.put("pods", holder(name))
    async with watched_cluster(kube, tmp_path, watches=4) as (_, sink):
        assert (held(sink), held(sink, "both"), held(sink, "q")) == (None, (ONE,), ())

        kube.put("resourceclaims", claim("f", "q", driver="gpu.example.com"))
        await eventually(lambda: held(sink, "q") is None)
        kube.delete("resourceclaims", "ns/c")
        await eventually(lambda: held(sink) == ())


async def test_pods_of_a_group_hold_the_claims_of_the_group(kube: FakeKube, tmp_path: Path) -> None:
    def member(name: str, group: str) -> Object:
        raw = holder(name)
        raw["spec"]["schedulingGroup"] = {"podGroupName": group}
        return raw

    shared = claim("c")
    reserved = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "uid": "group-1"}
    shared["status"]["reservedFor"] = [{**reserved, "name": "train"}]
    kube.put("resourceslices", TWO_CARDS)
    kube.put("resourceclaims", shared)
    kube.put("resourceclaims", claim("own", "p", devices=["gpu-1"]))
    for name, group in (("p", "train"), ("q", "train"), ("r", "other"), ("s", "third")):
        kube.put("pods", member(name, group))
    async with watched_cluster(kube, tmp_path, watches=4) as (_, sink):
        assert (held(sink), held(sink, "q"), held(sink, "r")) == ((TWO, ONE), (ONE,), ())
        calls = len(sink.calls)

        shared["status"]["reservedFor"] = [{**reserved, "name": "other"}]
        kube.put("resourceclaims", shared)
        await eventually(lambda: held(sink, "r") == (ONE,))
        assert (held(sink), held(sink, "q")) == ((TWO,), ())
        assert set(sink.calls[calls:]) == {"apply p", "apply q", "apply r"}


async def test_changed_claims_are_reported_with_their_pods(kube: FakeKube, tmp_path: Path) -> None:
    kube.put("pods", holder("p"))
    kube.put("pods", holder("q"))
    async with watched_cluster(kube, tmp_path, watches=4) as (_, sink):
        assert (held(sink), held(sink, "q")) == ((), ())

        kube.put("resourceclaims", claim("c", "p", "q"))
        await eventually(lambda: held(sink) == held(sink, "q") == (UNTOLD_ONE,))
        kube.put("resourceslices", TWO_CARDS)
        await eventually(lambda: held(sink) == held(sink, "q") == (ONE,))

        calls = len(sink.calls)
        kube.put("resourceclaims", claim("c", "p", devices=["gpu-0", "gpu-1"]))
        await eventually(lambda: (held(sink), held(sink, "q")) == ((ONE, TWO), ()))
        assert sink.calls[calls:] == ["apply p", "apply q"]

        kube.delete("resourceslices", "/s")
        await eventually(lambda: held(sink) == (UNTOLD_ONE, UNTOLD_TWO))
        kube.delete("resourceclaims", "ns/c")
        await eventually(lambda: held(sink) == ())


async def test_the_newest_generation_of_a_pool_defines_a_device(
    kube: FakeKube, tmp_path: Path
) -> None:
    kube.put("resourceslices", TWO_CARDS)
    kube.put("resourceclaims", claim("c", "p", devices=["gpu-0", "gpu-1"]))
    kube.put("pods", holder("p"))
    async with watched_cluster(kube, tmp_path, watches=4) as (_, sink):
        kube.put("resourceslices", resource_slice("new", 2, gpu_0={"uuid": "GPU-9"}))

        await eventually(lambda: held(sink) == (replace(ONE, uuid="GPU-9"), TWO))


async def test_claimed_gpus_of_a_pod_without_a_node_are_not_reported(
    kube: FakeKube, tmp_path: Path
) -> None:
    kube.put("resourceslices", TWO_CARDS)
    kube.put("resourceclaims", claim("c", "p"))
    kube.put("pods", holder("p", node=""))
    async with watched_cluster(kube, tmp_path, watches=4) as (_, sink):
        assert held(sink) is None

        kube.put("pods", holder("p"))
        await eventually(lambda: held(sink) == (ONE,))


@pytest.mark.parametrize(
    ("status", "level"), [(404, logging.INFO), (403, logging.WARNING)], ids=["no API", "no right"]
)
async def test_missing_claims_are_logged_once(
    kube: FakeKube, tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int, level: int
) -> None:
    requested: list[str] = []
    refuse = refusal(status, "no")

    async def refuse_and_note(request: Any) -> Any:
        requested.append(request.match_info["resource"])
        return await refuse(request)

    kube.dra_refusal = refuse_and_note
    kube.put("pods", holder("p"))
    with caplog.at_level(logging.INFO, "extender.sources"):
        async with watched_cluster(kube, tmp_path, FAST_RESYNC) as (source, sink):
            await eventually(lambda: requested.count("resourceclaims") >= 3)

            assert held(sink) is None
            assert source.status.keys() == {"nodes", "pods"}
            logged = [record for record in caplog.records if "without" in record.message]
            assert [record.levelno for record in logged] == [level] * 2
            assert {record.__dict__["resource"] for record in logged} == {
                "resourceclaims",
                "resourceslices",
            }

            kube.dra_refusal = None  # the permission was granted, or the cluster upgraded
            kube.put("resourceslices", TWO_CARDS)
            kube.put("resourceclaims", claim("c", "p"))
            await eventually(lambda: held(sink) == (ONE,))


async def test_a_pod_that_came_during_a_failure_of_the_watch_may_hold_gpus(
    kube: FakeKube, tmp_path: Path
) -> None:
    kube.put("pods", holder("before"))
    async with watched_cluster(kube, tmp_path, watches=4) as (source, sink):
        lists = source.status["resourceclaims"].lists
        kube.dra_refusal = refusal(500, "etcd is gone")
        kube.end_watches()
        await eventually(lambda: not source.status["resourceclaims"].is_connected)
        await eventually(lambda: source.status["pods"].is_connected)

        kube.put("pods", holder("p"))
        await eventually(lambda: "p" in sink.pods)

        assert (held(sink, "before"), held(sink)) == ((), None)

        await eventually(lambda: source.status["resourceclaims"].errors >= _MAX_FAILURES)
        kube.dra_refusal = None
        await eventually(lambda: source.status["resourceclaims"].lists > lists)
        assert held(sink, "before") == ()

        await eventually(lambda: held(sink) == ())


async def test_complete_lists_correct_missed_changes_of_claims(
    kube: FakeKube, tmp_path: Path
) -> None:
    kube.put("resourceslices", TWO_CARDS)
    kube.put("pods", holder("p"))
    async with watched_cluster(kube, tmp_path, FAST_RESYNC, watches=4) as (_, sink):
        kube.put("resourceclaims", claim("c", "p"), is_watched=False)

        await eventually(lambda: held(sink) == (ONE,))


def reduced(raw: Object) -> PodRecord:
    record = reduce_pod(raw, ResourceNames(), early_seconds=60)
    assert record is not None
    return record


def test_a_pod_with_claims_only_is_a_tenant() -> None:
    raw = pod("p", gpus=0, node="n", phase="Running")
    raw["spec"]["resourceClaims"] = [{"name": "gpu"}]

    record = reduced(raw)

    assert record.has_claims
    assert record.resources == {}


@pytest.mark.parametrize(
    ("statuses", "has_claims"),
    [
        ([], True),
        ([{"name": "nic", "resourceClaimName": "p-nic"}], True),
        ([{"name": "other"}], True),
        ([{"name": "nic"}], False),
    ],
    ids=["no status yet", "made", "of another claim", "not needed"],
)
def test_an_unneeded_claim_does_not_count(statuses: list[dict[str, str]], has_claims: bool) -> None:
    raw = pod("p", gpus=1, node="n", phase="Running", resourceClaimStatuses=statuses)
    raw["spec"]["resourceClaims"] = [{"name": "nic"}]

    record = reduced(raw)

    assert (record.has_claims, record.has_gpu_claims) == (has_claims, False)


@pytest.mark.parametrize(
    ("resource", "is_gpu"),
    [
        ("deviceclass.resource.kubernetes.io/gpu.nvidia.com", True),
        ("deviceclass.resource.kubernetes.io/mig.nvidia.com", True),
        ("deviceclass.resource.kubernetes.io/nic.example.com", False),
        ("example.com/nic", False),
    ],
)
def test_a_claim_for_a_gpu_class_is_recognized(resource: str, is_gpu: bool) -> None:
    made = {"resourceClaimName": "p-made", "requestMappings": [{"resourceName": resource}]}

    record = reduced(pod("p", gpus=0, node="n", extendedResourceClaimStatus=made))

    assert (record.has_claims, record.has_gpu_claims, record.resources) == (True, is_gpu, {})
