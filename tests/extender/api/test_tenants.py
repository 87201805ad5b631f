"""No route of the real application shows another tenant's pods: they are "another pod"."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from extender.api.page.routes import STREAM
from extender.app import Extender
from extender.core.devices.readings import DeviceKey, ForeignProcess
from extender.core.nodes.inventory import PodPhase, PodRecord
from extender.placement.request_log import BypassVerdict
from extender.settings.api import ApiAccess, ApiSettings
from extender.settings.config import Settings
from testkit.builders import GPU
from testkit.cards import BUSY, IDLE, Gpu
from testkit.reviewers import EVERYWHERE, reviewing
from testkit.webhook_requests import Client, MakeClient, names_request
from testkit.world import World

HOSTILE, FRIEND = {"X-Idlegpu-Token": "hostile"}, {"X-Idlegpu-Token": "friend"}
ADMIN = {"X-Idlegpu-Token": "admin"}
NAMESPACE = "hush-tenant"
MEMORY_BYTES = 7_777_777_777
HIDDEN = ("hush", "Hush", str(MEMORY_BYTES))
"""Texts that occur in everything about that tenant's pods: namespaces, names, UIDs, owners,
annotations, messages."""

HUSH_PROCESS = ForeignProcess(
    pid=4711,
    name="hush-python",
    memory_bytes=1 << 30,
    started_at=0.0,
    pod="",
    container="hush.scope",
)

VALUES = {"name": "node-a", "number": "1", "id": "1", "uid": "uid-hush-running", "path": "x"}
"""Values for parameters in a route's path."""

ABOUT = ("hush-tenant/hush-running", "hush-waiting", "uid-hush-running", "uid-hush-waiting")
"""Names and UIDs of another tenant's pods that a caller may know or guess."""

MESSAGE = (
    '0/2 nodes are available: 1 persistentvolumeclaim "hush-data" not found, 1 node(s) had too few '
    "GPUs known to be idle."
)

DEADLINE_SECONDS = 20.0


@dataclass
class Cluster:
    """Application of the real extender, with pods of two tenants."""

    client: Client
    extender: Extender
    app: web.Application

    def paths(self) -> list[str]:
        """Return a path for each route with GET, except the stream, which has no end."""
        found = set()
        for route in self.app.router.routes():
            if route.method == "GET" and route.resource is not None:
                found.add(route.resource.canonical.format(**VALUES))
        return sorted(found - {STREAM})

    async def read(self, path: str, headers: Mapping[str, str], **query: str) -> tuple[int, str]:
        """Return status and text of an answer."""
        async with self.client.get(path, headers=headers, params=query) as response:
            return response.status, await response.text()


def hush_pod(name: str, node: str) -> PodRecord:
    return PodRecord(
        uid=f"uid-{name}",
        namespace=NAMESPACE,
        name=name,
        node=node,
        phase=PodPhase.RUNNING if node else PodPhase.PENDING,
        resources={GPU: 1},
        started_at=0.0 if node else None,
        bound_at=0.0 if node else None,
        memory_bytes=MEMORY_BYTES,
        message="" if node else MESSAGE,
        owner="Job hush-job",
    )


@pytest_asyncio.fixture
async def cluster(tmp_path: Path, aiohttp_client: MakeClient) -> AsyncIterator[Cluster]:
    async with reviewing(tmp_path) as (reviewers, kube):
        reviewers.users |= {"hostile": "mallory", "friend": "alice", "admin": "root"}
        reviewers.rights |= {
            "mallory": {"team"},
            "alice": {"team", NAMESPACE},
            "root": {EVERYWHERE},
        }
        settings = Settings(listen="127.0.0.1:0", api=ApiSettings(access=ApiAccess.TOKEN))
        world = World()
        extender = Extender(settings, kube, lambda: world.now)
        world.fleet, world.placer, world.history = (
            extender.fleet,
            extender.placer,
            extender.history,
        )
        world.add(
            {"node-a": [BUSY, Gpu(tenants=(f"{NAMESPACE}/hush-running",))], "node-b": [IDLE, IDLE]}
        )
        world.add_pod("mine", "node-a")
        extender.fleet.apply_pod(hush_pod("hush-running", "node-a"))
        extender.fleet.apply_pod(hush_pod("hush-waiting", ""))
        world.report({"node-a": [BUSY, Gpu(tenants=(f"{NAMESPACE}/hush-running",))]})
        extender.fleet.note_foreign("node-b", {DeviceKey(("GPU-node-b-0", "")): (HUSH_PROCESS,)})
        world.fleet.snapshot()
        extender.readiness.mark_allocated()
        _note_bypassed_pod(extender)
        app = extender.build_app()
        client = await aiohttp_client(app)
        await _decide(client, "hush-waiting", NAMESPACE)
        await _decide(client, "requester", "team")
        yield Cluster(client, extender, app)


