"""Evaluate the nodes of a pool for a pod's request: rejection, score, band and utilization.

Each node is evaluated on its own: its row of the result depends on no other row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from extender.core.decision.assessment import (
    Assessment,
    DeviceRequest,
    DeviceRequests,
    Estimates,
    assess,
)
from extender.core.decision.filtering import Code, Codes, reject
from extender.core.decision.fragmentation import stranded_in_steps
from extender.core.decision.landing import assume, batch_after, closed_slots, count_freed
from extender.core.decision.scoring import KINDS, PERHAPS, PLACES, mean, score, weighs_stranded
from extender.core.devices.gpu_models import is_model, models_in
from extender.core.nodes.seen_requests import NONE_SEEN, SeenRequests
from extender.core.nodes.snapshot import (
    NO_LIMIT,
    NO_PRICE,
    Batch,
    Flags,
    Pool,
    PoolRow,
    Ratios,
    Rows,
    Snapshot,
    Tenant,
    batch_rows,
    replace_rows,
)
from extender.core.policy import Policy, PriceMode
from extender.core.prices import MILLI
from extender.core.request.request import GpuRequest
from extender.core.steps import Steps, finish

_Bands = npt.NDArray[np.int8]
"""Band of each node; int8 because many evaluations are cached."""

Overlay = Mapping[str, tuple[Tenant, ...]]
"""Tentative tenants by node name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Evaluation of every node of a pool for one request; one row per node.

    Attributes:
        codes: the first rejection of the node, `Code.PASSES` without one.
        scores: ratio from 0 to 1.
        bands: likelihood of landing on good devices, a `landing.Band`.
        utilization: mean utilization of the working landing devices, ratio.
    """

    codes: Codes
    scores: Ratios
    bands: _Bands
    utilization: Ratios

    def part(self, rows: slice) -> "Evaluation":
        """Return the evaluation of the given rows only."""
        return Evaluation(
            **{column.name: getattr(self, column.name)[rows] for column in fields(self)}
        )

    def with_rows(self, rows: Sequence[int], others: "Evaluation") -> "Evaluation":
        """Return a copy with the rows of `others` at `rows`."""
        index = np.array(rows, dtype=np.intp)
        return Evaluation(
            **{
                column.name: replace_rows(
                    getattr(self, column.name), index, getattr(others, column.name)
                )
                for column in fields(self)
            }
        )


def model_places(models: Sequence[str], preferred: Sequence[str]) -> Rows:
    """Return the rank of each model in a pod's list: `PLACES` for the first, 0 if unlisted.

    An entry matches models with its words, so `H100` matches `NVIDIA H100 80GB HBM3`. Of a node
    with several models the worst rank counts; if only some are listed, the rank is `PERHAPS`. An
    empty list ranks all models first.

    Example:
        >>> model_places(["", "nvidia a100 sxm4 40gb", "nvidia h100 80gb hbm3"], ["H100", "A100"])
        array([ 0, 15, 16])
    """
    if not preferred:
        return np.full(len(models), PLACES, dtype=np.intp)
    return _places(tuple(models), tuple(preferred))


@lru_cache(maxsize=64)
def _places(models: tuple[str, ...], preferred: tuple[str, ...]) -> Rows:
    """Return the ranks of `model_places`; cached, because pods often prefer the same models."""
    ranks = [[_rank(each, preferred) for each in models_in(model)] for model in models]
    places = np.array([min(each) or min(max(each), PERHAPS) for each in ranks], dtype=np.intp)
    places.flags.writeable = False
    return places


def _rank(model: str, preferred: Sequence[str]) -> int:
    found = (at for at, wanted in enumerate(preferred) if is_model(model, wanted))
    place = next(found, None)
    return 0 if place is None else max(PLACES - place, PERHAPS + 1)


def are_accepted(models: Sequence[str], required: Sequence[str]) -> Flags:
    """Return whether a pod that requires certain models accepts each model; () accepts all.

    Of a node with several models the pod must accept each.

    Example:
        >>> are_accepted(["", "nvidia a2", "nvidia t4", "nvidia a2 | nvidia t4"], ["T4", "L4"])
        array([False, False,  True, False])
    """
    if not required:
        return np.ones(len(models), dtype=np.bool_)
    accepted = (
        all(any(is_model(each, one) for one in required) for each in models_in(model))
        for model in models
    )
    return np.fromiter(accepted, np.bool_, len(models))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRequests:
    """CPU, memory and storage that pods request, as columns: one row per node, or one for all.

    Attributes:
        millicores: requested CPU.
        memory_bytes: requested memory of the node.
        storage_bytes: requested ephemeral storage of the node.
        is_nothing: whether no pod requests any of them.
    """

    millicores: Rows
    memory_bytes: Rows
    storage_bytes: Rows
    is_nothing: bool

    @classmethod
    def of(cls, requests: Sequence[GpuRequest], lengths: Sequence[int]) -> "HostRequests":
        """Concatenate the requests of several pods, each repeated for its number of nodes."""
        requested = [one.host for one in requests]
        columns = np.repeat(np.array(requested, dtype=np.intp).reshape(-1, 3), lengths, axis=0)
        return cls(
            millicores=columns[:, 0],
            memory_bytes=columns[:, 1],
            storage_bytes=columns[:, 2],
            is_nothing=not columns.any(),
        )

    def spare_devices(self, batch: Batch, count: Rows) -> Ratios:
        """Return the number of further devices that each node's CPU, memory and storage allow.

        Each further device is assumed to need as much of them as each device of the pod.
        """
        if self.is_nothing:
            return np.array([np.inf])
        spare = np.full(len(batch), np.inf)
        for free, requested in (
            (batch.free_millicores, self.millicores),
            (batch.free_bytes, self.memory_bytes),
            (batch.free_storage_bytes, self.storage_bytes),
        ):
            if not requested.any():
                continue
            left = np.maximum(free - requested, 0) * count // np.maximum(requested, 1)
            spare = np.where((requested > 0) & (free < NO_LIMIT), np.minimum(spare, left), spare)
        return spare


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Requests of other pods; a placement should leave room for them.

    Attributes:
        seen: the requests seen so far for the resource.
        models: model names by model id.
    """

    seen: SeenRequests = NONE_SEEN
    models: tuple[str, ...] = ()


