import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from agent.backend import Card, Code, XidEvent
from agent.events import XidLog, XidWatcher
from tests.agent.scripted import ScriptedBackend, ScriptedCard

EVENT = XidEvent(uuid="GPU-0", gpu_instance_id=None, xid=79)


class Rig:
    def __init__(self) -> None:
        self.backend = ScriptedBackend(ScriptedCard("GPU-0"), ScriptedCard("GPU-1"))
        self.events: SimpleQueue[XidEvent] = SimpleQueue()
        self.ahead = 0.0
        self.watcher = XidWatcher(
            self.backend,
            self.events.put,
            wait_seconds=0.05,
            monotonic=lambda: time.monotonic() + self.ahead,
        )

    def cards(self) -> list[Card]:
        return [self.backend.card(index) for index in range(len(self.backend.cards))]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.watcher.stop()


def until(condition: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(1000):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("it never came true")


def test_events_are_delivered_as_they_happen(rig: Rig) -> None:
    rig.watcher.follow(rig.cards())
    for xid in (13, 79):
        rig.backend.happen(XidEvent(uuid="GPU-1", gpu_instance_id=None, xid=xid))

    assert [rig.events.get(timeout=10).xid for _ in range(2)] == [13, 79]


def test_the_same_cards_are_followed_by_the_same_thread(rig: Rig) -> None:
    for _ in range(3):
        rig.watcher.follow(rig.cards())
        until(lambda: rig.backend.calls["events", ""] > 0)

    assert rig.backend.calls["events", ""] == 1


def test_other_cards_are_followed_anew(rig: Rig) -> None:
    rig.watcher.follow(rig.cards())
    until(lambda: rig.backend.watched == ("GPU-0", "GPU-1"))
    rig.backend.cards.pop()

    rig.watcher.follow(rig.cards())

    until(lambda: rig.backend.watched == ("GPU-0",))


def test_a_wait_that_fails_says_so_and_is_begun_again(rig: Rig) -> None:
    rig.watcher.follow(rig.cards())
    rig.backend.happen(Code.Unknown)
    until(lambda: "Unknown" in rig.watcher.problem)

    def try_again() -> bool:
        rig.watcher.follow(rig.cards())
        return not rig.watcher.problem

    until(try_again)
    rig.backend.happen(EVENT)
    assert rig.events.get(timeout=10) == EVENT


def test_until_a_wait_has_ended_and_once_none_does_no_events_are_said_to_come(rig: Rig) -> None:
    before = rig.watcher.problem
    rig.watcher.follow(rig.cards())
    until(lambda: not rig.watcher.problem)

    def is_overdue() -> bool:
        rig.ahead += 1.0
        return "has not ended for" in rig.watcher.problem

    rig.backend.hangs.add(("wait", ""))
    until(is_overdue)

    assert "no GPU is waited for" in before
    rig.backend.hangs.clear()
    rig.backend.released.set()
    until(lambda: not rig.watcher.problem)


def test_a_wait_that_ends_after_its_thread_was_left_behind_says_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.events._JOIN_SECONDS", 0.01)
    rig.backend.hangs.add(("wait", ""))
    rig.watcher.follow(rig.cards())
    until(lambda: rig.backend.calls["wait", ""] == 1)
    hung = rig.watcher._thread
    assert hung is not None

    rig.watcher.stop()
    rig.backend.released.set()
    hung.join(10)

    assert "no GPU is waited for" in rig.watcher.problem


def test_cards_without_events_leave_a_reason_and_no_thread(rig: Rig) -> None:
    rig.backend.faults["events", ""] = Code.NotSupported

    rig.watcher.follow(rig.cards())

    until(lambda: "NotSupported" in rig.watcher.problem)


def test_a_stopped_watcher_delivers_no_more(rig: Rig) -> None:
    rig.watcher.follow(rig.cards())
    until(lambda: rig.backend.watched != ())
    rig.watcher.stop()

    rig.backend.happen(EVENT)

    assert rig.events.empty()
    assert rig.backend.events_waiting == [EVENT], "nobody took it"


def test_a_closed_watcher_follows_nothing_any_more(rig: Rig) -> None:
    rig.watcher.close()

    rig.watcher.follow(rig.cards())

    assert rig.backend.calls["events", ""] == 0


def test_a_machine_without_cards_is_not_waited_for(rig: Rig) -> None:
    rig.watcher.follow([])

    assert rig.backend.calls["events", ""] == 0


def test_a_log_tells_cards_and_instances_apart() -> None:
    log = XidLog()
    log.add(EVENT, 1.0)
    log.add(XidEvent(uuid="GPU-0", gpu_instance_id=5, xid=43), 2.0)

    assert log.of("GPU-0", "5") == ((1.0, 79), (2.0, 43))
    assert log.of("GPU-0", "3") == ((1.0, 79),)
    assert log.of("GPU-1", "") == ()


def test_a_log_counts_for_ever_and_remembers_the_latest_of_each_xid() -> None:
    log = XidLog()
    log.add(XidEvent(uuid="GPU-0", gpu_instance_id=None, xid=48), 0.0)
    for at in range(1, 1000):
        log.add(XidEvent(uuid="GPU-0", gpu_instance_id=None, xid=(13, 31)[at % 2]), float(at))

    assert log.counts == {("GPU-0", 48): 1, ("GPU-0", 31): 500, ("GPU-0", 13): 499}
    assert log.of("GPU-0", "") == ((0.0, 48), (998.0, 13), (999.0, 31))
