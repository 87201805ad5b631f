"""Records of waiting pods, compared with their objects."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.pod_groups import PodGroup
from extender.core.policy import Policy, Strategy, Thresholds
from extender.core.request.gpu_resources import ContainerDevices, ResourceNames
from extender.core.request.request import _REMEMBERED, ParsedRequest, WaitingRequests, parse_request
from extender.sources.kubernetes.records import reduce_pod
from testkit.kube_objects import GPU, Object, pod

MIG = "nvidia.com/mig-1g.10gb"
REFUSED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/9"}
POLICY = Policy(thresholds=Thresholds(utilization=0.1, memory=0.2), strategy=Strategy.PACK)


def record_of(raw: Object) -> PodRecord:
    record = reduce_pod(raw, ResourceNames(), early_seconds=60)
    assert record is not None
    return record


def read(record: PodRecord) -> ParsedRequest:
    return WaitingRequests().read(record, POLICY)


def annotated(**annotations: str) -> Object:
    raw = pod("p", 2)
    raw["metadata"]["annotations"] = {
        "team": "a",
        **{f"idlegpu.io/{name.replace('_', '-')}": value for name, value in annotations.items()},
    }
    return raw


def with_spec(**changes: Any) -> Object:
    raw = pod("p", 2)
    raw["spec"] |= changes
    return raw


@pytest.mark.parametrize(
    "raw",
    [
        pod("p"),
        annotated(),
        annotated(gpu_memory="20Gi", require_idle="true", prefer_models="H100,A100"),
        annotated(max_utilization="20", max_memory="33.3%", strategy="Spread"),
        annotated(enabled="false"),
        annotated(enabled="maybe", gpu_memory="20", strategy="best", max_memory="0.2"),
        annotated(unknown="1", another="2", gpu_memory="x" * 300),
        with_spec(containers=[{"resources": {"limits": {MIG: "1", GPU: "3"}}}]),
        with_spec(initContainers=[{"resources": {"limits": {GPU: "7"}}}]),
        with_spec(containers=[{"resources": {"limits": {GPU: "2"}}}] * 2),
        with_spec(
            containers=[
                {
                    "resources": {
                        "limits": {GPU: "2"},
                        "requests": {"cpu": "2", "memory": "3Gi", "ephemeral-storage": "4Gi"},
                    }
                }
            ]
        ),
        with_spec(
            initContainers=[{"resources": {"limits": {GPU: "1"}}, "restartPolicy": "Always"}]
        ),
        with_spec(containers=[{"resources": {"limits": {GPU: "9e99"}}}]),
        with_spec(resourceClaims=[{"name": "gpu"}]),
        with_spec(containers=[{}], resourceClaims=[{"name": "gpu"}]),
        pod("p", nominatedNodeName="n"),
        pod("p", conditions=[REFUSED]),
        pod("p", conditions=[REFUSED | {"message": "x" * 100_000}]),
        pod("p", conditions=[REFUSED | {"status": "True"}]),
        pod("p", conditions=[REFUSED | {"reason": "SchedulingGated"}]),
    ],
)
def test_the_record_equals_the_parsed_object(raw: Object) -> None:
    of_object = parse_request(raw, resources=ResourceNames(), defaults=POLICY)

    of_record = read(record_of(raw))

    assert of_record == of_object
    if of_object.request is not None and of_record.request is not None:
        # These fields do not change the request.
        assert of_record.request.last_refusal == of_object.request.last_refusal
        assert of_record.request.own == of_object.request.own


def test_pods_that_say_the_same_are_read_once() -> None:
    requests = WaitingRequests()

    first = requests.read(record_of(pod("p", 2)), POLICY)

    assert requests.read(record_of(pod("q", 2)), POLICY) is first
    assert requests.read(record_of(pod("r", 4)), POLICY) is not first


def test_other_settings_are_read_by_at_once() -> None:
    requests, record = WaitingRequests(), record_of(pod("p"))
    requests.read(record, POLICY)

    other = requests.read(record, replace(POLICY, strategy=Strategy.SPREAD)).request

    assert other is not None
    assert other.strategy is Strategy.SPREAD


def test_the_cache_is_bounded() -> None:
    requests, record = WaitingRequests(), record_of(pod("p"))
    first = requests.read(record, POLICY)
    for number in range(_REMEMBERED):
        requests.read(replace(record, nominated_node=f"n{number}"), POLICY)

    again = requests.read(record, POLICY)

    assert again == first
    assert again is not first


def test_a_limit_of_a_framework_is_kept() -> None:
    raw = with_spec(
        containers=[
            {"args": ["--gpu-memory-utilization", "0.4"], "resources": {"limits": {GPU: "1"}}}
        ]
    )
    record = reduce_pod(raw, ResourceNames(), early_seconds=60, reads_limits=True)
    assert record is not None

    request = read(record).request

    assert request is not None
    assert (request.memory_bytes, request.memory_share) == (None, 0.4)


@pytest.mark.parametrize(
    "change",
    [
        {"resources": {GPU: 3}},
        {"containers": ((GPU, (ContainerDevices(1), ContainerDevices(1))),)},
        {"wishes": (("idlegpu.io/require-idle", "true"),)},
        {"nominated_node": "node"},
        {"is_unscheduled": True, "message": "0/9"},
        {"host": HostResources(1000, 0, 0)},
        {"has_preferences": True},
        {"group": PodGroup("JobSet", "ns", "train", 3)},
        {"memory_bytes": 5},
        {"memory_share": 0.5},
    ],
    ids=lambda change: next(iter(change)),
)
def test_requests_that_differ_are_read_each_for_itself(change: dict[str, Any]) -> None:
    record, cached = record_of(pod("p", 2)), WaitingRequests()
    changed = replace(record, **change)

    before, after = cached.read(record, POLICY).request, cached.read(changed, POLICY).request

    assert repr(after) == repr(read(changed).request) != repr(before)
