"""World of one scenario: a simulated fleet in a real cluster that a real Prometheus scrapes."""

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any, Final

import aiohttp

from simulation.devices import DeviceView
from simulation.exporter import run_exporter
from simulation.fleet import SimulatedFleet
from simulation.kubelet import MEMORY_ANNOTATION, UTILIZATION_ANNOTATION
from simulation.models import A10, H100, MIB, GpuModel
from simulation.nodes import EXPORTER_4_8, NodeSpec, Sharing
from testkit.controlplane.client import ApiClient
from testkit.controlplane.deployed import merged
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.services import Services
from testkit.controlplane.simulated import following, register_nodes
from testkit.controlplane.waiting import DEADLINE_SECONDS, wait_for

TOLERANCE: Final = 0.02
"""Largest difference of equal ratios, because exporters round."""

Gpus = Mapping[tuple[str, str, str], Object]
"""The extender's view of each GPU, by node, UUID and GPU instance ID."""


def first_difference(fleet: SimulatedFleet, nodes: Iterable[str], seen: Gpus) -> str:
    """Describe the first difference between the extender's view and exporters, "" without one."""
    for node in sorted(nodes):
        if fleet.node(node).silent_since is not None:
            continue
        for view in fleet.views(node):
            gpu = seen.get((node, view.uuid, view.gpu_instance_id))
            difference = "not seen" if gpu is None else _differs(gpu, view)
            if difference:
                return f"GPU {view.index} {view.gpu_instance_id} of {node}: {difference}"
    return ""


def _differs(gpu: Object, view: DeviceView) -> str:
    """Describe the difference between the extender's view and an exporter's, "" without one."""
    if gpu["freshness"] != "fresh" or gpu["memory_used_ratio"] is None:
        return f"is {gpu['freshness']}"
    used = view.memory_used_bytes / ((view.memory_mib - view.reserved_mib) * MIB)
    for name, is_now, shown in (
        ("utilization", gpu["utilization_latest_ratio"], view.utilization),
        ("memory", gpu["memory_used_ratio"], used),
    ):
        if is_now is None or abs(is_now - shown) > TOLERANCE:
            return f"{name} is {is_now}, shown is {shown:.3f}"
    tenants = sorted(tenant.pod.key for tenant in view.tenants)
    if sorted(gpu["tenants"]) != tenants:
        return f"tenants are {gpu['tenants']}, shown are {tenants}"
    return ""


# Most of a node's CPU and memory, so that kube-scheduler without the extender prefers other nodes.
MOST_OF_HOST: Final = {"cpu": "110", "memory": "900Gi"}

_marks: Final = count(1)

SETTINGS: Final[Mapping[str, object]] = {
    "prometheus": {"interval_seconds": 1, "timeout_seconds": 10, "exporter_interval_seconds": 0},
    "cluster": {"max_backoff_seconds": 1},
}
"""Settings that differ from the defaults in all scenarios: shorter times than in a real cluster."""


