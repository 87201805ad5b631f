"""Simulate a Prometheus for the demo: scrape the exporter, and keep the last two hours."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from aiohttp import web

from simulation.dcgm import render
from simulation.exporter import instance_of
from simulation.fleet import SimulatedFleet
from simulation.nodes import SimulatedNode
from testkit.prometheus.api import PrometheusApi
from testkit.prometheus.samples import NAME, SampleStore, keyed, parse_scrape, with_target_labels
from testkit.serving import serve

logger = logging.getLogger(__name__)

_JOB: Final = "dcgm-exporter"
_BACKFILL_STEP_SECONDS: Final = 60.0
_SCRAPE_TIMEOUT_SECONDS: Final = 5.0


@dataclass(slots=True, kw_only=True)
class SimulatedPrometheus:
    """Scrapes a fleet's exporter and stores the last two hours; use it on one event loop.

    Attributes:
        fleet: fleet of the targets, with the clock.
        exporter_url: base URL of the exporter.
        interval_seconds: time between two scrapes.
    """

    fleet: SimulatedFleet
    exporter_url: str
    interval_seconds: float = 2.0
    store: SampleStore = field(default_factory=SampleStore)

    def backfill(self, seconds: float) -> None:
        """Fill the store with a past of constant current values; only XID errors are recent.

        Args:
            seconds: length of that past.
        """
        now = self.fleet.clock()
        steps = math.ceil(seconds / _BACKFILL_STEP_SECONDS)
        times = [now - step * _BACKFILL_STEP_SECONDS for step in range(steps, 0, -1)]
        for node in self.fleet.nodes.values():
            end = now if node.silent_since is None else node.silent_since
            text = render(node.spec, self.fleet.views(node.name))
            samples = keyed(self._samples(node, text))
            sound = [
                (key, labels, 0.0 if labels[NAME] == _XID_METRIC else value)
                for key, labels, value in samples
            ]
            for at in (*(time for time in times if time < end), end):
                is_young = at >= now - _XID_AGE_SECONDS
                self.store.ingest_keyed(node.name, at, samples if is_young else sound)

    async def scrape(self, session: aiohttp.ClientSession) -> None:
        """Scrape every node once, one after the other."""
        for node in list(self.fleet.nodes.values()):
            if node.silent_since is None:
                await self._scrape_node(session, node)

    async def run(self) -> None:
        """Scrape until cancelled."""
        timeout = aiohttp.ClientTimeout(total=_SCRAPE_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await self.scrape(session)
                await asyncio.sleep(self.interval_seconds)

    async def _scrape_node(self, session: aiohttp.ClientSession, node: SimulatedNode) -> None:
        at = self.fleet.clock()
        url = f"{self.exporter_url}/metrics"
        try:
            async with session.get(url, params={"node": node.name}) as response:
                response.raise_for_status()
                samples = self._samples(node, await response.text())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.debug("scrape failed", extra={"node": node.name, "cause": str(error)})
            samples = self._samples(node, None)
        self.store.ingest(node.name, at, samples)

    def _samples(self, node: SimulatedNode, text: str | None) -> list[tuple[dict[str, str], float]]:
        """Return the samples of a scrape and its `up`, or only `up` if the scrape failed."""
        labels = {"instance": instance_of(node), "job": _JOB}
        samples = [
            (with_target_labels(own, labels), value) for own, value in parse_scrape(text or "")
        ]
        is_up = 0.0 if text is None else 1.0
        return [*samples, ({NAME: "up", **labels}, is_up)]


_XID_METRIC: Final = "DCGM_FI_DEV_XID_ERRORS"
_XID_AGE_SECONDS: Final = 300.0
"""Age of the XID errors in the backfilled past."""


def build_app(prometheus: SimulatedPrometheus) -> web.Application:
    """Build the application of the HTTP API."""
    return PrometheusApi(prometheus.store, prometheus.fleet.clock).build_app()


@asynccontextmanager
async def run_prometheus(prometheus: SimulatedPrometheus) -> AsyncIterator[str]:
    """Scrape and serve on 127.0.0.1 while the context is open; yield the base URL."""
    async with serve(build_app(prometheus)) as url:
        # No TaskGroup: it would wrap every error of the caller's body in an ExceptionGroup.
        scraping = asyncio.create_task(prometheus.run(), name="simulated-prometheus-scrape")
        try:
            yield url
        finally:
            scraping.cancel()
            await asyncio.wait([scraping])
