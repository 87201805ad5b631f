"""ReplicaSet that replaces evicted pods, and the nodes of its pods."""

from collections.abc import Mapping
from typing import Any, Final

from testkit.controlplane.client import ApiClient, address
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World

SETS: Final = "/apis/apps/v1/namespaces/default/replicasets"
MERGE: Final = "application/merge-patch+json"
MAY_MOVE: Final = {"example.com/may-move": "true"}
"""Label that the example policies require of pods."""

Nodes = dict[str, str]
"""Node of each pod by its UID; "" for a waiting pod."""


class Replicas:
    """ReplicaSet of a test.

    Attributes:
        name: name of the ReplicaSet, and value of the label `app` of its pods.
        count: number of its pods.
    """

    def __init__(self, world: World, name: str, count: int) -> None:
        self._world = world
        self.name = name
        self.count = count

    async def start(
        self,
        gpus: int = 1,
        *,
        labels: Mapping[str, str] = MAY_MOVE,
        annotations: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> Nodes:
        """Create the ReplicaSet, wait until all of its pods run, and return their nodes.

        Args:
            gpus: GPU request of each pod.
            labels: labels of each pod, besides `app`.
            annotations: annotations of each pod.
            **spec: further fields of each pod's spec.
        """
        template = pod(
            self.name, gpus, labels={"app": self.name, **labels}, annotations=annotations, **spec
        )
        wanted = {"matchLabels": {"app": self.name}}
        await self._world.client.create(
            {
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "metadata": {"name": self.name, "namespace": "default"},
                "spec": {"replicas": self.count, "selector": wanted, "template": template},
            }
        )
        return await self.bound()

    async def pods(self) -> list[Object]:
        """Return its pods that are not terminating."""
        return [
            item
            for item in await self._world.client.list_pods()
            if item["metadata"].get("labels", {}).get("app") == self.name
            and "deletionTimestamp" not in item["metadata"]
        ]

    async def nodes(self) -> Nodes:
        """Return the current nodes of its pods."""
        return {
            item["metadata"]["uid"]: item["spec"].get("nodeName", "") for item in await self.pods()
        }

    async def bound(self) -> Nodes:
        """Wait until all of its pods are bound and ready, and return their nodes."""

        async def are_ready() -> Nodes:
            pods = await self.pods()
            if len(pods) != self.count or not all(map(_is_ready, pods)):
                return {}
            return await self.nodes()

        return await wait_for(are_ready, f"all {self.count} pods of {self.name} are ready")

    async def new(self, before: Nodes) -> list[Object]:
        """Wait until it has all of its pods, and return the new ones.

        Args:
            before: its earlier pods.
        """

        async def are_there() -> list[Object]:
            pods = await self.pods()
            return pods if len(pods) == self.count else []

        pods = await wait_for(are_there, f"{self.name} has {self.count} pods")
        return [{"kind": "Pod", **item} for item in pods if item["metadata"]["uid"] not in before]


async def dissolve_all(client: ApiClient) -> None:
    """Delete all ReplicaSets, so that pods are no longer replaced."""
    for item in (await client.request("GET", SETS))["items"]:
        path = address({"kind": "ReplicaSet", **item})
        none = {"spec": {"replicas": 0}}
        scaled = await client.request("PATCH", path, none, content_type=MERGE)
        generation = scaled["metadata"]["generation"]

        async def is_empty(path: str = path, generation: int = generation) -> bool:
            status = (await client.request("GET", path))["status"]
            seen = status.get("observedGeneration", 0)
            return bool(status["replicas"] == 0 and seen >= generation)

        await wait_for(is_empty, f"{item['metadata']['name']} has no pods")
        await client.request("DELETE", path)


def _is_ready(item: Object) -> bool:
    conditions = item["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
