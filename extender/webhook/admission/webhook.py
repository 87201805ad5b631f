"""Gives GPU pods a scheduler to which nobody gave one; it never stops a pod."""

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Final, Protocol

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import Counter as Metric

from extender.core.nodes.inventory import NodeRecord
from extender.core.nodes.node_affinity import selects
from extender.core.nodes.node_selection import Operator, Selection, Term, read_selection
from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import parse_request
from extender.core.untyped import mapping_of, objects_of, text_of
from extender.kube.client import KubeClient, KubeError
from extender.runtime.log_throttle import LogThrottle
from extender.settings.admission import Admission
from extender.webhook.admission.review import (
    Review,
    ReviewError,
    decode_review,
    encode_answer,
    patch_pod,
)

# Whether a scheduler is there: it holds its Lease as long as it renews it.


DURATION_SECONDS: Final = 15.0
"""Where the Lease does not say: what kube-scheduler writes unless told otherwise."""
MAX_DURATION_SECONDS: Final = 3600.0

TIMEOUT_SECONDS: Final = 5.0
LIMIT_BYTES: Final = 1 << 20
ACTION: Final = "get leases.coordination.k8s.io"


class SchedulerLease:
    """Looks at a Lease again and again; nobody who asks waits for that.

    A Lease counts from a renewal that was seen, on our own clock, for as long as it says itself:
    clocks of other machines are not trusted, and what a dead scheduler left behind proves nothing.

    Args:
        client: the API server.
        namespace: where the Lease is.
        name: its name.
        check_seconds: time between two looks.
        monotonic: seconds since any moment.
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
        """Whether somebody holds the Lease now."""
        return self._monotonic() < self._fresh_until

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._check_seconds * random.uniform(0.9, 1.1))

    async def look(self) -> None:
        """Look at the Lease once; a look that fails changes nothing, and time goes on."""
        # From before the question: the renewal is older than the answer.
        started = self._monotonic()
        try:
            lease = await self._client.get(
                self._path,
                {},
                action=ACTION,
                timeout_seconds=TIMEOUT_SECONDS,
                limit_bytes=LIMIT_BYTES,
            )
        except KubeError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                self._seen, self._fresh_until = ("", ""), -math.inf
            self._note(str(error))
        else:
            self._take(mapping_of(lease.get("spec")), started)
            self._note("")
        self._tell()

    def _take(self, spec: object, at: float) -> None:
        """Take what the Lease says."""
        told = mapping_of(spec)
        holder = text_of(told.get("holderIdentity"))
        seen = (holder, text_of(told.get("renewTime")))
        before, self._seen = self._seen, seen
        if not holder:  # given back
            self._fresh_until = -math.inf
        elif before is not None and seen != before:
            duration = told.get("leaseDurationSeconds")
            if not isinstance(duration, int) or duration <= 0:
                duration = DURATION_SECONDS
            self._fresh_until = at + min(float(duration), MAX_DURATION_SECONDS)

    def _note(self, cause: str) -> None:
        """Log a failure once, and once that it is over."""
        if cause and cause != self._cause:
            logger.warning(
                "cannot look at the scheduler's Lease", extra={"lease": self._name, "cause": cause}
            )
        self._cause = cause

    def _tell(self) -> None:
        """Log when the scheduler comes or goes."""
        if self.is_fresh == self._was_fresh:
            return
        self._was_fresh = self.is_fresh
        message = (
            "the scheduler is there: pods are given to it"
            if self._was_fresh
            else "the scheduler does not renew its Lease: pods keep theirs"
        )
        logger.info(message, extra={"lease": self._name})


# Whether a pod can go to the nodes of the scheduler that it would be given; else it would wait.

LABEL: Final = "idlegpu.io/scheduler"
"""Label of the nodes that a scheduler places pods on, with its name as value: `addedAffinity` of
its configuration wants it."""


def is_pinned(pod: Mapping[str, object], selection: Selection) -> bool:
    """Tell whether a pod is meant for nodes by name, as a DaemonSet's are: theirs may be no others.

    Args:
        pod: the Pod object.
        selection: what it says of its nodes.
    """
    owners = objects_of(mapping_of(pod.get("metadata")).get("ownerReferences"))
    return any(owner.get("kind") == "DaemonSet" for owner in owners) or any(
        field.operator is Operator.IN for term in selection.terms or () for field in term.fields
    )


def takes_nodes_of(scheduler: str, selection: Selection) -> bool:
    """Tell whether a pod can go to nodes with the label of a scheduler, for all it says of that.

    Example:
        >>> takes_nodes_of("idlegpu-scheduler", Selection(labels=((LABEL, "another"),)))
        False
        >>> takes_nodes_of("idlegpu-scheduler", Selection(labels=(("disk", "ssd"),)))
        True
    """
    about_label = Selection(
        labels=tuple(label for label in selection.labels if label[0] == LABEL),
        terms=None
        if selection.terms is None
        else tuple(
            Term(labels=tuple(one for one in term.labels if one.key == LABEL))
            for term in selection.terms
        ),
    )
    return selects(about_label, NodeRecord(name="", labels={LABEL: scheduler}))


logger = logging.getLogger(__name__)

PATH: Final = "/admit"
MAX_BODY_BYTES: Final = 4 << 20
"""Objects have 1.5 MiB at most in etcd, and the API server reads no more than 3 MiB."""
MOST_READ: Final = 64
READ_EACH: Final = 16
"""Reviews read at once, and of these from one address: whoever reaches the port may send any number
of them, and as slowly as they like."""
READ_SECONDS: Final = 5.0
"""The API server has gone on without an answer by then."""

DEFAULT_SCHEDULER: Final = "default-scheduler"
UNREADABLE: Final = "idlegpu could not read this pod; it is created as it is"


class AdmissionOutcome(StrEnum):
    """What became of a pod, for metrics."""

    SET = "set"
    NO_GPU = "no-gpu"
    DISABLED = "disabled"
    """It says `idlegpu.io/enabled: "false"`."""
    OTHER_SCHEDULER = "other-scheduler"
    BOUND = "bound"
    """It names its node already: no scheduler looks at it."""
    PINNED = "pinned"
    """A DaemonSet's, or it names its nodes in its affinity: these may be another scheduler's."""
    OTHER_NODES = "other-nodes"
    """By its selector or affinity it cannot go to nodes with that scheduler's label."""
    SCHEDULER_ABSENT = "scheduler-absent"
    """Nobody renews the Lease."""
    UNREADABLE = "unreadable"
    FAULT = "fault"
    """Of ours."""


