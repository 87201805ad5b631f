"""Any JSON in any field of an object is read or ignored, and nothing fails."""

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pytest

from extender.core.nodes.inventory import NodeRecord, Taint
from extender.core.nodes.node_affinity import may_go
from extender.core.nodes.node_selection import read_selection
from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import parse_request
from extender.insight.what_if import read_asked
from extender.runtime.metrics import Metrics
from extender.sources.kubernetes.claims import reduce_claim, reduce_slice
from extender.sources.kubernetes.records import reduce_exporter, reduce_node, reduce_pod
from extender.webhook.admission.review import ReviewError, decode_review
from extender.webhook.admission.webhook import AdmissionWebhook
from extender.webhook.go_json_case import POD, restore_case
from testkit.controlplane.objects import Object

NAMES: Final = ResourceNames()
NESTED: Any = None
for _ in range(sys.getrecursionlimit()):
    NESTED = [NESTED]
ODD: Final[tuple[Any, ...]] = (
    None, True, 0, -1, 1 << 63, 10**5000, 1e308, "", "x" * 5000, "\x00", "-1", "1e999", [], {},
    [[]], [None], [{}], ["a"], {"a": []}, {"": {"": []}},
    [{"name": {}, "key": [], "uid": {}}], NESTED,
)  # fmt: skip

POD_OBJECT: Final[Object] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "a",
        "namespace": "ml",
        "uid": "u-1",
        "resourceVersion": "7",
        "creationTimestamp": "2026-11-01T10:00:00Z",
        "deletionTimestamp": "2026-11-01T11:00:00Z",
        "labels": {"app": "dcgm-exporter"},
        "annotations": {
            "idlegpu.io/gpu-memory": "20Gi",
            "idlegpu.io/require-idle": "true",
            "idlegpu.io/prefer-models": "H100,A100",
            "idlegpu.io/max-utilization": "30",
        },
        "ownerReferences": [{"kind": "Job", "name": "j", "uid": "o-1", "controller": True}],
    },
    "spec": {
        "nodeName": "n",
        "schedulerName": "default-scheduler",
        "priority": 5,
        "overhead": {"cpu": "1m"},
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "a", "operator": "Exists", "value": "", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}],
                            "matchFields": [
                                {"key": "metadata.name", "operator": "In", "values": ["n"]}
                            ],
                        }
                    ]
                }
            }
        },
        "schedulingGates": [{"name": "idlegpu.io/room"}],
        "resourceClaims": [{"name": "gpu", "resourceClaimName": "gpu"}],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "containers": [
            {
                "name": "main",
                "image": "i",
                "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}],
                "resources": {
                    "limits": {"nvidia.com/gpu": "1", "nvidia.com/mig-1g.5gb": 2},
                    "requests": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"},
                    "claims": [{"name": "gpu"}],
                },
            }
        ],
        "initContainers": [
            {"name": "i", "restartPolicy": "Always", "resources": {"limits": {"cpu": "1"}}}
        ],
    },
    "status": {
        "phase": "Running",
        "nominatedNodeName": "n",
        "startTime": "2026-11-01T10:00:01Z",
        "podIP": "10.0.0.1",
        "podIPs": [{"ip": "10.0.0.1"}],
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/3 nodes are available: 3 idlegpu: no idle GPU.",
                "lastTransitionTime": "2026-11-01T10:00:00Z",
            }
        ],
        "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "gpu"}],
        "extendedResourceClaimStatus": {
            "resourceClaimName": "c",
            "requestMappings": [
                {"containerName": "main", "resourceName": "nvidia.com/gpu", "requestName": "r"}
            ],
        },
        "containerStatuses": [
            {
                "name": "main",
                "restartCount": 1,
                "allocatedResources": {"nvidia.com/gpu": "1"},
                "state": {
                    "terminated": {
                        "exitCode": 1,
                        "reason": "Error",
                        "message": "CUDA error",
                        "startedAt": "2026-11-01T10:00:02Z",
                        "finishedAt": "2026-11-01T10:00:03Z",
                    }
                },
                "lastState": {"terminated": {"exitCode": 79}},
            }
        ],
    },
}
WAITING_OBJECT: Final[Object] = {
    "metadata": {**POD_OBJECT["metadata"], "deletionTimestamp": None, "ownerReferences": []},
    "spec": {**POD_OBJECT["spec"], "nodeName": ""},
    "status": {**POD_OBJECT["status"], "phase": "Pending"},
}
"""A waiting pod: only for these the node selection is read."""
NODE_OBJECT: Final[Object] = {
    "metadata": {"name": "n", "labels": {"nvidia.com/gpu.product": "H100", "zone": "a"}},
    "spec": {
        "unschedulable": True,
        "taints": [{"key": "a", "value": "b", "effect": "NoSchedule", "timeAdded": "x"}],
    },
    "status": {
        "addresses": [{"type": "InternalIP", "address": "10.0.0.2"}],
        "allocatable": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"},
        "capacity": {"nvidia.com/gpu": "8"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}
CLAIM_OBJECT: Final[Object] = {
    "metadata": {"uid": "c-1"},
    "status": {
        "allocation": {
            "devices": {
                "results": [
                    {
                        "driver": "gpu.nvidia.com",
                        "pool": "n",
                        "device": "gpu-0",
                        "adminAccess": False,
                    }
                ]
            }
        },
        "reservedFor": [{"resource": "pods", "uid": "u-1", "name": "a"}],
    },
}
SLICE_OBJECT: Final[Object] = {
    "metadata": {"uid": "s-1"},
    "spec": {
        "driver": "gpu.nvidia.com",
        "pool": {"name": "n", "generation": 1},
        "devices": [
            {
                "name": "gpu-0",
                "attributes": {"uuid": {"string": "GPU-1"}, "profile": {"string": ""}},
            }
        ],
    },
}
REVIEW_OBJECT: Final[Object] = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "r",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "operation": "CREATE",
        "namespace": "ml",
        "object": {
            **WAITING_OBJECT,
            "spec": {**WAITING_OBJECT["spec"], "affinity": {}, "tolerations": [{"key": "a"}]},
        },
    },
}

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
    for path in paths_in(sample):
        if not path:
            continue
        for odd in ODD:
            changed = copy.deepcopy(sample)
            at: Any = changed
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = odd
            yield f"{path}: {type(odd).__name__}", changed


