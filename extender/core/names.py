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
"""The table has one to two bits more than its names need: few share a place, and it stays small."""


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
        quotes: where its quotation marks stand.
    """

    def __init__(self, text: bytes, quotes: Places) -> None:
        self.text = text
        self.starts = quotes[0::2] + 1
        self.lengths = quotes[1::2] - self.starts

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
        quotes = np.flatnonzero(buffer == _QUOTE)
        closing, opening = quotes[1:-1:2], quotes[2::2]
        if len(quotes) % 2 or b"\\" in text or buffer.min() < ord(" "):
            return None
        if quotes[-1] != len(text) - 2 or (opening - closing != 2).any():  # noqa: PLR2004 - `","`
            return None
        return cls(text, quotes) if (buffer[closing + 1] == _COMMA).all() else None

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
        words: the known names as words of eight bytes, one row for each.
        hashes: of each known name.
        places: the place of a known name by its hash's first bits, or soon after; -1 is free.
        shift: bits of a hash that are not used for that.
    """

    words: Words
    hashes: Words
    places: npt.NDArray[np.int32]
    shift: np.uint64

    @classmethod
    def of(cls, names: Sequence[str]) -> "NameTable":
        """Return the table of some names, each another."""
        listed = JsonNames.read(b'["' + '","'.join(names).encode() + b'"]') if names else None
        if listed is None:  # no names of nodes: nothing will be found, and others look them up
            empty = np.zeros(0, dtype=np.uint64)
            return cls(empty, empty, np.full(1, -1, dtype=np.int32), np.uint64(0))
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
        if not len(self.hashes) or listed.lengths.max() > _WORD * self.words.shape[1]:
            return None
        words = _words(listed, self.words.shape[1])
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
        return found if np.array_equal(_rows_at(self.words, found), words) else None


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
            found = self._table.find(names)
            if found is not None:
                return NamesAt(self.names, found)
            names = names.names
        if any(name not in self._number_of for name in names):
            return names
        return NamesAt(self.names, np.array([*map(self._number_of.get, names)], dtype=np.intp))

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


def _words(listed: JsonNames, count: int) -> Words:
    """Return the first `count` words of each name, a row for each; behind its end a name is 0."""
    text = listed.text + bytes(_WORD * count)
    width = _row_type(count)
    at = np.ndarray(len(text) - width.itemsize + 1, dtype=width, buffer=text, strides=(1,))
    words: Words = at[listed.starts].view("<u8").reshape(-1, count)
    shortest, longest = int(listed.lengths.min()), int(listed.lengths.max())
    masks = _masks(count, longest)
    words &= masks[longest] if shortest == longest else _rows_at(masks, listed.lengths)
    return words


def _row_type(count: int) -> np.dtype[np.void]:
    """Return the type of so many words as one item: a fancy index copies each whole, and fast."""
    return np.dtype((np.void, _WORD * count))


def _rows_at(words: Words, places: Places) -> Words:
    """Return the rows at some places."""
    count = words.shape[1]
    rows: Words = words.view(_row_type(count))[places, 0].view(np.uint64).reshape(-1, count)
    return rows


def _hashes(words: Words) -> Words:
    """Return a hash of each row: its first bits depend on all of it."""
    hashes: Words = words @ _factors(words.shape[1])
    hashes ^= hashes >> _HALF
    hashes *= _ODD
    hashes ^= hashes >> _HALF
    return hashes * _ODD


@lru_cache(maxsize=256)
def _masks(count: int, longest: int) -> Words:
    """Return which bits of `count` words are a name's, by the length of the name."""
    lengths = np.arange(longest + 1)[:, None] - _WORD * np.arange(count)
    sizes = np.minimum(np.maximum(lengths, 0), _WORD)
    masks = np.array([(1 << 8 * size) - 1 for size in range(_WORD + 1)], dtype=np.uint64)
    of_length: Words = masks[sizes]
    return of_length


@lru_cache(maxsize=256)
def _factors(count: int) -> Words:
    """Return an odd factor for each of so many words, each another."""
    return np.array([int(_ODD) * (2 * at + 1) % (1 << 64) for at in range(count)], dtype=np.uint64)
