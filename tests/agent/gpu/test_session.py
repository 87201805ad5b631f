import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from typing_extensions import override

from agent.gpu.backend import (
    Call,
    Code,
    DeviceReading,
    NodeReading,
    ProcessList,
    Topology,
    Values,
    XidEvent,
)
from agent.gpu.events import XidWatcher
from agent.gpu.session import _GONE, _NO_GPU, Cadence, Session, hung_problem
from agent.gpu.worker import CallTracker, _CallAbandonedError
from extender.core.devices.readings import Signal
from testkit.agent.scripted import ScriptedBackend, ScriptedCard, migs

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

    def read(self, after: float = 1.0, skipped: frozenset[str] = frozenset()) -> NodeReading:
        self.now += after
        return self.session.read(CallTracker(10.0), skipped)

    def reads(self, count: int) -> NodeReading:
        return [self.read() for _ in range(count)][-1]


class AbandonedAt(CallTracker):
    """A tracker whose thread is abandoned during a given call."""

    def __init__(self, call: str) -> None:
        super().__init__(10.0)
        self._call = call

    @override
    def call(
        self,
        subject: str,
        name: str,
        function: Callable[..., Any],
        *arguments: Any,
        limit_seconds: float | None = None,
    ) -> Any:
        self.is_abandoned = name == self._call
        return super().call(subject, name, function, *arguments, limit_seconds=limit_seconds)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig("GPU-0", "GPU-1", "GPU-2")
    yield rig
    rig.watcher.stop()


def by_uuid(found: NodeReading) -> dict[str, DeviceReading]:
    return {device.card.uuid: device for device in found.devices}


def code(reading: DeviceReading) -> str | None:
    return None if reading.problem is None else reading.problem.code


def test_every_card_is_read(rig: Rig) -> None:
    found = rig.read()

    assert found.driver_version == "580.95.05"
    assert found.problem is None
    assert [device.card.uuid for device in found.devices] == ["GPU-0", "GPU-1", "GPU-2"]
    assert all(device.measured_at == rig.now for device in found.devices)


def test_cards_and_layouts_are_listed_less_often(rig: Rig) -> None:
    rig.reads(10)

    assert rig.backend.calls["count", ""] == 1
    assert rig.backend.calls["instances", "GPU-1"] == 1
    rig.read()
    assert rig.backend.calls["count", ""] == 2
    assert rig.backend.calls["topology", "GPU-1"] == 1, "what does not change is read once"


def test_without_a_driver_the_problem_is_reported_and_start_is_retried(rig: Rig) -> None:
    rig.backend.faults["start", ""] = Code.LibraryNotFound
    found = rig.reads(200)

    assert found.devices == ()
    assert found.problem is not None
    assert found.problem.code == "LibraryNotFound"
    assert "libnvidia-ml.so.1" in found.problem.text
    assert "runtimeClassName: nvidia" in found.problem.text
    assert not found.needs_restart
    # After 1, 2, 4, 8 and 16 seconds, then every 30 s.
    assert rig.backend.calls["start", ""] == 11


def test_a_driver_that_appears_later_is_found(rig: Rig) -> None:
    rig.backend.faults["start", ""] = Code.DriverNotLoaded
    rig.reads(40)
    rig.backend.faults.clear()

    found = rig.reads(30)

    assert (found.problem, len(found.devices)) == (None, 3)


START_CODES = [one for one in Code if one is not Code.Success]


@pytest.mark.parametrize("fault", START_CODES, ids=lambda one: one.name)
def test_every_start_error_is_reported_and_recovers(rig: Rig, fault: Code) -> None:
    rig.backend.faults["start", ""] = fault
    found = rig.read()
    assert found.problem is not None
    assert found.problem.code == fault.name
    assert found.problem.text.startswith("cannot start NVML: ")
    assert found.problem.text.count(": ") >= 2, "what failed: cause: what to do"

    rig.backend.faults.clear()

    assert rig.reads(3).problem is None


def test_one_lost_card_does_not_hide_the_others(rig: Rig) -> None:
    rig.read()
    rig.backend.faults[Call.POWER, "GPU-1"] = Code.GpuIsLost

    found = by_uuid(rig.reads(15))

    assert code(found["GPU-1"]) == "GpuIsLost"
    assert found["GPU-1"].values == {}, "what was measured is not true any more"
    assert found["GPU-1"].measured_at == NOW + 1, "but it is known when it was last"
    assert all(found[uuid].measured_at == rig.now for uuid in ("GPU-0", "GPU-2"))


