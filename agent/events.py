"""XID errors as they happen: a thread that waits for them, and what is remembered of them."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from agent.backend import Backend, Card, EventSource, NvmlError, XidEvent

logger = logging.getLogger(__name__)

WAIT_SECONDS: Final = 1.0
"""One wait; so long it takes at most until a thread that is told to stop does."""

_JOIN_SECONDS: Final = 3.0
_OVERDUE_SECONDS: Final = 10.0
"""A wait that lasts so much longer than it should hangs in the driver."""

_PROBLEM: Final = "no XID errors are seen as they happen"
_NOT_WAITING: Final = f"{_PROBLEM}: no GPU is waited for yet"


class XidWatcher:
    """Waits for events in a thread of its own.

    Args:
        backend: the library.
        deliver: takes an event; called in that thread.
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
        self._problem = _NOT_WAITING
        self._waits_since = 0.0
        self._backend = backend
        self._deliver = deliver
        self._wait_seconds = wait_seconds
        self._monotonic = monotonic
        self._cards: tuple[Card, ...] = ()
        self._changing = threading.Lock()  # passes follow and stop, the loop closes
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def problem(self) -> str:
        """Why no events come, "" where they would: the last wait ended, or will in time."""
        if self._problem:
            return self._problem
        seconds = self._monotonic() - self._waits_since
        if seconds <= self._wait_seconds + _OVERDUE_SECONDS:
            return ""
        return f"{_PROBLEM}: a wait of {self._wait_seconds:g} s has not ended for {seconds:.0f} s"

    def follow(self, cards: Sequence[Card]) -> None:
        """Wait for the events of these cards, unless that is what it does."""
        with self._changing:
            is_running = self._thread is not None and self._thread.is_alive()
            if self._is_closed or (is_running and tuple(cards) == self._cards):
                return
            self._stop()
            if not cards:
                self._problem = _NOT_WAITING
                return
            self._problem = self._problem or _NOT_WAITING  # one that lasts is logged once
            self._cards = tuple(cards)
            self._stopping = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._cards, self._stopping), name="xid-events", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread; one that hangs in the driver is left behind."""
        with self._changing:
            self._stop()
            self._problem = _NOT_WAITING

    def close(self) -> None:
        """End the thread for good: a pass that is still under way starts no other."""
        with self._changing:
            self._is_closed = True
            self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_JOIN_SECONDS)

    def _run(self, cards: Sequence[Card], stopping: threading.Event) -> None:
        try:
            self._listen(self._backend.events(cards), stopping)
        except NvmlError as error:
            if not stopping.is_set():
                self._fail(error)

    def _listen(self, source: EventSource, stopping: threading.Event) -> None:
        try:
            while not stopping.is_set():
                self._waits_since = self._monotonic()
                event = source.wait(self._wait_seconds)
                if stopping.is_set():  # another thread may wait by now, and tell how it fares
                    return
                self._problem = ""
                if event is not None:
                    self._deliver(event)
        finally:
            source.close()

    def _fail(self, error: NvmlError) -> None:
        problem = f"{_PROBLEM}: {error}"
        if problem != self._problem:
            logger.warning("cannot wait for XID errors", extra={"error": str(error)})
        self._problem = problem


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
