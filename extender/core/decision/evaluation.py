"""Evaluate the nodes of a pool for a pod's request: rejection, score, band and utilization."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from extender.core.decision.assessment import DeviceRequest, DeviceRequests, Estimates, assess
from extender.core.decision.filtering import Codes, reject
from extender.core.decision.landing import count_freed
from extender.core.decision.scoring import KINDS, PLACES, mean, score
from extender.core.devices.gpu_models import normalize_model
from extender.core.nodes.snapshot import (
    NO_LIMIT,
    Batch,
    Flags,
    Ratios,
    Rows,
    Tenant,
)
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest

Bands = npt.NDArray[np.int8]
"""Band of each node; int8 because many evaluations are cached."""

Overlay = Mapping[str, tuple[Tenant, ...]]
"""Tentative tenants by node name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Evaluation of every node of a pool for one request; one row per node.

    Attributes:
        codes: the first rejection of the node, `Code.PASSES` without one.
        scores: ratio from 0 to 1.
        bands: likelihood of landing on good devices, a `certainty.Band`.
        utilization: mean utilization of the working landing devices, ratio.
    """

    codes: Codes
    scores: Ratios
    bands: Bands
    utilization: Ratios


def model_places(models: Sequence[str], preferred: Sequence[str]) -> Rows:
    """Return the rank of each model in a pod's list: `PLACES` for the first, 0 if unlisted.

    An entry matches models that contain its words, so `H100` matches `NVIDIA H100 80GB HBM3`. An
    empty list ranks all models first.

    Example:
        >>> model_places(["", "nvidia a100 sxm4 40gb", "nvidia h100 80gb hbm3"], ["H100", "A100"])
        array([ 0, 15, 16])
    """
    if not preferred:
        return np.full(len(models), PLACES, dtype=np.intp)
    places = [0] * len(models)
    for place, preference in enumerate(preferred):
        words = f" {normalize_model(preference)} "
        for model_id, model in enumerate(models):
            if not places[model_id] and words in f" {model} ":
                places[model_id] = max(PLACES - place, 1)
    return np.array(places, dtype=np.intp)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAsks:
    """CPU and memory requests of pods as columns: one row per node, or one row for all nodes.

    Attributes:
        millicores: requested CPU.
        memory_bytes: requested memory of the node.
        is_nothing: whether no pod requests CPU or memory.
    """

    millicores: Rows
    memory_bytes: Rows
    is_nothing: bool

    @classmethod
    def of(cls, requests: Sequence[GpuRequest], lengths: Sequence[int]) -> "HostAsks":
        """Concatenate the requests of several pods, each repeated for its number of nodes."""
        asked = [(request.millicores, request.host_bytes) for request in requests]
        columns = np.repeat(np.array(asked, dtype=np.intp).reshape(-1, 2), lengths, axis=0)
        return cls(
            millicores=columns[:, 0], memory_bytes=columns[:, 1], is_nothing=not columns.any()
        )

    def spare_devices(self, batch: Batch, count: Rows) -> Ratios:
        """Return the number of further devices for which each node has CPU and memory.

        Each further device is assumed to need as much CPU and memory as each device of the pod.
        """
        if self.is_nothing:
            return np.array([np.inf])
        spare = np.full(len(batch), np.inf)
        for free, asked in (
            (batch.free_millicores, self.millicores),
            (batch.free_bytes, self.memory_bytes),
        ):
            left = np.maximum(free - asked, 0) * count // np.maximum(asked, 1)
            spare = np.where((asked > 0) & (free < NO_LIMIT), np.minimum(spare, left), spare)
        return spare


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """Requests of pods as columns: one row per node of a batch.

    Attributes:
        asks: device requests.
        strategy: order among nodes of equal certainty, as a number of `scoring.KINDS`.
        requires_idle: whether the pod waits for devices known to be idle.
        model: rank of the node's model in the pod's list, `PLACES` for the first.
        is_wrong_model: whether the node's model is none that the pod requires.
        hosts: CPU and memory requests.
    """

    asks: DeviceRequests
    strategy: Rows
    requires_idle: Flags
    model: Rows
    is_wrong_model: Flags
    hosts: "HostAsks"

    @classmethod
    def of_all(cls, question: "EvaluationRequest", models: Sequence[str], batch: Batch) -> "Wants":
        """Return one pod's request for every node of a batch."""
        request = question.request
        return cls(
            asks=question.ask.columns,
            strategy=np.array([KINDS[request.strategy]]),
            requires_idle=np.array([request.requires_idle]),
            model=model_places(models, request.preferred_models)[batch.model_id],
            is_wrong_model=model_places(models, request.required_models)[batch.model_id] == 0,
            hosts=HostAsks.of([request], [1]),
        )

    @classmethod
    def joined(
        cls,
        questions: Sequence["EvaluationRequest"],
        models: Sequence[str],
        model_ids: Sequence[Rows],
    ) -> "Wants":
        """Concatenate the requests of several pods, each for its own nodes.

        Args:
            questions: one question per pod.
            models: model names by model id.
            model_ids: per pod, the model ids of its nodes.
        """
        lengths = list(map(len, model_ids))
        requests = [question.request for question in questions]

        def places(wanted: Iterable[Sequence[str]]) -> Rows:
            of = (model_places(models, listed) for listed in wanted)
            return np.concatenate([each[ids] for each, ids in zip(of, model_ids, strict=True)])

        def column(values: Iterable[int]) -> Rows:
            return np.repeat(np.fromiter(values, np.intp, len(questions)), lengths)

        return cls(
            asks=DeviceRequests.joined([question.ask for question in questions], lengths),
            strategy=column(KINDS[request.strategy] for request in requests),
            requires_idle=column(request.requires_idle for request in requests) > 0,
            model=places(request.preferred_models for request in requests),
            is_wrong_model=places(request.required_models for request in requests) == 0,
            hosts=HostAsks.of(requests, lengths),
        )