class SchedulerPresence(Protocol):
    """Knows whether a scheduler is there."""

    @property
    def is_fresh(self) -> bool:
        """Whether it is; never waits."""

    async def run(self) -> None:
        """Find out, again and again, until cancelled."""


class AdmissionWebhook:
    """Answers the API server about pods that are being created.

    Args:
        scheduler: what pods get.
        taint_key: key of the taint of that scheduler's nodes, "" for none.
        resources: which resources are GPUs.
        policy: what holds where a pod does not say.
        lease: whether that scheduler is there.
        admissions: counts by outcome.
    """

    def __init__(
        self,
        scheduler: str,
        *,
        taint_key: str,
        resources: Callable[[], ResourceNames],
        policy: Callable[[], Policy],
        lease: SchedulerPresence,
        admissions: Metric,
    ) -> None:
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
        """Return what the API server asks."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
        app.add_routes([web.post(PATH, self._admit)])
        return app

    async def run(self) -> None:
        """Look whether the scheduler is there until cancelled."""
        await self._lease.run()

    async def _admit(self, request: web.Request) -> web.Response:
        uid = ""
        try:
            review = decode_review(await self._read(request))
            uid = review.uid
            outcome, answer = self.judge(review)
        except ReviewError as error:
            self._complain(request, str(error))
            outcome, answer = _unchanged(AdmissionOutcome.UNREADABLE, error.uid)
        except TimeoutError:
            self._complain(request, "it came too slowly")
            outcome, answer = _unchanged(AdmissionOutcome.UNREADABLE, uid)
        except web.HTTPRequestEntityTooLarge:
            self._complain(request, "it is too large")
            outcome, answer = _unchanged(AdmissionOutcome.UNREADABLE, uid)
        except Exception as error:
            unlogged = self._throttle.due("fault", type(error).__name__)
            if unlogged is not None:
                logger.exception("fault", extra={"verb": "admit", "also_unlogged": unlogged})
            outcome, answer = _unchanged(AdmissionOutcome.FAULT, uid)
        self._admissions.labels(outcome).inc()
        return web.Response(body=answer, content_type="application/json")

    def _complain(self, request: web.Request, cause: str) -> None:
        """Say what is wrong with a review, now and then: whoever reaches the port may send any."""
        unlogged = self._throttle.due("unreadable", request.remote)
        if unlogged is not None:
            logger.warning(
                "unreadable admission review",
                extra={"cause": cause, "address": request.remote, "also_unlogged": unlogged},
            )

    async def _read(self, request: web.Request) -> bytes:
        """Return the body.

        Raises:
            ReviewError: too many come at once.
            TimeoutError: it takes too long.
        """
        reading, address = self._reading, request.remote
        if reading[address] >= READ_EACH or reading.total() >= MOST_READ:
            raise ReviewError(f"{reading[address]} of {reading.total()} reviews that came at once")
        reading[address] += 1
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await request.read()
        finally:
            reading[address] -= 1
            if not reading[address]:
                del reading[address]

    def judge(self, review: Review) -> tuple[AdmissionOutcome, bytes]:
        """Return what becomes of a pod, and the answer that says so."""
        parsed = parse_request(review.pod, resources=self._resources(), defaults=self._policy())
        if parsed.is_disabled:
            outcome = AdmissionOutcome.DISABLED
        elif parsed.request is None:
            outcome = AdmissionOutcome.NO_GPU
        else:
            outcome = self._judge_gpu_pod(review.pod)
        if outcome is not AdmissionOutcome.SET:
            return outcome, encode_answer(review.uid)
        problems = [problem.message for problem in parsed.problems]
        patch = patch_pod(review.pod, scheduler=self._scheduler, taint_key=self._taint_key)
        return outcome, encode_answer(review.uid, patch=patch, warnings=problems)

    def _judge_gpu_pod(self, pod: Mapping[str, object]) -> AdmissionOutcome:
        spec = mapping_of(pod.get("spec"))
        if text_of(spec.get("nodeName")):
            return AdmissionOutcome.BOUND
        if text_of(spec.get("schedulerName")) not in {"", DEFAULT_SCHEDULER}:
            return AdmissionOutcome.OTHER_SCHEDULER
        selection = read_selection(pod)
        if is_pinned(pod, selection):
            return AdmissionOutcome.PINNED
        if not takes_nodes_of(self._scheduler, selection):
            return AdmissionOutcome.OTHER_NODES
        return AdmissionOutcome.SET if self._lease.is_fresh else AdmissionOutcome.SCHEDULER_ABSENT


def _unchanged(outcome: AdmissionOutcome, uid: str) -> tuple[AdmissionOutcome, bytes]:
    return outcome, encode_answer(uid, warnings=[UNREADABLE])


def make_webhook(
    client: KubeClient,
    settings: Admission,
    *,
    own_namespace: str,
    resources: Callable[[], ResourceNames],
    policy: Callable[[], Policy],
    admissions: Metric,
) -> AdmissionWebhook | None:
    """Return the webhook, None where the settings want none; see `AdmissionWebhook`."""
    if not settings.listen:
        return None
    lease = SchedulerLease(
        client,
        namespace=settings.lease_namespace or own_namespace,
        name=settings.lease_name,
        check_seconds=settings.lease_check_seconds,
    )
    return AdmissionWebhook(
        settings.scheduler_name,
        taint_key=settings.taint_key,
        resources=resources,
        policy=policy,
        lease=lease,
        admissions=admissions,
    )
