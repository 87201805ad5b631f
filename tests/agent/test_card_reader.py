"""What is read of a card and its instances, and what becomes of calls that fail."""

import pytest

from agent.backend import Call, Code, NvmlError, ProcessList, ProcessUse
from extender.core.readings import Signal
from tests.agent.card_rig import Rig
from tests.agent.scripted import GIB, ScriptedCard, migs


def test_a_process_stands_once_whichever_lists_name_it() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.scripted.processes = {
        ProcessList.COMPUTE: (ProcessUse(pid=7, memory_bytes=None),),
        ProcessList.MPS: (ProcessUse(pid=8, memory_bytes=2 * GIB),),
        ProcessList.GRAPHICS: (
            ProcessUse(pid=7, memory_bytes=GIB),
            ProcessUse(pid=9, memory_bytes=None),
        ),
    }

    found = rig.one().processes or ()

    assert [(one.pid, one.memory_bytes) for one in found] == [(7, GIB), (8, 2 * GIB), (9, None)]


def test_the_costly_list_is_asked_less_often_and_remembered() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.scripted.processes[ProcessList.GRAPHICS] = (ProcessUse(pid=9, memory_bytes=GIB),)
    rig.one()

    found = rig.one(is_slow=False).processes or ()

    assert [one.pid for one in found] == [9]
    assert rig.backend.calls[ProcessList.GRAPHICS, "GPU-1"] == 1


def test_without_a_list_it_is_unknown_who_uses_the_card() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.backend.faults[ProcessList.COMPUTE, "GPU-1"] = Code.NoPermission

    assert rig.one().processes is None


SLOW = (Call.FIELDS, Call.REMAPPED_ROWS, Call.FABRIC, Call.ENERGY, Call.CODECS, Call.POWER_LIMIT)


def test_what_costs_more_is_read_less_often_and_stays_known() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.one()
    for _ in range(3):
        reading = rig.one(is_slow=False)

    assert all(rig.backend.calls[call, "GPU-1"] == 1 for call in SLOW)
    assert rig.backend.calls[Call.POWER, "GPU-1"] == 4
    assert reading.values[Signal.POWER_LIMIT] == 700.0
    assert reading.values[Signal.MEMORY_TEMPERATURE] == 45.0


def test_thresholds_are_read_once() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    for _ in range(3):
        rig.one()

    assert rig.backend.calls[Call.THRESHOLDS, "GPU-1"] == 1


UNSUPPORTED = (
    Code.NotSupported,
    Code.FunctionNotFound,
    Code.ArgumentVersionMismatch,
    Code.Deprecated,
)


@pytest.mark.parametrize("code", UNSUPPORTED)
@pytest.mark.parametrize("call", [Call.POWER, Call.FABRIC, Call.GPM, Call.MEMORY])
def test_what_the_card_or_driver_does_not_know_is_asked_once(call: Call, code: Code) -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.backend.faults[call, "GPU-1"] = code
    for _ in range(3):
        reading = rig.one()

    assert rig.backend.calls[call, "GPU-1"] == 1
    assert rig.failures[call, code.name] == 1
    assert Signal.TEMPERATURE in reading.values


PASSING = sorted(
    set(Code)
    - set(UNSUPPORTED)
    - {
        Code.Success,
        Code.Uninitialized,
        Code.DriverNotLoaded,
        Code.LibraryNotFound,
        Code.LibRmVersionMismatch,
        Code.GpuIsLost,
        Code.GpuNotFound,
    }
)


@pytest.mark.parametrize("code", PASSING, ids=lambda code: code.name)
def test_any_other_error_costs_one_value_once_and_is_counted(code: Code) -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.one()
    rig.backend.faults[Call.POWER, "GPU-1"] = code
    failed = rig.one()
    del rig.backend.faults[Call.POWER, "GPU-1"]
    again = rig.one()

    assert Signal.POWER not in failed.values, "an error is no value, and no old one either"
    assert Signal.TEMPERATURE in failed.values
    assert again.values[Signal.POWER] == 80.0
    assert rig.failures[Call.POWER, code.name] == 1


def test_a_slow_value_that_fails_is_not_kept() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.one()
    rig.backend.faults[Call.FIELDS, "GPU-1"] = Code.Unknown

    assert Signal.ECC_DOUBLE_BIT_VOLATILE not in rig.one().values


@pytest.mark.parametrize("code", [Code.GpuIsLost, Code.GpuNotFound, Code.Uninitialized])
def test_a_card_or_library_that_is_cut_off_ends_the_pass_over_the_card(code: Code) -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.backend.faults[Call.TEMPERATURE, "GPU-1"] = code

    with pytest.raises(NvmlError) as caught:
        rig.one()

    assert caught.value.code is code


