"""Decisions of the other replicas as they are made, for the pages that are open at this one."""

from collections import OrderedDict
from typing import Final
from urllib.parse import urlencode

from extender.core.untyped import text_of
from extender.fleet.fleet import Fleet
from extender.observe.decisions import FORM, PEERS_PATH
from extender.observe.hearing import hear
from extender.observe.page.decision_feed import MOST_AT_ONCE, MOST_OPEN
from extender.observe.replicas import Replicas
from extender.observe.views import Json, veiled

FIRST: Final = 200
"""Decisions that a page lists when it opens: of these the bindings are told."""

MOST_REPLICAS: Final = 64
"""So many are told where we are: one that starts again and again is another each time."""


class FarFeed:
    """What is new of the others' decisions.

    Args:
        fleet: says where pods are: of a pod that is bound every replica hears.
        replicas: this one and the others.
    """

    def __init__(self, fleet: Fleet, replicas: Replicas) -> None:
        self._fleet = fleet
        self._replicas = replicas
        self._last: OrderedDict[str, str] = OrderedDict()
        self._open: OrderedDict[str, tuple[str, object]] = OrderedDict()
        self._is_begun = False

    def start(self) -> None:
        """Begin with the next decision; of the last ones the bindings are told."""
        self._last.clear()
        self._open.clear()
        self._is_begun = False

    async def batch(self) -> Json | None:
        """Ask the others; return what is new, None where nothing is."""
        is_first, self._is_begun = not self._is_begun, True
        limit = FIRST if is_first else MOST_AT_ONCE + 1
        query = urlencode({"after": ",".join(self._last.values()), "limit": limit})
        heard = await hear(self._replicas, f"{PEERS_PATH}?{query}", FORM)
        views: list[dict[str, object]] = []
        passed_over = 0
        for _, told in heard.told:
            before = self._last.setdefault(told.replica, f"{told.replica}-0")
            self._last.move_to_end(told.replica)
            if not told.decisions:
                continue
            self._last[told.replica] = text_of(told.decisions[0].get("id"))
            self._note_open(told.decisions)
            if not is_first:
                shown = told.decisions[:MOST_AT_ONCE]
                views += reversed(shown)
                made = _number(self._last[told.replica]) - _number(before)
                # Of one that has just been found nobody knows how much it told others before.
                passed_over += max(made - len(shown), 0) if _number(before) else 0
        while len(self._last) > MOST_REPLICAS:
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
        """Wait for the bindings of pods that were decided about."""
        for view in reversed(newest):
            if not view.get("bound_node"):
                self._open[text_of(view.get("id"))] = text_of(view.get("uid")), view.get("node")
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)

    def _take_bound(self) -> list[Json]:
        """Return the decisions told before whose pods have been bound since."""
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
    """Return the number in a decision's id, 0 where there is none."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
