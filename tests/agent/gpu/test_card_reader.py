"""Reads of a card and its instances, sources of utilization, and failed calls."""

import math
from collections import Counter

import pytest

from agent.gpu.backend import (
    INSTANCE_SIGNALS,
    Call,
    Code,
    DeviceReading,
    Extra,
    NvmlError,
    ProcessList,
    ProcessRate,
    ProcessUse,
    Sample,
)
from agent.gpu.card_reader import CardReader
from agent.gpu.worker import CallTracker
from extender.core.devices.readings import Signal
from testkit.agent.scripted import GIB, IDLE_GPM, ScriptedBackend, ScriptedCard, migs

MICROSECONDS = 1_000_000
NOW = 1_800_000_000.0


class Rig:
    """A reader of one scripted card, and its clock."""

    def __init__(self, card: ScriptedCard) -> None:
        self.scripted = card
        self.backend = ScriptedBackend(card)
        self.backend.start()
        self.failures: Counter[tuple[str, str]] = Counter()
        self.now = NOW
        self.tracker = CallTracker(10.0)
        described = self.backend.card(0)
        self.reader = CardReader(
            self.backend,
            described,
            self.backend.topology(described, [described]),
            self.backend.instances(described),
            self.failures,
        )

    def read(self, *, is_slow: bool = True, with_rates: bool = True) -> tuple[DeviceReading, ...]:
        self.now += 1
        return self.reader.read(self.tracker, self.now, is_slow=is_slow, with_rates=with_rates)

    def one(self, **due: bool) -> DeviceReading:
        (reading,) = self.read(**due)
        return reading


def test_a_process_in_several_lists_appears_once() -> None:
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


def test_the_graphics_process_list_is_read_less_often_and_cached() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.scripted.processes[ProcessList.GRAPHICS] = (ProcessUse(pid=9, memory_bytes=GIB),)
    rig.one()

    found = rig.one(is_slow=False).processes or ()

    assert [one.pid for one in found] == [9]
    assert rig.backend.calls[ProcessList.GRAPHICS, "GPU-1"] == 1


def test_without_a_process_list_the_processes_are_unknown() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.backend.faults[ProcessList.COMPUTE, "GPU-1"] = Code.NoPermission

    assert rig.one().processes is None


SLOW = (Call.FIELDS, Call.REMAPPED_ROWS, Call.FABRIC, Call.ENERGY, Call.CODECS, Call.POWER_LIMIT)


def test_slow_changing_values_are_read_less_often_and_cached() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.one()
    readings = [rig.one(is_slow=False) for _ in range(3)]

    assert all(rig.backend.calls[call, "GPU-1"] == 1 for call in SLOW)
    assert rig.backend.calls[Call.POWER, "GPU-1"] == 4
    assert readings[-1].values[Signal.POWER_LIMIT] == 700.0
    assert readings[-1].values[Signal.MEMORY_TEMPERATURE] == 45.0


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
def test_an_unsupported_call_is_made_once(call: Call, code: Code) -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.backend.faults[call, "GPU-1"] = code
    readings = [rig.one() for _ in range(3)]

    assert rig.backend.calls[call, "GPU-1"] == 1
    assert rig.failures[call, code.name] == 1
    assert Signal.TEMPERATURE in readings[-1].values


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
def test_any_other_error_loses_one_value_once_and_is_counted(code: Code) -> None:
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


def test_a_slow_changing_value_is_dropped_when_its_call_fails() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.one()
    rig.backend.faults[Call.FIELDS, "GPU-1"] = Code.Unknown

    assert Signal.ECC_DOUBLE_BIT_VOLATILE not in rig.one().values


@pytest.mark.parametrize("code", [Code.GpuIsLost, Code.GpuNotFound, Code.Uninitialized])
def test_a_lost_card_or_session_ends_the_pass_over_the_card(code: Code) -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.backend.faults[Call.TEMPERATURE, "GPU-1"] = code

    with pytest.raises(NvmlError) as caught:
        rig.one()

    assert caught.value.code is code


def test_a_card_without_any_readable_value_raises_the_last_error() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    calls = (*Call, *ProcessList, "samples", "process_rates")
    rig.backend.faults = {(call, "GPU-1"): Code.OperatingSystem for call in calls}

    with pytest.raises(NvmlError) as caught:
        rig.one()

    assert caught.value.code is Code.OperatingSystem


def test_an_error_that_demands_a_reset_sets_the_recovery_action_until_it_ends() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.backend.faults[Call.POWER, "GPU-1"] = Code.ResetRequired
    assert rig.one().values[Signal.RECOVERY_ACTION] == 1.0

    rig.backend.faults.clear()

    assert rig.one().values[Signal.RECOVERY_ACTION] == 0.0


def test_a_damaged_inforom_sets_its_health_signal() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.backend.faults[Call.REMAPPED_ROWS, "GPU-1"] = Code.CorruptedInforom

    assert rig.one().values[Signal.INFOROM_CORRUPTED] == 1.0


