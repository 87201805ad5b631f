"""A stand-in for the API server: a real HTTP server that lists, watches, and fails on demand."""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
from aiohttp import web

from testkit.controlplane.waiting import DEADLINE_SECONDS

Object = dict[str, Any]
Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]

KINDS: Final = {
    "nodes": "NodeList",
    "pods": "PodList",
    "resourceclaims": "ResourceClaimList",
    "resourceslices": "ResourceSliceList",
}
END: Final = b""


def key_of(raw: Object) -> str:
    """Return namespace and name of an object."""
    return f"{raw['metadata'].get('namespace', '')}/{raw['metadata']['name']}"


def is_selected(query: Mapping[str, str], raw: Object) -> bool:
    """Whether an object is in the selection; the selectors that the product uses are known."""
    selector = query.get("fieldSelector", "")
    if selector.startswith("spec.driver="):
        return bool(raw["spec"]["driver"] == selector.removeprefix("spec.driver="))
    return not selector or raw.get("status", {}).get("phase") != selector.removeprefix(
        "status.phase!="
    )


def line(kind: str, raw: Object) -> bytes:
    """Return an event as one line of a watch."""
    return orjson.dumps({"type": kind, "object": raw}) + b"\n"


def status_object(code: int, message: str) -> Object:
    """Return what the API server says when it refuses."""
    return {"kind": "Status", "status": "Failure", "code": code, "message": message}


def refusal(code: int, message: str, **headers: str) -> Fault:
    """Return a fault: a refusal as the API server words it."""

    async def fault(_: web.Request) -> web.StreamResponse:
        return web.json_response(status_object(code, message), status=code, headers=headers)

    return fault


def answer(body: bytes, content_type: str = "application/json") -> Fault:
    """Return a fault: status 200 with any body."""

    async def fault(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type)

    return fault


@dataclass
class Watcher:
    """A watch that is open."""

    resource: str
    query: Mapping[str, str]
    lines: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)


class FakeKube:
    """Holds nodes and pods, serves them, and keeps what it was asked.

    Claims and slices too, where `dra_refusal` is None.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {resource: {} for resource in KINDS}
        self.dra_refusal: Fault | None = refusal(404, "the server could not find the resource")
        self.version = 1000
        self.oldest = 0  # changes up to this version are forgotten
        self.bearer = ""  # required of every request, where set
        self.faults: dict[str, deque[Fault]] = {"list": deque(), "watch": deque(), "write": deque()}
        self.lists: list[tuple[str, dict[str, str]]] = []
        self.watches: list[tuple[str, dict[str, str]]] = []
        self.writes: list[tuple[str, str, Object]] = []
        self.write_types: list[str] = []
        self.before_page: Callable[[str], None] = lambda _: None
        self.watchers: list[Watcher] = []
        self._history: list[tuple[int, str, Object, Object | None]] = []
        self._continues: dict[str, tuple[list[Object], int]] = {}
        self._port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Serve; on the same port as before, if it was stopped."""
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
        """Stop serving, and drop every connection; what is held stays."""
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

    def put(self, resource: str, raw: Object, *, is_watched: bool = True) -> None:
        """Create or change an object; unless `is_watched`, watches lose the change."""
        self.version += 1
        raw = {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(self.version)}}
        before = self.objects[resource].get(key_of(raw))
        self.objects[resource][key_of(raw)] = raw
        self._notify_watchers(resource, raw, before, is_watched=is_watched)

    def delete(self, resource: str, key: str, *, is_watched: bool = True) -> None:
        """Delete an object."""
        self.version += 1
        before = self.objects[resource].pop(key)
        gone = {
            **before,
            "metadata": {**before["metadata"], "resourceVersion": str(self.version)},
            "gone": True,
        }
        self._notify_watchers(resource, gone, before, is_watched=is_watched)

    def bookmark(self) -> None:
        """Send every watch a bookmark of the present version."""
        self.version += 1
        for watcher in self.watchers:
            watcher.lines.put_nowait(
                line("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})
            )

    def say(self, resource: str, data: bytes) -> None:
        """Send the watches of a resource any bytes."""
        for watcher in self.watchers:
            if watcher.resource == resource:
                watcher.lines.put_nowait(data)

    def end_watches(self) -> None:
        """End every watch."""
        for watcher in self.watchers:
            watcher.lines.put_nowait(END)

    def expire(self) -> None:
        """Forget all past changes: a watch from an older version gets 410."""
        self.oldest = self.version
        self._continues.clear()

    def _notify_watchers(
        self, resource: str, raw: Object, before: Object | None, *, is_watched: bool
    ) -> None:
        self._history.append((self.version, resource, raw, before))
        for watcher in self.watchers:
            if watcher.resource == resource and is_watched:
                for event in self._events(watcher.query, raw, before):
                    watcher.lines.put_nowait(event)

    def _events(self, query: Mapping[str, str], raw: Object, before: Object | None) -> list[bytes]:
        """Return the event of a change as a watch with this selection sees it."""
        was_in = before is not None and is_selected(query, before)
        is_in = "gone" not in raw and is_selected(query, raw)
        if is_in:
            return [line("MODIFIED" if was_in else "ADDED", raw)]
        if was_in and before is not None:
            version = raw["metadata"]["resourceVersion"]
            last = {**before, "metadata": {**before["metadata"], "resourceVersion": version}}
            return [line("DELETED", last)]
        return []

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
        return await (self._watch(request) if kind == "watch" else self._list(request))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        resource = request.match_info["resource"]
        token = request.query.get("continue")
        self.before_page(resource)
        if token is None:
            selected = [
                raw for raw in self.objects[resource].values() if is_selected(request.query, raw)
            ]
            rest, version = selected, self.version
        elif token in self._continues:
            rest, version = self._continues.pop(token)
        else:
            return web.json_response(status_object(410, "continue token is too old"), status=410)
        limit = int(request.query.get("limit", "0")) or len(rest) + 1
        metadata = {"resourceVersion": str(version)}
        if len(rest) > limit:
            metadata["continue"] = f"c{resource}{len(rest)}-{version}"
            self._continues[metadata["continue"]] = (rest[limit:], version)
        page = {"kind": KINDS[resource], "metadata": metadata, "items": rest[:limit]}
        return web.Response(body=orjson.dumps(page), content_type="application/json")

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        resource = request.match_info["resource"]
        version = int(request.query["resourceVersion"])
        if version < self.oldest:
            return web.json_response(status_object(410, "too old resource version"), status=410)
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        watcher = Watcher(resource, dict(request.query))
        for at, changed, raw, before in self._history:
            if at > version and changed == resource:
                for event in self._events(watcher.query, raw, before):
                    watcher.lines.put_nowait(event)
        self.watchers.append(watcher)
        try:
            while (data := await watcher.lines.get()) != END:
                await response.write(data)
        finally:
            self.watchers.remove(watcher)
        return response

    async def _write(self, request: web.Request) -> web.StreamResponse:
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
        TimeoutError: it did not in time.
    """
    async with asyncio.timeout(deadline_seconds):
        while not condition():  # any condition, of parts that set no event
            await asyncio.sleep(0.005)
