"""Admission webhook: set the scheduler of GPU pods that name none, and propose annotations.

The webhook never refuses a pod. It proposes memory and models as `idlegpu size` does.
"""

import asyncio
import base64
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import Counter as Metric

from extender.core.nodes.inventory import NodeRecord, selects
from extender.core.nodes.node_selection import Operator, Selection, Term, read_selection
from extender.core.nodes.pod_groups import Kin, kin_of, similarity_of
from extender.core.policy import Policy
from extender.core.quantity import MIB
from extender.core.request.annotations import PROPOSAL, Annotation
from extender.core.request.gpu_resources import ResourceNames, excess_of
from extender.core.request.request import GpuRequest, parse_request
from extender.core.sizing import USABLE, Certainty, Measured, Proposal, propose, texts_in
from extender.core.untyped import items_of, mapping_of, objects_of, text_of
from extender.kube.client import KubeClient, KubeError
from extender.runtime.decoding import MalformedError, decode_with, excess_values
from extender.runtime.logs import LogThrottle
from extender.settings.api import Admission

logger = logging.getLogger(__name__)

_MAX_TEXT: Final = 8192
"""Maximum number of characters of the containers' texts that are searched for options and words: a
few milliseconds at most, and a tenth of a millisecond for most pods."""
_MAX_REASON: Final = 500
_SIMILAR: Final = frozenset({"owner", "images"})
"""Similarity that is enough to write an annotation; equal requests alone are not."""

_MeasuredLike = Callable[[Kin], tuple[str, list[int]] | None]
"""Returns the memory of the most similar pods in bytes, and the key that they share."""


class Proposals:
    """Propose annotations for new GPU pods; a pod's own annotations always count.

    Memory is proposed only where similar pods were measured, and never more than the largest card
    can give: a guess must not keep a pod from a node. Models are only a preference, so an estimate
    from the size of the model is enough.

    Args:
        measured_like: looks up what similar pods were measured to use.
        largest_card: returns the memory of the cluster's largest card in bytes, 0 if unknown.
    """

    def __init__(self, measured_like: _MeasuredLike, largest_card: Callable[[], int]) -> None:
        self._measured_like = measured_like
        self._largest_card = largest_card
        self._throttle = LogThrottle()

    def annotations_for(
        self, pod: Mapping[str, object], namespace: str, request: GpuRequest
    ) -> dict[str, str]:
        """Return the annotations to add to a new pod; {} for none, and after any fault.

        Args:
            namespace: its namespace, which the object of a new pod may lack.
        """
        try:
            return self._propose(pod, namespace, request)
        except Exception as error:
            unlogged = self._throttle.due("proposal", type(error).__name__)
            if unlogged is not None:
                logger.exception("cannot propose annotations", extra={"also_unlogged": unlogged})
            return {}

    def _propose(
        self, pod: Mapping[str, object], namespace: str, request: GpuRequest
    ) -> dict[str, str]:
        metadata = mapping_of(pod.get("metadata"))
        own = mapping_of(metadata.get("annotations"))
        states_memory = Annotation.GPU_MEMORY in own or bool(request.memory_source)
        states_models = bool({Annotation.PREFER_MODELS, Annotation.REQUIRE_MODELS} & own.keys())
        if states_memory and states_models:
            return {}
        measured = self._measured(kin_of({**pod, "metadata": {**metadata, "namespace": namespace}}))
        text = " ".join(texts_in(mapping_of(pod.get("spec")).get("containers")))[:_MAX_TEXT]
        found = propose("", text, measured, gpus=request.count)
        proposed: dict[str, str] = {}
        if measured is not None and not states_memory:
            proposed[Annotation.GPU_MEMORY.value] = f"{self._memory(found, measured) // MIB}Mi"
        if found.models and found.certainty is not Certainty.GUESSED and not states_models:
            proposed[Annotation.PREFER_MODELS.value] = ",".join(found.models)
        if not proposed:
            return {}
        reason = f"{found.certainty.value}: {'; '.join(found.because)}"[:_MAX_REASON]
        return proposed | {PROPOSAL: reason}

    def _measured(self, kin: Kin) -> Measured | None:
        found = self._measured_like(tuple(key for key in kin if similarity_of(key) in _SIMILAR))
        if found is None:
            return None
        key, used = found
        return Measured(by=similarity_of(key), pods=len(used), memory_bytes=max(used))

    def _memory(self, found: Proposal, measured: Measured) -> int:
        """Return the memory to propose, in bytes: at most what the largest card can give."""
        most = max(measured.memory_bytes + MIB, int(self._largest_card() * USABLE))
        return min(found.memory_bytes or most, most)


