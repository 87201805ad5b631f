"""Compare names of GPU models, and find the ways to share a card: MIG, MPS, time-slicing."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from extender.core.quantity import GIB


def normalize_model(model: str) -> str:
    """Normalize a model name to lower-case words separated by spaces.

    Example:
        >>> normalize_model("NVIDIA-A100-SXM4-40GB")
        'nvidia a100 sxm4 40gb'
    """
    return " ".join(model.lower().replace("-", " ").replace("_", " ").split())


_ALONE: Final = re.compile(
    r"\b(gtx|rtx|titan)(?=\d{4}|rtx|pro|v\b|xp?\b)|(?<=\d{4})(?=(?:ti|super)\b)"
    r"|(?:\b|(?<=rtx))pro(?=\d{4}\b)|(?<=\d)(?=(?:sxm\d?|pcie|nvl)\b)"
)
"""Ends of words that users write together with the next word: `rtx4090`, `3060ti`, `a100sxm4`."""

_SIZE: Final = re.compile(r"\b(\d+) ?gi?b?\b")
"""Memory of a card in the spellings of users: `80G`, `80 GB`, `80GiB`."""

_SIZE_WORD: Final = re.compile(r"\d+gb")
_SOCKET: Final = re.compile(r"sxm\d")
_SEPARATORS: Final = str.maketrans("()/", "   ")

_BETWEEN: Final = " | "
"""Separates the models of a node with several."""


def join_models(models: Iterable[str]) -> str:
    """Return one name for the different models of a node."""
    return _BETWEEN.join(sorted(set(models)))


def models_in(name: str) -> list[str]:
    """Return the models in a name from `join_models`, or the only one.

    Example:
        >>> models_in(join_models(["nvidia t4", "nvidia a2", "nvidia t4"]))
        ['nvidia a2', 'nvidia t4']
    """
    return name.split(_BETWEEN)


@lru_cache(maxsize=4096)
def is_model(name: str, wanted: str) -> bool:
    """Return whether a model, or each of several, contains all words of a name that a user gives.

    The maker, and additions of node labels for sharing and MIG, do not identify a model. A size of
    memory counts only if the model's name states one: most names do not.

    Example:
        >>> is_model("nvidia a100 sxm4 80gb", "A100-80GB"), is_model("nvidia a100 sxm4 80gb", "A10")
        (True, False)
        >>> is_model("nvidia geforce rtx 4090", "rtx4090"), is_model("nvidia l4", "L4-SHARED")
        (True, True)
        >>> is_model("nvidia a100 sxm4 80gb", "A100-80G"), is_model("nvidia a10g", "A10")
        (True, False)
        >>> is_model("tesla t4", "nvidia-tesla-t4"), is_model("nvidia a2 | nvidia t4", "T4")
        (True, False)
        >>> is_model("nvidia h200", "h200-141gb"), is_model("nvidia a100 sxm4 80gb", "A100 SXM")
        (True, True)
    """
    words = _words_of(_without_sharing(normalize_model(wanted)))
    words = words - _NOT_SPELLED or words
    without_size = frozenset(word for word in words if not _SIZE_WORD.fullmatch(word)) or words
    return all(
        words <= of_model
        or (without_size <= of_model and not any(map(_SIZE_WORD.fullmatch, of_model)))
        for of_model in map(_identity_of, models_in(name))
    )


def _words_of(model: str) -> frozenset[str]:
    apart = _SIZE.sub(r"\1gb", model.translate(_SEPARATORS))
    return frozenset(_ALONE.sub(r"\g<0> ", apart).split())


def _identity_of(model: str) -> frozenset[str]:
    """Return the words of a model's name, and the words that the name implies."""
    words = _words_of(normalize_model(model))
    if words >= {"h100", "hbm3"}:
        words |= {"sxm5"}  # the names of the other H100 say PCIe or NVL
    return words | {"sxm"} if any(map(_SOCKET.fullmatch, words)) else words


def _without_sharing(model: str) -> str:
    """Remove the words that node labels add for sharing and MIG from a normalized model name."""
    return model.partition(" mig ")[0].removesuffix(" shared")


_NOT_SPELLED: Final = frozenset({"nvidia", "tesla", "mega"})
"""Words that do not identify a model; `nvidia-h100-mega-80gb` is GKE's label of some H100."""

_SPELLED: Final = MappingProxyType(
    {"pcie": "PCIe", "geforce": "GeForce", "rtx": "RTX", "gtx": "GTX", "titan": "TITAN"}
    | {"grid": "GRID", "pro": "PRO", "super": "SUPER", "nvl": "NVL", "sxm": "SXM", "cg": "CG"}
)
"""Spelling of words that are neither capitalized nor, with a digit, in capitals."""