def serves_host(row: PoolRow, request: GpuRequest) -> bool:
    """Return whether a node has the CPU, memory and storage that a pod requests, if known."""
    return (
        row.free_millicores >= request.millicores
        and row.free_bytes >= request.host_bytes
        and row.free_storage_bytes >= request.storage_bytes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """Requests of pods as columns: one row per node of a batch.

    Attributes:
        strategy: order among nodes of equal certainty, as a number of `scoring.KINDS`.
        requires_idle: whether the pod waits for devices known to be idle.
        model: rank of the node's model in the pod's list, `PLACES` for the first.
        is_wrong_model: whether the pod requires models other than the node's.
        hosts: requests of CPU, memory and storage.
        weighs_price: whether the price of a node counts for the pod.
    """

    devices: DeviceRequests
    strategy: Rows
    requires_idle: Flags
    model: Rows
    is_wrong_model: Flags
    hosts: "HostRequests"
    weighs_price: Flags

    @classmethod
    def of_all(cls, inputs: "EvaluationInputs", models: Sequence[str], batch: Batch) -> "Wants":
        """Return one pod's request for every node of a batch."""
        request = inputs.request
        return cls(
            devices=inputs.devices.columns,
            strategy=np.array([KINDS[request.strategy]]),
            requires_idle=np.array([request.requires_idle]),
            model=model_places(models, request.preferred_models)[batch.model_id],
            is_wrong_model=~are_accepted(models, request.required_models)[batch.model_id],
            hosts=HostRequests.of([request], [1]),
            weighs_price=np.array([not request.names_models]),
        )

    @classmethod
    def joined(
        cls,
        all_inputs: Sequence["EvaluationInputs"],
        models: Sequence[str],
        model_ids: Sequence[Rows],
    ) -> "Wants":
        """Concatenate the requests of several pods, each for its own nodes.

        Args:
            all_inputs: one entry per pod.
            models: model names by model id.
            model_ids: per pod, the model ids of its nodes.
        """
        lengths = list(map(len, model_ids))
        requests = [inputs.request for inputs in all_inputs]

        required = (are_accepted(models, request.required_models) for request in requests)
        preferred = (model_places(models, request.preferred_models) for request in requests)

        def column(values: Iterable[int]) -> Rows:
            return np.repeat(np.fromiter(values, np.intp, len(all_inputs)), lengths)

        return cls(
            devices=DeviceRequests.joined([inputs.devices for inputs in all_inputs], lengths),
            strategy=column(KINDS[request.strategy] for request in requests),
            requires_idle=column(request.requires_idle for request in requests) > 0,
            model=np.concatenate(list(map(np.take, preferred, model_ids))),
            is_wrong_model=~np.concatenate(list(map(np.take, required, model_ids))),
            hosts=HostRequests.of(requests, lengths),
            weighs_price=column(not request.names_models for request in requests) > 0,
        )


def evaluate_batch_in_steps(
    batch: Batch, wants: Wants, policy: Policy, others: Others
) -> Steps[Evaluation]:
    """Evaluate each node of a batch for the pods that request it.

    Args:
        wants: the pods' requests.
        others: requests of other pods; a placement should leave room for them.
    """
    batch = count_freed(batch)
    assessment = assess(batch, wants.devices, estimates(policy))
    lost = yield from stranded_by_in_steps(batch, assessment, wants, others)
    scores, bands = score(
        batch,
        assessment,
        wants.strategy,
        wants.model,
        wants.hosts.spare_devices(batch, wants.devices.count),
        policy.weights,
        cheapness=cheapness(batch, policy, wants.weighs_price),
        stranded=lost,
    )
    return Evaluation(
        codes=reject(
            batch,
            wants.devices,
            assessment,
            requires_idle=wants.requires_idle,
            is_wrong_model=wants.is_wrong_model,
        ),
        scores=scores,
        bands=bands.astype(np.int8),
        utilization=mean(assessment.utilization, assessment.works, assessment.working),
    )


def stranded_by_in_steps(
    batch: Batch, assessment: Assessment, wants: Wants, others: Others
) -> Steps[Ratios | None]:
    """Return how many devices the pods strand, per node; None if that does not count."""
    if not others.seen or not weighs_stranded(batch, wants.strategy):
        return None
    return (
        yield from stranded_in_steps(
            batch,
            others.seen,
            others.models,
            count=wants.devices.count,
            memory_bytes=wants.devices.memory_bytes,
            free_bytes=assessment.free_bytes,
            hosts=wants.hosts,
        )
    )


def cheapness(batch: Batch, policy: Policy, weighs_price: Flags) -> Ratios | float:
    """Return the cheapness of each node: 1 for price 0, 0 for the highest or an unknown price.

    Args:
        policy: the policy with the prices; 0 unless they are preferred.
        weighs_price: whether the price counts for the pod; one per node, or one for all.
    """
    highest = max(policy.prices.entries.values(), default=0.0)
    if policy.prices.mode is not PriceMode.PREFER or not highest:
        return 0.0
    cheap = 1.0 - batch.price / (highest * MILLI)
    known: Ratios = np.where(batch.price == NO_PRICE, 0.0, np.clip(cheap, 0.0, 1.0))
    return np.where(weighs_price, known, 0.0)


def evaluate_for(
    inputs: "EvaluationInputs",
    batch: Batch,
    models: tuple[str, ...],
    seen: SeenRequests = NONE_SEEN,
) -> Evaluation:
    """Evaluate a batch for one pod without a pause; arguments as in `evaluate_for_in_steps`."""
    return finish(evaluate_for_in_steps(inputs, batch, models, seen))


def evaluate_for_in_steps(
    inputs: "EvaluationInputs", batch: Batch, models: tuple[str, ...], seen: SeenRequests
) -> Steps[Evaluation]:
    """Evaluate each node of a batch for one pod.

    Args:
        models: model names by model id.
        seen: requests of pods so far; a placement should leave room for them.
    """
    wants = Wants.of_all(inputs, models, batch)
    others = Others(seen=seen, models=models)
    return (yield from evaluate_batch_in_steps(batch, wants, inputs.policy, others))


def estimates(policy: Policy) -> Estimates:
    """Return the policy's estimates for tenants that the readings do not show yet."""
    return Estimates(utilization=policy.assumed.utilization, mps_share_bytes=policy.mps_share_bytes)


def device_requests(request: GpuRequest) -> tuple[tuple[str, DeviceRequest], ...]:
    """Return the device request per resource."""
    return tuple(
        (
            resource,
            DeviceRequest(
                count=count,
                containers=dict(request.containers).get(resource, ()),
                memory_bytes=float(request.memory_bytes or 0),
                memory_share=request.memory_share,
                thresholds=request.thresholds,
                expected_bytes=np.nan
                if request.expected_bytes is None
                else float(request.expected_bytes),
            ),
        )
        for resource, count in request.resources
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationInputs:
    """Inputs of an evaluation: one pod's request to one pool, and the settings that apply to it.

    Attributes:
        request: the pod's whole request.
        devices: the part for the pool's resource.
        overlay: tentative tenants, without the pod itself.
    """

    request: GpuRequest
    devices: DeviceRequest
    policy: Policy
    overlay: Overlay


def row_with_tenants(row: PoolRow, node: str, overlay: Overlay, is_out: Flags) -> PoolRow:
    """Return a node's row with its tentative tenants added; `is_out` as in `Telemetry`."""
    tenants = overlay.get(node)
    return assume(row, tenants, closed_slots(row, is_out)) if tenants else row


def batch_of(snapshot: Snapshot, pool: Pool, rows: Sequence[tuple[int, Overlay]]) -> Batch:
    """Build a batch of some nodes with their tentative tenants added."""
    is_out = snapshot.telemetry.is_out
    return batch_rows(
        tuple(
            row_with_tenants(pool.rows[at], pool.nodes[at], overlay, is_out) for at, overlay in rows
        ),
        snapshot.telemetry,
        pool.batch.suspicion[np.array([at for at, _ in rows], dtype=np.intp)],
        width=pool.batch.slots.shape[1],
    )


def avoid(
    evaluation: Evaluation, snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs
) -> Evaluation:
    """Return an evaluation in which the nodes that the request avoids lose certainty."""
    avoided = inputs.request.avoided
    rows = [pool.row_of[node] for node in avoided if node in pool.row_of]
    if not rows:
        return evaluation
    batch = batch_of(snapshot, pool, [(at, inputs.overlay) for at in rows])
    batch = add_suspicion(batch, [pool.nodes[at] for at in rows], avoided)
    fresh = evaluate_for(inputs, batch, snapshot.models, pool.seen)
    return evaluation.with_rows(rows, fresh)


def add_suspicion(batch: Batch, nodes: Sequence[str], avoided: Mapping[str, float]) -> Batch:
    """Return a batch whose suspicion includes the nodes' early failures of the pod's owner.

    Args:
        nodes: their names.
        avoided: share of its certainty that a node loses, by name.
    """
    lost = np.array([avoided.get(node, 0.0) for node in nodes])
    return replace(batch, suspicion=1.0 - (1.0 - batch.suspicion) * (1.0 - lost))


def nominate(
    evaluation: Evaluation, snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs
) -> Evaluation:
    """Return an evaluation in which the pod's nominated node counts as if deleted pods had left it.

    Without pods being deleted there the nomination changes nothing. Devices in foreign use before
    these pods came stay in foreign use.
    """
    at = pool.row_of.get(inputs.request.nominated_node)
    if at is None:
        return evaluation
    after = evaluate_after(snapshot, pool, at, inputs)
    if after is None or after.codes[0] not in {Code.PASSES, Code.FOREIGN_USE}:
        return evaluation
    return evaluation.with_rows([at], replace(after, scores=evaluation.scores[[at]]))


def evaluate_after(
    snapshot: Snapshot, pool: Pool, at: int, inputs: EvaluationInputs
) -> Evaluation | None:
    """Evaluate one node as if the pods being deleted there had left; None without such pods.

    Devices that they release count as idle, because they are freed for this pod. If enough other
    whole devices are free, the pod would get those instead; then only pods that have ended are
    removed. If enough shares are free, the device plugin chooses while these pods hold theirs.
    """
    row, tenants = pool.rows[at], inputs.overlay.get(pool.nodes[at], ())
    leaving = row.leaving
    if leaving is None or max(leaving.row.slots, default=0) >= len(snapshot.telemetry.latest):
        return None
    free = row.allocatable - row.held - sum(tenant.count for tenant in tenants)
    if free >= inputs.devices.count:
        used_now = replace(leaving.row, used=row.used)
        leaving = replace(leaving, row=used_now) if row.is_shared else leaving.of_ended(row)
    batch = batch_after(
        leaving, tenants, snapshot.telemetry, pool.batch.suspicion[[at]], is_presumed_idle=True
    )
    return evaluate_for(inputs, batch, snapshot.models, pool.seen)
