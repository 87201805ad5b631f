"""Installation of manifests on a real API server, with clients for their service accounts."""

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from testkit.controlplane.client import PATCH, ApiClient, ApiError
from testkit.controlplane.kubeconfig import User, write_kubeconfig
from testkit.controlplane.objects import Object
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.shipped import CRDS, address_of, built, manifest_text
from testkit.controlplane.waiting import wait_for

AUTHORIZATION: Final = "/apis/authorization.k8s.io/v1"


class Installation:
    """Objects that a test has applied.

    Attributes:
        admin: client with administrator rights.
        items: the objects that were applied.
    """

    def __init__(self, plane: ControlPlane, admin: ApiClient) -> None:
        self.plane = plane
        self.admin = admin
        self.items: list[Object] = []

    async def apply(self, folder: Path) -> list[Object]:
        """Apply a kustomization as strictly as kubectl does, and return its objects.

        It takes half a second of CPU less than `apply_with_kubectl`.

        Raises:
            ApiError: the API server refuses an object.
        """
        items = built(folder)
        self.items += items
        for item in items:  # namespaces are first
            await self.admin.apply(address_of(item), item)
        return await self._settled(items)

    async def apply_with_kubectl(self, folder: Path) -> list[Object]:
        """Apply a kustomization with kubectl, as the documentation says, and return its objects.

        Raises:
            RuntimeError: the API server refuses an object; the message is kubectl's.
        """
        items = built(folder)
        self.items += items
        await self.plane.kubectl("apply", "--validate=strict", "-f", str(self._written(folder)))
        return await self._settled(items)

    async def _settled(self, items: list[Object]) -> list[Object]:
        """Set the status that controllers would set."""
        for item in items:
            # the API server refuses pods until a controller has counted the quota's use
            if item["kind"] == "ResourceQuota":
                hard = item["spec"]["hard"]
                status = {"status": {"hard": hard, "used": dict.fromkeys(hard, "0")}}
                await self.admin.request(
                    "PATCH", f"{address_of(item)}/status", status, content_type=PATCH
                )
        return items

    async def dry_run(self, folder: Path) -> None:
        """Validate a kustomization by a server-side dry run; only its namespaces are created.

        The API server can validate namespaced objects only if the namespace exists.

        Raises:
            RuntimeError: the API server refuses an object; the message is kubectl's.
        """
        for item in built(folder):
            if item["kind"] == "Namespace":
                with contextlib.suppress(ApiError):  # it exists already
                    await self.admin.create(item)
        await self.plane.kubectl(
            "apply",
            "--server-side",
            "--force-conflicts",
            "--dry-run=server",
            "--validate=strict",
            "-f",
            str(self._written(folder)),
        )

    def _written(self, folder: Path) -> Path:
        path = self.plane.folder / "applied.yaml"
        path.write_text(manifest_text(folder))
        return path

    async def add_kinds_of_others(self) -> None:
        """Install the custom resources of Prometheus operator and cert-manager for all tests."""
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        known = (await self.admin.request("GET", path))["items"]
        if len(known) == len(list(CRDS.iterdir())):
            return
        await self.plane.kubectl("apply", "--server-side", "-f", str(CRDS))
        await self.plane.kubectl("wait", "--for=condition=Established", "-f", str(CRDS))

    async def remove(self) -> None:
        """Delete all applied objects except namespaces, which no controller finalizes here."""
        for item in reversed(self.items):
            if item["kind"] == "Namespace":
                continue
            try:
                await self.admin.request(
                    "DELETE",
                    address_of(item),
                    parameters={"gracePeriodSeconds": "0", "propagationPolicy": "Background"},
                )
            except ApiError as error:
                if error.status != 404:
                    raise
        self.items.clear()

    # --- as a service account -------------------------------------------------------------------

    async def token(self, namespace: str, account: str, *audiences: str) -> str:
        """Issue a token of a service account, as the kubelet would get it for a pod."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": list(audiences), "expirationSeconds": 3600},
        }
        answer = await self.admin.request("POST", path, request)
        return str(answer["status"]["token"])

    async def user(self, namespace: str, account: str) -> User:
        """Return a user with a token of a service account."""
        name = f"system:serviceaccount:{namespace}:{account}"
        return User(name=name, token=await self.token(namespace, account))

    async def client(self, namespace: str, account: str) -> ApiClient:
        """Return a client that acts as a service account: an async context manager."""
        user = await self.user(namespace, account)
        return ApiClient(self.plane.server, self.plane.ca_file, user)

    async def kubeconfig(self, namespace: str, account: str) -> Path:
        """Write a kubeconfig that acts as a service account, and return its path."""
        path = self.plane.folder / f"{namespace}.{account}.kubeconfig"
        user = await self.user(namespace, account)
        write_kubeconfig(path, server=self.plane.server, ca_file=self.plane.ca_file, user=user)
        return path


async def may(
    client: ApiClient,
    verb: str,
    resource: str,
    *,
    group: str = "",
    namespace: str = "",
    name: str = "",
) -> bool:
    """Return whether a client is authorized for a request, by an access review.

    Args:
        client: client whose rights are checked.
        verb: RBAC verb.
        resource: plural name, with a subresource ("pods/log").
        group: API group, "" for the core group.
        namespace: "" for none, or for all.
        name: name of the object, "" for any.
    """
    resource, _, subresource = resource.partition("/")
    attributes = {
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": subresource,
        "namespace": namespace,
        "name": name,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await client.request("POST", f"{AUTHORIZATION}/selfsubjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


async def rights(client: ApiClient, namespace: str) -> frozenset[tuple[str, str, str, str]]:
    """Return all rights of a client in a namespace and in the cluster.

    Returns:
        API group, resource, verb and name of an object ("" for any) of each right.
    """
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    answer = await client.request("POST", f"{AUTHORIZATION}/selfsubjectrulesreviews", review)
    status: Mapping[str, list[Object]] = answer["status"]
    return frozenset(
        (group, resource, verb, name)
        for rule in status["resourceRules"]
        for group in rule.get("apiGroups", [])
        for resource in rule.get("resources", [])
        for verb in rule["verbs"]
        for name in rule.get("resourceNames") or [""]
    )


async def wait_authorized(client: ApiClient, verb: str, resource: str, **where: str) -> None:
    """Wait until RBAC allows a request after a binding was created."""
    await wait_for(
        partial(may, client, verb, resource, **where), f"{verb} {resource} {where} is allowed"
    )
