"""Simulate a Prometheus for the demo: scrape the exporter, and answer a subset of PromQL.

`simulation.promql` defines the subset. The tests use a real Prometheus.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import aiohttp
import orjson
from aiohttp import web

from simulation.dcgm import render
from simulation.exporter import instance_of
from simulation.fleet import SimulatedFleet
from simulation.nodes import SimulatedNode
from simulation.promql import EvaluationError, evaluate, parse
from simulation.promql_nodes import Vector
from simulation.samples import NAME, SampleStore, keyed, parse_scrape, with_target_labels
from simulation.serving import serve

logger = logging.getLogger(__name__)

JOB: Final = "dcgm-exporter"
_MAX_STEPS: Final = 11_000
_BACKFILL_STEP_SECONDS: Final = 60.0
_SCRAPE_TIMEOUT_SECONDS: Final = 5.0

TargetLabels = Callable[[SimulatedNode], Mapping[str, str]]


def plain_labels(node: SimulatedNode) -> Mapping[str, str]:
    """Return a target's labels as a hand-written `scrape_configs` entry would."""
    return {"instance": instance_of(node), "job": JOB}


def service_monitor_labels(node: SimulatedNode) -> Mapping[str, str]:
    """Return a target's labels as the GPU Operator's ServiceMonitor would."""
    return {
        "container": "nvidia-dcgm-exporter",
        "endpoint": "gpu-metrics",
        "instance": instance_of(node),
        "job": "nvidia-dcgm-exporter",
        "namespace": "gpu-operator",
        "pod": f"nvidia-dcgm-exporter-{node.name}",
        "service": "nvidia-dcgm-exporter",
    }


@dataclass(slots=True, kw_only=True)
class SimulatedPrometheus:
    """Scrapes a fleet's exporter and stores the last two hours; use it on one event loop.

    Attributes:
        fleet: fleet of the targets, with the clock.
        exporter_url: base URL of the exporter.
        interval_seconds: time between two scrapes.
        target_labels: returns the labels of a target.
        store: the samples.
    """

    fleet: SimulatedFleet
    exporter_url: str
    interval_seconds: float = 2.0
    target_labels: TargetLabels = plain_labels
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
                (key, labels, 0.0 if labels[NAME] == XID_METRIC else value)
                for key, labels, value in samples
            ]
            for at in (*(time for time in times if time < end), end):
                is_young = at >= now - XID_AGE_SECONDS
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
        labels = self.target_labels(node)
        samples = [
            (with_target_labels(own, labels), value) for own, value in parse_scrape(text or "")
        ]
        is_up = 0.0 if text is None else 1.0
        return [*samples, ({NAME: "up", **labels}, is_up)]


XID_METRIC: Final = "DCGM_FI_DEV_XID_ERRORS"
XID_AGE_SECONDS: Final = 300.0
"""Age of the XID errors in the backfilled past."""

PROMETHEUS: Final = web.AppKey("prometheus", SimulatedPrometheus)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(prometheus: SimulatedPrometheus) -> web.Application:
    """Build the application of the HTTP API."""
    app = web.Application(middlewares=[_errors_as_json])
    app[PROMETHEUS] = prometheus
    for path, handler in (("query", _query), ("query_range", _query_range)):
        app.router.add_route("GET", f"/api/v1/{path}", handler)
        app.router.add_route("POST", f"/api/v1/{path}", handler)
    app.router.add_get("/api/v1/label/{label}/values", _label_values)
    app.router.add_get("/api/v1/status/buildinfo", _build_info)
    app.router.add_get("/-/{probe:healthy|ready}", _probe)
    return app


@asynccontextmanager
async def run_prometheus(prometheus: SimulatedPrometheus, port: int = 0) -> AsyncIterator[str]:
    """Scrape and serve on 127.0.0.1 while the context is open; yield the base URL."""
    async with serve(build_app(prometheus), port=port) as url:
        # No TaskGroup: it would wrap every error of the caller's body in an ExceptionGroup.
        scraping = asyncio.create_task(prometheus.run(), name="simulated-prometheus-scrape")
        try:
            yield url
        finally:
            scraping.cancel()
            await asyncio.wait([scraping])


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer invalid queries as Prometheus does."""
    try:
        return await handler(request)
    except ValueError as error:
        is_unexecutable = isinstance(error, EvaluationError)
        kind = "execution" if is_unexecutable else "bad_data"
        body = {"status": "error", "errorType": kind, "error": str(error)}
        return _json(body, 422 if is_unexecutable else 400)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _success(data: object) -> web.Response:
    return _json({"status": "success", "data": data})


async def _parameters(request: web.Request) -> Mapping[str, str]:
    """Return the parameters of the URL and of a posted form, which overrides the URL."""
    form = await request.post() if request.method == "POST" else {}
    return {**request.query, **{key: str(value) for key, value in form.items()}}


async def _query(request: web.Request) -> web.Response:
    parameters = await _parameters(request)
    prometheus = request.app[PROMETHEUS]
    at = _time(parameters["time"]) if "time" in parameters else prometheus.fleet.clock()
    vector = evaluate(parse(parameters.get("query", "")), prometheus.store, at)
    result = [
        {"metric": element.labels, "value": [at, _number(element.value)]} for element in vector
    ]
    return _success({"resultType": "vector", "result": result})


async def _query_range(request: web.Request) -> web.Response:
    parameters = await _parameters(request)
    start, end = (_time(parameters.get(name, "")) for name in ("start", "end"))
    step = _duration(parameters.get("step", ""))
    if end < start or step <= 0:
        raise ValueError("end timestamp must not be before start time, and step must be positive")
    if (end - start) / step > _MAX_STEPS:
        raise ValueError(f"exceeded maximum resolution of {_MAX_STEPS} points per timeseries")
    expression = parse(parameters.get("query", ""))
    store = request.app[PROMETHEUS].store
    steps = [start + number * step for number in range(int((end - start) / step) + 1)]
    return _success(
        {
            "resultType": "matrix",
            "result": _matrix((at, evaluate(expression, store, at)) for at in steps),
        }
    )


def _matrix(steps: Iterable[tuple[float, Vector]]) -> list[dict[str, object]]:
    """Convert the vectors of all steps to one row of values for each label set."""
    rows: dict[frozenset[tuple[str, str]], dict[str, object]] = {}
    values: dict[frozenset[tuple[str, str]], list[list[object]]] = {}
    for at, vector in steps:
        for element in vector:
            key = frozenset(element.labels.items())
            if key not in rows:
                values[key] = []
                rows[key] = {"metric": element.labels, "values": values[key]}
            values[key].append([at, _number(element.value)])
    return list(rows.values())


async def _label_values(request: web.Request) -> web.Response:
    label = request.match_info["label"]
    store = request.app[PROMETHEUS].store
    return _success(sorted({s.labels[label] for s in store.select() if label in s.labels}))


async def _build_info(_: web.Request) -> web.Response:
    return _success({"version": "3.0.0+simulated", "revision": "", "goVersion": ""})


async def _probe(_: web.Request) -> web.Response:
    return web.Response(text="Prometheus Server is Healthy.\n")


def _time(text: str) -> float:
    """Parse seconds since the epoch, or an RFC 3339 time."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def _duration(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float(text.removesuffix("s"))


def _number(value: float) -> str:
    """Format a value as Prometheus does, without exponent or needless decimals."""
    return str(int(value)) if value == int(value) else repr(value)
