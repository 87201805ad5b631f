"""Cache each request's evaluation of all nodes, and update or precompute it between calls."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Final

from extender.core.decision.dirty_rows import CacheEntry, evaluate_in_steps, evaluate_together
from extender.core.decision.evaluation import Evaluation, EvaluationInputs, Overlay, device_requests
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Pool, Snapshot
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest, WaitingRequests
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.runtime.cooperative import YieldControl, run_in_steps
from extender.runtime.gc_control import GcControl
from extender.server.readiness import Readiness

_MAX_REQUESTS = 32
"""Maximum number of cached requests, least recently used evicted first."""

_MAX_UPDATED = 8
"""Number of cached requests that are updated in advance."""

_UPDATED_SECONDS = 300.0
"""Time since its last use within which a cached request is updated in advance."""

_MAX_EXPECTED = 8
"""Maximum number of requests of new pods that are evaluated before kube-scheduler calls."""

_EXPECTED_SECONDS = 10.0
"""Time within which kube-scheduler is expected to call filter for a new pod."""

_MANY_NODES: Final = 2000
"""Number of nodes from which kube-scheduler's own filters take longer than an evaluation of dirty
rows, a millisecond. With fewer nodes its request would have to wait for the evaluation."""

_Key = tuple[str, GpuRequest]
"""Resource and request, without nominated node and targets: decisions apply these afterwards."""


@dataclass(slots=True)
class _CachedRequest:
    """Cached evaluations for one request.

    Attributes:
        at: time of the last use, or of the new pod, seconds since the epoch.
        is_expected: whether kube-scheduler has not sent the request yet.
        entries: the last two entries. A pod never counts against itself, so prioritize needs the
            state before filter's answer, and the next pod needs the state after it.
        prepared: entry for a snapshot that is being built, else None.
    """

    at: float
    is_expected: bool = False
    entries: tuple[CacheEntry, ...] = ()
    prepared: CacheEntry | None = None

    @property
    def all_entries(self) -> tuple[CacheEntry, ...]:
        """The entries and the prepared one."""
        return self.entries if self.prepared is None else (*self.entries, self.prepared)

    def is_usable(self, snapshot: Snapshot, pool: Pool, policy: Policy) -> bool:
        """Return whether any entry can be updated."""
        return any(entry.is_usable(snapshot, pool, policy) for entry in self.all_entries)

    def add(self, entry: CacheEntry) -> None:
        """Store the current entry."""
        if self.prepared is not None and entry.version == self.prepared.version:
            self.prepared = None
        others = (other for other in self.entries if other is not entry)
        self.entries = (entry, *islice(others, 1))


class EvaluationCache:
    """Evaluates pools, and caches the results by request.

    Every result equals an evaluation from scratch: `core.decision.dirty_rows` says why.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._requests: OrderedDict[_Key, _CachedRequest] = OrderedDict()

    def evaluate(self, snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs) -> Evaluation:
        """Return the evaluation of a pool for a request; evaluate dirty rows only."""
        cached = self._use(_key(pool.resource, inputs.request), is_expected=False)
        (entry,) = evaluate_together(snapshot, pool, [inputs], [cached.all_entries])
        cached.add(entry)
        return entry.evaluation

    def expect_in_steps(self, request: GpuRequest) -> Steps[None]:
        """Evaluate a new pod's request, unless too many others are expected.

        Of a cached request only the dirty rows are evaluated, and only in a large cluster.
        """
        for resource, _ in device_requests(request):
            key = _key(resource, request)
            snapshot = self._fleet.snapshot()
            pool = snapshot.pools.get(resource)
            if pool is None:
                continue
            if key in self._requests:
                if len(pool.nodes) >= _MANY_NODES:
                    self._update(resource, [(key[1], self._requests[key])])
                continue
            if not self._has_room():
                continue
            cached = self._use(key, is_expected=True)
            cached.add((yield from self._evaluate(snapshot, pool, key[1])))

    def update_in_steps(self) -> Steps[None]:
        """Update the entries of the last minutes' requests, pool by pool."""
        pools: dict[str, list[tuple[GpuRequest, _CachedRequest]]] = {}
        for (resource, request), cached in self._recent():
            pools.setdefault(resource, []).append((request, cached))
        for resource, recent in pools.items():
            self._update(resource, recent)
            yield
            for request, cached in recent:
                snapshot = self._fleet.snapshot()
                pool = snapshot.pools.get(resource)
                if pool is not None and not cached.is_usable(snapshot, pool, self._fleet.policy):
                    cached.add((yield from self._evaluate(snapshot, pool, request)))

    def prepare_in_steps(self, coming: Snapshot) -> Steps[None]:
        """Evaluate the last minutes' requests for a snapshot that is being built."""
        for (resource, request), cached in self._recent():
            pool = coming.pools.get(resource)
            if pool is not None:
                cached.prepared = yield from self._evaluate(coming, pool, request)

    def _use(self, key: _Key, *, is_expected: bool) -> _CachedRequest:
        """Return the cached request, and make it the most recently used."""
        now = self._clock()
        cached = self._requests.pop(key, None) or _CachedRequest(now)
        cached.at, cached.is_expected = now, is_expected
        self._requests[key] = cached
        if len(self._requests) > _MAX_REQUESTS:
            self._requests.popitem(last=False)
        return cached

    def _has_room(self) -> bool:
        """Return whether one more request may be evaluated in advance."""
        since = self._clock() - _EXPECTED_SECONDS
        expected = (cached for cached in self._requests.values() if cached.is_expected)
        return sum(cached.at > since for cached in expected) < _MAX_EXPECTED

    def _recent(self) -> list[tuple[_Key, _CachedRequest]]:
        """Return the requests that were used in the last minutes, latest first."""
        since = self._clock() - _UPDATED_SECONDS
        recent = takewhile(lambda item: item[1].at > since, reversed(self._requests.items()))
        return list(islice((item for item in recent if not item[1].is_expected), _MAX_UPDATED))

    def _update(self, resource: str, recent: list[tuple[GpuRequest, _CachedRequest]]) -> None:
        """Evaluate the dirty rows of a pool for several cached requests at once."""
        snapshot, overlays = self._fleet.snapshot(), self._fleet.ledger.overlays(without="")
        pool = snapshot.pools.get(resource)
        if pool is None:
            return
        usable = [
            (self._inputs(resource, request, overlays), cached)
            for request, cached in recent
            if cached.is_usable(snapshot, pool, self._fleet.policy)
        ]
        all_inputs = [inputs for inputs, _ in usable]
        earlier = [cached.all_entries for _, cached in usable]
        entries = evaluate_together(snapshot, pool, all_inputs, earlier)
        for (_, cached), entry in zip(usable, entries, strict=True):
            cached.add(entry)

    def _evaluate(self, snapshot: Snapshot, pool: Pool, request: GpuRequest) -> Steps[CacheEntry]:
        overlays = self._fleet.ledger.overlays(without="")
        inputs = self._inputs(pool.resource, request, overlays)
        return (yield from evaluate_in_steps(snapshot, pool, inputs))

    def _inputs(
        self, resource: str, request: GpuRequest, overlays: Mapping[str, Overlay]
    ) -> EvaluationInputs:
        return EvaluationInputs(
            request=request,
            devices=dict(device_requests(request))[resource],
            policy=self._fleet.policy,
            overlay=overlays.get(resource, {}),
        )


