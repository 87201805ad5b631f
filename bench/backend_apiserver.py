"""Simulated API server: lists in pages, watches with bookmarks, counts writes.

Objects are rendered when they are sent. Routes that the extender does not use are missing.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import orjson
from aiohttp import web
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from bench.backend_fleet import BenchFleet, BenchNode
from bench.backend_objects import BenchPod, render_pod
from testkit.apiserver import ApiServer, Change, event_line, json_response

KINDS: Final = {"nodes": "Node", "pods": "Pod"}


class BenchApiServer(ApiServer):
    """API server that serves a fleet's nodes and pods, and sends their changes to watches.

    Attributes:
        writes: count of writes, by method and kind of object.

    Args:
        fleet: the cluster.
    """

    def __init__(self, fleet: BenchFleet) -> None:
        super().__init__(KINDS)
        self.writes: dict[str, int] = {}
        self._fleet = fleet
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

    @override
    def selected(self, kind: str, query: Mapping[str, str]) -> Sequence[BenchNode | BenchPod]:
        if kind == "pods":
            return list(self._fleet.pods.values())
        return [node for node in self._fleet.nodes if node.name not in self._gone]

    @override
    def render(self, item: BenchNode | BenchPod) -> bytes:
        return item.render() if isinstance(item, BenchNode) else render_pod(item)

    def send_nodes(self, event: str, nodes: Iterable[BenchNode]) -> int:
        """Send nodes that were ADDED, MODIFIED or DELETED to the watches; return their number."""
        changes = []
        for node in nodes:
            node.version = self.next_version()
            if event == "DELETED":
                self._gone.add(node.name)
            else:
                self._gone.discard(node.name)
                node.heartbeat = b"%d" % self.version
            changes.append(self._change("nodes", event, node.render()))
        self.publish(changes)
        return len(changes)

    def send_pods(self, event: str, pods: Iterable[BenchPod]) -> int:
        """Send pods that were ADDED, MODIFIED or DELETED to the watches; return their number."""
        changes = []
        for pod in pods:
            pod.version = self.next_version()
            changes.append(self._change("pods", event, render_pod(pod)))
        self.publish(changes)
        return len(changes)

    def _change(self, kind: str, event: str, item: bytes) -> Change:
        lines = (event_line(event, item),)
        return Change(version=self.version, kind=kind, lines=lambda _: lines)

    def close_watches(self, *, expired: bool) -> None:
        """End all watches; after `expired`, clients must list again."""
        if expired:
            self.next_version()
            self.expire()
        self.end_watches()

    async def _list_or_watch(self, request: web.Request) -> web.StreamResponse:
        return await self.list_or_watch(request, request.match_info["kind"])

    async def _note(self, request: web.Request) -> web.Response:
        """Accept a write without storing it."""
        body = await request.read()
        kind = "events" if "events" in request.path else "nodes"
        self._count(request.method, kind)
        return json_response(body or b"{}", 201 if request.method == "POST" else 200)

    async def _store(self, request: web.Request) -> web.Response:
        """Store leases and storage capacities; apply a patch as a merge patch."""
        self._count(request.method, request.match_info["path"].split("/")[-2])
        path = request.path
        if request.method == "POST":
            raw = orjson.loads(await request.read())
            path = f"{path}/{raw['metadata']['name']}"
            if path in self._objects:
                return json_response(b'{"kind":"Status","reason":"AlreadyExists","code":409}', 409)
            self._objects[path] = raw
        elif path not in self._objects:
            return json_response(b'{"kind":"Status","reason":"NotFound","code":404}', 404)
        elif request.method == "PATCH":
            self._objects[path] = _merged(self._objects[path], orjson.loads(await request.read()))
        elif request.method == "DELETE":
            del self._objects[path]
            return json_response(b"{}")
        stored = self._objects[path]
        if request.method != "GET":
            self.version += 1
            version = {"resourceVersion": str(self.version)}
            stored["metadata"] = {**_mapping(stored, "metadata"), **version}
        return json_response(orjson.dumps(stored), 201 if request.method == "POST" else 200)

    def _count(self, method: str, kind: str) -> None:
        key = f"{method} {kind}"
        self.writes[key] = self.writes.get(key, 0) + 1

    async def _review(self, request: web.Request) -> web.Response:
        """Accept any token and answer its own claims; the token's last part names the node."""
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


async def _version(_: web.Request) -> web.Response:
    return json_response(b'{"major":"1","minor":"37","gitVersion":"v1.37.2+bench"}')


def _mapping(value: dict[str, object], name: str) -> dict[str, object]:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def _merged(value: dict[str, object], patch: dict[str, object]) -> dict[str, object]:
    """Apply a JSON merge patch (RFC 7386)."""
    merged = dict(value)
    for name, change in patch.items():
        if change is None:
            merged.pop(name, None)
        elif isinstance(change, dict):
            merged[name] = _merged(_mapping(merged, name), change)
        else:
            merged[name] = change
    return merged
