"""Compute new decisions and states for the page once for all viewers, while one is connected.

Each viewer fetches updates at its own pace: a slow viewer gets fewer and larger updates, and at
most one event is buffered for it.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final
from urllib.parse import urlencode

from extender.api.page.fleet_feed import FleetFeed, event
from extender.core.untyped import number_of, text_of
from extender.fleet.fleet import Fleet
from extender.fleet.pods import PodChanges
from extender.insight.decisions import FORM, PEERS_PATH, named
from extender.insight.replicas import ONE, Replicas, query_replicas
from extender.insight.views import Json, decision_view, veiled
from extender.placement.history import DecisionHistory, DecisionRecord
from extender.runtime.cooperative import YieldControl, run_in_steps
from extender.server.listener import connections_to_close
from extender.server.readiness import SourceStatus
from extender.server.redaction import SEES_ALL, VIEWER

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
        limit = _FIRST if is_first else _MOST_AT_ONCE
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


_LOOK_SECONDS: Final = 1.0
"""Interval between updates."""
_LOOKS_A_FLEET: Final = 2
"""Number of updates after which the fleet's state is refreshed: every second one."""
_POLL_SECONDS: Final = 2.0
"""Interval between queries to the other replicas."""
_LOOKS_A_BEAT: Final = 5
"""Number of updates after which a heartbeat is sent: every fifth one."""
_MOST_BATCHES: Final = 64
"""Largest number of batches of decisions to keep for slow readers."""


class _PageViewer:
    """Progress of one viewer.

    Args:
        who: user name or address of the viewer.
        batch: number of the last batch of decisions before it joined.

    Attributes:
        news: event that is set when there may be an update.
        is_let_go: whether the viewer was disconnected to make room for another one.
    """

    def __init__(self, who: str, batch: int) -> None:
        self.who = who
        self.is_let_go = False
        self.news = asyncio.Event()
        self.fleet_version = 0
        self.batch = batch
        self.beat = b""
        self.changes = b""


class _Batch:
    """A batch of decisions, encoded once for all viewers with full access, else for each viewer."""

    def __init__(self, document: Json) -> None:
        self._document = document
        self._in_full = b""

    def event(self) -> bytes:
        """Return the event, redacted for the current caller."""
        if VIEWER.get() is not SEES_ALL:
            return event("decisions", self._document)
        self._in_full = self._in_full or event("decisions", self._document)
        return self._in_full


