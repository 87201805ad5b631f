"""Find and count pods that were bound without idlegpu's answer, and find likely causes."""

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from extender.core.nodes.inventory import PodRecord
from extender.placement.request_log import SILENCE_SECONDS, BypassVerdict, PeerReports, RequestLog
from extender.runtime.metrics import Metrics
from extender.settings.config import Settings
from extender.settings.service import BypassSettings

_SHOWN_NAMES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoundPods:
    """A group of bound pods with equal scheduler, GPU resources and verdict.

    Attributes:
        were_refused: filter had refused every node for them, and no further request came.
        example: `namespace/name` of the last pod.
        first_at: time of the first binding, in seconds.
        last_at: time of the last binding, in seconds.
    """

    scheduler: str
    resources: tuple[str, ...]
    verdict: BypassVerdict
    were_refused: bool = False
    count: int = 1
    example: str = ""
    first_at: float = 0.0
    last_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _BypassEvidence:
    """Observations of the last minutes about requests and bindings.

    Attributes:
        at: time of the observation, on the clock of the groups' times.
        unjudged: number of pods since the start whose requests are unknown.
        schedulers: schedulers that call us: those of the setting, else those seen since the start.
        silence_seconds: time since the last request to any replica, None without any.
        lost_answers: requests whose client disconnected before our answer or while sending.
        slowest_seconds: duration of the slowest of these.
        unreadable: requests that could not be parsed.
        wrong_paths: requested paths that we do not serve.
    """

    pods: tuple[_BoundPods, ...]
    at: float = 0.0
    unjudged: int = 0
    schedulers: tuple[str, ...] = ()
    silence_seconds: float | None = None
    lost_answers: int = 0
    slowest_seconds: float = 0.0
    unreadable: int = 0
    wrong_paths: tuple[str, ...] = ()


class _CauseKind(StrEnum):
    """Kinds of causes, in the order in which equally likely causes are listed."""

    WRONG_PATH = "wrong-path"
    UNREADABLE = "unreadable"
    NO_EXTENDER = "no-extender"
    MANAGED_RESOURCES = "managed-resources"
    OTHER_SCHEDULER = "other-scheduler"
    PRIORITIZE_VERB = "prioritize-verb"
    HTTP_TIMEOUT = "http-timeout"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class _BypassCause:
    """A likely cause: the field to check in kube-scheduler's configuration or in ours, and why."""

    kind: _CauseKind
    field: str
    pods: int  # that it may explain
    text: str


_TEXTS: Final = {
    _CauseKind.WRONG_PATH: (
        "urlPrefix",
        "requests came for {names}, but idlegpu serves /filter, /prioritize and /preempt: see "
        "urlPrefix, filterVerb, prioritizeVerb and preemptVerb",
    ),
    _CauseKind.UNREADABLE: (
        "nodeCacheCapable",
        "{evidence.unreadable} requests could not be read: the log says why (malformed request); "
        "nodeCacheCapable: true makes large requests small",
    ),
    _CauseKind.NO_EXTENDER: (
        "extenders",
        "kube-scheduler {since}: its configuration (--config) has no entry for idlegpu under "
        "extenders, or the managedResources of that entry lack {names}, or kube-scheduler cannot "
        "reach idlegpu: check urlPrefix, enableHTTPS, tlsConfig and NetworkPolicies",
    ),
    _CauseKind.MANAGED_RESOURCES: (
        "managedResources",
        "kube-scheduler sends requests, but none for pods that request {names}: managedResources "
        "lacks these names (exact names, no wildcards)",
    ),
    _CauseKind.OTHER_SCHEDULER: (
        "schedulerName",
        "kube-scheduler sends requests, but none for pods with schedulerName {names}: the "
        "scheduler that serves this profile has no entry for idlegpu under extenders; if that is "
        "intended, list only the other schedulers in idlegpu's setting bypassed.schedulers",
    ),
    _CauseKind.PRIORITIZE_VERB: (
        "prioritizeVerb",
        "kube-scheduler calls filter but never prioritize, so idlegpu's scores do not count: "
        "prioritizeVerb is missing or wrong, or an extender that is called after idlegpu always "
        "leaves one node",
    ),
    _CauseKind.HTTP_TIMEOUT: (
        "httpTimeout",
        "answers came too late: kube-scheduler disconnected before {evidence.lost_answers} answers "
        "(the slowest took {evidence.slowest_seconds:.2f} s): httpTimeout is too short, or idlegpu "
        "lacks CPU",
    ),
    _CauseKind.UNREACHABLE: (
        "ignorable",
        "requests come for some of these pods only: kube-scheduler cannot always reach idlegpu (a "
        "restart, TLS, httpTimeout) and then places pods without idlegpu (ignorable: true); or its "
        "configuration was changed; or another kube-scheduler with other extenders serves some "
        "of these pods; or another replica of idlegpu answers, and peers.service is not set",
    ),
}