def test_a_card_that_comes_back_is_read_again(rig: Rig) -> None:
    rig.read()
    rig.backend.faults[Call.POWER, "GPU-1"] = Code.GpuIsLost
    rig.reads(15)
    rig.backend.faults.clear()

    reading = by_uuid(rig.reads(11))["GPU-1"]

    assert (code(reading), reading.measured_at) == (None, rig.now)
    assert rig.backend.calls["topology", "GPU-1"] == 2, "its old handle is not trusted"


def test_a_card_that_is_lost_from_the_start_is_named_by_its_index(rig: Rig) -> None:
    rig.backend.faults["card", "GPU-1"] = Code.GpuIsLost

    found = rig.read()

    assert sorted(by_uuid(found)) == ["GPU-0", "GPU-2"]
    assert found.problem is not None
    assert found.problem.text.startswith("cannot open GPU 1: ")
    assert "fallen off the bus" in found.problem.text
    rig.backend.faults = {("topology", "GPU-1"): Code.GpuIsLost}
    assert code(by_uuid(rig.read(after=10))["GPU-1"]) == "GpuIsLost"


@pytest.mark.parametrize("call", ["start", "card", "instances", "topology", Call.POWER])
def test_a_failed_call_is_counted_with_its_error(rig: Rig, call: str) -> None:
    rig.backend.faults[call, "" if call == "start" else "GPU-1"] = Code.Unknown
    rig.read()

    assert rig.session.failures == {(call, "Unknown"): 1}


def test_a_uuid_that_two_cards_report_hides_no_other_card(rig: Rig) -> None:
    rig.read()
    rig.cards[1].uuid = rig.cards[0].uuid

    found = rig.read(after=10)

    devices = by_uuid(found)
    assert len(devices) == len(found.devices) == 3
    assert [code(devices[f"GPU-{at}"]) for at in range(3)] == [None, "Unknown", None]
    assert "twice" in (devices["GPU-1"].problem or hung_problem("", 0)).text


def test_a_card_that_is_no_longer_listed_stays_with_its_problem(rig: Rig) -> None:
    rig.read()
    rig.backend.cards.pop(1)

    found = by_uuid(rig.reads(11))

    assert code(found["GPU-1"]) == _GONE
    assert found["GPU-1"].values == {}
    assert code(found["GPU-2"]) is None


def test_a_card_whose_index_changed_is_the_same_card(rig: Rig) -> None:
    rig.read()
    rig.backend.cards.reverse()

    found = by_uuid(rig.reads(11))

    assert [found[f"GPU-{number}"].card.index for number in range(3)] == [2, 1, 0]
    assert all(code(reading) is None for reading in found.values())


def test_a_driver_without_cards_is_a_problem(rig: Rig) -> None:
    rig.backend.cards.clear()

    found = rig.read()

    assert found.problem is not None
    assert found.problem.code == _NO_GPU
    assert not found.needs_restart


USELESS = [
    Code.GpuIsLost,
    Code.ResetRequired,
    Code.InUse,
    Code.Unknown,
    Code.NoPermission,
    Code.OperatingSystem,
]


@pytest.mark.parametrize("fault", USELESS, ids=lambda one: one.name)
def test_the_library_is_shut_down_if_no_card_is_readable(rig: Rig, fault: Code) -> None:
    rig.read()
    lose_access(rig, fault)

    found = rig.read()
    is_started = rig.backend.is_started
    assert not is_started, "an upgrade, a reset or another layout may now happen"
    assert rig.backend.watched == set()
    rig.reads(300)
    is_started = rig.backend.is_started
    assert not is_started
    assert 10 <= rig.backend.starts <= 18, "looks soon at first, then every 30 s"
    assert all(code(one) == fault.name for one in found.devices)

    rig.backend.faults.clear()
    found = rig.reads(31)
    is_started = rig.backend.is_started
    assert is_started
    assert all(code(one) is None for one in found.devices)
    assert wait_for(lambda: rig.backend.watched == {"GPU-0", "GPU-1", "GPU-2"})


