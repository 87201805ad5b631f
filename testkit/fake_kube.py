"""API server for unit tests: `testkit.apiserver` with faults on demand and a record of requests."""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import orjson
from aiohttp import web
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from testkit.apiserver import Object, ObjectServer, event_line
from testkit.controlplane.waiting import DEADLINE_SECONDS

Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]

KINDS: Final = {
    "nodes": "Node",
    "pods": "Pod",
    "resourceclaims": "ResourceClaim",
    "resourceslices": "ResourceSlice",
}


def line(event: str, raw: Object) -> bytes:
    """Return an event as one line of a watch."""
    return event_line(event, orjson.dumps(raw))


def status_object(code: int, message: str) -> Object:
    """Return the Status object of a refused request."""
    return {"kind": "Status", "status": "Failure", "code": code, "message": message}


def refusal(code: int, message: str, **headers: str) -> Fault:
    """Return a fault that refuses a request as the API server does."""

    async def fault(_: web.Request) -> web.StreamResponse:
        return web.json_response(status_object(code, message), status=code, headers=headers)

    return fault


def answer(body: bytes, content_type: str = "application/json") -> Fault:
    """Return a fault that answers status 200 with any body."""

    async def fault(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type)

    return fault


class FakeKube(ObjectServer):
    """Store of nodes and pods, and of claims and slices if `dra_refusal` is None.

    Attributes:
        dra_refusal: the answer to requests for claims and slices.
        bearer: token that every request must have, "" for none.
        faults: answers that replace the next ones, by kind of request. lists, watches, writes:
            received requests.
        before_page: called before each page of a list.
    """

    def __init__(self) -> None:
        super().__init__(KINDS)
        self.dra_refusal: Fault | None = refusal(404, "the server could not find the resource")
        self.bearer = ""
        self.faults: dict[str, deque[Fault]] = {"list": deque(), "watch": deque(), "write": deque()}
        self.lists: list[tuple[str, dict[str, str]]] = []
        self.watches: list[tuple[str, dict[str, str]]] = []
        self.writes: list[tuple[str, str, Object]] = []
        self.write_types: list[str] = []
        self.before_page: Callable[[str], None] = lambda _: None
        self._port = 0
        self._runner: web.AppRunner | None = None

    @override
    def is_selected(self, query: Mapping[str, str], item: Object) -> bool:
        selector = query.get("fieldSelector", "")
        if selector.startswith("spec.driver="):
            return bool(item["spec"]["driver"] == selector.removeprefix("spec.driver="))
        phase = item.get("status", {}).get("phase")
        return not selector or phase != selector.removeprefix("status.phase!=")

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Serve; after a stop on the same port as before."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/api/v1/{resource:nodes|pods}", self._get)
        app.router.add_get(
            "/apis/resource.k8s.io/v1/{resource:resourceclaims|resourceslices}", self._get_dra
        )
        app.router.add_route("*", "/apis/{path:.*}", self._write)
        app.router.add_patch("/api/v1/nodes/{name}", self._write)
        app.router.add_patch("/api/v1/namespaces/{namespace}/pods/{name}", self._write)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop serving, and drop every connection; the objects stay."""
        self.end_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def write_kubeconfig(self, path: Path, user: Object | None = None, **cluster: object) -> Path:
        """Write a kubeconfig for this server."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": self.url, **cluster}}],
            "users": [{"name": "u", "user": user or {}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "u"}}],
            "current-context": "fake",
        }
        path.write_text(json.dumps(config))
        return path

    def delete(self, kind: str, key: str, *, is_watched: bool = True) -> None:
        """Delete an object by "namespace/name"; the namespace of a node is ""."""
        namespace, _, name = key.partition("/")
        assert self.remove(kind, namespace, name, is_watched=is_watched) is not None

    def bookmark(self) -> None:
        """Send every watch a bookmark of the current version."""
        self.next_version()
        for watch in self.watchers:
            watch.lines.put_nowait([self.bookmark_line(watch.kind)])

    def say(self, kind: str, data: bytes) -> None:
        """Send any bytes to the watches of a kind."""
        for watch in self.watchers:
            if watch.kind == kind:
                watch.lines.put_nowait([data])

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a list or a watch without faults."""
        resource = request.match_info["resource"]
        if "watch" not in request.query:
            self.before_page(resource)
        return await self.list_or_watch(request, resource)

    async def _get_dra(self, request: web.Request) -> web.StreamResponse:
        if self.dra_refusal is not None:
            return await self.dra_refusal(request)
        return await self._get(request)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.bearer and request.headers.get("Authorization") != f"Bearer {self.bearer}":
            return web.json_response(status_object(401, "Unauthorized"), status=401)
        kind = "watch" if "watch" in request.query else "list"
        log = self.watches if kind == "watch" else self.lists
        log.append((request.match_info["resource"], dict(request.query)))
        if self.faults[kind]:
            return await self.faults[kind].popleft()(request)
        return await self.answer(request)

    async def _write(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return await refusal(404, "the server could not find the resource")(request)
        body = await request.json()
        self.writes.append((request.method, request.path, body))
        self.write_types.append(request.headers["Content-Type"])
        if self.faults["write"]:
            return await self.faults["write"].popleft()(request)
        return web.json_response(body, status=201)


@contextlib.asynccontextmanager
async def running_kube() -> AsyncIterator[FakeKube]:
    """Run a fake API server."""
    kube = FakeKube()
    await kube.start()
    try:
        yield kube
    finally:
        await kube.stop()


async def eventually(
    condition: Callable[[], object], *, deadline_seconds: float = DEADLINE_SECONDS
) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: the condition did not hold in time.
    """
    async with asyncio.timeout(deadline_seconds):
        while not condition():  # polling, because the parts set no event
            await asyncio.sleep(0.005)
