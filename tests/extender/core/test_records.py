"""Defaults of records and requests: nothing is known, requested or held."""

from dataclasses import fields
from typing import Any

import pytest

from extender.core.decision.group_fit import GroupNeed
from extender.core.decision.scoring import NOT_NEAR
from extender.core.devices.expected_devices import Expected, ExpectedDevice
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.nodes.seen_requests import RequestKind
from extender.core.request.request import GpuRequest
from testkit.builders import GPU, gpu, node


@pytest.mark.parametrize(
    ("record", "known"),
    [
        (
            PodRecord(uid="u", namespace="ns", name="p"),
            {"uid", "namespace", "name", "phase", "scheduler_name", "host"},
        ),
        (NodeRecord(name="n"), {"name", "is_ready"}),
        (
            GpuRequest(resource=GPU, count=1),
            {"resource", "count", "resources", "thresholds"}
            | {"strategy", "target_policy", "group_policy"},
        ),
        (RequestKind(1), {"count"}),
        (Expected(resource=GPU, count=1), {"resource", "count", "replicas"}),
        (ExpectedDevice(row=0), set()),
        (GroupNeed(name="a", size=1, rest=1), {"name", "size", "rest", "is_uniform", "topology"}),
        (NOT_NEAR, set()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_record_without_details_says_nothing(record: Any, known: set[str]) -> None:
    assert {each.name for each in fields(record) if getattr(record, each.name)} == known
    assert not any(HostResources())
    assert Expected(resource=GPU, count=1).replicas == 1


def test_values_of_slots_that_a_row_lacks_are_zeros() -> None:
    row = node(gpu(), gpu()).row(0)

    assert row.joined == row.numa == row.kindred == (0, 0)