PATH: Final = "/admit"
_LABEL: Final = "idlegpu.io/scheduler"
"""Label of the nodes that a scheduler places pods on; its value is the scheduler's name. The
scheduler's `addedAffinity` requires it."""
_DEFAULT_SCHEDULER: Final = "default-scheduler"
_UNREADABLE: Final = "idlegpu could not read this pod; it is created unchanged"

_MAX_BODY_BYTES: Final = 4 << 20
"""Maximum size of a review: etcd stores objects of at most 1.5 MiB, and the API server reads at
most 3 MiB."""
_MAX_READING: Final = 64
_MAX_READING_EACH: Final = 16
"""Maximum number of reviews that are read at once, in total and from one address. Any client that
reaches the port may send many of them, slowly."""
_READ_SECONDS: Final = 5.0
"""Time limit for reading a review: the API server no longer waits for an answer afterwards."""

_LEASE_CHECK_SECONDS: Final = 2.0
"""Time between two reads of the Lease; the shortest usual duration of a Lease is 15 s."""
_LEASE_TIMEOUT_SECONDS: Final = 5.0
_LEASE_ACTION: Final = "get leases.coordination.k8s.io"
_DURATION_SECONDS: Final = 15.0
"""Assumed duration of a Lease that states none: kube-scheduler's default."""
_MAX_DURATION_SECONDS: Final = 3600.0

_API_VERSION: Final = "admission.k8s.io/v1"
_KIND: Final = "AdmissionReview"

_MAX_WARNINGS: Final = 3
_MAX_WARNING: Final = 250
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
    """Review of a pod that is being created.

    Attributes:
        uid: UID of the review; the answer repeats it.
    """

    uid: str
    namespace: str
    pod: Mapping[str, object]


def _decode_review(body: bytes) -> Review:
    """Decode a review."""
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


def _patch_pod(
    pod: Mapping[str, object], *, scheduler: str, taint_key: str
) -> Sequence[Mapping[str, object]]:
    """Return the JSON patch that sets a pod's scheduler and tolerates the taint of its nodes.

    Args:
        scheduler: `spec.schedulerName` to set.
        taint_key: key of the taint that keeps other pods off that scheduler's nodes, "" for none.
            The taint's value is the scheduler's name.
    """
    # "add" also replaces an existing field.
    patch: list[Mapping[str, object]] = [
        {"op": "add", "path": "/spec/schedulerName", "value": scheduler}
    ]
    tolerations = mapping_of(pod.get("spec")).get("tolerations")
    toleration = {"key": taint_key, "operator": "Equal", "value": scheduler, "effect": "NoSchedule"}
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


def _patch_annotations(
    pod: Mapping[str, object], annotations: Mapping[str, str]
) -> Sequence[Mapping[str, object]]:
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


def _encode_answer(
    uid: str, *, patch: Sequence[Mapping[str, object]] = (), warnings: Sequence[str] = ()
) -> bytes:
    """Encode an answer that allows the pod, changed or unchanged.

    Args:
        patch: JSON patch of the pod, empty to leave it unchanged.
        warnings: warnings for the client that creates the pod.
    """
    response: dict[str, object] = {"uid": uid, "allowed": True}
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(orjson.dumps(patch)).decode()
    if warnings:
        response["warnings"] = [text[:_MAX_WARNING] for text in warnings[:_MAX_WARNINGS]]
    return orjson.dumps({"apiVersion": _API_VERSION, "kind": _KIND, "response": response})


class SchedulerLease:
    """Checks periodically whether a scheduler renews its Lease; readers never wait.

    A Lease is fresh for its own duration after a renewal was seen, measured on our clock. Clocks of
    other machines are not trusted, and the Lease of a dead scheduler may still exist.

    Args:
        namespace: namespace of the Lease.
        name: name of the Lease.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        name: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        self._name = f"{namespace}/{name}"
        self._monotonic = monotonic
        self._seen: tuple[str, str] | None = None
        self._fresh_until = -math.inf
        self._was_fresh = False
        self._cause = ""

    @property
    def is_fresh(self) -> bool:
        """Whether a scheduler holds the Lease now."""
        return self._monotonic() < self._fresh_until

    async def run(self) -> None:
        """Check the Lease until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(_LEASE_CHECK_SECONDS * random.uniform(0.9, 1.1))

    async def check(self) -> None:
        """Check the Lease once; a failed check changes nothing."""
        # Take the time before the request: the renewal is older than the answer.
        started = self._monotonic()
        try:
            lease = await self._client.get(
                self._path, action=_LEASE_ACTION, timeout_seconds=_LEASE_TIMEOUT_SECONDS
            )
        except KubeError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                self._seen, self._fresh_until = ("", ""), -math.inf
            self._log_failure(str(error))
        else:
            self._apply(mapping_of(lease.get("spec")), started)
            self._log_failure("")
        self._log_change()

    def _apply(self, spec: object, at: float) -> None:
        fields = mapping_of(spec)
        holder = text_of(fields.get("holderIdentity"))
        seen = (holder, text_of(fields.get("renewTime")))
        before, self._seen = self._seen, seen
        if not holder:  # released
            self._fresh_until = -math.inf
        elif before is not None and seen != before:
            duration = fields.get("leaseDurationSeconds")
            if not isinstance(duration, int) or duration <= 0:
                duration = _DURATION_SECONDS
            self._fresh_until = at + min(float(duration), _MAX_DURATION_SECONDS)

    def _log_failure(self, cause: str) -> None:
        if cause and cause != self._cause:
            logger.warning(
                "cannot read the scheduler's Lease", extra={"lease": self._name, "cause": cause}
            )
        self._cause = cause

    def _log_change(self) -> None:
        """Log that the scheduler appeared or disappeared."""
        if self.is_fresh == self._was_fresh:
            return
        self._was_fresh = self.is_fresh
        message = (
            "the scheduler renews its Lease: new GPU pods are assigned to it"
            if self._was_fresh
            else "the scheduler does not renew its Lease: new GPU pods keep their scheduler"
        )
        logger.info(message, extra={"lease": self._name})


