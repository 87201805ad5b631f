"""Compute sharing and memory advice from measured use.

All advice uses the 95th percentile of the samples, and assumes that the use grows in proportion to
the number of similar pods.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.devices.gpu_models import SharingWay, is_desktop, mig_layout, way_without_mig
from extender.core.quantity import GIB
from extender.fleet.pods import Use

Matrix = npt.NDArray[np.float64]
"""One row per sample, one column per device; NaN for a missing value."""
Column = npt.NDArray[np.float64]

QUANTILE: Final = 0.95
"""Percentile of the samples used as a device's use; higher peaks may wait."""

FULL_RATIO: Final = 0.9
"""Maximum summed activity of a shared card. Below 1, because tenants of a fully busy card wait for
each other, and their further demand is invisible."""

KEPT_BACK_BYTES: Final = 1 * GIB
"""Reserved memory of a shared card: each CUDA context takes some hundred MiB, and one tenant's
excess allocation crashes another tenant's process."""


MOST_REPLICAS: Final = 16
"""Maximum recommended replicas: with more, time slices are too short and contexts fill the
memory."""

_DEFAULT_REPLICAS: Final = 2
"""Recommended replicas without measurements."""

_DESKTOP_BYTES: Final = 3e9
_MOST_DESKTOP_REPLICAS: Final = 8
"""GeForce and workstation cards without measurements get a replica for each 3 GB, a power of two: 2
on a GTX 1660, 4 on an RTX 3060, 8 on an RTX 3090. Clusters of these cards ran well with these
numbers."""

TENTH: Final = 0.1
"""Share of time busy up to which a pod does not need whole GPUs."""

_FAR_RATIO: Final = 2.0
_FAR_BYTES: Final = 2 * GIB
"""A pod requests too much memory if it exceeds its use by this factor and by this many bytes."""

_SHORT_RATIO: Final = 1.1
"""A pod requests too little memory if its use exceeds the request by this factor."""

_ROOM_RATIO: Final = 1.2
"""Suggested memory relative to the maximum use, rounded up to whole GiB."""


class CardVerdict(StrEnum):
    """Kind of advice on a card."""

    FEWER = "fewer"
    """Its tenants together use more than the card has: fewer replicas."""
    DO_NOT_SHARE = "do-not-share"
    """One tenant is enough for the card."""
    SHARE = "share"
    """One pod holds the whole card, and two such pods would fit."""
    MORE = "more"
    """More replicas would fit."""
    KEEP = "keep"
    """The number of replicas is right."""
    NOT_MEASURED = "not-measured"
    """No measurements of its tenants: the defaults."""


class Bound(StrEnum):
    """Limiting factor for the number of pods on a card."""

    ACTIVITY = "activity"
    MEMORY = "memory"
    MOST = "most"
    """`MOST_REPLICAS`, the maximum that is ever recommended."""


def _quantiles(samples: Matrix, quantile: float = QUANTILE) -> Column:
    """Return a quantile per column: the lowest value that this share of values does not exceed.

    The result is always a measured value, never interpolated; NaN for an empty column.

    Example:
        >>> _quantiles(np.array([[1.0], [3.0], [np.nan], [2.0]]), 0.5).tolist()
        [2.0]
    """
    counts = (~np.isnan(samples)).sum(axis=0)
    if not samples.shape[0]:
        return np.full(samples.shape[1], np.nan)
    ordered = np.sort(samples, axis=0)  # NaN comes last
    # The tolerance keeps exact products exact, such as 0.95 of 20 = 19.
    places = np.maximum(np.ceil(quantile * counts - 1e-9).astype(np.intp) - 1, 0)
    return np.asarray(ordered[places, np.arange(samples.shape[1])], dtype=np.float64)