def test_the_library_stays_open_if_one_card_is_readable(rig: Rig) -> None:
    rig.read()
    lose_access(rig, Code.GpuIsLost)
    for key in [key for key in rig.backend.faults if key[1] == "GPU-2"]:
        del rig.backend.faults[key]

    rig.reads(30)

    assert (rig.backend.is_started, rig.backend.starts) == (True, 1)


def test_the_library_is_shut_down_without_cards(rig: Rig) -> None:
    rig.backend.cards.clear()

    found = rig.reads(100)

    assert not rig.backend.is_started
    assert rig.backend.starts <= 9
    assert found.problem is not None
    assert found.problem.code == _NO_GPU


def test_the_library_is_not_shut_down_while_a_call_hangs(rig: Rig) -> None:
    rig.read()
    lose_access(rig, Code.GpuIsLost)

    rig.read(skipped=frozenset({"GPU-0"}))

    assert rig.backend.calls["stop", ""] == 0, "that would hang, too"


CUT_OFF = [Code.Uninitialized, Code.DriverNotLoaded, Code.LibraryNotFound]


@pytest.mark.parametrize("fault", CUT_OFF, ids=lambda one: one.name)
def test_the_library_is_started_again_after_a_driver_reload(rig: Rig, fault: Code) -> None:
    rig.read()
    for card in rig.cards:
        rig.backend.faults[Call.POWER, card.uuid] = fault
    rig.backend.faults["start", ""] = fault
    found = rig.read()
    assert found.problem is not None
    assert found.problem.code == fault.name
    assert all(device.values == {} for device in found.devices)
    assert not rig.backend.is_started
    assert not found.needs_restart

    rig.backend.faults.clear()
    found = rig.reads(40)

    assert found.problem is None
    assert all(device.measured_at == rig.now for device in found.devices)


def test_a_driver_upgraded_underneath_needs_a_new_container(rig: Rig) -> None:
    rig.read()
    rig.backend.faults[Call.POWER, "GPU-0"] = Code.DriverNotLoaded
    rig.read()
    rig.backend.faults["start", ""] = Code.LibRmVersionMismatch

    found = rig.reads(40)

    assert found.needs_restart
    assert found.problem is not None
    assert "upgraded under this process" in found.problem.text


LOST_ACCESS = [Code.OperatingSystem, Code.NoPermission, Code.Unknown]


def lose_access(rig: Rig, fault: Code) -> None:
    calls = (*Call, *ProcessList, "samples", "process_rates", "instances", "card")
    rig.backend.faults = {(call, card.uuid): fault for call in calls for card in rig.cards}


@pytest.mark.parametrize("fault", LOST_ACCESS, ids=lambda one: one.name)
def test_access_that_was_lost_needs_a_new_container(rig: Rig, fault: Code) -> None:
    rig.read()
    lose_access(rig, fault)

    found = rig.reads(12)

    assert found.needs_restart
    assert all(code(device) == fault.name for device in found.devices)
    assert found.problem is not None
    assert "must restart" in found.problem.text


@pytest.mark.parametrize(
    "fault",
    [Code.Unknown, Code.OperatingSystem, Code.LibRmVersionMismatch],
    ids=lambda one: one.name,
)
def test_access_that_was_lost_needs_no_new_container_while_a_call_hangs(
    rig: Rig, fault: Code
) -> None:
    hung = frozenset({"GPU-1"})
    rig.read()
    rig.session.mark_hung("GPU-1", hung_problem("power", 5))
    rig.backend.faults["count", ""] = fault

    found = [rig.read(skipped=hung) for _ in range(12)]
    assert not any(reading.needs_restart for reading in found)
    assert found[-1].problem is not None
    assert found[-1].problem.code == fault.name

    assert rig.reads(40).needs_restart, "the hung call has returned"


def test_a_hang_withdraws_the_need_for_a_new_container(rig: Rig) -> None:
    rig.read()
    rig.backend.faults["count", ""] = Code.LibRmVersionMismatch
    assert rig.reads(12).needs_restart

    rig.session.mark_hung("", hung_problem("nvmlInit", 60))

    assert not rig.session.last_reading().needs_restart


def test_access_that_comes_back_needs_none(rig: Rig) -> None:
    rig.read()
    lose_access(rig, Code.Unknown)
    rig.read()
    rig.backend.faults.clear()

    found = rig.reads(12)

    assert not found.needs_restart
    assert found.problem is None


