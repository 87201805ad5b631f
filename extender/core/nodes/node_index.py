"""Index nodes by number, and convert the node names of a request to numbers."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from extender.core.nodes.node_names import (
    MOST_STRANGERS,
    JsonNameList,
    NamesAt,
    NamesIn,
    NameTable,
    Places,
)
from extender.core.steps import Steps, finish

_FEW_BYTES = 8192
"""Lists in fewer bytes are looked up name by name, which is faster than the vector operations."""

_FEW_NAMES = 256
"""Shorter lists with unknown names are not converted: numbers would save little."""


class NodeIndex:
    """Node index: a node's number is the position of its name among all sorted names.

    A request may contain a few unknown names, because kube-scheduler has not seen a node's deletion
    yet or the index is older than the node. These get numbers too, so that all other names keep
    theirs.

    Args:
        nodes: names of all nodes.
        pools: node names of each pool in the order of its rows, by resource.
    """

    def __init__(self, nodes: Iterable[str], pools: Mapping[str, Sequence[str]]) -> None:
        finish(self._fill(nodes, pools, None))

    @classmethod
    def in_steps(
        cls, nodes: Iterable[str], pools: Mapping[str, Sequence[str]], like: "NodeIndex"
    ) -> "Steps[NodeIndex]":
        """Build the index in steps from an older one with mostly the same nodes.

        A few deleted nodes stay in the index, without a pool: requests may still contain them, and
        without new nodes the name table can be shared.
        """
        node_index = cls.__new__(cls)
        yield from node_index._fill(nodes, pools, like._known)  # noqa: SLF001 - of this very class
        return node_index

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
        """Convert the names of a JSON list in a text to node numbers.

        Returns None if the list must be parsed as strings: it is short, has many unknown names or a
        duplicate, or is not in Go's spelling.

        Example:
            >>> nodes = [f"gpu-node-{number}" for number in range(1000)]
            >>> body = b'["' + b'","'.join(node.encode() for node in nodes[1:]) + b'"]'
            >>> NodeIndex(nodes, {}).find(body, 0, len(body))[0]
            'gpu-node-1'
        """
        table = self._known.table
        if table is None or end - begin < _FEW_BYTES:
            return None
        pieces = JsonNameList.of(text, begin, end)
        found = None if pieces is None else table.find(pieces)
        if pieces is None or found is None:
            return None
        if not found.strangers:
            return NamesIn(self.names, found.places, pieces)
        named = self._widened(found.strangers).number(found.places, found.strangers)
        return NamesIn(named.names, named.rows, pieces)

    def number(self, names: Sequence[str]) -> Sequence[str]:
        """Convert names to numbers; return them unchanged if too many are unknown."""
        if isinstance(names, NamesAt) and self._rows_by(names) is not None:
            return names
        numbers = list(map(self._known.number_of.get, names))
        if None not in numbers:
            return NamesAt(self.names, np.array(numbers, dtype=np.intp))
        at = [place for place, number in enumerate(numbers) if number is None]
        if len(names) < _FEW_NAMES or len(at) > MOST_STRANGERS:
            return names
        strangers = tuple(names[place] for place in at)
        places = np.array([-1 if number is None else number for number in numbers], dtype=np.intp)
        places[at] = np.arange(len(self.names), len(self.names) + len(at))
        return self._widened(strangers).number(places, strangers)

    def rows(self, resource: str, names: Sequence[str]) -> Places | None:
        """Return the row of each name in a pool, -1 if it is not in the pool.

        Returns None if the names have no numbers of this index, or the pool is unknown.
        """
        if not isinstance(names, NamesAt):
            return None
        rows = (self._rows_by(names) or {}).get(resource)
        if rows is None:
            return None
        found: Places = rows[names.rows]
        return found

    def _rows_by(self, names: NamesAt) -> Mapping[str, Places] | None:
        """Return each number's row in each pool; None for numbers of another index."""
        if names.names is self.names:
            return self._rows
        wider = self._wider
        return wider.rows if wider is not None and names.names is wider.names else None

    def _widened(self, strangers: Iterable[str]) -> "_Wider":
        """Return the index extended by unknown names, reusing the last extension if it has them."""
        wanted = set(strangers)
        before = self._wider.strangers if self._wider is not None else frozenset()
        if self._wider is None or not wanted <= before:
            together = wanted | before
            chosen = wanted if len(together) > MOST_STRANGERS else together
            self._wider = _Wider(self.names, self._rows, chosen)
        return self._wider


@dataclass(frozen=True, slots=True)
class _Names:
    """Sorted names, their numbers, and the table that finds them.

    Attributes:
        table: hash table for lookups in a text; None if the names are not supported.
    """

    ordered: tuple[str, ...]
    number_of: dict[str, int]
    table: NameTable | None

    @classmethod
    def of(cls, names: Iterable[str], like: "_Names | None") -> "Steps[_Names]":
        """Number the names in steps, from older ones that are mostly the same."""
        ordered = tuple(sorted(names))
        yield
        number_of = {name: number for number, name in enumerate(ordered)}
        yield
        table = yield from NameTable.in_steps(ordered, like.table if like is not None else None)
        yield
        return cls(ordered, number_of, table)


class _Wider:
    """Copy of the node index with a few additional names that belong to no pool.

    Attributes:
        rows: by resource, each name's row in the pool; -1 if it is not in the pool.

    Args:
        known: the names of the index.
        rows: by resource, the rows of these names.
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
        """Convert names from numbers of the index to numbers of this extension.

        Args:
            places: numbers in the index; added names count on from there.
            strangers: the added names, in the order of their numbers.
        """
        others = np.array([self._number_of[name] for name in strangers], dtype=np.intp)
        return NamesAt(self.names, np.concatenate((self._known, others))[places])


EMPTY_NODE_INDEX = NodeIndex((), {})