_Found = tuple[_CauseKind, int, dict[str, str]]
"""Kind of a cause, number of pods, and values of its text."""


def likely_causes(evidence: _BypassEvidence) -> tuple[_BypassCause, ...]:
    """Return the likely causes of bypassed pods, the most likely first."""
    missed = [group for group in evidence.pods if group.verdict is BypassVerdict.NOT_CALLED]
    found = list(_why_silent(evidence, missed) or _why_missed(evidence, missed))
    for kind, verdict in (
        (_CauseKind.HTTP_TIMEOUT, BypassVerdict.ANSWER_LOST),
        (_CauseKind.PRIORITIZE_VERB, BypassVerdict.NOT_SCORED),
    ):
        found.append((kind, _count(g for g in evidence.pods if g.verdict is verdict), {}))
    ranks = {kind: rank for rank, kind in enumerate(_CauseKind)}
    return tuple(
        _BypassCause(
            kind=kind,
            field=_TEXTS[kind][0],
            pods=pods,
            text=_TEXTS[kind][1].format(evidence=evidence, **values),
        )
        for kind, pods, values in sorted(found, key=lambda one: (-one[1], ranks[one[0]]))
        if pods
    )


def _why_silent(evidence: _BypassEvidence, missed: Sequence[_BoundPods]) -> list[_Found]:
    """Return the causes if no requests come at all, else none."""
    seconds = evidence.silence_seconds
    if seconds is not None and seconds <= SILENCE_SECONDS:
        return []
    since = (
        "has never sent a request" if seconds is None else f"sent no request for {seconds:.0f} s"
    )
    values = {"since": since, "names": _names(name for group in missed for name in group.resources)}
    count = _count(missed)
    return [*_why_unread(evidence, count), (_CauseKind.NO_EXTENDER, count, values)]


def _why_unread(evidence: _BypassEvidence, pods: int) -> Iterator[_Found]:
    """Yield the causes of requests that we cannot parse or do not serve."""
    if evidence.wrong_paths:
        yield _CauseKind.WRONG_PATH, pods, {"names": _names(evidence.wrong_paths)}
    yield _CauseKind.UNREADABLE, min(pods, evidence.unreadable), {}


def _why_missed(evidence: _BypassEvidence, missed: Sequence[_BoundPods]) -> Iterator[_Found]:
    """Yield the causes of missing requests for some pods while requests for others come."""
    seen = [group for group in evidence.pods if group not in missed or group.were_refused]
    names = {name for group in seen for name in group.resources}
    schedulers = {group.scheduler for group in seen}
    unnamed = [group for group in missed if not names.intersection(group.resources)]
    others = [group for group in missed if seen and group.scheduler not in schedulers]
    rest = [group for group in missed if group not in unnamed and group not in others]
    yield (
        _CauseKind.MANAGED_RESOURCES,
        _count(unnamed),
        {"names": _names(name for group in unnamed for name in group.resources)},
    )
    schedulers_of_others = _names(group.scheduler for group in others)
    yield _CauseKind.OTHER_SCHEDULER, _count(others), {"names": schedulers_of_others}
    if not rest:
        return
    count = _count(rest)
    yield from _why_unread(evidence, count)
    if evidence.lost_answers:
        yield _CauseKind.HTTP_TIMEOUT, count, {}
    yield _CauseKind.UNREACHABLE, count, {}


def _count(groups: Iterable[_BoundPods]) -> int:
    return sum(group.count for group in groups)


