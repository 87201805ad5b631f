"""Precompute allocations, estimates and evaluations in small steps, before requests need them."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, Protocol

from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Snapshot
from extender.core.request.request import WaitingRequests
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.placement.evaluation_cache import MAX_EXPECTED, EvaluationCache
from extender.runtime.cooperative import YieldControl, run_in_steps
from extender.runtime.gc_control import GcControl
from extender.server.readiness import Readiness

_LOOK_SECONDS: Final = 0.05
"""Time between checks for bulk changes, which set no event."""

_GATHER_SECONDS: Final = 0.003
"""Time to collect changes, so that one pass handles all of them."""


class _RefreshedSources(Protocol):
    """The part of the source manager that the warm-up needs."""

    @property
    def cluster(self) -> "_SyncedInventory":
        """Source of nodes and pods."""

    async def refresh(self, prepare: Callable[[Snapshot], Steps[None]]) -> None:
        """Estimate all devices again, if it is time."""


class _SyncedInventory(Protocol):
    """The part of the cluster source that the warm-up needs."""

    @property
    def is_synced(self) -> bool:
        """Whether all nodes and pods are known."""


class WarmUp:
    """Recomputes allocations, estimates and evaluations after every change of the fleet.

    Args:
        fleet: the fleet; its changes start the work.
        evaluation_cache: cached evaluations for the requests of the last minutes.
        source_manager: estimates devices again, one at a time with deliveries of the sources.
        requests: parses the requests of pods.
        readiness: is notified when the first allocation is complete.
        gc_control: collects garbage at that moment, because no request is open yet.
        yield_control: yields to requests between steps.
    """

    def __init__(
        self,
        fleet: Fleet,
        evaluation_cache: EvaluationCache,
        source_manager: _RefreshedSources,
        *,
        requests: WaitingRequests,
        readiness: Readiness,
        gc_control: GcControl,
        yield_control: YieldControl,
    ) -> None:
        self._fleet = fleet
        self._evaluation_cache = evaluation_cache
        self._source_manager = source_manager
        self._requests = requests
        self._readiness = readiness
        self._gc_control = gc_control
        self._yield_control = yield_control
        self._to_allocate, self._to_evaluate = asyncio.Event(), asyncio.Event()
        self._new_pods: asyncio.Queue[PodRecord] = asyncio.Queue(MAX_EXPECTED)
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
            if self._source_manager.cluster.is_synced and not self._readiness.is_allocated:
                self._fleet.snapshot_of_all()
                self._gc_control.tidy()  # takes long, and no request is open yet
                self._readiness.mark_allocated()
            if self._readiness.is_allocated:
                await self._source_manager.refresh(self._evaluation_cache.prepare_in_steps)
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
