"""Explain a node's verdict: convert the decision's columns to records with reasons."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from extender.core.decision.assessment import UNKNOWN, Assessment, DeviceRequest, assess
from extender.core.decision.device_sets import side_by_side
from extender.core.decision.evaluation import (
    EvaluationInputs,
    HostRequests,
    Others,
    Wants,
    add_suspicion,
    batch_of,
    cheapness,
    estimates,
    evaluate_after,
    evaluate_for,
    model_places,
    stranded_by_in_steps,
)
from extender.core.decision.filtering import Code
from extender.core.decision.health import blamed_siblings, ill_health, is_blamed_on_sibling
from extender.core.decision.landing import Band, bands, count_freed
from extender.core.decision.ranking_reasons import MAY_GET, NOMINATED, Grounds, reason
from extender.core.decision.scoring import (
    NOT_NEAR,
    PERHAPS,
    PLACES,
    UNITS,
    Breakdown,
    Factor,
    Nearness,
    ScorePart,
    break_down,
    free_after,
    idle_devices,
    mean,
    penalty,
)
from extender.core.nodes.batches import take_batch, with_rows
from extender.core.nodes.seen_requests import NONE_SEEN, SeenRequests
from extender.core.nodes.snapshot import NO_PRICE, Batch, Pool, Ratios, Rows, Snapshot
from extender.core.policy import Policy, PriceMode
from extender.core.prices import MILLI
from extender.core.request.request import GpuRequest
from extender.core.steps import finish


@dataclass(frozen=True, slots=True)
class ReportedSignal:
    """Source and age of a value; attributes as in `SourceAnswer`."""

    source: str
    age_seconds: float
    signal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceVerdict:
    """Verdict on one device for a pod; attributes as in `DeviceAnswer`, None if unknown.

    Attributes:
        freshness: freshness of the activity, from 1 fresh to 0 missing.
        source: source of its activity, "" if not measured.
    """

    can_land: bool
    state: str
    utilization_ratio: float | None
    memory_used_ratio: float | None
    free_bytes: int | None
    freshness: float
    assumed: int
    used: int
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    declared_bytes: int
    others_bytes: int
    index: int | None = None
    uuid: str = ""
    gpu_instance_id: str = ""
    source: str = ""
    age_seconds: float | None = None
    health: str = ""
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    throttling: str | None = None
    signals: Mapping[str, ReportedSignal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeScore:
    """Score of one node for a pod, and its parts; attributes as in `VerdictAnswer`.

    Attributes:
        rejection: the rejection's text, "" if the node passes.
        reason: reason for the node's rank in words; "" if it is refused.
    """

    node: str
    rejection: str = ""
    score: float
    parts: tuple[ScorePart, ...] = ()
    factors: tuple[Factor, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict(NodeScore):
    """Verdict on one node for a pod; attributes as in `VerdictAnswer`."""

    resource: str
    landing: int
    idle: int
    needed: int
    taken: int
    chance: float
    is_agreed: bool
    suspicion: float
    model: str
    devices: tuple[DeviceVerdict, ...]
    band: str = ""
    is_late: bool = False


STATES = ("unhealthy", "excluded", "foreign", "idle", "busy", "unknown")
"""States of a device, the most severe first.

