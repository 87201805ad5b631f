"""Answers kube-scheduler's questions from the fleet's snapshot."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from sys import intern
from time import perf_counter

import numpy as np

from extender.core.assessment import Ask
from extender.core.assumed import Assumption
from extender.core.decision import (
    Decision,
    Evaluation,
    Overlay,
    asks,
    changed_rows,
    decide,
    evaluate_again,
    evaluate_batch,
    evaluate_pool,
    model_places,
)
from extender.core.explain import DeviceVerdict, NodeVerdict, explain
from extender.core.filtering import Code
from extender.core.landing import assume
from extender.core.policy import Policy
from extender.core.request import GpuRequest, PodRef
from extender.core.snapshot import Batch, Pool, Snapshot, batch_rows
from extender.fleet.fleet import Fleet
from extender.placement.history import DecisionHistory, DecisionRecord

CACHED_EVALUATIONS = 64
"""Distinct requests whose evaluation of a whole pool is kept for one snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """What preemption would evict from a candidate node, as kube-scheduler proposes it.

    Attributes:
        node: the node.
        uids: UIDs of the pods.
    """

    node: str
    uids: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluated:
    """What a pool was worth to a request.

    Attributes:
        evaluation: by node.
        base: the pool's, as it was then.
        models: the snapshot's: a new one may change what every node is worth.
        patched: how many of its rows had been patched by then.
    """

    evaluation: Evaluation
    base: int
    models: tuple[str, ...]
    patched: int