def _note_bypassed_pod(extender: Extender) -> None:
    """Let a pod of the other tenant be bound without a call, as an example of a group."""
    bypassed_pods = extender.bypassed_pods
    record = hush_pod("hush-bypassed", "")
    bypassed_pods.see(record)
    bypassed_pods.see(hush_pod("hush-bypassed", "node-b"))
    bypassed_pods._judge(bypassed_pods._bound.popleft(), BypassVerdict.NOT_CALLED)
    assert bypassed_pods.report().pods[0].example == f"{NAMESPACE}/hush-bypassed"


async def _decide(client: Client, name: str, namespace: str) -> None:
    requester: dict[str, Any] = {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "annotations": {"idlegpu.io/prefer-models": "Hush9000"},
            "ownerReferences": [{"kind": "Job", "name": "hush-job", "controller": True}],
        },
        "spec": {"containers": [{"resources": {"limits": {GPU: "1"}}}]},
        "status": {"phase": "Pending"},
    }
    if namespace != NAMESPACE:
        requester["metadata"] |= {"annotations": {}, "ownerReferences": []}
    request = names_request("node-a", "node-b", requester=requester)
    assert (await client.post("/prioritize", data=json.dumps(request))).status == 200


def leaks(text: str) -> list[str]:
    return [word for word in HIDDEN if word in text]


async def test_every_route_but_the_open_ones_refuses_callers_without_a_token(
    cluster: Cluster,
) -> None:
    answered = {path: (await cluster.read(path, {}))[0] for path in cluster.paths()}

    free = {path for path, status in answered.items() if status != 401}
    assert {"/healthz", "/readyz", "/metrics"} <= free
    # The route of replicas: test_tls_replicas.py tests its callers.
    assert not [path for path in free if path.startswith("/v1/") and "/peers/" not in path]


async def test_no_route_names_another_tenants_pods(cluster: Cluster) -> None:
    seen = {path: await cluster.read(path, HOSTILE) for path in cluster.paths()}

    assert {path: leaks(text) for path, (_, text) in seen.items() if leaks(text)} == {}
    reported = "".join(text for _, text in seen.values())
    # The answers do contain pods: the caller's, and others without a name.
    assert "team/mine" in reported
    assert "another pod" in reported


PARAMETERS = (
    "/v1/holders?idle_for=0",
    "/v1/holders?idle_for=0&some=true",
    "/v1/costs?by=pod",
    "/v1/costs?by=owner",
    "/v1/costs?by=namespace",
    "/v1/explain?pod=team/requester",
    "/v1/explain?number=1",
    "/v1/explain?number=2",
    "/v1/decisions?brief=true",
    "/v1/gpus?node=node-a",
    "/v1/best?gpus=1&limit=5",
    "/v1/pending?limit=1000",
    "/v1/pods?sort=pod",
    "/v1/pods?sort=memory",
    "/v1/pods?search=hush",
)
"""Queries that show more than a path alone."""


async def test_no_parameter_has_another_tenants_pods_named(cluster: Cluster) -> None:
    cluster.extender.pod_routes.idleness.look()
    for path in PARAMETERS:
        status, text = await cluster.read(path, HOSTILE)
        # A decision about another tenant's pod is listed for all callers, and explained only to
        # permitted ones.
        assert status == 200 or path == "/v1/explain?number=1", (path, text)
        assert leaks(text) == [], path
    own = {"spec": {"containers": [{"resources": {"limits": {GPU: "1"}}}]}}

    async with cluster.client.post("/v1/explain", headers=HOSTILE, json=own) as response:
        assert response.status == 200
        assert leaks(await response.text()) == []


