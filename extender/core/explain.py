"""Why a node got its verdict: the same columns that the decision was made from, as records."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from extender.core.assessment import UNKNOWN, Ask, Assessment, assess
from extender.core.batches import take_batch, with_rows
from extender.core.causes import blamed_siblings, ill_health
from extender.core.certainty import Band, bands
from extender.core.evaluation import HostAsks, Question, estimates, evaluate_for, model_places
from extender.core.filtering import Code
from extender.core.landing import count_freed
from extender.core.parts import Breakdown, Factor, Part, break_down
from extender.core.policy import Policy
from extender.core.reasons import NOMINATED, Grounds, reason
from extender.core.request import GpuRequest
from extender.core.scoring import PLACES, free_after, idle_devices, mean, penalty
from extender.core.snapshot import Batch, Pool, Ratios, Rows, Snapshot
from extender.core.standing import avoided_in, batch_under, evaluate_after


@dataclass(frozen=True, slots=True)
class Told:
    """Who told something of a device.

    Attributes:
        source: its name.
        age_seconds: how long before the decision it was measured.
        signal: which of several it was that counted, by name; "" where there is only one.
    """

    source: str
    age_seconds: float
    signal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceVerdict:
    """One device as a pod sees it.

    Attributes:
        row: its row in the telemetry.
        can_land: the kubelet could hand it to the pod.
        state: idle, busy, unknown, unhealthy or foreign.
        utilization_ratio: as it counted, None where unknown.
        memory_used_ratio: likewise.
        free_bytes: room for the pod, None where unknown.
        freshness: of the activity, 1 fresh to 0 missing.
        assumed: tenants that the readings do not show.
        used: replicas in use.
        memory_total_bytes: size, None where unknown.
        memory_free_bytes: measured free, likewise.
        declared_bytes: what tenants of a shared device declared, in use or not.
        others_bytes: what was last seen in use by processes and pods that declared nothing.
        index: the source's index of the card on its node, None where it does not say.
        uuid: UUID of the card, "" where no source has shown it.
        gpu_instance_id: "" for a whole card.
        source: who measured its activity, "" where nobody did.
        age_seconds: how long ago that was, None likewise.
        health: what speaks against its health and what that means, "" where nothing does.
        temperature_celsius: None where unknown.
        memory_temperature_celsius: likewise.
        throttling: why its clocks are held back, "" where they are not, None where unknown.
        signals: who told activity ("utilization", with the signal that said most last), "memory",
            "temperature", "throttling", and, where something speaks against its health and a
            reading shows it, "health".
    """

    row: int
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
    declared_bytes: int = 0
    others_bytes: int = 0
    index: int | None = None
    uuid: str = ""
    gpu_instance_id: str = ""
    source: str = ""
    age_seconds: float | None = None
    health: str = ""
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    throttling: str | None = None
    signals: Mapping[str, Told] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeScore:
    """What one node is worth to a pod.

    Attributes:
        node: its name.
        rejection: the reason against it, "" where it passes.
        score: 0 to 1, full precision.
        parts: what the score is the sum of ...
        factors: ... and what takes its share of the certainty.
        reason: why it ranks where it does, in words; "" where it does not pass.
    """

    node: str
    rejection: str = ""
    score: float
    parts: tuple[Part, ...] = ()
    factors: tuple[Factor, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict(NodeScore):
    """One node as a pod sees it.

    Attributes:
        resource: the resource that was asked for.
        landing: devices that the pod could land on.
        idle: of those, known to suit.
        needed: distinct devices that the pod gets.
        taken: of those, held by pods although nobody knows which.
        chance: that every device which the pod gets suits.
        band: whether that makes it likely, unknown or unlikely.
        is_agreed: the device-to-pod mapping and the API's count agree.
        suspicion: share of the certainty that early failures cost.
        model: the devices' model, "" where unknown.
        devices: each device.
        is_late: it is the verdict at the pod's binding: what the decision was made from was not
            there any more.
    """

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


STATES = ("unhealthy", "foreign", "idle", "busy", "unknown")
"""States of a device, the gravest first."""


def device_states(batch: Batch, assessment: Assessment, *, multi: bool = False) -> list[list[str]]:
    """Return the state of each device in words, by node and slot."""
    codes = state_codes(batch, assessment, multi=multi).tolist()
    return [[STATES[code] for code in row] for row in codes]


def count_states(batch: Batch, assessment: Assessment) -> Mapping[str, int]:
    """Return how many devices of a batch are in each state."""
    codes = state_codes(batch, assessment, multi=False)[batch.present]
    counts = np.bincount(codes, minlength=len(STATES)).tolist()
    return dict(zip(STATES, counts, strict=True))


def state_codes(batch: Batch, assessment: Assessment, *, multi: bool = False) -> Rows:
    """Return the state of each device, as its place in `STATES`."""
    excluded = batch.telemetry.is_excluded_multi if multi else batch.telemetry.is_excluded
    idle_chance = assessment.idle_chance
    is_foreign = batch.telemetry.is_foreign & ~batch.is_shared[:, None]  # there it is load
    return np.select(
        [excluded, is_foreign, idle_chance >= 1.0, idle_chance < UNKNOWN],
        [0, 1, 2, 3],
        default=4,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the verdict on some nodes was made from: kept as columns, put in words when asked for.

    Attributes:
        nodes: the nodes.
        batch: their rows with the assumed tenants on them, as they were decided about.
        resource: the resource that was asked for.
        ask: what was asked of it.
        request: the pod's whole request.
        policy: the settings.
        models: model names by model id.
        siblings: what speaks against the devices that the verdict on another blames, by row.
        promised: the node that the pod is nominated to, where it would do once the pods are gone
            that are being deleted there; else "".
    """

    nodes: tuple[str, ...]
    batch: Batch
    resource: str
    ask: Ask
    request: GpuRequest
    policy: Policy
    models: tuple[str, ...]
    siblings: Mapping[int, int]
    promised: str = ""


