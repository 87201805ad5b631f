import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue

import pytest

from agent.gpu.backend import Card, Code, XidEvent
from agent.gpu.events import XidLog, XidWatcher
from testkit.agent.scripted import ScriptedBackend, ScriptedCard

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

    @property
    def problem(self) -> str:
        return "; ".join(filter(None, self.watcher.problems.values()))

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


def test_events_are_delivered_immediately(rig: Rig) -> None:
    rig.watcher.watch(rig.cards())
    for xid in (13, 79):
        rig.backend.happen(XidEvent(uuid="GPU-1", gpu_instance_id=None, xid=xid))

    assert [rig.events.get(timeout=10).xid for _ in range(2)] == [13, 79]


def test_no_thread_keeps_the_agent_from_ending(rig: Rig) -> None:
    rig.watcher.watch(rig.cards())

    watching = [thread for thread in threading.enumerate() if thread.name.startswith("xid ")]
    assert watching
    assert all(thread.daemon for thread in watching)


def test_a_card_whose_waits_return_at_once_takes_no_whole_core(rig: Rig) -> None:
    rig.backend.event_seconds = 0.0
    rig.watcher.watch(rig.cards()[:1])
    until(lambda: rig.backend.calls["wait", "GPU-0"] > 0)

    threading.Event().wait(0.2)

    assert rig.backend.calls["wait", "GPU-0"] < 30


def test_an_unchanged_card_keeps_its_thread(rig: Rig) -> None:
    rig.watcher.watch(rig.cards())
    until(lambda: rig.backend.watched == {"GPU-0", "GPU-1"})
    rig.backend.cards.pop()

    for _ in range(3):
        rig.watcher.watch(rig.cards())

    until(lambda: rig.backend.watched == {"GPU-0"})
    assert rig.backend.calls["events", "GPU-0"] == 1


@pytest.mark.parametrize("code", [Code.Unknown, Code.NotSupported, Code.GpuIsLost])
def test_a_card_whose_events_fail_does_not_affect_others(
    rig: Rig, code: Code, caplog: pytest.LogCaptureFixture
) -> None:
    rig.backend.faults["events", "GPU-0"] = code
    rig.watcher.watch(rig.cards())
    rig.backend.happen(replace(EVENT, uuid="GPU-1"))

    assert rig.events.get(timeout=10).uuid == "GPU-1"
    until(lambda: code.name in rig.watcher.problems["GPU-0"])
    assert rig.watcher.problems["GPU-1"] == ""
    (logged,) = map(vars, caplog.records)
    assert logged["uuid"] == "GPU-0"
    assert code.name in logged["error"]

    def is_followed_again() -> bool:
        rig.watcher.watch(rig.cards())
        return not rig.problem

    del rig.backend.faults["events", "GPU-0"]
    until(is_followed_again)
    assert rig.backend.calls["events", "GPU-1"] == 1


@pytest.mark.parametrize("call", ["events", "wait"])
def test_a_card_whose_wait_hangs_does_not_affect_others(rig: Rig, call: str) -> None:
    rig.backend.hangs.add((call, "GPU-0"))
    rig.watcher.watch(rig.cards())
    rig.backend.happen(replace(EVENT, uuid="GPU-1"))
    assert rig.events.get(timeout=10).uuid == "GPU-1"

    def is_overdue() -> bool:
        rig.ahead += 1.0
        return "has not ended for" in rig.watcher.problems["GPU-0"]

    until(is_overdue)
    until(lambda: rig.watcher.problems["GPU-1"] == "")
    rig.backend.hangs.clear()
    rig.backend.released.set()
    until(lambda: not rig.problem)


def test_an_unexpected_exception_ends_only_the_thread_of_its_card(rig: Rig) -> None:
    def fail(event: XidEvent) -> None:
        if event.uuid == "GPU-0":
            raise IndexError("a new kind of event")
        rig.events.put(event)

    rig.watcher._deliver = fail
    rig.watcher.watch(rig.cards())
    for uuid in ("GPU-0", "GPU-1"):
        rig.backend.happen(replace(EVENT, uuid=uuid))

    assert rig.events.get(timeout=10).uuid == "GPU-1"
    until(lambda: "a new kind of event" in rig.problem)


