"""Thousands of node names at once: found where they stand in a question, kept as small numbers.

To make 5,000 strings of a question, and to look each up, takes as long as everything else that an
answer needs. So the names stay in the bytes that they came in: a table finds the rows of all of
them in a few vector operations, eight bytes of each name at a time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.intp]

_WORD = 8
_QUOTE, _COMMA = b'",'
_ODD = np.uint64(0x9E3779B97F4A7C15)  # Knuth's multiplicative hashing, the golden ratio of 2**64
_HALF = np.uint64(32)
_SPARE_BITS = 2
"""The table has so many bits more than its names need: few share a place, and it stays small."""


FEW = 300
"""Fewer names are looked up one by one: that is faster than some dozen vector operations."""


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

    def pick(self, indexes: Places) -> list[str]:
        """Return some of the names."""
        return list(map(self.names.__getitem__, self.rows[indexes].tolist()))

    @override
    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __iter__(self) -> Iterator[str]:
        return map(self.names.__getitem__, self.rows.tolist())


class JsonNames(Sequence[str]):
    """The names of a JSON list of strings, made into strings only where somebody asks.

    Args:
        text: the list; `read` tells whether it is plain enough.
        starts: where each name begins.
        lengths: how long each is.
        stride: from the begin of each name to that of the next, 0 where that differs.
    """

    def __init__(self, text: bytes, starts: Places, lengths: Places, stride: int = 0) -> None:
        self.text = text
        self.starts = starts
        self.lengths = lengths
        self.stride = stride

    @classmethod
    def read(cls, text: bytes) -> "JsonNames | None":
        r"""Return the names of a list as Go writes it; None where it must be read otherwise.

        Example:
            >>> list(JsonNames.read(b'["a","b"]') or ())
            ['a', 'b']
            >>> JsonNames.read(b'["a", "b"]'), JsonNames.read(b'["\\u0061"]')
            (None, None)
        """
        if not (text.startswith(b'["') and text.endswith(b'"]') and text.isascii()):
            return None
        buffer = np.frombuffer(text, np.uint8)
        if b"\\" in text or buffer.min() < ord(" "):
            return None
        is_quote = buffer == _QUOTE
        return cls._read_even(text, buffer, is_quote) or cls._read_uneven(text, buffer, is_quote)

    @classmethod
    def _read_even(
        cls, text: bytes, buffer: npt.NDArray[np.uint8], is_quote: npt.NDArray[np.bool_]
    ) -> "JsonNames | None":
        """Return names of one length: they need not be looked for."""
        length = max(text.find(b'"', 2) - 2, 0)
        stride = length + 3
        count, rest = divmod(len(text) - 1, stride)
        if rest or np.count_nonzero(is_quote) != 2 * count:
            return None
        marks = is_quote[1:].reshape(count, stride)
        commas = buffer[1:].reshape(count, stride)[:-1, length + 2]
        if not (marks[:, 0].all() and marks[:, length + 1].all() and (commas == _COMMA).all()):
            return None
        starts = np.arange(2, len(text), stride)
        return cls(text, starts, np.full(count, length, dtype=np.intp), stride)

    @classmethod
    def _read_uneven(
        cls, text: bytes, buffer: npt.NDArray[np.uint8], is_quote: npt.NDArray[np.bool_]
    ) -> "JsonNames | None":
        """Return names of any lengths."""
        quotes = np.flatnonzero(is_quote)
        closing, opening = quotes[1:-1:2], quotes[2::2]
        if len(quotes) % 2 or quotes[-1] != len(text) - 2:
            return None
        if (opening - closing != 2).any() or (buffer[closing + 1] != _COMMA).any():  # noqa: PLR2004 - `","`
            return None
        starts = quotes[0::2] + 1
        return cls(text, starts, quotes[1::2] - starts)

    @property
    def listed(self) -> int:
        """How many names are listed."""
        return len(self.starts)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names, each once."""
        return tuple(dict.fromkeys(self.text[2:-2].decode().split('","')))

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...

    @override
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self.names[index]

    def __bool__(self) -> bool:
        return True  # an empty list is not read so; a count would make all the strings

    @override
    def __len__(self) -> int:
        return len(self.names)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.names)