def gather(snapshot: Snapshot, pool: Pool, question: Question, nodes: Iterable[str]) -> Evidence:
    """Keep what the verdict on some nodes is made from.

    Args:
        snapshot: the snapshot that the decision was made from.
        pool: of the resource that was asked for.
        question: what the pod asked of it.
        nodes: the nodes; those that are not in the pool are left out.
    """
    rows = [pool.row_of[node] for node in nodes if node in pool.row_of]
    batch = take_batch(pool.batch, np.array(rows, dtype=np.intp))
    late, places = set(pool.late), range(len(rows))
    others = [at for at in places if rows[at] in late or pool.nodes[rows[at]] in question.overlay]
    if others:
        at_rows = [(rows[at], question.overlay) for at in others]
        batch = with_rows(batch, others, batch_under(snapshot, pool, at_rows))
    if question.request.avoided:
        named = [pool.nodes[row] for row in rows]
        batch = avoided_in(batch, named, question.request.avoided)
    return Evidence(
        nodes=tuple(pool.nodes[row] for row in rows),
        batch=batch,
        resource=pool.resource,
        ask=question.ask,
        request=question.request,
        policy=question.policy,
        models=snapshot.models,
        siblings=blamed_siblings(batch.telemetry.cause, snapshot.telemetry.cause),
        promised=_promised(snapshot, pool, question),
    )


def _promised(snapshot: Snapshot, pool: Pool, question: Question) -> str:
    """Return the nominated node where the pods that leave it make it do, else ""."""
    node = question.request.nominated_node
    if node not in pool.row_of:
        return ""
    after = evaluate_after(snapshot, pool, pool.row_of[node], question)
    return "" if after is None or after.codes[0] != Code.PASSES else node


def only(evidence: Evidence, *nodes: str) -> Evidence:
    """Return what concerns some of the nodes: that is in words in a moment."""
    rows = np.array([evidence.nodes.index(node) for node in nodes], dtype=np.intp)
    return replace(evidence, nodes=nodes, batch=take_batch(evidence.batch, rows))


def part_of(evidence: Evidence, start: int, stop: int) -> Evidence:
    """Return what concerns the nodes from one place to another, the last not among them."""
    nodes = evidence.nodes[start:stop]
    rows = np.arange(start, start + len(nodes), dtype=np.intp)
    return replace(evidence, nodes=nodes, batch=take_batch(evidence.batch, rows))


