"""Why a node got its verdict: the same columns that the decision was made from, as records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from extender.core.assessment import Ask, Assessment, assess
from extender.core.causes import ill_health
from extender.core.decision import estimates, evaluate_batch, model_places
from extender.core.filtering import Code
from extender.core.policy import Policy
from extender.core.request import GpuRequest
from extender.core.snapshot import Batch, PoolRow, Rows, Snapshot, batch_rows


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
        index: the source's index of the card on its node, None where it does not say.
        uuid: UUID of the card, "" where no source has shown it.
        gpu_instance_id: "" for a whole card.
        source: who measured it, "" where nobody did.
        age_seconds: how long ago that was, None likewise.
        health: what speaks against its health and what that means, "" where nothing does.
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
    index: int | None = None
    uuid: str = ""
    gpu_instance_id: str = ""
    source: str = ""
    age_seconds: float | None = None
    health: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """One node as a pod sees it.

    Attributes:
        node: its name.
        resource: the resource that was asked for.
        rejection: the reason against it, "" where it passes.
        score: 0 to 1, full precision.
        landing: devices that the pod could land on.
        idle: of those, known to suit.
        needed: distinct devices that the pod gets.
        taken: of those, held by pods although nobody knows which.
        chance: that every device which the pod gets suits.
        is_agreed: the device-to-pod mapping and the API's count agree.
        suspicion: share of the score that early failures cost.
        model: the devices' model, "" where unknown.
        devices: each device.
    """

    node: str
    resource: str
    rejection: str
    score: float
    landing: int
    idle: int
    needed: int
    taken: int
    chance: float
    is_agreed: bool
    suspicion: float
    model: str
    devices: tuple[DeviceVerdict, ...]


UNKNOWN = 0.5
"""Chance to be idle of a device of which nothing is known."""


STATES = ("unhealthy", "foreign", "idle", "busy", "unknown")
"""States of a device, the gravest first."""


def device_states(batch: Batch, assessment: Assessment, *, multi: bool = False) -> list[list[str]]:
    """Return the state of each device in words, by node and slot."""
    codes = _state_codes(batch, assessment, multi=multi).tolist()
    return [[STATES[code] for code in row] for row in codes]


def count_states(batch: Batch, assessment: Assessment) -> Mapping[str, int]:
    """Return how many devices of a batch are in each state."""
    codes = _state_codes(batch, assessment, multi=False)[batch.present]
    counts = np.bincount(codes, minlength=len(STATES)).tolist()
    return dict(zip(STATES, counts, strict=True))


def _state_codes(batch: Batch, assessment: Assessment, *, multi: bool) -> Rows:
    """Return the state of each device, as its place in `STATES`."""
    excluded = batch.telemetry.is_excluded_multi if multi else batch.telemetry.is_excluded
    idle_chance = assessment.idle_chance
    return np.select(
        [excluded, batch.telemetry.is_foreign, idle_chance >= 1.0, idle_chance < UNKNOWN],
        [0, 1, 2, 3],
        default=4,
    )


def explain(
    snapshot: Snapshot,
    resource: str,
    ask: Ask,
    request: GpuRequest,
    policy: Policy,
    rows: Sequence[tuple[str, PoolRow, float]],
) -> tuple[NodeVerdict, ...]:
    """Explain the verdict on some nodes.

    Args:
        snapshot: the snapshot that the decision was made from.
        resource: the resource that was asked for.
        ask: what was asked of it.
        request: the pod's whole request.
        policy: the settings.
        rows: (node, row with assumed tenants on it, suspicion).
    """
    if not rows:
        return ()
    suspicions = np.array([suspicion for _, _, suspicion in rows])
    batch = batch_rows(tuple(row for _, row, _ in rows), snapshot.telemetry, suspicions, width=1)
    assessment = assess(batch, ask, estimates(policy))
    nominated = np.array([node == request.nominated_node for node, _, _ in rows])
    places = model_places(snapshot.models, request.preferred_models)
    evaluation = evaluate_batch(batch, request, ask, policy, places, nominated)
    states = device_states(batch, assessment, multi=ask.count > 1)
    return tuple(
        NodeVerdict(
            node=node,
            resource=resource,
            rejection=Code(int(evaluation.codes[index])).text,
            score=float(evaluation.scores[index]),
            landing=int(assessment.landing.size[index]),
            idle=int(assessment.idle[index]),
            needed=int(assessment.landing.needed[index]),
            taken=int(assessment.landing.taken[index]),
            chance=float(assessment.chance[index]),
            is_agreed=row.is_agreed,
            suspicion=suspicion,
            model=snapshot.models[row.model_id],
            devices=tuple(
                replace(
                    _device(batch, assessment, (index, slot), states[index][slot]),
                    health=ill_health(snapshot.telemetry, device),
                )
                for slot, device in enumerate(row.slots)
            ),
        )
        for index, (node, row, suspicion) in enumerate(rows)
    )


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
    )
