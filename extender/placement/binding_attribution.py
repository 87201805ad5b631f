"""Whose a bound pod is to count and to tell of, where replicas tell late what they were asked."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from extender.core.steps import Steps, finish
from extender.placement.bypassed_pods import (
    MAX_BOUND,
    MAX_WAIT_SECONDS,
    SWEEP_SECONDS,
    PeerReports,
)
from extender.placement.history import Choice, DecisionHistory, DecisionRecord
from extender.placement.request_log import RequestLog, comes_later
from extender.runtime.cooperative import YieldControl, run_in_steps, yield_to_loop
from extender.runtime.metrics import Metrics

PIECE_PODS: Final = 128
"""So many are looked at before others may have their turn: a millisecond."""

FIRST: Final = "first"
OTHER: Final = "other"
"""Whether kube-scheduler took our first choice, as labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A bound pod that may be ours, with when it was answered about and bound (monotonic s)."""

    choice: Choice
    node: str
    answered_at: float
    bound_at: float


class BindingAttribution:
    """Counts, and tells of, the bound pods that no other replica answered about after us.

    With one replica that is at the binding. With several it is once all others have said, after the
    binding, what they were asked until then. Where one cannot say that any more the pod is left
    out: it may be the other's. Everything runs on the event loop's thread.

    Args:
        asked: what the replicas were asked.
        history: the decisions that we made.
        metrics: where it is counted whether our first choice was taken.
        hearing: how well the other replicas are heard; None for no others.
        on_own: are told of each decision that a pod of ours was bound after, as long as it is
            remembered.
    """

    def __init__(
        self,
        asked: RequestLog,
        history: DecisionHistory,
        metrics: Metrics,
        *,
        hearing: PeerReports | None = None,
        on_own: Iterable[Callable[[DecisionRecord], None]] = (),
    ) -> None:
        self._asked = asked
        self._history = history
        self._metrics = metrics
        self._hearing = hearing
        self._on_own = tuple(on_own)
        self._waiting: OrderedDict[str, _Bound] = OrderedDict()
        for choice in (FIRST, OTHER):
            metrics.followed.labels(choice)
        asked.on_elsewhere.append(self._note_elsewhere)

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, uid: str, choice: Choice, node: str) -> None:
        """Note that a pod is bound, and what we chose for it last."""
        if self._asked.is_elsewhere(uid):
            return
        now = self._asked.monotonic()
        answered_at = self._asked.answered_at(uid)
        if self._hearing is None:
            self._count(choice, node)
        elif answered_at is not None:
            self._waiting[uid] = _Bound(
                choice=choice, node=node, answered_at=answered_at, bound_at=now
            )
            if len(self._waiting) > MAX_BOUND:
                self._waiting.popitem(last=False)

    async def run(self, yield_control: YieldControl = yield_to_loop) -> None:
        """Count until cancelled; `yield_control` lets questions go first."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await run_in_steps(self.sweep_in_steps(), yield_control)

    def sweep(self) -> None:
        """Count the pods that are known to be ours by now."""
        finish(self.sweep_in_steps())

    def sweep_in_steps(self) -> Steps[None]:
        """Count them likewise, some in each step."""
        if self._hearing is None:
            return
        now = self._asked.monotonic()
        waiting = iter(tuple(self._waiting.items()))
        while some := list(islice(waiting, PIECE_PODS)):
            for uid, bound in some:
                if self._waiting.get(uid) is not bound:
                    continue  # another replica's by now
                is_known = bound.answered_at >= self._hearing.since
                is_over = now - bound.bound_at >= MAX_WAIT_SECONDS
                if is_known and not is_over and bound.bound_at >= self._hearing.until:
                    return  # nor are those known that were bound later
                del self._waiting[uid]
                if is_known and bound.bound_at < self._hearing.until:
                    self._count(bound.choice, bound.node)
            yield

    def _note_elsewhere(self, uid: str, verb: str, at: float) -> None:
        """Leave a pod to another replica, if that answered about it after us."""
        bound = self._waiting.get(uid)
        if bound and comes_later(verb, at, than=bound.choice.verb, at=bound.choice.at):
            del self._waiting[uid]

    def _count(self, choice: Choice, node: str) -> None:
        """Count a pod of ours, and tell of it."""
        label = FIRST if choice.best == node else OTHER
        self._metrics.followed.labels(label).inc()
        record = self._history.get(choice.number)
        if record is not None:
            for tell in self._on_own:
                tell(record)
