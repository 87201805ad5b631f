"""A small server that answers the extender's queries from a list of series, or misbehaves.

It understands the shapes of query that the extender sends, and no others; what those queries mean
to a real Prometheus, the tests marked `prometheus` show.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.test_utils import TestServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HANGING_SECONDS: Final = 30.0
SAMPLES: Final = Path(__file__).parents[1] / "tests" / "data" / "dcgm"
_AGGREGATION: Final = re.compile(r"^(max|min|group) by \(([^)]*)\) \((.*)\)$")
_DAY_AGO: Final = " offset 86400s"
_SELECTOR: Final = re.compile(r"(\w*)\{([^}]*)\}")
_MATCHER: Final = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_LINE: Final = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, kw_only=True)
class Series:
    labels: Mapping[str, str]
    value: str
    at: float | None = None  # None: just now


def series(name: str, value: object, at: float | None = None, **labels: str) -> Series:
    return Series(labels={"__name__": name, **labels}, value=str(value), at=at)


def util(value: object, at: float | None = None, **labels: str) -> Series:
    """Return the utilization of a GPU in percent: GPU-1 on gpu-1, unless labels say otherwise."""
    return series(
        "DCGM_FI_DEV_GPU_UTIL", value, at, **{"UUID": "GPU-1", "Hostname": "gpu-1", **labels}
    )


def read_sample(name: str, target: Mapping[str, str], *, honor_labels: bool) -> list[Series]:
    """Read a scrape as Prometheus stores it, for a target with labels of its own."""
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


@dataclass(kw_only=True)
class FakePrometheus:
    """The server.

    Attributes:
        series: what it has scraped.
        a_day_ago: what it had scraped then.
        failing: queries that contain one of these are answered 503.
        hanging: queries that contain one of these are not answered in time.
        warnings: what each answer warns of.
        clock: its clock.
        handler: answers everything in its place.
        questions: the queries that came.
        before_answer: is called when a query has come, before it is answered.
    """

    series: list[Series] = field(default_factory=list)
    a_day_ago: list[Series] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)
    hanging: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    clock: Callable[[], float] = time.time
    handler: Handler | None = None
    questions: list[str] = field(default_factory=list)
    before_answer: Callable[[], None] = lambda: None
    url: str = ""

    async def start(self) -> TestServer:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        server = TestServer(app)
        await server.start_server()
        self.url = str(server.make_url("")).rstrip("/")
        return server

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        query = request.query.get("query", request.path)
        self.questions.append(query)
        self.before_answer()
        if self.handler is not None:
            return await self.handler(request)
        if any(text in query for text in self.hanging):
            await asyncio.sleep(HANGING_SECONDS)
        if any(text in query for text in self.failing):
            return web.Response(status=503, text="store is down")
        if request.path.endswith("/values"):
            names = sorted({one.labels["__name__"] for one in self.series})
            return self._success(names)
        if request.path.endswith("/query_range"):
            return self._success(self._matrix(request))
        rows = [
            {"metric": labels, "value": [self.clock(), value]}
            for labels, value in self._evaluate(query)
        ]
        return self._success({"resultType": "vector", "result": rows})

    def _success(self, data: object) -> web.Response:
        return web.json_response({"status": "success", "data": data, "warnings": self.warnings})

    def _matrix(self, request: web.Request) -> object:
        start, end = float(request.query["start"]), float(request.query["end"])
        step = float(request.query["step"])
        steps = [start + step * index for index in range(int((end - start) / step) + 1)]
        rows = [
            {"metric": labels, "values": [[at, value] for at in steps]}
            for labels, value in self._evaluate(request.query["query"])
        ]
        return {"resultType": "matrix", "result": rows}

    def _evaluate(self, query: str) -> Iterable[tuple[dict[str, str], str]]:
        aggregation = _AGGREGATION.match(query)
        assert aggregation is not None, query
        operator, by, expression = aggregation.groups()
        expression = expression.partition(" and on ")[0]
        if _DAY_AGO in expression:
            yield from self._added(expression)
            return
        groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for one in self._select(expression):
            value = one.value
            if "timestamp(" in expression:
                value = str(self.clock() if one.at is None else one.at)
            labels = [(label, one.labels.get(label, "")) for label in by.split(", ")]
            groups.setdefault(tuple(pair for pair in labels if pair[1]), []).append(value)
        for labels_of_group, values in groups.items():
            if expression.endswith(" > 0") and not max(map(float, values)) > 0:
                continue
            yield dict(labels_of_group), _aggregate(operator, values)

    def _added(self, expression: str) -> Iterable[tuple[dict[str, str], str]]:
        now, _, then = expression.removesuffix(" > 0").partition(" - ")
        past = replace(self, series=self.a_day_ago)._evaluate(then.replace(_DAY_AGO, ""))
        before = {frozenset(labels.items()): float(value) for labels, value in past}
        for labels, value in self._evaluate(now):
            added = float(value) - before.get(frozenset(labels.items()), float("inf"))
            if added > 0:
                yield labels, str(added)

    def _select(self, expression: str) -> Iterable[Series]:
        for name, matchers in _SELECTOR.findall(expression):
            for one in self.series:
                if name not in {"", one.labels["__name__"]}:
                    continue
                if all(
                    _matches(one.labels.get(label, ""), how, value)
                    for label, how, value in _MATCHER.findall(matchers)
                ):
                    yield one


def _aggregate(operator: str, values: list[str]) -> str:
    if operator == "group":
        return "1"
    if len(values) == 1:
        return values[0]
    return min(values, key=float) if operator == "min" else max(values, key=float)


def _matches(found: str, how: str, value: str) -> bool:
    if how in {"=~", "!~"}:
        return (re.fullmatch(value, found) is not None) == (how == "=~")
    return (found == value) == (how == "=")
