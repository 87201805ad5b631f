"""Split a JSON list of thousands of names at its commas, without decoding it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.intp]
_Flags = npt.NDArray[np.bool_]

_COMMA = ord(",")

_FEW = 8
"""Below one item in this many, adjacent items are rare and are not merged."""


@dataclass(frozen=True, slots=True, eq=False)
class JsonNameList:
    """Items of a JSON list as byte ranges of a text, provided that no item contains a comma.

    Attributes:
        text: bytes that contain the list.
        starts: start of each item in the text.
        lengths: length of each item in bytes.
    """

    text: bytes
    starts: Places
    lengths: Places

    @classmethod
    def of(cls, text: bytes, begin: int, end: int) -> "JsonNameList | None":
        """Split a list at its commas; None if it has no brackets around it.

        Args:
            text: bytes that contain the list.
            begin: start of the list.
            end: end of the list.
        """
        if not (text.startswith(b"[", begin) and text.endswith(b"]", begin + 1, end)):
            return None
        inner = np.frombuffer(text, np.uint8, end - begin - 2, begin + 1)
        commas = np.flatnonzero(inner == _COMMA)
        starts = np.empty(len(commas) + 1, dtype=np.intp)
        starts[0], starts[1:] = 0, commas
        starts[1:] += 1
        lengths = np.empty_like(starts)
        lengths[:-1], lengths[-1] = commas, len(inner)
        lengths -= starts
        starts += begin + 1
        return cls(text, starts, lengths)

    def __len__(self) -> int:
        return len(self.starts)

    def some(self, which: Places | _Flags) -> "JsonNameList":
        """Return the selected items."""
        return JsonNameList(self.text, self.starts[which], self.lengths[which])

    def words(self, head: int, tail: int) -> list[Words]:
        """Return the first `head` and the last `tail` bytes of each item as 8-byte words.

        No item may be shorter than either part.
        """
        ends = self.starts + (self.lengths - tail)
        parts = (_taken(self.text, self.starts, head), _taken(self.text, ends, tail))
        return [word for part in parts for word in part.view("<u8").reshape(len(part), -1).T]

    def joined(self, indexes: Places) -> bytes:
        """Return the bytes of some items, joined by commas.

        Args:
            indexes: indexes of the items, ascending and distinct; adjacent items are copied at
                once.

        Example:
            >>> pieces = JsonNameList.of(b'["a","b","c","d"]', 0, 17)
            >>> pieces.joined(np.array([0, 1, 3]))
            b'"a","b","d"'
        """
        if len(indexes) == len(self):
            return self._whole()
        if _FEW * len(indexes) <= len(self):
            begins = self.starts[indexes]
            return self._between(begins, begins + self.lengths[indexes])
        is_break = np.ones(len(indexes) + 1, dtype=np.bool_)
        np.not_equal(indexes[1:], indexes[:-1] + 1, out=is_break[1:-1])
        breaks = np.flatnonzero(is_break)
        firsts, lasts = indexes[breaks[:-1]], indexes[breaks[1:] - 1]
        return self._between(self.starts[firsts], self.starts[lasts] + self.lengths[lasts])

    def _between(self, begins: Places, ends: Places) -> bytes:
        """Return the byte ranges of the text, joined by commas."""
        spans = zip(begins.tolist(), ends.tolist(), strict=True)
        return b",".join([self.text[begin:end] for begin, end in spans])

    def split(self) -> list[bytes]:
        """Return each item's bytes."""
        return self._whole().split(b",")

    def _whole(self) -> bytes:
        return self.text[self.starts[0] : self.starts[-1] + self.lengths[-1]]


def _taken(text: bytes, starts: Places, size: int) -> npt.NDArray[np.void]:
    """Return `size` bytes of a text from each start."""
    # One void item per start: a fancy index copies whole items fast.
    width = np.dtype((np.void, size))
    parts: npt.NDArray[np.void] = np.ndarray(
        len(text) - size + 1, width, buffer=text, strides=(1,)
    )[starts]
    return parts
