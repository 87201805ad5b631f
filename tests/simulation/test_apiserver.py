"""The simulated API server, as kubernetes-asyncio and plain HTTP see it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from kubernetes_asyncio import client
from kubernetes_asyncio.config import new_client_from_config

from simulation.apiserver import build_app
from simulation.cluster import kubeconfig_text
from simulation.control import SimulatedControlPlane
from simulation.kubelet import pod_ref
from simulation.objects import JsonObject, child, pod_object
from simulation.objectstore import Kind
from simulation.serving import serve
from tests.simulation.builders import fleet, pod, spec

BINDING = {"apiVersion": "v1", "kind": "Binding", "target": {"kind": "Node", "name": "node-a"}}


@pytest.fixture
def control() -> SimulatedControlPlane:
    built = fleet(spec(cards=2), spec("node-b", cards=4))
    built.place(pod("tenant"), "node-b", "nvidia.com/gpu", 4)
    return SimulatedControlPlane(fleet=built)


@pytest.fixture
async def url(control: SimulatedControlPlane) -> AsyncIterator[str]:
    async with serve(build_app(control, bookmark_seconds=0.05)) as base:
        yield base


@pytest.fixture
async def http(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url) as session:
        yield session


@asynccontextmanager
async def watching(
    http: aiohttp.ClientSession, kind: Kind, **parameters: str
) -> AsyncIterator[AsyncIterator[JsonObject]]:
    """Open a watch; yield its events one by one."""
    async with http.get(f"/api/v1/{kind}", params={"watch": "1", **parameters}) as response:
        yield _events(response)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[JsonObject]:
    async for line in response.content:
        event: JsonObject = orjson.loads(line)
        yield event


async def take(events: AsyncIterator[JsonObject], count: int) -> list[tuple[str, str]]:
    """Return type and name of the next events."""
    taken: list[tuple[str, str]] = []
    async with asyncio.timeout(30):
        while len(taken) < count:
            event = await anext(events)
            metadata = child(child(event, "object"), "metadata")
            taken.append((str(event["type"]), str(metadata.get("name", ""))))
    return taken


async def test_kubernetes_asyncio_lists_nodes_and_pods_through_the_kubeconfig(
    url: str, tmp_path: Path
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig_text(url))

    async with await new_client_from_config(config_file=str(path)) as api_client:
        api = client.CoreV1Api(api_client)
        nodes, pods = await api.list_node(), await api.list_pod_for_all_namespaces(limit=500)
        version = await client.VersionApi(api_client).get_code()

    assert [node.metadata.name for node in nodes.items] == ["node-a", "node-b"]
    assert nodes.items[0].status.allocatable["nvidia.com/gpu"] == "2"
    assert [(item.metadata.name, item.spec.node_name) for item in pods.items] == [
        ("tenant", "node-b")
    ]
    assert version.git_version.startswith("v1.37")


async def test_kubernetes_asyncio_watches_raw_lines(
    url: str, control: SimulatedControlPlane
) -> None:
    configuration = client.Configuration(host=url)
    async with client.ApiClient(configuration) as api_client:
        api = client.CoreV1Api(api_client)
        version = str(control.store.version)
        control.create_pod(pod_object("fresh"))

        response: Any = await api.list_pod_for_all_namespaces(  # untyped when not decoded
            watch=True, resource_version=version, _preload_content=False
        )
        async with asyncio.timeout(30):
            line = await response.content.readline()
        response.close()

    event = orjson.loads(line)
    assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", "fresh")


async def test_a_pod_is_created_pending_with_a_uid(http: aiohttp.ClientSession) -> None:
    response = await http.post("/api/v1/namespaces/ml/pods", json={"metadata": {"name": "a"}})
    created = await response.json()

    assert response.status == 201
    assert created["metadata"]["namespace"] == "ml"
    assert len(created["metadata"]["uid"]) == 36
    assert created["status"]["phase"] == "Pending"
    assert created["spec"]["schedulerName"] == "default-scheduler"


async def test_binding_places_the_pod_on_the_fleet_and_runs_it(
    http: aiohttp.ClientSession, control: SimulatedControlPlane
) -> None:
    control.create_pod(pod_object("a"))

    response = await http.post("/api/v1/namespaces/default/pods/a/binding", json=BINDING)
    running = await (await http.get("/api/v1/namespaces/default/pods/a")).json()

    assert response.status == 201
    assert running["spec"]["nodeName"] == "node-a"
    assert running["status"]["phase"] == "Running"
    assert running["metadata"]["uid"] in control.fleet.placements


async def test_a_pod_that_does_not_fit_fails_as_a_kubelet_would_have_it(
    control: SimulatedControlPlane,
) -> None:
    control.create_pod(pod_object("a"))

    failed = control.bind("default", "a", "node-b")

    assert child(failed, "status")["phase"] == "Failed"
    assert child(failed, "status")["reason"] == "UnexpectedAdmissionError"


async def test_an_ended_pod_frees_its_devices(control: SimulatedControlPlane) -> None:
    control.create_pod(pod_object("a"))
    running = control.bind("default", "a", "node-a")

    ended = control.end_pod("default", "a", is_failed=True)

    assert child(ended, "status")["phase"] == "Failed"
    assert "'exitCode': 1" in str(ended)
    assert pod_ref(running).uid not in control.fleet.placements


async def test_a_watch_yields_each_step_of_a_pods_life(
    http: aiohttp.ClientSession, control: SimulatedControlPlane
) -> None:
    version = str(control.store.version)

    async with watching(http, Kind.PODS, resourceVersion=version) as events:
        control.create_pod(pod_object("a"))
        control.bind("default", "a", "node-a")
        control.delete_pod("default", "a")
        seen = await take(events, 4)

    assert seen == [("ADDED", "a"), ("MODIFIED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]


async def test_a_watch_without_version_begins_with_everything(
    http: aiohttp.ClientSession,
) -> None:
    async with watching(http, Kind.NODES) as events:
        assert await take(events, 2) == [("ADDED", "node-a"), ("ADDED", "node-b")]


async def test_a_streamed_list_ends_with_a_marked_bookmark(http: aiohttp.ClientSession) -> None:
    async with watching(
        http, Kind.PODS, sendInitialEvents="true", allowWatchBookmarks="true"
    ) as events:
        assert await take(events, 1) == [("ADDED", "tenant")]
        bookmark = await anext(events)

    assert bookmark["type"] == "BOOKMARK"
    assert "k8s.io/initial-events-end" in str(bookmark)


async def test_a_quiet_watch_gets_bookmarks_that_move_on(
    http: aiohttp.ClientSession, control: SimulatedControlPlane
) -> None:
    version = str(control.store.version)

    async with watching(
        http, Kind.NODES, resourceVersion=version, allowWatchBookmarks="true"
    ) as events:
        control.create_pod(pod_object("a"))
        async with asyncio.timeout(30):
            bookmark = await anext(events)

    assert bookmark["type"] == "BOOKMARK"
    assert child(child(bookmark, "object"), "metadata")["resourceVersion"] == str(
        control.store.version
    )


async def test_a_watch_from_a_forgotten_version_gets_410(
    http: aiohttp.ClientSession, control: SimulatedControlPlane
) -> None:
    version = str(control.store.version)
    control.create_pod(pod_object("a"))
    control.store.forget()

    async with watching(http, Kind.PODS, resourceVersion=version) as events:
        error = await anext(events)

    assert error["type"] == "ERROR"
    assert child(error, "object")["code"] == 410


async def test_a_watch_ends_when_its_time_is_over(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(30):
        async with watching(http, Kind.NODES, timeoutSeconds="0.1") as events:
            seen = [event["type"] async for event in events]

    assert seen == ["ADDED", "ADDED"]


async def test_a_change_of_the_fleet_reaches_the_node_objects(
    http: aiohttp.ClientSession, control: SimulatedControlPlane
) -> None:
    version = str(control.store.version)
    control.fleet.kill_device("node-a", 0, is_noticed=True)
    control.fleet.add(spec("node-c"))

    async with watching(http, Kind.NODES, resourceVersion=version) as events:
        control.sync_nodes()
        seen = await take(events, 2)

    assert seen == [("MODIFIED", "node-a"), ("ADDED", "node-c")]


@pytest.mark.parametrize("base", ["/api/v1", "/apis/events.k8s.io/v1"], ids=["core", "events"])
async def test_events_are_kept_for_display(
    http: aiohttp.ClientSession, control: SimulatedControlPlane, base: str
) -> None:
    response = await http.post(
        f"{base}/namespaces/default/events", json={"reason": "BadAnnotation"}
    )

    assert response.status == 201
    assert [event["reason"] for event in control.events] == ["BadAnnotation"]


async def test_a_patch_of_a_pods_status_is_answered_and_forgotten(
    http: aiohttp.ClientSession, control: SimulatedControlPlane
) -> None:
    control.create_pod(pod_object("a"))

    response = await http.patch(
        "/api/v1/namespaces/default/pods/a/status", json={"status": {"phase": "Failed"}}
    )

    assert response.status == 200
    assert (await response.json())["status"]["phase"] == "Pending"


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "reason"),
    [
        pytest.param("GET", "/api/v1/nodes/x", None, 404, "NotFound", id="no-such-node"),
        pytest.param("GET", "/apis/apps/v1/pods", None, 404, "NotFound", id="no-such-path"),
        pytest.param("PUT", "/api/v1/nodes", None, 405, "MethodNotAllowed", id="no-such-verb"),
        pytest.param(
            "POST", "/api/v1/namespaces/team/pods", pod_object("tenant", namespace="team"), 409,
            "AlreadyExists", id="pod-exists",
        ),
        pytest.param(
            "POST", "/api/v1/namespaces/team/pods/tenant/binding", BINDING, 409, "Conflict",
            id="bound-already",
        ),
        pytest.param(
            "POST", "/api/v1/namespaces/team/pods/x/binding", BINDING, 404, "NotFound",
            id="no-such-pod",
        ),
        pytest.param(
            "POST", "/api/v1/namespaces/team/pods", [], 400, "BadRequest", id="no-object"
        ),
    ],
)  # fmt: skip
async def test_faults_are_answered_with_a_status_object(
    http: aiohttp.ClientSession, method: str, path: str, body: object, code: int, reason: str
) -> None:
    response = await http.request(method, path, json=body)
    status = await response.json()

    assert response.status == status["code"] == code
    assert (status["kind"], status["reason"]) == ("Status", reason)
