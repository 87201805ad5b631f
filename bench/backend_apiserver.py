"""The API server of the benchmarks: lists in pages, watches with bookmarks, counts writes.

Objects are rendered when they are sent. What is not asked for by the extender is not there.
"""

import asyncio
import base64
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final

import orjson
from aiohttp import web

from bench.backend_fleet import BenchFleet, BenchNode
from bench.backend_objects import BenchPod, render_pod

BOOKMARK_SECONDS: Final = 60.0
REMEMBERED_EVENTS: Final = 20_000
"""A watch that is further behind is told 410, as by a real server whose cache is small."""
CHUNK_BYTES: Final = 1 << 18
"""So much of a burst is written before others have their turn."""

_KINDS: Final = {"nodes": b"Node", "pods": b"Pod"}


class ApiServer:
    """Serves a fleet's nodes and pods, and says what changes.

    Attributes:
        version: resource version of the last change.
        writes: writes taken, by method and kind of object.

    Args:
        fleet: the cluster.
    """

    def __init__(self, fleet: BenchFleet) -> None:
        self.version = 1000
        self.writes: dict[str, int] = {}
        self._fleet = fleet
        self._oldest = self.version
        self._log: deque[tuple[int, str, bytes]] = deque(maxlen=REMEMBERED_EVENTS)
        self._watches: dict[str, set[asyncio.Queue[Sequence[bytes] | None]]] = {
            kind: set() for kind in _KINDS
        }
        self._lists: dict[str, tuple[int, Sequence[BenchNode] | Sequence[BenchPod]]] = {}
        self._tokens = count()
        self._gone: set[str] = set()
        self._objects: dict[str, dict[str, object]] = {}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/version", _version),
            web.get("/api/v1/{kind:nodes|pods}", self._list_or_watch),
            web.route("*", "/api/v1/nodes/{name}", self._note),
            web.route("*", "/{any:api/.+/events.*}", self._note),
            web.route("*", "/{any:apis/.+/events.*}", self._note),
            web.route("*", "/{path:apis/.+/(leases|csistoragecapacities).*}", self._store),
            web.post("/apis/authentication.k8s.io/v1/tokenreviews", self._review),
        ]

    # --- what changes ---------------------------------------------------------------------------

    def tell_nodes(self, event: bytes, nodes: Iterable[BenchNode]) -> int:
        """Tell the watches of nodes that were ADDED, MODIFIED or DELETED; return how many."""
        lines = []
        for node in nodes:
            self.version = node.version = self.version + 1
            if event == b"DELETED":
                self._gone.add(node.name)
            else:
                self._gone.discard(node.name)
                node.heartbeat = b"%d" % self.version
            lines.append(_line(event, node.render()))
            self._log.append((self.version, "nodes", lines[-1]))
        self._publish("nodes", lines)
        return len(lines)

    def tell_pods(self, event: bytes, pods: Iterable[BenchPod]) -> int:
        """Tell the watches of pods that were ADDED, MODIFIED or DELETED; return how many."""
        lines = []
        for pod in pods:
            self.version = pod.version = self.version + 1
            lines.append(_line(event, render_pod(pod)))
            self._log.append((self.version, "pods", lines[-1]))
        self._publish("pods", lines)
        return len(lines)

    def close_watches(self, *, expired: bool) -> None:
        """End all watches; `expired`: nothing before now is remembered, so they must list anew."""
        if expired:
            self._oldest = self.version = self.version + 1
            self._log.clear()
        for queues in self._watches.values():
            for queue in queues:
                queue.put_nowait(None)

    @property
    def watches(self) -> int:
        """How many watches are open."""
        return sum(map(len, self._watches.values()))

    def _publish(self, kind: str, lines: Sequence[bytes]) -> None:
        if lines:
            for queue in self._watches[kind]:
                queue.put_nowait(lines)

    # --- what is asked ----------------------------------------------------------------------------

    async def _list_or_watch(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        if request.query.get("watch") in {"1", "true"}:
            return await self._watch(request, kind)
        return self._page(request, kind)

    def _page(self, request: web.Request, kind: str) -> web.Response:
        """Answer one page; the pages of one list show one moment, as the real server's do."""
        size = int(request.query.get("limit", 0)) or len(self._fleet.pods) + len(self._fleet.nodes)
        token = request.query.get("continue", "")
        if token:
            name, _, position = token.partition(":")
            if name not in self._lists:
                return _expired()
            version, items = self._lists[name]
            start = int(position)
        else:
            name, start, version = str(next(self._tokens)), 0, self.version
            items = self._items(kind)
            self._lists[name] = version, items
        end = start + size
        bodies = [
            item.render() if isinstance(item, BenchNode) else render_pod(item)
            for item in items[start:end]
        ]
        metadata: dict[str, object] = {"resourceVersion": str(version)}
        if end < len(items):
            metadata["continue"] = f"{name}:{end}"
            metadata["remainingItemCount"] = len(items) - end
        else:
            del self._lists[name]
        head = b'{"kind":"%bList","apiVersion":"v1","metadata":%b,"items":[' % (
            _KINDS[kind],
            orjson.dumps(metadata),
        )
        return _json(b"".join((head, b",".join(bodies), b"]}\n")))

    def _items(self, kind: str) -> Sequence[BenchNode] | Sequence[BenchPod]:
        if kind == "pods":
            return list(self._fleet.pods.values())
        return [node for node in self._fleet.nodes if node.name not in self._gone]

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        since = int(request.query.get("resourceVersion", 0))
        if since < self._oldest or (self._log and since + 1 < self._log[0][0]):
            status = b'{"kind":"Status","status":"Failure","reason":"Expired","code":410}'
            await response.write(_line(b"ERROR", status))
            return response
        queue: asyncio.Queue[Sequence[bytes] | None] = asyncio.Queue()
        queue.put_nowait([line for at, what, line in self._log if at > since and what == kind])
        self._watches[kind].add(queue)
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", 3600))):
                while (lines := await self._next(queue, kind)) is not None:
                    await _write(response, lines)
        except (TimeoutError, ConnectionResetError):
            pass
        finally:
            self._watches[kind].discard(queue)
        return response

    async def _next(
        self, queue: asyncio.Queue[Sequence[bytes] | None], kind: str
    ) -> Sequence[bytes] | None:
        try:
            async with asyncio.timeout(BOOKMARK_SECONDS):
                return await queue.get()
        except TimeoutError:
            bookmark = b'{"kind":"%b","apiVersion":"v1","metadata":{"resourceVersion":"%d"}}'
            return [_line(b"BOOKMARK", bookmark % (_KINDS[kind], self.version))]

    async def _note(self, request: web.Request) -> web.Response:
        """Take a write, and forget it."""
        body = await request.read()
        kind = "events" if "events" in request.path else "nodes"
        self._count(request.method, kind)
        return _json(body or b"{}", 201 if request.method == "POST" else 200)

    async def _store(self, request: web.Request) -> web.Response:
        """Keep leases and storage capacities, merged as a merge patch merges them."""
        self._count(request.method, request.match_info["path"].split("/")[-2])
        path = request.path
        if request.method == "POST":
            raw = orjson.loads(await request.read())
            path = f"{path}/{raw['metadata']['name']}"
            if path in self._objects:
                return _json(b'{"kind":"Status","reason":"AlreadyExists","code":409}', 409)
            self._objects[path] = raw
        elif path not in self._objects:
            return _json(b'{"kind":"Status","reason":"NotFound","code":404}', 404)
        elif request.method == "PATCH":
            self._objects[path] = _merged(self._objects[path], orjson.loads(await request.read()))
        elif request.method == "DELETE":
            del self._objects[path]
            return _json(b"{}")
        stored = self._objects[path]
        if request.method != "GET":
            self.version += 1
            version = {"resourceVersion": str(self.version)}
            stored["metadata"] = {**_mapping(stored, "metadata"), **version}
        return _json(orjson.dumps(stored), 201 if request.method == "POST" else 200)

    def _count(self, method: str, kind: str) -> None:
        key = f"{method} {kind}"
        self.writes[key] = self.writes.get(key, 0) + 1

    async def _review(self, request: web.Request) -> web.Response:
        """Believe what a token says of itself; its last part names the node."""
        spec = orjson.loads(await request.read())["spec"]
        claims = spec["token"].split(".")
        body = orjson.loads(base64.urlsafe_b64decode(claims[1] + "=" * (-len(claims[1]) % 4)))
        extra = {"authentication.kubernetes.io/node-name": [body["node"]]}
        status = {
            "authenticated": True,
            "audiences": spec["audiences"],
            "user": {"username": body["sub"], "extra": extra},
        }
        return web.Response(
            body=orjson.dumps({"status": status}), status=201, content_type="application/json"
        )


async def _write(response: web.StreamResponse, lines: Sequence[bytes]) -> None:
    """Write lines in pieces of a few hundred kilobytes."""
    piece: list[bytes] = []
    size = 0
    for line in lines:
        piece.append(line)
        size += len(line)
        if size >= CHUNK_BYTES:
            await response.write(b"".join(piece))
            piece, size = [], 0
            await asyncio.sleep(0)
    if piece:
        await response.write(b"".join(piece))


def _line(event: bytes, item: bytes) -> bytes:
    return b'{"type":"%b","object":%b}\n' % (event, item)


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _expired() -> web.Response:
    return _json(b'{"kind":"Status","status":"Failure","reason":"Expired","code":410}', 410)


async def _version(_: web.Request) -> web.Response:
    return _json(b'{"major":"1","minor":"37","gitVersion":"v1.37.2+bench"}')


def _mapping(value: dict[str, object], name: str) -> dict[str, object]:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def _merged(value: dict[str, object], patch: dict[str, object]) -> dict[str, object]:
    """Merge as RFC 7386 says."""
    merged = dict(value)
    for name, change in patch.items():
        if change is None:
            merged.pop(name, None)
        elif isinstance(change, dict):
            merged[name] = _merged(_mapping(merged, name), change)
        else:
            merged[name] = change
    return merged
