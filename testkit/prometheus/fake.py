"""Prometheus for unit tests: a list of series, faults on demand, and a record of the queries."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.test_utils import TestServer
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from testkit.prometheus.api import PrometheusApi, Written
from testkit.prometheus.promql_nodes import Vector

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HANGING_SECONDS: Final = 30.0
_HALF_A_DAY: Final = 43_200.0
SAMPLES: Final = Path(__file__).parents[2] / "tests" / "data" / "dcgm"
_LINE: Final = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, kw_only=True)
class Series:
    labels: Mapping[str, str]
    value: str
    at: float | None = None  # None: now


def series(name: str, value: object, at: float | None = None, **labels: str) -> Series:
    return Series(labels={"__name__": name, **labels}, value=str(value), at=at)


def util(value: object, at: float | None = None, **labels: str) -> Series:
    """Return a series of GPU utilization in percent: GPU-1 on gpu-1 unless labels say otherwise."""
    return series(
        "DCGM_FI_DEV_GPU_UTIL", value, at, **{"UUID": "GPU-1", "Hostname": "gpu-1", **labels}
    )


def read_sample(name: str, target: Mapping[str, str], *, honor_labels: bool) -> list[Series]:
    """Parse a scrape as Prometheus stores it, with the labels of a target."""
    found = []
    for line in (SAMPLES / name).read_text().splitlines():
        if match := _LINE.match(line):
            labels = {label: value for label, value in _LABEL.findall(match[2]) if value}
            if honor_labels:
                labels = {**target, **labels}
            else:
                clashes = {label: labels.pop(label) for label in target if label in labels}
                labels |= {f"exported_{label}": value for label, value in clashes.items()}
                labels |= target
            found.append(Series(labels={"__name__": match[1], **labels}, value=match[3]))
    return found


@dataclass(frozen=True, slots=True)
class _Shown:
    """Series at the time of an evaluation and a day before."""

    labels: Mapping[str, str]
    time: float
    now: tuple[float, float] | None
    day_before: float | None

    def at(self, time: float, window_seconds: float = 0.0) -> tuple[float, float] | None:  # noqa: ARG002 - the samples have any age
        if time > self.time - _HALF_A_DAY:
            return self.now
        return None if self.day_before is None else (time, self.day_before)

    def most(self, time: float, window_seconds: float) -> float | None:
        found = self.at(time, window_seconds)
        return found and found[1]

    rate = most  # a test sets the rate of a counter as its value


class FakePrometheus(PrometheusApi):
    """Fake Prometheus server.

    Attributes:
        a_day_ago: series of a day before.
        failing: texts of queries that are answered with 503.
        hanging: texts of queries that are not answered in time.
        handler: handler of all requests, in place of the answers.
        queries: received queries.
        before_answer: called before each query is answered.
    """

    def __init__(
        self, series: Iterable[Series] = (), *, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(self, clock)
        self.series = list(series)
        self.a_day_ago: list[Series] = []
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.handler: Handler | None = None
        self.queries: list[str] = []
        self.before_answer: Callable[[], None] = lambda: None
        self.url = ""
        self._at = 0.0

    async def start(self) -> TestServer:
        app = self.build_app()
        app.middlewares.append(self._faults)
        server = TestServer(app)
        await server.start_server()
        self.url = str(server.make_url("")).rstrip("/")
        return server

    @override
    def evaluate(self, query: str, at: float) -> Vector:
        self._at = at
        return super().evaluate(query, at)

    @override
    def evaluate_range(self, query: str, times: Sequence[float]) -> Iterable[tuple[float, Vector]]:
        vector = self.evaluate(query, times[-1])  # the series had constant values
        return ((at, vector) for at in times)

    def select(self, name: str = "") -> Iterator[_Shown]:
        """Yield the series of a metric, or all series for ""."""
        past = {_key(one): Written(one.value) for one in self.a_day_ago}
        present = {_key(one) for one in self.series}
        for one in (*self.series, *(one for one in self.a_day_ago if _key(one) not in present)):
            if name in {"", one.labels["__name__"]}:
                is_there = _key(one) in present
                at = self.clock() if one.at is None else one.at
                now = (at, Written(one.value)) if is_there else None
                yield _Shown(one.labels, self._at, now, past.get(_key(one)))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a query without faults."""
        return await request.match_info.handler(request)

    @web.middleware
    async def _faults(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        query = request.query.get("query", request.path)
        self.queries.append(query)
        self.before_answer()
        if self.handler is not None:
            return await self.handler(request)
        if any(text in query for text in self.hanging):
            await asyncio.sleep(HANGING_SECONDS)
        if any(text in query for text in self.failing):
            return web.Response(status=503, text="store is down")
        return await handler(request)


def _key(one: Series) -> frozenset[tuple[str, str]]:
    return frozenset(one.labels.items())
