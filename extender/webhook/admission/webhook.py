"""Gives GPU pods a scheduler to which nobody gave one; it never stops a pod."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Final, Protocol

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import Counter as Metric

from extender.core.nodes.node_selection import read_selection
from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import parse_request
from extender.core.untyped import mapping_of, text_of
from extender.kube.client import KubeClient
from extender.runtime.log_throttle import LogThrottle
from extender.settings.admission import Admission
from extender.webhook.admission.node_access import is_pinned, takes_nodes_of
from extender.webhook.admission.review import (
    Review,
    ReviewError,
    decode_review,
    encode_answer,
    patch_pod,
)
from extender.webhook.admission.scheduler_lease import SchedulerLease

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