def test_a_failed_wait_is_reported_and_restarted(rig: Rig) -> None:
    rig.watcher.watch(rig.cards())
    rig.backend.happen(Code.Unknown)
    until(lambda: "Unknown" in rig.problem)

    def try_again() -> bool:
        rig.watcher.watch(rig.cards())
        return not rig.problem

    until(try_again)
    rig.backend.happen(EVENT)
    assert rig.events.get(timeout=10) == EVENT


def test_a_persistent_failure_is_logged_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.backend.faults["events", "GPU-0"] = Code.Unknown

    for count in range(1, 5):
        rig.watcher.watch(rig.cards())
        until(lambda: rig.backend.calls["events", "GPU-0"] == count)  # noqa: B023 - called here
        until(lambda: not rig.watcher._watches["GPU-0"].thread.is_alive())

    assert len(caplog.records) == 1


def test_until_a_card_is_watched_its_problem_says_so(rig: Rig) -> None:
    rig.backend.hangs.add(("events", "GPU-0"))
    rig.watcher.watch(rig.cards())

    assert "not watched yet" in rig.watcher.problems["GPU-0"]
    rig.backend.hangs.clear()
    rig.backend.released.set()
    until(lambda: not rig.problem)


def test_an_abandoned_thread_delivers_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.gpu.events._JOIN_SECONDS", 0.01)
    rig.backend.hangs.add(("wait", "GPU-0"))
    rig.watcher.watch(rig.cards())
    until(lambda: rig.backend.calls["wait", "GPU-0"] == 1)
    hung = rig.watcher._watches["GPU-0"].thread

    rig.watcher.stop()
    rig.backend.released.set()
    hung.join(10)

    assert "not watched yet" in rig.problem


def test_a_hung_card_has_at_most_one_abandoned_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.gpu.events._JOIN_SECONDS", 0.01)
    rig.backend.hangs.add(("wait", "GPU-0"))
    rig.watcher.watch(rig.cards())
    until(lambda: rig.backend.calls["wait", "GPU-0"] == 1)

    for _ in range(5):  # each time the library is started again
        rig.watcher.stop()
        rig.watcher.watch(rig.cards())
        until(lambda: "GPU-1" in rig.backend.watched)

    assert rig.backend.calls["events", "GPU-0"] == 1
    assert rig.watcher.problems["GPU-0"]
    rig.backend.hangs.clear()
    rig.backend.released.set()

    def is_followed_again() -> bool:
        rig.watcher.watch(rig.cards())
        return not rig.problem

    until(is_followed_again)
    assert rig.backend.calls["events", "GPU-0"] == 2


def test_a_stopped_watcher_delivers_nothing(rig: Rig) -> None:
    rig.watcher.watch(rig.cards())
    until(lambda: len(rig.backend.watched) == 2)
    rig.watcher.stop()

    rig.backend.happen(EVENT)

    assert rig.events.empty()
    assert rig.backend.events_waiting == [("GPU-0", EVENT)], "the event was not consumed"


def test_a_closed_watcher_starts_no_threads(rig: Rig) -> None:
    rig.watcher.close()

    rig.watcher.watch(rig.cards())

    assert rig.backend.watched == set()


def test_without_cards_no_thread_is_started(rig: Rig) -> None:
    rig.watcher.watch([])

    assert rig.backend.watched == set()


def test_the_log_separates_cards_and_instances() -> None:
    log = XidLog()
    log.add(EVENT, 1.0)
    log.add(XidEvent(uuid="GPU-0", gpu_instance_id=5, xid=43), 2.0)

    assert log.latest_of("GPU-0", "5") == ((1.0, 79), (2.0, 43))
    assert log.latest_of("GPU-0", "3") == ((1.0, 79),)
    assert log.latest_of("GPU-1", "") == ()


def test_the_log_counts_all_events_and_keeps_the_latest_of_each_xid() -> None:
    log = XidLog()
    log.add(XidEvent(uuid="GPU-0", gpu_instance_id=None, xid=48), 0.0)
    for at in range(1, 1000):
        log.add(XidEvent(uuid="GPU-0", gpu_instance_id=None, xid=(13, 31)[at % 2]), float(at))

    assert log.counts == {("GPU-0", 48): 1, ("GPU-0", 31): 500, ("GPU-0", 13): 499}
    assert log.latest_of("GPU-0", "") == ((0.0, 48), (998.0, 13), (999.0, 31))
