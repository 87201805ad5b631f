"""Routes of the page: static files, update stream, node detail and history."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import msgspec
import orjson
from aiohttp import hdrs, web

from extender.api.page.broadcaster import Broadcaster, DecisionFeed, FarFeed
from extender.api.page.fleet_feed import FleetFeed
from extender.core.decision.health import SLOWDOWN_WORDS
from extender.core.decision.signals import OTHER_ACTIVITY, UTILIZATION
from extender.core.decision.verdicts import NodeScore, only, scores_of
from extender.core.devices.readings import Signal
from extender.core.nodes.snapshot import Snapshot
from extender.core.steps import Steps
from extender.core.untyped import mapping_of, number_of, text_of
from extender.fleet.fleet import Fleet
from extender.insight.advice import AdviceRoutes
from extender.insight.explain_views import lost_by
from extender.insight.last_hour import LastHour, Plots, ShortMemory, rows_of
from extender.insight.replicas import ONE, Replicas
from extender.insight.stranded import HostPods
from extender.insight.views import Json, node_views
from extender.placement.history import DecisionHistory, DecisionRecord
from extender.runtime.cooperative import YieldControl, run_in_steps
from extender.runtime.decoding import MalformedError, decode_with
from extender.server.json_api import (
    CONTENT_TYPE,
    QueryError,
    check_parameters,
    error_answer,
    json_answer,
    refusing,
)
from extender.server.readiness import SourceStatus
from extender.server.redaction import VIEWER, AccessError, namespace_of, sees
from extender.settings.config import Settings

# Server-sent events: send updates to each viewer, and disconnect viewers that do not read.

logger = logging.getLogger(__name__)

_MOST_VIEWERS: Final = 64
"""Viewer limit: each buffers an event of some hundred kilobytes at worst."""
_WRITE_SECONDS: Final = 20.0
"""Time limit for reading one event; a disconnected page reconnects by itself."""

_HEADERS: Final = {
    hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
    hdrs.CACHE_CONTROL: "no-store",
    "X-Accel-Buffering": "no",  # a proxy must not buffer events
}


async def stream(broadcaster: Broadcaster, request: web.Request) -> web.StreamResponse:
    """Send updates to a viewer until it leaves, stops reading, or the server shuts down."""
    client = VIEWER.get().name or request.remote or ""
    is_head = request.method == hdrs.METH_HEAD
    if not is_head and not broadcaster.has_room_for(client, _MOST_VIEWERS):
        refused = error_answer(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"{_MOST_VIEWERS} pages are open already, and enough of them are yours: close one, and "
            "this page will load",
        )
        refused.headers[hdrs.RETRY_AFTER] = "30"
        return refused
    response = web.StreamResponse(headers=_HEADERS)
    response.force_close()
    await response.prepare(request)
    if is_head:
        return response
    viewer = broadcaster.join(client)
    try:
        while not (broadcaster.is_closing or viewer.is_let_go):
            await VIEWER.get().renew()
            for update in broadcaster.news_for(viewer):
                async with asyncio.timeout(_WRITE_SECONDS):
                    await response.write(update)
            await viewer.news.wait()
    except AccessError:
        logger.debug("a page lost its access")  # the page reconnects, and receives the reason
    except (ConnectionError, TimeoutError):
        # The client left or does not read: abort the connection with its buffered data.
        if request.transport is not None:
            request.transport.abort()
    finally:
        broadcaster.leave(viewer)
    return response


# The route /v1/page/lost: explain why the runner-up lost, for the decisions visible on a page.  A
# full explanation of a decision takes ten milliseconds. This route only compares the scores of the
# first two nodes that passed.

PATH: Final = "/v1/page/lost"
_PEERS_PATH: Final = "/v1/peers/lost"
"""Path for other replicas; its prefix requires a replica's client certificate."""
_MOST_IDS: Final = 50
"""Largest number of decisions in one request: no screen shows more."""
_MOST_KEPT: Final = 1000

_LostNode = tuple[str, str | None]
"""A pod's `namespace/name`, and the reason why the runner-up lost."""


