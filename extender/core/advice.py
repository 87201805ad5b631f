"""Advice from measured use: arithmetic over what was measured; nothing is measured here.

The rule is one for all of it: of what was measured the value counts that 95 of 100 samples do not
exceed, and more pods of the same kind are taken to use more in proportion.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.cards import GIB, Way, mig_layout, way_without_mig

Matrix = npt.NDArray[np.float64]
"""A row a sample, a column a device; NaN where nothing was measured."""
Column = npt.NDArray[np.float64]

QUANTILE: Final = 0.95
"""Of the samples so many do not exceed what counts; the rest are peaks that may wait."""

FULL_RATIO: Final = 0.9
"""Summed activity that fits on one card. Not 1: a card that is busy all the time makes its tenants
wait for each other, and what they would use besides cannot be seen any more."""

KEPT_BACK_BYTES: Final = 1 * GIB
"""Memory of a shared card that is left to nobody: each CUDA context takes some hundred MiB, and
what one tenant allocates too much ends another's process."""

LEAST_SAMPLES: Final = 15
"""Fewer samples than that say nothing: with one a minute, a quarter of an hour."""

MOST_REPLICAS: Final = 16
"""More are never recommended: from there on time slices are too short, and contexts alone fill the
memory."""

DEFAULT_REPLICAS: Final = 2
"""Where nothing is known."""

TENTH: Final = 0.1
"""A pod whose GPUs are all busy for this share of the time or less does not need them whole."""

FAR_RATIO: Final = 2.0
FAR_BYTES: Final = 2 * GIB
"""A pod that asks for so many times what it uses, and for so much more, keeps others off."""

SHORT_RATIO: Final = 1.1
"""A pod that uses so many times what it asks for is no longer where it fits."""

ROOM_RATIO: Final = 1.2
"""What is recommended is so many times what was used at most, in whole GiB."""


class Verdict(StrEnum):
    """What is said of a card."""

    FEWER = "fewer"
    """Its tenants together use more than it has: fewer replicas."""
    DO_NOT_SHARE = "do-not-share"
    """One of its tenants is enough for it."""
    SHARE = "share"
    """It is a pod's own, and two such pods would fit."""
    MORE = "more"
    """More replicas would fit."""
    KEEP = "keep"
    """As it is."""
    NOT_MEASURED = "not-measured"
    """Nothing is known of what pods use on it: the defaults."""


class Bound(StrEnum):
    """What limits the number of pods on a card."""

    ACTIVITY = "activity"
    MEMORY = "memory"
    MOST = "most"
    """Neither: no more are ever recommended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How a device was used.

    Attributes:
        activity_ratio: the `QUANTILE` of its activity, 0 to 1; None where nothing is known.
        memory_bytes: the `QUANTILE` of its memory in use, likewise.
        memory_most_bytes: the most that was seen, likewise.
        samples: of activity, so many.
        seconds: from the first of them to the last.
    """

    activity_ratio: float | None = None
    memory_bytes: float | None = None
    memory_most_bytes: float | None = None
    samples: int = 0
    seconds: float = 0.0

    @property
    def is_enough(self) -> bool:
        """Whether something can be said from it."""
        is_known = self.activity_ratio is not None and self.memory_bytes is not None
        return is_known and self.samples >= LEAST_SAMPLES


def quantiles(samples: Matrix, quantile: float = QUANTILE) -> Column:
    """Return of each column the lowest value that this share of its values does not exceed.

    A value that was measured, never one in between; NaN where a column has none.

    Example:
        >>> quantiles(np.array([[1.0], [3.0], [np.nan], [2.0]]), 0.5).tolist()
        [2.0]
    """
    counts = (~np.isnan(samples)).sum(axis=0)
    if not samples.shape[0]:
        return np.full(samples.shape[1], np.nan)
    ordered = np.sort(samples, axis=0)  # NaN comes last
    # A share such as 0.95 of 20 is 19 but for rounding.
    places = np.maximum(np.ceil(quantile * counts - 1e-9).astype(np.intp) - 1, 0)
    return np.asarray(ordered[places, np.arange(samples.shape[1])], dtype=np.float64)


