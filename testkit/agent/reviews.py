"""Fake TokenReview API, and tokens of agents."""

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from extender.kube.client import KubeClient
from extender.sources.agents.tokens import NODE_NAME, POD_NAME, POD_UID

AUDIENCE = "idlegpu-extender"
ACCOUNT = "system:serviceaccount:idlegpu-agent:idlegpu-agent"


def token(
    node: str, *, audience: str = AUDIENCE, account: str = ACCOUNT, expires_at: float | None = None
) -> str:
    """Build a token of a pod on a node."""
    claims = {
        "aud": [audience],
        "sub": account,
        "exp": time.time() + 3600 if expires_at is None else expires_at,
        "node": node,
    }
    parts = [{"alg": "RS256"}, claims, {"sig": "none"}]
    return ".".join(
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts
    )


@dataclass
class Reviews:
    """Fake API server that reviews a token by its own claims, or by an answer that the test sets.

    Attributes:
        requested: tokens that were reviewed.
        answers: answers by token, in place of its claims.
        pods: pods by URL path.
        is_down: whether every request is answered with 503.
        has_nodes: whether tokens are bound to nodes, and not only to pods.
    """

    requested: list[str] = field(default_factory=list)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_down: bool = False
    has_nodes: bool = True

    async def review(self, request: web.Request) -> web.Response:
        body = await request.json()
        given = body["spec"]["token"]
        self.requested.append(given)
        if self.is_down:
            return web.json_response({"message": "out of order"}, status=503)
        if given in self.answers:
            return web.json_response({"status": self.answers[given]}, status=201)
        claims = json.loads(base64.urlsafe_b64decode(given.split(".")[1] + "==="))
        extra = {POD_NAME: [f"agent-{claims['node']}"], POD_UID: [f"uid-{claims['node']}"]}
        if self.has_nodes:
            extra[NODE_NAME] = [claims["node"]]
        status = {
            "authenticated": True,
            "audiences": body["spec"]["audiences"],
            "user": {"username": claims["sub"], "extra": extra},
        }
        return web.json_response({"status": status}, status=201)

    async def pod(self, request: web.Request) -> web.Response:
        found = self.pods.get(request.path)
        if found is None:
            return web.json_response({"message": "no such pod"}, status=404)
        return web.json_response(found)


@contextlib.asynccontextmanager
async def reviewing(tmp_path: Path) -> AsyncIterator[tuple[Reviews, KubeClient]]:
    """Run the fake API server; yield it and a client of it."""
    reviews = Reviews()
    app = web.Application()
    app.router.add_post("/apis/authentication.k8s.io/v1/tokenreviews", reviews.review)
    app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}", reviews.pod)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        path = tmp_path / "kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "it", "cluster": {"server": url}}],
                    "users": [{"name": "it", "user": {}}],
                    "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
                    "current-context": "it",
                }
            )
        )
        client = await KubeClient.connect(path)
        try:
            yield reviews, client
        finally:
            await client.close()
            await asyncio.sleep(0)
    finally:
        await runner.cleanup()
