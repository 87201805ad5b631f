"""The nodes by number, and what a question names of them."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from extender.core.names import MOST_STRANGERS, NamesAt, NamesIn, NameTable
from extender.core.pieces import Pieces, Places
from extender.core.steps import Steps, finish

FEW_BYTES = 8192
"""Names in fewer bytes are looked up one by one: faster than some dozen vector operations."""

FEW_NAMES = 256
"""Of fewer names, those with unknown ones among them stay names: numbers would spare little."""


class Roll:
    """The nodes by number: a node's number is its name's place among all of them.

    Where nodes come and go, a few of those that are asked about are not on the roll: kube-scheduler
    has not heard yet that they are gone, or the roll was made before they came. They get numbers
    too, for otherwise they would cost all others theirs.

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
        """Return the same in steps; most of the nodes are those of another roll.

        A few that have gone since stay on it, in no pool: they may still be asked about, and come
        back, and as long as nobody new comes all that goes by the names can be shared.
        """
        roll = cls.__new__(cls)
        yield from roll._fill(nodes, pools, like._known)  # noqa: SLF001 - of this very class
        return roll

    def _fill(
        self, nodes: Iterable[str], pools: Mapping[str, Sequence[str]], like: "_Names | None"
    ) -> Steps[None]:
        listed = {*nodes, *chain.from_iterable(pools.values())}
        if like is not None:
            gone = like.number_of.keys() - listed
            if len(gone) <= MOST_STRANGERS:
                listed |= gone
        yield
        if like is not None and listed == like.number_of.keys():
            known = like
        else:
            known = yield from _Names.of(listed, like)
        self._known, self.names = known, known.ordered
        self._wider: _Wider | None = None
        self._rows: dict[str, Places] = {}
        for resource, of_pool in pools.items():
            rows = np.full(len(self.names), -1, dtype=np.intp)
            rows[[known.number_of[name] for name in of_pool]] = np.arange(len(of_pool))
            self._rows[resource] = rows
            yield

    def find(self, text: bytes, begin: int, end: int) -> NamesIn | None:
        """Return the names of a JSON list in a text by their numbers.

        None where they must be read otherwise: they are few, or many are unknown, or one is listed
        twice, or the list is not as Go writes it.

        Example:
            >>> nodes = [f"gpu-node-{number}" for number in range(1000)]
            >>> asked = b'["' + b'","'.join(node.encode() for node in nodes[1:]) + b'"]'
            >>> Roll(nodes, {}).find(asked, 0, len(asked))[0]
            'gpu-node-1'
        """
        table = self._known.table
        if table is None or end - begin < FEW_BYTES:
            return None
        pieces = Pieces.of(text, begin, end)
        found = None if pieces is None else table.find(pieces)
        if pieces is None or found is None:
            return None
        if not found.strangers:
            return NamesIn(self.names, found.places, pieces)
        named = self._widened(found.strangers).number(found.places, found.strangers)
        return NamesIn(named.names, named.rows, pieces)

    def number(self, names: Sequence[str]) -> Sequence[str]:
        """Return names by their numbers if all are known, or nearly all of many; else as names."""
        if isinstance(names, NamesAt) and self._rows_by(names) is not None:
            return names
        numbers = list(map(self._known.number_of.get, names))
        if None not in numbers:
            return NamesAt(self.names, np.array(numbers, dtype=np.intp))
        at = [place for place, number in enumerate(numbers) if number is None]
        if len(names) < FEW_NAMES or len(at) > MOST_STRANGERS:
            return names
        strangers = tuple(names[place] for place in at)
        places = np.array([-1 if number is None else number for number in numbers], dtype=np.intp)
        places[at] = np.arange(len(self.names), len(self.names) + len(at))
        return self._widened(strangers).number(places, strangers)

    def rows(self, resource: str, names: Sequence[str]) -> Places | None:
        """Return the row of each name in a pool, -1 where it is not in it.

        None where the names are not by number, or the pool is not on the roll.
        """
        if not isinstance(names, NamesAt):
            return None
        rows = (self._rows_by(names) or {}).get(resource)
        if rows is None:
            return None
        found: Places = rows[names.rows]
        return found

    def _rows_by(self, names: NamesAt) -> Mapping[str, Places] | None:
        """Return each number's row in each pool; None where the names have other numbers."""
        if names.names is self.names:
            return self._rows
        wider = self._wider
        return wider.rows if wider is not None and names.names is wider.names else None

    def _widened(self, strangers: Iterable[str]) -> "_Wider":
        """Return the roll with some more names: the one of before if that has them."""
        wanted = set(strangers)
        before = self._wider.strangers if self._wider is not None else frozenset()
        if self._wider is None or not wanted <= before:
            together = wanted | before
            chosen = wanted if len(together) > MOST_STRANGERS else together
            self._wider = _Wider(self.names, self._rows, chosen)
        return self._wider


@dataclass(frozen=True, slots=True)
class _Names:
    """Names by number, and what finds them.

    Attributes:
        ordered: the names.
        number_of: the number of each.
        table: finds them in a text; None where it could not.
    """

    ordered: tuple[str, ...]
    number_of: dict[str, int]
    table: NameTable | None

    @classmethod
    def of(cls, names: Iterable[str], like: "_Names | None") -> "Steps[_Names]":
        """Return names by number in steps; most of them are those of another one."""
        ordered = tuple(sorted(names))
        yield
        number_of = {name: number for number, name in enumerate(ordered)}
        yield
        table = yield from NameTable.in_steps(ordered, like.table if like is not None else None)
        yield
        return cls(ordered, number_of, table)


class _Wider:
    """A roll with a few more names on it, which are in no pool.

    Attributes:
        names: all of them.
        strangers: those that are not on the roll.
        rows: by resource, each name's row in the pool; -1 where it is not in it.

    Args:
        known: the names of the roll.
        rows: likewise, of these.
        strangers: the others.
    """

    def __init__(
        self, known: tuple[str, ...], rows: Mapping[str, Places], strangers: Iterable[str]
    ) -> None:
        ordered = sorted(strangers)
        before = np.array([bisect_left(known, name) for name in ordered], dtype=np.intp)
        numbers = np.arange(len(known))
        self.names = tuple(sorted((*known, *ordered)))
        self.strangers = frozenset(ordered)
        self.rows = {resource: np.insert(of, before, -1) for resource, of in rows.items()}
        self._known = numbers + np.searchsorted(before, numbers, side="right")
        places = (before + np.arange(len(ordered))).tolist()
        self._number_of = dict(zip(ordered, places, strict=True))

    def number(self, places: Places, strangers: Iterable[str]) -> NamesAt:
        """Return names by their numbers here.

        Args:
            places: their numbers on the roll; those of strangers count on from there.
            strangers: these, in the order of their places.
        """
        others = np.array([self._number_of[name] for name in strangers], dtype=np.intp)
        return NamesAt(self.names, np.concatenate((self._known, others))[places])


EMPTY_ROLL = Roll((), {})
