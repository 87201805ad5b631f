"""Price of a GPU-hour on a node, and the share of a card that a MIG instance has."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from extender.core.devices.gpu_models import is_model, models_in
from extender.core.nodes.inventory import NodeRecord
from extender.core.nodes.snapshot import NO_PRICE
from extender.core.policy import PriceMode, Prices

_SLICES: Final = 7
_FOUR_SLICES: Final = ("A30", "RTX PRO")
"""Cards with four compute slices; all other MIG cards have seven."""

_PROFILE: Final = re.compile(r"(\d+)g\.")


MILLI: Final = 1000
"""Prices in columns are whole thousandths."""

_NODE: Final = "node/"
_LABEL: Final = "label/"
"""Prefixes of entries for a node (`node/gpu-7`), and for nodes with a label (`label/KEY=VALUE`)."""

_SPOT_LABELS: Final = (
    ("node.kubernetes.io/lifecycle", "spot"),
    ("karpenter.sh/capacity-type", "spot"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("cloud.google.com/gke-spot", "true"),
    ("cloud.google.com/gke-preemptible", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
"""Labels of spot nodes, which cost less and may be reclaimed at any time."""


@lru_cache(maxsize=4)
def _compile(entries: tuple[tuple[str, float], ...], spot_share: float) -> "PriceList":
    return PriceList(dict(entries), spot_share)


def price_milli(prices: Prices, model: str, node: NodeRecord) -> int:
    """Return the price of a GPU-hour on a node in thousandths.

    `NO_PRICE` if the list has no match, or if prices do not count in the choice of a node.
    """
    if prices.mode is PriceMode.IGNORE:
        return NO_PRICE
    found = _compile(tuple(prices.entries.items()), prices.spot_share).of(model, node)
    return NO_PRICE if found is None else round(found * MILLI)


class PriceList:
    """Prices of a GPU-hour by node, by label of the node, or by words in the model name.

    Args:
        prices: price by entry, as in the settings, e.g. `{"H100": 2.5, "A100 80GB": 1.4}`. An entry
            for a node counts before one for a label, and that before one for a model.
        spot_share: part of the model's price that spot nodes cost.

    Example:
        >>> prices = PriceList({"A100": 1.0, "A100 80GB": 1.4})
        >>> prices.of("NVIDIA A100-SXM4-80GB"), prices.of("NVIDIA A10")
        (1.4, None)
    """

    def __init__(self, prices: Mapping[str, float], spot_share: float = 1.0) -> None:
        # If several entries match, the longest wins.
        longest_first = sorted(prices, key=lambda words: (-len(words), words))
        self._nodes = {name: prices[name] for name in prices if name.startswith(_NODE)}
        self._labels = [
            (key, value, prices[name])
            for name in longest_first
            if name.startswith(_LABEL)
            for key, _, value in [name.removeprefix(_LABEL).partition("=")]
        ]
        self._models = [
            (words, prices[words])
            for words in longest_first
            if not words.startswith((_NODE, _LABEL))
        ]
        self._spot_share = spot_share
        self._of: dict[str, float | None] = {}

    def __bool__(self) -> bool:
        return bool(self._nodes or self._labels or self._models)

    def of(self, model: str, node: NodeRecord | None = None) -> float | None:
        """Return the price of one card-hour, None if the list has no match.

        Args:
            model: model name from any source, "" if unknown.
            node: the card's node, None if unknown.
        """
        if node is None:
            return self._of_model(model)
        own = self._nodes.get(f"{_NODE}{node.name}")
        if own is not None:
            return own
        labelled = (price for key, value, price in self._labels if node.label(key) == value)
        found = next(labelled, None)
        if found is not None:
            return found
        found = self._of_model(model)
        is_spot = any(node.label(key) == value for key, value in _SPOT_LABELS)
        return found * self._spot_share if found is not None and is_spot else found

    def _of_model(self, model: str) -> float | None:
        """Return the highest price of the models, None if one has no price."""
        if model not in self._of:
            found = [self._of_one(each) for each in models_in(model)]
            known = [price for price in found if price is not None]
            self._of[model] = max(known) if len(known) == len(found) else None
        return self._of[model]

    def _of_one(self, model: str) -> float | None:
        fits = (price for words, price in self._models if is_model(model, words))
        return next(fits, None) if model else None


def card_share(model: str, profile: str) -> float:
    """Return a MIG instance's share of its card's compute, 1 for a whole card.

    Example:
        >>> card_share("NVIDIA H100", "3g.40gb") == 3 / 7, card_share("NVIDIA A30", "2g.12gb")
        (True, 0.5)
        >>> card_share("NVIDIA H100", ""), card_share("NVIDIA RTX PRO 6000", "1g.24gb")
        (1.0, 0.25)
    """
    found = _PROFILE.match(profile)
    if found is None:
        return 1.0
    slices = 4 if any(name in model for name in _FOUR_SLICES) else _SLICES
    return min(int(found[1]) / slices, 1.0)
