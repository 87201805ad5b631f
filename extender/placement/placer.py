"""Answers kube-scheduler's questions from the fleet's snapshot."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import numpy as np

from extender.core.decision.cached_evaluation import evaluate_in_steps
from extender.core.decision.decision import Decision, decide
from extender.core.decision.evaluation import (
    Evaluation,
    EvaluationRequest,
    Overlay,
    asks,
    evaluate_for,
)
from extender.core.decision.filtering import Code
from extender.core.decision.verdicts import NodeVerdict, gather
from extender.core.decision.victims import batch_after
from extender.core.nodes.assumed_pods import Assumption
from extender.core.nodes.node_index import NodeIndex
from extender.core.nodes.snapshot import Snapshot
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest, PodRef
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.placement.evaluation_cache import EvaluationCache
from extender.placement.evidence import PlacedEvidence, place_evidence
from extender.placement.history import DecisionHistory, DecisionRecord

RUNNER_UP = 2
"""Places that are told of every decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """What preemption would evict from a candidate node, as kube-scheduler proposes it.

    Attributes:
        node: the node.
        uids: UIDs of the pods.
    """

    node: str
    uids: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighed:
    """What was decided for a pod, and from what.

    Attributes:
        pod: the pod.
        request: what it asks for.
        decision: the verdict on each candidate.
        snapshot: the fleet.
        policy: the settings.
        overlays: tentative tenants by resource and node, without the pod.
        seconds: how long it took.
    """

    pod: PodRef
    request: GpuRequest
    decision: Decision
    snapshot: Snapshot
    policy: Policy
    overlays: Mapping[str, Overlay]
    seconds: float


