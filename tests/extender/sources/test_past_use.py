"""Last use of devices, from a real Prometheus through a real worker process, and exactly."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from extender.core.devices.readings import Column, DeviceKey
from extender.core.nodes.snapshot import Flags
from extender.settings.sources import Prometheus
from extender.sources.prometheus import source as prometheus
from extender.sources.prometheus.source import PastUse
from extender.sources.prometheus.worker import _USE_STEP_SECONDS, _collect_use
from testkit.app import running
from testkit.collecting import NOW
from testkit.controlplane.backfilling import Line, backfill
from testkit.controlplane.scraping import prometheus_process
from testkit.fake_kube import eventually
from tests.extender.sources.past import past_of

HOUR: Final = 3600.0
UTILIZATION, ENGINE = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"


class Recorder:
    """Records the last uses, as times before now."""

    def __init__(self) -> None:
        self.seen = asyncio.Event()
        self.seen.set()
        self.active_from = 0.02
        self.used: dict[DeviceKey, tuple[float, bool]] = {}

    def learn(
        self, devices: Sequence[DeviceKey], used_at: Column, is_guess: Flags, until: float
    ) -> None:
        assert len(devices) == len(used_at) == len(is_guess)
        for key, at, guess in zip(devices, used_at, is_guess, strict=True):
            self.used[key] = (until - float(at), bool(guess))


def line(uuid: str, value: Any, name: str = UTILIZATION, instance: str = "") -> Line:
    labels = {"UUID": uuid, **({"GPU_I_ID": instance} if instance else {})}
    return Line(name=name, labels=labels, value=value)


LINES: Final = [
    line("GPU-busy", lambda _: 80.0),
    line("GPU-since-5h", lambda ago: 60.0 if ago > 5 * HOUR else 0.0),
    line("GPU-burst-3h", lambda ago: 40.0 if 3 * HOUR <= ago < 3 * HOUR + 120 else 0.0),
    line("GPU-one-percent", lambda _: 1.0),
    line("GPU-gap-2h", lambda ago: None if 2 * HOUR <= ago < 3 * HOUR else 0.0),
    line("GPU-new-4h", lambda ago: 0.0 if ago < 4 * HOUR else None),
    line("GPU-new-247-min", lambda ago: 0.0 if ago < 247 * 60 else None),
    # The utilization is low, but the engine was active.
    line("GPU-engine", lambda _: 0.0),
    line("GPU-engine", lambda ago: 0.5 if ago > HOUR else 0.0, ENGINE),
    line("GPU-mig", lambda ago: 0.9 if ago > 6 * HOUR else 0.0, ENGINE, "7"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def last_uses(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Recorder]:
    folder: Path = tmp_path_factory.mktemp("use")
    backfill(folder / "data", LINES, now=time.time(), seconds=30 * HOUR)
    process = prometheus_process(folder, "127.0.0.1:1", {})
    await process.start()
    recorder = Recorder()
    try:
        settings = Prometheus(url=process.ready_url.removesuffix("/-/ready"))
        await PastUse(settings, time.time, recorder, is_busy=lambda: False).run()
        yield recorder
    finally:
        process.kill()


def ago(recorder: Recorder, uuid: str, instance: str = "") -> tuple[float, bool]:
    return recorder.used[DeviceKey((uuid, instance))]


@pytest.mark.prometheus
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("uuid", "hours", "is_guess"),
    [
        pytest.param("GPU-since-5h", 5, False, id="used-until-then"),
        pytest.param("GPU-burst-3h", 3, False, id="a-burst-of-two-minutes"),
        pytest.param("GPU-gap-2h", 2, True, id="nothing-known-before"),
        pytest.param("GPU-new-4h", 4, True, id="not-there-before"),
        pytest.param("GPU-new-247-min", 247 / 60, True, id="not-there-for-a-part-of-a-step"),
        pytest.param("GPU-one-percent", 24, True, id="calm-for-longer-than-requested"),
        pytest.param("GPU-engine", 1, False, id="the-busier-metric-counts"),
        pytest.param("GPU-mig:7", 6, False, id="an-instance"),
    ],
)
async def test_the_end_of_the_last_use_is_found(
    last_uses: Recorder, uuid: str, hours: float, is_guess: bool
) -> None:
    used_ago, guess = ago(last_uses, *uuid.split(":"))

    # Never too long: the end of the step counts, or of the next step if this one is unknown.
    assert hours * HOUR - 2 * _USE_STEP_SECONDS - 60 <= used_ago <= hours * HOUR + 60
    assert guess is is_guess


@pytest.mark.prometheus
@pytest.mark.asyncio(loop_scope="module")
async def test_a_device_in_use_is_left_out(last_uses: Recorder) -> None:
    assert DeviceKey(("GPU-busy", "")) not in last_uses.used


async def test_the_end_of_the_step_of_the_last_use_counts() -> None:
    lines = [
        *LINES,
        line("GPU-at-threshold", lambda ago: 2.0 if ago > 2 * HOUR else 1.9),
        line("GPU-gone-3h", lambda ago: 80.0 if ago > 3 * HOUR else None),
        line("GPU-one-percent", lambda _: 60.0, "DCGM_FI_DEV_GPU_TEMP"),
    ]
    async with past_of(lines) as (client, settings):
        use = await asyncio.to_thread(
            _collect_use, client, settings, now=NOW, seconds=24 * HOUR, active_from=0.02
        )

    steps = ((NOW - use.used_at) / _USE_STEP_SECONDS).tolist()
    found = zip(use.devices, steps, use.is_guess.tolist(), strict=True)
    assert {"".join(key): (ago, guess) for key, ago, guess in found} == {
        "GPU-engine": (4, False),
        "GPU-burst-3h": (12, False),
        "GPU-gap-2h": (7, True),
        "GPU-at-threshold": (8, False),
        "GPU-since-5h": (20, False),
        "GPU-new-4h": (15, True),
        "GPU-new-247-min": (16, True),
        "GPU-mig7": (24, False),
        "GPU-one-percent": (96, True),
    }


async def test_a_time_shorter_than_a_step_is_one_step() -> None:
    async with past_of([line("GPU-1", lambda _: 0.0)]) as (client, settings):
        use = await asyncio.to_thread(
            _collect_use, client, settings, now=NOW, seconds=60.0, active_from=0.02
        )

    assert (use.used_at.tolist(), use.is_guess.tolist()) == ([NOW - _USE_STEP_SECONDS], [True])


async def test_without_prometheus_nothing_is_queried() -> None:
    recorder = Recorder()
    recorder.seen.clear()

    async with asyncio.timeout(30):
        await PastUse(Prometheus(), time.time, recorder, is_busy=lambda: True).run()

    assert recorder.used == {}


async def test_a_failed_query_is_retried_a_few_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prometheus, "_PAST_DELAYS_SECONDS", (0.0, 0.0))

    async def fail(_: web.Request) -> web.Response:
        return web.Response(status=503, text="out of order")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fail)
    async with TestServer(app) as server:
        settings = Prometheus(url=f"http://{server.host}:{server.port}")
        await PastUse(settings, time.time, Recorder(), is_busy=lambda: False).run()

    warned = [one for one in caplog.records if one.message == "cannot query past use"]
    assert len(warned) == 2
    assert "503" in str(vars(warned[0])["error"])


async def test_query_of_the_past_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_PAST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(prometheus, "_PAST_DELAYS_SECONDS", ())
    left = 3

    def is_busy() -> bool:
        nonlocal left
        left -= 1
        return left > 0

    settings = Prometheus(url="http://127.0.0.1:1")
    await PastUse(settings, time.time, Recorder(), is_busy=is_busy).run()

    assert left == 0


async def test_an_extender_queries_once_it_records_use() -> None:
    async with running() as part:
        idleness, store = part.extender.pod_routes.idleness, part.extender.fleet.store

        def oldest() -> float:
            return min(
                (idleness.last_used(row)[0] for row in range(len(store))), default=time.time()
            )

        # The step before has no data.
        await eventually(lambda: oldest() < time.time() - HOUR / 5, deadline_seconds=60)