class _Lost:
    """Handlers of /v1/page/lost, which explains why runners-up lost; for pages and other replicas.

    Args:
        yield_control: yields to webhook requests.
    """

    def __init__(
        self,
        history: DecisionHistory,
        replicas: Replicas,
        yield_control: Callable[[], Awaitable[None]],
    ) -> None:
        self._history = history
        self._replicas = replicas
        self._yield_control = yield_control
        self._cache: OrderedDict[int, _LostNode] = OrderedDict()

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/page/lost."""
        return [web.get(PATH, refusing(self._answer))]

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the route at which other replicas query explanations of runners-up."""
        return self._replicas.peer_routes(_PEERS_PATH, self._answer_peer, {"ids"})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        ids = _read_ids(request)
        ours = [one for one in ids if self._replicas.is_ours(one)]
        lost = await self._own(ours)
        theirs = [one for one in ids if not self._replicas.is_ours(one)]
        if theirs:
            query = urlencode({"ids": ",".join(theirs)})
            answers = await self._replicas.others.query(f"{_PEERS_PATH}?{query}")
            for body in answers.values():
                lost |= {name: one for name, one in _lost_nodes(body).items() if name in theirs}
            await VIEWER.get().learn({namespace_of(pod) for pod, _ in lost.values()})
        seen: Json = {name: why for name, (pod, why) in lost.items() if sees(namespace_of(pod))}
        return json_answer({"lost_by": seen})

    async def _answer_peer(self, request: web.Request) -> web.StreamResponse:
        """Answer another replica, which redacts the answer for its caller."""
        lost = await self._own(one for one in _read_ids(request) if self._replicas.is_ours(one))
        return web.Response(body=orjson.dumps(lost), content_type=CONTENT_TYPE)

    async def _own(self, ids: Iterable[str]) -> dict[str, _LostNode]:
        """Explain decisions of this replica."""
        found: dict[str, _LostNode] = {}
        for name in ids:
            number = number_of(name.rpartition("-")[2])
            record = None if number is None else self._history.get(number)
            if record is not None:
                found[name] = await self._explain(record)
        return found

    async def _explain(self, record: DecisionRecord) -> _LostNode:
        cached = self._cache.get(record.number)
        if cached is not None:
            return cached
        await self._yield_control()
        order = record.decision.order[:2].tolist()
        why = None
        if len(order) > 1:
            first, second = (record.decision.candidates[at] for at in order)
            scores = _scores(record, first, second)
            if second in scores:
                why = lost_by(scores.get(first), scores[second])
        reason = self._cache[record.number] = record.pod.key, why
        if len(self._cache) > _MOST_KEPT:
            self._cache.popitem(last=False)
        return reason


def _scores(record: DecisionRecord, *nodes: str) -> dict[str, NodeScore]:
    """Return the recorded scores of nodes; the lowest if a node has several."""
    found: dict[str, NodeScore] = {}
    for part in record.evidence:
        here = [node for node in nodes if node in part.nodes]
        for one in scores_of(only(part.evidence, *here)) if here else ():
            other = found.get(one.node)
            if other is None or one.score < other.score:
                found[one.node] = one
    return found


def _read_ids(request: web.Request) -> list[str]:
    """Parse the requested decision ids."""
    check_parameters(request.query, frozenset({"ids"}))
    text = request.query.get("ids", "")
    ids = [one for one in text.split(",") if one]
    if not 1 <= len(ids) <= _MOST_IDS:
        raise QueryError("ids", text, f"must be 1 to {_MOST_IDS} decision ids, separated by commas")
    return ids


def _lost_nodes(body: bytes | None) -> dict[str, _LostNode]:
    """Decode another replica's answer; empty if it is malformed."""
    try:
        document = mapping_of(decode_with(orjson.loads, body or b"{}"))
    except MalformedError:
        return {}
    return {
        name: (text_of(one[0]), text_of(one[1]) or None)
        for name, one in document.items()
        if isinstance(one, list) and len(one) == 2  # noqa: PLR2004 - pod and reason
    }


# Static files of the page, read once and served with a strict content security policy.

_FOLDER: Final = Path(__file__).parent / "static"

_TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No inline scripts or styles, no other origins, and no text that becomes markup."""

_SAFE_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    hdrs.CACHE_CONTROL: "no-cache",  # the browser revalidates each file by its ETag
}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    kind: str
    tag: str


def _file_routes() -> list[web.RouteDef]:
    """Return the routes of the page's files, and redirects to the page."""
    files = {path.name: _read(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
    routes = [web.get(f"/page/{name}", _serving(file)) for name, file in files.items()]
    index = web.get("/page/", _serving(files["index.html"]))
    return [*routes, index, web.get("/page", _to("page/")), web.get("/", _to("page/"))]


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body=body, kind=_TYPES[path.suffix], tag=f'"{sha256(body).hexdigest()}"')


def _serving(file: _File) -> _Handler:
    async def serve(request: web.Request) -> web.StreamResponse:
        headers = {**_SAFE_HEADERS, hdrs.ETAG: file.tag}
        if request.headers.get(hdrs.IF_NONE_MATCH) == file.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, headers={**headers, hdrs.CONTENT_TYPE: file.kind})

    return serve


def _to(where: str) -> _Handler:
    """Return a handler that redirects to a relative path, which works behind a proxy too."""

    async def redirect(_: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={**_SAFE_HEADERS, hdrs.LOCATION: where})

    return redirect


# Detail of one node for the page: the record of /v1/nodes, and every reading with its source.

_SHOWN: Final = (
    *UTILIZATION,
    *OTHER_ACTIVITY,
    Signal.MEMORY_USED,
    Signal.MEMORY_FREE,
    Signal.POWER,
    Signal.POWER_LIMIT,
    Signal.TEMPERATURE,
    Signal.MEMORY_TEMPERATURE,
)
"""Signals whose raw readings are shown."""

