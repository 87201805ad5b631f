"""Applies what is shipped to a real API server, and acts as its service accounts."""

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
    """What a test has applied.

    Attributes:
        plane: the control plane.
        admin: an administrator's client.
        items: the objects that were applied.
    """

    def __init__(self, plane: ControlPlane, admin: ApiClient) -> None:
        self.plane = plane
        self.admin = admin
        self.items: list[Object] = []

    async def apply(self, folder: Path) -> list[Object]:
        """Apply a kustomization, each object as strictly as kubectl does, and return its objects.

        kubectl itself, as the documentation says, takes half a second of CPU each time: see
        `apply_with_kubectl`.

        Raises:
            ApiError: the API server refuses something.
        """
        items = built(folder)
        self.items += items
        for item in items:  # namespaces are first
            await self.admin.apply(address_of(item), item)
        return await self._settled(items)

    async def apply_with_kubectl(self, folder: Path) -> list[Object]:
        """Apply a kustomization as the documentation says, and return its objects.

        Raises:
            RuntimeError: the API server refuses something; the message is kubectl's.
        """
        items = built(folder)
        self.items += items
        await self.plane.kubectl("apply", "--validate=strict", "-f", str(self._written(folder)))
        return await self._settled(items)

    async def _settled(self, items: list[Object]) -> list[Object]:
        """Do what controllers would."""
        for item in items:
            if item["kind"] == "ResourceQuota":  # no pod is taken before a controller has counted
                hard = item["spec"]["hard"]
                status = {"status": {"hard": hard, "used": dict.fromkeys(hard, "0")}}
                await self.admin.request(
                    "PATCH", f"{address_of(item)}/status", status, content_type=PATCH
                )
        return items

    async def dry_run(self, folder: Path) -> None:
        """Have the API server judge a kustomization without keeping it, but for its namespaces.

        What is in a namespace can only be judged once the namespace is there.

        Raises:
            RuntimeError: the API server refuses something; the message is kubectl's.
        """
        for item in built(folder):
            if item["kind"] == "Namespace":
                with contextlib.suppress(ApiError):  # there already
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
        """Teach the API server the kinds of Prometheus operator and cert-manager; it keeps them."""
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        known = (await self.admin.request("GET", path))["items"]
        if len(known) == len(list(CRDS.iterdir())):
            return
        await self.plane.kubectl("apply", "--server-side", "-f", str(CRDS))
        await self.plane.kubectl("wait", "--for=condition=Established", "-f", str(CRDS))

    async def remove(self) -> None:
        """Delete all that was applied, except namespaces: no controller here empties them."""
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
        """Return a token of a service account, as the kubelet would get it for a pod."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": list(audiences), "expirationSeconds": 3600},
        }
        answer = await self.admin.request("POST", path, request)
        return str(answer["status"]["token"])

    async def user(self, namespace: str, account: str) -> User:
        """Return a service account as a user with a token of its own."""
        name = f"system:serviceaccount:{namespace}:{account}"
        return User(name=name, token=await self.token(namespace, account))

    async def client(self, namespace: str, account: str) -> ApiClient:
        """Return a client that acts as a service account, an async context manager."""
        user = await self.user(namespace, account)
        return ApiClient(self.plane.server, self.plane.ca_file, user)

    async def kubeconfig(self, namespace: str, account: str) -> Path:
        """Return a kubeconfig that acts as a service account."""
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
    """Ask the API server whether a client may do something, without doing it.

    Args:
        client: who asks.
        verb: as RBAC names it.
        resource: in the plural, with its subresource ("pods/log").
        group: API group.
        namespace: "" for none, or for all.
        name: of the object, "" for any.
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
    """Return all that a client may do with objects in a namespace and in the cluster.

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
    """Wait until RBAC, which follows its objects, allows what was just bound."""
    await wait_for(
        partial(may, client, verb, resource, **where), f"{verb} {resource} {where} is allowed"
    )
