"""JSON-ready records of nodes, GPUs and decisions, from the same numbers that decisions use."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice

import msgspec
import numpy as np

from extender.answers.decisions import (
    DeviceAnswer,
    Domain,
    FactorAnswer,
    Group,
    NodeSummary,
    PartAnswer,
    Request,
    VerdictAnswer,
)
from extender.answers.fleet import (
    ForeignProcessAnswer,
    Gpu,
    Node,
    NodeAnswer,
    ResourceCounts,
    SourceAnswer,
    StateCounts,
)
from extender.core.decision.assessment import DeviceRequest, assess
from extender.core.decision.evaluation import estimates
from extender.core.decision.filtering import Code
from extender.core.decision.group_fit import GroupFit
from extender.core.decision.health import ill_health, shown_by
from extender.core.decision.verdicts import SHOWN_STATES, DeviceVerdict, NodeVerdict, shown_codes
from extender.core.devices.gpu_models import model_name
from extender.core.devices.readings import DeviceInfo, ForeignProcess, Signal
from extender.core.nodes.snapshot import PoolRow, Snapshot, batch_rows
from extender.core.quantity import GIB
from extender.core.request.request import GpuRequest
from extender.core.steps import Steps, finish, let_go
from extender.core.untyped import mapping_of, number_of, text_of
from extender.fleet.fleet import Fleet
from extender.fleet.latest_values import MEMORY_SIGNALS
from extender.placement.history import DecisionRecord
from extender.server.json_api import moment
from extender.server.redaction import (
    NO_NAMESPACE,
    OfPod,
    namespace_of,
    of_pod,
    pod_key,
    pod_name,
    redactable,
)

Json = dict[str, object]

PIECE_VERDICTS = 16
"""Verdicts to convert between two yields to the event loop: two milliseconds."""
PIECE_SHORT = 1000
"""Nodes in short form to convert between two yields: one millisecond."""

_OUTSIDE = "; a process outside Kubernetes uses it"
PRODUCT_LABEL = "nvidia.com/gpu.product"
_DRIVER_LABEL = "nvidia.com/cuda.driver-version.full"
"""Labels of gpu-feature-discovery, used if telemetry lacks the value."""


def gpus_of(fleet: Fleet, snapshot: Snapshot, nodes: Iterable[str]) -> dict[str, list[Gpu]]:
    """Return the devices of each node, in the order of `order_of`."""
    by_node: dict[str, list[Gpu]] = {node: [] for node in nodes}
    for pool in snapshot.pools.values():
        here = [node for node in by_node if node in pool.row_of]
        if not here:
            continue
        rows = tuple(pool.rows[pool.row_of[node]] for node in here)
        slots = [slot for row in rows for slot in row.slots]
        low, high = fleet.store.next_hour_between(np.array(slots, dtype=np.intp))
        between = dict(zip(slots, zip(low.tolist(), high.tolist(), strict=True), strict=True))
        batch = batch_rows(rows, snapshot.telemetry, np.zeros(len(rows)), width=1)
        requested = DeviceRequest(count=1, memory_bytes=0.0, thresholds=fleet.policy.thresholds)
        assessment = assess(batch, requested.columns, estimates(fleet.policy))
        states = shown_codes(batch, assessment)
        for index, (node, row) in enumerate(zip(here, rows, strict=True)):
            counted = assessment.peak[index].tolist()
            codes = states[index].tolist()[: len(row.slots)]
            by_node[node].extend(
                _gpu(
                    fleet,
                    snapshot,
                    (node, pool.resource),
                    (row, slot),
                    verdict,
                    between[row.slots[slot]],
                )
                for slot, verdict in enumerate(
                    (SHOWN_STATES[code], peak) for code, peak in zip(codes, counted, strict=False)
                )
            )
    for gpus in by_node.values():
        gpus.sort(key=order_of)
    return by_node


def _gpu(
    fleet: Fleet,
    snapshot: Snapshot,
    where: tuple[str, str],
    at: tuple[PoolRow, int],
    verdict: tuple[str, float],
    between: tuple[float, float],
) -> Gpu:
    """Build the state of one device.

    Args:
        where: node and resource.
        at: the node's row in the resource's pool, and the slot in it.
        verdict: the device's state, and the utilization behind it, including pods just placed on
            it.
        between: interval of the forecast, NaN without a forecast.
    """
    (node, resource), (pool_row, slot), (state, counted) = where, at, verdict
    row = pool_row.slots[slot]
    telemetry, store = snapshot.telemetry, fleet.store
    info = store.info(row) or DeviceInfo(node=node, uuid="")
    fresh = float(telemetry.freshness[row])
    memory_fresh = float(telemetry.memory_freshness[row])
    freshness = _freshness_word(max(fresh, memory_fresh))
    health = ill_health(telemetry, row, lambda other: _name(fleet, other))
    signals = _signals(fleet, snapshot, row)
    has_forecast = fresh > 0 and not math.isnan(between[0])
    activity = signals.get("utilization")
    besides = _OUTSIDE if telemetry.is_foreign[row] and state != "foreign" else ""
    return Gpu(
        node=node,
        resource=resource,
        index=info.index if info.uuid else None,
        uuid=info.uuid,
        gpu_instance_id=info.gpu_instance_id,
        mig_profile=info.mig_profile,
        model=model_name(info.model or fleet.nodes[node].labels.get(PRODUCT_LABEL, "")),
        state=state,
        why=health
        if state in {"unhealthy", "excluded"}
        else _why(fleet, snapshot, row, state, counted) + besides,
        health=health,
        utilization_ratio=float(telemetry.utilization[row]) if fresh else None,
        utilization_latest_ratio=float(telemetry.latest[row]) if fresh else None,
        utilization_next_hour_ratio=float(telemetry.next_hour[row]) if has_forecast else None,
        utilization_next_hour_low_ratio=between[0] if has_forecast else None,
        utilization_next_hour_high_ratio=between[1] if has_forecast else None,
        memory_used_ratio=float(telemetry.memory_used[row]) if memory_fresh else None,
        memory_free_bytes=_whole(float(telemetry.memory_free_bytes[row])) if memory_fresh else None,
        memory_total_bytes=_whole(float(telemetry.memory_total_bytes[row])) or None,
        temperature_celsius=store.value(Signal.TEMPERATURE, row),
        power_watts=store.value(Signal.POWER, row),
        xid=_whole(store.value(Signal.XID, row)),
        freshness=freshness,
        age_seconds=_age(fleet, snapshot, row),
        source=(activity.source if activity else "") or store.source(row) or "none",
        replicas=pool_row.replicas,
        replicas_used=pool_row.used[slot],
        assumed=pool_row.assumed[slot],
        tenants=list(map(pod_key, fleet.tenants_of(row))),
        signals=signals,
        foreign_processes=_foreign_view(fleet.foreign_on(info)),
    )


def _signals(fleet: Fleet, snapshot: Snapshot, row: int) -> dict[str, SourceAnswer]:
    """Return source and age of a device's activity, memory and health readings."""
    causes = snapshot.telemetry.cause
    sources = {
        "utilization": fleet.store.reported_activity(row),
        "memory": fleet.store.reported(MEMORY_SIGNALS, row),
        "health": fleet.store.reported(*shown_by(int(causes[row]), row, causes)),
    }
    return {
        name: SourceAnswer(source=one[0], age_seconds=max(snapshot.at - one[1], 0.0))
        for name, one in sources.items()
        if one is not None
    }