def _names(names: Iterable[str]) -> str:
    """Format names for a message: sorted, at most `_SHOWN_NAMES`."""
    ordered = sorted(set(names))
    more = len(ordered) - _SHOWN_NAMES
    return ", ".join(ordered[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 0.5
_LOG_SECONDS: Final = 60.0

_GRACE_SECONDS: Final = 5.0
"""Shortest time after its binding before a pod without a known answer is judged: other replicas
report their requests within milliseconds, and watches may be seconds late."""
MAX_WAIT_SECONDS: Final = 600.0
"""A pod stays unjudged if another replica is silent for this long after the binding."""

_WATCH_SECONDS: Final = 2.0
"""kube-scheduler may see a pod, and call us, this long before our own watch shows the pod."""

_MAX_GROUPS: Final = 200
MAX_BOUND: Final = 20_000
_MAX_SCHEDULERS: Final = 10
_OTHER: Final = "other"
_DEFAULT_SCHEDULER: Final = "default-scheduler"


@dataclass(frozen=True, slots=True)
class _Bound:
    """A bound pod that is not classified yet, with the period in which requests were possible."""

    record: PodRecord
    since: float
    bound_at: float


class BypassedPods:
    """Follows pods while they wait until they are bound, and classifies each as bypassed or not.

    A pod counts as bypassed only once every replica that kube-scheduler could have called has
    reported its requests up to the binding. If a replica can no longer report them, the pod stays
    unjudged, and so do pods that we never saw waiting. Runs on the event loop's thread only.

    Args:
        request_log: requests to all replicas.
        metrics: counts the pods.
        settings: which pods to classify, and when.
        peers: state of the reports from other replicas; None without others.
        grace_seconds: shortest time from a binding to the verdict.
    """

    def __init__(
        self,
        request_log: RequestLog,
        metrics: Metrics,
        settings: BypassSettings,
        *,
        peers: PeerReports | None = None,
        grace_seconds: float = _GRACE_SECONDS,
    ) -> None:
        self._request_log = request_log
        self._metrics = metrics
        self._peers = peers
        self._grace_seconds = grace_seconds
        self._unjudged = 0
        self._waiting: dict[str, float] = {}
        self._bound: deque[_Bound] = deque()
        self._groups: OrderedDict[object, _BoundPods] = OrderedDict()
        self._labels: set[str] = set()
        self._schedulers: set[str] = set()
        self._bypassed: list[tuple[PodRecord, BypassVerdict]] = []
        self._logged_at = -math.inf
        self._apply(settings)

    def adopt(self, settings: Settings) -> None:
        """Apply new settings."""
        self._apply(settings.bypassed)

    def _apply(self, settings: BypassSettings) -> None:
        self._settings = settings
        if settings.enabled:
            for scheduler in settings.schedulers or (_DEFAULT_SCHEDULER,):
                self._labels.add(scheduler)
                self._count(scheduler, BypassVerdict.CALLED)

    def see(self, record: PodRecord) -> None:
        """Follow a GPU pod that was added or changed."""
        served, now = self._settings.schedulers, self._request_log.monotonic()
        is_ours = record.resources and (not served or record.scheduler_name in served)
        if not self._settings.enabled or not is_ours:
            return
        if not (record.node or record.phase.is_terminal):
            # If our watch is later than kube-scheduler's, the pod's age shows it.
            age_seconds = self._request_log.clock() - (record.created_at or math.inf)
            self._waiting.setdefault(record.uid, now - max(_WATCH_SECONDS, age_seconds))
            return
        since = self._waiting.pop(record.uid, None)
        if since is None or not record.node:
            return
        bound = _Bound(record, since, now)
        if not self._settle(bound, now):
            self._bound.append(bound)
        if len(self._bound) > MAX_BOUND:
            self._leave_unjudged(self._bound.popleft())

    def relist(self, records: Iterable[PodRecord]) -> None:
        """Apply a complete list of GPU pods: update waiting pods, and forget pods that are gone."""
        listed = {record.uid: record for record in records}
        for uid in tuple(self._waiting):
            if uid in listed:
                self.see(listed[uid])
            else:
                self.remove(uid)

    def remove(self, uid: str) -> None:
        """Forget a deleted pod, unless it was bound."""
        if self._waiting.pop(uid, None) is not None:
            self._request_log.forget(uid)

    async def run(self) -> None:
        """Classify bound pods until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """Classify the pods whose requests are known by now; write the log line if it is due."""
        now = self._request_log.monotonic()
        while self._bound and self._settle(self._bound[0], now):
            self._bound.popleft()
        self._request_log.expire()
        while self._groups and now - next(iter(self._groups.values())).last_at > SILENCE_SECONDS:
            self._groups.popitem(last=False)
        if self._bypassed and now - self._logged_at >= _LOG_SECONDS:
            self._log(now)

    def report(self) -> _BypassEvidence:
        """Return the observations of the last minutes."""
        now, last_at = self._request_log.monotonic(), self._request_log.last_at
        lost, unreadable, slowest_seconds = self._request_log.incidents
        return _BypassEvidence(
            pods=tuple(self._groups.values()),
            at=now,
            unjudged=self._unjudged,
            schedulers=tuple(self._settings.schedulers or sorted(self._schedulers)),
            silence_seconds=None if last_at is None else now - last_at,
            lost_answers=lost,
            slowest_seconds=slowest_seconds,
            unreadable=unreadable,
            wrong_paths=tuple(self._request_log.wrong_paths),
        )

    def _settle(self, bound: _Bound, now: float) -> bool:
        """Classify a pod, or count it as unjudged; return False if it is too early for either."""
        uid, waited_seconds = bound.record.uid, now - bound.bound_at
        verdict = self._request_log.verdict(uid)
        if verdict is BypassVerdict.CALLED:
            self._judge(bound, verdict)
            return True
        if waited_seconds < self._grace_seconds:
            return False
        since, until = -math.inf, math.inf
        if self._peers is not None:
            since, until = self._peers.since, self._peers.until
        is_forgotten = bound.since <= self._request_log.forgotten_until
        if bound.since < since or (is_forgotten and uid not in self._request_log):
            self._leave_unjudged(bound)
        elif bound.bound_at < until:
            self._judge(bound, verdict)
        elif waited_seconds >= MAX_WAIT_SECONDS:
            self._leave_unjudged(bound)
        else:
            return False
        return True

    def _judge(self, bound: _Bound, verdict: BypassVerdict) -> None:
        """Classify and count a pod, and add it to the group of similar pods."""
        record, resources = bound.record, tuple(bound.record.resources)
        were_refused = verdict is BypassVerdict.NOT_CALLED and record.uid in self._request_log
        self._request_log.forget(record.uid)
        self._count(record.scheduler_name, verdict)
        if verdict is not BypassVerdict.NOT_CALLED and len(self._schedulers) < _MAX_SCHEDULERS:
            self._schedulers.add(record.scheduler_name)
        if verdict is not BypassVerdict.CALLED:
            self._bypassed.append((record, verdict))
        likeness = (record.scheduler_name, resources, verdict, were_refused)
        group = self._groups.pop(likeness, None) or _BoundPods(
            scheduler=record.scheduler_name,
            resources=resources,
            verdict=verdict,
            were_refused=were_refused,
            count=0,
            first_at=bound.bound_at,
        )
        self._groups[likeness] = replace(
            group, count=group.count + 1, example=record.key, last_at=bound.bound_at
        )
        if len(self._groups) > _MAX_GROUPS:
            self._groups.popitem(last=False)

    def _leave_unjudged(self, bound: _Bound) -> None:
        self._unjudged += 1
        self._metrics.unjudged.inc()
        self._request_log.forget(bound.record.uid)

    def _count(self, scheduler: str, verdict: BypassVerdict) -> None:
        """Count a pod; create the series of its scheduler at 0, so that rate() sees the first."""
        # Users can invent names of schedulers.
        is_known = scheduler in self._labels or len(self._labels) < _MAX_SCHEDULERS
        label = scheduler if is_known else _OTHER
        self._labels.add(label)
        for reason in (each for each in BypassVerdict if each is not BypassVerdict.CALLED):
            self._metrics.bypassed.labels(label, reason).inc(reason is verdict)

    def _log(self, now: float) -> None:
        """Write one log line about the pods that were bypassed since the last line."""
        record, verdict = self._bypassed[-1]
        causes = likely_causes(self.report())
        logger.warning(
            "pods bound without idlegpu's answer",
            extra={
                "pods": len(self._bypassed),
                "example": record.key,
                "why": verdict.value,
                "scheduler": record.scheduler_name,
                "resources": list(record.resources),
                "likely_causes": [f"{cause.field}: {cause.text}" for cause in causes],
            },
        )
        self._bypassed, self._logged_at = [], now