_PIECE_DEVICES: Final = 2
"""Devices to look up between two yields to the event loop."""


def _throttling(reasons: float | None) -> list[str] | None:
    """Return the reasons that slow a card down, None if unknown.

    Example:
        >>> _throttling(0x44), _throttling(0x1), _throttling(None)
        (['software power cap', 'hardware thermal slowdown'], [], None)
    """
    if reasons is None:
        return None
    return [text for bit, text in SLOWDOWN_WORDS.items() if int(reasons) & bit]


def _node_detail_in_steps(fleet: Fleet, name: str) -> Steps[Json | None]:
    """Build a node's record with its devices' readings, in steps; None for an unknown node."""
    if name not in fleet.nodes:
        return None
    snapshot = fleet.snapshot()
    ((node, states),) = node_views(fleet, snapshot, [name])
    record = fleet.nodes[name]
    gpus: list[Json] = []
    rows = rows_of(fleet, snapshot, name)
    for at, (state, row) in enumerate(zip(states, rows, strict=True)):
        if at % _PIECE_DEVICES == 0:
            yield
        gpus.append(
            msgspec.structs.asdict(state)
            | {
                "readings": _readings(fleet, snapshot, row),
                "throttling": _throttling(fleet.store.value(Signal.CLOCK_EVENT_REASONS, row)),
            }
        )
    taints = [asdict(taint) for taint in record.taints]
    own: Json = {"gpus": gpus, "labels": dict(record.labels), "taints": taints}
    return msgspec.structs.asdict(node) | own


def _readings(fleet: Fleet, snapshot: Snapshot, row: int) -> list[Json]:
    """Return a device's latest readings, one for each signal."""
    readings: list[Json] = []
    for signal in _SHOWN:
        value, by = fleet.store.value(signal, row), fleet.store.reported([signal], row)
        if value is not None and by is not None:
            readings.append(
                {
                    "signal": signal.value,
                    "value": value,
                    "source": by[0],
                    "age_seconds": max(snapshot.at - by[1], 0.0),
                }
            )
    return readings


STREAM: Final = "/v1/page/stream"
"""Path of the update stream, which stays open."""


class PageRoutes:
    """The read-only page and its data.

    Args:
        states: returns the status of each source.
        clock: seconds since the epoch.
        yield_control: yields to webhook requests.
        plots: queries Prometheus for the history; None without Prometheus.
        host_pods: requests of all pods on their nodes.
        pool_labels: node labels for grouping, besides `GROUP_LABELS`.
    """

    def __init__(
        self,
        fleet: Fleet,
        history: DecisionHistory,
        *,
        states: Callable[[], Iterable[SourceStatus]],
        clock: Callable[[], float],
        yield_control: YieldControl,
        plots: Plots | None = None,
        host_pods: HostPods = dict,
        replicas: Replicas = ONE,
        pool_labels: tuple[str, ...] = (),
    ) -> None:
        self._fleet = fleet
        self._yield_control = yield_control
        self.memory = ShortMemory(fleet, clock)
        self._past = LastHour(fleet, self.memory, plots)
        self.advice = AdviceRoutes(fleet, self.memory, plots, clock, host_pods)  # same history
        self.lost = _Lost(history, replicas, yield_control)
        self.broadcaster = Broadcaster(
            FleetFeed(fleet, pool_labels),
            DecisionFeed(history, replicas),
            FarFeed(fleet, replicas),
            pods=fleet.pod_changes,
            states=states,
            clock=clock,
            yield_control=yield_control,
        )

    def adopt(self, settings: Settings) -> None:
        """Apply new settings from the next update on."""
        self.broadcaster.fleet.adopt(settings)

    def add_to(self, app: web.Application) -> None:
        """Add the page's routes to an application."""
        app.add_routes(
            [
                *_file_routes(),
                *self.advice.routes(),
                *self.lost.routes(),
                web.get(STREAM, partial(stream, self.broadcaster)),
                web.get("/v1/page/nodes/{name:.+}", self._node),
                web.get("/v1/page/past/{name:.+}", self._hour),
            ]
        )
        app.on_shutdown.append(self._close)

    async def run(self) -> None:
        """Send updates to viewers and record the history, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.broadcaster.run(), name="page news")
            group.create_task(self.broadcaster.poll_replicas(), name="page replicas")
            group.create_task(self.memory.run(self._yield_control), name="page memory")

    async def _close(self, _: web.Application) -> None:
        self.broadcaster.close()

    async def _node(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        detail = await run_in_steps(_node_detail_in_steps(self._fleet, name), self._yield_control)
        return _unknown(name) if detail is None else json_answer(detail)

    async def _hour(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._fleet.nodes:
            return _unknown(name)
        return json_answer(await self._past.of(self._fleet.snapshot(), name))


def _unknown(name: str) -> web.Response:
    return error_answer(HTTPStatus.NOT_FOUND, f"node {name!r} is not known")