def uses(times: Column, activity: Matrix, memory_bytes: Matrix, since: Column) -> list[Use]:
    """Summarize the use of each device since a start time per device.

    Args:
        times: time of each sample, seconds since the epoch, ascending.
        activity: activity ratio by sample and device.
        memory_bytes: memory in use by sample and device.
        since: start time of each device; only later samples count, seconds since the epoch.
    """
    is_old = times[:, None] <= since[None, :]
    activity = np.where(is_old, np.nan, activity)
    memory_bytes = np.where(is_old, np.nan, memory_bytes)
    is_known = ~np.isnan(activity)
    counts = is_known.sum(axis=0).tolist()
    columns = zip(
        _quantiles(activity).tolist(),
        _quantiles(memory_bytes).tolist(),
        _quantiles(memory_bytes, 1.0).tolist(),
        strict=True,
    )
    return [
        Use(
            activity_ratio=_known(active),
            memory_bytes=_known(used),
            memory_most_bytes=_known(most),
            samples=counts[at],
            seconds=float(np.ptp(times[is_known[:, at]])) if counts[at] else 0.0,
        )
        for at, (active, used, most) in enumerate(columns)
    ]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """Number of similar pods that fit on a card.

    Attributes:
        count: at least 1.
        bound: the limiting factor.
    """

    count: int
    bound: Bound


def fit(pods: int, activity_ratio: float, memory_bytes: float, total_bytes: float) -> _Fit:
    """Compute the number of pods that fit on a card, each with the measured average use.

    Args:
        pods: number of measured pods on the card.
        activity_ratio: activity of all of them together.
        memory_bytes: memory of all of them together.
        total_bytes: memory of the card.

    Example:
        >>> fit(1, 0.2, 20 * GIB, 80 * GIB)
        _Fit(count=3, bound=<Bound.MEMORY: 'memory'>)
        >>> fit(4, 0.97, 10 * GIB, 80 * GIB)
        _Fit(count=3, bound=<Bound.ACTIVITY: 'activity'>)
    """
    limits = {
        Bound.ACTIVITY: _times(FULL_RATIO, activity_ratio / pods),
        Bound.MEMORY: _times(max(total_bytes - KEPT_BACK_BYTES, 0.0), memory_bytes / pods),
        Bound.MOST: MOST_REPLICAS,
    }
    bound = min(limits, key=limits.__getitem__)
    return _Fit(count=max(limits[bound], 1), bound=bound)


