"""Simulate an API server for the demo, with only the paths that the extender uses.

It ignores selectors, answers patches without storing them, and authenticates no client. The
end-to-end tests use a real API server.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import orjson
from aiohttp import web

from simulation.control import AbsentError, ConflictError, SimulatedControlPlane
from simulation.objects import JsonObject, Kind, child
from testkit.apiserver import json_response, refused
from testkit.serving import serve

CONTROL: Final = web.AppKey("control", SimulatedControlPlane)

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


def build_app(control: SimulatedControlPlane) -> web.Application:
    """Build the application that serves and changes a control plane."""
    app = web.Application(middlewares=[_errors_as_status], client_max_size=16 << 20)
    app[CONTROL] = control
    pods = "/api/v1/namespaces/{namespace}/pods"
    pod = pods + "/{name}"
    router = app.router
    router.add_get("/version", _version)
    router.add_get("/version/", _version)  # kubernetes-asyncio requests this path
    router.add_get("/{probe:healthz|livez|readyz}", _probe)
    router.add_get("/api/v1/{kind:nodes|pods}", _list_or_watch)
    router.add_get("/api/v1/nodes/{name}", _get_object)
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
async def run_apiserver(control: SimulatedControlPlane) -> AsyncIterator[str]:
    """Serve the objects on 127.0.0.1 while the context is open; yield the base URL."""
    async with serve(build_app(control)) as url:
        yield url


@web.middleware
async def _errors_as_status(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer exceptions with a Status object, as Kubernetes does."""
    try:
        return await handler(request)
    except AbsentError as error:
        return refused(404, "NotFound", str(error))
    except ConflictError as error:
        reason = "AlreadyExists" if "exists" in str(error) else "Conflict"
        return refused(409, reason, str(error))
    except (orjson.JSONDecodeError, TypeError) as error:
        return refused(400, "BadRequest", str(error))
    except web.HTTPNotFound:
        return refused(404, "NotFound", f"the simulated API server has no {request.path}")
    except web.HTTPMethodNotAllowed as error:
        return refused(405, "MethodNotAllowed", str(error))


def _json(value: object, code: int = 200) -> web.Response:
    return json_response(orjson.dumps(value), code)


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
    store = request.app[CONTROL].store
    return await store.list_or_watch(request, request.match_info["kind"])