def _whole(value: float | None) -> int | None:
    """Convert a value to an integer, None if it is missing or not finite."""
    return int(value) if value is not None and math.isfinite(value) else None


def _freshness_word(freshness: float) -> str:
    """Convert a freshness from 0 to 1 to a word: fresh, stale or missing.

    Example:
        >>> _freshness_word(0.4)
        'stale'
    """
    if freshness >= 1.0:
        return "fresh"
    return "stale" if freshness > 0 else "missing"


def _why(fleet: Fleet, snapshot: Snapshot, row: int, state: str, counted: float) -> str:
    """Explain a device's state in one sentence; mark load that is expected and not measured."""
    telemetry, limits = snapshot.telemetry, fleet.policy.thresholds
    used, measured = float(telemetry.memory_used[row]), float(telemetry.peak[row])
    if state == "foreign":
        gib = used * float(telemetry.memory_total_bytes[row]) / GIB
        return f"{gib:.1f} GiB and {counted:.0%} in use, and no pod holds it"
    busy = f"{counted:.0%}"
    if counted > measured:
        busy += f" ({measured:.0%} measured, the rest expected of new pods)"
    if state == "idle":
        return (
            f"utilization {busy} is below {limits.utilization:.0%}, "
            f"memory {used:.0%} is below {limits.memory:.0%}"
        )
    age = _age(fleet, snapshot, row)
    if state in {"stale", "unknown"}:
        return _why_unsure(state, float(telemetry.freshness[row]), age)
    if counted >= limits.utilization:
        return f"utilization {busy} is not below {limits.utilization:.0%}"
    if used >= limits.memory:
        return f"memory {used:.0%} is not below {limits.memory:.0%}"
    expected = (
        f"memory that its pods request or are expected to use is not below {limits.memory:.0%}"
    )
    return f"{expected}, {used:.0%} is measured"


