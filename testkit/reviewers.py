"""Stand-in for the API server's reviews of tokens and rights."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from extender.kube.client import KubeClient
from extender.kube.token_review import _ACCESS, _TOKENS

AUDIENCE = "idlegpu-api"
EVERYWHERE = ""


@dataclass
class Reviewers:
    """Server of TokenReview and SubjectAccessReview.

    Attributes:
        users: user names by token.
        rights: namespaces in which each user may list pods; `EVERYWHERE` is all.
        is_down: whether every request is answered with 503.
        knows_audiences: whether answers name the token's audience.
        reviewed_rights: reviewed users and namespaces.
        hold: event for which reviews of rights wait; None to answer at once.
    """

    users: dict[str, str] = field(default_factory=dict)
    rights: dict[str, set[str]] = field(default_factory=dict)
    is_down: bool = False
    knows_audiences: bool = True
    reviewed_tokens: list[str] = field(default_factory=list)
    reviewed_rights: list[tuple[str, str]] = field(default_factory=list)
    hold: asyncio.Event | None = None

    async def review_token(self, request: web.Request) -> web.Response:
        spec = (await request.json())["spec"]
        self.reviewed_tokens.append(spec["token"])
        if self.is_down:
            return web.json_response({"message": "out of order"}, status=503)
        user = self.users.get(spec["token"])
        if user is None:
            return web.json_response({"status": {"error": "unknown"}}, status=201)
        status = {
            "authenticated": True,
            "user": {"username": user, "groups": ["tenants"], "extra": {"scope": ["a", "b"]}},
        }
        if self.knows_audiences and "audiences" in spec:
            status["audiences"] = spec["audiences"]
        return web.json_response({"status": status}, status=201)

    async def review_access(self, request: web.Request) -> web.Response:
        spec = (await request.json())["spec"]
        requested = spec["resourceAttributes"]
        self.reviewed_rights.append((spec["user"], requested["namespace"]))
        if self.hold is not None:
            await self.hold.wait()
        if self.is_down:
            return web.json_response({"message": "out of order"}, status=503)
        is_whole = spec["groups"] == ["tenants"] and spec["extra"] == {"scope": ["a", "b"]}
        assert is_whole, "the API server judges by groups and extra, too"
        assert (requested["verb"], requested["resource"]) == ("list", "pods")
        may = self.rights.get(spec["user"], set())
        allowed = EVERYWHERE in may or requested["namespace"] in may
        return web.json_response({"status": {"allowed": allowed}}, status=201)


@asynccontextmanager
async def reviewing(folder: Path) -> AsyncIterator[tuple[Reviewers, KubeClient]]:
    """Run the server while the context is open; yield it with a client."""
    reviewers = Reviewers()
    app = web.Application()
    app.router.add_post(_TOKENS, reviewers.review_token)
    app.router.add_post(_ACCESS, reviewers.review_access)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        path = folder / "kubeconfig"
        path.write_text(kubeconfig(f"http://127.0.0.1:{runner.addresses[0][1]}"))
        client = await KubeClient.connect(path)
        try:
            yield reviewers, client
        finally:
            await client.close()
    finally:
        await runner.cleanup()


def kubeconfig(url: str) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": {"server": url}}],
            "users": [{"name": "it", "user": {}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "current-context": "it",
        }
    )