def _times(room: float, each: float) -> int:
    """Return the number of times that `each` fits into `room`, at most `MOST_REPLICAS` + 1."""
    if each * (MOST_REPLICAS + 1) <= room:
        return MOST_REPLICAS + 1
    # An exact fit must not be lost to rounding.
    return math.floor(room / each + 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card to give advice on.

    Attributes:
        model: model name from any source.
        replicas: number of replicas that it is offered as; 1 for a whole card.
        is_shared: whether the resource counts replicas.
        pods: replicas in use; for a whole card 1 if a pod with a single GPU holds it.
        use: measured use since its tenants last changed.
    """

    model: str
    memory_bytes: float
    replicas: int
    is_shared: bool
    pods: int
    use: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRecommendation:
    """Advice on a card.

    Attributes:
        verdict: the advice.
        replicas: recommended replicas; 1 is a whole card.
        bound: the limiting factor; None without measurements.
        way: recommended way of sharing; None if the present one is right.
        layout: MIG profile with its count (`2x 3g.40gb`); "" for another way.
        memory_bytes: memory per replica.
    """

    verdict: CardVerdict
    replicas: int
    bound: Bound | None
    way: SharingWay | None
    layout: str
    memory_bytes: float


def advise(card: Card) -> CardRecommendation | None:
    """Return advice on a card, or None if there is none.

    A whole card gets advice only if it was measured with one pod and two such pods would fit.
    """
    use = card.use
    is_known = card.pods > 0 and use.is_enough and card.memory_bytes > 0
    if not is_known or use.activity_ratio is None or use.memory_bytes is None:
        return (
            _shared(card, CardVerdict.NOT_MEASURED, _unmeasured_replicas(card), None)
            if card.is_shared
            else None
        )
    fitting = fit(card.pods, use.activity_ratio, use.memory_bytes, card.memory_bytes)
    if not card.is_shared:
        if fitting.count < _DEFAULT_REPLICAS:
            return None
        return _shared(card, CardVerdict.SHARE, fitting.count, fitting.bound)
    return _shared(card, _compare(card.replicas, fitting.count), fitting.count, fitting.bound)


def _unmeasured_replicas(card: Card) -> int:
    """Return the number of replicas to recommend for a card without measurements."""
    if not is_desktop(card.model):
        return _DEFAULT_REPLICAS
    each = max(int(card.memory_bytes / _DESKTOP_BYTES), 1)
    power = 1 << (each.bit_length() - 1)
    return min(max(power, _DEFAULT_REPLICAS), _MOST_DESKTOP_REPLICAS)


def _compare(replicas: int, fitting: int) -> CardVerdict:
    if fitting < _DEFAULT_REPLICAS:
        return CardVerdict.DO_NOT_SHARE
    if fitting == replicas:
        return CardVerdict.KEEP
    return CardVerdict.FEWER if fitting < replicas else CardVerdict.MORE


def _shared(
    card: Card, verdict: CardVerdict, replicas: int, bound: Bound | None
) -> CardRecommendation:
    room = max(card.memory_bytes - KEPT_BACK_BYTES, 0.0)
    way, layout = None, ""
    if verdict is CardVerdict.DO_NOT_SHARE:
        replicas = 1
    elif verdict in {CardVerdict.SHARE, CardVerdict.NOT_MEASURED}:
        used = card.use.memory_bytes
        each = used / card.pods if used and card.pods else 0.0
        cut = mig_layout(card.model, card.memory_bytes, replicas, each)
        way = SharingWay.MIG if cut is not None else way_without_mig(card.model)
        layout = "" if cut is None else f"{cut[0]}x {cut[1]}"
    return CardRecommendation(
        verdict=verdict,
        replicas=replicas,
        bound=bound,
        way=way,
        layout=layout,
        memory_bytes=room / replicas,
    )


def uses_a_tenth(used: list[Use]) -> bool:
    """Return whether a pod keeps all of its whole devices busy at most a tenth of the time.

    Args:
        used: measured use of each device since the pod holds it.
    """
    return bool(used) and all(
        use.is_enough and use.activity_ratio is not None and use.activity_ratio <= TENTH
        for use in used
    )


class MemoryVerdict(StrEnum):
    """Comparison of a pod's memory request with its use."""

    TOO_MUCH = "requests-too-much"
    TOO_LITTLE = "requests-too-little"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAdvice:
    """Advice on a pod's memory request.

    Attributes:
        verdict: whether the request is too high or too low.
        suggested_bytes: suggested memory per GPU, in whole GiB, at most the device's memory.
    """

    verdict: MemoryVerdict
    suggested_bytes: int


def judge_memory(
    requested_bytes: float, most_bytes: float, total_bytes: float
) -> MemoryAdvice | None:
    """Compare a pod's memory request with its use; None if the request is right.

    Args:
        requested_bytes: memory per device from its annotation.
        most_bytes: maximum memory in use on one of its devices.
        total_bytes: total memory of that device.

    Example:
        >>> judge_memory(40 * GIB, 8 * GIB, 80 * GIB).suggested_bytes // GIB
        10
        >>> judge_memory(10 * GIB, 9 * GIB, 80 * GIB) is None
        True
    """
    suggested = math.ceil(most_bytes * _ROOM_RATIO / GIB) * GIB
    suggested = int(max(min(suggested, total_bytes), GIB))
    if most_bytes > requested_bytes * _SHORT_RATIO:
        return MemoryAdvice(verdict=MemoryVerdict.TOO_LITTLE, suggested_bytes=suggested)
    is_far = (
        requested_bytes >= most_bytes * _FAR_RATIO and requested_bytes - most_bytes >= _FAR_BYTES
    )
    if is_far and suggested < requested_bytes:
        return MemoryAdvice(verdict=MemoryVerdict.TOO_MUCH, suggested_bytes=suggested)
    return None
