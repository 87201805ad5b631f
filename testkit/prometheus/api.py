"""HTTP API of Prometheus over a store of series, with the subset of `promql`."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Self

import orjson
from aiohttp import web

from testkit.prometheus.promql import EvaluationError, Store, evaluate, parse
from testkit.prometheus.promql_nodes import Vector

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_STEPS: Final = 11_000


class Written(float):
    """Value that keeps its original text, even if the text is not a number."""

    text: str

    def __new__(cls, text: str) -> Self:
        try:
            value = float.__new__(cls, text)
        except ValueError:
            value = float.__new__(cls, "nan")
        value.text = text
        return value


class PrometheusApi:
    """API that answers queries from a store.

    Attributes:
        store: store of series.
        clock: the server's clock, seconds since the epoch.
        warnings: warnings in each answer.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self.store = store
        self.clock = clock
        self.warnings: list[str] = []

    def build_app(self) -> web.Application:
        """Build the application."""
        app = web.Application(middlewares=[_errors_as_json])
        for path, handler in (("query", self._query), ("query_range", self._query_range)):
            app.router.add_route("GET", f"/api/v1/{path}", handler)
            app.router.add_route("POST", f"/api/v1/{path}", handler)
        app.router.add_get("/api/v1/label/{label}/values", self._label_values)
        app.router.add_get("/api/v1/status/buildinfo", self._build_info)
        app.router.add_get("/-/{probe:healthy|ready}", _probe)
        return app

    def evaluate(self, query: str, at: float) -> Vector:
        """Evaluate a query at one time."""
        return evaluate(parse(query), self.store, at)

    def evaluate_range(self, query: str, times: Sequence[float]) -> Iterable[tuple[float, Vector]]:
        """Evaluate a query at several times."""
        return ((at, self.evaluate(query, at)) for at in times)

    async def _query(self, request: web.Request) -> web.Response:
        parameters = await _parameters(request)
        at = _time(parameters["time"]) if "time" in parameters else self.clock()
        result = [
            {"metric": element.labels, "value": [at, _number(element.value)]}
            for element in self.evaluate(parameters.get("query", ""), at)
        ]
        return self._success({"resultType": "vector", "result": result})

    async def _query_range(self, request: web.Request) -> web.Response:
        parameters = await _parameters(request)
        start, end = (_time(parameters.get(name, "")) for name in ("start", "end"))
        step = _duration(parameters.get("step", ""))
        if end < start or step <= 0:
            raise ValueError("end must not be before start, and step must be positive")
        if (end - start) / step > _MAX_STEPS:
            raise ValueError(f"exceeded maximum resolution of {_MAX_STEPS} points per timeseries")
        query = parameters.get("query", "")
        times = [start + number * step for number in range(int((end - start) / step) + 1)]
        rows = _matrix(self.evaluate_range(query, times))
        return self._success({"resultType": "matrix", "result": rows})

    async def _label_values(self, request: web.Request) -> web.Response:
        label = request.match_info["label"]
        series = self.store.select()
        return self._success(sorted({one.labels[label] for one in series if label in one.labels}))

    async def _build_info(self, _: web.Request) -> web.Response:
        return self._success({"version": "3.0.0+simulated", "revision": "", "goVersion": ""})

    def _success(self, data: object) -> web.Response:
        answer: dict[str, Any] = {"status": "success", "data": data}
        return _json(answer | ({"warnings": self.warnings} if self.warnings else {}))


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer invalid queries with JSON errors, as Prometheus does."""
    try:
        return await handler(request)
    except ValueError as error:
        is_unexecutable = isinstance(error, EvaluationError)
        kind = "execution" if is_unexecutable else "bad_data"
        body = {"status": "error", "errorType": kind, "error": str(error)}
        return _json(body, 422 if is_unexecutable else 400)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


async def _parameters(request: web.Request) -> Mapping[str, str]:
    """Return the parameters of the URL and of a form in the body, which overrides the URL."""
    form = await request.post() if request.method == "POST" else {}
    return {**request.query, **{key: str(value) for key, value in form.items()}}


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
    if isinstance(value, Written):
        return value.text
    return str(int(value)) if value == int(value) else repr(value)
