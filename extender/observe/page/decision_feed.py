"""Decisions of this replica as they are made, a batch a look."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Final

from extender.observe.decisions import named
from extender.observe.replicas import ONE, Replicas
from extender.observe.views import Json, decision_view
from extender.placement.history import DecisionHistory, DecisionRecord

MOST_AT_ONCE: Final = 40
"""Decisions told of one look; of more only the newest, and how many were passed over."""
PIECE: Final = 8
"""Decisions that are put in words between two turns of the event loop."""
MOST_OPEN: Final = 400
"""Decisions told whose binding is waited for."""


class DecisionFeed:
    """What is new of the decisions.

    Args:
        history: the last decisions.
        replicas: says what they are called.
    """

    def __init__(self, history: DecisionHistory, replicas: Replicas = ONE) -> None:
        self._history = history
        self._replicas = replicas
        self._last = 0
        self._open: OrderedDict[int, DecisionRecord] = OrderedDict()

    def start(self) -> None:
        """Begin with the next decision; of the last ones the bindings are told."""
        self._open.clear()
        for record in islice(self._history, MOST_OPEN):
            self._last = max(self._last, record.number)
            if not record.bound_node:
                self._open[record.number] = record
        self._open = OrderedDict(reversed(self._open.items()))

    def batch_in_steps(self) -> Iterator[Json | None]:
        """Yield None for a step, and at the end what is new, if there is anything."""
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
            if len(views) % PIECE == 0:
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
        """Return the decisions told before whose pods have been bound since."""
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
