import threading
from collections.abc import Callable, Iterator

import pytest

from agent.backend import Call, Code, ProcessList, Values
from agent.problems import GONE, NO_GPU, hung_problem
from agent.reading import DeviceReading, Pass
from agent.worker import GivenUpError
from extender.core.readings import Signal
from tests.agent.scripted import migs
from tests.agent.session_rig import NOW, GivenUpAt, Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig("GPU-0", "GPU-1", "GPU-2")
    yield rig
    rig.watcher.stop()


def by_uuid(found: Pass) -> dict[str, DeviceReading]:
    return {device.card.uuid: device for device in found.devices}


def code(reading: DeviceReading) -> str | None:
    return None if reading.problem is None else reading.problem.code


def test_every_card_is_read(rig: Rig) -> None:
    found = rig.read()

    assert found.driver_version == "580.95.05"
    assert found.problem is None
    assert [device.card.uuid for device in found.devices] == ["GPU-0", "GPU-1", "GPU-2"]
    assert all(device.measured_at == rig.now for device in found.devices)


def test_cards_are_listed_and_layouts_looked_at_less_often(rig: Rig) -> None:
    rig.reads(10)

    assert rig.backend.calls["count", ""] == 1
    assert rig.backend.calls["instances", "GPU-1"] == 1
    rig.read()
    assert rig.backend.calls["count", ""] == 2
    assert rig.backend.calls["topology", "GPU-1"] == 1, "what does not change is read once"


def test_without_a_driver_it_says_why_and_keeps_looking(rig: Rig) -> None:
    rig.backend.faults["start", ""] = Code.LibraryNotFound
    found = rig.reads(200)

    assert found.devices == ()
    assert found.problem is not None
    assert found.problem.code == "LibraryNotFound"
    assert "libnvidia-ml.so.1" in found.problem.text
    assert "runtimeClassName: nvidia" in found.problem.text
    assert not found.needs_restart
    assert 8 <= rig.backend.calls["start", ""] <= 14, "looks often at first, then every 30 s"


def test_a_driver_that_appears_later_is_found(rig: Rig) -> None:
    rig.backend.faults["start", ""] = Code.DriverNotLoaded
    rig.reads(40)
    rig.backend.faults.clear()

    found = rig.reads(30)

    assert (found.problem, len(found.devices)) == (None, 3)


START_CODES = [one for one in Code if one is not Code.Success]


@pytest.mark.parametrize("fault", START_CODES, ids=lambda one: one.name)
def test_whatever_start_says_is_told_with_a_cause_and_mended_by_itself(
    rig: Rig, fault: Code
) -> None:
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


def test_a_card_that_is_not_listed_any_more_stays_with_its_problem(rig: Rig) -> None:
    rig.read()
    rig.backend.cards.pop(1)

    found = by_uuid(rig.reads(11))

    assert code(found["GPU-1"]) == GONE
    assert found["GPU-1"].values == {}
    assert code(found["GPU-2"]) is None


def test_a_card_whose_index_changed_is_the_same_card(rig: Rig) -> None:
    rig.read()
    rig.backend.cards.reverse()

    found = by_uuid(rig.reads(11))

    assert [found[f"GPU-{number}"].card.index for number in range(3)] == [2, 1, 0]
    assert all(code(reading) is None for reading in found.values())


def test_no_card_at_all_is_said(rig: Rig) -> None:
    rig.backend.cards.clear()

    found = rig.read()

    assert found.problem is not None
    assert found.problem.code == NO_GPU
    assert not found.needs_restart


CUT_OFF = [Code.Uninitialized, Code.DriverNotLoaded, Code.LibraryNotFound]


@pytest.mark.parametrize("fault", CUT_OFF, ids=lambda one: one.name)
def test_a_driver_that_goes_away_is_started_again_when_it_comes_back(rig: Rig, fault: Code) -> None:
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
    assert "start anew" in found.problem.text


def test_access_that_comes_back_needs_none(rig: Rig) -> None:
    rig.read()
    lose_access(rig, Code.Unknown)
    rig.read()
    rig.backend.faults.clear()

    found = rig.reads(12)

    assert not found.needs_restart
    assert found.problem is None


@pytest.mark.parametrize("is_listed", [True, False])
def test_access_that_was_never_given_is_no_reason_to_start_anew(rig: Rig, is_listed: bool) -> None:
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


def test_a_layout_that_changes_is_found_again(rig: Rig) -> None:
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


def test_an_instances_call_that_always_fails_is_given_up_where_the_layout_is_the_same(
    rig: Rig,
) -> None:
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


def test_a_card_with_instances_that_cannot_be_read_is_not_looked_for_every_second(
    rig: Rig,
) -> None:
    rig.cards[1].instances = migs((1, "3g.40gb"))
    rig.read()
    calls = (*Call, *ProcessList)
    rig.backend.faults = {(call, "GPU-1"): Code.Unknown for call in calls}

    rig.reads(30)

    assert rig.backend.calls["count", ""] <= 4


def test_mig_that_is_switched_on_or_off_is_found_again(rig: Rig) -> None:
    rig.read()
    rig.cards[0].instances = migs((7, "1g.10gb"))
    assert "7" in [one.gpu_instance_id for one in rig.reads(11).devices]

    rig.cards[0].instances = None
    assert [one.gpu_instance_id for one in rig.reads(11).devices] == ["", "", ""]


def test_a_card_that_hangs_is_skipped_and_its_values_grow_old(rig: Rig) -> None:
    rig.read()
    rig.session.mark("GPU-1", hung_problem("power", 5))

    found = by_uuid(rig.read(5.0, frozenset({"GPU-1"})))

    assert code(found["GPU-1"]) == "Hung"
    assert found["GPU-1"].measured_at == NOW + 1
    assert found["GPU-1"].values[Signal.POWER] == 80.0
    assert found["GPU-2"].measured_at == rig.now
    assert code(by_uuid(rig.read())["GPU-1"]) is None, "the call has returned"


def test_cards_after_one_that_hung_while_it_was_found_are_found_by_the_next_thread(
    rig: Rig,
) -> None:
    with pytest.raises(GivenUpError):
        rig.session.read(GivenUpAt("instances"), frozenset())

    found = by_uuid(rig.read(0.1, frozenset({"GPU-0"})))

    assert found["GPU-1"].measured_at == rig.now
    assert found["GPU-2"].measured_at == rig.now


def test_what_was_to_be_looked_at_closely_is_so_after_a_call_that_hung_as_well(rig: Rig) -> None:
    rig.read()
    rig.session.look_closely()
    with pytest.raises(GivenUpError):
        rig.session.read(GivenUpAt("instances"), frozenset())
    before = rig.backend.calls["instances", "GPU-2"]

    rig.read(0.1)

    assert rig.backend.calls["instances", "GPU-2"] == before + 1


def test_events_of_all_cards_are_waited_for(rig: Rig) -> None:
    rig.read()

    assert wait_for(lambda: rig.backend.watched == {"GPU-0", "GPU-1", "GPU-2"})


def test_events_are_waited_for_anew_when_cards_change(rig: Rig) -> None:
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
def test_what_a_newer_driver_answers_costs_one_value_and_is_named(
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