async def test_callers_with_rights_see_pods_by_name(cluster: Cluster) -> None:
    cluster.extender.pod_routes.idleness.look()
    by_path = {path: (await cluster.read(path, FRIEND))[1] for path in cluster.paths()}

    naming = {path for path, text in by_path.items() if leaks(text)}
    paths = {"nodes", "nodes/node-a", "gpus", "decisions", "bypassed", "pending", "pods"}
    assert {f"/v1/{path}" for path in paths} <= naming
    for path in ("/v1/holders?idle_for=0", "/v1/costs?by=pod", "/v1/explain?number=1"):
        assert leaks((await cluster.read(path, FRIEND))[1]), path


async def test_foreign_processes_show_only_to_callers_who_may_list_all_pods(
    cluster: Cluster,
) -> None:
    for path in ("/v1/gpus?node=node-b", "/v1/nodes/node-b", "/v1/page/nodes/node-b"):
        seen = {}
        for name, headers in {"friend": FRIEND, "admin": ADMIN}.items():
            status, text = await cluster.read(path, headers)
            assert status == 200
            seen[name] = [gpu["foreign_processes"] for gpu in json.loads(text)["gpus"]]

        assert seen["friend"] == [[], []], path
        assert seen["admin"][1] == []
        assert seen["admin"][0] == [
            {
                "pid": 4711,
                "name": "hush-python",
                "memory_bytes": 1 << 30,
                "started_at": "1970-01-01T00:00:00.000+00:00",
                "pod": "",
                "container": "hush.scope",
            }
        ]


@pytest.mark.parametrize("about", ABOUT)
async def test_another_tenants_pod_looks_like_a_missing_pod(cluster: Cluster, about: str) -> None:
    missing = about.replace("hush", "none")

    for path in cluster.paths():
        if not path.startswith("/v1/"):
            continue
        for parameter, requested, other in (
            ("pod", about, missing),
            ("namespace", NAMESPACE, "none-tenant"),
        ):
            there = await cluster.read(path, HOSTILE, **{parameter: requested})
            absent = await cluster.read(path, HOSTILE, **{parameter: other})

            assert there[0] == absent[0], (path, parameter)
            assert _timeless(there[1].replace("hush", "none")) == _timeless(absent[1]), path


def _timeless(text: str) -> str:
    """Return an answer without its numbers, because ages change."""
    return re.sub(r"[0-9][-0-9.:eT]*", "0", text)


async def test_the_stream_reports_another_tenants_decision_without_its_name(
    cluster: Cluster,
) -> None:
    page = asyncio.create_task(cluster.extender.page.run(), name="page")
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            async with cluster.client.get(STREAM, headers=HOSTILE) as response:
                assert response.status == 200
                text = (await response.content.readany()).decode()
                await _decide(cluster.client, "hush-waiting", NAMESPACE)
                while '"decisions"' not in text:
                    text += (await response.content.readany()).decode()
    finally:
        page.cancel()
        await asyncio.wait([page])

    assert "another pod" in text
    assert leaks(text) == []


async def test_another_tenants_decision_shows_the_node_without_the_pod(cluster: Cluster) -> None:
    _, text = await cluster.read("/v1/decisions", HOSTILE)

    own, other = json.loads(text)["decisions"]
    assert own["pod"] == "team/requester"
    assert (other["pod"], other["uid"], other["request"]) == (
        "another pod",
        None,
        {"resources": {GPU: 1}},
    )
    assert other["node"] == own["node"]
    assert set(other["nodes"]) == {"node-a", "node-b"}


async def test_no_metric_names_a_pod_or_a_namespace(cluster: Cluster) -> None:
    status, text = await cluster.read("/metrics", {})

    assert status == 200
    assert "idlegpu_gpu_pods 3.0" in text
    assert leaks(text) == []
    assert "team" not in text
    labels = {"pod", "namespace", "uid", "owner", "exported_pod", "exported_namespace"}
    for family in cluster.extender.metrics.registry.collect():
        for sample in family.samples:
            assert not labels & set(sample.labels), family.name


async def test_replicas_are_not_reported_where_none_can_be_authenticated(cluster: Cluster) -> None:
    status, text = await cluster.read("/v1/peers/decisions", FRIEND)

    assert status == 403
    assert leaks(text) == []
