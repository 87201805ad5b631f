"""Types of command line arguments of the benchmarks."""

import argparse
from collections.abc import Callable
from typing import Final

_MOST_DIGITS: Final = 9


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers with a lower limit.

    Example:
        >>> at_least(1)("4")
        4
    """

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} must be a whole number from {least} on, of at most "
                f"{_MOST_DIGITS} digits"
            )
        return int(text)

    return read
