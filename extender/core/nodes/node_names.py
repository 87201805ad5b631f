"""Look up thousands of node names at once in the bytes of a JSON list, without creating strings.

Creating 5,000 strings and looking each up takes as long as the rest of an answer. So the names stay
in the request's bytes: a hash table finds all rows in a few vector operations, eight bytes of each
name at a time.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from extender.core.steps import Steps

_Words = npt.NDArray[np.uint64]
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

    def words(self, head: int, tail: int) -> list[_Words]:
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


_WORD = 8
_SPECIAL = '",\\'
_ODD = np.uint64(0x9E3779B97F4A7C15)  # Knuth's multiplicative hashing, the golden ratio of 2**64
_HALF = np.uint64(32)
_SPARE_BITS = 2
"""Extra bits of the hash table's size: few collisions in a table that is still small."""


MOST_STRANGERS = 256
"""Maximum number of unknown names in a list; lists with more are parsed as strings."""

_PLAIN_NAME = re.compile(rb'"([ -!#-+\--\[\]-~]+)"')
"""A name without JSON escapes and without commas."""


class NamesAt(Sequence[str]):
    """A sequence of names, stored as indexes into a shared tuple.

    Args:
        names: shared tuple of names.
        rows: indexes into `names`, of any integer type.

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
        """Return the names in the given order with compact indexes; `like` itself if equal."""
        rows: npt.NDArray[np.integer] = self.rows[order]
        if isinstance(like, NamesAt) and like.is_same(self.names, rows):
            return like
        fits = len(self.names) <= np.iinfo(np.uint16).max
        return NamesAt(self.names, rows.astype(np.uint16) if fits else rows)

    def is_same(self, names: tuple[str, ...], rows: npt.NDArray[np.integer]) -> bool:
        """Return whether this sequence has the same shared tuple and the same indexes."""
        return self.names is names and np.array_equal(self.rows, rows)

    @override
    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __iter__(self) -> Iterator[str]:
        return map(self.names.__getitem__, self.rows.tolist())


class NamesIn(NamesAt):
    """Names found in a JSON list.

    Args:
        names: shared tuple of names.
        rows: indexes into `names`.
        pieces: the JSON bytes of each name.
    """

    __slots__ = ("pieces",)

    def __init__(
        self, names: tuple[str, ...], rows: npt.NDArray[np.integer], pieces: JsonNameList
    ) -> None:
        super().__init__(names, rows)
        self.pieces = pieces


@dataclass(frozen=True, slots=True)
class _Found:
    """Result of a lookup.

    Attributes:
        places: index of each name among the known names; unknown names count on from there in the
            order of `strangers`.
        strangers: the unknown names, in the order of the list.
    """

    places: Places
    strangers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class NameTable:
    """Hash table that finds known names in a JSON list, all names at once.

    An item between two commas matches a known name if its bytes are equal, quotation marks
    included. Names with commas or JSON escapes are not supported. Each item is compared by two
    overlapping parts: `head` bytes from its start and `tail` bytes from its end, both in whole
    words of eight bytes. Names shorter than one part are not supported.

    Attributes:
        head: length of the first part in bytes.
        tail: length of the last part in bytes.
        lengths: length of each known name in bytes, with its quotation marks.
        words: words of all known names, one array per word position; one element if all are equal.
        distinguishing: word positions that distinguish all names, usually one.
        hashes: hash of each known name's distinguishing words.
        places: open-addressing table from a hash's top bits to a name's index; -1 is free.
        shift: number of low hash bits that the table ignores.
    """

    head: int
    tail: int
    lengths: Places
    words: tuple[_Words, ...]
    distinguishing: tuple[int, ...]
    hashes: _Words
    places: npt.NDArray[np.signedinteger]
    shift: np.uint64

    @classmethod
    def in_steps(cls, names: Sequence[str], like: "NameTable | None") -> "Steps[NameTable | None]":
        """Build the table in steps.

        Args:
            names: the names, all distinct.
            like: table of mostly the same names; its distinguishing words are tried first.
        """
        if not names or not _is_plain("".join(names)):
            return None
        text = b'["' + b'","'.join(map(str.encode, names)) + b'"]'
        pieces = JsonNameList.of(text, 0, len(text))
        yield
        if pieces is None or (chosen := (yield from _split(pieces, like))) is None:
            return None
        words, distinguishing = chosen.words, chosen.distinguishing
        hashes = _hashes([words[at] for at in distinguishing])
        bits = len(names).bit_length() + _SPARE_BITS
        shift = np.uint64(64 - bits)
        # The smallest integer type keeps the table in the CPU cache.
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
            distinguishing=distinguishing,
            hashes=hashes,
            places=places,
            shift=shift,
        )

    def find(self, pieces: JsonNameList) -> _Found | None:
        """Look up the names of a JSON list in Go's spelling.

        Returns None if a name occurs twice, too many are unknown, or the list is not in Go's
        spelling.
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
        return None if np.bincount(found).max() > 1 else _Found(found, strangers)

    def _find(self, pieces: JsonNameList) -> Places:
        """Return the index of each item; -1 if it is not a known name.

        No item may be shorter than one part, or longer than both parts together.
        """
        words = pieces.words(self.head, self.tail)
        hashes = _hashes([words[at] for at in self.distinguishing])
        slots = (hashes >> self.shift).view(np.intp)
        found = self.places[slots].astype(np.intp)
        others = np.flatnonzero(self.hashes[found] != hashes)
        others = others[found[others] >= 0]
        while len(others):
            slots[others] = (slots[others] + 1) % len(self.places)
            found[others] = next_found = self.places[slots[others]]
            others = others[(next_found >= 0) & (self.hashes[next_found] != hashes[others])]
        is_other = self.lengths[found] != pieces.lengths
        for at, (known, requested) in enumerate(zip(self.words, words, strict=True)):
            # The hash of a single word is unique: it is multiplied by an odd number.
            if self.distinguishing != (at,):
                is_other |= (known if len(known) == 1 else known[found]) != requested
        if is_other.any():
            found[is_other] = -1
        return found


