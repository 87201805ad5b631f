"""Thousands of node names at once: found where they stand in a question, kept as small numbers.

To make 5,000 strings of a question, and to look each up, takes as long as everything else that an
answer needs. So the names stay in the bytes that they came in: a table finds the rows of all of
them in a few vector operations, eight bytes of each name at a time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from extender.core.pieces import Pieces, Places, Words
from extender.core.steps import Steps, finish

_WORD = 8
_SPECIAL = frozenset('",\\')
_ODD = np.uint64(0x9E3779B97F4A7C15)  # Knuth's multiplicative hashing, the golden ratio of 2**64
_HALF = np.uint64(32)
_SPARE_BITS = 2
"""The table has so many bits more than its names need: few share a place, and it stays small."""


FEW_BYTES = 8192
"""Names in fewer bytes are looked up one by one: faster than some dozen vector operations."""


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


@dataclass(frozen=True, slots=True, eq=False)
class NameTable:
    """Finds names of a JSON list among known ones, all at once.

    What stands between two commas of the list is a name if it is that of a known one, in its
    quotation marks, byte by byte; no known one has a comma in it, or anything that JSON would write
    otherwise. Two parts of it are looked at that cover it together: as many whole words of eight
    bytes as the shortest has from its begin, and what the longest has more from its end. Where the
    shortest is too short for that, nothing is found here.

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
    def of(cls, names: Sequence[str], like: "NameTable | None" = None) -> "NameTable | None":
        """Return the table of some names, each another; None where it could not find any.

        Args:
            names: the names.
            like: one of names of which most are the same: what tells these apart is tried first.
        """
        if not names or not _is_plain("".join(names)):
            return None
        text = b'["' + b'","'.join(map(str.encode, names)) + b'"]'
        pieces = Pieces.of(text, 0, len(text))
        if pieces is None or (chosen := _split(pieces, like)) is None:
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

    def find(self, pieces: Pieces) -> Places | None:
        """Return the place of each name of a JSON list, as Go writes it.

        None where one is not known, or listed twice, or it is no such list.
        """
        lengths = pieces.lengths
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < max(self.head, self.tail) or longest > self.head + self.tail:
            return None
        words = pieces.words(self.head, self.tail)
        hashes = _hashes([words[at] for at in self.telling])
        slots = (hashes >> self.shift).view(np.intp)
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
        if (self.lengths[found] != lengths).any():
            return None
        for at, (known, asked) in enumerate(zip(self.words, words, strict=True)):
            # Of one word, multiplied by an odd number, the hash is the same only if the word is.
            if (
                self.telling != (at,)
                and ((known if len(known) == 1 else known[found]) != asked).any()
            ):
                return None
        return found


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

    def find(self, text: bytes, begin: int, end: int) -> NamesIn | None:
        """Return the names of a JSON list in a text by their numbers.

        None where they must be read otherwise: they are few, or not all known, or one is listed
        twice, or the list is not as Go writes it.

        Example:
            >>> nodes = [f"gpu-node-{number}" for number in range(1000)]
            >>> asked = b'["' + b'","'.join(node.encode() for node in nodes[1:]) + b'"]'
            >>> Roll(nodes, {}).find(asked, 0, len(asked))[0]
            'gpu-node-1'
        """
        if self._table is None or end - begin < FEW_BYTES:
            return None
        pieces = Pieces.of(text, begin, end)
        found = None if pieces is None else self._table.find(pieces)
        return None if pieces is None or found is None else NamesIn(self.names, found, pieces)

    def number(self, names: Sequence[str]) -> Sequence[str]:
        """Return names by their numbers if all are known; else as they are."""
        if isinstance(names, NamesAt) and names.names is self.names:
            return names
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


def _split(pieces: Pieces, like: NameTable | None) -> _Split | None:
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
    return min(splits, key=lambda split: split.cost, default=None)


def _is_one(word: Words) -> bool:
    return bool((word == word[0]).all())


def _is_plain(names: str) -> bool:
    """Whether JSON writes names as they are."""
    return names.isascii() and names.isprintable() and not _SPECIAL.intersection(names)


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


EMPTY_ROLL = Roll((), {})