An excluded device works, but another device of its node has a fault that excludes the node.
"""


SHOWN_STATES = ("unhealthy", "excluded", "foreign", "idle", "busy", "stale", "unknown")
"""States of a device for people: a device that is unknown to decisions may have old readings."""

_SHOWN = np.array([SHOWN_STATES.index(state) for state in STATES], dtype=np.intp)
_BUSY, _UNKNOWN = STATES.index("busy"), STATES.index("unknown")


def _device_states(batch: Batch, assessment: Assessment, *, multi: bool = False) -> list[list[str]]:
    """Return the state of each device in words, by node and slot."""
    codes = state_codes(batch, assessment, multi=multi).tolist()
    return [[STATES[code] for code in row] for row in codes]


def count_states(batch: Batch, codes: Rows) -> Mapping[str, int]:
    """Count the devices of a batch by state.

    Args:
        codes: their states, as `state_codes` returns them.
    """
    counts = np.bincount(codes[batch.present], minlength=len(STATES)).tolist()
    return dict(zip(STATES, counts, strict=True))


def state_codes(batch: Batch, assessment: Assessment, *, multi: bool = False) -> Rows:
    """Return the state of each device as its index in `STATES`."""
    telemetry = batch.telemetry
    is_out = telemetry.is_excluded_multi if multi else telemetry.is_excluded
    is_blamed = is_blamed_on_sibling(telemetry.cause)
    idle_chance = assessment.idle_chance
    is_foreign = telemetry.is_foreign & ~batch.is_shared[:, None]  # on shared devices it is load
    return np.select(
        [is_out & ~is_blamed, is_out, is_foreign, idle_chance >= 1.0, idle_chance < UNKNOWN],
        [0, 1, 2, 3, 4],
        default=5,
    )


def shown_codes(batch: Batch, assessment: Assessment) -> Rows:
    """Return the state of each device for people as its index in `SHOWN_STATES`.

    A device that is busy by an old reading is stale. A stale device has old readings of activity
    and memory; an unknown one lacks a usable reading of either.
    """
    telemetry = batch.telemetry
    codes = state_codes(batch, assessment)
    is_read = (telemetry.freshness >= 1.0) | (telemetry.memory_freshness >= 1.0)
    # Pods that were just placed make a device busy, however old its readings are.
    is_unsure = (codes == _UNKNOWN) | ((codes == _BUSY) & ~is_read & (batch.assumed == 0))
    is_old = (telemetry.freshness > 0) & (telemetry.memory_freshness > 0)
    unsure = np.where(is_old, SHOWN_STATES.index("stale"), SHOWN_STATES.index("unknown"))
    shown: Rows = np.where(is_unsure, unsure, _SHOWN[codes])
    return shown


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictEvidence:
    """Inputs of the verdicts on some nodes, stored as columns and converted to words on demand.

    Attributes:
        batch: the nodes' rows at the decision, assumed tenants included.
        request: the pod's whole request.
        models: model names by model id.
        siblings: causes of ill health by row, for devices that exclude their siblings.
        seen: requests of pods so far for the resource.
        promised: the pod's nominated node if it passes once deleted pods have left it; else "".
        nearness: nearness to the pod's group by node; {} without a group.
    """

    nodes: tuple[str, ...]
    batch: Batch
    resource: str
    devices: DeviceRequest
    request: GpuRequest
    policy: Policy
    models: tuple[str, ...]
    siblings: Mapping[int, int]
    seen: SeenRequests = NONE_SEEN
    promised: str = ""
    nearness: Mapping[str, Nearness] = field(default_factory=dict)


def gather(
    snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs, nodes: Iterable[str]
) -> VerdictEvidence:
    """Collect the inputs of the verdicts on some nodes.

    Args:
        snapshot: the snapshot of the decision.
        pool: pool of the requested resource.
        nodes: the nodes; those outside the pool are skipped.
    """
    rows = [pool.row_of[node] for node in nodes if node in pool.row_of]
    batch = take_batch(pool.batch, np.array(rows, dtype=np.intp))
    unwritten, places = set(pool.unwritten), range(len(rows))
    others = [
        at for at in places if rows[at] in unwritten or pool.nodes[rows[at]] in inputs.overlay
    ]
    if others:
        at_rows = [(rows[at], inputs.overlay) for at in others]
        batch = with_rows(batch, others, batch_of(snapshot, pool, at_rows))
    if inputs.request.avoided:
        named = [pool.nodes[row] for row in rows]
        batch = add_suspicion(batch, named, inputs.request.avoided)
    return VerdictEvidence(
        nodes=tuple(pool.nodes[row] for row in rows),
        batch=batch,
        resource=pool.resource,
        devices=inputs.devices,
        request=inputs.request,
        policy=inputs.policy,
        models=snapshot.models,
        seen=pool.seen,
        siblings=blamed_siblings(batch.telemetry.cause, snapshot.telemetry.cause),
        promised=_promised(snapshot, pool, inputs),
    )


def _promised(snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs) -> str:
    """Return the nominated node if it passes once deleted pods have left it, else ""."""
    node = inputs.request.nominated_node
    if node not in pool.row_of:
        return ""
    after = evaluate_after(snapshot, pool, pool.row_of[node], inputs)
    return "" if after is None or after.codes[0] != Code.PASSES else node


def only(evidence: VerdictEvidence, *nodes: str) -> VerdictEvidence:
    """Return the evidence for some of the nodes, because explaining few nodes is fast."""
    rows = np.array([evidence.nodes.index(node) for node in nodes], dtype=np.intp)
    return replace(evidence, nodes=nodes, batch=take_batch(evidence.batch, rows))


def part_of(evidence: VerdictEvidence, start: int, stop: int) -> VerdictEvidence:
    """Return the evidence for the nodes from index `start` up to `stop`, exclusive."""
    nodes = evidence.nodes[start:stop]
    rows = np.arange(start, start + len(nodes), dtype=np.intp)
    return replace(evidence, nodes=nodes, batch=take_batch(evidence.batch, rows))


def explain(evidence: VerdictEvidence) -> tuple[NodeVerdict, ...]:
    """Convert the verdict on each node of the evidence to words."""
    if not evidence.nodes:
        return ()
    evidence = replace(evidence, batch=count_freed(evidence.batch))
    batch, models = evidence.batch, evidence.models
    assessment = assess(batch, evidence.devices.columns, estimates(evidence.policy))
    inputs = _inputs(evidence)
    evaluation = evaluate_for(inputs, batch, models, evidence.seen)
    states = _device_states(batch, assessment, multi=evidence.devices.count > 1)
    made_of, why = _break_down(evidence, assessment), _reasons(evidence, assessment)
    return tuple(
        NodeVerdict(
            node=node,
            resource=evidence.resource,
            rejection="" if node == evidence.promised else Code(int(evaluation.codes[index])).text,
            score=float(evaluation.scores[index]) + _near(evidence, node).units / UNITS,
            landing=int(assessment.landing.size[index]),
            idle=int(assessment.idle[index]),
            needed=int(assessment.landing.needed[index]),
            taken=int(assessment.landing.taken[index]),
            chance=float(assessment.chance[index]),
            band=Band(int(evaluation.bands[index])).name.lower(),
            reason=_reason(evidence, node, why[index], refused=bool(evaluation.codes[index])),
            is_agreed=bool(batch.is_agreed[index]),
            suspicion=float(batch.suspicion[index]),
            model=models[int(batch.model_id[index])],
            devices=tuple(
                replace(
                    _device(batch, assessment, (index, int(slot)), states[index][int(slot)]),
                    health=ill_health(
                        batch.telemetry, (index, int(slot)), siblings=evidence.siblings
                    ),
                )
                for slot in np.flatnonzero(batch.present[index])
            ),
            parts=made_of[index].parts,
            factors=made_of[index].factors,
        )
        for index, node in enumerate(evidence.nodes)
    )


def _reason(evidence: VerdictEvidence, node: str, why: str, *, refused: bool) -> str:
    """Return the reason for a node's rank, "" if it is refused."""
    if not refused:
        return why
    return NOMINATED if node == evidence.promised else ""