class Broadcaster:
    """Updates the feeds while there are viewers. Not thread-safe: use it on the event loop.

    Args:
        fleet: feed of the fleet's state.
        decisions: feed of this replica's decisions.
        far: feed of the other replicas' decisions.
        pods: counters of pod changes.
        states: returns the status of each source.
        clock: seconds since the epoch.
        yield_control: yields to webhook requests.

    Attributes:
        is_closing: whether the server is shutting down.
    """

    def __init__(
        self,
        fleet: FleetFeed,
        decisions: DecisionFeed,
        far: FarFeed,
        *,
        pods: PodChanges,
        states: Callable[[], Iterable[SourceStatus]],
        clock: Callable[[], float],
        yield_control: YieldControl,
    ) -> None:
        self.fleet = fleet
        self._decisions = decisions
        self._far = far
        self._pods = pods
        self._states = states
        self._clock = clock
        self._yield_control = yield_control
        self.is_closing = False
        self._viewers: dict[_PageViewer, None] = {}
        self._is_watched = asyncio.Event()
        self._batches: deque[_Batch] = deque(maxlen=_MOST_BATCHES)
        self._batch = 0
        self._beat = b""
        self._changes = b""

    def __len__(self) -> int:
        return len(self._viewers)

    def has_room_for(self, who: str, most: int) -> bool:
        """Check whether a viewer may join, and make room if necessary.

        If the limit is reached, disconnect the newest viewer of the client with the most viewers.
        """
        if len(self._viewers) < most:
            return True
        heaviest = connections_to_close(Counter(viewer.who for viewer in self._viewers), who)
        if heaviest is None:
            return False
        last = next(viewer for viewer in reversed(self._viewers) if viewer.who == heaviest)
        last.is_let_go = True
        last.news.set()
        self.leave(last)
        return True

    def join(self, who: str = "") -> _PageViewer:
        """Add a viewer; it receives no decisions made before."""
        viewer = _PageViewer(who, self._batch)
        if not self._viewers:
            self._make_beat()
            self._count_changes()
        self._viewers[viewer] = None
        self._is_watched.set()
        return viewer

    def leave(self, viewer: _PageViewer) -> None:
        """Remove a viewer."""
        self._viewers.pop(viewer, None)
        if not self._viewers:
            self._is_watched.clear()

    def close(self) -> None:
        """Disconnect all viewers, because the server is shutting down."""
        self.is_closing = True
        for viewer in self._viewers:
            viewer.news.set()

    def news_for(self, viewer: _PageViewer) -> Iterator[bytes]:
        """Yield the events that a viewer has not received; read each one only when it is needed."""
        viewer.news.clear()
        if viewer.beat is not self._beat:  # two heartbeats may be equal
            viewer.beat = self._beat
            yield self._beat
        if viewer.changes != self._changes:
            viewer.changes = self._changes
            yield self._changes
        if self.fleet.is_there and viewer.fleet_version != self.fleet.version:
            viewer.fleet_version, update = self.fleet.since(viewer.fleet_version)
            yield update
        while viewer.batch < self._batch:
            oldest = self._batch - len(self._batches)
            viewer.batch = max(viewer.batch, oldest) + 1
            yield self._batches[viewer.batch - oldest - 1].event()

    async def run(self) -> None:
        """Update the feeds periodically while there are viewers, until cancelled."""
        while True:
            await self._is_watched.wait()
            self._decisions.start()
            looks = 0
            while self._viewers:
                await self._look(looks)
                looks += 1
                await asyncio.sleep(_LOOK_SECONDS)
            self.fleet.forget()
            self._batches.clear()

    async def poll_replicas(self) -> None:
        """Query the other replicas periodically while there are viewers, until cancelled."""
        while True:
            await self._is_watched.wait()
            self._far.start()
            while self._viewers:
                batch = await self._far.batch()
                if batch is not None:
                    self._add(batch)
                    await self._wake()
                await asyncio.sleep(_POLL_SECONDS)

    def _add(self, batch: Json) -> None:
        self._batches.append(_Batch(batch))
        self._batch += 1

    async def _wake(self) -> None:
        for viewer in tuple(self._viewers):
            viewer.news.set()  # one at a time: each then encodes and writes its events
            await self._yield_control()

    async def _look(self, looks: int) -> None:
        is_new = self._count_changes()
        if looks % _LOOKS_A_FLEET == 0:
            is_new |= await run_in_steps(self.fleet.refresh_in_steps(), self._yield_control)
        for batch in self._decisions.batch_in_steps():
            if batch is not None:
                self._add(batch)
                is_new = True
            await self._yield_control()
        if looks and looks % _LOOKS_A_BEAT == 0:
            self._make_beat()
            is_new = True
        if is_new:
            await self._wake()

    def _count_changes(self) -> bool:
        """Encode the pods' change counters; return whether they changed."""
        before = self._changes
        counts = {"pending": self._pods.waiting, "holders": self._pods.holding}
        self._changes = event("changes", counts)
        return self._changes != before

    def _make_beat(self) -> None:
        now = self._clock()
        self._beat = event(
            "beat",
            {
                "at": now,
                "look_seconds": _LOOK_SECONDS * _LOOKS_A_FLEET,
                "sources": [
                    {
                        "name": state.name,
                        "age_seconds": None
                        if state.last_success_at is None
                        else max(now - state.last_success_at, 0.0),
                        "error": state.error,
                    }
                    for state in self._states()
                ],
            },
        )