def _key(resource: str, request: GpuRequest) -> _Key:
    if request.nominated_node or request.targets:
        request = replace(request, nominated_node="", targets=())
    return resource, request


_LOOK_SECONDS: Final = 0.05
"""Time between checks for bulk changes, which set no event."""

_GATHER_SECONDS: Final = 0.003
"""Time to collect changes, so that one pass handles all of them."""


class WarmUp:
    """Recomputes allocations, estimates and evaluations after every change of the fleet.

    Args:
        fleet: the fleet; its changes start the work.
        evaluation_cache: cached evaluations for the requests of the last minutes.
        is_synced: returns whether all nodes and pods are known.
        refresh: estimates devices again if it is time, after calling its argument with the coming
            snapshot.
        requests: parses the requests of pods.
        readiness: is notified when the first allocation is complete.
        gc_control: collects garbage at that moment, because no request is open yet.
        yield_control: yields to requests between steps.
    """

    def __init__(
        self,
        fleet: Fleet,
        evaluation_cache: EvaluationCache,
        *,
        is_synced: Callable[[], bool],
        refresh: Callable[[Callable[[Snapshot], Steps[None]]], Awaitable[None]],
        requests: WaitingRequests,
        readiness: Readiness,
        gc_control: GcControl,
        yield_control: YieldControl,
    ) -> None:
        self._fleet = fleet
        self._evaluation_cache = evaluation_cache
        self._is_synced = is_synced
        self._refresh = refresh
        self._requests = requests
        self._readiness = readiness
        self._gc_control = gc_control
        self._yield_control = yield_control
        self._to_allocate, self._to_evaluate = asyncio.Event(), asyncio.Event()
        self._new_pods: asyncio.Queue[PodRecord] = asyncio.Queue(_MAX_EXPECTED)
        fleet.changed.subscribe(self._note_change)
        fleet.pod_waiting.subscribe(self._note_new_pod)

    def _note_change(self) -> None:
        self._to_allocate.set()
        self._to_evaluate.set()

    def _note_new_pod(self, record: PodRecord) -> None:
        # Most of thousands of new pods have equal requests; the others can be evaluated later.
        if self._readiness.is_allocated and not self._new_pods.full():
            self._new_pods.put_nowait(record)

    async def allocate(self) -> None:
        """Recompute allocations of changed nodes and estimates of devices until cancelled."""
        while True:
            self._to_allocate.clear()
            await run_in_steps(self._fleet.settle_in_steps(), self._yield_control)
            if self._is_synced() and not self._readiness.is_allocated:
                self._fleet.snapshot_of_all()
                self._gc_control.tidy()  # takes long, and no request is open yet
                self._readiness.mark_allocated()
            if self._readiness.is_allocated:
                await self._refresh(self._evaluation_cache.prepare_in_steps)
            await _change(self._to_allocate)
            await asyncio.sleep(_GATHER_SECONDS)

    async def evaluate(self) -> None:
        """Evaluate changed nodes until cancelled.

        This task is separate from `allocate`, which waits while readings change hundreds of nodes
        in small batches: a request would have to evaluate all of them. It runs at once, because a
        kube-scheduler with many cores sends the next pod two milliseconds after it has bound one.
        """
        while True:
            self._to_evaluate.clear()
            if self._readiness.is_allocated:
                await run_in_steps(self._evaluation_cache.update_in_steps(), self._yield_control)
            await asyncio.sleep(_GATHER_SECONDS)
            await _change(self._to_evaluate)

    async def evaluate_new_pods(self) -> None:
        """Evaluate the requests of new pods until cancelled.

        kube-scheduler sees a new pod when the extender does, and sends it here right after its own
        filters, so this task does not wait for the others.
        """
        while True:
            record = await self._new_pods.get()
            request = self._requests.read(record, self._fleet.policy).request
            if request is not None:
                request = self._fleet.informed(request, record.kin)
                await run_in_steps(
                    self._evaluation_cache.expect_in_steps(request), self._yield_control
                )


async def _change(change: asyncio.Event) -> None:
    """Wait for the event, for at most `_LOOK_SECONDS`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LOOK_SECONDS):
            await change.wait()
