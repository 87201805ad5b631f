"""Feed of this replica's new decisions, in batches."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Final

from extender.insight.decisions import named
from extender.insight.replicas import ONE, Replicas
from extender.insight.views import Json, decision_view
from extender.placement.history import DecisionHistory, DecisionRecord

MOST_AT_ONCE: Final = 40
"""Largest number of decisions in a batch; older ones are only counted."""
_PIECE: Final = 8
"""Decisions to encode between two yields to the event loop."""
MOST_OPEN: Final = 400
"""Largest number of reported decisions whose binding is awaited."""


class DecisionFeed:
    """Produces batches of new decisions and bindings.

    Args:
        history: latest decisions.
        replicas: names the decisions' ids.
    """

    def __init__(self, history: DecisionHistory, replicas: Replicas = ONE) -> None:
        self._history = history
        self._replicas = replicas
        self._last = 0
        self._open: OrderedDict[int, DecisionRecord] = OrderedDict()

    def start(self) -> None:
        """Start after the latest decision, and await the bindings of the latest ones."""
        self._open.clear()
        for record in islice(self._history, MOST_OPEN):
            self._last = max(self._last, record.number)
            if not record.bound_node:
                self._open[record.number] = record
        self._open = OrderedDict(reversed(self._open.items()))

    def batch_in_steps(self) -> Iterator[Json | None]:
        """Yield None after each step, and finally a batch if there is anything new."""
        new: list[DecisionRecord] = []
        for record in self._history:
            if record.number <= self._last:
                break
            new.append(record)
        shown = list(reversed(new[:MOST_AT_ONCE]))
        bound = self._take_bound()
        if not new and not bound:
            return
        views: list[Json] = []
        for record in shown:
            views.append(named(self._replicas, record) | decision_view(record, brief=True))
            if len(views) % _PIECE == 0:
                yield None
        for record in shown:
            if not record.bound_node:
                self._open[record.number] = record
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
        if new:
            self._last = new[0].number
        yield {"decisions": views, "passed_over": len(new) - len(shown), "bound": bound}

    def _take_bound(self) -> list[Json]:
        """Remove and return the awaited decisions whose pods are bound now."""
        done = [record for record in self._open.values() if record.bound_node]
        for record in done:
            del self._open[record.number]
        return [
            {
                "id": self._replicas.id_of(record.number),
                "bound_node": record.bound_node,
                "is_followed": record.bound_node == record.decision.best,
            }
            for record in done
        ]
