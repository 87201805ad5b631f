"""Whether a node sells shares of its devices: by evidence, as long as it offers as many."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from extender.core.devices.readings import DeviceKey
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.policy import Freshness
from extender.fleet.device_holders import TenantsByRow
from extender.fleet.store import DeviceStore

# When nodes came to have fewer devices, or came back: readings may not show that yet.


class OfferChanges:
    """When each node last came to offer fewer devices, or came back, as long as that is news."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def forget(self, node: str, now: float, freshness: Freshness) -> None:
        """Note that a node is gone; it may come back with fewer devices, or others."""
        oldest = now - freshness.forget_seconds
        self._at = {name: at for name, at in self._at.items() if at > oldest}
        self._at[node] = now

    def put_back(self, seconds: float) -> None:
        """Date all changes back: the clock was put back by so much."""
        self._at = {name: at - seconds for name, at in self._at.items()}

    def note(self, before: NodeRecord | None, node: NodeRecord, now: float) -> None:
        """Note if a node offers fewer devices than before, or is back."""
        is_back = before is None and node.name in self._at
        had = {} if before is None else before.capacity
        has_fewer = any(node.capacity.get(resource, 0) < count for resource, count in had.items())
        if is_back or has_fewer:
            self._at[node.name] = now

    def since(self, node: str) -> float:
        """Return when that was, seconds since the epoch; -inf for never."""
        return self._at.get(node, -inf)

    def is_news(self, node: str, now: float, freshness: Freshness) -> bool:
        """Tell whether readings may not show it yet; forget it where they must."""
        is_late = now - self.since(node) <= freshness.max_age_seconds
        if not is_late:
            self._at.pop(node, None)
        return is_late


Offered = Mapping[str, int]
"""A node's `status.capacity` by resource."""


class ShareEvidence:
    """What tells that fewer devices than a node offers are all that it has.

    Pods come and go, and sources on the nodes too: the shares stay. That sources show fewer devices
    than the node offers tells nothing: they may miss some.

    Args:
        store: the devices.
    """

    def __init__(self, store: DeviceStore) -> None:
        self._store = store
        self._by_pods: dict[str, Offered] = {}
        self._told: dict[str, Mapping[str, int]] = {}

    def forget(self, node: str) -> None:
        """Forget a node that is gone."""
        self._by_pods.pop(node, None)
        self._told.pop(node, None)

    def note_replicas(self, told: Mapping[str, Mapping[str, int]]) -> set[str]:
        """Note how many shares of each device kubelets offer; return the nodes where that is news.

        Args:
            told: by node and MIG profile, as sources on these nodes say.
        """
        news = {node for node, replicas in told.items() if self._told.get(node) != replicas}
        self._told.update(told)
        return news

    def told(self, node: str) -> Mapping[str, int]:
        """Return how many shares of each device a node's kubelet offers, by MIG profile."""
        return self._told.get(node, {})

    def note_divided(
        self, devices: Iterable[DeviceKey], nodes: Mapping[str, NodeRecord]
    ) -> set[str]:
        """Remember that devices are sold in shares; return the nodes where that is news.

        Args:
            devices: the devices.
            nodes: the nodes that are laid out, by name.
        """
        rows = (self._store.row_of(device) for device in devices)
        infos = (self._store.info(row) for row in rows if row is not None)
        names = {info.node for info in infos if info is not None} & nodes.keys()
        news = {name for name in names if self._by_pods.get(name) != nodes[name].capacity}
        self._by_pods.update({name: nodes[name].capacity for name in news})
        return news

    def note(self, node: NodeRecord, pods: Sequence[PodRecord], tenants: TenantsByRow) -> None:
        """Note what a node's pods and devices tell.

        Args:
            node: the node.
            pods: the pods that hold its devices.
            tenants: pods on each device. One that is being deleted may have left its device to the
                next already.
        """
        counted = {
            pod.key for pod in pods if pod.resources and not (pod.claimed or pod.is_deleting)
        }
        if any(len(counted.intersection(on_it)) > 1 for on_it in tenants.values()):
            self._by_pods[node.name] = node.capacity

    def is_divided(self, node: NodeRecord) -> bool:
        """Tell whether its pods are evidence that a node sells shares of its devices."""
        return self._by_pods.get(node.name) == node.capacity