def explain(evidence: Evidence) -> tuple[NodeVerdict, ...]:
    """Put the verdict on each node of the evidence in words."""
    if not evidence.nodes:
        return ()
    evidence = replace(evidence, batch=count_freed(evidence.batch))
    batch, models = evidence.batch, evidence.models
    assessment = assess(batch, evidence.ask.columns, estimates(evidence.policy))
    question = _question(evidence)
    evaluation = evaluate_for(question, batch, models)
    states = device_states(batch, assessment, multi=evidence.ask.count > 1)
    made_of, why = _break_down(evidence, assessment), _reasons(evidence, assessment)
    return tuple(
        NodeVerdict(
            node=node,
            resource=evidence.resource,
            rejection="" if node == evidence.promised else Code(int(evaluation.codes[index])).text,
            score=float(evaluation.scores[index]),
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


def _reason(evidence: Evidence, node: str, why: str, *, refused: bool) -> str:
    """Return why a node ranks where it does, "" where it does not pass."""
    if not refused:
        return why
    return NOMINATED if node == evidence.promised else ""


def scores_of(evidence: Evidence) -> tuple[NodeScore, ...]:
    """Return what each node of the evidence is worth, in a fraction of the time of `explain`.

    Args:
        evidence: of nodes that passed.
    """
    if not evidence.nodes:
        return ()
    evidence = replace(evidence, batch=count_freed(evidence.batch))
    assessment = assess(evidence.batch, evidence.ask.columns, estimates(evidence.policy))
    made_of, why = _break_down(evidence, assessment), _reasons(evidence, assessment)
    return tuple(
        NodeScore(node=node, score=of.score, parts=of.parts, factors=of.factors, reason=told)
        for node, of, told in zip(evidence.nodes, made_of, why, strict=True)
    )


def _break_down(evidence: Evidence, assessment: Assessment) -> tuple[Breakdown, ...]:
    """Return what the score of each node is made of."""
    return break_down(
        evidence.batch,
        assessment,
        _places(evidence),
        _spare(evidence),
        strategy=evidence.request.strategy,
        weights=evidence.policy.weights,
    )


def _places(evidence: Evidence) -> Rows | None:
    """Return the place of each node's model in the pod's order, None where it has none."""
    preferred = evidence.request.preferred_models
    return model_places(evidence.models, preferred)[evidence.batch.model_id] if preferred else None


def _spare(evidence: Evidence) -> Ratios:
    """Return for how many further devices each node has CPU and memory."""
    hosts = HostAsks.of([evidence.request], [1])
    return hosts.spare_devices(evidence.batch, evidence.ask.columns.count)


def _reasons(evidence: Evidence, assessment: Assessment) -> list[str]:
    """Return why each node ranks where it does."""
    batch, landing, request = evidence.batch, assessment.landing, evidence.request
    band = bands(assessment.chance, landing.needed)
    left = np.minimum(free_after(batch, assessment), _spare(evidence))
    idle, unfit, places = idle_devices(assessment), penalty(batch, assessment), _places(evidence)
    devices, works, working = landing.devices, assessment.works, assessment.working
    used = mean(1.0 - assessment.headroom, works, working)
    busy = mean(assessment.utilization, works, working)
    chances = np.where(assessment.holds, assessment.idle_chance, 0.0)
    least = np.where(devices, chances, 1.0).min(axis=1, initial=1.0)
    telemetry = batch.telemetry
    seen = telemetry.freshness + telemetry.memory_freshness + telemetry.presumed
    is_unknown = np.where(devices, seen, 0.0).sum(axis=1) + (~assessment.fits & devices).sum(axis=1)
    return [
        reason(
            Grounds(
                band=Band(int(band[at])),
                chance=float(assessment.chance[at]),
                least=float(least[at]),
                is_sure=bool(assessment.is_sure[at]),
                is_unknown=not is_unknown[at],
                needed=int(landing.needed[at]),
                room=float(assessment.room[at]),
                unhealthy=float(unfit[at]),
                suspicion=float(batch.suspicion[at]),
                place=None if places is None else _place_in_words(int(places[at])),
                strategy=request.strategy,
                is_shared=bool(batch.is_shared[at]),
                allocatable=int(batch.allocatable[at]),
                left=int(left[at]),
                idle=int(idle[at]),
                utilization=float(busy[at]),
                memory_used=float(used[at]),
            )
        )
        for at in range(len(batch))
    ]


def _place_in_words(place: int) -> int:
    """Return a place as people count: 1 for the first, 0 for none."""
    return PLACES + 1 - place if place else 0


def _question(evidence: Evidence) -> Question:
    """Return what the pod asked; tentative tenants are in the rows."""
    return Question(request=evidence.request, ask=evidence.ask, policy=evidence.policy, overlay={})


def _device(batch: Batch, assessment: Assessment, at: tuple[int, int], state: str) -> DeviceVerdict:
    """Return the verdict on one device."""
    telemetry = batch.telemetry
    free = float(assessment.free_bytes[at])
    return DeviceVerdict(
        row=int(batch.slots[at]),
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
