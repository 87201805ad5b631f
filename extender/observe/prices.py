"""What a GPU-hour costs, by the list in the settings, and how much of a card an instance is."""

import re
from collections.abc import Mapping
from typing import Final

from extender.core.evaluation import normalize_model

SLICES: Final = 7
FOUR_SLICES: Final = ("A30", "RTX PRO")
"""Cards whose compute is cut into four at most; all others that can be cut have seven slices."""

_PROFILE: Final = re.compile(r"(\d+)g\.")


class PriceList:
    """Prices of a GPU-hour by words of the model.

    Args:
        prices: as the settings have them, e.g. `{"H100": 2.5, "A100 80GB": 1.4}`.

    Example:
        >>> prices = PriceList({"A100": 1.0, "A100 80GB": 1.4})
        >>> prices.of("NVIDIA A100-SXM4-80GB"), prices.of("NVIDIA A10")
        (1.4, None)
    """

    def __init__(self, prices: Mapping[str, float]) -> None:
        # Where several fit the longest counts, so it comes first.
        longest_first = sorted(prices, key=lambda words: (-len(words), words))
        self._prices = [
            (frozenset(normalize_model(words).split()), prices[words]) for words in longest_first
        ]
        self._of: dict[str, float | None] = {}

    def __bool__(self) -> bool:
        return bool(self._prices)

    def of(self, model: str) -> float | None:
        """Return the price of an hour of a whole card, None where the list has none."""
        if model not in self._of:
            has = frozenset(normalize_model(model).split())
            fits = (price for words, price in self._prices if words <= has)
            self._of[model] = next(fits, None) if model else None
        return self._of[model]


def card_share(model: str, profile: str) -> float:
    """Return how much of a card's compute a MIG instance has, 1 for a whole card.

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