def uses(times: Column, activity: Matrix, memory_bytes: Matrix, since: Column) -> list[Use]:
    """Return how each device was used since a time of its own.

    Args:
        times: of the samples, seconds since the epoch, ascending.
        activity: ratios.
        memory_bytes: in use.
        since: of each device, samples after this count, seconds since the epoch.
    """
    is_old = times[:, None] <= since[None, :]
    activity = np.where(is_old, np.nan, activity)
    memory_bytes = np.where(is_old, np.nan, memory_bytes)
    is_known = ~np.isnan(activity)
    counts = is_known.sum(axis=0).tolist()
    columns = zip(
        quantiles(activity).tolist(),
        quantiles(memory_bytes).tolist(),
        quantiles(memory_bytes, 1.0).tolist(),
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
class Fit:
    """How many pods of a kind a card has room for.

    Attributes:
        count: at least 1.
        bound: what limits them.
    """

    count: int
    bound: Bound


def fit(pods: int, activity_ratio: float, memory_bytes: float, total_bytes: float) -> Fit:
    """Return how many pods fit on a card, each like those that were measured there.

    Args:
        pods: so many were on it.
        activity_ratio: what they used together.
        memory_bytes: likewise.
        total_bytes: memory of the card.

    Example:
        >>> fit(1, 0.2, 20 * GIB, 80 * GIB)
        Fit(count=3, bound=<Bound.MEMORY: 'memory'>)
        >>> fit(4, 0.97, 10 * GIB, 80 * GIB)
        Fit(count=3, bound=<Bound.ACTIVITY: 'activity'>)
    """
    limits = {
        Bound.ACTIVITY: _times(FULL_RATIO, activity_ratio / pods),
        Bound.MEMORY: _times(max(total_bytes - KEPT_BACK_BYTES, 0.0), memory_bytes / pods),
        Bound.MOST: MOST_REPLICAS,
    }
    bound = min(limits, key=limits.__getitem__)
    return Fit(count=max(limits[bound], 1), bound=bound)


def _times(room: float, each: float) -> int:
    """Return how often something fits, no more often than is ever recommended."""
    if each * (MOST_REPLICAS + 1) <= room:
        return MOST_REPLICAS + 1
    # What was measured of n and fits exactly must not be lost to rounding.
    return math.floor(room / each + 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card about which advice is asked.

    Attributes:
        model: as any source writes it.
        memory_bytes: what it has.
        replicas: it is sold as so many; 1 for a whole one.
        is_shared: whether it is sold in replicas.
        pods: replicas of it in use; for a whole card 1 where a pod holds it that asks for one.
        use: since its tenants last changed.
    """

    model: str
    memory_bytes: float
    replicas: int
    is_shared: bool
    pods: int
    use: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class CardAdvice:
    """What is said of a card.

    Attributes:
        verdict: in a word.
        replicas: so many are recommended; 1 is a whole card.
        bound: what keeps it from more; None where nothing was measured.
        way: how to share it, where that is not decided by what it does well already.
        layout: the MIG profile, with its count (`2x 3g.40gb`); "" where the way is another.
        memory_bytes: room of each replica.
    """

    verdict: Verdict
    replicas: int
    bound: Bound | None
    way: Way | None
    layout: str
    memory_bytes: float


def advise(card: Card) -> CardAdvice | None:
    """Return what is to be said of a card, None where there is nothing.

    Nothing is said of a whole card unless it was measured under one pod and two would fit.
    """
    use = card.use
    is_known = card.pods > 0 and use.is_enough and card.memory_bytes > 0
    if not is_known or use.activity_ratio is None or use.memory_bytes is None:
        return (
            _shared(card, Verdict.NOT_MEASURED, DEFAULT_REPLICAS, None) if card.is_shared else None
        )
    fitting = fit(card.pods, use.activity_ratio, use.memory_bytes, card.memory_bytes)
    if not card.is_shared:
        if fitting.count < DEFAULT_REPLICAS:
            return None
        return _shared(card, Verdict.SHARE, fitting.count, fitting.bound)
    return _shared(card, _compare(card.replicas, fitting.count), fitting.count, fitting.bound)


def _compare(replicas: int, fitting: int) -> Verdict:
    if fitting < DEFAULT_REPLICAS:
        return Verdict.DO_NOT_SHARE
    if fitting == replicas:
        return Verdict.KEEP
    return Verdict.FEWER if fitting < replicas else Verdict.MORE


def _shared(card: Card, verdict: Verdict, replicas: int, bound: Bound | None) -> CardAdvice:
    room = max(card.memory_bytes - KEPT_BACK_BYTES, 0.0)
    way, layout = None, ""
    if verdict is Verdict.DO_NOT_SHARE:
        replicas = 1
    elif verdict in {Verdict.SHARE, Verdict.NOT_MEASURED}:
        each = (card.use.memory_bytes or 0.0) / max(card.pods, 1) if card.pods else 0.0
        cut = mig_layout(card.model, card.memory_bytes, replicas, each)
        way = Way.MIG if cut is not None else way_without_mig(card.model)
        layout = "" if cut is None else f"{cut[0]}x {cut[1]}"
    return CardAdvice(
        verdict=verdict,
        replicas=replicas,
        bound=bound,
        way=way,
        layout=layout,
        memory_bytes=room / replicas,
    )


def uses_a_tenth(used: list[Use]) -> bool:
    """Whether a pod keeps none of its whole devices busy for more than a tenth of the time.

    Args:
        used: each of them, since the pod has it.
    """
    return bool(used) and all(
        use.is_enough and use.activity_ratio is not None and use.activity_ratio <= TENTH
        for use in used
    )


class Ask(StrEnum):
    """How what a pod asks of memory compares with what it uses."""

    TOO_MUCH = "asks-too-much"
    TOO_LITTLE = "asks-too-little"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAdvice:
    """What a pod should ask for.

    Attributes:
        ask: what is wrong.
        suggested_bytes: memory per GPU, in whole GiB, no more than the device has.
    """

    ask: Ask
    suggested_bytes: int


def judge_memory(asked_bytes: float, most_bytes: float, total_bytes: float) -> MemoryAdvice | None:
    """Return what is wrong with what a pod asks of each device's memory, None where it will do.

    Args:
        asked_bytes: by its annotation.
        most_bytes: the most that was seen in use on one of its devices.
        total_bytes: memory of that device.

    Example:
        >>> judge_memory(40 * GIB, 8 * GIB, 80 * GIB).suggested_bytes // GIB
        10
        >>> judge_memory(10 * GIB, 9 * GIB, 80 * GIB) is None
        True
    """
    suggested = math.ceil(most_bytes * ROOM_RATIO / GIB) * GIB
    suggested = int(max(min(suggested, total_bytes), GIB))
    if most_bytes > asked_bytes * SHORT_RATIO:
        return MemoryAdvice(ask=Ask.TOO_LITTLE, suggested_bytes=suggested)
    is_far = asked_bytes >= most_bytes * FAR_RATIO and asked_bytes - most_bytes >= FAR_BYTES
    if is_far and suggested < asked_bytes:
        return MemoryAdvice(ask=Ask.TOO_MUCH, suggested_bytes=suggested)
    return None
