"""What pools are worth to the requests of the last minutes: kept, and brought up to date."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from extender.core.decision.cached_evaluation import (
    CachedEvaluation,
    evaluate_cached,
    evaluate_in_steps,
    evaluate_together,
)
from extender.core.decision.evaluation import Evaluation, EvaluationRequest, Overlay, asks
from extender.core.nodes.snapshot import Pool, Snapshot
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet

CACHED_EVALUATIONS = 32
"""Distinct requests whose evaluation of a whole pool is kept for one snapshot."""

PREPARED = 8
"""So many of them are kept up to date before anybody asks again ..."""

PREPARED_SECONDS = 300.0
"""... of those that somebody asked for so lately: where few pods come, each finds all prepared."""

EXPECTED = 8
"""So many distinct requests that nobody has asked for yet are evaluated before somebody does ..."""

EXPECTED_SECONDS = 10.0
"""... and keep their places for so long: kube-scheduler asks in a moment, or another one may."""

_Key = tuple[str, GpuRequest]


@dataclass(slots=True)
class _Kept:
    """What pools were worth to one request.

    Attributes:
        asked_at: when somebody last asked for it, or was expected to, seconds since the epoch.
        latest: the last ones. Two, for a pod never counts against itself: what prioritize asks is
            what was before filter's answer, and what the next pod asks is what came after it.
        coming: one for a snapshot that is being made.
    """

    asked_at: float = 0.0
    latest: tuple[CachedEvaluation, ...] = ()
    coming: CachedEvaluation | None = None

    @property
    def known(self) -> tuple[CachedEvaluation, ...]:
        """All that is kept."""
        return self.latest if self.coming is None else (*self.latest, self.coming)

    def holds(self, snapshot: Snapshot, pool: Pool, policy: Policy) -> bool:
        """Tell whether any of it still says what the nodes are worth that have not changed."""
        return any(standing.holds(snapshot, pool, policy) for standing in self.known)

    def keep(self, standing: CachedEvaluation) -> None:
        """Keep what the pool is worth now."""
        if self.coming is not None and standing.base == self.coming.base:
            self.coming = None
        others = (other for other in self.latest if other is not standing)
        self.latest = (standing, *islice(others, 1))


class EvaluationCache:
    """Evaluates pools, and remembers that.

    Args:
        fleet: the fleet.
        clock: seconds since the epoch.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._expected: OrderedDict[_Key, _Kept] = OrderedDict()

    def evaluate(self, snapshot: Snapshot, pool: Pool, question: EvaluationRequest) -> Evaluation:
        """Evaluate a pool, once for each distinct request; afterwards only what has changed."""
        key = _key(pool.resource, question.request)
        kept = self._kept.pop(key, None) or self._expected.pop(key, None) or _Kept()
        kept.asked_at = self._clock()
        self._kept[key] = kept
        if len(self._kept) > CACHED_EVALUATIONS:
            self._kept.popitem(last=False)
        standing = evaluate_cached(snapshot, pool, question, kept.known)
        kept.keep(standing)
        return standing.evaluation

    def expect_in_steps(self, request: GpuRequest) -> Steps[None]:
        """Evaluate what somebody will ask for, unless that is kept or too many wait already."""
        for resource, _ in asks(request):
            key = _key(resource, request)
            snapshot = self._fleet.snapshot()
            pool = snapshot.pools.get(resource)
            if pool is None or key in self._kept or key in self._expected or not self._has_room():
                continue
            kept = self._expected[key] = _Kept(asked_at=self._clock())
            kept.keep((yield from self._afresh(snapshot, pool, key[1])))

    def _has_room(self) -> bool:
        """Tell whether another request may be evaluated that nobody has asked for."""
        since = self._clock() - EXPECTED_SECONDS
        while self._expected and next(iter(self._expected.values())).asked_at <= since:
            self._expected.popitem(last=False)
        return len(self._expected) < EXPECTED

    def warm_in_steps(self) -> Steps[None]:
        """Bring what is kept for the requests of the last minutes up to date, pool by pool."""
        pools: dict[str, list[tuple[GpuRequest, _Kept]]] = {}
        for (resource, request), kept in self._recent():
            pools.setdefault(resource, []).append((request, kept))
        for resource, recent in pools.items():
            self._bring_up_to_date(resource, recent)
            yield
            for request, kept in recent:
                snapshot = self._fleet.snapshot()
                pool = snapshot.pools.get(resource)
                if pool is not None and not kept.holds(snapshot, pool, self._fleet.policy):
                    kept.keep((yield from self._afresh(snapshot, pool, request)))

    def prepare_in_steps(self, coming: Snapshot) -> Steps[None]:
        """Evaluate the requests of the last minutes for a snapshot to come."""
        for (resource, request), kept in self._recent():
            pool = coming.pools.get(resource)
            if pool is not None:
                kept.coming = yield from self._afresh(coming, pool, request)

    def _recent(self) -> list[tuple[_Key, _Kept]]:
        """Return the requests of the last minutes, the latest first."""
        since = self._clock() - PREPARED_SECONDS
        recent = takewhile(lambda item: item[1].asked_at > since, reversed(self._kept.items()))
        return list(islice(recent, PREPARED))

    def _bring_up_to_date(self, resource: str, recent: list[tuple[GpuRequest, _Kept]]) -> None:
        """Evaluate what has changed since, for all requests of which something is kept."""
        snapshot, overlays = self._fleet.snapshot(), self._fleet.ledger.overlays(without="")
        pool = snapshot.pools.get(resource)
        if pool is None:
            return
        held = [
            (self._question(resource, request, overlays), kept)
            for request, kept in recent
            if kept.holds(snapshot, pool, self._fleet.policy)
        ]
        questions, known = [one for one, _ in held], [kept.known for _, kept in held]
        standings = evaluate_together(snapshot, pool, questions, known)
        for (_, kept), standing in zip(held, standings, strict=True):
            kept.keep(standing)

    def _afresh(
        self, snapshot: Snapshot, pool: Pool, request: GpuRequest
    ) -> Steps[CachedEvaluation]:
        """Evaluate a whole pool: that takes as long as all changes for the others."""
        overlays = self._fleet.ledger.overlays(without="")
        question = self._question(pool.resource, request, overlays)
        return (yield from evaluate_in_steps(snapshot, pool, question))

    def _question(
        self, resource: str, request: GpuRequest, overlays: Mapping[str, Overlay]
    ) -> EvaluationRequest:
        return EvaluationRequest(
            request=request,
            ask=dict(asks(request))[resource],
            policy=self._fleet.policy,
            overlay=overlays.get(resource, {}),
        )


def _key(resource: str, request: GpuRequest) -> _Key:
    """Return by what it is kept what a pool is worth to a request."""
    # Where a pod is nominated concerns a single row, which is corrected afterwards.
    return resource, replace(request, nominated_node="") if request.nominated_node else request
