"""Defaults of records and requests: nothing is known, requested or held."""

from dataclasses import fields, replace
from typing import Any

from extender.core.decision.group_fit import GroupNeed
from extender.core.decision.scoring import NOT_NEAR
from extender.core.devices.expected_devices import Expected, ExpectedDevice, devices_behind
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import NodeRecord, PodPhase, PodRecord
from extender.core.nodes.pod_groups import PodGroup
from extender.core.nodes.seen_requests import RequestKind, SeenRequests
from extender.core.policy import GroupPolicy
from extender.core.request.request import GpuRequest
from testkit.builders import GPU, gpu, node


def said(record: Any) -> set[str]:
    """Return the names of the attributes that say something."""
    return {each.name for each in fields(record) if getattr(record, each.name)}


def test_a_pod_without_details_requests_and_holds_nothing() -> None:
    record = PodRecord(uid="u", namespace="ns", name="p")

    assert said(record) == {"uid", "namespace", "name", "phase", "scheduler_name", "host"}
    assert not any(record.host.plus(HostResources()))
    assert not record.holds_devices
    assert record.works_since is None


def test_only_pods_that_succeeded_or_failed_have_ended() -> None:
    assert {one for one in PodPhase if one.is_terminal} == {PodPhase.SUCCEEDED, PodPhase.FAILED}


def test_a_new_version_alone_is_no_change_of_a_pod() -> None:
    record = PodRecord(uid="u", namespace="ns", name="p", version="1")

    assert replace(record, version="2") == record


def test_a_node_without_details_is_ready_and_offers_nothing() -> None:
    record = NodeRecord(name="n")

    assert said(record) == {"name", "is_ready"}
    assert record.label("pool") is None


def test_devices_without_details_are_whole_and_held_by_no_pod() -> None:
    expected, device = Expected(resource=GPU, count=1), ExpectedDevice(row=0)

    assert devices_behind(NodeRecord(name="n"), expected, [device]) == (device,)
    assert said(expected) == {"resource", "count", "replicas"}
    assert expected.replicas == 1
    assert said(device) == set()


def test_a_request_without_details_asks_for_devices_alone() -> None:
    request = GpuRequest(resource=GPU, count=1)
    kind = RequestKind(1)
    of_settings = {"thresholds", "strategy", "target_policy", "group_policy"}

    assert said(request) == {"resource", "count", "resources"} | of_settings
    assert not request.may_wait
    assert said(kind) == {"count"}
    assert SeenRequests.of({kind: 1.0}).part_bytes is None


def test_requests_that_differ_in_no_device_are_equal_and_share_an_evaluation() -> None:
    request = GpuRequest(resource=GPU, count=1)
    other = replace(
        request,
        memory_source="an argument",
        avoided={"n": 1.0},
        has_preferences=True,
        last_refusal="busy",
        group=PodGroup(kind="JobSet", namespace="ns", name="a"),
        group_policy=GroupPolicy.PREFER,
        own=frozenset({"idlegpu.io/gpu-memory"}),
    )

    assert (other, hash(other)) == (request, hash(request))
    assert GpuRequest(resource=GPU, count=2) != request


def test_a_group_is_uniform_and_a_node_not_near_it_by_default() -> None:
    need = GroupNeed(name="a", size=1, rest=1)

    assert said(need) == {"name", "size", "rest", "is_uniform", "topology"}
    assert said(NOT_NEAR) == set()


def test_values_of_slots_that_a_row_lacks_are_zeros() -> None:
    row = node(gpu(), gpu()).row(0)

    assert row.joined == row.numa == row.kindred == (0, 0)