@pytest.mark.parametrize("is_listed", [True, False])
def test_access_that_never_existed_needs_no_new_container(rig: Rig, is_listed: bool) -> None:
    lose_access(rig, Code.NoPermission)
    if is_listed:
        for card in rig.cards:
            del rig.backend.faults["card", card.uuid], rig.backend.faults["instances", card.uuid]

    found = rig.reads(12)

    assert not found.needs_restart
    assert found.problem is not None
    assert "NVIDIA_VISIBLE_DEVICES" in found.problem.text


def test_one_card_that_fails_needs_no_new_container(rig: Rig) -> None:
    rig.read()
    calls = (*Call, *ProcessList, "samples", "process_rates")
    rig.backend.faults = {(call, "GPU-1"): Code.Unknown for call in calls}

    assert not rig.reads(3).needs_restart


def test_a_layout_change_is_detected(rig: Rig) -> None:
    rig.cards[1].instances = migs((1, "3g.40gb"), (2, "3g.40gb"))
    assert [one.gpu_instance_id for one in rig.read().devices] == ["", "1", "2", ""]

    rig.cards[1].instances = migs((5, "1g.10gb"), (2, "3g.40gb"), (6, "1g.10gb"))
    rig.read()
    found = rig.reads(2)

    assert [one.gpu_instance_id for one in found.devices if one.card.uuid == "GPU-1"] == [
        "5",
        "2",
        "6",
    ]
    assert all(Signal.MEMORY_USED in one.values for one in found.devices)


def test_a_failing_instance_call_is_skipped_if_the_layout_is_unchanged(rig: Rig) -> None:
    rig.cards[1].instances = migs((1, "3g.40gb"), (2, "3g.40gb"))
    rig.backend.faults[ProcessList.MPS, "GPU-1"] = Code.InvalidArgument
    rig.cards[1].values[Call.NVLINKS] = {"nvlinks_up": 18.0}
    rig.reads(3)
    rig.cards[1].values[Call.NVLINKS] = {"nvlinks_up": 16.0}

    found = rig.reads(37)

    reading = next(one for one in found.devices if one.gpu_instance_id == "2")
    assert reading.values[Signal.NVLINKS_DOWN] == 2.0, "what was known of the card is kept"
    assert rig.backend.calls[Call.FIELDS, "GPU-0"] == 5, "no more often than every 10 s"
    assert rig.backend.calls["topology", "GPU-1"] == 1
    assert rig.backend.calls[ProcessList.MPS, "GPU-1"] == 2 * 5, "one try with the slow calls"
    rig.backend.faults.clear()
    rig.reads(11)
    assert rig.backend.calls[ProcessList.MPS, "GPU-1"] > 2 * 6, "it answers again"


def test_an_unreadable_card_with_instances_is_not_listed_every_second(rig: Rig) -> None:
    rig.cards[1].instances = migs((1, "3g.40gb"))
    rig.read()
    calls = (*Call, *ProcessList)
    rig.backend.faults = {(call, "GPU-1"): Code.Unknown for call in calls}

    rig.reads(30)

    assert rig.backend.calls["count", ""] <= 4


def test_enabling_or_disabling_mig_is_detected(rig: Rig) -> None:
    rig.read()
    rig.cards[0].instances = migs((7, "1g.10gb"))
    assert "7" in [one.gpu_instance_id for one in rig.reads(11).devices]

    rig.cards[0].instances = None
    assert [one.gpu_instance_id for one in rig.reads(11).devices] == ["", "", ""]


def links_down(rig: Rig, passes: int = 2) -> list[float | None]:
    found = rig.reads(passes)
    return [device.values.get(Signal.NVLINKS_DOWN) for device in found.devices]


def test_links_count_as_down_if_other_cards_of_the_model_have_them(rig: Rig) -> None:
    for card, up in zip(rig.cards, (18.0, 12.0, 18.0), strict=True):
        card.values[Call.NVLINKS] = {"nvlinks_up": up}

    assert links_down(rig) == [0.0, 6.0, 0.0]
    rig.cards[1].values[Call.NVLINKS] = {"nvlinks_up": 18.0}
    assert links_down(rig, 11) == [0.0, 0.0, 0.0], "it was trained after all"


