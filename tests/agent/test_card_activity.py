"""How busy a card is, by what of it tells that."""

import pytest

from agent.backend import Call, Code, ProcessList, ProcessRate, ProcessUse, Sample
from extender.core.readings import Signal
from tests.agent.card_rig import NOW, Rig
from tests.agent.scripted import GIB, IDLE_GPM, ScriptedCard

MICROSECONDS = 1_000_000


def old_card() -> ScriptedCard:
    """A card before Hopper: it does not count its own activity."""
    return ScriptedCard("GPU-1", gpm=None)


def test_a_card_that_counts_its_activity_is_told_by_that_alone() -> None:
    card = ScriptedCard("GPU-1", gpm={**IDLE_GPM, Signal.GRAPHICS_ACTIVE: 0.3})
    card.set(Call.RATES, GPU_UTILIZATION=0.01)

    reading = Rig(card).one()

    assert reading.source == "gpm"
    assert reading.values[Signal.GRAPHICS_ACTIVE] == 0.3
    assert Signal.GPU_UTILIZATION not in reading.values, "one reading is an alias of the load"


def test_while_gpm_is_in_use_by_another_program_samples_tell() -> None:
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


def test_after_a_pause_the_samples_of_the_whole_pause_count_each_once() -> None:
    rig = Rig(old_card())
    rig.scripted.samples = [Sample(at_microseconds=int((NOW + 1) * MICROSECONDS), ratio=0.0)]
    rig.one()
    rig.scripted.samples += [
        Sample(at_microseconds=int((NOW + 1 + step) * MICROSECONDS), ratio=ratio)
        for step, ratio in ((1, 0.9), (2, 0.3), (3, 0.6))
    ]
    rig.now += 3

    assert rig.one().values[Signal.GPU_UTILIZATION] == pytest.approx(0.6)


def test_samples_beyond_all_sense_do_not_count() -> None:
    rig = Rig(old_card())
    at = int((NOW + 1) * MICROSECONDS)
    rig.scripted.samples = [
        Sample(at_microseconds=at, ratio=42_949_672.96),
        Sample(at_microseconds=at + 1, ratio=0.2),
    ]

    assert rig.one().values[Signal.GPU_UTILIZATION] == pytest.approx(0.2)


def test_where_the_driver_keeps_no_samples_the_mean_of_own_readings_counts() -> None:
    rig = Rig(old_card())
    rig.backend.faults["samples", "GPU-1"] = Code.NotSupported
    for ratio in (0.0, 1.0):
        rig.scripted.set(Call.RATES, GPU_UTILIZATION=ratio)
        reading = rig.one()

    assert (reading.source, reading.values[Signal.GPU_UTILIZATION]) == ("rates", 0.5)
    assert rig.backend.calls["samples", "GPU-1"] == 1, "what is not supported is not asked again"
    rig.now += 3600
    assert rig.one().values[Signal.GPU_UTILIZATION] == 1.0, "those of long ago do not count"


def test_processes_that_were_busier_than_the_samples_say_are_right() -> None:
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


def test_where_nothing_else_tells_the_activity_busy_processes_do() -> None:
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


def test_a_process_that_ended_was_busy_no_more() -> None:
    rig = Rig(old_card())
    rig.scripted.processes[ProcessList.COMPUTE] = (ProcessUse(pid=7, memory_bytes=GIB),)
    rig.scripted.rates = (
        ProcessRate(pid=7, at_microseconds=int(NOW * MICROSECONDS) + 1, utilization_ratio=1.0),
    )
    assert rig.one().values[Signal.GPU_UTILIZATION] == 1.0

    rig.scripted.processes.clear()

    assert rig.one(with_rates=False).values[Signal.GPU_UTILIZATION] == 0.0


def test_a_process_rate_beyond_one_is_one() -> None:
    rig = Rig(old_card())
    rig.scripted.processes[ProcessList.COMPUTE] = (ProcessUse(pid=7, memory_bytes=GIB),)
    rig.scripted.rates = (
        ProcessRate(pid=7, at_microseconds=int(NOW * MICROSECONDS) + 1, utilization_ratio=2.55),
    )

    (process,) = rig.one().processes or ()

    assert process.utilization_ratio == 1.0