def _is_pinned(pod: Mapping[str, object], selection: Selection) -> bool:
    """Return whether a pod is tied to nodes by name, or belongs to a DaemonSet.

    Those nodes may belong to another scheduler.

    Args:
        selection: its node selector and affinity.
    """
    owners = objects_of(mapping_of(pod.get("metadata")).get("ownerReferences"))
    return any(owner.get("kind") == "DaemonSet" for owner in owners) or any(
        field.operator is Operator.IN for term in selection.terms or () for field in term.fields
    )


def _may_use_nodes_of(scheduler: str, selection: Selection) -> bool:
    """Return whether a pod's selector and affinity allow nodes with a scheduler's label.

    Example:
        >>> _may_use_nodes_of("idlegpu-scheduler", Selection(labels=((_LABEL, "another"),)))
        False
        >>> _may_use_nodes_of("idlegpu-scheduler", Selection(labels=(("disk", "ssd"),)))
        True
    """
    about_label = Selection(
        labels=tuple(label for label in selection.labels if label[0] == _LABEL),
        terms=None
        if selection.terms is None
        else tuple(
            Term(labels=tuple(one for one in term.labels if one.key == _LABEL))
            for term in selection.terms
        ),
    )
    return selects(about_label, NodeRecord(name="", labels={_LABEL: scheduler}))


class AdmissionOutcome(StrEnum):
    """Outcome for a pod, as a metric label."""

    SET = "set"
    NO_GPU = "no-gpu"
    DISABLED = "disabled"
    """The pod has the annotation `idlegpu.io/enabled: "false"`."""
    OTHER_SCHEDULER = "other-scheduler"
    BOUND = "bound"
    """The pod names its node already, so no scheduler handles it."""
    PINNED = "pinned"
    """The pod belongs to a DaemonSet or names its nodes in its affinity; another scheduler may own
    them."""
    OTHER_NODES = "other-nodes"
    """The pod's selector or affinity excludes nodes with the scheduler's label."""
    SCHEDULER_ABSENT = "scheduler-absent"
    """No scheduler renews the Lease."""
    UNREADABLE = "unreadable"
    FAULT = "fault"
    """The webhook itself failed."""


