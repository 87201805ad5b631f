"""Any JSON in any field of an object is read or ignored, and nothing fails."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import pytest

from extender.core.nodes.inventory import NodeRecord, Taint, may_go
from extender.core.nodes.node_selection import read_selection
from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import parse_request
from extender.insight.what_if import _read_requested_selection
from extender.runtime.metrics import Metrics
from extender.sources.kubernetes.claims import _reduce_claim, _reduce_slice
from extender.sources.kubernetes.records import reduce_exporter, reduce_node, reduce_pod
from extender.webhook.admission import AdmissionWebhook, ReviewError, SchedulerLease, _decode_review
from extender.webhook.go_json import POD, restore_case
from testkit.controlplane.objects import Object
from testkit.hostile_objects import (
    CLAIM_OBJECT,
    NODE_OBJECT,
    POD_OBJECT,
    REVIEW_OBJECT,
    SLICE_OBJECT,
    WAITING_OBJECT,
)

NAMES: Final = ResourceNames()
NESTED: Any = None
for _ in range(sys.getrecursionlimit()):
    NESTED = [NESTED]
ODD: Final[tuple[Any, ...]] = (
    None, True, 0, -1, 1 << 63, 10**5000, 1e308, "", "x" * 5000, "\x00", "-1", "1e999", [], {},
    [[]], [None], [{}], ["a"], {"a": []}, {"": {"": []}},
    [{"name": {}, "key": [], "uid": {}}], NESTED,
)  # fmt: skip


Read = Callable[[Mapping[str, object]], object]


def paths_in(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from paths_in(item, (*path, key))


def hostile(sample: Object) -> Iterator[tuple[str, Any]]:
    """Yield the sample with an odd value in each field, and with an odd key beside each."""
    text = json.dumps(sample)  # decoding it is several times faster than a deep copy
    for path in paths_in(sample):
        if not path:
            continue
        for odd in ODD:
            at: Any = (changed := json.loads(text))
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = odd
            yield f"{path}: {type(odd).__name__}", changed


def read_pod(raw: Mapping[str, object]) -> object:
    return reduce_pod(raw, NAMES, early_seconds=60.0)


def read_request(raw: Mapping[str, object]) -> object:
    pod = restore_case(dict(raw), POD)
    return parse_request(pod, resources=NAMES, defaults=Policy())


def read_wishes(raw: Mapping[str, object]) -> object:
    node = NodeRecord(name="n", labels={"a": "2"}, taints=(Taint(key="a", effect="NoSchedule"),))
    return may_go(read_selection(raw), node), may_go(_read_requested_selection(raw).selection, node)


class FreshLease:
    is_fresh: Final = True

    async def run(self) -> None:
        """Do nothing: the lease is fresh."""


WEBHOOK: Final = AdmissionWebhook(
    "idlegpu-scheduler",
    taint_key="idlegpu.io/scheduler",
    resources=lambda: NAMES,
    policy=Policy,
    lease=cast("SchedulerLease", FreshLease()),
    admissions=Metrics().admissions,
)


def read_review(raw: Mapping[str, object]) -> object:
    try:
        body = json.dumps(raw).encode()
    except (RecursionError, ValueError):
        return "it cannot be sent"
    try:
        return WEBHOOK.decide(_decode_review(body))
    except ReviewError as error:
        return error


@pytest.mark.parametrize(
    ("sample", "read"),
    [
        pytest.param(POD_OBJECT, read_pod, id="pod"),
        pytest.param(POD_OBJECT, read_request, id="request"),
        pytest.param(POD_OBJECT, lambda raw: reduce_exporter(raw, ("dcgm",)), id="exporter"),
        pytest.param(WAITING_OBJECT, read_pod, id="waiting pod"),
        pytest.param(WAITING_OBJECT, read_wishes, id="wishes"),
        pytest.param(REVIEW_OBJECT, read_review, id="review"),
        pytest.param(NODE_OBJECT, lambda raw: reduce_node(raw, NAMES), id="node"),
        pytest.param(CLAIM_OBJECT, _reduce_claim, id="claim"),
        pytest.param(SLICE_OBJECT, _reduce_slice, id="slice"),
    ],
)
def test_any_value_in_any_field_is_read_or_ignored(sample: Object, read: Read) -> None:
    assert read(sample) is not None
    failed = {}
    for where, changed in hostile(sample):
        try:
            found = read(changed)
            hash(repr(found))
        except Exception as error:  # noqa: BLE001 - each is to be named
            failed[where] = repr(error)[:100]

    assert failed == {}
