"""Notices pods that were bound without our having been asked, counts them and says why, likely."""

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from extender.core.nodes.inventory import PodRecord
from extender.placement.bypass_causes import (
    SILENCE_SECONDS,
    BoundPods,
    BypassCause,
    BypassEvidence,
    BypassVerdict,
    likely_causes,
)
from extender.placement.request_log import RequestLog
from extender.runtime.metrics import Metrics
from extender.settings.config import Settings
from extender.settings.peers import BypassSettings

logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 0.5
LOG_SECONDS: Final = 60.0

GRACE_SECONDS: Final = 5.0
"""Shortest time after its binding before a pod without a known answer is judged: other replicas
report their requests within milliseconds, and watches may be seconds late."""
MAX_WAIT_SECONDS: Final = 600.0
"""A pod stays unjudged where another replica was silent for so long after its binding."""

WATCH_SECONDS: Final = 2.0
"""kube-scheduler may see a pod, and ask about it, so long before our own watch shows it."""

START_SECONDS: Final = 30.0
"""Time from our start until kube-scheduler can be expected to ask: a Service needs a while."""

MAX_GROUPS: Final = 200
MAX_BOUND: Final = 20_000
MAX_SCHEDULERS: Final = 10
OTHER: Final = "other"
DEFAULT_SCHEDULER: Final = "default-scheduler"
"""Of pods that name none."""


class PeerReports(Protocol):
    """Knows of which time it is known what every other replica was asked (monotonic seconds)."""

    @property
    def since(self) -> float:
        """From when on; what was asked before is lost for good."""

    @property
    def until(self) -> float:
        """Until when, by what each of them has said after that."""


@dataclass(frozen=True, slots=True)
class Alone:
    """There is no other replica, and so nothing unknown."""

    since: float = -math.inf
    until: float = math.inf


