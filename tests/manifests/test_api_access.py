"""Who reads the shipped extender's API, by real tokens and rights of a real API server."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.controlplane.client import ApiClient, ApiError
from tests.controlplane.objects import Object, node, pod
from tests.controlplane.waiting import wait_for
from tests.manifests.installing import Installation, wait_authorized
from tests.manifests.running import RunningExtender, running_extender
from tests.manifests.shipped import EXTENDER_NAMESPACE, MANIFESTS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

AUDIENCE = "idlegpu-api"
BLUE, RED = "blue", "red"
READER, CLUSTER_READER, STRANGER = "reader", "cluster-reader", "stranger"
RBAC = "rbac.authorization.k8s.io"
LISTS_PODS = "test-lists-pods"
"""In the place of `view`, whose rules kube-controller-manager would have put together."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """An API with a pod of each of two tenants, and callers with different rights."""

    installation: Installation
    extender: RunningExtender

    async def token(self, account: str, *audiences: str) -> str:
        return await self.installation.token(BLUE, account, *(audiences or (AUDIENCE,)))

    async def pods(self, token: str) -> list[str]:
        status, answer = await self.extender.read("/v1/nodes/a", token)
        assert status == 200, answer
        pods: list[str] = answer["pods"]
        return pods


def binding(kind: str, account: str, namespace: str = "") -> Object:
    """Return what lets an account of the first tenant view pods, somewhere or everywhere."""
    where = {"namespace": namespace} if namespace else {}
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": kind,
        "metadata": {"name": f"test-{account}", **where},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": LISTS_PODS},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": BLUE}],
    }


async def ensure(admin: ApiClient, path: str, item: Object) -> None:
    try:
        await admin.request("POST", path, item)
    except ApiError as error:
        if error.status != 409:  # there from another test: nobody here empties namespaces
            raise


@pytest_asyncio.fixture
async def read(installation: Installation, tmp_path: Path) -> AsyncIterator[Read]:
    admin = installation.admin
    for namespace in (BLUE, RED):
        item = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        await ensure(admin, "/api/v1/namespaces", item)
        for account in ("default", READER, CLUSTER_READER, STRANGER):
            made = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}}
            await ensure(admin, f"/api/v1/namespaces/{namespace}/serviceaccounts", made)
    role = {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": LISTS_PODS},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}],
    }
    await ensure(admin, f"/apis/{RBAC}/v1/clusterroles", role)
    await ensure(
        admin,
        f"/apis/{RBAC}/v1/namespaces/{BLUE}/rolebindings",
        binding("RoleBinding", READER, BLUE),
    )
    await ensure(
        admin, f"/apis/{RBAC}/v1/clusterrolebindings", binding("ClusterRoleBinding", CLUSTER_READER)
    )
    await installation.apply(MANIFESTS)
    account = (EXTENDER_NAMESPACE, "idlegpu-extender")
    async with await installation.client(*account) as client:
        for resource, group in (
            ("tokenreviews", "authentication.k8s.io"),
            ("subjectaccessreviews", "authorization.k8s.io"),
        ):
            await wait_authorized(client, "create", resource, group=group)
    await admin.create(node("a"))
    for namespace in (BLUE, RED):
        await admin.create(pod("p", namespace=namespace, nodeName="a"))
    async with running_extender(installation, tmp_path) as extender:
        found = Read(installation=installation, extender=extender)
        token = await found.token(CLUSTER_READER)
        await wait_for(partial(_shows_both, found, token), "both pods are known and shown")
        yield found


async def _shows_both(found: Read, token: str) -> bool:
    return await found.pods(token) == ["blue/p", "red/p"]


async def test_a_tenant_sees_its_own_pods_and_that_there_are_others(read: Read) -> None:
    assert await read.pods(await read.token(READER)) == ["blue/p", "another pod"]


async def test_an_account_without_rights_sees_gpus_and_no_pod_by_name(read: Read) -> None:
    token = await read.token(STRANGER)

    assert await read.pods(token) == ["another pod", "another pod"]
    _, nodes = await read.extender.read("/v1/nodes", token)
    assert nodes["nodes"][0]["resources"]["nvidia.com/gpu"]["held"] == 2


async def test_without_a_token_health_and_metrics_alone_are_told(read: Read) -> None:
    for path in ("/v1/nodes", "/v1/gpus", "/v1/decisions", "/v1/unasked", "/v1/session"):
        status, answer = await read.extender.read(path)

        assert status == 401, path
        assert "kubectl create token" in answer["error"]
    status, health = await read.extender.read("/readyz")
    assert (status, health["status"] == "starting") == (200, False)
    async with (
        aiohttp.ClientSession(read.extender.status) as session,
        session.get("/metrics") as response,
    ):
        text = await response.text()
    assert "idlegpu_gpu_pods 2.0" in text
    assert 'outcome="no-token"' in text
    assert "blue" not in text


async def test_tokens_that_are_not_for_the_api_or_are_forged_are_refused(read: Read) -> None:
    good = await read.token(READER)
    header, claims, signature = good.split(".")
    for token in (
        await read.token(READER, "https://kubernetes.default.svc"),
        await read.token(READER, "idlegpu-extender"),
        f"{header}.{claims}.{signature[:-8]}AAAAAAAA",
        f"{header}.{claims}.",
        read.installation.plane.users["admin"].token,
    ):
        status, _ = await read.extender.read("/v1/nodes", token)

        assert status == 401
    assert (await read.extender.read("/v1/nodes", good))[0] == 200


async def test_a_browser_keeps_the_token_as_a_cookie_and_sees_what_its_owner_may(
    read: Read,
) -> None:
    token = await read.token(READER)
    # A browser keeps cookies by host; the library does so for addresses where it is told to.
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(read.extender.status, cookie_jar=jar) as session:
        async with session.post("/v1/session", json={"token": token}) as answer:
            assert answer.status == 204
        async with session.get("/v1/session") as answer:
            told = await answer.json()
        async with session.get("/v1/nodes/a") as answer:
            assert (await answer.json())["pods"] == ["blue/p", "another pod"]
        async with session.delete("/v1/session") as answer:
            assert answer.status == 204
        async with session.get("/v1/nodes/a") as answer:
            assert answer.status == 401

    assert told == {
        "user": f"system:serviceaccount:{BLUE}:{READER}",
        "sees_all": False,
        "namespaces": [BLUE],
    }