class Placer:
    """Decides for one pod at a time, assumes it on the best node, and remembers why.

    Args:
        fleet: the fleet.
        history: where decisions are remembered.
        clock: seconds since the epoch.
        detailed: so many of the best nodes are remembered in full.
    """

    def __init__(
        self, fleet: Fleet, history: DecisionHistory, clock: Callable[[], float], detailed: int = 20
    ) -> None:
        self.fleet = fleet
        self.history = history
        self._clock = clock
        self._detailed = detailed
        self._cache: OrderedDict[tuple[str, GpuRequest], _Evaluated] = OrderedDict()

    @property
    def policy(self) -> Policy:
        """The settings of the decision."""
        return self.fleet.policy

    def rank(self, request: GpuRequest, candidates: Iterable[str], *, uid: str = "") -> Decision:
        """Decide without assuming or remembering anything: what a pod would get now."""
        decision, _, _ = self._decide(request, tuple(candidates), uid)
        return decision

    def place(
        self, verb: str, pod: PodRef, request: GpuRequest, candidates: tuple[str, ...]
    ) -> DecisionRecord:
        """Decide for a pod, and count it at once on the node that is ranked first.

        Args:
            verb: filter or prioritize; prioritize replaces what filter assumed.
            pod: the pod.
            request: what it asks for.
            candidates: node names, in kube-scheduler's order.
        """
        started = perf_counter()
        decision, snapshot, overlays = self._decide(request, candidates, pod.uid)
        record = DecisionRecord(
            number=self.history.next_number(),
            at=self._clock(),
            verb=verb,
            pod=pod,
            request=request,
            decision=decision,
            snapshot_version=snapshot.version,
            seconds=perf_counter() - started,
            explain=lambda nodes: self._explain(snapshot, request, overlays, nodes),
        )
        self._assume(pod, request, decision)
        self.history.add(record)
        return record

    def detail(self, record: DecisionRecord) -> None:
        """Fill in the full record of the best nodes; called once the answer is on its way."""
        # Every question brings strings of its own: remembered names are shared between decisions.
        names = tuple(map(intern, record.decision.candidates))
        record.decision = replace(record.decision, candidates=names)
        if record.explain is not None and not record.details:
            best = islice(record.decision.order, self._detailed)
            record.details = record.explain([record.decision.candidates[at] for at in best])

    def explain_nodes(self, request: GpuRequest, nodes: list[str]) -> tuple[NodeVerdict, ...]:
        """Explain what some nodes are worth to a request now."""
        overlays = self.fleet.ledger.overlays(without="")
        return self._explain(self.fleet.snapshot(), request, overlays, nodes)

    def accepts_without(
        self, pod: PodRef, request: GpuRequest, victims: Iterable[Victims]
    ) -> frozenset[str]:
        """Return the nodes that filter would accept once the victims are gone.

        What the readings say of a victim's devices is nobody's by then. A node or a victim that
        we do not know is no reason to refuse.
        """
        snapshot = self.fleet.snapshot()
        overlays = self.fleet.ledger.overlays(without=pod.uid)
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
        """Tell whether filter would accept one node once the victims are gone."""
        if candidate.node not in snapshot.nodes:
            return not request.requires_idle
        after = self.fleet.lay_out_without(candidate.node, candidate.uids)
        places = model_places(snapshot.models, request.preferred_models)
        for resource, ask in asks(request):
            pool, row = snapshot.pools.get(resource), after.get(resource)
            if pool is None or row is None or candidate.node not in pool.row_of:
                if request.requires_idle:
                    return False
                continue
            tenants = overlays.get(resource, {}).get(candidate.node, ())
            kept = tuple(tenant for tenant in tenants if tenant.uid not in candidate.uids)
            before = pool.rows[pool.row_of[candidate.node]]
            batch = _with_freed(
                batch_rows((assume(row, kept),), snapshot.telemetry, np.zeros(1), width=1),
                [was > now for was, now in zip(before.used, row.used, strict=False)],
                is_any=before.held > row.held and not all(map(self.fleet.is_shown, candidate.uids)),
            )
            evaluation = evaluate_batch(
                batch, request, ask, self.policy, places, np.zeros(1, dtype=np.bool_)
            )
            if evaluation.codes[0] != Code.PASSES:
                return False
        return True

    def _decide(
        self, request: GpuRequest, candidates: tuple[str, ...], uid: str
    ) -> tuple[Decision, Snapshot, Mapping[str, Overlay]]:
        snapshot = self.fleet.snapshot()
        overlays = self.fleet.ledger.overlays(without=uid)
        decision = decide(
            snapshot,
            request,
            candidates,
            self.policy,
            overlays=overlays,
            evaluate=self._evaluate,
        )
        return decision, snapshot, overlays

    def _evaluate(
        self, snapshot: Snapshot, pool: Pool, request: GpuRequest, ask: Ask
    ) -> Evaluation:
        """Evaluate a pool, once for each distinct request; afterwards only what has changed."""
        # Where a pod is nominated concerns single rows, which are corrected afterwards.
        key = (pool.resource, replace(request, nominated_node=""))
        known = self._cache.pop(key, None)
        if known and (known.base, known.models) == (pool.base, snapshot.models):
            rows = pool.patched[known.patched :]
            evaluation = evaluate_again(
                known.evaluation, snapshot, pool, rows, (request, ask, self.policy)
            )
        else:
            evaluation = evaluate_pool(snapshot, pool, request, ask, self.policy)
        self._cache[key] = _Evaluated(
            evaluation=evaluation,
            base=pool.base,
            models=snapshot.models,
            patched=len(pool.patched),
        )
        if len(self._cache) > CACHED_EVALUATIONS:
            self._cache.popitem(last=False)
        return evaluation

    def _explain(
        self,
        snapshot: Snapshot,
        request: GpuRequest,
        overlays: Mapping[str, Overlay],
        nodes: list[str],
    ) -> tuple[NodeVerdict, ...]:
        verdicts: list[NodeVerdict] = []
        for resource, ask in asks(request):
            pool = snapshot.pools.get(resource)
            if pool is None:
                continue
            overlay = overlays.get(resource, {})
            asked = {node: overlay[node] for node in nodes if node in overlay}
            changed = changed_rows(pool, asked, "")
            at = [pool.row_of[node] for node in nodes if node in pool.row_of]
            rows = [
                (
                    pool.nodes[row],
                    changed.get(row, pool.rows[row]),
                    float(pool.batch.suspicion[row]),
                )
                for row in at
            ]
            verdicts.extend(explain(snapshot, resource, ask, request, self.policy, rows))
        return tuple(self._name_devices(verdict, snapshot.at) for verdict in verdicts)

    def _name_devices(self, verdict: NodeVerdict, now: float) -> NodeVerdict:
        """Say which devices a verdict speaks of: another may have a device's row tomorrow."""
        return replace(verdict, devices=tuple(self._named(it, now) for it in verdict.devices))

    def _named(self, device: DeviceVerdict, now: float) -> DeviceVerdict:
        store = self.fleet.store
        info, measured_at = store.info(device.row), store.measured_at(device.row)
        if info is None or not info.uuid:
            return device
        return replace(
            device,
            index=info.index,
            uuid=info.uuid,
            gpu_instance_id=info.gpu_instance_id,
            source=store.source(device.row),
            age_seconds=None if measured_at is None else max(now - measured_at, 0.0),
        )

    def _assume(self, pod: PodRef, request: GpuRequest, decision: Decision) -> None:
        """Count the pod on our first choice, until it is seen bound or its time is up."""
        known, record = self.fleet.ledger.get(pod.uid), self.fleet.pods.get(pod.uid)
        is_firm = known is not None and known.expires_at is None
        if is_firm or (record is not None and record.node):
            return
        if decision.best is None:
            self.fleet.ledger.drop(pod.uid)
            return
        self.fleet.ledger.assume(
            Assumption(
                uid=pod.uid,
                key=pod.key,
                node=decision.best,
                resources=request.resources,
                memory_bytes=request.memory_bytes,
                expires_at=self._clock() + self.policy.assumed.tentative_seconds,
            )
        )


def _with_freed(batch: Batch, freed: list[bool], *, is_any: bool) -> Batch:
    """Return a one-row batch in which nothing is known any more of the freed devices.

    Args:
        batch: the node without the victims.
        freed: per slot, whether a victim was seen on it.
        is_any: victims held devices, and nobody knows which.
    """
    unknown = np.zeros(batch.slots.shape, dtype=np.bool_)
    unknown[0, : len(freed)] = freed
    unknown |= is_any
    telemetry = replace(
        batch.telemetry,
        freshness=np.where(unknown, 0.0, batch.telemetry.freshness),
        memory_freshness=np.where(unknown, 0.0, batch.telemetry.memory_freshness),
        is_foreign=batch.telemetry.is_foreign & ~unknown,
        is_in_use=batch.telemetry.is_in_use & ~unknown,
    )
    return replace(batch, telemetry=telemetry)
