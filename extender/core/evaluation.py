"""What nodes are worth to a request."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from extender.core.assessment import Ask, Asks, Assessment, Estimates, assess
from extender.core.filtering import Codes, reject
from extender.core.policy import Policy, Strategy
from extender.core.request import GpuRequest
from extender.core.scoring import Preference, mean, score
from extender.core.snapshot import Batch, Flags, Ratios, Rows, Tenant

Counts = npt.NDArray[np.int16]
"""Numbers of devices of one node: many evaluations are kept, and these make them small."""

Overlay = Mapping[str, tuple[Tenant, ...]]
"""Tentative tenants by node name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What every node of a pool is worth to one request; one row per node.

    Attributes:
        codes: the first reason against the node, `Code.PASSES` where there is none.
        scores: ratio from 0 to 1.
        idle: landing devices known to suit.
        needed: distinct devices that the pod will get.
        possible: landing devices that suit or may suit for all that is known.
        utilization: mean ratio of the landing devices.
    """

    codes: Codes
    scores: Ratios
    idle: Counts
    needed: Counts
    possible: Counts
    utilization: Ratios


def model_places(models: Sequence[str], preferred: Sequence[str]) -> Rows:
    """Return by model id how early the pod's list names the model; 0 where it does not.

    A preference matches a model that contains it as a word, so `H100` is `NVIDIA H100 80GB HBM3`.

    Example:
        >>> model_places(["", "nvidia a100 sxm4 40gb", "nvidia h100 80gb hbm3"], ["H100", "A100"])
        array([0, 1, 2])
    """
    places = [0] * len(models)
    for place, preference in enumerate(preferred):
        words = f" {normalize_model(preference)} "
        for model_id, model in enumerate(models):
            if not places[model_id] and words in f" {model} ":
                places[model_id] = len(preferred) - place
    return np.array(places, dtype=np.intp)


def normalize_model(model: str) -> str:
    """Return a model in lower-case words, however its source joins them.

    Example:
        >>> normalize_model("NVIDIA-A100-SXM4-40GB")
        'nvidia a100 sxm4 40gb'
    """
    return " ".join(model.lower().replace("-", " ").replace("_", " ").split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What pods want of nodes, as columns: a row for each node of a batch.

    Attributes:
        asks: of the devices.
        is_packing: whether the fullest nodes come first.
        requires_idle: whether the pod waits for devices known to be idle.
        preference: which models it prefers.
        nominated: whether the node is the one that the pod is nominated to.
    """

    asks: Asks
    is_packing: Flags
    requires_idle: Flags
    preference: Preference
    nominated: Flags

    @classmethod
    def of_all(
        cls, question: "Question", models: Sequence[str], batch: Batch, nominated: Flags
    ) -> "Wants":
        """Return what one pod wants of every node of a batch; arguments as those of `joined`."""
        request = question.request
        places = model_places(models, request.preferred_models)
        return cls(
            asks=question.ask.columns,
            is_packing=np.array([request.strategy is Strategy.PACK]),
            requires_idle=np.array([request.requires_idle]),
            preference=Preference(place=places[batch.model_id], best=places.max(initial=0)),
            nominated=nominated,
        )

    @classmethod
    def joined(
        cls,
        questions: Sequence["Question"],
        models: Sequence[str],
        model_ids: Sequence[Rows],
        nominated: Flags,
    ) -> "Wants":
        """Return what each pod wants of some nodes, one pod after the other.

        Args:
            questions: of the pods.
            models: model names by model id.
            model_ids: for each pod, the models of the nodes.
            nominated: per node of all.
        """
        lengths = list(map(len, model_ids))
        requests = [question.request for question in questions]
        places = [model_places(models, request.preferred_models) for request in requests]

        def column(values: Iterable[int]) -> Rows:
            return np.repeat(np.fromiter(values, np.intp, len(questions)), lengths)

        return cls(
            asks=Asks.joined([question.ask for question in questions], lengths),
            is_packing=column(request.strategy is Strategy.PACK for request in requests) > 0,
            requires_idle=column(request.requires_idle for request in requests) > 0,
            preference=Preference(
                place=np.concatenate([of[ids] for of, ids in zip(places, model_ids, strict=True)]),
                best=column(int(of.max(initial=0)) for of in places),
            ),
            nominated=nominated,
        )


def evaluate_batch(batch: Batch, wants: Wants, policy: Policy) -> Evaluation:
    """Evaluate each node of a batch."""
    assessment = assess(batch, wants.asks, estimates(policy))
    return Evaluation(
        codes=reject(
            batch,
            wants.asks,
            assessment,
            requires_idle=wants.requires_idle,
            nominated=wants.nominated,
        ),
        scores=score(batch, assessment, wants.is_packing, wants.preference, policy.weights),
        idle=assessment.idle.astype(np.int16),
        needed=assessment.landing.needed.astype(np.int16),
        possible=_possible(assessment).astype(np.int16),
        utilization=mean(
            assessment.utilization, assessment.landing.devices, assessment.landing.size
        ),
    )


def evaluate_for(
    question: "Question", batch: Batch, models: Sequence[str], nominated: Flags | None = None
) -> Evaluation:
    """Evaluate each node of a batch for one pod.

    Args:
        question: of the pod.
        batch: the nodes.
        models: model names by model id.
        nominated: per node, whether the pod is nominated to it; None for nowhere.
    """
    if nominated is None:
        nominated = np.zeros(len(batch), dtype=np.bool_)
    return evaluate_batch(batch, Wants.of_all(question, models, batch, nominated), question.policy)


def _possible(assessment: Assessment) -> Rows:
    """Return how many landing devices suit, or may suit for all that is known.

    The held ones may be the busy ones; where all are held by our count, that is late.
    """
    landing = assessment.landing
    may_suit = (assessment.fits & (assessment.idle_chance > 0)).sum(axis=1)
    possible: Rows = np.minimum(may_suit, np.maximum(landing.size - landing.taken, landing.needed))
    return possible


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