def evaluate_batch(batch: Batch, wants: Wants, policy: Policy) -> Evaluation:
    """Evaluate each node of a batch for the pods that ask for it."""
    batch = count_freed(batch)
    assessment = assess(batch, wants.asks, estimates(policy))
    scores, bands = score(
        batch,
        assessment,
        wants.strategy,
        wants.model,
        wants.hosts.spare_devices(batch, wants.asks.count),
        policy.weights,
    )
    return Evaluation(
        codes=reject(
            batch,
            wants.asks,
            assessment,
            requires_idle=wants.requires_idle,
            is_wrong_model=wants.is_wrong_model,
        ),
        scores=scores,
        bands=bands.astype(np.int8),
        utilization=mean(assessment.utilization, assessment.works, assessment.working),
    )


def evaluate_for(question: "EvaluationRequest", batch: Batch, models: Sequence[str]) -> Evaluation:
    """Evaluate each node of a batch for one pod.

    Args:
        question: the pod's question.
        batch: the nodes.
        models: model names by model id.
    """
    return evaluate_batch(batch, Wants.of_all(question, models, batch), question.policy)


def estimates(policy: Policy) -> Estimates:
    """Return the policy's estimates for tenants that the readings do not show yet."""
    return Estimates(
        utilization=policy.assumed.utilization,
        mps_share_bytes=policy.mps_share_bytes,
    )


def asks(request: GpuRequest) -> tuple[tuple[str, DeviceRequest], ...]:
    """Return the device request per resource."""
    return tuple(
        (
            resource,
            DeviceRequest(
                count=count,
                memory_bytes=float(request.memory_bytes or 0),
                thresholds=request.thresholds,
                expected_bytes=np.nan
                if request.expected_bytes is None
                else float(request.expected_bytes),
            ),
        )
        for resource, count in request.resources
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """One pod's request to one pool.

    Attributes:
        request: the pod's whole request.
        ask: the part for the pool's resource.
        policy: the settings of the decision.
        overlay: tentative tenants, without the pod itself.
    """

    request: GpuRequest
    ask: DeviceRequest
    policy: Policy
    overlay: Overlay