def scores_of(evidence: VerdictEvidence) -> tuple[NodeScore, ...]:
    """Return the score and reason of each node, much faster than `explain`.

    Args:
        evidence: evidence for nodes that passed.
    """
    if not evidence.nodes:
        return ()
    evidence = replace(evidence, batch=count_freed(evidence.batch))
    assessment = assess(evidence.batch, evidence.devices.columns, estimates(evidence.policy))
    made_of, why = _break_down(evidence, assessment), _reasons(evidence, assessment)
    return tuple(
        NodeScore(node=node, score=of.score, parts=of.parts, factors=of.factors, reason=text)
        for node, of, text in zip(evidence.nodes, made_of, why, strict=True)
    )


def _break_down(evidence: VerdictEvidence, assessment: Assessment) -> tuple[Breakdown, ...]:
    return break_down(
        evidence.batch,
        assessment,
        _places(evidence),
        _spare(evidence),
        strategy=evidence.request.strategy,
        weights=evidence.policy.weights,
        cheapness=_cheapness(evidence),
        nearness=[_near(evidence, node) for node in evidence.nodes] if evidence.nearness else None,
        stranded=_stranded(evidence, assessment),
    )


def _near(evidence: VerdictEvidence, node: str) -> Nearness:
    """Return the nearness of a node to the pod's group."""
    return evidence.nearness.get(node, NOT_NEAR)


def _stranded(evidence: VerdictEvidence, assessment: Assessment) -> Ratios | None:
    """Return the devices that the pod strands on each node, None if that does not count."""
    batch, models = evidence.batch, evidence.models
    wants = Wants.of_all(_inputs(evidence), models, batch)
    others = Others(seen=evidence.seen, models=models)
    return finish(stranded_by_in_steps(batch, assessment, wants, others))


def _cheapness(evidence: VerdictEvidence) -> Ratios | None:
    """Return the cheapness of each node, None if prices do not count for the pod."""
    names_models = np.array([evidence.request.names_models])
    found = cheapness(evidence.batch, evidence.policy, ~names_models)
    return None if isinstance(found, float) or names_models[0] else found


def _places(evidence: VerdictEvidence) -> Rows | None:
    """Return the rank of each node's model in the pod's list, None without a list."""
    preferred = evidence.request.preferred_models
    return model_places(evidence.models, preferred)[evidence.batch.model_id] if preferred else None


