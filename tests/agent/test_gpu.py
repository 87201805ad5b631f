"""The agent on a real NVIDIA GPU under loads that are known: `make test-gpu`."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from statistics import fmean

import pytest

from agent.backend import NvmlError
from agent.nvml import Nvml
from agent.options import Options
from agent.report import Report
from agent.sampler import Sampler
from extender.core.readings import Signal

GIB = 1 << 30
POINTS = 0.05
SECONDS = 8
HELD_GIB = 2.0


def why_no_gpu() -> str:
    """Say why there is no GPU to test on, "" where there is one."""
    nvml = Nvml()
    try:
        nvml.start()
        count = nvml.count()
        nvml.stop()
    except NvmlError as error:
        return f"no NVIDIA GPU: {error}"
    return "" if count else "no NVIDIA GPU: the driver lists none"


WHY_NOT = why_no_gpu()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.timeout(180),
]


@contextlib.contextmanager
def load(duty: float, gib: float = 0.0) -> Iterator[int]:
    """Keep the first GPU busy for a share of time; yield the pid of who does it."""
    command = [sys.executable, "-m", "tests.agent.gpu_load", "--duty", str(duty), "--gib", str(gib)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"running\n", "the load did not start"
            yield process.pid
        finally:
            process.terminate()


@contextlib.asynccontextmanager
async def sampler() -> AsyncIterator[Sampler]:
    one = Sampler(Nvml(), Options(node="here"))
    try:
        yield one
    finally:
        one.close()


async def watch(one: Sampler, seconds: int = SECONDS) -> list[Report]:
    """Return the reports of so many seconds; what was before the first is left out."""
    await one.sample()
    reports = []
    for _ in range(seconds):
        await asyncio.sleep(1)
        reports.append(await one.sample())
    return reports


def first(reports: list[Report], signal: Signal) -> list[float]:
    """Return what was measured of the first device."""
    return [values[signal] for one in reports if signal in (values := one.signals_of(0))]


def say(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")


@pytest.mark.parametrize("duty", [0.0, 0.1, 0.3, 0.6, 1.0])
async def test_activity_is_the_loads(duty: float) -> None:
    async with sampler() as one:
        with load(duty):
            reports = await watch(one)

    source = reports[-1].devices[0].activity_source
    signal = Signal.GRAPHICS_ACTIVE if source == "gpm" else Signal.GPU_UTILIZATION
    found = first(reports, signal)
    verdict = reports[-1].devices[0].verdict
    say(
        f"duty {duty:.0%}: {fmean(found):.1%} by {source}, {min(found):.1%} to {max(found):.1%}, "
        f"{fmean(first(reports, Signal.POWER)):.0f} W, {verdict.reason if verdict else ''}"
    )
    if source == "gpm":
        assert fmean(found) == pytest.approx(duty, abs=POINTS)
    assert verdict is not None
    if duty >= 0.6:
        assert verdict.is_idle is False


async def test_memory_and_its_process_are_seen_and_gone_with_it() -> None:
    async with sampler() as one:
        before = first(await watch(one, 1), Signal.MEMORY_USED)[0]
        with load(0.0, HELD_GIB):
            (during,) = await watch(one, 1)
        after = before + 2 * GIB
        deadline = time.monotonic() + 30
        while after > before + GIB and time.monotonic() < deadline:
            after = first(await watch(one, 1), Signal.MEMORY_USED)[0]

    grown = during.signals_of(0)[Signal.MEMORY_USED] - before
    processes = during.devices[0].used_by or ()
    say(f"memory grew by {grown / GIB:.2f} GiB for {HELD_GIB:g}, seen processes: {processes}")
    assert grown == pytest.approx(HELD_GIB * GIB, abs=GIB)
    assert any((process.memory_bytes or 0) >= HELD_GIB * GIB for process in processes)
    assert after <= before + GIB


async def test_a_load_that_begins_is_seen_within_three_seconds() -> None:
    async with sampler() as one:
        await watch(one, 2)
        with load(1.0):
            started = time.monotonic()
            verdict = None
            while verdict is not False and time.monotonic() - started < 10:
                report = await one.sample()
                device = report.devices[0]
                verdict = None if device.verdict is None else device.verdict.is_idle
                await asyncio.sleep(0.25)
            took = time.monotonic() - started

    say(f"a load was seen after {took:.1f} s")
    assert took < 3


async def test_a_pass_is_cheap() -> None:
    async with sampler() as one:
        await watch(one, 3)
        library, cpu, passes = one.library_seconds, time.process_time(), one.passes
        for _ in range(20):
            await one.sample()
        count = one.passes - passes
        in_library = (one.library_seconds - library) / count * 1000
        taken = (time.process_time() - cpu) / count * 1000
        devices = len(one.latest.found.devices)

    say(f"a pass over {devices} devices: {in_library:.2f} ms in NVML, {taken:.2f} ms of CPU in all")
    assert taken - in_library < 5


async def test_what_this_gpu_answers_is_plausible() -> None:
    async with sampler() as one:
        report = (await watch(one, 2))[-1]

    assert report.problem is None
    assert report.driver_version
    for row, device in enumerate(report.devices):
        values = report.signals_of(row)
        say(f"{device.model}: {values}")
        say(f"not answered: {dict(one.session.failures)}")
        assert device.uuid.startswith("GPU-")
        assert 0 < values[Signal.MEMORY_TOTAL] < 1 << 42
        if not device.gpu_instance_id:
            assert 5 < values[Signal.POWER] < 2000
            assert 10 < values[Signal.TEMPERATURE] < 110
