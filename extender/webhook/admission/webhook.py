"""Set the scheduler of GPU pods that name none; the webhook never refuses a pod."""

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
from typing import Final, Protocol

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import Counter as Metric

from extender.core.nodes.inventory import NodeRecord, selects
from extender.core.nodes.node_selection import Operator, Selection, Term, read_selection
from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames, excess_of
from extender.core.request.request import parse_request
from extender.core.untyped import items_of, mapping_of, objects_of, text_of
from extender.kube.client import KubeClient, KubeError
from extender.runtime.decoding import MalformedError, decode_with, excess_values
from extender.runtime.log_throttle import LogThrottle
from extender.settings.api import Admission
from extender.webhook.admission.proposals import Proposals

logger = logging.getLogger(__name__)

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
_LEASE_LIMIT_BYTES: Final = 1 << 20
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
    """A pod that is being created.

    Attributes:
        uid: UID of the review; the answer repeats it.
        namespace: namespace of the pod.
        pod: the Pod object.
    """

    uid: str
    namespace: str
    pod: Mapping[str, object]


def _decode_review(body: bytes) -> Review:
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


def _patch_pod(
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
        uid: UID of the review.
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
        client: client of the API server.
        namespace: namespace of the Lease.
        name: name of the Lease.
        check_seconds: time between two checks.
        monotonic: returns a monotonic time in seconds.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        name: str,
        check_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        self._name = f"{namespace}/{name}"
        self._check_seconds = check_seconds
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
            await asyncio.sleep(self._check_seconds * random.uniform(0.9, 1.1))

    async def check(self) -> None:
        """Check the Lease once; a failed check changes nothing."""
        # Take the time before the request: the renewal is older than the answer.
        started = self._monotonic()
        try:
            lease = await self._client.get(
                self._path,
                {},
                action=_LEASE_ACTION,
                timeout_seconds=_LEASE_TIMEOUT_SECONDS,
                limit_bytes=_LEASE_LIMIT_BYTES,
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
        pod: the Pod object.
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


class _SchedulerPresence(Protocol):
    """Reports whether a scheduler is running."""

    @property
    def is_fresh(self) -> bool:
        """Whether the scheduler is running; never waits."""

    async def run(self) -> None:
        """Check the scheduler until cancelled."""


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
        lease: _SchedulerPresence,
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
        except TimeoutError:
            self._log_unreadable(request, f"the body did not arrive within {_READ_SECONDS:g} s")
            outcome, answer = _unchanged(AdmissionOutcome.UNREADABLE, uid)
        except web.HTTPRequestEntityTooLarge:
            self._log_unreadable(request, f"the body is larger than {_MAX_BODY_BYTES} bytes")
            outcome, answer = _unchanged(AdmissionOutcome.UNREADABLE, uid)
        except Exception as error:
            unlogged = self._throttle.due("fault", type(error).__name__)
            if unlogged is not None:
                logger.exception("fault", extra={"verb": "admit", "also_unlogged": unlogged})
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
        """Return the body.

        Raises:
            ReviewError: too many reviews are being read.
            TimeoutError: the body does not arrive in time.
        """
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
        client,
        namespace=settings.lease_namespace or own_namespace,
        name=settings.lease_name,
        check_seconds=_LEASE_CHECK_SECONDS,
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