def _spare(evidence: VerdictEvidence) -> Ratios:
    """Return the number of further devices that each node's CPU, memory and storage allow."""
    hosts = HostRequests.of([evidence.request], [1])
    return hosts.spare_devices(evidence.batch, evidence.devices.columns.count)


def _reasons(evidence: VerdictEvidence, assessment: Assessment) -> list[str]:
    """Return the reason for each node's rank."""
    batch, landing, request = evidence.batch, assessment.landing, evidence.request
    band = bands(assessment.chance, landing.needed)
    left = np.minimum(free_after(batch, assessment), _spare(evidence))
    idle, unfit, places = idle_devices(assessment), penalty(batch, assessment), _places(evidence)
    devices, works, working = landing.devices, assessment.works, assessment.working
    used = mean(1.0 - assessment.headroom, works, working)
    busy = mean(assessment.utilization, works, working)
    ahead = mean(assessment.next_hour, works, working)
    chances = np.where(assessment.holds, assessment.idle_chance, 0.0)
    least = chances.min(axis=1, where=devices, initial=1.0)
    together = np.broadcast_to(side_by_side(batch, assessment), len(batch))
    lost = _stranded(evidence, assessment)
    telemetry = batch.telemetry
    is_freed = np.where(devices, telemetry.presumed, 0.0).sum(axis=1) > 0
    seen = telemetry.freshness + telemetry.memory_freshness + telemetry.presumed
    is_unknown = np.where(devices, seen, 0.0).sum(axis=1) + (~assessment.fits & devices).sum(axis=1)
    return [
        reason(
            Grounds(
                band=Band(int(band[at])),
                chance=float(assessment.chance[at]),
                least=float(least[at]),
                is_sure=bool(assessment.is_sure[at]),
                is_freed=bool(is_freed[at]),
                is_unknown=not is_unknown[at],
                needed=int(landing.needed[at]),
                room=float(assessment.room[at]),
                unhealthy=float(unfit[at]),
                suspicion=float(batch.suspicion[at]),
                price=_price_of(evidence, at),
                group=_near(evidence, evidence.nodes[at]).words,
                place=None if places is None else _place_in_words(int(places[at])),
                strategy=request.strategy,
                is_shared=bool(batch.is_shared[at]),
                allocatable=int(batch.allocatable[at]),
                left=int(left[at]),
                idle=int(idle[at]),
                utilization=float(busy[at]),
                next_hour=float(ahead[at]),
                memory_used=float(used[at]),
                together=float(together[at]),
                stranded=None if lost is None else float(lost[at]),
            )
        )
        for at in range(len(batch))
    ]


def _price_of(evidence: VerdictEvidence, at: int) -> float | None:
    """Return a node's price if it counts for the pod, else None."""
    price = int(evidence.batch.price[at])
    counts = evidence.policy.prices.mode is not PriceMode.IGNORE
    is_weighed = counts and price != NO_PRICE and not evidence.request.names_models
    return price / MILLI if is_weighed else None


def _place_in_words(place: int) -> int:
    """Convert a model's rank to its place in the pod's list: 1 is first, 0 is not listed."""
    return MAY_GET if place == PERHAPS else PLACES + 1 - place if place else 0


def _inputs(evidence: VerdictEvidence) -> EvaluationInputs:
    """Return the inputs of an evaluation; tentative tenants are already in the rows."""
    return EvaluationInputs(
        request=evidence.request, devices=evidence.devices, policy=evidence.policy, overlay={}
    )


def _device(batch: Batch, assessment: Assessment, at: tuple[int, int], state: str) -> DeviceVerdict:
    telemetry = batch.telemetry
    free = float(assessment.free_bytes[at])
    return DeviceVerdict(
        can_land=bool(assessment.landing.devices[at]),
        state=state,
        utilization_ratio=float(telemetry.utilization[at]) if telemetry.freshness[at] else None,
        memory_used_ratio=float(telemetry.memory_used[at])
        if telemetry.memory_freshness[at]
        else None,
        free_bytes=int(free) if np.isfinite(free) else None,
        freshness=float(telemetry.freshness[at]),
        assumed=int(batch.assumed[at]),
        used=int(batch.used[at]),
        memory_total_bytes=int(telemetry.memory_total_bytes[at]) or None,
        memory_free_bytes=int(telemetry.memory_free_bytes[at])
        if telemetry.memory_freshness[at]
        else None,
        declared_bytes=int(batch.declared_bytes[at]),
        others_bytes=int(telemetry.others_bytes[at]),
    )