def _name(fleet: Fleet, row: int) -> str:
    """Return a device's name in messages about other devices of its node."""
    info = fleet.store.info(row)
    return "another GPU" if info is None or info.index is None else f"GPU {info.index}"


def _age(fleet: Fleet, snapshot: Snapshot, row: int) -> float | None:
    """Return the age of a device's newest reading, None if there is none."""
    measured_at = fleet.store.measured_at(row)
    return None if measured_at is None else max(snapshot.at - measured_at, 0.0)


def _why_unsure(state: str, freshness: float, age: float | None) -> str:
    """Explain why a device is stale or unknown."""
    if age is None:
        return "no source has shown it"
    if state == "stale":
        if freshness >= 1.0:
            return "its last reading of memory is stale"
        return f"its last reading is stale: it was measured {age:.0f} s ago"
    if freshness > 0:
        return "its memory in use is unknown"
    return f"its last reading is too old, or older than its tenants: {age:.0f} s"


def node_views(
    fleet: Fleet, snapshot: Snapshot, names: Iterable[str]
) -> list[tuple[Node, list[Gpu]]]:
    """Build the records of nodes, in their order, and of their devices."""
    overlays = fleet.ledger.overlays(without="")
    views = []
    for name, gpus in gpus_of(fleet, snapshot, names).items():
        assumed = {
            resource: sum(tenant.count for tenant in overlay.get(name, ()))
            for resource, overlay in overlays.items()
        }
        views.append((_node_view(fleet, snapshot, name, gpus, assumed), gpus))
    return views


def node_with_gpus(fleet: Fleet, snapshot: Snapshot, name: str) -> NodeAnswer:
    """Build the record of one node with its devices."""
    ((node, gpus),) = node_views(fleet, snapshot, [name])
    return NodeAnswer(**msgspec.structs.asdict(node), gpus=gpus)


def _node_view(
    fleet: Fleet, snapshot: Snapshot, name: str, gpus: list[Gpu], assumed: Mapping[str, int]
) -> Node:
    record = fleet.nodes[name]
    whole, instances = _counts(gpus)
    return Node(
        name=name,
        model=next((gpu.model for gpu in gpus if gpu.model), ""),
        driver_version=_driver_version(fleet, name),
        is_ready=record.is_ready,
        is_unschedulable=record.is_unschedulable,
        resources={
            resource: ResourceCounts(
                capacity=record.capacity.get(resource, 0),
                allocatable=record.allocatable.get(resource, 0),
                held=pool.rows[pool.row_of[name]].held,
                assumed=assumed.get(resource, 0),
            )
            for resource, pool in sorted(snapshot.pools.items())
            if name in pool.row_of
        },
        gpu_states=whole,
        mig_states=instances,
        utilization_mean_ratio=_mean([gpu.utilization_ratio for gpu in gpus]),
        memory_used_mean_ratio=_mean([gpu.memory_used_ratio for gpu in gpus]),
        early_failures=fleet.early_failures(name),
        pods=[pod_key(key) for key in sorted(pod.key for pod in fleet.pods_on(name))],
    )


