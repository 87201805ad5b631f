"""The agent on a real NVIDIA GPU under known loads: `make test-gpu`."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean

import pytest

from agent.app import make_tenants
from agent.gpu.nvml import Nvml
from agent.options import Options
from agent.report.contract import Place, Report
from agent.sampler import Sampler
from extender.core.devices.readings import Signal
from testkit.agent.fake_kubelet import FakeKubelet, container, pod
from testkit.agent.loads import load, pod_cgroup, why_no_gpu

GIB = 1 << 30
POINTS = 0.05
SECONDS = 8
HELD_GIB = 2.0
BUGS = {13, 31}  # XID errors of a program that writes to an invalid address


WHY_NOT = why_no_gpu()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.timeout(180),
]


@contextlib.asynccontextmanager
async def sampler() -> AsyncIterator[Sampler]:
    one = Sampler(Nvml(), Options(node="here"))
    try:
        yield one
    finally:
        one.close()


async def watch(one: Sampler, seconds: int = SECONDS) -> list[Report]:
    """Sample once a second; return the reports, without the first one."""
    await one.sample()
    reports = []
    for _ in range(seconds):
        await asyncio.sleep(1)
        reports.append(await one.sample())
    return reports


def first(reports: list[Report], signal: Signal) -> list[float]:
    """Return a signal of the first device from each report."""
    return [values[signal] for one in reports if signal in (values := one.signals_of(0))]


async def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python code in another process, so that its GPU memory is freed at the end."""
    command = [sys.executable, *arguments]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)


def say(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")


@pytest.mark.parametrize("duty", [0.0, 0.1, 0.3, 0.6, 1.0])
async def test_activity_matches_the_load(duty: float) -> None:
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


async def test_memory_and_process_appear_and_disappear_with_the_load() -> None:
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


async def test_a_new_load_is_seen_within_three_seconds() -> None:
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


async def test_a_pass_takes_little_time() -> None:
    async with sampler() as one:
        await watch(one, 3)
        library, cpu, passes = one.library_seconds, time.process_time(), one.passes
        for _ in range(20):
            await one.sample()
        count = one.passes - passes
        in_library = (one.library_seconds - library) / count * 1000
        taken = (time.process_time() - cpu) / count * 1000
        devices = len(one.latest.node_reading.devices)

    say(f"a pass over {devices} devices: {in_library:.2f} ms in NVML, {taken:.2f} ms of CPU in all")
    assert taken - in_library < 5


async def test_values_of_this_gpu_are_plausible() -> None:
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


async def test_processes_of_pods_and_of_the_host_are_distinguished(tmp_path: Path) -> None:
    uid = "0f6b1c2d-0000-4000-8000-00000000000a"
    logs = tmp_path / "logs"
    (logs / f"ml_train-0_{uid}").mkdir(parents=True)
    with FakeKubelet(tmp_path / "kubelet.sock") as kubelet:
        options = Options(node="here", kubelet_socket=str(kubelet.socket), pod_logs=str(logs))
        with (
            contextlib.closing(make_tenants(options)) as tenants,
            contextlib.closing(Sampler(Nvml(), options, tenants)) as one,
        ):
            uuid = (await one.sample()).devices[0].uuid
            kubelet.pods = [pod("train-0", container("main", uuid), namespace="ml")]
            with (
                pod_cgroup(uid) as enter,
                load(0.3, HELD_GIB) as mine,
                load(0.0, 2 * HELD_GIB) as other,
            ):
                enter(mine)
                await tenants.refresh()
                device = (await watch(one, 6))[-1].devices[0]

    say(f"used by {device.used_by}, foreign: {device.foreign}")
    (tenant,) = device.allocated_to or ()
    assert (tenant.namespace, tenant.pod, tenant.container) == ("ml", "train-0", "main")
    places = {process.pid: process for process in device.used_by or ()}
    assert (places[mine].place, places[mine].pod) == (Place.POD, "train-0")
    assert places[other].place is Place.HOST
    assert device.foreign is not None
    assert device.foreign.pids == (other,)
    assert (device.foreign.memory_bytes or 0) >= 2 * HELD_GIB * GIB


async def test_an_xid_error_is_reported_immediately() -> None:
    async with sampler() as one:
        await watch(one, 1)
        started = time.monotonic()
        result = await run("-m", "testkit.agent.gpu_load", "--trespass")
        report = await one.sample()
        while Signal.XID not in report.signals_of(0) and time.monotonic() - started < 20:
            await asyncio.sleep(0.1)
            report = await one.sample()
        took = time.monotonic() - started

    assert "CUDA error" in result.stderr
    xid, verdict = report.signals_of(0)[Signal.XID], report.devices[0].verdict
    say(f"XID {xid:.0f} after {took:.1f} s, {report.devices[0].xid_age_seconds} s old: {verdict}")
    assert xid in BUGS
    assert verdict is not None
    assert verdict.is_idle is True, "a program's bug says nothing of its card"


async def test_the_assigned_device_is_cudas_device_of_that_index() -> None:
    result = await run("-m", "worker_device", "--worker-id", "0")
    meant = await run("-c", "from testkit.agent.gpu_load import Cuda; print(Cuda(0).uuid())")

    assert result.stdout == "cuda:0\n"
    assert meant.stdout.startswith("GPU-"), meant.stderr
    assert meant.stdout.strip() in result.stderr
