"""Rank nodes for a pod from the fleet's snapshot, and assume the pod on the best one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import numpy as np

from extender.core.decision.decision import Decision, decide
from extender.core.decision.dirty_rows import evaluate_in_steps
from extender.core.decision.evaluation import (
    Evaluation,
    EvaluationInputs,
    Overlay,
    device_requests,
    evaluate_for,
    row_with_tenants,
    serves_host,
)
from extender.core.decision.filtering import Code
from extender.core.decision.group_fit import too_few
from extender.core.decision.landing import batch_after
from extender.core.decision.scoring import Nearness
from extender.core.decision.verdicts import NodeVerdict, gather
from extender.core.nodes.assumed_pods import Assumption
from extender.core.nodes.snapshot import NO_PRICE, Snapshot
from extender.core.policy import Policy, PriceMode
from extender.core.request.request import GpuRequest, PodRef
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.placement.evaluation_cache import EvaluationCache
from extender.placement.history import (
    DecisionHistory,
    DecisionRecord,
    PackedEvidence,
    PlacedEvidence,
    place_evidence,
)
from extender.placement.request_log import FILTER
from extender.runtime.topic import Topic
from extender.settings.config import Settings
from extender.settings.service import Mode

_RUNNER_UP = 2
"""Minimum number of nodes that every decision ranks: the first choice and the runner-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """Pods that kube-scheduler proposes to evict from a candidate node.

    Attributes:
        uids: UIDs of the pods.
    """

    node: str
    uids: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighed:
    """A decision for a pod, with its inputs.

    Attributes:
        snapshot: state of the fleet.
        overlays: tentative tenants by resource and node, without the pod.
        seconds: duration of the computation.
    """

    pod: PodRef
    request: GpuRequest
    decision: Decision
    snapshot: Snapshot
    policy: Policy
    overlays: Mapping[str, Overlay]
    seconds: float


def nearness_of(decision: Decision, nodes: Iterable[str]) -> dict[str, Nearness]:
    """Return the nearness of some candidates to the pod's group, {} if the pod is in none."""
    group = decision.group
    if group is None:
        return {}
    wanted = frozenset(nodes)
    named = enumerate(decision.candidates)
    return {node: group.of(at) for at, node in named if node in wanted}