class AdmissionWebhook:
    """Answers the API server's reviews of new pods.

    Args:
        scheduler: name of the scheduler to set.
        taint_key: key of the taint of that scheduler's nodes, "" for none.
        resources: returns the names of GPU resources.
        policy: returns the defaults for pods without annotations.
        lease: reports whether the scheduler is running.
        admissions: counter by outcome.
        proposals: proposes annotations for pods, None to propose none.
    """

    def __init__(
        self,
        scheduler: str,
        *,
        taint_key: str,
        resources: Callable[[], ResourceNames],
        policy: Callable[[], Policy],
        lease: SchedulerLease,
        admissions: Metric,
        proposals: Proposals | None = None,
    ) -> None:
        self._proposals = proposals
        self._scheduler = scheduler
        self._taint_key = taint_key
        self._resources = resources
        self._policy = policy
        self._lease = lease
        self._admissions = admissions
        self._reading: Counter[str | None] = Counter()
        self._throttle = LogThrottle()
        for outcome in AdmissionOutcome:
            admissions.labels(outcome)

    def build_app(self, middlewares: Iterable[Middleware] = ()) -> web.Application:
        """Return the application that the API server calls."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=middlewares)
        app.add_routes([web.post(PATH, self._admit)])
        return app

    async def run(self) -> None:
        """Check whether the scheduler is running until cancelled."""
        await self._lease.run()

    async def _admit(self, request: web.Request) -> web.Response:
        uid = ""
        try:
            review = _decode_review(await self._read(request))
            uid = review.uid
            outcome, answer = self.decide(review)
        except ReviewError as error:
            self._log_unreadable(request, str(error))
            outcome, answer = _unchanged(AdmissionOutcome.UNREADABLE, error.uid)
        except Exception as error:
            unlogged = self._throttle.due("fault", type(error).__name__)
            if unlogged is not None:
                logger.exception(
                    "internal error", extra={"verb": "admit", "also_unlogged": unlogged}
                )
            outcome, answer = _unchanged(AdmissionOutcome.FAULT, uid)
        self._admissions.labels(outcome).inc()
        return web.Response(body=answer, content_type="application/json")

    def _log_unreadable(self, request: web.Request, cause: str) -> None:
        """Log an unreadable review, at a limited rate: any client may send many of them."""
        unlogged = self._throttle.due("unreadable", request.remote)
        if unlogged is not None:
            logger.warning(
                "unreadable admission review",
                extra={"cause": cause, "address": request.remote, "also_unlogged": unlogged},
            )

    async def _read(self, request: web.Request) -> bytes:
        """Read the body of a review request."""
        reading, address = self._reading, request.remote
        if reading[address] >= _MAX_READING_EACH or reading.total() >= _MAX_READING:
            raise ReviewError(
                f"too many reviews at once: {reading[address]} of {reading.total()} are from this "
                "address"
            )
        reading[address] += 1
        try:
            async with asyncio.timeout(_READ_SECONDS):
                return await request.read()
        except TimeoutError as error:
            raise ReviewError(f"the body did not arrive within {_READ_SECONDS:g} s") from error
        except web.HTTPRequestEntityTooLarge as error:
            raise ReviewError(f"the body is larger than {_MAX_BODY_BYTES} bytes") from error
        finally:
            reading[address] -= 1
            if not reading[address]:
                del reading[address]

    def decide(self, review: Review) -> tuple[AdmissionOutcome, bytes]:
        """Return the outcome for a pod and the encoded answer."""
        parsed = parse_request(review.pod, resources=self._resources(), defaults=self._policy())
        if parsed.is_disabled:
            outcome = AdmissionOutcome.DISABLED
        elif parsed.request is None:
            outcome = AdmissionOutcome.NO_GPU
        else:
            outcome = self._decide_gpu_pod(review.pod)
        if outcome is not AdmissionOutcome.SET:
            return outcome, _encode_answer(review.uid)
        problems = [problem.message for problem in parsed.problems]
        patch = _patch_pod(review.pod, scheduler=self._scheduler, taint_key=self._taint_key)
        if self._proposals is not None and parsed.request is not None:
            proposed = self._proposals.annotations_for(review.pod, review.namespace, parsed.request)
            patch = [*patch, *_patch_annotations(review.pod, proposed)]
        return outcome, _encode_answer(review.uid, patch=patch, warnings=problems)

    def _decide_gpu_pod(self, pod: Mapping[str, object]) -> AdmissionOutcome:
        spec = mapping_of(pod.get("spec"))
        if text_of(spec.get("nodeName")):
            return AdmissionOutcome.BOUND
        if text_of(spec.get("schedulerName")) not in {"", _DEFAULT_SCHEDULER}:
            return AdmissionOutcome.OTHER_SCHEDULER
        selection = read_selection(pod)
        if _is_pinned(pod, selection):
            return AdmissionOutcome.PINNED
        if not _may_use_nodes_of(self._scheduler, selection):
            return AdmissionOutcome.OTHER_NODES
        return AdmissionOutcome.SET if self._lease.is_fresh else AdmissionOutcome.SCHEDULER_ABSENT


def _unchanged(outcome: AdmissionOutcome, uid: str) -> tuple[AdmissionOutcome, bytes]:
    return outcome, _encode_answer(uid, warnings=[_UNREADABLE])


def build_webhook(
    client: KubeClient,
    settings: Admission,
    *,
    own_namespace: str,
    resources: Callable[[], ResourceNames],
    policy: Callable[[], Policy],
    admissions: Metric,
    proposals: Proposals | None,
) -> AdmissionWebhook | None:
    """Return the webhook, None if the settings disable it; arguments as for `AdmissionWebhook`."""
    if not settings.listen:
        return None
    lease = SchedulerLease(
        client, namespace=settings.lease_namespace or own_namespace, name=settings.lease_name
    )
    return AdmissionWebhook(
        settings.scheduler_name,
        taint_key=settings.taint_key,
        resources=resources,
        policy=policy,
        lease=lease,
        admissions=admissions,
        proposals=proposals if settings.proposals else None,
    )
