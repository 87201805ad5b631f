"""API of the shipped extender in a cluster with two tenants, and its callers."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from testkit.controlplane.client import ApiClient, ApiError
from testkit.controlplane.installing import Installation, wait_authorized
from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.running import RunningExtender, running_extender
from testkit.controlplane.shipped import EXTENDER_NAMESPACE, MANIFESTS
from testkit.controlplane.waiting import wait_for

AUDIENCE = "idlegpu-api"
BLUE, RED = "blue", "red"
READER, CLUSTER_READER, STRANGER = "reader", "cluster-reader", "stranger"
PROXY_USER: Final = "proxy-user"
"""Account that may use the API server's proxy to the extender, and may read no pod."""
RBAC = "rbac.authorization.k8s.io"
LISTS_PODS = "test-lists-pods"
"""Cluster role in place of `view`, whose rules kube-controller-manager would aggregate."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """API with one pod of each of two tenants, and callers with different rights."""

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
    """Build a binding that lets the first tenant's account view pods in one or all namespaces."""
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
        # it exists from another test, because no controller here empties namespaces
        if error.status != 409:
            raise


@asynccontextmanager
async def reading(
    installation: Installation,
    tmp_path: Path,
    variables: Mapping[str, str] | None = None,
    folder: Path = MANIFESTS,
) -> AsyncIterator[Read]:
    """Run the shipped extender, with further variables, in a cluster with two tenants.

    Args:
        installation: installation to which it is added.
        tmp_path: empty folder.
        variables: environment variables that add to or replace those of its container.
        folder: kustomization to apply.
    """
    admin = installation.admin
    for namespace in (BLUE, RED):
        item = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        await ensure(admin, "/api/v1/namespaces", item)
        for account in ("default", READER, CLUSTER_READER, STRANGER, PROXY_USER):
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
    await installation.apply(folder)
    async with await installation.client(EXTENDER_NAMESPACE, "idlegpu-extender") as client:
        for resource, group in (
            ("tokenreviews", "authentication.k8s.io"),
            ("subjectaccessreviews", "authorization.k8s.io"),
        ):
            await wait_authorized(client, "create", resource, group=group)
    await admin.create(node("a"))
    for namespace in (BLUE, RED):
        await admin.create(pod("p", namespace=namespace, nodeName="a"))
    async with running_extender(installation, tmp_path, variables) as extender:
        found = Read(installation=installation, extender=extender)
        token = await found.token(CLUSTER_READER)
        await wait_for(partial(_shows_both, found, token), "both pods are known and shown")
        yield found


async def _shows_both(found: Read, token: str) -> bool:
    return await found.pods(token) == ["blue/p", "red/p"]
