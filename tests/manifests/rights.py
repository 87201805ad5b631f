"""Rights of service accounts."""

from testkit.controlplane.client import ApiClient, ApiError
from testkit.controlplane.installing import Installation, rights
from testkit.controlplane.objects import Object

STORAGE, COORDINATION, EVENTS = "storage.k8s.io", "coordination.k8s.io", "events.k8s.io"


async def everybody(installation: Installation, namespace: str) -> frozenset[tuple[str, ...]]:
    """Return the rights that every service account has."""
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "no-rights", "namespace": namespace},
    }
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    await installation.admin.request("POST", path, account)
    try:
        async with await installation.client(namespace, "no-rights") as client:
            return await rights(client, namespace)
    finally:
        await installation.admin.request("DELETE", f"{path}/no-rights")


def lease(name: str) -> Object:
    return {
        "apiVersion": f"{COORDINATION}/v1",
        "kind": "Lease",
        "metadata": {"name": name},
        "spec": {"holderIdentity": "a"},
    }


async def patch(client: ApiClient, path: str, change: Object) -> None:
    await client.request("PATCH", path, change, content_type="application/merge-patch+json")


async def refused(
    client: ApiClient, method: str, path: str, body: Object | None = None, status: int = 403
) -> bool:
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    try:
        await client.request(method, path, body, content_type=kind)
    except ApiError as error:
        return error.status == status
    return False
