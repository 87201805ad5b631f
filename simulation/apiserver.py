"""Simulate an API server for the demo, with only the paths that the extender uses.

It ignores list options (limit, continue, selectors), answers patches without storing them, and
authenticates no client. The tests use a real API server.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import orjson
from aiohttp import web

from simulation.control import AbsentError, ConflictError, SimulatedControlPlane
from simulation.objects import JsonObject, child
from simulation.objectstore import Change, ExpiredError, Kind
from simulation.serving import serve

CONTROL: Final = web.AppKey("control", SimulatedControlPlane)
BOOKMARK_SECONDS: Final = web.AppKey("bookmark_seconds", float)
WATCH_SECONDS: Final = web.AppKey("watch_seconds", float)

_TYPES: Final = {Kind.NODES: "Node", Kind.PODS: "Pod"}
_VERSION: Final = {
    "major": "1",
    "minor": "37",
    "gitVersion": "v1.37.2+simulated",
    "gitCommit": "",
    "gitTreeState": "",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(
    control: SimulatedControlPlane,
    *,
    bookmark_seconds: float = 5.0,
    watch_seconds: float = 3600.0,
) -> web.Application:
    """Build the API server's application.

    Args:
        control: the control plane that it serves and changes.
        bookmark_seconds: time between the bookmarks of a quiet watch.
        watch_seconds: longest duration of a watch.
    """
    app = web.Application(middlewares=[_errors_as_status], client_max_size=16 << 20)
    app[CONTROL] = control
    app[BOOKMARK_SECONDS] = bookmark_seconds
    app[WATCH_SECONDS] = watch_seconds
    pods = "/api/v1/namespaces/{namespace}/pods"
    pod = pods + "/{name}"
    router = app.router
    router.add_get("/version", _version)
    router.add_get("/version/", _version)  # kubernetes-asyncio requests this path
    router.add_get("/{probe:healthz|livez|readyz}", _probe)
    router.add_get("/api/v1/{kind:nodes|pods}", _list_or_watch)
    router.add_get("/api/v1/nodes/{name}", _get_object)
    router.add_get("/api/v1/namespaces/{namespace}/{kind:pods}", _list_or_watch)
    router.add_post(pods, _create_pod)
    router.add_get(pod, _get_object)
    router.add_delete(pod, _delete_pod)
    router.add_post(pod + "/binding", _bind)
    for path in (pod, pod + "/status", "/api/v1/nodes/{name}", "/api/v1/nodes/{name}/status"):
        router.add_patch(path, _get_object)
    for base in ("/api/v1", "/apis/events.k8s.io/v1"):
        events = base + "/namespaces/{namespace}/events"
        router.add_post(events, _create_event)
        router.add_patch(events + "/{name}", _create_event)
        router.add_get(base + "/events", _list_events)
    return app


@asynccontextmanager
async def run_apiserver(
    control: SimulatedControlPlane, port: int = 0, *, watch_seconds: float = 3600.0
) -> AsyncIterator[str]:
    """Serve the objects on 127.0.0.1 while the context is open; yield the base URL."""
    async with serve(build_app(control, watch_seconds=watch_seconds), port=port) as url:
        yield url


@web.middleware
async def _errors_as_status(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer exceptions with a Status object, as Kubernetes does."""
    try:
        return await handler(request)
    except AbsentError as error:
        return _status(404, "NotFound", str(error))
    except ConflictError as error:
        reason = "AlreadyExists" if "exists" in str(error) else "Conflict"
        return _status(409, reason, str(error))
    except (orjson.JSONDecodeError, TypeError) as error:
        return _status(400, "BadRequest", str(error))
    except web.HTTPNotFound:
        return _status(404, "NotFound", f"the simulated API server has no {request.path}")
    except web.HTTPMethodNotAllowed as error:
        return _status(405, "MethodNotAllowed", str(error))


def _status(code: int, reason: str, message: str) -> web.Response:
    return _json(_failure(code, reason, message), code)


def _failure(code: int, reason: str, message: str) -> JsonObject:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _json(value: object, code: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=code, content_type="application/json")


async def _body(request: web.Request) -> JsonObject:
    value = orjson.loads(await request.read())
    if not isinstance(value, dict):
        raise TypeError(f"the body is {value!r}, must be an object")
    return value


async def _version(_: web.Request) -> web.Response:
    return _json(_VERSION)