def test_links_that_were_up_and_are_not_count_as_down() -> None:
    card = ScriptedCard("GPU-1")
    rig = Rig(card)
    assert rig.one().values[Signal.NVLINKS_DOWN] == 0.0

    card.values[Call.NVLINKS] = {"nvlinks_up": 16.0}
    assert rig.one().values[Signal.NVLINKS_DOWN] == 2.0

    card.values[Call.NVLINKS] = {"nvlinks_up": 18.0}
    assert rig.one().values[Signal.NVLINKS_DOWN] == 0.0


def test_link_errors_are_reported_as_a_rate() -> None:
    card = ScriptedCard("GPU-1")
    rig = Rig(card)
    fields = card.values[Call.FIELDS]
    card.values[Call.FIELDS] = {**fields, "nvlink_recoveries_total": 7.0}
    assert Signal.NVLINK_RECOVERY_RATE not in rig.one().values

    rig.now += 119.0  # and one for the read
    card.values[Call.FIELDS] = {**fields, "nvlink_recoveries_total": 19.0}

    assert rig.one().values[Signal.NVLINK_RECOVERY_RATE] == pytest.approx(0.1)
    assert rig.one().values[Signal.PCIE_REPLAY_RATE] == 0.0


def test_recently_remapped_rows_are_reported_besides_the_total() -> None:
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


def test_a_card_with_mig_and_no_instances_is_a_device_without_instance() -> None:
    reading = Rig(ScriptedCard("GPU-1", instances=())).one()

    assert (reading.gpu_instance_id, reading.mig_profile) == ("", "none")
    assert reading.values[Signal.TEMPERATURE] == 40.0
    assert reading.values[Signal.ROW_REMAP_FAILURE] == 0.0
    assert not reading.values.keys() & INSTANCE_SIGNALS, (
        "its memory and activity are its instances'"
    )
    assert reading.processes is None


def test_failing_instance_handles_indicate_a_layout_change() -> None:
    rig = Rig(mig_card())
    rig.read()
    assert not rig.reader.has_stale_handles

    rig.scripted.instances = migs((3, "7g.80gb"))
    rig.read()

    assert rig.reader.has_stale_handles


def old_card() -> ScriptedCard:
    """Return a card before Hopper, which has no GPM."""
    return ScriptedCard("GPU-1", gpm=None)


def test_with_gpm_only_gpm_counts() -> None:
    card = ScriptedCard("GPU-1", gpm={**IDLE_GPM, Signal.GRAPHICS_ACTIVE: 0.3})
    card.set(Call.RATES, GPU_UTILIZATION=0.01)

    reading = Rig(card).one()

    assert reading.source == "gpm"
    assert reading.values[Signal.GRAPHICS_ACTIVE] == 0.3
    assert Signal.GPU_UTILIZATION not in reading.values, "one reading is an alias of the load"


def test_while_another_program_uses_gpm_samples_count() -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.scripted.samples = [Sample(at_microseconds=int((NOW + 0.9) * MICROSECONDS), ratio=0.4)]
    rig.backend.faults[Call.GPM, "GPU-1"] = Code.InUse

    reading = rig.one()

    assert (reading.source, reading.values[Signal.GPU_UTILIZATION]) == ("samples", 0.4)


def test_without_gpm_the_mean_of_all_samples_since_the_last_read_counts() -> None:
    rig = Rig(old_card())
    rig.one()
    times = [int((NOW + 1 + step / 5) * MICROSECONDS) for step in range(1, 6)]
    ratios = [0.0, 1.0, 0.0, 0.5, 0.0]
    rig.scripted.samples = [
        Sample(at_microseconds=at, ratio=ratio) for at, ratio in zip(times, ratios, strict=True)
    ]
    rig.scripted.set(Call.RATES, GPU_UTILIZATION=0.99)

    assert rig.one().values[Signal.GPU_UTILIZATION] == pytest.approx(0.3)
    rig.scripted.samples.append(Sample(at_microseconds=times[-1] + 100_000, ratio=0.8))
    assert rig.one().values[Signal.GPU_UTILIZATION] == pytest.approx(0.8), "only what is new"


def test_after_a_pause_every_sample_of_the_pause_counts_once() -> None:
    rig = Rig(old_card())
    rig.scripted.samples = [Sample(at_microseconds=int((NOW + 1) * MICROSECONDS), ratio=0.0)]
    rig.one()
    rig.scripted.samples += [
        Sample(at_microseconds=int((NOW + 1 + step) * MICROSECONDS), ratio=ratio)
        for step, ratio in ((1, 0.9), (2, 0.3), (3, 0.6))
    ]
    rig.now += 3

    assert rig.one().values[Signal.GPU_UTILIZATION] == pytest.approx(0.6)


