import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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


def test_the_same_card_is_followed_by_the_same_thread(rig: Rig) -> None:
    rig.watcher.follow(rig.cards())
    until(lambda: rig.backend.watched == {"GPU-0", "GPU-1"})
    rig.backend.cards.pop()

    for _ in range(3):
        rig.watcher.follow(rig.cards())

    until(lambda: rig.backend.watched == {"GPU-0"})
    assert rig.backend.calls["events", "GPU-0"] == 1


@pytest.mark.parametrize("code", [Code.Unknown, Code.NotSupported, Code.GpuIsLost])
def test_a_card_that_cannot_be_waited_for_costs_the_others_nothing(rig: Rig, code: Code) -> None:
    rig.backend.faults["events", "GPU-0"] = code
    rig.watcher.follow(rig.cards())
    rig.backend.happen(replace(EVENT, uuid="GPU-1"))

    assert rig.events.get(timeout=10).uuid == "GPU-1"
    until(lambda: code.name in rig.watcher.problems["GPU-0"])
    assert "GPU-0, one of 1 of 2 GPUs" in rig.watcher.problem
    assert rig.watcher.problems["GPU-1"] == ""

    def is_followed_again() -> bool:
        rig.watcher.follow(rig.cards())
        return not rig.watcher.problem

    del rig.backend.faults["events", "GPU-0"]
    until(is_followed_again)
    assert rig.backend.calls["events", "GPU-1"] == 1


@pytest.mark.parametrize("call", ["events", "wait"])
def test_a_card_that_hangs_costs_the_others_nothing(rig: Rig, call: str) -> None:
    rig.backend.hangs.add((call, "GPU-0"))
    rig.watcher.follow(rig.cards())
    rig.backend.happen(replace(EVENT, uuid="GPU-1"))
    assert rig.events.get(timeout=10).uuid == "GPU-1"

    def is_overdue() -> bool:
        rig.ahead += 1.0
        return "has not ended for" in rig.watcher.problems["GPU-0"]

    until(is_overdue)
    until(lambda: rig.watcher.problems["GPU-1"] == "")
    rig.backend.hangs.clear()
    rig.backend.released.set()
    until(lambda: not rig.watcher.problem)


def test_what_no_version_of_us_knows_ends_one_cards_thread_alone(rig: Rig) -> None:
    def fail(event: XidEvent) -> None:
        if event.uuid == "GPU-0":
            raise IndexError("a new kind of event")
        rig.events.put(event)

    rig.watcher._deliver = fail
    rig.watcher.follow(rig.cards())
    for uuid in ("GPU-0", "GPU-1"):
        rig.backend.happen(replace(EVENT, uuid=uuid))

    assert rig.events.get(timeout=10).uuid == "GPU-1"
    until(lambda: "a new kind of event" in rig.watcher.problem)


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


def test_until_a_card_is_followed_no_events_are_said_to_come(rig: Rig) -> None:
    before = rig.watcher.problem
    rig.watcher.follow(rig.cards())

    assert "no GPU is waited for" in before
    until(lambda: not rig.watcher.problem)


def test_a_wait_that_ends_after_its_thread_was_left_behind_says_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.events._JOIN_SECONDS", 0.01)
    rig.backend.hangs.add(("wait", "GPU-0"))
    rig.watcher.follow(rig.cards())
    until(lambda: rig.backend.calls["wait", "GPU-0"] == 1)
    hung = rig.watcher._watches["GPU-0"].thread

    rig.watcher.stop()
    rig.backend.released.set()
    hung.join(10)

    assert "no GPU is waited for" in rig.watcher.problem


def test_a_stopped_watcher_delivers_no_more(rig: Rig) -> None:
    rig.watcher.follow(rig.cards())
    until(lambda: len(rig.backend.watched) == 2)
    rig.watcher.stop()

    rig.backend.happen(EVENT)

    assert rig.events.empty()
    assert rig.backend.events_waiting == [("GPU-0", EVENT)], "nobody took it"


def test_a_closed_watcher_follows_nothing_any_more(rig: Rig) -> None:
    rig.watcher.close()

    rig.watcher.follow(rig.cards())

    assert rig.backend.watched == set()


def test_a_machine_without_cards_is_not_waited_for(rig: Rig) -> None:
    rig.watcher.follow([])

    assert rig.backend.watched == set()


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
