"""Sharing options of NVIDIA's cards: MIG instances, and memory caps under MPS."""

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


def normalize_model(model: str) -> str:
    """Normalize a model name to lower-case words separated by spaces.

    Example:
        >>> normalize_model("NVIDIA-A100-SXM4-40GB")
        'nvidia a100 sxm4 40gb'
    """
    return " ".join(model.lower().replace("-", " ").replace("_", " ").split())


GIB: Final = 1 << 30

ANY: Final = "any"
"""Model word if no model is specified."""
OTHER: Final = "other"
"""Model word for a model that is not in `NAMES`."""

_MPS: Final = frozenset(
    {"v100", "t4", "t4g", "a2", "a10", "a10g", "a10m", "a16", "a40", "l2", "l4", "l20", "l40"}
    | {"l40g", "l40s", "a4000", "a5000", "a6000", "t1000"}
)
"""Cards of Volta and later without MIG: MPS can cap the memory of each client."""

_MIG: Final = frozenset(
    {"a30", "a100", "a800", "h20", "h100", "h200", "h800", "gh200", "b200", "gb200", "b300"}
    | {"gb300"}
)
"""Cards with MIG."""

_OLDER: Final = frozenset({"k80", "m40", "m60", "p4", "p40", "p100"})
"""Cards before Volta: MPS cannot cap memory."""

NAMES: Final = _MPS | _MIG | _OLDER
"""Model words, a small set that is safe for metric labels."""


_USABLE: Final = 0.88
"""Usable share of the memory in a profile's name: drivers report 9.75 GiB for 1g.10gb, 16 GiB for
1g.18gb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigCard:
    """A card that MIG can divide into equal instances.

    Attributes:
        name: model word.
        least_gib: minimum memory of the card; some models are sold in several sizes.
        most_gib: upper bound of its memory, exclusive.
        layouts: profile by number of instances per card.
    """

    name: str
    least_gib: float
    most_gib: float
    layouts: MappingProxyType[int, str]


def _card(name: str, least_gib: float, most_gib: float, layouts: str) -> MigCard:
    pairs = (part.split("x", 1) for part in layouts.split())
    profiles = MappingProxyType({int(count): profile for count, profile in pairs})
    return MigCard(name=name, least_gib=least_gib, most_gib=most_gib, layouts=profiles)


# NVIDIA's MIG User Guide, "Supported MIG Profiles"; only equal instances.
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


class SharingWay(StrEnum):
    """Ways to share one card among pods."""

    TIME_SLICING = "time-slicing"
    MPS = "mps"
    MIG = "mig"


def short_model(model: str) -> str:
    """Map a model name to one word of `NAMES`, to `other`, or to `any` if empty.

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
    """Return the number of equal MIG instances of a card for `count` pods, and their profile.

    The result has at most `count` instances, as many as possible. Returns None if the card has no
    MIG, no fitting profile, or unknown profiles.

    Args:
        model: model name from any source.
        memory_bytes: memory of the card.
        count: number of pods.
        each_bytes: memory that each pod needs.

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
    """Return the usable memory of an instance; its profile name rounds up."""
    return float(profile.partition(".")[2].removesuffix("gb")) * GIB * _USABLE


def way_without_mig(model: str) -> SharingWay:
    """Return the best way to share a card without MIG.

    MPS is preferred because it caps each pod's memory; time-slicing does not protect memory.

    Example:
        >>> str(way_without_mig("NVIDIA L4")), str(way_without_mig("Tesla P4"))
        ('mps', 'time-slicing')
    """
    return SharingWay.MPS if short_model(model) in _MPS | _MIG else SharingWay.TIME_SLICING
