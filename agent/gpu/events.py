"""Wait for XID errors in one thread per card, and keep the latest of each."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from agent.gpu.backend import Backend, Card, EventSource, XidEvent

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 1.0
"""Duration of one wait, and so the longest time until a stopped thread ends."""

_PAUSE_SECONDS: Final = 0.01
"""Pause between two waits: a card may raise thousands of errors a second, or return at once."""

_JOIN_SECONDS: Final = 3.0
_OVERDUE_SECONDS: Final = 10.0
"""A wait that exceeds its duration by this much hangs in the driver."""

_PROBLEM: Final = "XID errors are not watched"
_NOT_WAITING: Final = f"{_PROBLEM}: the GPU is not watched yet"


class XidWatcher:
    """Waits for the events of each card in a separate thread.

    A card whose events fail, or whose wait hangs in the driver, does not affect the others.

    Args:
        deliver: callback for each event; called in the card's thread.
        wait_seconds: duration of one wait.
    """

    def __init__(
        self,
        backend: Backend,
        deliver: Callable[[XidEvent], None],
        *,
        wait_seconds: float = _WAIT_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._deliver = deliver
        self._wait_seconds = wait_seconds
        self._monotonic = monotonic
        self._watches: dict[str, _CardWatch] = {}
        self._lock = threading.Lock()  # the worker watches and stops, the event loop closes
        self._is_closed = False

    @property
    def problems(self) -> Mapping[str, str]:
        """Reason for missing events by UUID of the card; "" while events arrive."""
        watches = self._watches.items()  # the dict is replaced as a whole, never modified
        return {uuid: watch.problem for uuid, watch in watches}

    def watch(self, cards: Sequence[Card], unchanged: Collection[str] = ()) -> None:
        """Watch these cards, and restart threads that ended with an error.

        Args:
            cards: the cards to watch.
            unchanged: UUIDs of cards that could not be listed: their threads stay as they are.
        """
        with self._lock:
            if self._is_closed:
                return
            before = self._watches
            by_uuid = {card.uuid: card for card in cards}
            unchanged_watches = {
                uuid: watch
                for uuid, watch in before.items()
                if uuid in unchanged or (uuid in by_uuid and watch.is_for(by_uuid[uuid]))
            }
            problems = self.problems  # read before threads are stopped
            # A card has at most one thread: a hung thread is not replaced until it has ended.
            unchanged_watches |= _stop(
                {uuid: watch for uuid, watch in before.items() if uuid not in unchanged_watches}
            )
            self._watches = {
                card.uuid: _CardWatch(
                    self._backend,
                    card,
                    self._deliver,
                    wait_seconds=self._wait_seconds,
                    monotonic=self._monotonic,
                    problem=problems.get(card.uuid, _NOT_WAITING),
                )
                for card in cards
                if card.uuid not in unchanged_watches
            } | unchanged_watches

    def stop(self) -> None:
        """Stop all threads; abandon a thread that hangs in the driver."""
        with self._lock:
            self._watches = _stop(self._watches)

    def close(self) -> None:
        """Stop all threads for good: a pass that is still running starts no new ones."""
        self._is_closed = True
        self.stop()


class _CardWatch:
    """Waits for the events of one card in a thread, which starts at construction.

    Args:
        wait_seconds: duration of one wait.
        problem: the card's previous problem; an unchanged problem is not logged again.
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
        self._wait_started_at = monotonic()
        self.stopping = threading.Event()
        self.is_abandoned = False
        self.thread = threading.Thread(target=self._run, name=f"xid {card.index}", daemon=True)
        self.thread.start()

    @property
    def problem(self) -> str:
        """Reason for missing events, or "" while waits return in time."""
        seconds = self._monotonic() - self._wait_started_at
        if self.thread.is_alive() and seconds > self._wait_seconds + _OVERDUE_SECONDS:
            wait = f"a wait of {self._wait_seconds:g} s has not ended for {seconds:.0f} s"
            return f"{_PROBLEM}: {wait}"
        return _NOT_WAITING if self.stopping.is_set() else self._problem

    def is_for(self, card: Card) -> bool:
        """Return whether this thread still waits for the events of this card."""
        return self.thread.is_alive() and not self.stopping.is_set() and card == self._card

    def _run(self) -> None:
        try:
            self._listen(self._backend.events(self._card))
        except Exception as error:  # noqa: BLE001 - the thread ends and records the error
            if not self.stopping.is_set():
                self._fail(error)

    def _listen(self, source: EventSource) -> None:
        try:
            while not self.stopping.is_set():
                self._wait_started_at = self._monotonic()
                event = source.wait(self._wait_seconds)
                if self.stopping.is_set():  # a new thread may already report the card's state
                    return
                self._problem = ""
                if event is not None:
                    self._deliver(event)
                self.stopping.wait(_PAUSE_SECONDS)
        finally:
            if not self.is_abandoned:  # an abandoned handle may be of an earlier NVML session
                source.close()

    def _fail(self, error: Exception) -> None:
        problem = f"{_PROBLEM}: {error}"
        if problem != self._problem:
            extra = {"uuid": self._card.uuid, "error": str(error)}
            logger.warning("cannot wait for XID errors", extra=extra)
        self._problem = problem


def _stop(watches: Mapping[str, _CardWatch]) -> dict[str, _CardWatch]:
    """Stop threads; return those that hang in the driver. They end when their call returns."""
    for watch in watches.values():
        watch.stopping.set()
    deadline = time.monotonic() + _JOIN_SECONDS
    for watch in watches.values():
        if not watch.is_abandoned:
            watch.thread.join(max(deadline - time.monotonic(), 0.0))
        watch.is_abandoned = watch.thread.is_alive()
    return {uuid: watch for uuid, watch in watches.items() if watch.is_abandoned}


class XidLog:
    """Latest time of each XID error by device; used on the event loop only.

    Keeps the latest event of every XID number, so that frequent application errors do not displace
    a hardware error of the card.

    Attributes:
        counts: number of events by (UUID of the card, XID).
    """

    def __init__(self) -> None:
        self._last: dict[str, dict[XidEvent, float]] = {}
        self.counts: dict[tuple[str, int], int] = {}

    def add(self, event: XidEvent, at: float) -> None:
        """Record an event.

        Args:
            at: time of the event, seconds since the epoch.
        """
        last = self._last.setdefault(event.uuid, {})
        last.pop(event, None)  # re-insert, so that the latest event comes last
        last[event] = at
        key = (event.uuid, event.xid)
        self.counts[key] = self.counts.get(key, 0) + 1

    def latest_of(self, uuid: str, gpu_instance_id: str) -> tuple[tuple[float, int], ...]:
        """Return (time, number) of the latest event of each XID on a device, oldest first."""
        return tuple(
            (at, event.xid)
            for event, at in self._last.get(uuid, {}).items()
            if event.gpu_instance_id is None or str(event.gpu_instance_id) == gpu_instance_id
        )