class Placer:
    """Decides for one pod at a time, assumes it on the best node, and remembers why.

    Args:
        fleet: the fleet.
        history: where decisions are remembered.
        clock: seconds since the epoch.
        detailed: so many of the best nodes are remembered in full; may be changed.

    Attributes:
        is_shadow: no answer changes anything: pods count where they are bound, not where we would
            have put them.
        on_settled: is told of each decision, and of what it was made from, before the answer.
        standings: what is kept for the requests of the last minutes, to be brought up to date.
    """

    def __init__(
        self, fleet: Fleet, history: DecisionHistory, clock: Callable[[], float], detailed: int = 20
    ) -> None:
        self.fleet = fleet
        self.history = history
        self._clock = clock
        self.detailed = detailed
        self.is_shadow = False
        self.on_settled: Callable[[DecisionRecord, Weighed], None] = lambda *_: None
        self.standings = EvaluationCache(fleet, clock)
        self._listed: dict[str, Sequence[str]] = {}
        self._gathered: tuple[tuple[object, ...], tuple[PlacedEvidence, ...]] | None = None

    @property
    def policy(self) -> Policy:
        """The settings of the decision."""
        return self.fleet.policy

    @property
    def node_index(self) -> NodeIndex:
        """The nodes by number: a question names nearly the same."""
        return self.fleet.node_index

    def rank(self, request: GpuRequest, candidates: Iterable[str], *, uid: str = "") -> Decision:
        """Decide without assuming or remembering anything: what a pod would get now."""
        decision, _, _ = self._decide(request, tuple(candidates), uid, None)
        return decision

    def guess_in_steps(self, request: GpuRequest, candidates: Iterable[str]) -> Steps[Decision]:
        """Decide likewise, in steps, for somebody who only wants to know: nothing of it is kept."""
        snapshot, overlays = self.fleet.snapshot(), self.fleet.ledger.overlays(without="")
        policy = self.policy
        known: dict[str, Evaluation] = {}
        for resource, ask in asks(request):
            pool, overlay = snapshot.pools.get(resource), overlays.get(resource, {})
            if pool is not None:
                question = EvaluationRequest(
                    request=request, ask=ask, policy=policy, overlay=overlay
                )
                standing = yield from evaluate_in_steps(snapshot, pool, question)
                known[resource] = standing.evaluation
                yield
        return decide(
            snapshot,
            request,
            tuple(candidates),
            policy,
            overlays=overlays,
            evaluate=lambda _, pool, __: known[pool.resource],
        )

    def place(
        self,
        verb: str,
        pod: PodRef,
        request: GpuRequest,
        candidates: Sequence[str],
        *,
        ranked: int | None = None,
    ) -> DecisionRecord:
        """Decide for a pod, and count it at once on the node that is ranked first.

        Args:
            verb: filter or prioritize; prioritize replaces what filter assumed.
            pod: the pod.
            request: what it asks for.
            candidates: node names, in kube-scheduler's order.
            ranked: so many of the best are put in order at least, None for all that pass.
        """
        return self.settle(verb, self.weigh(pod, request, candidates, ranked=ranked))

    def weigh(
        self,
        pod: PodRef,
        request: GpuRequest,
        candidates: Sequence[str],
        *,
        ranked: int | None = None,
    ) -> Weighed:
        """Decide for a pod, and change nothing; arguments as those of `place`."""
        wanted = None if ranked is None else max(ranked, self.detailed, RUNNER_UP)
        started, policy = perf_counter(), self.policy
        decision, snapshot, overlays = self._decide(request, candidates, pod.uid, wanted)
        return Weighed(
            pod=pod,
            request=request,
            decision=decision,
            snapshot=snapshot,
            policy=policy,
            overlays=overlays,
            seconds=perf_counter() - started,
        )

    def holds(self, weighed: Weighed) -> bool:
        """Tell whether the same would be decided now."""
        return (
            weighed.policy is self.policy
            and weighed.snapshot is self.fleet.snapshot()
            and weighed.overlays == self.fleet.ledger.overlays(without=weighed.pod.uid)
        )

    def settle(self, verb: str, weighed: Weighed) -> DecisionRecord:
        """Count the pod where it is ranked first, unless in shadow, and remember the decision."""
        about = (weighed.snapshot, weighed.policy)
        request, overlays = weighed.request, weighed.overlays
        record = DecisionRecord(
            number=self.history.next_number(),
            at=self._clock(),
            verb=verb,
            pod=weighed.pod,
            request=request,
            decision=weighed.decision,
            snapshot_version=weighed.snapshot.version,
            seconds=weighed.seconds,
            is_shadow=self.is_shadow,
            gather=lambda nodes: self._gather(about, request, overlays, nodes),
            gather_late=partial(self._gather_late, weighed.pod.uid, request),
        )
        self._assume(weighed.pod, request, weighed.decision)
        self.history.add(record)
        self.on_settled(record, weighed)
        return record

    def detail(self, record: DecisionRecord) -> None:
        """Fill in the full record of the best nodes; called once the answer is on its way.

        Where fewer pass than are remembered in full, so are some of the others, of each reason.
        """
        decision = record.decision
        if record.gather is not None and not record.evidence:
            best = decision.order[: self.detailed].tolist()
            rows = [*best, *decision.refused(self.detailed - len(best))]
            record.evidence = record.gather([decision.candidates[at] for at in rows])
        record.decision = decision.slim(self.detailed, self._listed.get(record.verb))
        self._listed[record.verb] = record.decision.candidates

    def explain_nodes(self, request: GpuRequest, nodes: list[str]) -> tuple[NodeVerdict, ...]:
        """Explain what some nodes are worth to a request now."""
        overlays = self.fleet.ledger.overlays(without="")
        about = (self.fleet.snapshot(), self.policy)
        evidence = self._gather(about, request, overlays, nodes)
        return tuple(verdict for part in evidence for verdict in part.explain())

    def accepts_without(
        self, pod: PodRef, request: GpuRequest, victims: Iterable[Victims]
    ) -> frozenset[str]:
        """Return the nodes that filter would accept once the victims are gone.

        What the readings say of a victim's devices is nobody's by then. A node that we do not know
        is no reason to refuse; a victim that we do not know holds no GPU, and frees none.
        """
        snapshot = self.fleet.snapshot()
        overlays = self.fleet.ledger.overlays(without=pod.uid)
        return frozenset(
            candidate.node
            for candidate in victims
            if self._accepts(snapshot, request, overlays, candidate)
        )

    def accepting(self, pod: PodRef, request: GpuRequest, nodes: Iterable[str]) -> list[str]:
        """Return the nodes that filter would accept now, without evaluating any others."""
        as_they_are = [Victims(node=node, uids=frozenset()) for node in nodes]
        accepted = self.accepts_without(pod, request, as_they_are)
        return [victims.node for victims in as_they_are if victims.node in accepted]

    def _accepts(
        self,
        snapshot: Snapshot,
        request: GpuRequest,
        overlays: Mapping[str, Overlay],
        candidate: Victims,
    ) -> bool:
        """Tell whether filter would accept one node once the victims are gone."""
        if candidate.node not in snapshot.nodes or candidate.node not in self.fleet.nodes:
            return not request.requires_idle
        after = self.fleet.leaving(candidate.node, candidate.uids)
        estimated = len(snapshot.telemetry.latest)
        for resource, ask in asks(request):
            pool, leaving = snapshot.pools.get(resource), after.get(resource)
            is_shown = pool is not None and candidate.node in pool.row_of
            # Devices that came after the snapshot was begun show in the next one.
            is_late = leaving is not None and max(leaving.row.slots, default=0) >= estimated
            if leaving is None or not is_shown or is_late:
                if request.requires_idle:
                    return False
                continue
            tenants = overlays.get(resource, {}).get(candidate.node, ())
            kept = tuple(tenant for tenant in tenants if tenant.uid not in candidate.uids)
            batch = batch_after(
                leaving,
                kept,
                snapshot.telemetry,
                np.zeros(1),
                is_presumed_idle=not leaving.row.is_shared,
            )
            question = EvaluationRequest(request=request, ask=ask, policy=self.policy, overlay={})
            evaluation = evaluate_for(question, batch, snapshot.models)
            if evaluation.codes[0] != Code.PASSES:
                return False
        return True

    def _decide(
        self, request: GpuRequest, candidates: Sequence[str], uid: str, ranked: int | None
    ) -> tuple[Decision, Snapshot, Mapping[str, Overlay]]:
        snapshot = self.fleet.snapshot()
        overlays = self.fleet.ledger.overlays(without=uid)
        decision = decide(
            snapshot,
            request,
            candidates,
            self.policy,
            overlays=overlays,
            evaluate=self.standings.evaluate,
            ranked=ranked,
        )
        return decision, snapshot, overlays

    def _gather(
        self,
        about: tuple[Snapshot, Policy],
        request: GpuRequest,
        overlays: Mapping[str, Overlay],
        nodes: Sequence[str],
    ) -> tuple[PlacedEvidence, ...]:
        """Keep what the verdict on some nodes is made from, for each resource."""
        snapshot, policy = about
        # Of filter and prioritize of one pod it is the same most of the time.
        key = (snapshot.version, policy, request, request.avoided, overlays, tuple(nodes))
        if self._gathered is not None and self._gathered[0] == key:
            return self._gathered[1]
        evidence: list[PlacedEvidence] = []
        for resource, ask in asks(request):
            pool = snapshot.pools.get(resource)
            if pool is not None:
                overlay = overlays.get(resource, {})
                question = EvaluationRequest(
                    request=request, ask=ask, policy=policy, overlay=overlay
                )
                found = gather(snapshot, pool, question, nodes)
                evidence.append(place_evidence(found, self.fleet.store, snapshot.at))
        self._gathered = (key, tuple(evidence))
        return self._gathered[1]

    def _gather_late(
        self, uid: str, request: GpuRequest, nodes: Sequence[str]
    ) -> tuple[PlacedEvidence, ...]:
        """Return what a verdict on some nodes would be made from by now, the pod left out."""
        about = (self.fleet.snapshot(), self.policy)
        found = self._gather(about, request, self.fleet.ledger.overlays(without=uid), nodes)
        return tuple(replace(part, is_late=True) for part in found)

    def _assume(self, pod: PodRef, request: GpuRequest, decision: Decision) -> None:
        """Count the pod on our first choice, until it is seen bound or its time is up.

        Where answers change nothing it may go anywhere: it counts once it is seen bound.
        """
        known, record = self.fleet.ledger.get(pod.uid), self.fleet.pods.get(pod.uid)
        is_firm = known is not None and known.expires_at is None
        if is_firm or (record is not None and record.node):
            return
        if decision.best is None or self.is_shadow:
            self.fleet.ledger.drop(pod.uid)
            return
        self.reserve(pod, request, decision.best)

    def reserve(self, pod: PodRef, request: GpuRequest, node: str) -> None:
        """Count a pod on a node until it is bound or its time is up."""
        self.fleet.ledger.assume(
            Assumption(
                uid=pod.uid,
                key=pod.key,
                node=node,
                resources=request.resources,
                memory_bytes=request.memory_bytes,
                expected_bytes=request.expected_bytes,
                expires_at=self._clock() + self.policy.assumed.tentative_seconds,
                last_word=request.last_word,
            )
        )

    def would_do(self, pod: PodRef, request: GpuRequest, node: str) -> bool:
        """Tell whether a node would do for a pod now, and has room beside those on their way.

        That a node is full by our own count is no reason to refuse it, but none to send a pod.
        """
        snapshot = self.fleet.snapshot()
        overlays = self.fleet.ledger.overlays(without=pod.uid)
        for resource, count in request.resources:
            pool = snapshot.pools.get(resource)
            if pool is None or node not in pool.row_of:
                return False
            row = pool.rows[pool.row_of[node]]
            assumed = sum(tenant.count for tenant in overlays.get(resource, {}).get(node, ()))
            if row.allocatable - row.held - assumed < count:
                return False
        return self.rank(request, (node,), uid=pod.uid).best == node
