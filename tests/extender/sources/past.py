"""Past of a Prometheus without a process: any query is answered from samples of each minute."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from aiohttp.test_utils import TestServer

from extender.settings.sources import Prometheus
from extender.sources.prometheus.http import PrometheusClient
from testkit.collecting import NOW
from testkit.controlplane.backfilling import STEP_SECONDS, Line
from testkit.prometheus.api import PrometheusApi
from testkit.prometheus.samples import NAME, SampleStore, Series

HALF_PRECISION: Final = 2.0**-11
"""Relative error of past readings, which are kept with 11 bits."""
_STEPS = 30 * 60


@asynccontextmanager
async def past_of(lines: Sequence[Line]) -> AsyncIterator[tuple[PrometheusClient, Prometheus]]:
    """Serve the samples of the 30 hours before `NOW`."""
    store = SampleStore()
    agos = [number * STEP_SECONDS for number in range(_STEPS, -1, -1)]
    for one in lines:
        labels = {NAME: one.name, **one.labels}
        times, values = [NOW - ago for ago in agos], [one.value(ago) for ago in agos]
        family = store.series.setdefault(one.name, {})
        family[tuple(labels.items())] = Series(labels, times, values)
    async with TestServer(PrometheusApi(store, lambda: NOW).build_app()) as server:
        settings = Prometheus(url=str(server.make_url("")))
        with contextlib.closing(PrometheusClient(settings)) as client:
            yield client, settings