def model_name(model: str) -> str:
    """Return the spelling of a model for people: the same for telemetry and for node labels.

    Example:
        >>> model_name("Tesla V100-SXM2-32GB"), model_name("NVIDIA-A10-SHARED")
        ('V100 SXM2 32GB', 'A10')
        >>> model_name("NVIDIA GeForce RTX 3060 Ti"), model_name("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb")
        ('GeForce RTX 3060 Ti', 'A100 SXM4 40GB')
    """
    name = _without_sharing(normalize_model(model))
    return " ".join(
        _SPELLED.get(word, word.capitalize() if word.isalpha() else word.upper())
        for word in name.split()
        if word not in _NOT_SPELLED
    )


ANY: Final = "any"
"""Model word if no model is specified."""
OTHER: Final = "other"
"""Model word for a model that is not in `_NAMES`."""

_DESKTOP: Final = frozenset(
    {"gtx1650", "gtx1660", "rtx2060", "rtx2070", "rtx2080", "rtx3050", "rtx3060", "rtx3070"}
    | {"rtx3080", "rtx3090", "rtx4060", "rtx4070", "rtx4080", "rtx4090", "rtx5050", "rtx5060"}
    | {"rtx5070", "rtx5080", "rtx5090", "titanrtx", "titanv", "a2000", "a4000", "a4500", "a5000"}
    | {"a5500", "a6000", "t1000", "rtx2000", "rtx4000", "rtx4500", "rtx5000", "rtx5880", "rtx6000"}
    | {"rtx8000", "rtxpro2000", "rtxpro4000", "rtxpro4500", "rtxpro5000", "a400", "a1000", "t400"}
    | {"t600", "gv100"}
)
"""GeForce and workstation cards of Volta and later without MIG."""

_PASCAL: Final = frozenset({"gtx1050", "gtx1060", "gtx1070", "gtx1080", "titanx", "titanxp"})
"""GeForce cards before Volta."""

_MPS: Final = _DESKTOP | frozenset(
    {"v100", "t4", "t4g", "a2", "a10", "a10g", "a10m", "a16", "a40", "l2", "l4", "l20", "l40"}
    | {"l40g", "l40s"}
)
"""Cards of Volta and later without MIG: MPS can cap the memory of each client."""

_MIG: Final = frozenset(
    {"a30", "a100", "a800", "h20", "h100", "h200", "h800", "gh200", "b200", "gb200", "b300"}
    | {"gb300", "rtxpro6000"}
)
"""Cards with MIG."""

_OLDER: Final = _PASCAL | {"k80", "m40", "m60", "p4", "p40", "p100"}
"""Cards before Volta: MPS cannot cap memory."""

_NAMES: Final = _MPS | _MIG | _OLDER
"""Model words, a small set that is safe for metric labels."""


_SERIES: Final = re.compile(r"\b(gtx|rtx|rtx pro|titan) (\d{4}|rtx|v|xp?)\b")
"""Series and number of a GeForce, TITAN or RTX card; a suffix such as Ti or Ada does not count."""

_VGPU: Final = re.compile(r" \d{1,3}(?:[abcq]|b4|cme)$")
"""End of a vGPU guest's name, its profile: `NVIDIA A40-48Q`, `GRID A100-2-10C`, `GRID T4-2B4`."""

_USABLE: Final = 0.88
"""Usable share of the memory in a profile's name: drivers report 9.75 GiB for 1g.10gb, 16 GiB for
1g.18gb."""


