"""API server with one Lease, for tests of leader election."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

COLLECTION = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"
Object = dict[str, Any]


class LeaseServer:
    """API server with one Lease that detects conflicts, for any number of clients."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.lease: Object | None = None
        self.version = 0
        self.refused: dict[str, int] = {}  # status code by HTTP method
        self.requested: list[str] = []
        self.url = ""

    def edit(self, **spec: object) -> None:
        """Change the Lease as another replica would."""
        self.version += 1
        before = self.lease["spec"] if self.lease else {}
        self.lease = {
            "metadata": {"name": self._name, "resourceVersion": str(self.version)},
            "spec": {**before, **spec},
        }

    async def handle(self, request: web.Request) -> web.Response:
        self.requested.append(request.method)
        status = self.refused.get(request.method)
        if status is not None:
            return _status(status, f'User "x" cannot {request.method} leases')
        if request.method == "PATCH" and request.content_type != "application/merge-patch+json":
            return _status(415, "the body of the request was in an unknown format")
        return {"GET": self._get, "POST": self._create, "PATCH": self._patch}[request.method](
            await request.json() if request.can_read_body else {}
        )

    def _get(self, _: Object) -> web.Response:
        if self.lease is None:
            return _status(404, "leases not found")
        return web.json_response(self.lease)

    def _create(self, body: Object) -> web.Response:
        if self.lease is not None:
            return _status(409, "already exists")
        if body.get("metadata", {}).get("name") != self._name:
            return _status(422, "name or generateName is required")
        self.edit(**body["spec"])
        return web.json_response(self.lease, status=201)

    def _patch(self, body: Object) -> web.Response:
        if self.lease is None:
            return _status(404, "leases not found")
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified")
        spec = {**self.lease["spec"], **body["spec"]}
        self.lease = None
        self.edit(**{key: value for key, value in spec.items() if value is not None})
        return web.json_response(self.lease)


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


@asynccontextmanager
async def serving(name: str) -> AsyncIterator[LeaseServer]:
    """Serve a Lease with this name, which does not exist yet."""
    served = LeaseServer(name)
    app = web.Application()
    app.router.add_route("*", COLLECTION, served.handle)
    app.router.add_route("*", f"{COLLECTION}/{name}", served.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield served
    finally:
        await runner.cleanup()


def write_kubeconfig(folder: Path, url: str) -> Path:
    """Write a kubeconfig for this server, and return its path."""
    path = folder / "kubeconfig"
    path.write_text(
        '{"apiVersion": "v1", "kind": "Config", "current-context": "c",'
        f'"clusters": [{{"name": "k", "cluster": {{"server": "{url}"}}}}],'
        '"contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],'
        '"users": [{"name": "u", "user": {}}]}'
    )
    return path