@dataclass(frozen=True, slots=True, eq=False)
class NameTable:
    """Finds names of a JSON list among known ones, all at once.

    Attributes:
        words: the known names as words of eight bytes, one array for each word.
        hashes: of each known name.
        places: the place of a known name by its hash's first bits, or soon after; -1 is free.
        shift: bits of a hash that are not used for that.
    """

    words: tuple[Words, ...]
    hashes: Words
    places: npt.NDArray[np.int32]
    shift: np.uint64

    @classmethod
    def of(cls, names: Sequence[str]) -> "NameTable":
        """Return the table of some names, each another."""
        listed = JsonNames.read(b'["' + '","'.join(names).encode() + b'"]') if names else None
        if listed is None:  # no names of nodes: nothing will be found, and others look them up
            empty = np.zeros(0, dtype=np.uint64)
            return cls((), empty, np.full(1, -1, dtype=np.int32), np.uint64(0))
        words = _words(listed, int(listed.lengths.max()) // _WORD + 1)
        hashes = _hashes(words)
        bits = len(names).bit_length() + _SPARE_BITS
        shift = np.uint64(64 - bits)
        places = np.full(1 << bits, -1, dtype=np.int32)
        left, slots = np.arange(len(names)), (hashes >> shift).astype(np.intp)
        while len(left):
            free = places[slots[left]] < 0
            places[slots[left[free]]] = left[free]
            left = left[places[slots[left]] != left]
            slots[left] = (slots[left] + 1) % len(places)
        return cls(words, hashes, places, shift)

    def find(self, listed: JsonNames) -> Places | None:
        """Return the place of each name of a list.

        None where one is not known, or listed twice.
        """
        if not len(self.hashes) or listed.lengths.max() > _WORD * len(self.words):
            return None
        words = _words(listed, len(self.words))
        hashes = _hashes(words)
        slots = (hashes >> self.shift).astype(np.intp)
        found = self.places[slots].astype(np.intp)
        others = np.flatnonzero(self.hashes[found] != hashes)
        while len(others):
            slots[others] = (slots[others] + 1) % len(self.places)
            found[others] = next_found = self.places[slots[others]]
            if (next_found < 0).any():
                return None
            others = others[self.hashes[next_found] != hashes[others]]
        if found.min() < 0 or np.bincount(found).max() > 1:
            return None
        pairs = zip(self.words, words, strict=True)
        return found if all((known[found] == word).all() for known, word in pairs) else None


class Roll:
    """The nodes by number: a node's number is its name's place among all of them.

    Args:
        nodes: every node.
        pools: each pool's nodes in the order of its rows, by resource.
    """

    def __init__(self, nodes: Iterable[str], pools: Mapping[str, Sequence[str]]) -> None:
        self.names = tuple(sorted({*nodes, *chain.from_iterable(pools.values())}))
        self._number_of = {name: number for number, name in enumerate(self.names)}
        self._table = NameTable.of(self.names)
        self._rows: dict[str, Places] = {}
        for resource, listed in pools.items():
            rows = np.full(len(self.names), -1, dtype=np.intp)
            rows[[self._number_of[name] for name in listed]] = np.arange(len(listed))
            self._rows[resource] = rows

    def number(self, names: Sequence[str]) -> Sequence[str]:
        """Return names by their numbers if all are known; else as they are."""
        if isinstance(names, NamesAt) and names.names is self.names:
            return names
        if isinstance(names, JsonNames):
            found = self._table.find(names) if names.listed >= FEW else None
            if found is not None:
                return NamesAt(self.names, found)
            names = names.names
        numbers = list(map(self._number_of.get, names))
        return names if None in numbers else NamesAt(self.names, np.array(numbers, dtype=np.intp))

    def rows(self, resource: str, names: Sequence[str]) -> Places | None:
        """Return the row of each name in a pool, -1 where it is not in it.

        None where the names are not by number, or the pool is not on the roll.
        """
        rows = self._rows.get(resource)
        if rows is None or not (isinstance(names, NamesAt) and names.names is self.names):
            return None
        found: Places = rows[names.rows]
        return found


EMPTY_ROLL = Roll((), {})


def _words(listed: JsonNames, count: int) -> tuple[Words, ...]:
    """Return the first `count` words of each name; behind its end a name is 0."""
    text = listed.text + bytes(_WORD * count)
    masks = _masks(count, int(listed.lengths.max()))
    if listed.stride:
        every = (listed.listed,), "<u8", text
        return tuple(
            np.ndarray(*every, offset=listed.starts[0] + _WORD * at, strides=(listed.stride,))
            & masks[at, -1]
            for at in range(count)
        )
    # As one item, for a fancy index copies each whole, and fast.
    width = np.dtype((np.void, _WORD * count))
    texts = np.ndarray(len(text) - width.itemsize + 1, width, buffer=text, strides=(1,))
    rows = texts[listed.starts].view("<u8").reshape(-1, count)
    return tuple(rows[:, at] & masks[at][listed.lengths] for at in range(count))


def _hashes(words: Sequence[Words]) -> Words:
    """Return a hash of each name: its first bits depend on all of it."""
    factors = (np.uint64(int(_ODD) * (2 * at + 1) % (1 << 64)) for at in range(len(words)))
    hashes = np.zeros(len(words[0]), dtype=np.uint64)
    for word, factor in zip(words, factors, strict=True):
        hashes += word * factor
    hashes ^= hashes >> _HALF
    hashes *= _ODD
    hashes ^= hashes >> _HALF
    return hashes * _ODD


@lru_cache(maxsize=256)
def _masks(count: int, longest: int) -> Words:
    """Return which bits of each of `count` words are a name's, by the length of the name."""
    lengths = np.arange(longest + 1) - _WORD * np.arange(count)[:, None]
    sizes = np.minimum(np.maximum(lengths, 0), _WORD)
    masks = np.array([(1 << 8 * size) - 1 for size in range(_WORD + 1)], dtype=np.uint64)
    of_word: Words = masks[sizes]
    return of_word
