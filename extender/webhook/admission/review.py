"""Decode AdmissionReview requests (admission.k8s.io/v1) and encode their answers.

Every answer allows the pod: the webhook may change a pod, but never refuses one.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from extender.core.request.gpu_resources import excess_of
from extender.core.untyped import items_of, mapping_of, text_of
from extender.runtime.decoding import MalformedError, decode_with, excess_values

_API_VERSION: Final = "admission.k8s.io/v1"
_KIND: Final = "AdmissionReview"

_MAX_WARNINGS: Final = 3
MAX_WARNING: Final = 250
"""Maximum length of a warning: the API server truncates longer ones."""


class ReviewError(ValueError):
    """The request is not a review of a pod's creation; the message gives the cause and its place.

    Attributes:
        uid: UID of the review, "" if it cannot be read.
    """

    def __init__(self, message: str, uid: str = "") -> None:
        super().__init__(message)
        self.uid = uid


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """A pod that is being created.

    Attributes:
        uid: UID of the review; the answer repeats it.
        namespace: namespace of the pod.
        pod: the Pod object.
    """

    uid: str
    namespace: str
    pod: Mapping[str, object]


def decode_review(body: bytes) -> Review:
    """Decode a review.

    Raises:
        ReviewError: it is malformed, or not about the creation of a pod.
    """
    if excess := excess_values(body):
        raise ReviewError(f"cannot read AdmissionReview: $ has {excess}")
    try:
        document = decode_with(orjson.loads, body)
    except MalformedError as error:
        raise ReviewError(f"cannot read AdmissionReview: {error}") from error
    review = mapping_of(document)
    request = mapping_of(review.get("request"))
    uid = text_of(request.get("uid"))
    kind = mapping_of(request.get("kind"))
    for path, found, wanted in (
        ("$.apiVersion", review.get("apiVersion"), _API_VERSION),
        ("$.kind", review.get("kind"), _KIND),
        ("$.request.kind.group", kind.get("group", ""), ""),
        ("$.request.kind.version", kind.get("version"), "v1"),
        ("$.request.kind.kind", kind.get("kind"), "Pod"),
        ("$.request.operation", request.get("operation"), "CREATE"),
        ("$.request.subResource", request.get("subResource", ""), ""),
    ):
        if found != wanted:
            raise ReviewError(f"cannot use AdmissionReview: {path} must be {wanted!r}", uid)
    if not uid:
        raise ReviewError("cannot use AdmissionReview: $.request.uid is missing")
    pod = request.get("object")
    if not isinstance(pod, dict):
        raise ReviewError("cannot use AdmissionReview: $.request.object must be a Pod", uid)
    if excess := excess_of(pod):
        raise ReviewError(f"cannot use AdmissionReview: $.request.object has {excess}", uid)
    return Review(uid=uid, namespace=text_of(request.get("namespace")), pod=pod)


def patch_pod(
    pod: Mapping[str, object], *, scheduler: str, taint_key: str
) -> Sequence[Mapping[str, object]]:
    """Return the JSON patch that sets a pod's scheduler and tolerates the taint of its nodes.

    Args:
        pod: the Pod object.
        scheduler: `spec.schedulerName` to set.
        taint_key: key of the taint that keeps other pods off that scheduler's nodes, "" for none.
            The taint's value is the scheduler's name.
    """
    # "add" also replaces an existing field.
    patch: list[Mapping[str, object]] = [
        {"op": "add", "path": "/spec/schedulerName", "value": scheduler}
    ]
    tolerations = mapping_of(pod.get("spec")).get("tolerations")
    toleration = {
        "key": taint_key,
        "operator": "Equal",
        "value": scheduler,
        "effect": "NoSchedule",
    }
    if taint_key and toleration not in items_of(tolerations):
        has_some = isinstance(tolerations, list)
        patch.append(
            {
                "op": "add",
                "path": "/spec/tolerations/-" if has_some else "/spec/tolerations",
                "value": toleration if has_some else [toleration],
            }
        )
    return patch


def patch_annotations(
    pod: Mapping[str, object], annotations: Mapping[str, str]
) -> Sequence[Mapping[str, object]]:
    """Return the JSON patch that adds annotations to a pod."""
    if not annotations:
        return []
    if not isinstance(mapping_of(pod.get("metadata")).get("annotations"), dict):
        return [{"op": "add", "path": "/metadata/annotations", "value": dict(annotations)}]
    return [
        {
            "op": "add",
            "path": f"/metadata/annotations/{name.replace('~', '~0').replace('/', '~1')}",
            "value": value,
        }
        for name, value in annotations.items()
    ]


def encode_answer(
    uid: str, *, patch: Sequence[Mapping[str, object]] = (), warnings: Sequence[str] = ()
) -> bytes:
    """Encode an answer that allows the pod, changed or unchanged.

    Args:
        uid: UID of the review.
        patch: JSON patch of the pod, empty to leave it unchanged.
        warnings: warnings for the client that creates the pod.
    """
    response: dict[str, object] = {"uid": uid, "allowed": True}
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(orjson.dumps(patch)).decode()
    if warnings:
        response["warnings"] = [text[:MAX_WARNING] for text in warnings[:_MAX_WARNINGS]]
    return orjson.dumps({"apiVersion": _API_VERSION, "kind": _KIND, "response": response})
