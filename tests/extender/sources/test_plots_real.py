"""The last hour, and longer times, from a real Prometheus."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from extender.core.devices.readings import DeviceKey
from extender.settings.sources import Prometheus
from extender.sources.prometheus.plots import _STEPS, PrometheusPlots
from testkit.controlplane.backfilling import Line, backfill
from testkit.controlplane.scraping import prometheus_process

pytestmark = pytest.mark.prometheus

CARD: Final = DeviceKey(("GPU-card", ""))

INSTANCE: Final = DeviceKey(("GPU-mig", "7"))
LATE: Final = DeviceKey(("GPU-late", ""))
GONE: Final = DeviceKey(("GPU-gone", ""))
MIB: Final = 1 << 20
HOUR: Final = 3600.0


def utilization(ago: float) -> float:
    """Return percent: busy until half an hour ago, idle since then."""
    return 90.0 if ago > HOUR / 2 else 0.0


LINES: Final = [
    *(
        # Two pods on a shared card: two series of the same values.
        Line(name=name, labels={"UUID": "GPU-card", "gpu": "0", "pod": pod}, value=value)
        for pod in ("a", "b")
        for name, value in (
            ("DCGM_FI_DEV_GPU_UTIL", utilization),
            ("DCGM_FI_DEV_FB_USED", lambda ago: ago),
        )
    ),
    # The profiling metric takes precedence over the utilization.
    Line(
        name="DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        labels={"UUID": "GPU-mig", "GPU_I_ID": "7"},
        value=lambda _: 0.25,
    ),
    Line(
        name="DCGM_FI_DEV_GPU_UTIL",
        labels={"UUID": "GPU-mig", "GPU_I_ID": "7"},
        value=lambda _: 99.0,
    ),
    # The profiling metric exists since ten minutes ago.
    Line(
        name="DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        labels={"UUID": "GPU-late"},
        value=lambda ago: 0.25 if ago < 600 else None,
    ),
    Line(name="DCGM_FI_DEV_GPU_UTIL", labels={"UUID": "GPU-late"}, value=lambda _: 50.0),
    # An exporter that was down from 40 to 20 minutes ago.
    Line(
        name="DCGM_FI_DEV_GPU_UTIL",
        labels={"UUID": "GPU-gone"},
        value=lambda ago: None if 1200 < ago < 2400 else 50.0,
    ),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("plots")
    backfill(folder / "data", LINES, now=time.time(), seconds=3 * HOUR)
    process = prometheus_process(Path(folder), "127.0.0.1:1", {})
    asyncio.run(process.start())
    try:
        yield str(process.ready_url).removesuffix("/-/ready")
    finally:
        process.kill()


def plots(url: str) -> PrometheusPlots:
    return PrometheusPlots(lambda: Prometheus(url=url), time.time)


async def test_the_last_hour_is_returned_by_minute(url: str) -> None:
    hour = await plots(url).hour([CARD])

    activity, memory = hour.activity[CARD], hour.memory_bytes[CARD]
    assert hour.error == ""
    assert len(hour.times) == len(activity) == len(memory) == _STEPS
    assert set(activity[:29]) == {0.9}
    assert set(activity[33:]) == {0.0}
    assert [None if one is None else one / MIB for one in memory[:10:3]] == pytest.approx(
        [3600, 3420, 3240, 3060], abs=61
    )


async def test_an_instance_has_the_profiling_metric(url: str) -> None:
    hour = await plots(url).hour([INSTANCE])

    assert set(hour.activity[INSTANCE]) == {0.25}


async def test_utilization_fills_the_time_before_the_profiling_metric(url: str) -> None:
    activity = (await plots(url).hour([LATE])).activity[LATE]

    assert set(activity[:50]) == {0.5}
    assert set(activity[52:]) == {0.25}


async def test_minutes_without_a_scrape_stay_empty(url: str) -> None:
    activity = (await plots(url).hour([GONE])).activity[GONE]

    # A sample counts for five minutes: Prometheus's look-back.
    assert set(activity[:19]) == {0.5}
    assert set(activity[27:38]) == {None}
    assert set(activity[42:]) == {0.5}


async def test_a_longer_time_is_returned_as_well(url: str) -> None:
    past = await plots(url).past([CARD], seconds=2 * HOUR, steps=9)

    assert [round(at - past.times[0]) for at in past.times] == [900 * step for step in range(9)]
    assert past.activity[CARD] == [0.9] * 6 + [*past.activity[CARD][6:7], 0.0, 0.0]


async def test_other_cards_are_not_returned(url: str) -> None:
    hour = await plots(url).hour([CARD, DeviceKey(("GPU-unknown", ""))])

    assert set(hour.activity) == {CARD}
