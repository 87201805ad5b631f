"""Feeds of new decisions for the page: of this replica, and of the other replicas."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Final
from urllib.parse import urlencode

from extender.core.untyped import number_of, text_of
from extender.fleet.fleet import Fleet
from extender.insight.decisions import FORM, PEERS_PATH, named
from extender.insight.replicas import ONE, Replicas, query_replicas
from extender.insight.views import Json, decision_view, veiled
from extender.placement.history import DecisionHistory, DecisionRecord

_MOST_AT_ONCE: Final = 40
"""Largest number of decisions in a batch; older ones are only counted."""
_PIECE: Final = 8
"""Decisions to encode between two yields to the event loop."""
_MOST_OPEN: Final = 400
"""Largest number of reported decisions whose binding is awaited."""


class DecisionFeed:
    """Produces batches of new decisions and bindings.

    Args:
        replicas: returns the id of each decision.
    """

    def __init__(self, history: DecisionHistory, replicas: Replicas = ONE) -> None:
        self._history = history
        self._replicas = replicas
        self._last = 0
        self._open: OrderedDict[int, DecisionRecord] = OrderedDict()

    def start(self) -> None:
        """Start with the next decision, and await the bindings of the latest decisions."""
        self._open.clear()
        for record in islice(self._history, _MOST_OPEN):
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
        shown = list(reversed(new[:_MOST_AT_ONCE]))
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
        while len(self._open) > _MOST_OPEN:
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


_FIRST: Final = 200
"""Decisions that a page lists when it opens; their bindings are awaited."""

_MOST_REPLICAS: Final = 64
"""Largest number of replicas to track: one that restarts repeatedly has a new name each time."""


class FarFeed:
    """Produces batches of the other replicas' new decisions and bindings.

    Args:
        fleet: state of the fleet, with the bindings of all pods.
    """

    def __init__(self, fleet: Fleet, replicas: Replicas) -> None:
        self._fleet = fleet
        self._replicas = replicas
        self._last: OrderedDict[str, str] = OrderedDict()
        self._open: OrderedDict[str, tuple[str, object]] = OrderedDict()
        self._is_begun = False

    def start(self) -> None:
        """Start after the latest decisions, and await their bindings."""
        self._last.clear()
        self._open.clear()
        self._is_begun = False

    async def batch(self) -> Json | None:
        """Query the other replicas; return new decisions and bindings, None if there are none."""
        is_first, self._is_begun = not self._is_begun, True
        limit = _FIRST if is_first else _MOST_AT_ONCE + 1
        query = urlencode({"after": ",".join(self._last.values()), "limit": limit})
        answers, _ = await query_replicas(self._replicas, f"{PEERS_PATH}?{query}", FORM)
        views: list[dict[str, object]] = []
        passed_over = 0
        for _, answer in answers:
            before = self._last.setdefault(answer.replica, f"{answer.replica}-0")
            self._last.move_to_end(answer.replica)
            if not answer.decisions:
                continue
            self._last[answer.replica] = text_of(answer.decisions[0].get("id"))
            self._note_open(answer.decisions)
            if not is_first:
                shown = answer.decisions[:_MOST_AT_ONCE]
                views += reversed(shown)
                made = _number(self._last[answer.replica]) - _number(before)
                # A newly found replica has no earlier number to count from.
                passed_over += max(made - len(shown), 0) if _number(before) else 0
        while len(self._last) > _MOST_REPLICAS:
            self._last.popitem(last=False)
        bound = self._take_bound()
        if not views and not bound:
            return None
        views.sort(key=lambda view: text_of(view.get("at")))
        return {
            "decisions": [veiled(view) for view in views],
            "passed_over": passed_over,
            "bound": bound,
        }

    def _note_open(self, newest: list[dict[str, object]]) -> None:
        """Await the bindings of decisions whose pods are not bound yet."""
        for view in reversed(newest):
            if not view.get("bound_node"):
                self._open[text_of(view.get("id"))] = text_of(view.get("uid")), view.get("node")
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)

    def _take_bound(self) -> list[Json]:
        """Remove and return the awaited decisions whose pods are bound now."""
        bound: list[Json] = []
        for name, (uid, node) in list(self._open.items()):
            record = self._fleet.pods.get(uid)
            if record is not None and record.node:
                del self._open[name]
                bound.append(
                    {"id": name, "bound_node": record.node, "is_followed": record.node == node}
                )
        return bound


def _number(name: str) -> int:
    """Return the number in a decision's id, 0 if there is none."""
    return number_of(name.rpartition("-")[2]) or 0
