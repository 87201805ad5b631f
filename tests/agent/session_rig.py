"""A session of the agent over scripted cards, and a thread that is given up."""

from typing import Any, Final

from agent.backend import XidEvent
from agent.events import XidWatcher
from agent.reading import Pass
from agent.session import Cadence, Session
from agent.worker import Lane
from tests.agent.scripted import ScriptedBackend, ScriptedCard

NOW: Final = 1_800_000_000.0


class Rig:
    """A session over scripted cards, and its clock."""

    def __init__(self, *uuids: str) -> None:
        self.cards = [ScriptedCard(uuid) for uuid in uuids]
        self.backend = ScriptedBackend(*self.cards)
        self.now = NOW
        self.events: list[XidEvent] = []
        self.watcher = XidWatcher(self.backend, self.events.append, wait_seconds=0.05)
        self.session = Session(
            self.backend,
            self.watcher,
            cadence=Cadence(slow_seconds=10, process_seconds=5, retry_seconds=30),
            clock=lambda: self.now,
            monotonic=lambda: self.now,
        )

    def read(self, after: float = 1.0, skipped: frozenset[str] = frozenset()) -> Pass:
        self.now += after
        return self.session.read(Lane(10.0), skipped)

    def reads(self, count: int) -> Pass:
        for _ in range(count):
            found = self.read()
        return found


class GivenUpAt(Lane):
    """The lane of a thread that is given up during a call."""

    def __init__(self, call: str) -> None:
        super().__init__(10.0)
        self._call = call

    def call(self, subject: str, name: str, *arguments: Any, **limits: float) -> Any:
        self.is_given_up = name == self._call
        return super().call(subject, name, *arguments, **limits)
