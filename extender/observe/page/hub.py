"""Everything that all viewers are told, made once for all of them while anybody looks.

Each viewer takes what is new at its own pace: one that reads slowly gets fewer and larger steps,
and keeps one event at most in memory here.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from extender.fleet.pods import PodChanges
from extender.observe.collector import SourceStatus
from extender.observe.page.decision_feed import DecisionFeed
from extender.observe.page.far_feed import FarFeed
from extender.observe.page.fleet_feed import FleetFeed, event
from extender.observe.seen import SEES_ALL, VIEWER
from extender.observe.views import Json
from extender.sharing import who_gives_way
from extender.stepping import GiveWay

LOOK_SECONDS: Final = 1.0
"""Time between two looks."""
LOOKS_A_FLEET: Final = 2
"""The fleet is looked at in every such look."""
HEAR_SECONDS: Final = 2.0
"""Time between two questions to the other replicas."""
LOOKS_A_BEAT: Final = 5
"""A sign of life comes with every such look."""
MOST_BATCHES: Final = 64
"""Batches of decisions that wait for slow readers."""


class Viewer:
    """How far somebody who looks has been told.

    Args:
        who: whose page it is.

    Attributes:
        news: is set whenever there may be something to tell.
        is_let_go: they are told no more: somebody else needs the place.
    """

    def __init__(self, who: str = "") -> None:
        self.who = who
        self.is_let_go = False
        self.news = asyncio.Event()
        self.news.set()
        self.fleet_version = 0
        self.batch = 0
        self.beat = 0
        self.changes = b""


class _Batch:
    """Decisions of one look; encoded once for all who may see every pod, else for each."""

    def __init__(self, document: Json) -> None:
        self._document = document
        self._in_full = b""

    def event(self) -> bytes:
        """Return the event as the caller may see it."""
        if VIEWER.get() is not SEES_ALL:
            return event("decisions", self._document)
        self._in_full = self._in_full or event("decisions", self._document)
        return self._in_full


class Hub:
    """Looks at the fleet and the decisions as long as there are viewers.

    Runs on the event loop's thread alone.

    Attributes:
        is_closing: nobody is told anything any more.

    Args:
        fleet: what the fleet looks like.
        decisions: the decisions of this replica.
        far: those of the others.
        pods: how often pods have changed.
        states: how each source fares.
        clock: seconds since the epoch.
        give_way: lets others have a turn.
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
        give_way: GiveWay,
    ) -> None:
        self.fleet = fleet
        self._decisions = decisions
        self._far = far
        self._pods = pods
        self._states = states
        self._clock = clock
        self._give_way = give_way
        self.is_closing = False
        self._viewers: dict[Viewer, None] = {}
        self._is_watched = asyncio.Event()
        self._batches: deque[_Batch] = deque(maxlen=MOST_BATCHES)
        self._batch = 0
        self._beat, self._beat_event = 0, b""
        self._changes = b""

    def __len__(self) -> int:
        return len(self._viewers)

    def has_room_for(self, who: str, most: int) -> bool:
        """Tell whether one more may look; where there are so many, who has the most lets one go."""
        if len(self._viewers) < most:
            return True
        heaviest = who_gives_way(Counter(viewer.who for viewer in self._viewers), who)
        if heaviest is None:
            return False
        last = next(viewer for viewer in reversed(self._viewers) if viewer.who == heaviest)
        last.is_let_go = True
        last.news.set()
        self.leave(last)
        return True

    def join(self, who: str = "") -> Viewer:
        """Take on somebody who looks; decisions made before are not told."""
        viewer = Viewer(who)
        viewer.batch = self._batch
        if not self._viewers:
            self._make_beat()
            self._count_changes()
        self._viewers[viewer] = None
        self._is_watched.set()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Forget somebody who looked."""
        self._viewers.pop(viewer, None)
        if not self._viewers:
            self._is_watched.clear()

    def close(self) -> None:
        """Let all viewers go: the server is about to end."""
        self.is_closing = True
        for viewer in self._viewers:
            viewer.news.set()

    def news_for(self, viewer: Viewer) -> Iterator[bytes]:
        """Yield the events that a viewer has not been told; each is looked up as it is taken."""
        viewer.news.clear()
        if viewer.beat != self._beat:
            viewer.beat = self._beat
            yield self._beat_event
        if viewer.changes != self._changes:
            viewer.changes = self._changes
            yield self._changes
        if self.fleet.is_there and viewer.fleet_version != self.fleet.version:
            viewer.fleet_version, told = self.fleet.since(viewer.fleet_version)
            yield told
        while viewer.batch < self._batch:
            oldest = self._batch - len(self._batches)
            viewer.batch = max(viewer.batch, oldest) + 1
            yield self._batches[viewer.batch - oldest - 1].event()

    async def run(self) -> None:
        """Look again and again while there are viewers, until cancelled."""
        while True:
            await self._is_watched.wait()
            self._decisions.start()
            looks = 0
            while self._viewers:
                await self._look(looks)
                looks += 1
                await asyncio.sleep(LOOK_SECONDS)
            self.fleet.forget()
            self._batches.clear()

    async def hear(self) -> None:
        """Ask the other replicas again and again while there are viewers, until cancelled."""
        while True:
            await self._is_watched.wait()
            self._far.start()
            while self._viewers:
                batch = await self._far.batch()
                if batch is not None:
                    self._add(batch)
                    await self._wake()
                await asyncio.sleep(HEAR_SECONDS)

    def _add(self, batch: Json) -> None:
        self._batches.append(_Batch(batch))
        self._batch += 1

    async def _wake(self) -> None:
        for viewer in tuple(self._viewers):
            viewer.news.set()  # one after the other: each of them writes in its turn
            await self._give_way()

    async def _look(self, looks: int) -> None:
        is_new = self._count_changes()
        if looks % LOOKS_A_FLEET == 0:
            steps = self.fleet.refresh_in_steps()
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    is_new |= end.value
                    break
                await self._give_way()
        for batch in self._decisions.batch_in_steps():
            if batch is not None:
                self._add(batch)
                is_new = True
            await self._give_way()
        if looks and looks % LOOKS_A_BEAT == 0:
            self._make_beat()
            is_new = True
        if is_new:
            await self._wake()

    def _count_changes(self) -> bool:
        """Note how often what the views of pods show has changed; tell whether it has since."""
        before = self._changes
        counts = {"pending": self._pods.waiting, "holders": self._pods.holding}
        self._changes = event("changes", counts)
        return self._changes != before

    def _make_beat(self) -> None:
        now = self._clock()
        self._beat += 1
        self._beat_event = event(
            "beat",
            {
                "at": now,
                "look_seconds": LOOK_SECONDS * LOOKS_A_FLEET,
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
