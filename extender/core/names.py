"""Thousands of node names at once: found where they stand in a question, kept as small numbers.

To make 5,000 strings of a question, and to look each up, takes as long as everything else that an
answer needs. So the names stay in the bytes that they came in: a table finds the rows of all of
them in a few vector operations, eight bytes of each name at a time.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from extender.core.pieces import Pieces, Places, Words
from extender.core.steps import Steps, finish

_WORD = 8
_SPECIAL = '",\\'
_ODD = np.uint64(0x9E3779B97F4A7C15)  # Knuth's multiplicative hashing, the golden ratio of 2**64
_HALF = np.uint64(32)
_SPARE_BITS = 2
"""The table has so many bits more than its names need: few share a place, and it stays small."""


MOST_STRANGERS = 256
"""Where so many names of a list are unknown, the list had better be read otherwise."""

_PLAIN_NAME = re.compile(rb'"([ -!#-+\--\[\]-~]+)"')
"""A name that JSON writes as it is, and that has no comma in it."""


class NamesAt(Sequence[str]):
    """Names, each by its place in a shared tuple.

    Args:
        names: names that others use too.
        rows: the places, in any whole numbers.

    Example:
        >>> list(NamesAt(("a", "b", "c"), np.array([2, 0])))
        ['c', 'a']
    """

    __slots__ = ("names", "rows")

    def __init__(self, names: tuple[str, ...], rows: npt.NDArray[np.integer]) -> None:
        self.names = names
        self.rows = rows

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> "NamesAt": ...

    @override
    def __getitem__(self, index: int | slice) -> "str | NamesAt":
        if isinstance(index, slice):
            return NamesAt(self.names, self.rows[index])
        return self.names[int(self.rows[index])]

    def sorted_as(self, order: Places, like: "Sequence[str] | None") -> "NamesAt":
        """Return the names in another order, in little memory; `like` itself if it is the same."""
        rows: npt.NDArray[np.integer] = self.rows[order]
        if isinstance(like, NamesAt) and like.is_same(self.names, rows):
            return like
        fits = len(self.names) <= np.iinfo(np.uint16).max
        return NamesAt(self.names, rows.astype(np.uint16) if fits else rows)

    def is_same(self, names: tuple[str, ...], rows: npt.NDArray[np.integer]) -> bool:
        """Tell whether these are the same names in the same order."""
        return self.names is names and np.array_equal(self.rows, rows)

    @override
    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __iter__(self) -> Iterator[str]:
        return map(self.names.__getitem__, self.rows.tolist())


class NamesIn(NamesAt):
    """Names that were found in a text.

    Args:
        names: names that others use too.
        rows: the places.
        pieces: each name where it stands in the text, as JSON.
    """

    __slots__ = ("pieces",)

    def __init__(
        self, names: tuple[str, ...], rows: npt.NDArray[np.integer], pieces: Pieces
    ) -> None:
        super().__init__(names, rows)
        self.pieces = pieces


@dataclass(frozen=True, slots=True)
class Found:
    """The names of a list.

    Attributes:
        places: of each, its place among the known ones; those that are not known count on from
            there, in the order of `strangers`.
        strangers: the names that are not known, in the order of the list.
    """

    places: Places
    strangers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class NameTable:
    """Finds names of a JSON list among known ones, all at once.

    What stands between two commas of the list is a name if it is that of a known one, in its
    quotation marks, byte by byte; no known one has a comma in it, or anything that JSON would write
    otherwise. Nor may those that are not known, and they must be few. Two parts of it are looked at
    that cover it together: as many whole words of eight bytes as the shortest has from its begin,
    and what the longest has more from its end. Where the shortest is too short for that, nothing is
    found here.

    Attributes:
        head: bytes of the first part.
        tail: bytes of the last part.
        lengths: of each known name, in bytes, with its quotation marks.
        words: of each known name, eight bytes at a time; a single one where it is that of all.
        telling: in which words no two of them are the same, most of the time in one.
        hashes: of each known name's telling words.
        places: the place of a known name by its hash's first bits, or soon after; -1 is free.
        shift: bits of a hash that are not used for that.
    """

    head: int
    tail: int
    lengths: Places
    words: tuple[Words, ...]
    telling: tuple[int, ...]
    hashes: Words
    places: npt.NDArray[np.signedinteger]
    shift: np.uint64

    @classmethod
    def of(cls, names: Sequence[str]) -> "NameTable | None":
        """Return the table of some names, each another; None where it could not find any."""
        return finish(cls.in_steps(names, None))

    @classmethod
    def in_steps(cls, names: Sequence[str], like: "NameTable | None") -> "Steps[NameTable | None]":
        """Return the same in steps.

        Args:
            names: the names.
            like: one of names of which most are the same: what tells these apart is tried first.
        """
        if not names or not _is_plain("".join(names)):
            return None
        text = b'["' + b'","'.join(map(str.encode, names)) + b'"]'
        pieces = Pieces.of(text, 0, len(text))
        yield
        if pieces is None or (chosen := (yield from _split(pieces, like))) is None:
            return None
        words, telling = chosen.words, chosen.telling
        hashes = _hashes([words[at] for at in telling])
        bits = len(names).bit_length() + _SPARE_BITS
        shift = np.uint64(64 - bits)
        # As small as can be, here and there: what is read all over is in no near cache.
        places = np.full(1 << bits, -1, dtype=np.min_scalar_type(-len(names)))
        left, slots = np.arange(len(names)), (hashes >> shift).view(np.intp)
        while len(left):
            free = places[slots[left]] < 0
            places[slots[left[free]]] = left[free]
            left = left[places[slots[left]] != left]
            slots[left] = (slots[left] + 1) % len(places)
        return cls(
            head=chosen.head,
            tail=chosen.tail,
            lengths=pieces.lengths.astype(np.min_scalar_type(pieces.lengths.max())),
            words=tuple(word[:1].copy() if _is_one(word) else word.copy() for word in words),
            telling=telling,
            hashes=hashes,
            places=places,
            shift=shift,
        )

    def find(self, pieces: Pieces) -> Found | None:
        """Return the names of a JSON list, as Go writes it.

        None where one is listed twice, too many are not known, or it is no such list.
        """
        lengths = pieces.lengths
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest >= max(self.head, self.tail) and longest <= self.head + self.tail:
            found = self._find(pieces)
        else:
            fits = (lengths >= max(self.head, self.tail)) & (lengths <= self.head + self.tail)
            found = np.full(len(pieces), -1, dtype=np.intp)
            if fits.any():
                found[fits] = self._find(pieces.some(fits))
        strangers: tuple[str, ...] = ()
        if found.min() < 0:
            unknown = np.flatnonzero(found < 0)
            names = _plain_names(pieces.some(unknown))
            if names is None:
                return None
            found[unknown] = np.arange(len(self.hashes), len(self.hashes) + len(names))
            strangers = names
        return None if np.bincount(found).max() > 1 else Found(found, strangers)

    def _find(self, pieces: Pieces) -> Places:
        """Return the place of what stands in each piece of a text; -1 where that is no known name.

        No piece may be shorter than either part, or longer than both.
        """
        words = pieces.words(self.head, self.tail)
        hashes = _hashes([words[at] for at in self.telling])
        slots = (hashes >> self.shift).view(np.intp)
        found = self.places[slots].astype(np.intp)
        others = np.flatnonzero(self.hashes[found] != hashes)
        others = others[found[others] >= 0]
        while len(others):
            slots[others] = (slots[others] + 1) % len(self.places)
            found[others] = next_found = self.places[slots[others]]
            others = others[(next_found >= 0) & (self.hashes[next_found] != hashes[others])]
        is_other = self.lengths[found] != pieces.lengths
        for at, (known, asked) in enumerate(zip(self.words, words, strict=True)):
            # Of one word, multiplied by an odd number, the hash is the same only if the word is.
            if self.telling != (at,):
                is_other |= (known if len(known) == 1 else known[found]) != asked
        if is_other.any():
            found[is_other] = -1
        return found


@dataclass(frozen=True, slots=True)
class _Split:
    """One way to look at names: `head` and `tail` bytes of them, as words, and what tells."""

    head: int
    tail: int
    words: list[Words]
    telling: tuple[int, ...]

    @property
    def cost(self) -> tuple[int, int]:
        """What finding names so costs: words that are hashed, and words that are looked up."""
        return len(self.telling), sum(not _is_one(word) for word in self.words)


def _split(pieces: Pieces, like: NameTable | None) -> Steps[_Split | None]:
    """Choose two parts that cover every piece and are in every one; None where there are none."""
    shortest, longest = int(pieces.lengths.min()), int(pieces.lengths.max())
    sizes = [
        (head, max(-(-(longest - head) // _WORD), 1) * _WORD)
        for head in range(_WORD, shortest + 1, _WORD)
    ]
    splits: list[_Split] = []
    for head, tail in sorted(sizes, key=lambda size: like is None or size[0] != like.head):
        if tail <= shortest:
            words = pieces.words(head, tail)
            telling = _telling(words, like.telling if like else ())
            splits.append(_Split(head, tail, words, telling))
            if like is not None and (head, telling) == (like.head, like.telling):
                return splits[0]  # most names are the same: it is the best still, or nearly
            yield
    return min(splits, key=lambda split: split.cost, default=None)


def _is_one(word: Words) -> bool:
    return bool((word == word[0]).all())


def _is_plain(names: str) -> bool:
    """Whether JSON writes names as they are."""
    is_written_so = names.isascii() and names.isprintable()
    return is_written_so and not any(special in names for special in _SPECIAL)


def _plain_names(pieces: Pieces) -> tuple[str, ...] | None:
    """Return the names in some pieces of a text, each once.

    None where one is listed twice, they are too many, or one is written as Go does not.
    """
    if len(pieces) > MOST_STRANGERS:
        return None
    spans = zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
    read = [_PLAIN_NAME.fullmatch(pieces.text, at, at + length) for at, length in spans]
    names = {match[1].decode(): None for match in read if match is not None}
    return tuple(names) if len(names) == len(read) else None


def _telling(words: Sequence[Words], likely: tuple[int, ...]) -> tuple[int, ...]:
    """Return as few of the words as tell all names apart, the most telling ones first."""
    if likely and max(likely) < len(words) and _tell_apart([words[at] for at in likely]):
        return likely
    variety = [1 if _is_one(word) else len(np.unique(word)) for word in words]
    ranked = sorted(range(len(words)), key=variety.__getitem__, reverse=True)
    for count in range(1, len(words)):
        if _tell_apart([words[at] for at in ranked[:count]]):
            return tuple(ranked[:count])
    return tuple(ranked)


def _tell_apart(words: Sequence[Words]) -> bool:
    """Whether no two names have the same hash of these words."""
    return len(np.unique(_hashes(words))) == len(words[0])


def _hashes(words: Sequence[Words]) -> Words:
    """Return a hash of each name: its first bits depend on all of it."""
    hashes = words[0] * _ODD
    for word in words[1:]:
        # In a mere sum a digit in one word makes up for another in the next: rack003-node001 would
        # be rack000-node002.
        hashes ^= hashes >> _HALF
        hashes += word
        hashes *= _ODD
    return hashes
