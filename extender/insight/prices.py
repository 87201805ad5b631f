"""Price list of GPU-hours, and the share of a card that a MIG instance has."""

import re
from collections.abc import Mapping
from typing import Final

from extender.core.devices.gpu_models import normalize_model

SLICES: Final = 7
FOUR_SLICES: Final = ("A30", "RTX PRO")
"""Cards with four compute slices; all other MIG cards have seven."""

_PROFILE: Final = re.compile(r"(\d+)g\.")


class PriceList:
    """Prices of a GPU-hour, looked up by words in the model name.

    Args:
        prices: price by words, as in the settings, e.g. `{"H100": 2.5, "A100 80GB": 1.4}`.

    Example:
        >>> prices = PriceList({"A100": 1.0, "A100 80GB": 1.4})
        >>> prices.of("NVIDIA A100-SXM4-80GB"), prices.of("NVIDIA A10")
        (1.4, None)
    """

    def __init__(self, prices: Mapping[str, float]) -> None:
        # If several entries match, the longest wins.
        longest_first = sorted(prices, key=lambda words: (-len(words), words))
        self._prices = [
            (frozenset(normalize_model(words).split()), prices[words]) for words in longest_first
        ]
        self._of: dict[str, float | None] = {}

    def __bool__(self) -> bool:
        return bool(self._prices)

    def of(self, model: str) -> float | None:
        """Return the price of one card-hour, None if the list has no match."""
        if model not in self._of:
            has = frozenset(normalize_model(model).split())
            fits = (price for words, price in self._prices if words <= has)
            self._of[model] = next(fits, None) if model else None
        return self._of[model]


def card_share(model: str, profile: str) -> float:
    """Return a MIG instance's share of its card's compute, 1 for a whole card.

    Example:
        >>> card_share("NVIDIA H100", "3g.40gb") == 3 / 7, card_share("NVIDIA A30", "2g.12gb")
        (True, 0.5)
        >>> card_share("NVIDIA H100", "")
        1.0
    """
    found = _PROFILE.match(profile)
    if found is None:
        return 1.0
    slices = 4 if any(name in model for name in FOUR_SLICES) else SLICES
    return min(int(found[1]) / slices, 1.0)