def test_samples_from_the_future_do_not_hide_later_ones() -> None:
    rig = Rig(old_card())
    rig.scripted.samples = [Sample(at_microseconds=int((NOW + 600) * MICROSECONDS), ratio=0.9)]
    rig.one()
    rig.scripted.samples = [Sample(at_microseconds=int((NOW + 1.5) * MICROSECONDS), ratio=0.4)]

    reading = rig.one()

    assert (reading.source, reading.values[Signal.GPU_UTILIZATION]) == ("samples", 0.4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_finite_number_is_missing(value: float) -> None:
    rig = Rig(ScriptedCard("GPU-1"))
    rig.scripted.set(Call.CLOCK_EVENTS, CLOCK_EVENT_REASONS=value)
    rig.scripted.values[Call.NVLINKS] = {Extra.NVLINKS_UP: value}
    rig.scripted.gpm = {**IDLE_GPM, Signal.SM_ACTIVE: value}
    rig.one()
    rig.scripted.values[Call.NVLINKS] = {Extra.NVLINKS_UP: 4.0}

    missing = rig.one()
    rig.now += 10

    assert {Signal.CLOCK_EVENT_REASONS, Signal.SM_ACTIVE}.isdisjoint(missing.values)
    assert Signal.GRAPHICS_ACTIVE in missing.values
    assert rig.one().values.get(Signal.NVLINKS_DOWN, 0.0) == 0.0, "nor is it remembered"


def test_samples_out_of_range_do_not_count() -> None:
    rig = Rig(old_card())
    at = int((NOW + 1) * MICROSECONDS)
    rig.scripted.samples = [
        Sample(at_microseconds=at, ratio=42_949_672.96),
        Sample(at_microseconds=at + 1, ratio=0.2),
    ]

    assert rig.one().values[Signal.GPU_UTILIZATION] == pytest.approx(0.2)


def test_without_samples_the_mean_of_recent_readings_counts() -> None:
    rig = Rig(old_card())
    rig.backend.faults["samples", "GPU-1"] = Code.NotSupported
    rig.scripted.set(Call.RATES, GPU_UTILIZATION=0.0)
    rig.one()
    rig.scripted.set(Call.RATES, GPU_UTILIZATION=1.0)
    reading = rig.one()

    assert (reading.source, reading.values[Signal.GPU_UTILIZATION]) == ("rates", 0.5)
    assert rig.backend.calls["samples", "GPU-1"] == 1, "an unsupported call is not repeated"
    rig.now += 3600
    assert rig.one().values[Signal.GPU_UTILIZATION] == 1.0, "those of long ago do not count"


def test_process_utilization_above_the_samples_counts() -> None:
    rig = Rig(old_card())
    rig.scripted.processes[ProcessList.COMPUTE] = tuple(
        ProcessUse(pid=pid, memory_bytes=GIB) for pid in (7, 8)
    )
    rig.scripted.samples = [Sample(at_microseconds=int((NOW + 1) * MICROSECONDS), ratio=0.01)]
    rig.scripted.rates = tuple(
        ProcessRate(pid=pid, at_microseconds=int(NOW * MICROSECONDS) + 1, utilization_ratio=ratio)
        for pid, ratio in ((7, 0.2), (8, 0.08), (4_000_000_000, 0.9))
    )

    reading = rig.one()

    assert reading.values[Signal.GPU_UTILIZATION] == pytest.approx(0.28)
    assert reading.processes is not None
    assert [one.utilization_ratio for one in reading.processes] == [0.2, 0.08]


def test_without_other_sources_process_utilization_counts() -> None:
    rig = Rig(old_card())
    for call in (Call.RATES, "samples"):
        rig.backend.faults[call, "GPU-1"] = Code.NotSupported
    rig.scripted.processes[ProcessList.COMPUTE] = (ProcessUse(pid=7, memory_bytes=GIB),)

    reading = rig.one()
    assert (reading.source, Signal.GPU_UTILIZATION in reading.values) == ("", False)

    rig.scripted.rates = (
        ProcessRate(pid=7, at_microseconds=int(rig.now * MICROSECONDS) + 1, utilization_ratio=0.7),
    )
    reading = rig.one()
    assert (reading.source, reading.values[Signal.GPU_UTILIZATION]) == ("processes", 0.7)


def test_the_utilization_of_an_ended_process_does_not_count() -> None:
    rig = Rig(old_card())
    rig.scripted.processes[ProcessList.COMPUTE] = (ProcessUse(pid=7, memory_bytes=GIB),)
    rig.scripted.rates = (
        ProcessRate(pid=7, at_microseconds=int(NOW * MICROSECONDS) + 1, utilization_ratio=1.0),
    )
    assert rig.one().values[Signal.GPU_UTILIZATION] == 1.0

    rig.scripted.processes.clear()

    assert rig.one(with_rates=False).values[Signal.GPU_UTILIZATION] == 0.0


def test_a_process_rate_above_one_is_clamped() -> None:
    rig = Rig(old_card())
    rig.scripted.processes[ProcessList.COMPUTE] = (ProcessUse(pid=7, memory_bytes=GIB),)
    rig.scripted.rates = (
        ProcessRate(pid=7, at_microseconds=int(NOW * MICROSECONDS) + 1, utilization_ratio=2.55),
    )

    (process,) = rig.one().processes or ()

    assert process.utilization_ratio == 1.0
