"""Small client of the API server: plain JSON objects, and the verbs that tests need."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import aiohttp

from testkit.controlplane.kubeconfig import User
from testkit.controlplane.objects import Object, pod, priority_class
from testkit.controlplane.waiting import DEADLINE_SECONDS, wait_for

REQUEST_TIMEOUT_SECONDS: Final = 30.0
REQUESTS_IN_FLIGHT: Final = 32
PATCH: Final = "application/strategic-merge-patch+json"
APPLY: Final = "application/apply-patch+yaml"  # JSON is YAML too
# API path of each kind that tests create; {} is the namespace.
COLLECTIONS: Final = {
    "Node": "/api/v1/nodes",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "ReplicaSet": "/apis/apps/v1/namespaces/{}/replicasets",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "ResourceClaim": "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims",
    "ResourceSlice": "/apis/resource.k8s.io/v1/resourceslices",
    "DeviceClass": "/apis/resource.k8s.io/v1/deviceclasses",
    "CSIStorageCapacity": "/apis/storage.k8s.io/v1/namespaces/{}/csistoragecapacities",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}


class ApiError(RuntimeError):
    """Error of a request that the API server refused.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ApiClient:
    """Client of the API server for one user: an async context manager, bound to one event loop."""

    def __init__(self, server: str, ca_file: Path, user: User) -> None:
        self._server = server
        self._ca_file = ca_file
        self._user = user
        self._in_flight = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

    async def __aenter__(self) -> Self:
        context = ssl.create_default_context(cafile=self._ca_file)
        self._session = aiohttp.ClientSession(
            self._server,
            connector=aiohttp.TCPConnector(ssl=context),
            headers=self._user.headers,
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        parameters: Mapping[str, str] | None = None,
    ) -> Object:
        """Send a request, and return the object in the API server's answer.

        Raises:
            ApiError: the status was not 2xx.
        """
        async with (
            self._in_flight,
            self._session.request(
                method,
                path,
                params=parameters,
                data=None if body is None else json.dumps(body),
                headers={"Content-Type": content_type},
            ) as response,
        ):
            text = await response.text()
            if not response.ok:
                raise ApiError(response.status, f"cannot {method} {path}: {_message(text)}")
            answer: Object = json.loads(text)
            return answer

    async def create(self, item: Object) -> Object:
        """Create an object of a kind in `COLLECTIONS`."""
        return await self.request("POST", collection(item), item)

    async def apply(self, path: str, item: Object) -> Object:
        """Apply an object as `kubectl apply --server-side --validate=strict` does.

        Args:
            path: path of the object.
        """
        parameters = {"fieldManager": "tests", "fieldValidation": "Strict", "force": "true"}
        return await self.request("PATCH", path, item, content_type=APPLY, parameters=parameters)

    async def create_all(self, items: Iterable[Object]) -> None:
        """Create objects concurrently, in no particular order."""
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(self.create(item), name=f"create {item['metadata']['name']}")

    async def get(self, item: Object) -> Object:
        """Return the current state of an object."""
        return await self.request("GET", address(item))

    async def patch(self, item: Object, change: Object, subresource: str = "") -> Object:
        """Patch an object, or its subresource ("status"), by a strategic merge patch."""
        path = f"{address(item)}/{subresource}".rstrip("/")
        return await self.request("PATCH", path, change, content_type=PATCH)

    async def delete(self, item: Object) -> None:
        """Delete an object without a grace period."""
        await self.request("DELETE", address(item), parameters={"gracePeriodSeconds": "0"})

    async def list_pods(self, namespace: str = "default") -> list[Object]:
        """List a namespace's pods."""
        pods: list[Object] = (await self.request("GET", f"/api/v1/namespaces/{namespace}/pods"))[
            "items"
        ]
        return pods

    async def events(self, item: Object) -> list[Object]:
        """List the events of one object, oldest first."""
        metadata = (await self.get(item))["metadata"]
        found: list[Object] = (
            await self.request(
                "GET",
                f"/api/v1/namespaces/{metadata.get('namespace', 'default')}/events",
                parameters={"fieldSelector": f"involvedObject.uid={metadata['uid']}"},
            )
        )["items"]
        return sorted(found, key=lambda event: str(event["metadata"]["creationTimestamp"]))

    async def create_namespace(self, name: str) -> None:
        """Create a namespace and its default service account, as kube-controller-manager would."""
        await self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        await self.create_default_account(name)

    async def create_default_account(self, namespace: str) -> None:
        """Create the default service account of a namespace."""
        await self.create(
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": "default", "namespace": namespace},
            }
        )

    async def create_priority_class(self, name: str, value: int) -> None:
        """Create a priority class, and wait until pods may name it."""
        await self.create(priority_class(name, value))
        wanted = pod(f"wants-{name}", 0, priorityClassName=name)

        async def is_known() -> bool:
            try:
                await self.request("POST", collection(wanted), wanted, parameters={"dryRun": "All"})
            except ApiError as error:
                if error.status != HTTPStatus.FORBIDDEN:
                    raise
                return False  # the admission plugin has its own watch
            return True

        await wait_for(is_known, f"pods may have the priority class {name}")

    @asynccontextmanager
    async def granted(self, user: User, rules: list[Object]) -> AsyncIterator[None]:
        """Grant RBAC rules in all namespaces to a user while the context is open."""
        name = f"test:{user.name}"
        group = "rbac.authorization.k8s.io"
        role = {"kind": "ClusterRole", "metadata": {"name": name}, "rules": rules}
        binding = {
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user.name}],
        }
        items = [{"apiVersion": f"{group}/v1", **item} for item in (role, binding)]
        for item in items:
            await self.create(item)
        try:
            yield
        finally:
            for item in items:
                await self.delete(item)

    async def set_phase(self, item: Object, phase: str, **status: object) -> None:
        """Set the status of a bound pod in place of a kubelet, e.g. "Running" or "Failed"."""
        await self.patch(item, {"status": {"phase": phase, **status}}, "status")

    async def wait_pod(
        self,
        item: Object,
        condition: Callable[[Object], object],
        what: str,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> Object:
        """Wait until a pod meets a condition, and return the pod.

        Raises:
            TimeoutError: the condition did not hold in time; the message has the pod's status and
                events.
        """
        name = item["metadata"]["name"]

        async def matching() -> Object | None:
            current = await self.get(item)
            return current if condition(current) else None

        try:
            return await wait_for(matching, f"pod {name} {what}", deadline_seconds=deadline_seconds)
        except TimeoutError as error:
            status = (await self.get(item)).get("status")
            messages = [event.get("message") for event in await self.events(item)]
            raise TimeoutError(f"{error}: status {status}, events {messages}") from error

    async def wait_bound(self, item: Object) -> str:
        """Wait until a pod is bound, and return the name of its node."""
        bound = await self.wait_pod(item, lambda pod: pod["spec"].get("nodeName"), "is bound")
        return str(bound["spec"]["nodeName"])

    async def wait_unschedulable(self, item: Object) -> str:
        """Wait until kube-scheduler has reported a pod unschedulable, and return its message."""
        return unschedulable(await self.wait_pod(item, unschedulable, "is unschedulable"))


def collection(item: Object) -> str:
    """Return the path of the collection that an object belongs to."""
    return COLLECTIONS[item["kind"]].format(item["metadata"].get("namespace", "default"))


def address(item: Object) -> str:
    """Return the path of an object."""
    return f"{collection(item)}/{item['metadata']['name']}"


def unschedulable(pod: Object) -> str:
    """Return kube-scheduler's reason why a pod is unschedulable; "" without one."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return str(condition["message"])
    return ""


def _message(text: str) -> str:
    """Return the message in the API server's Status object."""
    try:
        return str(json.loads(text).get("message", text))
    except ValueError:
        return text