def read_pod(raw: Mapping[str, object]) -> object:
    return reduce_pod(raw, NAMES, early_seconds=60.0)


def read_question(raw: Mapping[str, object]) -> object:
    pod = restore_case(dict(raw), POD)
    return parse_request(pod, resources=NAMES, defaults=Policy())


def read_wishes(raw: Mapping[str, object]) -> object:
    node = NodeRecord(name="n", labels={"a": "2"}, taints=(Taint(key="a", effect="NoSchedule"),))
    return may_go(read_selection(raw), node), may_go(read_asked(raw).selection, node)


class FreshLease:
    is_fresh: Final = True

    async def run(self) -> None:
        """Do nothing: the lease is fresh."""


WEBHOOK: Final = AdmissionWebhook(
    "idlegpu-scheduler",
    taint_key="idlegpu.io/scheduler",
    resources=lambda: NAMES,
    policy=Policy,
    lease=FreshLease(),
    admissions=Metrics().admissions,
)


def read_review(raw: Mapping[str, object]) -> object:
    try:
        body = json.dumps(raw).encode()
    except (RecursionError, ValueError):
        return "it cannot be sent"
    try:
        return WEBHOOK.decide(decode_review(body))
    except ReviewError as error:
        return error


@pytest.mark.parametrize(
    ("sample", "read"),
    [
        pytest.param(POD_OBJECT, read_pod, id="pod"),
        pytest.param(POD_OBJECT, read_question, id="question"),
        pytest.param(POD_OBJECT, lambda raw: reduce_exporter(raw, ("dcgm",)), id="exporter"),
        pytest.param(WAITING_OBJECT, read_pod, id="waiting pod"),
        pytest.param(WAITING_OBJECT, read_wishes, id="wishes"),
        pytest.param(REVIEW_OBJECT, read_review, id="review"),
        pytest.param(NODE_OBJECT, lambda raw: reduce_node(raw, NAMES), id="node"),
        pytest.param(CLAIM_OBJECT, reduce_claim, id="claim"),
        pytest.param(SLICE_OBJECT, reduce_slice, id="slice"),
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