async def _probe(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _get_object(request: web.Request) -> web.Response:
    name, namespace = request.match_info["name"], request.match_info.get("namespace", "")
    kind = Kind.PODS if namespace else Kind.NODES
    item = request.app[CONTROL].store.get(kind, namespace, name)
    if item is None:
        raise AbsentError(f'{kind} "{name}" not found')
    return _json(item)


async def _create_pod(request: web.Request) -> web.Response:
    pod = await _body(request)
    return _json(request.app[CONTROL].create_pod(pod, request.match_info["namespace"]), 201)


async def _delete_pod(request: web.Request) -> web.Response:
    names = request.match_info
    return _json(request.app[CONTROL].delete_pod(names["namespace"], names["name"]))


async def _bind(request: web.Request) -> web.Response:
    node = str(child(await _body(request), "target").get("name", ""))
    names = request.match_info
    request.app[CONTROL].bind(names["namespace"], names["name"], node)
    success = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return _json(success | {"code": 201}, 201)


async def _create_event(request: web.Request) -> web.Response:
    event = await _body(request)
    control = request.app[CONTROL]
    metadata = child(event, "metadata")
    metadata.setdefault("namespace", request.match_info["namespace"])
    metadata.setdefault("name", f"event-{len(control.events)}")
    control.events.append(event)
    return _json(event, 201)


async def _list_events(request: web.Request) -> web.Response:
    control = request.app[CONTROL]
    metadata = {"resourceVersion": str(control.store.version)}
    return _json(
        {"kind": "EventList", "apiVersion": "v1", "metadata": metadata, "items": control.events}
    )


async def _list_or_watch(request: web.Request) -> web.StreamResponse:
    kind = Kind(request.match_info.get("kind", Kind.NODES))
    if request.query.get("watch", "").lower() in {"1", "true"}:
        return await _watch(request, kind)
    store = request.app[CONTROL].store
    namespace = request.match_info.get("namespace")
    items = [
        item
        for (item_namespace, _), item in store.items[kind].items()
        if namespace in {None, item_namespace}
    ]
    return _json(
        {
            "kind": f"{_TYPES[kind]}List",
            "apiVersion": "v1",
            "metadata": {"resourceVersion": str(store.version)},
            "items": items,
        }
    )


async def _watch(request: web.Request, kind: Kind) -> web.StreamResponse:
    """Stream changes as JSON lines until `timeoutSeconds` are over or the client leaves."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    longest_seconds = request.app[WATCH_SECONDS]
    timeout_seconds = min(
        longest_seconds, float(request.query.get("timeoutSeconds", longest_seconds))
    )
    store = request.app[CONTROL].store
    with store.watching() as queue:
        try:
            backlog = _backlog(request, kind)
        except ExpiredError as error:
            await response.write(_line("ERROR", _failure(410, "Expired", str(error))))
            return response
        for line in backlog:
            await response.write(line)
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    if line := await _next_line(request, kind, queue):
                        await response.write(line)
        except (TimeoutError, ConnectionResetError):
            return response


def _backlog(request: web.Request, kind: Kind) -> list[bytes]:
    """Return the first events of a watch: all objects, or the changes since its version."""
    store = request.app[CONTROL].store
    version = request.query.get("resourceVersion", "0")
    if request.query.get("sendInitialEvents") == "true" or version in {"", "0"}:
        lines = [_line("ADDED", item) for item in store.items[kind].values()]
        if request.query.get("sendInitialEvents") == "true":
            end: JsonObject = {"annotations": {"k8s.io/initial-events-end": "true"}}
            lines.append(_line("BOOKMARK", _bookmark(kind, store.version, end)))
        return lines
    changes = store.changes_since(int(version))
    return [_line(change.type, change.item) for change in changes if _is_wanted(request, change)]


async def _next_line(request: web.Request, kind: Kind, queue: asyncio.Queue[Change]) -> bytes:
    """Wait for the next event of this kind, or for a bookmark's time; b"" without an event."""
    store = request.app[CONTROL].store
    try:
        async with asyncio.timeout(request.app[BOOKMARK_SECONDS]):
            while True:
                change = await queue.get()
                if _is_wanted(request, change):
                    return _line(change.type, change.item)
    except TimeoutError:
        if request.query.get("allowWatchBookmarks", "").lower() not in {"1", "true"}:
            return b""
        return _line("BOOKMARK", _bookmark(kind, store.version))


def _is_wanted(request: web.Request, change: Change) -> bool:
    namespace = request.match_info.get("namespace")
    kind = Kind(request.match_info.get("kind", Kind.NODES))
    is_here = namespace in {None, child(change.item, "metadata").get("namespace")}
    return change.kind is kind and is_here


def _bookmark(kind: Kind, version: int, metadata: JsonObject | None = None) -> JsonObject:
    return {
        "kind": _TYPES[kind],
        "apiVersion": "v1",
        "metadata": {**(metadata or {}), "resourceVersion": str(version)},
    }


def _line(type_: str, item: JsonObject) -> bytes:
    return orjson.dumps({"type": type_, "object": item}) + b"\n"