def test_links_are_compared_only_within_a_model_and_without_mig(rig: Rig) -> None:
    rig.cards[0].model = "NVIDIA A100-SXM4-40GB"
    rig.cards[1].instances = ()
    for card, up in zip(rig.cards, (12.0, 0.0, 18.0), strict=True):
        card.values[Call.NVLINKS] = {"nvlinks_up": up}

    assert links_down(rig) == [0.0, 0.0, 0.0]


PCIE = "NVIDIA A100 80GB PCIe"


@pytest.mark.parametrize(
    ("model", "peers", "down"),
    [
        (PCIE, ("switch",), 18.0),
        (PCIE, ("GPU-1",), 0.0),
        ("NVIDIA A100-SXM4-40GB", ("GPU-1",), 18.0),
        ("NVIDIA H100 80GB HBM3", ("GPU-1",), 18.0),
    ],
    ids=["on a switch", "by bridges, without a bridge", "sxm in a mesh", "hopper in a mesh"],
)
def test_a_card_without_links_is_unhealthy_unless_links_are_optional(
    rig: Rig, model: str, peers: tuple[str, ...], down: float
) -> None:
    rig.cards[0].values[Call.NVLINKS] = {"nvlinks_up": 0.0}
    for card in rig.cards:
        card.model = model
    for card in rig.cards[1:]:
        card.topology = Topology(numa_node=0, nvlink_peers=peers)

    assert links_down(rig) == [down, 0.0, 0.0]


def test_a_hung_card_is_skipped_and_its_values_become_stale(rig: Rig) -> None:
    rig.read()
    rig.session.mark_hung("GPU-1", hung_problem("power", 5))

    found = by_uuid(rig.read(5.0, frozenset({"GPU-1"})))

    assert code(found["GPU-1"]) == "Hung"
    assert found["GPU-1"].measured_at == NOW + 1
    assert found["GPU-1"].values[Signal.POWER] == 80.0
    assert found["GPU-2"].measured_at == rig.now
    assert code(by_uuid(rig.read())["GPU-1"]) is None, "the call has returned"


def test_the_next_thread_lists_the_cards_after_a_hung_one(rig: Rig) -> None:
    with pytest.raises(_CallAbandonedError):
        rig.session.read(AbandonedAt("instances"), frozenset())

    found = by_uuid(rig.read(0.1, frozenset({"GPU-0"})))

    assert found["GPU-1"].measured_at == rig.now
    assert found["GPU-2"].measured_at == rig.now


def test_a_requested_slow_read_survives_a_hung_call(rig: Rig) -> None:
    rig.read()
    rig.session.request_slow_read()
    with pytest.raises(_CallAbandonedError):
        rig.session.read(AbandonedAt("instances"), frozenset())
    before = rig.backend.calls["instances", "GPU-2"]

    rig.read(0.1)

    assert rig.backend.calls["instances", "GPU-2"] == before + 1


def test_events_of_all_cards_are_watched(rig: Rig) -> None:
    rig.read()

    assert wait_for(lambda: rig.backend.watched == {"GPU-0", "GPU-1", "GPU-2"})


def test_event_watches_follow_card_changes(rig: Rig) -> None:
    rig.read()
    rig.backend.cards.pop()
    rig.reads(11)

    assert wait_for(lambda: rig.backend.watched == {"GPU-0", "GPU-1"})


def wait_for(condition: Callable[[], bool]) -> bool:
    tick = threading.Event()
    for _ in range(500):
        if condition():
            return True
        tick.wait(0.01)
    return False


@pytest.mark.parametrize("error", [IndexError("value type 9"), AttributeError("sVal"), KeyError(7)])
def test_an_unparsable_answer_of_a_newer_driver_loses_one_value(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    read = rig.backend.read

    def fail(call: Call, handle: object) -> Values:
        if handle == "GPU-1" and call is Call.TEMPERATURE:
            raise error
        return read(call, handle)

    monkeypatch.setattr(rig.backend, "read", fail)
    found = by_uuid(rig.read())

    assert [device.problem for device in found.values()] == [None] * 3
    assert Signal.TEMPERATURE in found["GPU-0"].values
    assert Signal.TEMPERATURE not in found["GPU-1"].values
    assert Signal.POWER in found["GPU-1"].values
    assert rig.session.failures[Call.TEMPERATURE.value, "Unknown"] == 1
