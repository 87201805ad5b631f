"""Changed settings of Prometheus: the status stays, and the past is queried once."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from extender.core.devices.readings import History, Readings
from extender.settings.sources import Prometheus
from extender.sources.prometheus.source import PrometheusSource
from testkit.prometheus.fake import FakePrometheus, series
from tests.extender.sources.delivered import NODES, until


class Restarted:
    """A source whose task can be stopped and started again."""

    def __init__(self, url: str) -> None:
        self.readings: list[Readings] = []
        self.history: list[History] = []
        self.settings = Prometheus(url=url, interval_seconds=0.5, timeout_seconds=1)
        self.source = PrometheusSource(
            self.settings,
            identity=lambda: NODES,
            deliver=self._take,
            deliver_history=self._take_history,
            clock=time.time,
            window_seconds=600.0,
        )
        self.start()

    async def _take(self, readings: Readings) -> None:
        self.readings.append(readings)

    async def _take_history(self, history: History) -> None:
        self.history.append(history)

    def start(self) -> None:
        self._task = asyncio.create_task(self.source.run(), name="source")

    async def stop(self) -> None:
        assert not self._task.done()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def change(self, **changes: object) -> None:
        await self.stop()
        self.settings = self.settings.model_copy(update=changes)
        self.source.adopt(self.settings, 600.0)
        self.start()

    async def more(self) -> None:
        have = len(self.readings)
        await until(lambda: len(self.readings) > have)


async def start(value: float) -> tuple[FakePrometheus, contextlib.AsyncExitStack]:
    stack = contextlib.AsyncExitStack()
    fake = FakePrometheus(
        series=[series("DCGM_FI_DEV_GPU_UTIL", value, UUID="GPU-1", Hostname="gpu-1", gpu="0")]
    )
    server = await fake.start()
    stack.push_async_callback(server.close)
    return fake, stack


@pytest.fixture
async def fake() -> AsyncIterator[FakePrometheus]:
    made, stack = await start(40)
    async with stack:
        yield made


async def test_another_prometheus_is_queried_and_the_past_is_not_delivered_twice(
    fake: FakePrometheus,
) -> None:
    other, stack = await start(70)
    async with stack:
        part = Restarted(fake.url)
        await until(lambda: part.source.status().has_history)
        before = part.source.status()
        await part.change(url=other.url)
        assert part.source.status() == before
        for _ in range(4):  # the past would be queried after the first
            await part.more()
        await part.stop()

    values = [float(next(iter(answer.columns.values()))[0]) for answer in part.readings]
    assert (values[0], values[-1]) == pytest.approx((0.4, 0.7))
    assert len(part.history) == 1
    assert part.source.status().failures == 0


async def test_an_undelivered_past_is_queried_again(fake: FakePrometheus) -> None:
    part = Restarted("http://127.0.0.1:1")
    await until(lambda: part.source.status().failures > 0)
    await part.change(url=fake.url)
    await until(lambda: part.source.status().has_history)
    await part.stop()

    assert len(part.history) == 1


async def test_a_worker_ended_for_a_change_does_not_count_as_lost(fake: FakePrometheus) -> None:
    part = Restarted(fake.url)
    await part.more()
    for seconds in (2, 3, 4):
        await part.change(timeout_seconds=seconds)
        await part.more()
    await part.stop()

    assert part.source.status().worker_starts == 1
