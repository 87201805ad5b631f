"""Readings of the past that fill the windows."""

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from extender.core.devices.readings import DeviceKey
from extender.settings.sources import Prometheus
from extender.sources.prometheus import worker
from extender.sources.prometheus.http import PrometheusClient
from extender.sources.prometheus.worker import _collect_past
from testkit.collecting import NOW
from testkit.controlplane.backfilling import STEP_SECONDS, Line
from testkit.prometheus.fake import FakePrometheus, series, util
from tests.extender.sources.past import HALF_PRECISION, past_of

Value = Callable[[float], float | None]
UTILIZATION, ENGINE, XID = (
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    "DCGM_FI_DEV_XID_ERRORS",
)


def line(name: str, uuid: str, value: Value) -> Line:
    return Line(name=name, labels={"UUID": uuid}, value=value)


def percent(ago: float) -> float:
    return ago / STEP_SECONDS % 100


async def test_one_query_of_the_past_has_few_steps_and_no_step_is_queried_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queried: list[float] = []
    async with past_of([line(UTILIZATION, "GPU-a", percent)]) as (client, settings):
        query_range = client.query_range

        def record(
            query: str, *, start: float, end: float, step_seconds: float, **rest: Any
        ) -> Any:
            steps = np.arange(start, end + 1.0, step_seconds).tolist()
            assert len(steps) <= 4
            queried.extend(steps)
            return query_range(query, start=start, end=end, step_seconds=step_seconds, **rest)

        monkeypatch.setattr(client, "query_range", record)
        past = await asyncio.to_thread(
            _collect_past, client, settings, now=NOW, window_seconds=4 * 3600.0
        )

    assert queried == past.times.tolist()


async def test_each_step_has_the_value_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_DEVICES_PER_STEP", 2)
    lines = [
        line(UTILIZATION, "GPU-a", percent),
        line(UTILIZATION, "GPU-b", percent),
        line(UTILIZATION, "GPU-new", lambda ago: percent(ago) if ago <= 1800 else None),
        line(ENGINE, "GPU-b", lambda ago: 0.5 if ago < 7200 else None),
        Line(
            name=ENGINE,
            labels={"UUID": "GPU-b", "pod": "b"},
            value=lambda ago: 0.4 if ago < 9000 else None,
        ),
        line(XID, "GPU-a", lambda ago: 79.0 if ago < 600 else 0.0),
    ]
    async with past_of(lines) as (client, settings):
        past = await asyncio.to_thread(
            _collect_past, client, settings, now=NOW + 0.4, window_seconds=4 * 3600.0
        )

    minutes = [ago * 60.0 for ago in range(60, -1, -1)]
    agos = [*np.arange(4 * 3600.0, 3600.0, -450.0).tolist(), *minutes]
    assert (NOW - past.times).tolist() == agos
    sampled = [math.ceil(ago / STEP_SECONDS) * STEP_SECONDS for ago in agos]

    ratios = [percent(ago) / 100 for ago in sampled]
    engines = [0.5 if ago < 7200 else 0.4 for ago in sampled]
    expected = {
        "GPU-a": ratios,
        "GPU-b": [
            engine if ago < 9000 else ratio
            for ago, engine, ratio in zip(sampled, engines, ratios, strict=True)
        ],
        "GPU-new": [
            ratio if ago <= 1800 else math.nan for ago, ratio in zip(sampled, ratios, strict=True)
        ],
    }
    found = dict(zip(past.devices, past.utilization.tolist(), strict=True))
    assert found == {
        DeviceKey((uuid, "")): pytest.approx(values, rel=HALF_PRECISION, nan_ok=True)
        for uuid, values in expected.items()
    }
    assert past.xid is not None
    xids = dict(zip(past.devices, past.xid.tolist(), strict=True))
    assert xids[DeviceKey(("GPU-a", ""))] == [79.0 if ago < 600 else 0.0 for ago in sampled]
    assert np.isnan(xids[DeviceKey(("GPU-b", ""))]).all()


async def test_a_short_window_has_only_minutes() -> None:
    async with past_of([line(UTILIZATION, "GPU-a", percent)]) as (client, settings):
        past = await asyncio.to_thread(
            _collect_past, client, settings, now=NOW, window_seconds=600.0
        )

    assert (NOW - past.times).tolist() == [ago * 60.0 for ago in range(10, -1, -1)]
    loads = [ago / 100 for ago in range(10, -1, -1)]
    assert past.utilization[0].tolist() == pytest.approx(loads, rel=HALF_PRECISION)
    assert past.xid is None


async def test_without_the_past_of_xids_the_utilization_is_used(fake: FakePrometheus) -> None:
    fake.series = [util(40), series("DCGM_FI_DEV_XID_ERRORS", 31, UUID="GPU-1", Hostname="gpu-1")]
    fake.failing = {"(DCGM_FI_DEV_XID_ERRORS"}
    settings = Prometheus(url=fake.url)
    with contextlib.closing(PrometheusClient(settings)) as client:
        past = await asyncio.to_thread(
            _collect_past, client, settings, now=NOW, window_seconds=60.0
        )

    assert past.utilization.tolist() == [pytest.approx([0.4, 0.4], rel=HALF_PRECISION)]
    assert past.xid is None
