"""Cache evaluations of pools for the requests of the last minutes, and refresh changed rows."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from extender.core.decision.cached_evaluation import (
    CachedEvaluation,
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
"""Maximum number of cached requests."""

PREPARED = 8
"""Number of cached requests that are refreshed in advance ..."""

PREPARED_SECONDS = 300.0
"""... if kube-scheduler used them within this time."""

EXPECTED = 8
"""Maximum number of evaluations for new pods, before kube-scheduler asks about them ..."""

EXPECTED_SECONDS = 10.0
"""... which are kept for this long."""

_Key = tuple[str, GpuRequest]


@dataclass(slots=True)
class _Kept:
    """Cached evaluations for one request.

    Attributes:
        asked_at: time of the last or expected use, seconds since the epoch.
        latest: the last two evaluations. A pod never counts against itself, so prioritize needs the
            state before filter's answer, and the next pod needs the state after it.
        coming: evaluation for a snapshot that is being built; None without one.
    """

    asked_at: float = 0.0
    latest: tuple[CachedEvaluation, ...] = ()
    coming: CachedEvaluation | None = None

    @property
    def known(self) -> tuple[CachedEvaluation, ...]:
        """All cached evaluations."""
        return self.latest if self.coming is None else (*self.latest, self.coming)

    def holds(self, snapshot: Snapshot, pool: Pool, policy: Policy) -> bool:
        """Return whether a cached evaluation is still valid for all unchanged rows."""
        return any(standing.holds(snapshot, pool, policy) for standing in self.known)

    def keep(self, standing: CachedEvaluation) -> None:
        """Add the current evaluation."""
        if self.coming is not None and standing.base == self.coming.base:
            self.coming = None
        others = (other for other in self.latest if other is not standing)
        self.latest = (standing, *islice(others, 1))


class EvaluationCache:
    """Evaluates pools, and caches the results by request.

    Invariant: a cached evaluation, with the rows that changed since evaluated again, equals an
    evaluation from scratch.

    Args:
        fleet: state of the fleet.
        clock: seconds since the epoch.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._expected: OrderedDict[_Key, _Kept] = OrderedDict()

    def evaluate(self, snapshot: Snapshot, pool: Pool, question: EvaluationRequest) -> Evaluation:
        """Return the evaluation of a pool for a request; evaluate changed rows only."""
        key = _key(pool.resource, question.request)
        kept = self._kept.pop(key, None) or self._expected.pop(key, None) or _Kept()
        kept.asked_at = self._clock()
        self._kept[key] = kept
        if len(self._kept) > CACHED_EVALUATIONS:
            self._kept.popitem(last=False)
        (standing,) = evaluate_together(snapshot, pool, [question], [kept.known])
        kept.keep(standing)
        return standing.evaluation

    def expect_in_steps(self, request: GpuRequest) -> Steps[None]:
        """Evaluate a request in advance, unless it is cached or too many are waiting."""
        for resource, _ in asks(request):
            key = _key(resource, request)
            snapshot = self._fleet.snapshot()
            pool = snapshot.pools.get(resource)
            if pool is None or key in self._kept or key in self._expected or not self._has_room():
                continue
            kept = self._expected[key] = _Kept(asked_at=self._clock())
            kept.keep((yield from self._afresh(snapshot, pool, key[1])))

    def _has_room(self) -> bool:
        """Return whether one more request may be evaluated in advance."""
        since = self._clock() - EXPECTED_SECONDS
        while self._expected and next(iter(self._expected.values())).asked_at <= since:
            self._expected.popitem(last=False)
        return len(self._expected) < EXPECTED

    def warm_in_steps(self) -> Steps[None]:
        """Refresh the evaluations of the last minutes' requests, pool by pool."""
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
        """Evaluate the last minutes' requests for a snapshot that is being built."""
        for (resource, request), kept in self._recent():
            pool = coming.pools.get(resource)
            if pool is not None:
                kept.coming = yield from self._afresh(coming, pool, request)

    def _recent(self) -> list[tuple[_Key, _Kept]]:
        """Return the requests of the last minutes, latest first."""
        since = self._clock() - PREPARED_SECONDS
        recent = takewhile(lambda item: item[1].asked_at > since, reversed(self._kept.items()))
        return list(islice(recent, PREPARED))

    def _bring_up_to_date(self, resource: str, recent: list[tuple[GpuRequest, _Kept]]) -> None:
        """Evaluate the changed rows of a pool, for all its cached requests together."""
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
        """Evaluate a whole pool."""
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
    """Return the cache key of a pool and a request."""
    # The nominated node concerns a single row, which is corrected afterwards.
    return resource, replace(request, nominated_node="") if request.nominated_node else request