_Likeness = tuple[str, tuple[str, ...], BypassVerdict, bool, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A pod that waits to be judged.

    Attributes:
        record: the pod.
        since: no replica was asked about it before (monotonic seconds, as all times).
        bound_at: when its binding was seen: no replica was asked after that.
        is_early: it was bound when we had just started.
    """

    record: PodRecord
    since: float
    bound_at: float
    is_early: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BypassReport:
    """What was noticed, for people and programs.

    Attributes:
        at: the time of the report, on the clock of the groups' times.
        unjudged: pods of which it is not known, since the start.
        evidence: what is known of the others that were bound in the last minutes.
        asked_by: the schedulers that ask: those that the settings name, else those of whose pods
            any was asked about since the start; some of them, where there are many.
    """

    at: float
    unjudged: int
    evidence: BypassEvidence
    asked_by: tuple[str, ...] = ()

    @property
    def bound(self) -> tuple[BoundPods, ...]:
        """The pods that were bound in the last minutes, in groups."""
        return self.evidence.pods

    @property
    def causes(self) -> tuple[BypassCause, ...]:
        """Why some of these were bound without our answer; the likeliest first."""
        return likely_causes(self.evidence)


class BypassedPods:
    """Follows pods from the time they wait to their binding, and judges each.

    A pod that was asked about is never accused: where no answer is known that was read, the verdict
    waits until every replica that may have been asked has said, after the binding, what it was
    asked. Where one cannot say that any more the pod stays unjudged, as do pods that were there
    before us, and those that we never saw waiting. Everything runs on the event loop's thread.

    Args:
        request_log: what the replicas were asked.
        metrics: where it is counted.
        settings: whose pods, and when.
        peers: how well the other replicas are heard; None for no others.
        is_ready: whether we can answer well.
    """

    def __init__(
        self,
        request_log: RequestLog,
        metrics: Metrics,
        settings: BypassSettings,
        *,
        peers: PeerReports | None = None,
        is_ready: Callable[[], bool] = lambda: True,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self.unjudged = 0
        self._request_log = request_log
        self._metrics = metrics
        self._settings = settings
        self._peers = peers or Alone()
        self._has_peers = peers is not None
        self._is_ready = is_ready
        self._grace_seconds = grace_seconds
        self._ready_at: float | None = None
        self._waiting: dict[str, float] = {}
        self._bound: deque[_Bound] = deque()
        self._groups: OrderedDict[_Likeness, BoundPods] = OrderedDict()
        self._schedulers: set[str] = set()
        self._asking: set[str] = set()
        self._expect(settings)
        self._untold = 0
        self._example: tuple[PodRecord, BypassVerdict] | None = None
        self._told_at = float("-inf")

    def adopt(self, settings: Settings) -> None:
        """Apply new settings."""
        self._settings = settings.unasked
        self._expect(settings.unasked)

    def see(self, record: PodRecord) -> None:
        """Take a GPU pod that was added or changed."""
        if not self._settings.enabled or not self._is_ours(record):
            return
        now = self._request_log.monotonic()
        if not (record.node or record.phase.is_terminal):
            self._waiting.setdefault(record.uid, self._askable_since(record, now))
            return
        since = self._waiting.pop(record.uid, None)
        if since is None or not record.node:
            return
        is_early = self._ready_at is None or now - self._ready_at < START_SECONDS
        bound = _Bound(record=record, since=since, bound_at=now, is_early=is_early)
        if not self._settle(bound, now):
            self._bound.append(bound)
        if len(self._bound) > MAX_BOUND:
            self._leave_unjudged(self._bound.popleft())

    def relist(self, records: Iterable[PodRecord]) -> None:
        """Take a complete list of GPU pods; those that we did not see waiting are left alone."""
        listed = {record.uid: record for record in records}
        for uid in tuple(self._waiting):
            if uid in listed:
                self.see(listed[uid])
            else:
                self.remove(uid)

    def remove(self, uid: str) -> None:
        """Forget a pod that was deleted; one that was bound is judged all the same."""
        if self._waiting.pop(uid, None) is not None:
            self._request_log.forget(uid)

    async def run(self) -> None:
        """Judge until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """Judge the pods whose time has come; write the log line where it is due."""
        now = self._request_log.monotonic()
        if self._ready_at is None and self._is_ready():
            self._ready_at = now
        while self._bound and self._settle(self._bound[0], now):
            self._bound.popleft()
        self._request_log.expire()
        while self._groups and now - next(iter(self._groups.values())).last_at > SILENCE_SECONDS:
            self._groups.popitem(last=False)
        if self._untold and now - self._told_at >= LOG_SECONDS:
            self._tell(now)

    def report(self) -> BypassReport:
        """Return what was noticed in the last minutes."""
        return BypassReport(
            at=self._request_log.monotonic(),
            unjudged=self.unjudged,
            evidence=self._evidence(),
            asked_by=tuple(self._settings.schedulers or sorted(self._asking)),
        )

    def _is_ours(self, record: PodRecord) -> bool:
        """Whether we should be asked about a pod; claims for devices are nobody's to ask about."""
        schedulers = self._settings.schedulers
        is_served = not schedulers or record.scheduler_name in schedulers
        return bool(record.resources) and is_served

    def _askable_since(self, record: PodRecord, now: float) -> float:
        """Return when a pod that is first seen waiting may first have been asked about.

        Our watch may be later than kube-scheduler's by more than a little: then its age shows that.
        """
        age_seconds = self._request_log.clock() - (record.created_at or math.inf)
        return now - max(WATCH_SECONDS, age_seconds)

    def _settle(self, bound: _Bound, now: float) -> bool:
        """Judge a pod, or leave it unjudged; return false where it is too soon for either."""
        waited_seconds = now - bound.bound_at
        verdict = self._request_log.verdict(bound.record.uid)
        if verdict is BypassVerdict.ASKED:
            self._judge(bound, verdict)
            return True
        if waited_seconds < self._grace_seconds:
            return False
        is_forgotten = bound.since <= self._request_log.forgotten_until
        if bound.since < self._peers.since or (is_forgotten and not self._is_known(bound)):
            self._leave_unjudged(bound)
        elif bound.bound_at < self._peers.until:
            self._judge(bound, verdict)
        elif waited_seconds >= MAX_WAIT_SECONDS:
            self._leave_unjudged(bound)
        else:
            return False
        return True

    def _is_known(self, bound: _Bound) -> bool:
        """Whether any answer about a pod is remembered."""
        return bound.record.uid in self._request_log

    def _judge(self, bound: _Bound, verdict: BypassVerdict) -> None:
        record = bound.record
        were_refused = verdict is BypassVerdict.NOT_ASKED and self._is_known(bound)
        self._request_log.forget(record.uid)
        self._group(bound, verdict, were_refused=were_refused)
        self._count(record.scheduler_name, verdict)
        if verdict is not BypassVerdict.NOT_ASKED and len(self._asking) < MAX_SCHEDULERS:
            self._asking.add(record.scheduler_name)
        if verdict is not BypassVerdict.ASKED:
            self._untold += 1
            self._example = record, verdict

    def _group(self, bound: _Bound, verdict: BypassVerdict, *, were_refused: bool) -> None:
        """Add a pod to those that are like it."""
        record, resources = bound.record, tuple(bound.record.resources)
        likeness = (record.scheduler_name, resources, verdict, bound.is_early, were_refused)
        group = self._groups.pop(likeness, None) or BoundPods(
            scheduler=record.scheduler_name,
            resources=resources,
            verdict=verdict,
            is_early=bound.is_early,
            were_refused=were_refused,
            count=0,
            first_at=bound.bound_at,
        )
        self._groups[likeness] = replace(
            group, count=group.count + 1, example=record.key, last_at=bound.bound_at
        )
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    def _leave_unjudged(self, bound: _Bound) -> None:
        self.unjudged += 1
        self._metrics.unjudged.inc()
        self._request_log.forget(bound.record.uid)

    def _expect(self, settings: BypassSettings) -> None:
        """Have the series of the schedulers that are known beforehand."""
        if not settings.enabled:
            return
        for scheduler in settings.schedulers or (DEFAULT_SCHEDULER,):
            self._schedulers.add(scheduler)  # a settings file may name more than invented ones
            self._count(scheduler, BypassVerdict.ASKED)

    def _count(self, scheduler: str, verdict: BypassVerdict) -> None:
        """Count a pod; the other series of its scheduler are there then, too."""
        label = self._label(scheduler)
        for reason in (each for each in BypassVerdict if each is not BypassVerdict.ASKED):
            # A series that starts at 0 lets its first pod be seen.
            self._metrics.unasked.labels(label, reason).inc(reason is verdict)

    def _label(self, scheduler: str) -> str:
        """Return a scheduler's name as a label; anybody can invent names, so they are bounded."""
        if scheduler not in self._schedulers and len(self._schedulers) >= MAX_SCHEDULERS:
            return OTHER
        self._schedulers.add(scheduler)
        return scheduler

    def _evidence(self) -> BypassEvidence:
        lost, slow, unreadable, slowest_seconds = self._request_log.incidents
        last_at = self._request_log.last_at
        return BypassEvidence(
            pods=tuple(self._groups.values()),
            silence_seconds=None if last_at is None else self._request_log.monotonic() - last_at,
            lost_answers=lost,
            slow_answers=slow,
            slowest_seconds=slowest_seconds,
            unreadable=unreadable,
            wrong_paths=tuple(self._request_log.wrong_paths),
            has_peers=self._has_peers,
        )

    def _tell(self, now: float) -> None:
        """Write the one line about the pods since the last one."""
        if self._example is None:
            return
        record, verdict = self._example
        logger.warning(
            "pods bound without our answer",
            extra={
                "pods": self._untold,
                "example": record.key,
                "why": verdict.value,
                "scheduler": record.scheduler_name,
                "resources": list(record.resources),
                "likely_causes": [
                    f"{cause.field}: {cause.text}" for cause in likely_causes(self._evidence())
                ],
            },
        )
        self._untold, self._told_at = 0, now
