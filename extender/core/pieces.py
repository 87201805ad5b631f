"""A JSON list of thousands of names in the bytes that it came in, cut at its commas."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]

_COMMA = ord(",")

FEW = 8
"""Of one in so many pieces, hardly two are neighbors: that is not looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What stands between the commas of a list in a text: its items, where none has a comma in it.

    Attributes:
        text: has the list in it.
        starts: where each piece begins in the text.
        lengths: of each piece, in bytes.
    """

    text: bytes
    starts: Places
    lengths: Places

    @classmethod
    def of(cls, text: bytes, begin: int, end: int) -> "Pieces | None":
        """Return the pieces of a list; None where it does not begin and end as one.

        Args:
            text: has the list in it.
            begin: where the list begins.
            end: where the list ends.
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

    def some(self, which: Places | Flags) -> "Pieces":
        """Return some of the pieces."""
        return Pieces(self.text, self.starts[which], self.lengths[which])

    def words(self, head: int, tail: int) -> list[Words]:
        """Return the words of so many bytes from the begin and from the end of each piece.

        No piece may be shorter than either part.
        """
        ends = self.starts + (self.lengths - tail)
        parts = (_taken(self.text, self.starts, head), _taken(self.text, ends, tail))
        return [word for part in parts for word in part.view("<u8").reshape(len(part), -1).T]

    def joined(self, indexes: Places) -> bytes:
        """Return some of the pieces as they stand in the text, with the commas between them.

        Args:
            indexes: of the pieces, in order and each at most once: neighbors are copied as one.

        Example:
            >>> pieces = Pieces.of(b'["a","b","c","d"]', 0, 17)
            >>> pieces.joined(np.array([0, 1, 3]))
            b'"a","b","d"'
        """
        if len(indexes) == len(self):
            return self._whole()
        if FEW * len(indexes) <= len(self):
            begins = self.starts[indexes]
            return self._between(begins, begins + self.lengths[indexes])
        is_break = np.ones(len(indexes) + 1, dtype=np.bool_)
        np.not_equal(indexes[1:], indexes[:-1] + 1, out=is_break[1:-1])
        breaks = np.flatnonzero(is_break)
        firsts, lasts = indexes[breaks[:-1]], indexes[breaks[1:] - 1]
        return self._between(self.starts[firsts], self.starts[lasts] + self.lengths[lasts])

    def _between(self, begins: Places, ends: Places) -> bytes:
        """Return some stretches of the text, with commas between them."""
        spans = zip(begins.tolist(), ends.tolist(), strict=True)
        return b",".join([self.text[begin:end] for begin, end in spans])

    def split(self) -> list[bytes]:
        """Return every piece by itself."""
        return self._whole().split(b",")

    def _whole(self) -> bytes:
        return self.text[self.starts[0] : self.starts[-1] + self.lengths[-1]]


def _taken(text: bytes, starts: Places, size: int) -> npt.NDArray[np.void]:
    """Return so many bytes of a text from each start."""
    # As one item, for a fancy index copies each whole, and fast.
    width = np.dtype((np.void, size))
    parts: npt.NDArray[np.void] = np.ndarray(
        len(text) - size + 1, width, buffer=text, strides=(1,)
    )[starts]
    return parts