def _driver_version(fleet: Fleet, name: str) -> str:
    """Return a node's driver version from telemetry, else from its labels."""
    infos = (fleet.store.info(row) for row in fleet.store.rows_of_node(name))
    versions = {info.driver_version for info in infos if info is not None and info.driver_version}
    label = fleet.nodes[name].labels.get(_DRIVER_LABEL, "")
    return ", ".join(sorted(versions)) or label


def _mean(values: list[float | None]) -> float | None:
    """Return the mean of the known values, None if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def decision_view(record: DecisionRecord, *, brief: bool) -> Json:
    """Build a decision's JSON record; the full form has all verdicts and explains the best ones."""
    return finish(decision_in_steps(record, brief=brief))


def decision_in_steps(record: DecisionRecord, *, brief: bool) -> Steps[Json]:
    """Build a decision's record in steps, because the full form takes long."""
    decision, pod = record.decision, record.pod
    names, wishes = decision.candidates, request_view(record.request)
    # A dictionary, not a `DecisionAnswer`: it is joined with decisions of other replicas, whose
    # long fields are passed on undecoded.
    view: Json = {
        "number": record.number,
        "at": moment(record.at),
        "verb": record.verb,
        "pod": pod_name(pod.namespace, pod.name),
        "uid": of_pod(pod.namespace, pod.uid),
        # Annotations are visible only to callers who may read the pod.
        "request": OfPod(pod.namespace, wishes, {"resources": wishes.resources}),
        "candidates": len(names),
        "feasible": decision.feasible,
        "node": decision.best,
        "runner_up": names[decision.order[1]] if len(decision.order) > 1 else None,
        "bound_node": record.bound_node or None,
        "is_followed": record.bound_node == decision.best if record.bound_node else None,
        "is_shadow": record.is_shadow,
        "snapshot": record.snapshot_version,
        "duration_seconds": record.seconds,
        "group": decision.group and of_pod(pod.namespace, group_view(decision.group)),
    }
    if brief:
        return view
    details = yield from record.details_in_steps()
    explained: list[VerdictAnswer] = []
    for verdict in details:
        explained.append(verdict_view(verdict))
        if len(explained) % PIECE_VERDICTS == 0:
            yield
    yield from let_go(details)
    nodes: Json = {}
    texts = {int(code): code.text or None for code in Code}
    rows = zip(names, decision.scores.tolist(), decision.codes.tolist(), strict=True)
    while some := list(islice(rows, PIECE_SHORT)):
        yield
        nodes |= {
            name: NodeSummary(score=round(score, 7), rejection=texts[code])
            for name, score, code in some
        }
    return view | {"explained": explained, "nodes": nodes}


def request_view(request: GpuRequest) -> Request:
    """Build the record of a pod's request."""
    return Request(
        resources=dict(request.resources),
        gpu_memory_bytes=request.memory_bytes,
        gpu_memory_share=request.memory_share or None,
        gpu_memory_from=request.memory_source or None,
        require_idle=request.requires_idle,
        max_utilization_ratio=request.thresholds.utilization,
        max_memory_ratio=request.thresholds.memory,
        strategy=request.strategy.value,
        prefer_models=list(request.preferred_models),
        require_models=list(request.required_models),
        targets=list(map(str, request.targets)),
        target_policy=request.target_policy.value,
    )


def group_view(group: GroupFit) -> Group:
    """Build the record of a pod's group: its size, its pods' nodes, and room for the rest."""
    return Group(
        name=group.name,
        size=group.size,
        placed=dict(sorted(group.placed.items())),
        rest=group.rest,
        fitting=[Domain(**asdict(domain)) for domain in group.fitting],
        too_few=group.too_few,
    )


