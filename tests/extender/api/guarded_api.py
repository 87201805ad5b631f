"""API with one pod of each of two tenants, behind its access checks."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from extender.api.access import Access
from extender.kube.client import KubeClient
from extender.runtime.metrics import Metrics
from extender.server.json_api import json_answer
from extender.server.redaction import VIEWER, pod_name
from extender.settings.api import ApiSettings
from testkit.reviewers import Reviewers, reviewing
from testkit.webhook_requests import Client, MakeClient

TOKEN = "token-of-alice"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
OPEN_PATHS = ("/healthz", "/readyz", "/metrics", "/", "/page", "/page/app.js", "/webhook")


@dataclass
class GuardedApi:
    """API with one pod in each namespace, and its clock."""

    reviewers: Reviewers
    kube: KubeClient
    metrics: Metrics
    now: float
    open: Callable[..., Awaitable[Client]]

    def count(self, outcome: str) -> float:
        value = self.metrics.registry.get_sample_value(
            "idlegpu_api_requests_total", {"outcome": outcome}
        )
        return value or 0.0


@asynccontextmanager
async def guarded_api(tmp_path: Path, aiohttp_client: MakeClient) -> AsyncIterator[GuardedApi]:
    """Build the API with a stand-in for the API server, and yield it."""
    async with reviewing(tmp_path) as (reviewers, kube):
        reviewers.users[TOKEN] = "alice"
        metrics = Metrics()

        async def pods(_: web.Request) -> web.Response:
            return json_answer({"pods": [pod_name("blue", "a"), pod_name("red", "b")]})

        async def late(_: web.Request) -> web.Response:
            await VIEWER.get().learn(["green"])
            return json_answer({"pods": [pod_name("green", "c")]})

        async def make(*, is_open: bool = False, **settings: Any) -> Client:
            access = Access(
                kube,
                ApiSettings(**settings),
                is_open=is_open,
                namespaces=lambda: frozenset({"blue", "red"}),
                requests=metrics.api_requests,
                monotonic=lambda: found.now,
            )
            app = web.Application(middlewares=[access.guard({"/webhook"})])
            app.add_routes(access.routes())
            for path in ("/v1/pods", *OPEN_PATHS):
                app.router.add_get(path, pods)
            app.router.add_get("/v1/late", late)
            return await aiohttp_client(app)

        found = GuardedApi(reviewers, kube, metrics, 1000.0, make)
        yield found


async def shown(client: Client, **headers: str) -> list[str]:
    response = await client.get("/v1/pods", headers=headers or BEARER)
    assert response.status == 200, await response.text()
    pods: list[str] = (await response.json())["pods"]
    return pods
