"""Records of pods with ResourceClaims."""

import pytest

from extender.core.nodes.inventory import PodRecord
from extender.core.request.gpu_resources import ResourceNames
from extender.sources.kubernetes.records import reduce_pod
from testkit.kube_objects import Object, pod


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
