"""Reads the values of an answer that is laid out as an earlier one was.

From one round to the next an answer has the same rows in the same order most of the time: only the
values differ, and the time of evaluation, which all rows have in common. What stands around them
is compared, which takes a fifth of the time that parsing it takes. Lives in the worker process.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.readings import Column

Places = npt.NDArray[np.intp]

_TIME: Final = b'},"value":['
"""Stands before a row's time. No text has it: its quotation marks would be escaped there."""

_KEPT: Final = 4
"""Layouts that are kept: metrics that the same devices have share one, and each takes megabytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What stands around the values of an answer, and whose they are.

    Attributes:
        first: everything before the first row's time.
        tails: by row, what is behind its value, up to the time of the next one.
        places: by row, the place of its device in a column; -1 for none.
    """

    first: bytes
    tails: tuple[bytes, ...]
    places: Places


class Layouts:
    """The layouts of the latest answers; several threads may use them at once."""

    def __init__(self) -> None:
        self._known: tuple[Layout, ...] = ()

    def forget(self) -> None:
        """Forget them all: devices have other places now."""
        self._known = ()

    def read(self, text: bytes) -> tuple[Places, Column] | None:
        """Read places and values of a vector's rows; None where none is known that fits.

        Args:
            text: the list of rows as it came.
        """
        first, *rest = _pieces(text)
        for layout in self._known:
            if len(rest) == len(layout.tails) and first == layout.first:
                try:
                    # Where another tail follows a value, it stays there, and is no number.
                    values = list(map(float, map(bytes.removesuffix, rest, layout.tails)))
                except ValueError:
                    continue
                return layout.places, np.array(values)
        return None

    def learn(self, text: bytes, places: Places) -> None:
        """Remember the layout of an answer that was parsed; `places` has one item for each row."""
        first, *rest = _pieces(text)
        if not rest or len(rest) != len(places):
            return
        tails = tuple(piece[piece.find(b'"') :] for piece in rest)
        if not any(known.first == first and known.tails == tails for known in self._known):
            self._known = (Layout(first, tails, places), *self._known)[:_KEPT]


def digest(text: bytes) -> bytes:
    """Return a short word for a vector whose values never change: equal for equal rows."""
    return blake2b(b"".join(_pieces(text)), digest_size=16).digest()


def evaluated_at(text: bytes) -> float | None:
    """Return the time of a vector's values, seconds since the epoch; None where it has none.

    Example:
        >>> evaluated_at(b'[{"metric":{},"value":[1700000000.5,"1"]}]')
        1700000000.5
    """
    start, end = _first_time(text)
    try:
        return float(text[start + len(_TIME) : end].rstrip(b',"'))
    except ValueError:
        return None


def _first_time(text: bytes) -> tuple[int, int]:
    """Return where the first row's time begins, and where its value does; -1 and 0 for nowhere."""
    start = text.find(_TIME)
    return start, text.find(b'"', start + len(_TIME)) + 1 if start >= 0 else 0


def _pieces(text: bytes) -> list[bytes]:
    """Return what is before the first row's time, between two, and behind the last one."""
    start, end = _first_time(text)
    return text.split(text[start:end]) if end > start >= 0 else [text]
