"""Thousands of node names at once: found where they stand in a question, kept as small numbers.

To make 5,000 strings of a question, and to look each up, takes as long as everything else that an
answer needs. So the names stay in the bytes that they came in: a table finds the rows of all of
them in a few vector operations, eight bytes of each name at a time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from extender.core.steps import Steps, finish

Words = npt.NDArray[np.uint64]
Parts = npt.NDArray[np.void]
Places = npt.NDArray[np.intp]

_WORD = 8
_QUOTE, _COMMA = b'",'
_ODD = np.uint64(0x9E3779B97F4A7C15)  # Knuth's multiplicative hashing, the golden ratio of 2**64
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
    """

    def __init__(self, text: bytes, starts: Places, lengths: Places) -> None:
        self.text = text
        self.starts = starts
        self.lengths = lengths

    @classmethod
    def read(cls, text: bytes) -> "JsonNames | None":
        r"""Return the names of a list as Go writes it; None where it must be read otherwise.

        Example:
            >>> list(JsonNames.read(b'["a","b"]') or ())
            ['a', 'b']
            >>> JsonNames.read(b'["a", "b"]'), JsonNames.read(b'["\\u0061"]')
            (None, None)
        """
        if not (text.startswith(b'["') and text.endswith(b'"]')) or b"\\" in text:
            return None
        # As signed numbers, what is not ASCII is less than a space too.
        if np.frombuffer(text, np.int8).min() < ord(" "):
            return None
        buffer = np.frombuffer(text, np.uint8)
        quotes = np.flatnonzero(buffer == _QUOTE)
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

    Of each name, in its quotation marks, two parts are looked at that cover it together: as many
    whole words of eight bytes as the shortest has from its begin, and what the longest has more
    from its end. Where the shortest is too short for that, nothing is found here.

    Attributes:
        heads: of each known name, the first part.
        tails: of each known name, the last part.
        lengths: of each known name, in bytes.
        telling: in which words no two of them are the same, most of the time in one.
        hashes: of each known name's telling words.
        places: the place of a known name by its hash's first bits, or soon after; -1 is free.
        shift: bits of a hash that are not used for that.
    """

    heads: Parts
    tails: Parts
    lengths: Places
    telling: tuple[int, ...]
    hashes: Words
    places: Places
    shift: np.uint64

    @classmethod
    def of(cls, names: Sequence[str], like: "NameTable | None" = None) -> "NameTable | None":
        """Return the table of some names, each another; None where it could not find any.

        Args:
            names: the names.
            like: one of names of which most are the same: what tells these apart is tried first.
        """
        listed = JsonNames.read(b'["' + '","'.join(names).encode() + b'"]') if names else None
        if listed is None:
            return None
        shortest, longest = listed.lengths.min() + 2, listed.lengths.max() + 2
        head = int(shortest) // _WORD * _WORD
        tail = max(-(-int(longest - head) // _WORD) * _WORD, _WORD)
        if not head or tail > shortest:
            return None
        heads, tails = _parts(listed, head, tail)
        words = _words(heads, tails)
        telling = _telling(words, like.telling if like else ())
        hashes = _hashes([words[at] for at in telling])
        bits = len(names).bit_length() + _SPARE_BITS
        shift = np.uint64(64 - bits)
        places = np.full(1 << bits, -1, dtype=np.intp)
        left, slots = np.arange(len(names)), (hashes >> shift).view(np.intp)
        while len(left):
            free = places[slots[left]] < 0
            places[slots[left[free]]] = left[free]
            left = left[places[slots[left]] != left]
            slots[left] = (slots[left] + 1) % len(places)
        return cls(heads, tails, listed.lengths, telling, hashes, places, shift)

    def find(self, listed: JsonNames) -> Places | None:
        """Return the place of each name of a list.

        None where one is not known, or listed twice.
        """
        head, tail = self.heads.itemsize, self.tails.itemsize
        shortest, longest = int(listed.lengths.min()) + 2, int(listed.lengths.max()) + 2
        if shortest < max(head, tail) or longest > head + tail:
            return None
        heads, tails = _parts(listed, head, tail)
        words = _words(heads, tails)
        hashes = _hashes([words[at] for at in self.telling])
        slots = (hashes >> self.shift).view(np.intp)
        found = self.places[slots]
        others = np.flatnonzero(self.hashes[found] != hashes)
        while len(others):
            slots[others] = (slots[others] + 1) % len(self.places)
            found[others] = next_found = self.places[slots[others]]
            if (next_found < 0).any():
                return None
            others = others[self.hashes[next_found] != hashes[others]]
        if found.min() < 0 or np.bincount(found).max() > 1:
            return None
        is_same = np.array_equal(self.lengths.take(found), listed.lengths) and all(
            np.array_equal(known.take(found).view(np.uint64), asked.view(np.uint64))
            for known, asked in ((self.heads, heads), (self.tails, tails))
        )
        return found if is_same else None


class Roll:
    """The nodes by number: a node's number is its name's place among all of them.

    Args:
        nodes: every node.
        pools: each pool's nodes in the order of its rows, by resource.
    """

    def __init__(self, nodes: Iterable[str], pools: Mapping[str, Sequence[str]]) -> None:
        finish(self._fill(nodes, pools, None))

    @classmethod
    def in_steps(
        cls, nodes: Iterable[str], pools: Mapping[str, Sequence[str]], like: "Roll"
    ) -> "Steps[Roll]":
        """Return the same in steps; most of the nodes are those of another roll."""
        roll = cls.__new__(cls)
        yield from roll._fill(nodes, pools, like._table)  # noqa: SLF001 - of this very class
        return roll

    def _fill(
        self,
        nodes: Iterable[str],
        pools: Mapping[str, Sequence[str]],
        like: NameTable | None,
    ) -> Steps[None]:
        self.names = tuple(sorted({*nodes, *chain.from_iterable(pools.values())}))
        self._number_of = {name: number for number, name in enumerate(self.names)}
        yield
        self._table = NameTable.of(self.names, like)
        yield
        self._rows: dict[str, Places] = {}
        for resource, listed in pools.items():
            rows = np.full(len(self.names), -1, dtype=np.intp)
            rows[[self._number_of[name] for name in listed]] = np.arange(len(listed))
            self._rows[resource] = rows
            yield

    def number(self, names: Sequence[str]) -> Sequence[str]:
        """Return names by their numbers if all are known; else as they are."""
        if isinstance(names, NamesAt) and names.names is self.names:
            return names
        if isinstance(names, JsonNames):
            found = self._table.find(names) if self._table and names.listed >= FEW else None
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


def _parts(listed: JsonNames, head: int, tail: int) -> tuple[Parts, Parts]:
    """Return so many bytes from the begin and from the end of each name in quotation marks.

    No name may be shorter than either part.
    """
    begins = listed.starts - 1
    ends = begins + listed.lengths + 2
    return _taken(listed.text, begins, head), _taken(listed.text, ends - tail, tail)


def _taken(text: bytes, starts: Places, size: int) -> Parts:
    """Return so many bytes of a text from each start."""
    # As one item, for a fancy index copies each whole, and fast.
    width = np.dtype((np.void, size))
    parts: Parts = np.ndarray(len(text) - size + 1, width, buffer=text, strides=(1,))[starts]
    return parts


def _words(heads: Parts, tails: Parts) -> list[Words]:
    """Return the words of some parts, one array for each word."""
    return [
        word for parts in (heads, tails) for word in parts.view("<u8").reshape(len(parts), -1).T
    ]


def _telling(words: Sequence[Words], likely: tuple[int, ...]) -> tuple[int, ...]:
    """Return as few of the words as tell all names apart, the most telling ones first."""
    if likely and max(likely) < len(words) and _tell_apart([words[at] for at in likely]):
        return likely
    variety = [len(np.unique(word)) for word in words]
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
    for at, word in enumerate(words[1:], 1):
        hashes += word * np.uint64(int(_ODD) * (2 * at + 1) % (1 << 64))
    return hashes
