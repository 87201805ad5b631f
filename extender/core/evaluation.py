"""What nodes are worth to a request."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from extender.core.assessment import Ask, Asks, Estimates, assess
from extender.core.filtering import Codes, reject
from extender.core.landing import count_freed
from extender.core.policy import Policy
from extender.core.request import GpuRequest
from extender.core.scoring import KINDS, PLACES, mean, score
from extender.core.snapshot import NO_LIMIT, Batch, Flags, Ratios, Rows, Tenant

Bands = npt.NDArray[np.int8]
"""Bands of nodes: many evaluations are kept, and this makes them small."""

Overlay = Mapping[str, tuple[Tenant, ...]]
"""Tentative tenants by node name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What every node of a pool is worth to one request; one row per node.

    Attributes:
        codes: the first reason against the node, `Code.PASSES` where there is none.
        scores: ratio from 0 to 1.
        bands: whether the pod will land on good devices, as `certainty.Band` has it.
        utilization: mean ratio of the landing devices that work.
    """

    codes: Codes
    scores: Ratios
    bands: Bands
    utilization: Ratios


def model_places(models: Sequence[str], preferred: Sequence[str]) -> Rows:
    """Return by model id its place in the pod's list: `PLACES` for the first, 0 for the unnamed.

    A preference matches a model that contains it as a word, so `H100` is `NVIDIA H100 80GB HBM3`.
    Without a list all models are the first.

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


def normalize_model(model: str) -> str:
    """Return a model in lower-case words, however its source joins them.

    Example:
        >>> normalize_model("NVIDIA-A100-SXM4-40GB")
        'nvidia a100 sxm4 40gb'
    """
    return " ".join(model.lower().replace("-", " ").replace("_", " ").split())


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAsks:
    """What pods ask of nodes besides devices, as columns: a row for each node, or one for all.

    Attributes:
        millicores: CPU.
        memory_bytes: memory of the node.
        is_nothing: no pod asks for any.
    """

    millicores: Rows
    memory_bytes: Rows
    is_nothing: bool

    @classmethod
    def of(cls, requests: Sequence[GpuRequest], lengths: Sequence[int]) -> "HostAsks":
        """Return what each pod asks of so many nodes, one pod after the other."""
        asked = [(request.millicores, request.host_bytes) for request in requests]
        columns = np.repeat(np.array(asked, dtype=np.intp).reshape(-1, 2), lengths, axis=0)
        return cls(
            millicores=columns[:, 0], memory_bytes=columns[:, 1], is_nothing=not columns.any()
        )

    def spare_devices(self, batch: Batch, count: Rows) -> Ratios:
        """Return for how many further devices each node has CPU and memory.

        Each takes with it what the pod asks for with each of its own.
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
    """What pods want of nodes, as columns: a row for each node of a batch.

    Attributes:
        asks: of the devices.
        strategy: which of the nodes is best that are as certain to do, as `scoring.KINDS` has it.
        requires_idle: whether the pod waits for devices known to be idle.
        model: place of the node's model in the pod's order, `PLACES` for the best.
        hosts: what the pod asks of the node besides devices.
    """

    asks: Asks
    strategy: Rows
    requires_idle: Flags
    model: Rows
    hosts: "HostAsks"

    @classmethod
    def of_all(cls, question: "Question", models: Sequence[str], batch: Batch) -> "Wants":
        """Return what one pod wants of every node of a batch; arguments as those of `joined`."""
        request = question.request
        return cls(
            asks=question.ask.columns,
            strategy=np.array([KINDS[request.strategy]]),
            requires_idle=np.array([request.requires_idle]),
            model=model_places(models, request.preferred_models)[batch.model_id],
            hosts=HostAsks.of([request], [1]),
        )

    @classmethod
    def joined(
        cls,
        questions: Sequence["Question"],
        models: Sequence[str],
        model_ids: Sequence[Rows],
    ) -> "Wants":
        """Return what each pod wants of some nodes, one pod after the other.

        Args:
            questions: of the pods.
            models: model names by model id.
            model_ids: for each pod, the models of the nodes.
        """
        lengths = list(map(len, model_ids))
        requests = [question.request for question in questions]
        places = [model_places(models, request.preferred_models) for request in requests]

        def column(values: Iterable[int]) -> Rows:
            return np.repeat(np.fromiter(values, np.intp, len(questions)), lengths)

        return cls(
            asks=Asks.joined([question.ask for question in questions], lengths),
            strategy=column(KINDS[request.strategy] for request in requests),
            requires_idle=column(request.requires_idle for request in requests) > 0,
            model=np.concatenate([of[ids] for of, ids in zip(places, model_ids, strict=True)]),
            hosts=HostAsks.of(requests, lengths),
        )


def evaluate_batch(batch: Batch, wants: Wants, policy: Policy) -> Evaluation:
    """Evaluate each node of a batch."""
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
        codes=reject(batch, wants.asks, assessment, requires_idle=wants.requires_idle),
        scores=scores,
        bands=bands.astype(np.int8),
        utilization=mean(assessment.utilization, assessment.works, assessment.working),
    )


def evaluate_for(question: "Question", batch: Batch, models: Sequence[str]) -> Evaluation:
    """Evaluate each node of a batch for one pod.

    Args:
        question: of the pod.
        batch: the nodes.
        models: model names by model id.
    """
    return evaluate_batch(batch, Wants.of_all(question, models, batch), question.policy)


def estimates(policy: Policy) -> Estimates:
    """Return what the policy believes of tenants that the readings do not show."""
    return Estimates(
        utilization=policy.assumed.utilization,
        mps_share_bytes=policy.mps_share_bytes,
    )


def asks(request: GpuRequest) -> tuple[tuple[str, Ask], ...]:
    """Return what the request asks of each resource."""
    return tuple(
        (
            resource,
            Ask(
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
class Question:
    """What a pod asks of one pool.

    Attributes:
        request: the pod's whole request.
        ask: what it asks of the pool's resource.
        policy: the settings of the decision.
        overlay: tentative tenants; never the pod itself.
    """

    request: GpuRequest
    ask: Ask
    policy: Policy
    overlay: Overlay