_LEAST_OF_CARD: Final = 0.92
_MOST_OF_CARD: Final = 1.08
"""Memory of a card relative to the sum of its instances' names: 93.6 GiB for 4x 1g.24gb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MigCard:
    """A card that MIG can divide into equal instances; some models are sold in several sizes.

    Attributes:
        name: model word.
        layouts: profile by number of instances per card.
    """

    name: str
    layouts: MappingProxyType[int, str]

    @property
    def gib(self) -> float:
        """Memory of the card, by the names of its profiles."""
        return max(parts * _named_gib(profile) for parts, profile in self.layouts.items())


def _card(name: str, layouts: str) -> _MigCard:
    pairs = (part.split("x", 1) for part in layouts.split())
    profiles = MappingProxyType({int(count): profile for count, profile in pairs})
    return _MigCard(name=name, layouts=profiles)


# NVIDIA's MIG User Guide, "Supported MIG Profiles"; only equal instances.
_H100_80: Final = "2x3g.40gb 3x2g.20gb 4x1g.20gb 7x1g.10gb"
_MIG_CARDS: Final = (
    _card("a30", "2x2g.12gb 4x1g.6gb"),
    _card("a100", "2x3g.20gb 3x2g.10gb 4x1g.10gb 7x1g.5gb"),
    _card("a100", _H100_80),
    _card("a800", _H100_80),
    _card("h100", _H100_80),
    _card("h800", _H100_80),
    _card("h100", "2x3g.47gb 3x2g.24gb 4x1g.24gb 7x1g.12gb"),
    _card("gh200", "2x3g.48gb 3x2g.24gb 4x1g.24gb 7x1g.12gb"),
    _card("h200", "2x3g.71gb 3x2g.35gb 4x1g.35gb 7x1g.18gb"),
    _card("b200", "2x3g.90gb 3x2g.45gb 4x1g.45gb 7x1g.23gb"),
    _card("rtxpro6000", "2x2g.48gb 4x1g.24gb"),
)


class SharingWay(StrEnum):
    """Ways to share one card among pods."""

    TIME_SLICING = "time-slicing"
    MPS = "mps"
    MIG = "mig"


def short_model(model: str) -> str:
    """Map a model name to one word of `_NAMES`, to `other`, or to `any` if empty.

    Example:
        >>> short_model("NVIDIA-A100-SXM4-40GB"), short_model("nvidia-tesla-t4"), short_model("")
        ('a100', 't4', 'any')
        >>> short_model("NVIDIA GeForce RTX 3060 Ti"), short_model("something else")
        ('rtx3060', 'other')
    """
    name = normalize_model(model)
    if not name:
        return ANY
    series = _SERIES.search(name)
    numbered = "" if series is None else "".join(series.groups()).replace(" ", "")
    return next((word for word in (numbered, *name.split()) if word in _NAMES), OTHER)


def is_desktop(model: str) -> bool:
    """Return whether a model is a GeForce, TITAN or workstation card.

    Example:
        >>> is_desktop("NVIDIA GeForce GTX 1070"), is_desktop("NVIDIA L4")
        (True, False)
    """
    return short_model(model) in _DESKTOP | _PASCAL


def is_vgpu(model: str) -> bool:
    """Return whether a model is a vGPU: a virtual machine's part of a card.

    The hypervisor schedules it, and the guest can neither divide nor reset it.

    Example:
        >>> is_vgpu("NVIDIA A40-48Q"), is_vgpu("GRID-A100-2-10C"), is_vgpu("NVIDIA A100-SXM4-40GB")
        (True, True, False)
    """
    return _VGPU.search(normalize_model(model)) is not None


def mig_layout(
    model: str, memory_bytes: float, count: int, each_bytes: float
) -> tuple[int, str] | None:
    """Return the number of equal MIG instances of a card for `count` pods, and their profile.

    The result has at most `count` instances, as many as possible. Returns None if the card has no
    MIG, no fitting profile, or unknown profiles.

    Args:
        model: model name from any source.
        count: number of pods.
        each_bytes: memory that each pod needs.

    Example:
        >>> mig_layout("NVIDIA H100 80GB HBM3", 79.6 * GIB, 5, 0.0)
        (4, '1g.20gb')
        >>> mig_layout("NVIDIA H100 80GB HBM3", 79.6 * GIB, 5, 25 * GIB)
        (2, '3g.40gb')
        >>> mig_layout("Tesla T4", 15 * GIB, 2, 0.0) is None
        True
    """
    name, gib = "" if is_vgpu(model) else short_model(model), memory_bytes / GIB
    for card in _MIG_CARDS:
        if card.name == name and _LEAST_OF_CARD < gib / card.gib < _MOST_OF_CARD:
            fitting = [
                parts
                for parts, profile in card.layouts.items()
                if parts <= count and _room_bytes(profile) >= each_bytes
            ]
            return (max(fitting), card.layouts[max(fitting)]) if fitting else None
    return None


def _room_bytes(profile: str) -> float:
    """Return the usable memory of an instance; its profile name rounds up."""
    return _named_gib(profile) * GIB * _USABLE


def _named_gib(profile: str) -> float:
    return float(profile.partition(".")[2].removesuffix("gb"))


def way_without_mig(model: str) -> SharingWay:
    """Return the best way to share a card without MIG.

    MPS is preferred because it caps each pod's memory; time-slicing does not protect memory.

    Example:
        >>> str(way_without_mig("NVIDIA L4")), str(way_without_mig("Tesla P4"))
        ('mps', 'time-slicing')
    """
    can_cap = short_model(model) in _MPS | _MIG and not is_vgpu(model)
    return SharingWay.MPS if can_cap else SharingWay.TIME_SLICING
