"""The agent on the recorded answers of a real H100 and a real H200 under known loads."""

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from agent.gpu.nvml import Nvml
from agent.gpu.session import Cadence
from agent.options import Options
from agent.report.contract import Report, Verdict
from agent.report.verdict import VerdictPolicy
from agent.sampler import Sampler
from extender.core.decision.signals import _IDLE_POWER_SHARE
from extender.core.devices.readings import Signal
from testkit.agent.replay import LOADS, RECORDED, Replay

OPTIONS = Options(node="here", cadence=Cadence(slow_seconds=2))  # short, so that slow reads occur
POINTS = 0.05
BUSY_LOADS = [(card, load) for card, load in LOADS if load not in {"idle", "after"}]


@dataclass(frozen=True, kw_only=True)
class Second:
    """The agent's result for one second, with the true activity."""

    report: Report
    graphics: float
    sm: float

    @property
    def values(self) -> dict[str, float]:
        return self.report.signals_of(0)

    @property
    def verdict(self) -> Verdict:
        verdict = self.report.devices[0].verdict
        assert verdict is not None
        return verdict


def truth(card: str, load: str, metric: str, since: float, until: float) -> float:
    """Return the recorded GPM activity of a period."""
    series = RECORDED[card]["series"][load]
    values = [
        value
        for t, value in zip(series["t"], series["gpm"][metric], strict=True)
        if since < series["start"] + t <= until and value is not None
    ]
    return float(sum(values) / len(values) / 100)


@contextlib.asynccontextmanager
async def sampled(card: str, load: str, *, has_gpm: bool = True) -> AsyncIterator[list[Second]]:
    """Sample once a second over the whole recording."""
    replay = Replay(load, card, has_gpm=has_gpm)

    def clock() -> float:
        return float(replay.now)

    sampler = Sampler(Nvml(replay), OPTIONS, clock=clock, monotonic=clock)
    seconds = []
    try:
        await sampler.sample()
        while replay.now + 1 <= replay.end:
            since, replay.now = replay.now, replay.now + 1
            report = await sampler.sample()
            counted = [
                truth(card, load, metric, since, clock()) for metric in ("graphics_util", "sm_util")
            ]
            seconds.append(Second(report=report, graphics=counted[0], sm=counted[1]))
        yield seconds
    finally:
        sampler.close()


@pytest.mark.parametrize(("card", "load"), LOADS)
async def test_with_gpm_activity_is_gpms(card: str, load: str) -> None:
    async with sampled(card, load) as seconds:
        assert len(seconds) >= 3
        for second in seconds:
            assert second.report.devices[0].activity_source == "gpm"
            said = second.values[Signal.GRAPHICS_ACTIVE]
            assert said == pytest.approx(second.graphics, abs=POINTS)
            assert second.values[Signal.SM_ACTIVE] == pytest.approx(second.sm, abs=POINTS)
            assert Signal.GPU_UTILIZATION not in second.values


@pytest.mark.parametrize(("card", "load"), LOADS)
async def test_with_gpm_a_device_is_idle_iff_all_signals_are_below_the_threshold(
    card: str, load: str
) -> None:
    async with sampled(card, load) as seconds:
        for second in seconds:
            busiest = max(second.graphics, by_power(second))
            filled = second.values[Signal.MEMORY_USED] / second.values[Signal.MEMORY_TOTAL]
            limits = VerdictPolicy().thresholds
            is_idle = busiest < limits.utilization and filled < limits.memory
            assert second.verdict.is_idle is is_idle


def by_power(second: Second) -> float:
    rest = second.values[Signal.POWER_LIMIT] * _IDLE_POWER_SHARE
    return (second.values[Signal.POWER] - rest) / (second.values[Signal.POWER_LIMIT] - rest)


def by_processes(second: Second) -> float:
    return sum(one.utilization_ratio or 0.0 for one in second.report.devices[0].used_by or ())


@pytest.mark.parametrize(("card", "load"), BUSY_LOADS)
async def test_without_gpm_power_or_processes_keep_a_loaded_device_from_being_idle(
    card: str, load: str, capsys: pytest.CaptureFixture[str]
) -> None:
    threshold = VerdictPolicy().thresholds.utilization
    async with sampled(card, load, has_gpm=False) as seconds:
        for second in seconds:
            assert second.report.devices[0].activity_source == "samples"
            if max(by_power(second), by_processes(second)) >= threshold:
                assert second.verdict.is_idle is False
            assert second.values[Signal.GPU_UTILIZATION] >= by_processes(second) - 1e-3
    with capsys.disabled():
        sys.stdout.write(f"\n{describe_error(f'{card}, {load}', seconds)}\n")


def describe_error(load: str, seconds: Sequence[Second]) -> str:
    errors = [second.values[Signal.GPU_UTILIZATION] - second.graphics for second in seconds]
    worst = max(errors, key=abs)
    return f"without GPM, {load}: error {worst * 100:+.0f} points at worst"


async def test_without_gpm_process_utilization_reveals_a_load() -> None:
    """At a true load of 30 %, the driver's utilization was 1 % for several seconds."""
    card, load = "h200", "duty_30pct"
    async with sampled(card, load, has_gpm=False) as seconds:
        last = seconds[-1]

    assert RECORDED[card]["series"][load]["gpu"][-1] <= 1, "that is what one reading says"
    assert last.values[Signal.GPU_UTILIZATION] == pytest.approx(last.graphics, abs=POINTS)


async def test_a_loaded_model_without_activity_is_idle_and_its_process_listed() -> None:
    card, load = "h200", "loaded_but_idle_60GiB"
    async with sampled(card, load) as seconds:
        last = seconds[-1]

    (process,) = last.report.devices[0].used_by or ()
    assert (process.pid, process.memory_bytes) == (403, 64967671808)
    assert last.values[Signal.MEMORY_USED] == pytest.approx(60.5 * (1 << 30), rel=0.01)
    assert last.verdict.is_idle is True