class World:
    """Nodes and pods of one scenario; `add` nodes, then `start`.

    Attributes:
        services: processes, which scenarios share.
        client: client of the API server with administrator rights.
        fleet: simulated GPUs; it follows the API server's pods once started.
    """

    def __init__(self, services: Services, client: ApiClient, prefix: str) -> None:
        self.services = services
        self.client = client
        self.fleet = SimulatedFleet()
        self._prefix = prefix
        self._registered: set[str] = set()

    # --- the cluster --------------------------------------------------------------------------

    def add(self, name: str, cards: int = 2, model: GpuModel = H100, **spec: Any) -> str:
        """Add a node with whole, idle GPUs and return its name, which is unique to the scenario.

        Args:
            name: name within the scenario.
            cards: number of GPUs.
            **spec: further fields of `NodeSpec`.
        """
        number = len(self.fleet.nodes) + 1
        node = self.fleet.add(
            NodeSpec(
                name=f"{self._prefix}-{name}",
                model=model,
                cards=cards,
                address=f"10.20.0.{number}",
                **spec,
            )
        )
        return node.name

    def add_shared(self, name: str, cards: int = 1, replicas: int = 4, **spec: Any) -> str:
        """Add a node with idle, time-sliced A10 GPUs and return its name.

        Its exporter is a version that shows every pod of a shared GPU.
        """
        return self.add(
            name,
            cards,
            A10,
            sharing=Sharing.TIME_SLICING,
            replicas=replicas,
            exporter=EXPORTER_4_8,
            **spec,
        )

    async def start(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        kubelets: bool = True,
        extender: Mapping[str, object] | None = None,
    ) -> None:
        """Register the nodes, start all processes, and wait until the extender knows the fleet.

        Args:
            settings: settings of the extender, merged section by section over `SETTINGS`.
            kubelets: whether kwok runs bound pods (and ends them as their annotations say).
            extender: fields to change in the extender's entry of kube-scheduler's configuration.
        """
        services = self.services
        await self.register()
        await services.ensure_prometheus()
        await services.ensure_kubelets(are_wanted=kubelets)
        await services.extender.ensure(merged(self._settings(), settings or {}))
        await services.ensure_scheduler(
            {
                **services.scheduler_config(extender),
                "podInitialBackoffSeconds": 1,
                "podMaxBackoffSeconds": 1,
            }
        )
        await self.settled()

    async def register(self, *, are_scraped: bool = True) -> None:
        """Create the added nodes in the API server and, if scraped, as targets of Prometheus."""
        new = self.fleet.nodes.keys() - self._registered
        await register_nodes(self.client, self.fleet, sorted(new))
        self._registered |= new
        if are_scraped:
            self.scrape()

    def scrape(self) -> None:
        """Set all registered nodes as targets of Prometheus.

        If an exporter uses another name for its node, only its target identifies the node.
        """
        nodes = [self.fleet.node(name) for name in sorted(self._registered)]
        named = {
            node.name: {"instance": f"unknown-{number}:9400"}
            for number, node in enumerate(nodes)
            if node.spec.hostname
        }
        self.services.prometheus.set_targets([node.name for node in nodes], named)

    def _settings(self) -> Object:
        return merged(SETTINGS, {"prometheus": {"url": self.services.prometheus.url}})

    async def tenants(
        self,
        node: str,
        count: int = 1,
        *,
        gpus: Mapping[str, int | str] | int = 1,
        utilization: float = 0.0,
        memory: str = "1Gi",
    ) -> list[Object]:
        """Create pods that hold GPUs of a node, bound without a decision, and return them.

        Args:
            count: number of pods.
            gpus: GPU request of each pod.
            utilization: utilization ratio of each of their GPUs.
            memory: used memory of each of their GPUs, as a quantity.
        """
        annotations = {UTILIZATION_ANNOTATION: str(utilization), MEMORY_ANNOTATION: memory}
        pods = [
            pod(f"{node}-tenant-{number}", gpus, annotations=annotations, nodeName=node)
            for number in range(count)
        ]
        uids = {(await self.client.create(item))["metadata"]["uid"] for item in pods}

        async def are_placed() -> bool:
            return uids <= self.fleet.placements.keys()

        await wait_for(are_placed, f"tenants of {node} hold GPUs")
        await self.settled()
        return pods

    async def fill_host(self, *nodes: str, requests: Mapping[str, str] = MOST_OF_HOST) -> None:
        """Fill nodes with pods that request much CPU and memory, or `requests`, and no GPU.

        Without the extender, kube-scheduler then prefers the other nodes.
        """
        for node in nodes:
            burden = pod(f"burden-{node}", 0, nodeName=node)
            burden["spec"]["containers"][0]["resources"] = {"requests": dict(requests)}
            await self.client.create(burden)

    async def priority_class(self, name: str, value: int) -> str:
        """Create a priority class, and return its name, which is unique to the scenario."""
        own = f"{self._prefix}-{name}"
        await self.client.create_priority_class(own, value)
        return own

    async def scheduler_synced(self, *nodes: str) -> None:
        """Wait until kube-scheduler's caches have the current state of these nodes.

        kube-scheduler has separate watches for nodes and pods: it may receive a pod before an
        earlier change of a node.
        """
        for node in nodes:
            number = next(_marks)
            mark = {"test.idlegpu.io/mark": str(number)}
            item = {"kind": "Node", "metadata": {"name": node}}
            await self.client.patch(item, {"metadata": {"labels": mark}})
            everything = [{"operator": "Exists"}]
            # A new name each time: on a busy machine a second probe of a name was deleted at once.
            name = f"probe-{node}-{number}"
            probe = pod(name, 0, nodeSelector=mark, tolerations=everything)
            await self.place(probe)
            await self.client.delete(probe)
            await self.gone(probe)

    # --- pods ---------------------------------------------------------------------------------

    async def place(self, item: Object) -> str:
        """Create a pod and return the node that it is bound to."""
        (node,) = await self.place_all([item])
        return node

    async def place_all(self, items: Iterable[Object]) -> list[str]:
        """Create pods at once and return their nodes, in their order."""
        pods = list(items)
        await self.client.create_all(pods)
        return await self.bound(pods)

    async def bound(
        self, pods: Iterable[Object], *, deadline_seconds: float = DEADLINE_SECONDS
    ) -> list[str]:
        """Wait until pods are bound and return their nodes, in their order.

        Raises:
            TimeoutError: a pod is not bound in time; the message has the reason for the first one.
        """
        names = [item["metadata"]["name"] for item in pods]

        async def all_bound() -> list[str]:
            listed = await self.client.list_pods()
            nodes = {item["metadata"]["name"]: item["spec"].get("nodeName") for item in listed}
            found = [nodes.get(name) for name in names]
            return [node for node in found if node] if all(found) else []

        try:
            return await wait_for(all_bound, "all bound", deadline_seconds=deadline_seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {await self._unbound()}") from error

    async def count_bound(self, pods: Iterable[Object]) -> int:
        """Return the number of bound pods."""
        names = {item["metadata"]["name"] for item in pods}
        return sum(
            bool(item["spec"].get("nodeName"))
            for item in await self.client.list_pods()
            if item["metadata"]["name"] in names
        )

    async def running(self, item: Object) -> Object:
        """Wait until a pod runs, and return it."""
        return await self.client.wait_pod(
            item, lambda current: current["status"].get("phase") == "Running", "runs"
        )

    async def gone(self, item: Object) -> None:
        """Wait until a pod is gone from the API server and from the GPUs of the fleet."""
        name = item["metadata"]["name"]

        async def is_gone() -> bool:
            if name in {each["metadata"]["name"] for each in await self.client.list_pods()}:
                return False
            # The fleet receives it by its own watch.
            return name not in {placed.pod.name for placed, *_ in self.fleet.placements.values()}

        await wait_for(is_gone, f"pod {name} is gone")

    async def end(self, item: Object) -> None:
        """Delete a pod and wait until the extender knows that its GPUs are free."""
        await self.client.delete(item)
        await self.gone(item)
        await self.settled()

    async def describe(self, item: Object, text: str) -> str:
        """Wait until the real `kubectl describe pod` shows a text, and return its output."""
        name = item["metadata"]["name"]

        async def described() -> str:
            shown = await self.services.plane.kubectl("describe", "pod", name)
            # kubectl does not wrap long messages, but may double spaces.
            return shown if text in re.sub(r" +", " ", shown) else ""

        try:
            return await wait_for(described, f"kubectl describe shows {text!r}")
        except TimeoutError as error:
            shown = await self.services.plane.kubectl("describe", "pod", name)
            raise TimeoutError(f"{error}: it shows {shown}") from error

    async def touch(self, node: str) -> None:
        """Change an annotation of a node, which makes kube-scheduler retry refused pods."""
        item = {"kind": "Node", "metadata": {"name": node}}
        change = {"metadata": {"annotations": {"test.idlegpu.io/touched": str(self.fleet.clock())}}}
        await self.client.patch(item, change)

    async def _unbound(self) -> str:
        """Describe the first unbound pod: its status, events and decisions."""
        for item in await self.client.list_pods():
            if not item["spec"].get("nodeName"):
                messages = [
                    event.get("message")
                    for event in await self.client.events({"kind": "Pod", **item})
                ]
                return f"{item['metadata']['name']} waits: {messages}"
        return "no pod waits"

    # --- the extender's view --------------------------------------------------------------------

    async def start_extender(self) -> None:
        """Start the extender again; kube-scheduler pauses until it is ready.

        A Service forwards to ready replicas only, but here kube-scheduler has the extender's
        address, and an extender that has not listed the cluster yet lets every node pass.
        """
        scheduler = self.services.scheduler
        scheduler.pause()
        try:
            await self.services.extender.process.start()
            await self.settled()
        finally:
            scheduler.resume()

    async def settled(self) -> None:
        """Wait until the extender's view of every GPU and its pods equals the exporters' data.

        Raises:
            TimeoutError: the message names the first difference.
        """
        difference = ""

        async def is_seen() -> bool:
            nonlocal difference
            difference = first_difference(self.fleet, self._registered, await self.gpus())
            return not difference

        try:
            await wait_for(is_seen, "the extender sees the fleet as it is")
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {difference}") from error

    async def gpus(self) -> dict[tuple[str, str, str], Object]:
        """Return the extender's view of each GPU, by node, UUID and GPU instance ID."""
        try:
            listed = (await self.services.extender.get("/v1/gpus"))["gpus"]
        except (aiohttp.ClientConnectionError, TimeoutError):
            return {}  # the extender does not run; a status of 500 still raises
        return {(gpu["node"], gpu["uuid"], gpu["gpu_instance_id"]): gpu for gpu in listed}

    async def gpu(self, node: str, index: int = 0) -> Object:
        """Return the extender's view of one whole GPU."""
        return (await self.gpus())[node, self.fleet.card(node, index).uuid, ""]

    async def wait_gpu(
        self, node: str, index: int, condition: Callable[[Object], object], what: str
    ) -> None:
        """Wait until the extender's view of a GPU meets a condition."""
        key = (node, self.fleet.card(node, index).uuid, "")
        gpu: Object | None = None

        async def is_so() -> bool:
            nonlocal gpu
            gpu = (await self.gpus()).get(key)
            return gpu is not None and bool(condition(gpu))

        try:
            await wait_for(is_so, f"GPU {index} of {node} {what}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}: it is {gpu}") from error

    async def covered(self, *nodes: str) -> None:
        """Wait until readings include the pods of these nodes, and no pod is assumed."""
        for node in nodes:
            for card in self.fleet.node(node).cards:
                await self.wait_gpu(
                    node, card.index, lambda gpu: gpu["assumed"] == 0, "has nothing assumed on it"
                )

    async def wait_state(self, node: str, index: int, state: str) -> None:
        """Wait until a GPU is in this state, in the words of `/v1/gpus`."""
        await self.wait_gpu(node, index, lambda gpu: gpu["state"] == state, f"is {state}")

    async def decisions(self, item: Object) -> list[Object]:
        """Return the extender's decisions for a pod, newest first."""
        metadata = item["metadata"]
        name = f"{metadata['namespace']}/{metadata['name']}"
        answer = await self.services.extender.get("/v1/decisions", {"pod": name, "limit": "100"})
        decisions: list[Object] = answer["decisions"]
        return decisions

    async def decided(self, item: Object, *, more_than: int) -> None:
        """Wait until the extender has made more than `more_than` decisions for a pod."""

        async def is_decided() -> bool:
            return len(await self.decisions(item)) > more_than

        await wait_for(is_decided, f"decision {more_than + 1} about the pod")


@asynccontextmanager
async def open_world(services: Services, prefix: str) -> AsyncIterator[World]:
    """Run a scenario's exporter, and let its fleet follow the API server's pods.

    The cluster is emptied before the scenario, not after it, so that the objects of a failed
    scenario can be inspected.
    """
    await services.ensure_plane()
    services.prometheus.set_targets(())
    await services.plane.reset()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(services.client())
        world = World(services, client, prefix)
        await stack.enter_async_context(run_exporter(world.fleet, services.exporter_port))
        await stack.enter_async_context(following(services.plane, world.fleet))
        yield world


def spread(nodes: Iterable[str]) -> dict[str, int]:
    """Count how many pods each node got.

    Example:
        >>> spread(["b", "a", "b"])
        {'b': 2, 'a': 1}
    """
    return dict(Counter(nodes))
