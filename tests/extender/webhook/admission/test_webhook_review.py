import base64
import json
from typing import Any, Final

import pytest

from extender.webhook.admission import (
    _MAX_WARNING,
    ReviewError,
    _decode_review,
    _encode_answer,
    _patch_pod,
)
from tests.extender.webhook.admission.reviews import review


def test_a_review_contains_the_new_pod() -> None:
    found = _decode_review(json.dumps(review()).encode())

    assert (found.uid, found.namespace) == ("705ab4f5", "team")
    assert found.pod["metadata"] == {"name": "a"}


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        pytest.param(b"", "cannot read AdmissionReview", id="empty"),
        pytest.param(b"\xff\xfe{", "cannot read AdmissionReview", id="no-text"),
        pytest.param(b"[" * 5000, "cannot read AdmissionReview", id="too-deep"),
        pytest.param(
            b"[" + b"{}," * 300_000 + b"{}]",
            "cannot read AdmissionReview: $ has 300000 commas, must be at most 237500",
            id="too-many-values",
        ),
        pytest.param(b"[]", "$.apiVersion must be 'admission.k8s.io/v1'", id="a-list"),
        pytest.param(
            b'{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview"}',
            "$.apiVersion",
            id="old-version",
        ),
        pytest.param(
            json.dumps(
                review(kind={"group": "apps", "version": "v1", "kind": "Deployment"})
            ).encode(),
            "$.request.kind.group must be ''",
            id="no-pod",
        ),
        pytest.param(
            json.dumps(review(kind={"group": "", "version": "v2", "kind": "Pod"})).encode(),
            "$.request.kind.version must be 'v1'",
            id="another-version-of-pod",
        ),
        pytest.param(
            json.dumps(review(operation="UPDATE")).encode(),
            "$.request.operation must be 'CREATE'",
            id="update",
        ),
        pytest.param(
            json.dumps(review(subResource="binding")).encode(),
            "$.request.subResource",
            id="binding",
        ),
        pytest.param(json.dumps(review(object=None)).encode(), "$.request.object", id="no-object"),
        pytest.param(json.dumps(review(uid=7)).encode(), "$.request.uid is missing", id="no-uid"),
        pytest.param(
            json.dumps(review() | {"request": [1]}).encode(), "$.request.kind", id="no-request"
        ),
    ],
)
def test_the_error_of_an_unusable_review_names_cause_and_place(body: bytes, cause: str) -> None:
    with pytest.raises(ReviewError) as caught:
        _decode_review(body)

    message = str(caught.value)
    assert message.startswith("cannot")
    assert cause in message


def test_an_answer_to_an_unusable_review_repeats_its_uid() -> None:
    with pytest.raises(ReviewError) as caught:
        _decode_review(json.dumps(review(operation="DELETE")).encode())

    assert caught.value.uid == "705ab4f5"


def test_an_answer_without_a_patch_leaves_the_pod_unchanged() -> None:
    assert json.loads(_encode_answer("705ab4f5")) == {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": "705ab4f5", "allowed": True},
    }


SETS: Final = {"op": "add", "path": "/spec/schedulerName", "value": "idlegpu-scheduler"}
TOLERATES: Final = {
    "key": "idlegpu.io/scheduler",
    "operator": "Equal",
    "value": "idlegpu-scheduler",
    "effect": "NoSchedule",
}


def test_an_answer_changes_the_pod_with_a_json_patch() -> None:
    response = json.loads(_encode_answer("705ab4f5", patch=[SETS]))["response"]

    assert response["allowed"]
    assert response["patchType"] == "JSONPatch"
    assert json.loads(base64.b64decode(response["patch"])) == [SETS]


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        pytest.param(
            {}, {"op": "add", "path": "/spec/tolerations", "value": [TOLERATES]}, id="the-first"
        ),
        pytest.param(
            {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
            {"op": "add", "path": "/spec/tolerations/-", "value": TOLERATES},
            id="another",
        ),
        pytest.param({"tolerations": [TOLERATES]}, None, id="there-already"),
    ],
)
def test_a_pod_tolerates_the_taint_of_its_schedulers_nodes(
    spec: dict[str, Any], change: dict[str, Any] | None
) -> None:
    patch = _patch_pod(
        {"spec": spec}, scheduler="idlegpu-scheduler", taint_key="idlegpu.io/scheduler"
    )

    assert patch == ([SETS] if change is None else [SETS, change])


def test_no_toleration_is_added_without_a_taint() -> None:
    assert _patch_pod({}, scheduler="idlegpu-scheduler", taint_key="") == [SETS]


def test_warnings_are_few_and_short_enough_for_the_api_server() -> None:
    response = json.loads(_encode_answer("1", warnings=["a" * 1000, "b", "c", "d"]))["response"]

    assert response["warnings"] == ["a" * _MAX_WARNING, "b", "c"]
