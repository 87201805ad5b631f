"""XID errors as they happen: threads that wait for them, and what is remembered of them."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from agent.backend import Backend, Card, EventSource, XidEvent

logger = logging.getLogger(__name__)

WAIT_SECONDS: Final = 1.0
"""One wait; so long it takes at most until a thread that is told to stop does."""

_JOIN_SECONDS: Final = 3.0
_OVERDUE_SECONDS: Final = 10.0
"""A wait that lasts so much longer than it should hangs in the driver."""

_PROBLEM: Final = "no XID errors are seen as they happen"
_NOT_WAITING: Final = f"{_PROBLEM}: no GPU is waited for yet"


class XidWatcher:
    """Waits for the events of each card in a thread of its own.

    A card that cannot be waited for, or that hangs in the driver, costs the others nothing.

    Args:
        backend: the library.
        deliver: takes an event; called in a card's thread.
        wait_seconds: length of one wait.
        monotonic: seconds that never jump.
    """

    def __init__(
        self,
        backend: Backend,
        deliver: Callable[[XidEvent], None],
        *,
        wait_seconds: float = WAIT_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._deliver = deliver
        self._wait_seconds = wait_seconds
        self._monotonic = monotonic
        self._watches: dict[str, _CardWatch] = {}
        self._changing = threading.Lock()  # passes follow and stop, the loop closes
        self._is_closed = False

    @property
    def problems(self) -> Mapping[str, str]:
        """Why no events of a card come, by UUID; "" where they would."""
        watches = self._watches.items()  # replaced as a whole, and never changed
        return {uuid: watch.problem for uuid, watch in watches}

    @property
    def problem(self) -> str:
        """Why no events come of all cards or of some, "" where they would."""
        problems = self.problems
        if not problems:
            return _NOT_WAITING
        failing = [(uuid, problem) for uuid, problem in problems.items() if problem]
        if not failing:
            return ""
        uuid, problem = failing[0]
        if len(failing) == len(problems):
            return problem
        return f"{problem} ({uuid}, one of {len(failing)} of {len(problems)} GPUs)"

    def follow(self, cards: Sequence[Card]) -> None:
        """Wait for the events of these cards, and restart the threads that ended in an error."""
        with self._changing:
            if self._is_closed:
                return
            before = self._watches
            kept = {
                card.uuid: before[card.uuid]
                for card in cards
                if card.uuid in before and before[card.uuid].is_for(card)
            }
            _stop([watch for uuid, watch in before.items() if uuid not in kept])
            self._watches = {
                card.uuid: kept.get(card.uuid) or self._begin(card, before.get(card.uuid))
                for card in cards
            }

    def _begin(self, card: Card, before: "_CardWatch | None") -> "_CardWatch":
        return _CardWatch(
            self._backend,
            card,
            self._deliver,
            wait_seconds=self._wait_seconds,
            monotonic=self._monotonic,
            problem=before.problem if before is not None else _NOT_WAITING,
        )

    def stop(self) -> None:
        """End all threads; one that hangs in the driver is left behind."""
        with self._changing:
            watches, self._watches = self._watches, {}
            _stop(watches.values())

    def close(self) -> None:
        """End all threads for good: a pass that is still under way starts no other."""
        self._is_closed = True
        self.stop()


class _CardWatch:
    """Waits for the events of one card, from the start on.

    Args:
        backend: the library.
        card: whose.
        deliver: takes an event.
        wait_seconds: length of one wait.
        monotonic: seconds that never jump.
        problem: why no events of it came before; one that lasts is logged once.
    """

    def __init__(
        self,
        backend: Backend,
        card: Card,
        deliver: Callable[[XidEvent], None],
        *,
        wait_seconds: float,
        monotonic: Callable[[], float],
        problem: str,
    ) -> None:
        self._backend = backend
        self._card = card
        self._deliver = deliver
        self._wait_seconds = wait_seconds
        self._monotonic = monotonic
        self._problem = problem
        self._waits_since = monotonic()
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"xid {card.index}", daemon=True)
        self.thread.start()

    @property
    def problem(self) -> str:
        """Why no events come, "" where they would: the last wait ended, or will in time."""
        seconds = self._monotonic() - self._waits_since
        if self.thread.is_alive() and seconds > self._wait_seconds + _OVERDUE_SECONDS:
            wait = f"a wait of {self._wait_seconds:g} s has not ended for {seconds:.0f} s"
            return f"{_PROBLEM}: {wait}"
        return self._problem

    def is_for(self, card: Card) -> bool:
        """Whether this waits for a card, and has not ended."""
        return self.thread.is_alive() and card == self._card

    def _run(self) -> None:
        try:
            self._listen(self._backend.events(self._card))
        except Exception as error:  # noqa: BLE001 - the thread of one card ends, and says why
            if not self.stopping.is_set():
                self._fail(error)

    def _listen(self, source: EventSource) -> None:
        try:
            while not self.stopping.is_set():
                self._waits_since = self._monotonic()
                event = source.wait(self._wait_seconds)
                if self.stopping.is_set():  # another thread may wait by now, and tell how it fares
                    return
                self._problem = ""
                if event is not None:
                    self._deliver(event)
        finally:
            source.close()

    def _fail(self, error: Exception) -> None:
        problem = f"{_PROBLEM}: {error}"
        if problem != self._problem:
            extra = {"uuid": self._card.uuid, "error": str(error)}
            logger.warning("cannot wait for XID errors", extra=extra)
        self._problem = problem


def _stop(watches: Collection[_CardWatch]) -> None:
    """End threads; one that hangs in the driver is left behind."""
    for watch in watches:
        watch.stopping.set()
    deadline = time.monotonic() + _JOIN_SECONDS
    for watch in watches:
        watch.thread.join(max(deadline - time.monotonic(), 0.0))


class XidLog:
    """What XIDs each device had, and when last; changed and read by the loop.

    Of each XID the latest counts alone: a card's fault is not forgotten for the many that its
    applications have after it.

    Attributes:
        counts: how many there were, by UUID of the card and number.
    """

    def __init__(self) -> None:
        self._last: dict[str, dict[XidEvent, float]] = {}
        self.counts: dict[tuple[str, int], int] = {}

    def add(self, event: XidEvent, at: float) -> None:
        """Remember an event, which came at a time (seconds since the epoch)."""
        last = self._last.setdefault(event.uuid, {})
        last.pop(event, None)  # the latest stands last
        last[event] = at
        key = (event.uuid, event.xid)
        self.counts[key] = self.counts.get(key, 0) + 1

    def of(self, uuid: str, gpu_instance_id: str) -> tuple[tuple[float, int], ...]:
        """Return when which XIDs last concerned a device, oldest first."""
        return tuple(
            (at, event.xid)
            for event, at in self._last.get(uuid, {}).items()
            if event.gpu_instance_id is None or str(event.gpu_instance_id) == gpu_instance_id
        )