def veiled(view: Mapping[str, object]) -> Json:
    """Wrap the pod's data in another replica's decision, so that it is redacted for each caller."""
    namespace = namespace_of(text_of(view.get("pod")))
    request = mapping_of(view.get("request"))
    return dict(view) | {
        "pod": pod_key(text_of(view.get("pod"))),
        "uid": of_pod(namespace, view.get("uid")),
        "request": OfPod(namespace, dict(request), {"resources": request.get("resources")}),
        "group": OfPod(namespace, view.get("group")),
    }


def verdict_view(verdict: NodeVerdict) -> VerdictAnswer:
    """Build the record of a node's verdict with its devices."""
    return VerdictAnswer(
        node=verdict.node,
        resource=verdict.resource,
        rejection=verdict.rejection or None,
        score=verdict.score,
        landing=verdict.landing,
        idle=verdict.idle,
        needed=verdict.needed,
        taken=verdict.taken,
        chance=verdict.chance,
        is_agreed=verdict.is_agreed,
        suspicion=verdict.suspicion,
        model=model_name(verdict.model),
        devices=[_device_view(device) for device in verdict.devices],
        parts=[
            PartAnswer(name=part.name, share=part.share, value=part.value, adds=part.adds)
            for part in verdict.parts
        ],
        factors=[
            FactorAnswer(name=factor.name, value=factor.value, keeps=factor.keeps)
            for factor in verdict.factors
        ],
        is_late=verdict.is_late,
        band=verdict.band,
        reason=verdict.reason,
    )


def _device_view(device: DeviceVerdict) -> DeviceAnswer:
    """Build the record of a device as the pod's decision saw it, without its internal row."""
    return DeviceAnswer(
        can_land=device.can_land,
        state=device.state,
        utilization_ratio=device.utilization_ratio,
        memory_used_ratio=device.memory_used_ratio,
        free_bytes=device.free_bytes,
        freshness=_freshness_word(device.freshness),
        assumed=device.assumed,
        used=device.used,
        memory_total_bytes=device.memory_total_bytes,
        memory_free_bytes=device.memory_free_bytes,
        declared_bytes=device.declared_bytes,
        others_bytes=device.others_bytes,
        index=device.index,
        uuid=device.uuid,
        gpu_instance_id=device.gpu_instance_id,
        source=device.source or "none",
        age_seconds=device.age_seconds,
        health=device.health,
        temperature_celsius=device.temperature_celsius,
        memory_temperature_celsius=device.memory_temperature_celsius,
        throttling=device.throttling,
        signals={
            name: SourceAnswer(
                source=origin.source, age_seconds=origin.age_seconds, signal=origin.signal
            )
            for name, origin in device.signals.items()
        },
    )


def _foreign_view(processes: Sequence[ForeignProcess]) -> list[ForeignProcessAnswer]:
    """Return processes for an answer, redacted: a process outside Kubernetes is in no namespace."""
    views = [
        ForeignProcessAnswer(
            pid=one.pid,
            name=one.name,
            memory_bytes=one.memory_bytes,
            started_at=None if one.started_at is None else moment(one.started_at),
            pod=one.pod,
            container=one.container,
        )
        for one in processes
    ]
    return redactable(NO_NAMESPACE, views, []) if views else views


def _counts(gpus: Iterable[Gpu]) -> tuple[StateCounts, StateCounts]:
    """Count GPUs, and MIG instances, by state: each device once. A stale device is unknown."""
    whole, instances = StateCounts(), StateCounts()
    for gpu in gpus:
        kind = "unknown" if gpu.state == "stale" else gpu.state
        if kind == "idle" and gpu.replicas_used:
            kind = "held_idle"
        found = instances if gpu.mig_profile else whole
        setattr(found, kind, getattr(found, kind) + 1)
    return whole, instances


def order_of(device: Gpu | DeviceInfo) -> tuple[float, str, float]:
    """Return a device's sort key: by card index, UUID, then MIG instance."""
    instance = number_of(device.gpu_instance_id)
    return (
        device.index if device.index is not None and device.uuid else math.inf,
        device.uuid,
        -math.inf if instance is None else instance,
    )
