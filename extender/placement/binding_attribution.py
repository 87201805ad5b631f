"""Record on which nodes pods were bound, and attribute each binding to a replica's answer."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from extender.core.nodes.inventory import PodRecord
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.placement.bypassed_pods import (
    MAX_BOUND,
    MAX_WAIT_SECONDS,
    SWEEP_SECONDS,
    BypassedPods,
)
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
    """A bound pod that this replica may have placed, with monotonic times of answer and binding."""

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


logger = logging.getLogger(__name__)


class InventoryTap:
    """Forwards inventory changes to the fleet, and records the node of each newly bound pod.

    Args:
        binding_attribution: counts whether decisions were followed.
        bypassed_pods: finds pods that were bound without a request to idlegpu.
        on_bound: called with the decision of each newly bound pod.
    """

    def __init__(
        self,
        fleet: Fleet,
        history: DecisionHistory,
        binding_attribution: BindingAttribution,
        bypassed_pods: BypassedPods,
        on_bound: Callable[[DecisionRecord], None] = lambda _: None,
    ) -> None:
        self._on_bound = on_bound
        self._fleet = fleet
        self._history = history
        self._binding_attribution = binding_attribution
        self._bypassed_pods = bypassed_pods
        self.replace_nodes = fleet.replace_nodes
        self.apply_node = fleet.apply_node
        self.remove_node = fleet.remove_node
        self.apply_host_use = fleet.apply_host_use
        self.apply_group_size = fleet.apply_group_size

    def replace_pods(self, records: Iterable[PodRecord]) -> None:
        """Replace all GPU pods."""
        listed = list(records)
        noted = [(record, self._decided(record)) for record in listed]
        self._fleet.replace_pods(listed)
        for record, decided in noted:
            self._note(record, decided)
        self._bypassed_pods.relist(listed)

    def apply_pod(self, record: PodRecord) -> None:
        """Add or update a GPU pod."""
        decided = self._decided(record)
        self._fleet.apply_pod(record)
        self._note(record, decided)
        self._bypassed_pods.see(record)

    def remove_pod(self, uid: str, at: float) -> None:
        """Remove a pod that was gone by `at`, seconds since the epoch."""
        self._fleet.remove_pod(uid, at)
        self._bypassed_pods.remove(uid)
        self._history.take_choice(uid)

    def _decided(self, record: PodRecord) -> DecisionRecord | None:
        """Return the decision of a newly bound pod; call this before the pod counts on its node."""
        return self._history.note_bound(record.uid, record.node) if record.node else None

    def _note(self, record: PodRecord, decided: DecisionRecord | None) -> None:
        if not record.node:
            return
        if decided is not None:
            self._on_bound(decided)
        choice = self._history.take_choice(record.uid)
        if choice is None:
            return
        self._binding_attribution.note(record.uid, choice, record.node)
        logger.info(
            "pod bound", extra={"pod": record.key, "node": record.node, "first_choice": choice.best}
        )
