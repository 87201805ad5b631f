"""Track the devices that nodes offer: a lower number than before, sharing by pods, and models."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from extender.core.devices.expected_devices import ExpectedDevice
from extender.core.devices.gpu_models import join_models, normalize_model
from extender.core.devices.readings import DeviceKey
from extender.core.nodes.inventory import MODEL_LABELS, NodeRecord, PodRecord
from extender.core.nodes.snapshot import PoolRow
from extender.core.policy import Freshness
from extender.fleet.device_holders import TenantsByRow
from extender.fleet.store import DeviceStore

_Offered = Mapping[str, int]
"""`status.capacity` of a node, by resource."""


class OfferChanges:
    """Times at which nodes last began to offer fewer devices, or came back.

    Readings may not show such a change yet.
    """

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def forget(self, node: str, now: float, freshness: Freshness) -> None:
        """Record that a node was removed; it may come back with fewer or other devices."""
        oldest = now - freshness.forget_seconds
        self._at = {name: at for name, at in self._at.items() if at > oldest}
        self._at[node] = now

    def shift_back(self, seconds: float) -> None:
        """Shift all recorded times back after the clock was set back by this many seconds."""
        self._at = {name: at - seconds for name, at in self._at.items()}

    def note(self, before: NodeRecord | None, node: NodeRecord, now: float) -> None:
        """Record whether a node offers fewer devices than before, or came back."""
        is_back = before is None and node.name in self._at
        had = {} if before is None else before.capacity
        has_fewer = any(node.capacity.get(resource, 0) < count for resource, count in had.items())
        if is_back or has_fewer:
            self._at[node.name] = now

    def since(self, node: str) -> float:
        """Return the time of the last change, seconds since the epoch; -inf if there was none."""
        return self._at.get(node, -inf)

    def is_recent(self, node: str, now: float, freshness: Freshness) -> bool:
        """Return whether readings may not show the last change yet; forget it otherwise."""
        is_late = now - self.since(node) <= freshness.max_age_seconds
        if not is_late:
            self._at.pop(node, None)
        return is_late


class ShareEvidence:
    """Evidence that a node has fewer devices than it offers, because pods share them.

    The evidence stays valid after the pods or sources are gone. A source that reports fewer devices
    than the node offers is no evidence: it may miss some.
    """

    def __init__(self, store: DeviceStore) -> None:
        self._store = store
        self._by_pods: dict[str, _Offered] = {}
        self._replicas: dict[str, Mapping[str, int]] = {}

    def forget(self, node: str) -> None:
        """Forget a removed node."""
        self._by_pods.pop(node, None)
        self._replicas.pop(node, None)

    def note_replicas(self, replicas: Mapping[str, Mapping[str, int]]) -> set[str]:
        """Record the replicas of each device that kubelets offer; return the changed nodes.

        Args:
            replicas: replicas by node and MIG profile, as agents report.
        """
        changed = {
            node for node, by_profile in replicas.items() if self._replicas.get(node) != by_profile
        }
        self._replicas.update(replicas)
        return changed

    def replicas_on(self, node: str) -> Mapping[str, int]:
        """Return the replicas of each device that a node's kubelet offers, by MIG profile."""
        return self._replicas.get(node, {})

    def note_divided(
        self, devices: Iterable[DeviceKey], nodes: Mapping[str, NodeRecord]
    ) -> set[str]:
        """Record devices that pods share; return the nodes that were not known to share devices.

        Args:
            devices: shared devices.
            nodes: allocated nodes, by name.
        """
        rows = (self._store.row_of(device) for device in devices)
        infos = (self._store.info(row) for row in rows if row is not None)
        names = {info.node for info in infos if info is not None} & nodes.keys()
        changed = {name for name in names if self._by_pods.get(name) != nodes[name].capacity}
        self._by_pods.update({name: nodes[name].capacity for name in changed})
        return changed

    def note(self, node: NodeRecord, pods: Sequence[PodRecord], tenants: TenantsByRow) -> None:
        """Record whether two pods of a node hold the same device.

        Args:
            pods: pods that hold devices of it.
            tenants: pods on each device. A terminating pod does not count, because another pod may
                already hold its device.
        """
        counted = {
            pod.key for pod in pods if pod.resources and not (pod.claimed or pod.is_deleting)
        }
        if any(len(counted.intersection(on_it)) > 1 for on_it in tenants.values()):
            self._by_pods[node.name] = node.capacity

    def is_divided(self, node: NodeRecord) -> bool:
        """Return whether there is evidence that a node shares its devices."""
        return self._by_pods.get(node.name) == node.capacity


_MOST_MODELS = 64
"""Limit for the models that one node adds: its agent may report other ones each time. A node with
several models adds one for each mix of them."""


_MOST_IN_ALL = 512
"""Limit for distinct models, those of removed nodes included. Numbers are not reused, and each
decision about a pod that names models compares all of them."""


class ModelNumbers:
    """Assigns a number to each GPU model, for rows and snapshots; 0 is an unknown model."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {"": 0}
        self._numbers: dict[str, int] = {}
        self._added: Counter[str] = Counter()

    @property
    def names(self) -> tuple[str, ...]:
        """Normalized model names; a row's `model_id` is an index into them."""
        return tuple(self._names)

    def number(self, model: str, node: str) -> int:
        """Return the number of a model that a node has; 0 if there are too many models."""
        if model not in self._numbers:
            words = normalize_model(model)
            if self._added[node] >= _MOST_MODELS or len(self._numbers) >= _MOST_IN_ALL:
                return self._names.get(words, 0)
            self._added[node] += 1
            self._numbers[model] = self._names.setdefault(words, len(self._names))
        return self._numbers[model]

    def on(self, node: NodeRecord) -> int:
        """Return the number of the model in a node's labels."""
        labels = map(node.labels.get, MODEL_LABELS)
        return self.number(next((label for label in labels if label), ""), node.name)

    def to_land_on(
        self, node: str, row: PoolRow, devices: Sequence[ExpectedDevice], count: int
    ) -> int:
        """Return the number of the model that a pod would get; each mix has its own number.

        Args:
            devices: the devices of the row's slots.
            count: number of devices that the kubelet has. If there are more, some may not be
                offered, such as a card for displays, and the first model counts.
        """
        if len(devices) > count or not self._are_several(devices):
            return row.model_id
        used = zip(devices, row.used, strict=True)
        free = [device for device, shares in used if shares < row.replicas]
        landing = free if free and row.is_agreed else devices
        if not self._are_several(landing):
            return next((device.model_id for device in landing if device.model_id), row.model_id)
        names = self.names
        mix = join_models(names[one.model_id] for one in landing if one.model_id)
        return self.number(mix, node)

    @staticmethod
    def _are_several(devices: Sequence[ExpectedDevice]) -> bool:
        return len({device.model_id for device in devices} - {0}) > 1
