"""Find the replica that gave the last answer about a bound pod, although reports arrive late."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from extender.core.steps import Steps
from extender.placement.bypassed_pods import MAX_BOUND, MAX_WAIT_SECONDS, SWEEP_SECONDS
from extender.placement.history import Choice, DecisionHistory, DecisionRecord
from extender.placement.request_log import PeerReports, RequestLog, comes_later
from extender.runtime.cooperative import YieldControl, run_in_steps, yield_to_loop
from extender.runtime.metrics import Metrics

_PIECE_PODS: Final = 128
"""Pods per cooperative step, about a millisecond."""

_FIRST: Final = "first"
_OTHER: Final = "other"
"""Metric labels: whether kube-scheduler took our first choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A bound pod that may be ours, with the times of answer and binding, monotonic seconds."""

    choice: Choice
    node: str
    answered_at: float
    bound_at: float


class BindingAttribution:
    """Counts and reports the bound pods for which this replica gave the last answer.

    A single replica does this at the binding. With several, it waits until all others have reported
    the requests that they received up to the binding. If one of them can no longer do so, the pod
    is left out, because it may belong to that replica. Runs on the event loop's thread only.

    Args:
        request_log: log of the requests to all replicas.
        history: decisions of this replica.
        metrics: counts whether kube-scheduler took the first choice.
        peers: state of the reports from other replicas; None without others.
        on_own: called with the decision about each bound pod of this replica, if it is still
            recorded.
        yield_control: yields to requests between steps.
    """

    def __init__(
        self,
        request_log: RequestLog,
        history: DecisionHistory,
        metrics: Metrics,
        *,
        peers: PeerReports | None = None,
        on_own: Iterable[Callable[[DecisionRecord], None]] = (),
        yield_control: YieldControl = yield_to_loop,
    ) -> None:
        self._request_log = request_log
        self._history = history
        self._metrics = metrics
        self._peers = peers
        self._on_own = tuple(on_own)
        self._yield_control = yield_control
        self._waiting: OrderedDict[str, _Bound] = OrderedDict()
        for choice in (_FIRST, _OTHER):
            metrics.followed.labels(choice)
        request_log.answered_elsewhere.subscribe(self._note_elsewhere)

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, uid: str, choice: Choice, node: str) -> None:
        """Note a bound pod, with the last choice for it."""
        if self._request_log.is_elsewhere(uid):
            return
        now = self._request_log.monotonic()
        answered_at = self._request_log.answered_at(uid)
        if self._peers is None:
            self._count(choice, node)
        elif answered_at is not None:
            self._waiting[uid] = _Bound(
                choice=choice, node=node, answered_at=answered_at, bound_at=now
            )
            if len(self._waiting) > MAX_BOUND:
                self._waiting.popitem(last=False)

    async def run(self) -> None:
        """Count bound pods until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await run_in_steps(self._sweep_in_steps(), self._yield_control)

    def _sweep_in_steps(self) -> Steps[None]:
        """Count the pods that are known to belong to this replica by now."""
        if self._peers is None:
            return
        now = self._request_log.monotonic()
        waiting = iter(tuple(self._waiting.items()))
        while some := list(islice(waiting, _PIECE_PODS)):
            for uid, bound in some:
                if self._waiting.get(uid) is not bound:
                    continue  # belongs to another replica by now
                is_known = bound.answered_at >= self._peers.since
                is_over = now - bound.bound_at >= MAX_WAIT_SECONDS
                if is_known and not is_over and bound.bound_at >= self._peers.until:
                    return  # pods bound later are not known either
                del self._waiting[uid]
                if is_known and bound.bound_at < self._peers.until:
                    self._count(bound.choice, bound.node)
            yield

    def _note_elsewhere(self, uid: str, verb: str, at: float) -> None:
        """Drop a pod if another replica answered a later request about it."""
        bound = self._waiting.get(uid)
        if bound and comes_later(verb, at, than=bound.choice.verb, at=bound.choice.at):
            del self._waiting[uid]

    def _count(self, choice: Choice, node: str) -> None:
        """Count a pod of this replica, and report its decision."""
        label = _FIRST if choice.best == node else _OTHER
        self._metrics.followed.labels(label).inc()
        record = self._history.get(choice.number)
        if record is not None:
            for notify in self._on_own:
                notify(record)