def test_a_card_of_which_nothing_can_be_read_says_why() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    calls = (*Call, *ProcessList, "samples", "process_rates")
    rig.backend.faults = {(call, "GPU-1"): Code.OperatingSystem for call in calls}

    with pytest.raises(NvmlError) as caught:
        rig.one()

    assert caught.value.code is Code.OperatingSystem


def test_an_error_that_asks_for_a_reset_is_a_sign_of_ill_health_until_it_is_gone() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.backend.faults[Call.POWER, "GPU-1"] = Code.ResetRequired
    assert rig.one().values[Signal.RECOVERY_ACTION] == 1.0

    rig.backend.faults.clear()

    assert rig.one().values[Signal.RECOVERY_ACTION] == 0.0


def test_a_damaged_inforom_is_a_sign_of_ill_health() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.backend.faults[Call.REMAPPED_ROWS, "GPU-1"] = Code.CorruptedInforom

    assert rig.one().values[Signal.INFOROM_CORRUPTED] == 1.0


def test_links_that_were_up_and_are_not_have_gone_down() -> None:
    card = ScriptedCard("GPU-1")
    rig = Rig(card)
    assert rig.one().values[Signal.NVLINKS_DOWN] == 0.0

    card.values[Call.NVLINKS] = {"nvlinks_up": 16.0}
    assert rig.one().values[Signal.NVLINKS_DOWN] == 2.0

    card.values[Call.NVLINKS] = {"nvlinks_up": 18.0}
    assert rig.one().values[Signal.NVLINKS_DOWN] == 0.0


def test_errors_on_links_are_told_by_how_fast_they_come() -> None:
    card = ScriptedCard("GPU-1")
    rig = Rig(card)
    fields = card.values[Call.FIELDS]
    card.values[Call.FIELDS] = {**fields, "nvlink_recoveries_total": 7.0}
    assert Signal.NVLINK_RECOVERY_RATE not in rig.one().values

    rig.now += 119.0  # and one for the read
    card.values[Call.FIELDS] = {**fields, "nvlink_recoveries_total": 19.0}

    assert rig.one().values[Signal.NVLINK_RECOVERY_RATE] == pytest.approx(0.1)
    assert rig.one().values[Signal.PCIE_REPLAY_RATE] == 0.0


def test_rows_that_are_remapped_are_told_besides_their_number() -> None:
    card = ScriptedCard("GPU-1")
    card.set(Call.REMAPPED_ROWS, UNCORRECTABLE_REMAPPED_ROWS=40.0)
    rig = Rig(card)
    assert Signal.ROWS_REMAPPED_LATELY not in rig.one().values

    card.set(Call.REMAPPED_ROWS, UNCORRECTABLE_REMAPPED_ROWS=42.0)
    values = rig.one().values

    assert values[Signal.ROWS_REMAPPED_LATELY] == 2.0
    assert values[Signal.UNCORRECTABLE_REMAPPED_ROWS] == 42.0


def mig_card() -> ScriptedCard:
    return ScriptedCard("GPU-1", instances=migs((1, "3g.40gb"), (5, "1g.10gb")))


def test_each_instance_is_a_device_with_its_own_memory_activity_and_processes() -> None:
    rig = Rig(mig_card())
    rig.scripted.processes[ProcessList.COMPUTE] = (
        ProcessUse(pid=7, memory_bytes=GIB, gpu_instance_id=5),
    )

    first, second = rig.read()

    assert [one.gpu_instance_id for one in (first, second)] == ["1", "5"]
    assert (second.mig_profile, second.mig_uuids) == ("1g.10gb", ("MIG-5",))
    assert second.source == "gpm"
    assert second.values[Signal.TEMPERATURE] == 40.0, "what is the card's is repeated"
    assert Signal.GPU_UTILIZATION not in second.values
    assert [len(one.processes or ()) for one in (first, second)] == [0, 1]


def test_compute_instances_on_one_gpu_instance_are_one_device() -> None:
    rig = Rig(ScriptedCard("GPU-1", instances=migs((2, "2g.20gb"), (2, "2g.20gb"))))

    (device,) = rig.read()

    assert device.gpu_instance_id == "2"
    assert len(device.mig_uuids) == 2


def test_a_card_with_mig_and_no_instances_has_no_device() -> None:
    assert Rig(ScriptedCard("GPU-1", instances=())).read() == ()


def test_handles_that_no_longer_work_say_that_the_layout_has_changed() -> None:
    rig = Rig(mig_card())
    rig.read()
    assert not rig.reader.is_outdated

    rig.scripted.instances = migs((3, "7g.80gb"))
    rig.read()

    assert rig.reader.is_outdated
