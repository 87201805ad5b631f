"""Whether a node sells shares of its devices: by evidence, as long as it offers as many."""

from collections.abc import Iterable, Mapping, Sequence

from extender.core.inventory import NodeRecord, PodRecord
from extender.core.readings import DeviceKey, Own
from extender.fleet.held import TenantsByRow
from extender.fleet.store import DeviceStore

Offered = Mapping[str, int]
"""A node's `status.capacity` by resource."""


class SharingEvidence:
    """What tells that fewer devices than a node offers are all that it has.

    Pods come and go, and sources on the nodes too: the shares stay.

    Args:
        store: the devices.
    """

    def __init__(self, store: DeviceStore) -> None:
        self._store = store
        self._by_pods: dict[str, Offered] = {}
        self._fewer_seen: dict[str, Offered] = {}
        self._all_seen: dict[str, Offered] = {}
        self._incomplete: set[str] = set()

    def forget(self, node: str) -> None:
        """Forget a node that is gone."""
        for evidence in (self._by_pods, self._fewer_seen, self._all_seen):
            evidence.pop(node, None)
        self._incomplete.discard(node)

    def note_incomplete(self, own: Own) -> None:
        """Note of which nodes a source on them may miss devices: before it is taken over."""
        self._incomplete |= own.incomplete

    def note_complete(self, own: Own) -> set[str]:
        """Note of which it misses none, once it is; return those where that is news."""
        news = self._incomplete.intersection(own.nodes) - own.incomplete
        self._incomplete -= news
        return news

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
        rows = list(tenants)
        if node.name in self._incomplete or not self._store.is_shown_by_own(rows):
            return
        if len(rows) >= sum(node.capacity.values()):
            self._all_seen[node.name] = node.capacity
        elif len(rows) < sum(node.allocatable.values()):
            # Where the kubelet offers as many as are seen, the others are broken.
            self._fewer_seen[node.name] = node.capacity

    def is_divided(self, node: NodeRecord) -> bool:
        """Tell whether there is evidence that a node sells shares of its devices.

        That a source on it sees fewer than it offers is none where it once saw as many.
        """
        if self._by_pods.get(node.name) == node.capacity:
            return True
        is_fewer = self._fewer_seen.get(node.name) == node.capacity
        return is_fewer and self._all_seen.get(node.name) != node.capacity