class Placer:
    """Ranks nodes for one pod at a time, assumes the pod on the best one, and records why.

    Args:
        clock: seconds since the epoch.
        detailed: number of best nodes to record in full.

    Attributes:
        is_shadow: shadow mode: answers change nothing, so a pod counts only where it is bound.
        decided: published with each decision and its inputs, before the answer.
        evaluation_cache: cached evaluations of the requests of the last minutes.
    """

    def __init__(
        self, fleet: Fleet, history: DecisionHistory, clock: Callable[[], float], detailed: int = 20
    ) -> None:
        self.fleet = fleet
        self.history = history
        self._clock = clock
        self.detailed = detailed
        self.is_shadow = False
        self.decided: Topic[[DecisionRecord, Weighed]] = Topic()
        self.evaluation_cache = EvaluationCache(fleet, clock)
        self._listed: dict[str, Sequence[str]] = {}
        self._gathered: tuple[tuple[object, ...], tuple[PlacedEvidence, ...]] | None = None

    def adopt(self, settings: Settings) -> None:
        """Apply new settings."""
        self.detailed = settings.decisions.detailed_nodes
        self.is_shadow = settings.mode is Mode.SHADOW

    @property
    def policy(self) -> Policy:
        """Settings by which nodes are ranked."""
        return self.fleet.policy

    def rank(self, request: GpuRequest, candidates: Iterable[str], *, uid: str = "") -> Decision:
        """Return the decision that a pod would get now; assume and record nothing."""
        pod = PodRef(uid=uid, namespace="", name="")
        return self.weigh(pod, request, tuple(candidates)).decision

    def guess_in_steps(self, request: GpuRequest, candidates: Iterable[str]) -> Steps[Decision]:
        """Decide like `rank`, in cooperative steps, without caching the evaluation."""
        snapshot, overlays = self.fleet.snapshot(), self.fleet.ledger.overlays(without="")
        policy = self.policy
        evaluations: dict[str, Evaluation] = {}
        for resource, devices in device_requests(request):
            pool, overlay = snapshot.pools.get(resource), overlays.get(resource, {})
            if pool is not None:
                inputs = EvaluationInputs(
                    request=request, devices=devices, policy=policy, overlay=overlay
                )
                entry = yield from evaluate_in_steps(snapshot, pool, inputs)
                evaluations[resource] = entry.evaluation
                yield
        return decide(
            snapshot,
            request,
            tuple(candidates),
            policy,
            overlays=overlays,
            evaluate=lambda _, pool, __: evaluations[pool.resource],
            group=self.fleet.group_need("", request, snapshot),
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
        """Decide for a pod, record the decision, and assume the pod at once on the first choice.

        Args:
            verb: filter or prioritize; prioritize replaces the assumption of filter.
            candidates: node names, in kube-scheduler's order.
            ranked: minimum number of nodes to rank; None for all that pass.
        """
        if verb == FILTER and request.group is not None:
            until = self._clock() + self.policy.assumed.simulated_seconds
            self.fleet.groups.note_request(pod.uid, request.group, until=until)
        weighed = self.weigh(pod, request, candidates, ranked=ranked)
        about, overlays = (weighed.snapshot, weighed.policy), weighed.overlays
        record = DecisionRecord(
            number=self.history.next_number(),
            at=self._clock(),
            verb=verb,
            pod=pod,
            request=request,
            decision=weighed.decision,
            snapshot_version=weighed.snapshot.version,
            seconds=weighed.seconds,
            is_shadow=self.is_shadow,
            gather=lambda nodes: self._gather(
                about, request, overlays, nodes, nearness_of(weighed.decision, nodes)
            ),
            gather_late=partial(self._gather_late, pod.uid, request),
        )
        self._assume(pod, request, weighed.decision)
        self.history.add(record)
        self.decided.publish(record, weighed)
        return record

    def weigh(
        self,
        pod: PodRef,
        request: GpuRequest,
        candidates: Sequence[str],
        *,
        ranked: int | None = None,
    ) -> Weighed:
        """Decide for a pod without changing any state; arguments as in `place`."""
        started, policy = perf_counter(), self.policy
        snapshot = self.fleet.snapshot()
        overlays = self.fleet.overlays_for(pod.uid)
        decision = decide(
            snapshot,
            request,
            candidates,
            policy,
            overlays=overlays,
            evaluate=self.evaluation_cache.evaluate,
            ranked=None if ranked is None else max(ranked, self.detailed, _RUNNER_UP),
            group=self.fleet.group_need(pod.uid, request, snapshot),
        )
        return Weighed(
            pod=pod,
            request=request,
            decision=decision,
            snapshot=snapshot,
            policy=policy,
            overlays=overlays,
            seconds=perf_counter() - started,
        )

    def detail(self, record: DecisionRecord) -> None:
        """Record the best nodes of a decision in full; called after the answer was sent.

        If fewer nodes pass than are recorded in full, some refused nodes of each reason follow.
        """
        decision = record.decision
        if record.gather is not None and not record.packed:
            best = decision.order[: self.detailed].tolist()
            rows = [*best, *decision.refused(self.detailed - len(best))]
            gathered = record.gather([decision.candidates[at] for at in rows])
            record.packed = tuple(map(PackedEvidence, gathered))
        record.decision = decision.slim(self.detailed, self._listed.get(record.verb))
        self._listed[record.verb] = record.decision.candidates

    def explain_nodes(
        self, request: GpuRequest, nodes: list[str], nearness: Mapping[str, Nearness] | None = None
    ) -> tuple[NodeVerdict, ...]:
        """Return verdicts on some nodes for a request, as of now.

        Args:
            nodes: names of the nodes.
            nearness: nearness to the pod's group by node.
        """
        overlays = self.fleet.ledger.overlays(without="")
        about = (self.fleet.snapshot(), self.policy)
        evidence = self._gather(about, request, overlays, nodes, nearness)
        return tuple(verdict for part in evidence for verdict in part.explain())

    def accepts_without(
        self, pod: PodRef, request: GpuRequest, victims: Iterable[Victims]
    ) -> frozenset[str]:
        """Return the candidate nodes that filter would accept once their victims are evicted.

        With strict prices only the cheapest of these nodes are returned. Readings of a victim's
        devices then count for no pod. An unknown node is accepted. An unknown victim has no GPU, so
        it releases none.
        """
        accepted = self._accepted(pod, request, victims)
        return self._without_dearer(request, accepted)

    def _without_dearer(self, request: GpuRequest, nodes: frozenset[str]) -> frozenset[str]:
        """Remove the nodes that strict prices refuse."""
        pool = self.fleet.snapshot().pools.get(request.resource)
        is_strict = self.policy.prices.mode is PriceMode.STRICT
        if pool is None or not is_strict or request.names_models or request.targets:
            return nodes
        prices = {node: pool.rows[pool.row_of[node]].price for node in nodes & pool.row_of.keys()}
        least = min((price for price in prices.values() if price != NO_PRICE), default=NO_PRICE)
        return frozenset(node for node in nodes if prices.get(node, NO_PRICE) in {least, NO_PRICE})

    def accepting(self, pod: PodRef, request: GpuRequest, nodes: Iterable[str]) -> list[str]:
        """Return the nodes that filter would accept now, without evaluating any others.

        Each node by itself: a cheaper one does not exclude it.
        """
        as_they_are = [Victims(node=node, uids=frozenset()) for node in nodes]
        accepted = self._accepted(pod, request, as_they_are)
        return [victims.node for victims in as_they_are if victims.node in accepted]

    def _accepted(
        self, pod: PodRef, request: GpuRequest, victims: Iterable[Victims]
    ) -> frozenset[str]:
        """Return the nodes that would suit the pod without the victims, at any price."""
        snapshot = self.fleet.snapshot()
        overlays = self.fleet.overlays_for(pod.uid)
        if self._is_group_too_large(pod, request, snapshot, overlays):
            return frozenset()
        return frozenset(
            candidate.node
            for candidate in victims
            if self._accepts(snapshot, request, overlays, candidate)
        )

    def _accepts(
        self,
        snapshot: Snapshot,
        request: GpuRequest,
        overlays: Mapping[str, Overlay],
        candidate: Victims,
    ) -> bool:
        """Return whether filter would accept a node without the victims."""
        if request.target_nodes is not None and candidate.node not in request.target_nodes:
            return False
        if candidate.node not in snapshot.nodes or candidate.node not in self.fleet.nodes:
            return not (request.requires_idle or request.required_models)
        after = self.fleet.leaving(candidate.node, candidate.uids)
        estimated = len(snapshot.telemetry.latest)
        for resource, devices in device_requests(request):
            pool, leaving = snapshot.pools.get(resource), after.get(resource)
            is_shown = pool is not None and candidate.node in pool.row_of
            # Devices that were added while the snapshot was built are in the next one.
            is_late = leaving is not None and max(leaving.row.slots, default=0) >= estimated
            if leaving is None or not is_shown or is_late:
                if request.requires_idle or request.required_models:
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
            inputs = EvaluationInputs(
                request=request, devices=devices, policy=self.policy, overlay={}
            )
            evaluation = evaluate_for(inputs, batch, snapshot.models)
            if evaluation.codes[0] != Code.PASSES:
                return False
        return True

    def _is_group_too_large(
        self, pod: PodRef, request: GpuRequest, snapshot: Snapshot, overlays: Mapping[str, Overlay]
    ) -> bool:
        """Return whether the cluster can never hold the pod's group."""
        need = self.fleet.group_need(pod.uid, request, snapshot)
        if need is None or need.total is None:
            return False
        resource, devices = device_requests(request)[0]
        pool = snapshot.pools[resource]
        inputs = EvaluationInputs(
            request=request, devices=devices, policy=self.policy, overlay=overlays.get(resource, {})
        )
        codes = self.evaluation_cache.evaluate(snapshot, pool, inputs).codes
        return too_few(need, pool, codes, devices.count) is not None

    def _gather(
        self,
        about: tuple[Snapshot, Policy],
        request: GpuRequest,
        overlays: Mapping[str, Overlay],
        nodes: Sequence[str],
        nearness: Mapping[str, Nearness] | None = None,
    ) -> tuple[PlacedEvidence, ...]:
        """Collect the inputs of the verdicts on some nodes, for each resource."""
        snapshot, policy = about
        # Filter and prioritize of one pod usually need the same inputs.
        key = (snapshot.version, policy, request, request.avoided, overlays, tuple(nodes), nearness)
        if self._gathered is not None and self._gathered[0] == key:
            return self._gathered[1]
        evidence: list[PlacedEvidence] = []
        for resource, devices in device_requests(request):
            pool = snapshot.pools.get(resource)
            if pool is not None:
                overlay = overlays.get(resource, {})
                inputs = EvaluationInputs(
                    request=request, devices=devices, policy=policy, overlay=overlay
                )
                found = gather(snapshot, pool, inputs, nodes)
                if nearness:
                    found = replace(found, nearness=nearness)
                evidence.append(place_evidence(found, self.fleet.store, snapshot.at))
        self._gathered = (key, tuple(evidence))
        return self._gathered[1]

    def _gather_late(
        self, uid: str, request: GpuRequest, nodes: Sequence[str]
    ) -> tuple[PlacedEvidence, ...]:
        """Collect the current inputs of the verdicts on some nodes, without the pod itself."""
        about = (self.fleet.snapshot(), self.policy)
        found = self._gather(about, request, self.fleet.overlays_for(uid), nodes)
        return tuple(replace(part, is_late=True) for part in found)

    def _assume(self, pod: PodRef, request: GpuRequest, decision: Decision) -> None:
        """Assume the pod on the best node, or on none, until it is bound or the assumption expires.

        A nominated pod stays where it is nominated, unless that node is unsuitable and another one
        is not. In shadow mode the pod may go anywhere, so it counts only once it is bound.
        """
        known, record = self.fleet.ledger.get(pod.uid), self.fleet.pods.get(pod.uid)
        node = decision.best
        if record is not None and record.node:
            return
        if known is not None and known.expires_at is None:
            at = decision.place_of(known.node)
            is_suitable = at is not None and decision.codes[at] == Code.PASSES
            if is_suitable or node is None or self.is_shadow:
                return
        if node is None or self.is_shadow:
            self.fleet.ledger.drop(pod.uid)
        else:
            seconds = self.fleet.groups.tentative_seconds(pod.uid, self.policy.assumed)
            self.reserve(pod, request, node, seconds=seconds)

    def reserve(
        self, pod: PodRef, request: GpuRequest, node: str, *, seconds: float | None = None
    ) -> None:
        """Assume a pod on a node until it is bound or the assumption expires.

        Args:
            seconds: time until then; None for `assumed.tentative_seconds`.
        """
        if seconds is None:
            seconds = self.policy.assumed.tentative_seconds
        self.fleet.ledger.assume(
            Assumption(
                uid=pod.uid,
                key=pod.key,
                node=node,
                resources=request.resources,
                memory_bytes=self.fleet.memory_on(node, request),
                expected_bytes=request.expected_bytes,
                host=request.host,
                expires_at=self._clock() + seconds,
                last_refusal=request.last_refusal,
            )
        )

    def would_do(self, pod: PodRef, request: GpuRequest, node: str) -> bool:
        """Return whether a node is suitable for a pod now, with devices that no assumed pod holds.

        Unlike filter, this method refuses a node that by our own count is full or lacks CPU, memory
        or storage.
        """
        snapshot = self.fleet.snapshot()
        overlays = self.fleet.overlays_for(pod.uid)
        for resource, count in request.resources:
            pool = snapshot.pools.get(resource)
            if pool is None or node not in pool.row_of:
                return False
            row, overlay = pool.rows[pool.row_of[node]], overlays.get(resource, {})
            row = row_with_tenants(row, node, overlay, snapshot.telemetry.is_out)
            if row.allocatable - row.held < count or not serves_host(row, request):
                return False
        return self.rank(request, (node,), uid=pod.uid).best == node