@dataclass(frozen=True, slots=True)
class _Split:
    """One division of names into `head` and `tail` bytes, with the resulting words."""

    head: int
    tail: int
    words: list[_Words]
    distinguishing: tuple[int, ...]

    @property
    def cost(self) -> tuple[int, int]:
        """Cost of a lookup: number of words to hash, and number of words to compare."""
        return len(self.distinguishing), sum(not _is_one(word) for word in self.words)


def _split(pieces: JsonNameList, like: NameTable | None) -> Steps[_Split | None]:
    """Choose the cheapest head and tail that fit into every item and cover it, None without any."""
    shortest, longest = int(pieces.lengths.min()), int(pieces.lengths.max())
    sizes = [
        (head, max(-(-(longest - head) // _WORD), 1) * _WORD)
        for head in range(_WORD, shortest + 1, _WORD)
    ]
    splits: list[_Split] = []
    for head, tail in sorted(sizes, key=lambda size: like is None or size[0] != like.head):
        if tail <= shortest:
            words = pieces.words(head, tail)
            distinguishing = _distinguishing(words, like.distinguishing if like else ())
            splits.append(_Split(head, tail, words, distinguishing))
            if like is not None and (head, distinguishing) == (like.head, like.distinguishing):
                return splits[0]  # with mostly the same names this is still about the best
            yield
    return min(splits, key=lambda split: split.cost, default=None)


def _is_one(word: _Words) -> bool:
    return bool((word == word[0]).all())


def _is_plain(names: str) -> bool:
    """Return whether the names need no JSON escapes."""
    is_written_so = names.isascii() and names.isprintable()
    return is_written_so and not any(special in names for special in _SPECIAL)


def _plain_names(pieces: JsonNameList) -> tuple[str, ...] | None:
    """Return the names of some items; None on duplicates, escapes or too many items."""
    if len(pieces) > MOST_STRANGERS:
        return None
    spans = zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
    read = [_PLAIN_NAME.fullmatch(pieces.text, at, at + length) for at, length in spans]
    names = {match[1].decode(): None for match in read if match is not None}
    return tuple(names) if len(names) == len(read) else None


def _distinguishing(words: Sequence[_Words], likely: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest set of word positions that distinguishes all names."""
    if likely and max(likely) < len(words) and _are_distinct([words[at] for at in likely]):
        return likely
    variety = [1 if _is_one(word) else len(np.unique(word)) for word in words]
    ranked = sorted(range(len(words)), key=variety.__getitem__, reverse=True)
    for count in range(1, len(words)):
        if _are_distinct([words[at] for at in ranked[:count]]):
            return tuple(ranked[:count])
    return tuple(ranked)


def _are_distinct(words: Sequence[_Words]) -> bool:
    """Return whether the hashes of these words are distinct."""
    return len(np.unique(_hashes(words))) == len(words[0])


def _hashes(words: Sequence[_Words]) -> _Words:
    """Return a hash of each name; its top bits depend on all words."""
    hashes = words[0] * _ODD
    for word in words[1:]:
        # A plain sum has collisions: rack003-node001 would equal rack000-node002.
        hashes ^= hashes >> _HALF
        hashes += word
        hashes *= _ODD
    return hashes


def near_names(name: str, names: Sequence[str], most: int) -> Sequence[str]:
    """Return the alphabetical neighbors of a name that is not in a list.

    Node names of one cluster mostly differ at the end, so their neighbors are likely corrections.

    Args:
        name: the name to look for.
        names: all names, sorted.
        most: largest number of names to return.

    Example:
        >>> near_names("gpu-3x", ("cpu-1", "gpu-1", "gpu-2", "gpu-3", "gpu-4", "web-1"), 2)
        ('gpu-3', 'gpu-4')
        >>> near_names("a", ("cpu-1", "gpu-1", "gpu-2"), 2)
        ('cpu-1', 'gpu-1')
    """
    start = bisect_left(names, name) - most // 2
    start = max(min(start, len(names) - most), 0)
    return names[start : start + most]
