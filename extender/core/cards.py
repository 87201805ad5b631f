"""What NVIDIA's cards can do besides serving one pod: MIG layouts, and memory caps under MPS."""

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from extender.core.evaluation import normalize_model

GIB: Final = 1 << 30

ANY: Final = "any"
"""Where nobody says which model is meant."""
OTHER: Final = "other"
"""A model whose name is none of `NAMES`."""

_MPS: Final = frozenset(
    {"v100", "t4", "t4g", "a2", "a10", "a10g", "a10m", "a16", "a40", "l2", "l4", "l20", "l40"}
    | {"l40g", "l40s", "a4000", "a5000", "a6000", "t1000"}
)
"""Cards of Volta and later without MIG: MPS can cap what each of its clients allocates there."""

_MIG: Final = frozenset(
    {"a30", "a100", "a800", "h20", "h100", "h200", "h800", "gh200", "b200", "gb200", "b300"}
    | {"gb300"}
)
"""Cards with MIG."""

_OLDER: Final = frozenset({"k80", "m40", "m60", "p4", "p40", "p100"})
"""Cards before Volta: under MPS nothing caps memory there."""

NAMES: Final = _MPS | _MIG | _OLDER
"""Words by which cards are told apart where there must be few: labels of metrics."""


_USABLE: Final = 0.88
"""Of the memory in a profile's name: the driver says 9.75 GiB for 1g.10gb, 16 GiB for 1g.18gb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigCard:
    """A card that can be cut into equal instances.

    Attributes:
        name: word of the model's name.
        least_gib: memory of the card at least; one model is sold in several sizes.
        most_gib: less than this.
        layouts: profile by how many of it there are on one card.
    """

    name: str
    least_gib: float
    most_gib: float
    layouts: MappingProxyType[int, str]


def _card(name: str, least_gib: float, most_gib: float, layouts: str) -> MigCard:
    pairs = (part.split("x", 1) for part in layouts.split())
    told = MappingProxyType({int(count): profile for count, profile in pairs})
    return MigCard(name=name, least_gib=least_gib, most_gib=most_gib, layouts=told)


# NVIDIA's MIG User Guide, "Supported MIG Profiles"; instances of one size alone.
_H100_80: Final = "2x3g.40gb 3x2g.20gb 4x1g.20gb 7x1g.10gb"
MIG_CARDS: Final = (
    _card("a30", 20, 30, "2x2g.12gb 4x1g.6gb"),
    _card("a100", 30, 50, "2x3g.20gb 3x2g.10gb 4x1g.10gb 7x1g.5gb"),
    _card("a100", 60, 90, _H100_80),
    _card("a800", 60, 90, _H100_80),
    _card("h100", 60, 85, _H100_80),
    _card("h800", 60, 85, _H100_80),
    _card("h100", 90, 95, "2x3g.47gb 3x2g.24gb 4x1g.24gb 7x1g.12gb"),
    _card("gh200", 90, 100, "2x3g.48gb 3x2g.24gb 4x1g.24gb 7x1g.12gb"),
    _card("h200", 130, 150, "2x3g.71gb 3x2g.35gb 4x1g.35gb 7x1g.18gb"),
    _card("b200", 160, 190, "2x3g.90gb 3x2g.45gb 4x1g.45gb 7x1g.23gb"),
)


class Way(StrEnum):
    """How several pods can have one card."""

    TIME_SLICING = "time-slicing"
    MPS = "mps"
    MIG = "mig"


def short_model(model: str) -> str:
    """Return the one word of a model's name by which cards are told apart, one of few.

    Example:
        >>> short_model("NVIDIA-A100-SXM4-40GB"), short_model("nvidia-tesla-t4"), short_model("")
        ('a100', 't4', 'any')
        >>> short_model("something else")
        'other'
    """
    words = normalize_model(model).split()
    if not words:
        return ANY
    return next((word for word in words if word in NAMES), OTHER)


def mig_layout(
    model: str, memory_bytes: float, count: int, each_bytes: float = 0.0
) -> tuple[int, str] | None:
    """Return into how many instances a card is cut for `count` pods, and their profile.

    The finest cut into equal instances with no more of them than that; None where the card has no
    MIG, or no such cut, or its profiles are not known here.

    Args:
        model: the model, as any source writes it.
        memory_bytes: memory of the card.
        count: how many pods it should do for.
        each_bytes: memory that each of them needs.

    Example:
        >>> mig_layout("NVIDIA H100 80GB HBM3", 79.6 * GIB, 5)
        (4, '1g.20gb')
        >>> mig_layout("NVIDIA H100 80GB HBM3", 79.6 * GIB, 5, 25 * GIB)
        (2, '3g.40gb')
        >>> mig_layout("Tesla T4", 15 * GIB, 2) is None
        True
    """
    name, gib = short_model(model), memory_bytes / GIB
    for card in MIG_CARDS:
        if card.name == name and card.least_gib <= gib < card.most_gib:
            fitting = [
                parts
                for parts, profile in card.layouts.items()
                if parts <= count and _room_bytes(profile) >= each_bytes
            ]
            return (max(fitting), card.layouts[max(fitting)]) if fitting else None
    return None


def _room_bytes(profile: str) -> float:
    """Return the memory that pods can use of an instance: its name rounds up."""
    return float(profile.partition(".")[2].removesuffix("gb")) * GIB * _USABLE


def way_without_mig(model: str) -> Way:
    """Return how a card is best shared that is not cut.

    Under MPS each pod's memory is capped; where that is not to be had there is time-slicing, under
    which nothing protects memory.

    Example:
        >>> str(way_without_mig("NVIDIA L4")), str(way_without_mig("Tesla P4"))
        ('mps', 'time-slicing')
    """
    return Way.MPS if short_model(model) in _MPS | _MIG else Way.TIME_SLICING
