"""Explain each piece of advice in one sentence with its figures."""

from typing import Final

from extender.core.devices.gpu_models import GIB, SharingWay
from extender.fleet.pod_memory import Use
from extender.insight.advice_rules import (
    Bound,
    Card,
    CardRecommendation,
    CardVerdict,
    MemoryAdvice,
    MemoryVerdict,
)

_BOUNDS: Final = {
    Bound.ACTIVITY: "activity allows no more",
    Bound.MEMORY: "memory allows no more, 1 GiB kept back",
    Bound.MOST: "more are never recommended",
}


def card_words(card: Card, advice: CardRecommendation) -> str:
    """Explain the advice for a card."""
    if advice.verdict is CardVerdict.NOT_MEASURED:
        return (
            f"no samples of the pods' use: {advice.replicas} replicas of "
            f"{_gib(advice.memory_bytes)}, 1 GiB kept back, {_way(advice)}"
        )
    used = _used(card.use, card.memory_bytes)
    limit = "" if advice.bound is None else f", {_BOUNDS[advice.bound]}"
    if advice.verdict is CardVerdict.SHARE:
        return f"its pod uses {used}: {advice.replicas} such pods would fit{limit}; {_way(advice)}"
    tenants = f"{card.pods} of {card.replicas} replicas in use, which together use {used}"
    if advice.verdict is CardVerdict.DO_NOT_SHARE:
        return f"{tenants}: not two of these fit{limit}"
    return f"{tenants}: {advice.replicas} fit{limit}"


def tenth_words(gpus: int, use: Use, total_bytes: float, per_card: int) -> str:
    """Explain why a pod does not need its whole GPUs.

    Args:
        gpus: number of its GPUs.
        use: highest activity and highest memory of any of them.
        total_bytes: memory of each GPU.
        per_card: number of such pods that would fit on one GPU.
    """
    subject = "its GPU is" if gpus == 1 else f"none of its {gpus} GPUs is more than"
    used = _used(use, total_bytes)
    room = (
        f"{per_card} pods that use so much would fit on one"
        if per_card > 1
        else "but for its memory one GPU would do for more"
    )
    return f"{subject} {used}: {room}"


def memory_words(asked_bytes: float, use: Use, advice: MemoryAdvice) -> str:
    """Explain the difference between a pod's requested and used memory."""
    most = _gib(use.memory_most_bytes or 0.0)
    better = _gib(advice.suggested_bytes)
    if advice.ask is MemoryVerdict.TOO_MUCH:
        return (
            f"requests {_gib(asked_bytes)} of each GPU and never used more than {most}: {better} "
            "would suffice, and leave room for others"
        )
    return (
        f"requests {_gib(asked_bytes)} of each GPU and used up to {most}: with {better} it is "
        "placed on a GPU with enough room"
    )


def _used(use: Use, total_bytes: float) -> str:
    activity = use.activity_ratio or 0.0
    return (
        f"{activity:.0%} busy and {_gib(use.memory_bytes or 0.0)} of {_gib(total_bytes)} full, "
        "19 samples of 20"
    )


def _way(advice: CardRecommendation) -> str:
    if advice.way is SharingWay.MIG:
        return f"as MIG instances, {advice.layout}"
    if advice.way is SharingWay.MPS:
        return "under MPS, which caps the memory of each"
    return "time-sliced: nothing there protects memory"


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
