"""The source as the extender runs it, with a worker process and a fake Prometheus."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from extender.core.devices.readings import DeviceKey, History, Readings, Signal
from extender.settings.sources import Prometheus
from extender.sources.prometheus import process as process_module
from extender.sources.prometheus import source as prometheus
from extender.sources.prometheus.node_identity import NodeIdentity
from extender.sources.prometheus.process import WorkerError, WorkerProcess
from extender.sources.prometheus.source import PrometheusSource, PrometheusStatus, _log_changes
from extender.sources.prometheus.worker import _ITEMS_PER_FRAME
from testkit.prometheus.fake import FakePrometheus, series
from tests.extender.sources.delivered import DEADLINE_SECONDS, NODES, until
from tests.extender.sources.past import HALF_PRECISION


@dataclass(kw_only=True)
class Delivered:
    """Deliveries of the source."""

    source: PrometheusSource
    readings: list[Readings]
    history: list[History]

    async def more(self, count: int = 1) -> Readings:
        have = len(self.readings)
        await until(lambda: len(self.readings) >= have + count)
        return self.readings[-1]


@asynccontextmanager
async def running(
    url: str,
    *,
    identity: Callable[[], NodeIdentity] = lambda: NODES,
    deliver: Callable[[Readings], None] | None = None,
    window_seconds: float = 0,
    **values: object,
) -> AsyncIterator[Delivered]:
    base = {"url": url, "interval_seconds": 0.5, "timeout_seconds": 1}
    readings: list[Readings] = []
    history: list[History] = []

    async def take(answer: Readings) -> None:
        (deliver or readings.append)(answer)

    async def take_history(past: History) -> None:
        history.append(past)

    source = PrometheusSource(
        Prometheus.model_validate({**base, **values}),
        identity=identity,
        deliver=take,
        deliver_history=take_history,
        clock=time.time,
        window_seconds=window_seconds,
    )
    delivered = Delivered(source=source, readings=readings, history=history)
    task = asyncio.create_task(source.run())
    try:
        yield delivered
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def fake() -> AsyncIterator[FakePrometheus]:
    fake = FakePrometheus(
        series=[
            series("DCGM_FI_DEV_GPU_UTIL", 40, UUID="GPU-1", Hostname="gpu-1", gpu="0", pod="a"),
            series("DCGM_FI_DEV_XID_ERRORS", 31, UUID="GPU-1", Hostname="gpu-1"),
        ]
    )
    server = await fake.start()
    yield fake
    await server.close()


async def test_readings_are_delivered_periodically(fake: FakePrometheus) -> None:
    async with running(fake.url) as delivered:
        first = await delivered.more()
        second = await delivered.more()
        status = delivered.source.status()

    assert first.source == "prometheus"
    assert [device.node for device in first.devices] == ["gpu-1"]
    assert first.columns[Signal.GPU_UTILIZATION].tolist() == [0.4]
    assert first.measured_at[0] == pytest.approx(time.time() - 30, abs=DEADLINE_SECONDS)
    assert first.tenants == {DeviceKey(("GPU-1", "")): ("/a",)}
    assert second.devices is first.devices
    assert second.tenants is first.tenants
    assert status.consecutive_failures == 0
    assert status.last_success_at == second.at
    assert status.worker_starts == 1


async def test_columns_cannot_be_changed(fake: FakePrometheus) -> None:
    async with running(fake.url) as delivered:
        readings = await delivered.more()

    assert not readings.measured_at.flags.writeable
    assert not readings.columns[Signal.GPU_UTILIZATION].flags.writeable


async def test_changed_devices_and_tenants_are_delivered(fake: FakePrometheus) -> None:
    async with running(fake.url) as delivered:
        first = await delivered.more()
        fake.series = [
            series("DCGM_FI_DEV_GPU_UTIL", 60, UUID="GPU-2", Hostname="gpu-1"),
            series("DCGM_FI_DEV_GPU_UTIL", 10, UUID="GPU-1", Hostname="gpu-1", gpu="0"),
        ]
        await delivered.more(2)
        last = delivered.readings[-1]

    assert [device.uuid for device in first.devices] == ["GPU-1"]
    assert [device.uuid for device in last.devices] == ["GPU-1", "GPU-2"]
    assert last.columns[Signal.GPU_UTILIZATION].tolist() == pytest.approx([0.1, 0.6])
    assert last.tenants == {}
    assert first.tenants == {DeviceKey(("GPU-1", "")): ("/a",)}


async def test_empty_answer_is_delivered_as_no_devices(fake: FakePrometheus) -> None:
    async with running(fake.url) as delivered:
        await delivered.more()
        fake.series = []
        readings = await delivered.more(2)

    assert readings.devices == ()
    assert readings.columns == {}
    assert readings.measured_at.size == 0


async def test_failures_are_counted_and_the_source_recovers(fake: FakePrometheus) -> None:
    async with running(fake.url) as delivered:
        await delivered.more()
        fake.failing = {"timestamp"}
        await until(lambda: delivered.source.status().consecutive_failures >= 1)
        failed = delivered.source.status()
        fake.failing = set()
        await delivered.more()
        status = delivered.source.status()

    assert "HTTP 503" in failed.last_error
    assert status.last_error == ""
    assert status.consecutive_failures == 0
    assert status.failures >= 1


WELL = PrometheusStatus(last_success_at=1.0, devices=8)
FAILS = replace(WELL, failed_queries={"DCGM_FI_DEV_FB_USED": "HTTP 503"})
DOWN = replace(WELL, last_error="HTTP 503")
UNMATCHED = replace(WELL, unmatched_series=2, unmatched_example='Hostname="ghost"')


@pytest.mark.parametrize(
    ("before", "now", "logged"),
    [
        (PrometheusStatus(), WELL, "INFO readings from prometheus"),
        (WELL, DOWN, "WARNING no readings from prometheus"),
        (DOWN, DOWN, ""),
        (DOWN, replace(DOWN, last_error="too late"), "WARNING no readings from prometheus"),
        (DOWN, WELL, "INFO readings from prometheus"),
        (WELL, WELL, ""),
        (WELL, FAILS, "WARNING queries to prometheus failed"),
        (FAILS, replace(FAILS, failed_queries={"DCGM_FI_DEV_FB_USED": "too late"}), ""),
        (
            FAILS,
            replace(FAILS, failed_queries={"tenants": "HTTP 503"}),
            "WARNING queries to prometheus failed",
        ),
        (FAILS, WELL, "INFO all queries to prometheus answered"),
        (WELL, UNMATCHED, "WARNING series name no node of the cluster"),
        (UNMATCHED, replace(UNMATCHED, unmatched_series=1), ""),
        (UNMATCHED, WELL, "INFO all series name nodes of the cluster"),
        (WELL, replace(WELL, partial_answers=1), "WARNING prometheus answers are incomplete"),
        (replace(WELL, partial_answers=1), replace(WELL, partial_answers=2), ""),
    ],
)
def test_only_changes_of_the_status_are_logged(
    caplog: pytest.LogCaptureFixture, before: PrometheusStatus, now: PrometheusStatus, logged: str
) -> None:
    with caplog.at_level("INFO"):
        _log_changes(before, now)

    assert [f"{one.levelname} {one.message}" for one in caplog.records] == [logged] * bool(logged)


async def test_an_answer_that_needs_too_much_memory_fails_alone(fake: FakePrometheus) -> None:
    rows = b"{}," * (16 << 20) + b"{}"

    async def handler(request: web.Request) -> web.StreamResponse:
        if "modelName" not in request.query.get("query", ""):
            return await fake.answer(request)
        start = b'{"status":"success","data":{"resultType":"vector","result":['
        return web.Response(body=start + rows + b"]}}")

    fake.handler = handler
    async with running(fake.url, timeout_seconds=DEADLINE_SECONDS) as delivered:
        status = delivered.source.status
        await until(lambda: bool(status().last_error))
        assert "MemoryError" in status().last_error
        fake.handler = None
        await delivered.more()

        assert status().worker_starts == 1


async def test_a_round_in_which_every_metric_fails_is_a_failure(fake: FakePrometheus) -> None:
    fake.failing = {"max by (UUID, uuid, GPU_I_ID) ("}
    async with running(fake.url) as delivered:
        await until(lambda: delivered.source.status().consecutive_failures >= 1)
        fake.failing = set()
        readings = await delivered.more()

    assert len(delivered.readings[0].columns) == 2
    assert [device.uuid for device in readings.devices] == ["GPU-1"]


async def test_a_fault_of_the_receiver_does_not_end_the_source(fake: FakePrometheus) -> None:
    taken: list[Readings] = []

    def deliver(readings: Readings) -> None:
        taken.append(readings)
        if len(taken) == 1:
            raise ZeroDivisionError

    async with running(fake.url, deliver=deliver) as delivered:
        await until(lambda: len(taken) >= 2)
        await until(lambda: delivered.source.status().consecutive_failures == 0)

    assert delivered.source.status().failures == 1


async def test_past_readings_are_delivered_once(fake: FakePrometheus) -> None:
    async with running(fake.url, window_seconds=600) as delivered:
        await until(lambda: bool(delivered.history))
        await delivered.more(2)

    assert len(delivered.history) == 1
    history = delivered.history[0]
    assert history.times.shape == (11,)
    assert history.times[-1] == pytest.approx(time.time(), abs=DEADLINE_SECONDS)
    assert set(history.times[1:] - history.times[:-1]) == {60.0}
    assert history.devices == (DeviceKey(("GPU-1", "")),)
    assert history.utilization.shape == (11, 1)
    assert history.utilization[:, 0] == pytest.approx(np.full(11, 0.4), rel=HALF_PRECISION)
    assert history.xid is not None
    assert set(history.xid[:, 0]) == {31.0}


async def test_hours_before_the_last_have_fewer_readings(fake: FakePrometheus) -> None:
    async with running(fake.url, window_seconds=4 * 3600) as delivered:
        await until(lambda: bool(delivered.history))

    history = delivered.history[0]
    between = history.times[1:] - history.times[:-1]
    assert between.tolist() == [450.0] * 24 + [60.0] * 60
    assert history.utilization[:, 0] == pytest.approx(np.full(85, 0.4), rel=HALF_PRECISION)


async def test_graphics_activity_is_preferred_for_the_past(fake: FakePrometheus) -> None:
    fake.series += [
        series("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0.9, UUID="GPU-1", Hostname="gpu-1"),
        series("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0.2, UUID="GPU-1", GPU_I_ID="3", node="gpu-1"),
    ]
    async with running(fake.url, window_seconds=600) as delivered:
        await until(lambda: bool(delivered.history))

    history = delivered.history[0]
    last = dict(zip(history.devices, history.utilization[-1].tolist(), strict=True))
    expected = {DeviceKey(("GPU-1", "")): 0.9, DeviceKey(("GPU-1", "3")): 0.2}
    assert last == pytest.approx(expected, rel=HALF_PRECISION)


async def test_rounds_are_spread_around_the_interval(fake: FakePrometheus) -> None:
    async with running(fake.url, interval_seconds=10) as delivered:
        pauses = [delivered.source._pause_seconds() for _ in range(200)]

    assert 9.0 <= min(pauses) < 9.5
    assert 10.5 < max(pauses) <= 11.0


async def test_past_readings_arrive_in_parts(fake: FakePrometheus) -> None:
    fake.series = [
        series("DCGM_FI_DEV_GPU_UTIL", number % 100, UUID=f"GPU-{number}", Hostname="gpu-1")
        for number in range(2 * _ITEMS_PER_FRAME + 1)
    ]
    async with running(fake.url, window_seconds=3600) as delivered:
        await until(lambda: len(delivered.history) == 3)

    assert [len(part.devices) for part in delivered.history] == [
        _ITEMS_PER_FRAME,
        _ITEMS_PER_FRAME,
        1,
    ]
    for part in delivered.history:
        assert part.utilization.shape == (61, len(part.devices))
        assert part.xid is None
        for at, (uuid, _) in enumerate(part.devices):
            load = int(uuid.removeprefix("GPU-")) % 100 / 100
            assert part.utilization[:, at] == pytest.approx(np.full(61, load), rel=HALF_PRECISION)


async def test_a_failed_query_of_the_past_does_not_delay_readings(fake: FakePrometheus) -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/query_range"):
            seen.append(request.path)
            await asyncio.sleep(30)
        return await fake.answer(request)

    fake.handler = handler
    async with running(fake.url, window_seconds=600) as delivered:
        await until(lambda: bool(seen))
        await delivered.more(2)

    assert not delivered.history


async def test_nothing_is_queried_before_there_are_nodes(
    fake: FakePrometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "_WAIT_FOR_NODES_SECONDS", 0.0)
    looks = 0

    def no_nodes() -> NodeIdentity:
        nonlocal looks
        looks += 1
        return NodeIdentity()

    async with running(fake.url, identity=no_nodes) as delivered:
        await until(lambda: looks >= 3)  # a round would have ended before the next look

    assert not delivered.readings
    assert not fake.queries


async def test_a_dead_worker_is_replaced_and_sends_everything_again(fake: FakePrometheus) -> None:
    async with running(fake.url) as delivered:
        first = await delivered.more()
        process = delivered.source._worker._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: delivered.source.status().worker_starts == 2)
        last = await delivered.more()

    assert last.devices == first.devices
    assert last.tenants == first.tenants


async def test_a_hanging_server_never_blocks_the_loop_and_times_out(fake: FakePrometheus) -> None:
    over = asyncio.Event()

    async def handler(_request: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    fake.handler = handler
    async with running(fake.url, timeout_seconds=0.3) as delivered:
        turns = 0
        while not delivered.source.status().failures:
            await asyncio.sleep(0)  # a blocked loop would have few turns until then
            turns += 1
        over.set()

    assert "no complete answer in time" in delivered.source.status().last_error
    assert turns > 50


async def test_a_late_worker_is_killed_and_the_next_request_is_answered(
    fake: FakePrometheus,
) -> None:
    worker = WorkerProcess(Prometheus(url=fake.url, timeout_seconds=60))
    request = {
        "now": time.time(),
        "nodes": {"names": ["gpu-1"], "addresses": {}, "exporter_pods": {}},
    }
    over = asyncio.Event()

    async def handler(_request: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    fake.handler = handler
    with pytest.raises(WorkerError, match="no answer within 3 s"):
        await worker.send(request, 3)
    was_running = worker.is_running
    over.set()
    fake.handler = None

    answer = await worker.send(request, DEADLINE_SECONDS)

    await worker.stop()
    assert not was_running
    assert "error" not in answer[-1].header
    assert worker.starts == 2


async def test_the_worker_ends_with_the_extender(fake: FakePrometheus) -> None:
    worker = WorkerProcess(Prometheus(url=fake.url))
    await worker.send({"now": time.time()}, DEADLINE_SECONDS)
    process = worker._process
    assert process is not None
    assert process.stdin is not None
    assert os.getsid(process.pid) == process.pid, "Ctrl-C must not reach it"

    process.stdin.close()  # for the worker this is how a killed extender looks

    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await process.wait() == 0
    await worker.stop()


async def test_a_cancelled_stop_leaves_no_process_behind(fake: FakePrometheus) -> None:
    worker = WorkerProcess(Prometheus(url=fake.url))
    await worker.send({"now": time.time()}, DEADLINE_SECONDS)
    process = worker._process
    assert process is not None
    stopping = asyncio.create_task(worker.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait([stopping])

    await worker.stop()

    assert process.returncode is not None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
async def test_the_worker_has_low_priority_after_its_first_answer(fake: FakePrometheus) -> None:
    worker = WorkerProcess(Prometheus(url=fake.url))
    await worker.send({"now": time.time()}, DEADLINE_SECONDS)
    assert worker._process is not None
    threads = Path(f"/proc/{worker._process.pid}/task")

    def priorities() -> set[int]:
        return {os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in threads.iterdir()}

    own = os.getpriority(os.PRIO_PROCESS, 0)
    await until(lambda: min(priorities()) > own)
    await worker.stop()


async def test_a_killed_worker_that_gets_no_cpu_time_does_not_delay_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_module, "_END_SECONDS", 0.01)
    worker = WorkerProcess(Prometheus(url="http://prometheus:9090"))
    starved = _Starved()
    monkeypatch.setattr(worker, "_process", starved)

    async with asyncio.timeout(DEADLINE_SECONDS):
        await worker.stop()

    assert starved.is_killed


class _Starved:
    """A process that does not end, because the kernel gives it no CPU time."""

    def __init__(self) -> None:
        self.is_killed = False

    async def communicate(self) -> None:
        await asyncio.Event().wait()

    def kill(self) -> None:
        self.is_killed = True


async def test_the_worker_finds_files_with_relative_paths(
    fake: FakePrometheus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret")
    monkeypatch.chdir(tmp_path)

    async with running(fake.url, bearer_token_file="token") as delivered:
        readings = await delivered.more()

    assert len(readings.devices) == 1
