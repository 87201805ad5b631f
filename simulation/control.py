"""Simulate the control plane: create, bind, run and end pods, and register nodes."""

import uuid
from dataclasses import dataclass, field

from simulation.fleet import SimulatedFleet
from simulation.kubelet import observe_pod, pod_ref
from simulation.objects import (
    JsonObject,
    Kind,
    bound_pod_object,
    child,
    copy_json,
    node_object,
    tenant_pods,
    timestamp,
)
from testkit.apiserver import ObjectServer

TENANT_AGE_SECONDS = 7200.0
"""Age of the pods that the fleet starts with."""

_BOOKMARK_SECONDS = 5.0


def _store() -> ObjectServer:
    kinds: dict[str, str] = {Kind.NODES: "Node", Kind.PODS: "Pod"}
    return ObjectServer(kinds, version=1, bookmark_seconds=_BOOKMARK_SECONDS)


class ConflictError(ValueError):
    """Error: the object already exists, or the pod is already bound."""


class AbsentError(LookupError):
    """Error: the object does not exist."""


@dataclass(slots=True, kw_only=True)
class SimulatedControlPlane:
    """The fleet's nodes and pods as Kubernetes objects.

    Attributes:
        fleet: fleet on which bound pods are placed.
        store: the objects, and their lists and watches over HTTP.
        events: all posted Events, oldest first.
    """

    fleet: SimulatedFleet
    store: ObjectServer = field(default_factory=_store)
    events: list[JsonObject] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Register the nodes and their running pods."""
        self.sync_nodes()
        for pod in tenant_pods(self.fleet, started_at=self.fleet.clock() - TENANT_AGE_SECONDS):
            self.store.put(Kind.PODS, pod)

    def sync_nodes(self) -> None:
        """Update the Node objects that differ from the fleet's nodes."""
        now = self.fleet.clock()
        for node in self.fleet.nodes.values():
            fresh = node_object(node, now=now)
            known = self.store.get(Kind.NODES, "", node.name)
            if known is None or _resources(known) != _resources(fresh):
                self.store.put(Kind.NODES, fresh)
        for _, name in list(self.store.items[Kind.NODES]):
            if name not in self.fleet.nodes:
                self.store.remove(Kind.NODES, "", name)

    def create_pod(self, pod: JsonObject, namespace: str = "default") -> JsonObject:
        """Create a pending pod with a UID.

        Raises:
            ConflictError: a pod with this name exists.
        """
        created = copy_json(pod)
        metadata = child(created, "metadata")
        metadata.setdefault("namespace", namespace)
        name = str(metadata.get("name", ""))
        if self.store.get(Kind.PODS, str(metadata["namespace"]), name) is not None:
            raise ConflictError(f'pods "{name}" already exists')
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata["creationTimestamp"] = timestamp(self.fleet.clock())
        spec = child(created, "spec")
        spec.setdefault("schedulerName", "default-scheduler")
        spec.setdefault("priority", 0)
        created["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        return self.store.put(Kind.PODS, created)

    def bind(self, namespace: str, name: str, node: str) -> JsonObject:
        """Bind a pod to a node and start it; the pod fails if it does not fit.

        Raises:
            AbsentError: the pod or the node does not exist.
            ConflictError: the pod is already bound.
        """
        pod = copy_json(self._pod(namespace, name))
        if child(pod, "spec").get("nodeName"):
            raise ConflictError(f"pod {name} is already assigned to a node")
        if self.store.get(Kind.NODES, "", node) is None:
            raise AbsentError(f'nodes "{node}" not found')
        now = self.fleet.clock()
        child(pod, "spec")["nodeName"] = node
        child(pod, "status")["conditions"] = [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(now)}
        ]
        self.store.put(Kind.PODS, pod)
        refusal = observe_pod(self.fleet, pod)
        if refusal:
            return self._fail(pod, reason="UnexpectedAdmissionError", message=refusal)
        running = bound_pod_object(pod, uid=pod_ref(pod).uid, node=node, bound_at=now)
        return self.store.put(Kind.PODS, running)

    def delete_pod(self, namespace: str, name: str) -> JsonObject:
        """Delete a pod and free its devices.

        Raises:
            AbsentError: the pod does not exist.
        """
        observe_pod(self.fleet, self._pod(namespace, name), is_deleted=True)
        removed = self.store.remove(Kind.PODS, namespace, name)
        return removed or {}

    def _fail(self, pod: JsonObject, *, reason: str, message: str) -> JsonObject:
        now = timestamp(self.fleet.clock())
        status = child(pod, "status")
        status |= {"phase": "Failed", "reason": reason, "message": message}
        containers = status.get("containerStatuses")
        for container in containers if isinstance(containers, list) else []:
            started_at = container["state"].get("running", {}).get("startedAt", now)
            container["ready"] = container["started"] = False
            container["state"] = {
                "terminated": {"exitCode": 1, "startedAt": started_at, "finishedAt": now}
            }
        observe_pod(self.fleet, pod)
        return self.store.put(Kind.PODS, pod)

    def _pod(self, namespace: str, name: str) -> JsonObject:
        pod = self.store.get(Kind.PODS, namespace, name)
        if pod is None:
            raise AbsentError(f'pods "{name}" not found')
        return pod


def _resources(node: JsonObject) -> tuple[object, ...]:
    status = child(node, "status")
    labels = child(node, "metadata").get("labels")
    return status.get("capacity"), status.get("allocatable"), labels
