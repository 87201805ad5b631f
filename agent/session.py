"""One pass over all cards: starts the library, finds the cards, and finds them again.

Used by the worker's thread alone; when a thread was given up, by the next one, which goes on where
the other stuck.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from agent.backend import Backend, Card, Code, Instance, NvmlError, Topology
from agent.card_reader import RESET_REQUIRED, SESSION_CODES, CardReader
from agent.events import XidWatcher
from agent.problems import GONE, NEEDS_RESTART, NO_GPU, problem_of
from agent.reading import DeviceReading, Pass
from agent.report import Problem
from agent.worker import Lane

NO_CARD: Final = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How often what is read.

    Attributes:
        slow_seconds: what costs more and changes slowly, and whether the layout has changed.
        process_seconds: what each process does.
        relayout_seconds: cards and instances are found anew so soon where one of them failed.
        start_limit_seconds: starting the library may take so long.
        retry_seconds: the longest wait before the library is started again.
    """

    slow_seconds: float = 10.0
    process_seconds: float = 5.0
    relayout_seconds: float = 0.5
    start_limit_seconds: float = 60.0
    retry_seconds: float = 30.0


class Session:
    """What is known of the driver and its cards.

    Args:
        backend: the library.
        watcher: waits for events of the cards that are found.
        cadence: how often what is read.
        clock: seconds since the epoch.
        monotonic: seconds that never jump.

    Attributes:
        failures: failed calls by call and error.
    """

    def __init__(
        self,
        backend: Backend,
        watcher: XidWatcher,
        *,
        cadence: Cadence | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures: Counter[tuple[str, str]] = Counter()
        self._backend = backend
        self._watcher = watcher
        self._cadence = cadence or Cadence()
        self._clock = clock
        self._monotonic = monotonic
        self._driver_version = ""
        self._is_started = False
        self._has_worked = False
        self._problem: Problem | None = None
        self._needs_restart = False
        self._start_at = 0.0
        self._backoff = 1.0
        self._readers: dict[str, CardReader] = {}
        self._last: dict[str, tuple[DeviceReading, ...]] = {}
        self._slow_at = 0.0
        self._is_urgent = False
        self._processes_at = 0.0
        self._marks: dict[str, Problem] = {}
        self._hang: Problem | None = None
        self._lost: set[str] = set()

    def read(self, lane: Lane, skipped: Collection[str]) -> Pass:
        """Make one pass.

        Args:
            lane: makes the calls.
            skipped: UUIDs of cards of which a call has not returned yet; "" where one hangs that
                concerns no card.
        """
        self._marks = {name: mark for name, mark in self._marks.items() if name in skipped}
        if NO_CARD in skipped:
            return self.last_pass()
        try:
            if self._is_started or self._monotonic() >= self._start_at:
                self._read_all(lane, skipped)
        except NvmlError as error:
            self._cut_off(lane, error)
        self._judge_hangs(skipped)
        return self.last_pass()

    def _read_all(self, lane: Lane, skipped: Collection[str]) -> None:
        if not self._is_started:
            self._start(lane)
        now = self._monotonic()
        if self._is_urgent:
            self._is_urgent, self._slow_at = False, now
        is_slow = now >= self._slow_at
        with_rates = now >= self._processes_at
        if is_slow:
            self._find(lane, skipped)
        for uuid, reader in self._readers.items():
            if uuid not in skipped:
                self._read_card(lane, reader, is_slow=is_slow, with_rates=with_rates)
        # Only now: where a call hung, the next thread does again what this one began.
        if is_slow:
            self._slow_at = now + self._cadence.slow_seconds
        if with_rates:
            self._processes_at = now + self._cadence.process_seconds
        if any(one.is_outdated for uuid, one in self._readers.items() if uuid not in self._lost):
            self._slow_at = min(self._slow_at, now + self._cadence.relayout_seconds)
        self._judge_all()

    def look_closely(self) -> None:
        """Have all be read in the next pass, what changes slowly included; from any thread."""
        self._is_urgent = True

    def last_pass(self) -> Pass:
        """Return what was found last, by whatever thread."""
        return Pass(
            driver_version=self._driver_version,
            devices=tuple(device for devices in self._last.values() for device in devices),
            problem=self._problem or self._hang,
            needs_restart=self._needs_restart or self._hang is not None,
        )

    def mark(self, uuid: str, problem: Problem) -> None:
        """Say why a card's values grow old; or, for "", why everything does."""
        self._marks[uuid] = problem
        if uuid in self._last:
            self._last[uuid] = tuple(
                replace(device, problem=problem) for device in self._last[uuid]
            )
        else:
            self._problem = problem

    def _start(self, lane: Lane) -> None:
        """Start the library, or say why it does not start and when it is tried again."""
        self._start_at = self._monotonic() + self._backoff
        self._backoff = min(self._backoff * 2, self._cadence.retry_seconds)
        limit = self._cadence.start_limit_seconds
        lane.call(NO_CARD, "nvmlInit", self._backend.start, limit_seconds=limit)
        self._is_started = True
        self._driver_version = lane.call(
            NO_CARD, "nvmlSystemGetDriverVersion", self._backend.driver_version
        )
        self._readers.clear()
        self._slow_at = self._processes_at = 0.0

    def _find(self, lane: Lane, skipped: Collection[str]) -> None:
        """Find the cards and their instances; those that stayed as they were keep their readers."""
        count = lane.call(NO_CARD, "nvmlDeviceGetCount", self._backend.count)
        self._problem = next((p for name, p in self._marks.items() if name not in self._last), None)
        unopened: dict[str, Problem] = {}
        cards = [
            card for index in range(count) if (card := self._open(lane, index, skipped, unopened))
        ]
        found = {card.uuid for card in cards} | set(skipped)
        if not skipped:  # else what is waited for stays as it is
            self._watcher.follow(cards)
        for card in cards:
            self._adopt(lane, card, cards)
        self._miss(self._last.keys() - found, unopened)
        if not count:
            self._problem = Problem(
                code=NO_GPU,
                text="the driver lists no GPU: is the container given any "
                "(NVIDIA_VISIBLE_DEVICES=all), and is one in this machine?",
            )

    def _open(
        self, lane: Lane, index: int, skipped: Collection[str], unopened: dict[str, Problem]
    ) -> Card | None:
        """Open a card; one that cannot be opened does not hide the others."""
        known = next((r.card.uuid for r in self._readers.values() if r.card.index == index), None)
        subject = known or f"GPU {index}"
        if subject in skipped:
            return None
        try:
            return lane.call(subject, "nvmlDeviceGetHandleByIndex", self._backend.card, index)
        except NvmlError as error:
            self.failures[error.call, error.code.name] += 1
            if error.code in SESSION_CODES:
                raise
            unopened[subject] = problem_of(error, f"cannot open GPU {index}")
            return None

    def _miss(self, missing: Collection[str], unopened: Mapping[str, Problem]) -> None:
        """Say why cards that were there are not found, or which new ones cannot be opened."""
        for uuid in missing:
            # A card that fell out of the list may be any of those that cannot be opened.
            problem = unopened.get(uuid) or next(iter(unopened.values()), None) or _gone(uuid)
            if uuid not in unopened:
                self._readers.pop(uuid, None)
            self._lose(uuid, problem)
        strangers = [problem for name, problem in unopened.items() if name not in self._last]
        if strangers:
            self._problem = strangers[0]

    def _adopt(self, lane: Lane, card: Card, cards: list[Card]) -> None:
        """Keep a card's reader, or make one where the card or its layout is new."""
        known = self._readers.get(card.uuid)
        self._last.setdefault(card.uuid, (_unread(card),))
        try:
            instances = lane.call(card.uuid, "instances", self._backend.instances, card)
            if known is not None and self._is_sound(known, card, instances):
                known.renew(card, instances)
                return
            topology = lane.call(card.uuid, "topology", self._backend.topology, card, cards)
        except NvmlError as error:
            self.failures[error.call, error.code.name] += 1
            if error.code in SESSION_CODES:
                raise
            self._lose(card.uuid, problem_of(error, f"cannot read GPU {card.index}"))
            return
        self._readers[card.uuid] = CardReader(
            self._backend, card, topology, instances, self.failures
        )

    def _is_sound(
        self, reader: CardReader, card: Card, instances: tuple[Instance, ...] | None
    ) -> bool:
        """Tell whether a reader still fits its card, which was not lost since."""
        fits = (reader.card, reader.instances) == (card, instances)
        return fits and card.uuid not in self._lost

    def _read_card(
        self, lane: Lane, reader: CardReader, *, is_slow: bool, with_rates: bool
    ) -> None:
        card = reader.card
        try:
            devices = reader.read(lane, self._clock(), is_slow=is_slow, with_rates=with_rates)
        except NvmlError as error:
            if error.code in SESSION_CODES:
                raise
            self._lose(card.uuid, problem_of(error, f"cannot read GPU {card.index}"))
            return
        self._last[card.uuid] = devices
        self._lost.discard(card.uuid)

    def _lose(self, uuid: str, problem: Problem) -> None:
        """Say that a card cannot be read; what was measured of it is not true any more."""
        devices = _without_values(self._last.get(uuid, ()), problem)
        if problem.code == Code.ResetRequired.name:  # that much the driver says of it, and now
            devices = (
                replace(device, values=RESET_REQUIRED, measured_at=self._clock())
                for device in devices
            )
        self._last[uuid] = tuple(devices)
        self._lost.add(uuid)

    def _judge_all(self) -> None:
        """Find out whether the whole container is cut off, and not single cards."""
        problems = [device.problem for devices in self._last.values() for device in devices]
        codes = {problem.code for problem in problems if problem is not None}
        if not problems or None in problems:
            self._has_worked = self._has_worked or None in problems
            self._backoff = 1.0
            self._needs_restart = False
            return
        needing = {code.name for code in NEEDS_RESTART}
        self._needs_restart = self._has_worked and codes <= needing
        if codes & needing:
            self._problem = next(problem for problem in problems if problem is not None)

    def _judge_hangs(self, skipped: Collection[str]) -> None:
        """Find out whether no card at all can be read because calls hang."""
        is_any_read = any(
            uuid not in skipped and all(device.problem is None for device in devices)
            for uuid, devices in self._last.items()
        )
        self._hang = None if is_any_read else next(iter(self._marks.values()), None)

    def _cut_off(self, lane: Lane, error: NvmlError) -> None:
        """Let go of a library that has lost the driver; it is started again later."""
        self.failures[error.call, error.code.name] += 1
        what = "cannot read the GPUs" if self._is_started else "cannot start NVML"
        self._problem = problem_of(error, what)
        self._needs_restart = error.code is Code.LibRmVersionMismatch or (
            self._has_worked and error.code in NEEDS_RESTART
        )
        for uuid, devices in self._last.items():
            self._last[uuid] = tuple(_without_values(devices, self._problem))
        if self._is_started:
            self._is_started = False
            self._watcher.stop()
            with contextlib.suppress(NvmlError):  # it is cut off already
                lane.call(NO_CARD, "nvmlShutdown", self._backend.stop)
        self._readers.clear()
        self._driver_version = ""


def _without_values(devices: Iterable[DeviceReading], problem: Problem) -> Iterable[DeviceReading]:
    for device in devices:
        yield replace(device, values={}, processes=None, problem=problem)


def _unread(card: Card) -> DeviceReading:
    return DeviceReading(card=card, topology=Topology(numa_node=None, nvlink_peers=()))


def _gone(uuid: str) -> Problem:
    return Problem(
        code=GONE,
        text=f"{uuid} was here and is not listed by the driver any more: taken out, or fallen off "
        "the bus: see dmesg; restart the agent where it was taken out for good",
    )
