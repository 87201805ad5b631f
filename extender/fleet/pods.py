"""Store the GPU pods, with the indexes that many queries need."""

from dataclasses import dataclass

from extender.core.name_counts import NameCounts
from extender.core.nodes.inventory import PodRecord
from extender.fleet.pod_memory import PodMemory


@dataclass(slots=True)
class PodChanges:
    """Counters of changes to pods.

    Attributes:
        waiting: changes to pods that are not bound and have not ended.
        holding: changes to pods that hold devices.
    """

    waiting: int = 0
    holding: int = 0


class KnownPods:
    """GPU pods by UID.

    Attributes:
        by_uid: all GPU pods; read only.
        unbound: GPU pods that are not bound and have not ended; read only.
        namespaces: number of GPU pods by namespace.
        memory: memory that they use on shared devices.
        changes: counters of changes to the pods.
    """

    def __init__(self) -> None:
        self.by_uid: dict[str, PodRecord] = {}
        self.unbound: dict[str, PodRecord] = {}
        self.namespaces = NameCounts()
        self.memory = PodMemory(self.by_uid)
        self.changes = PodChanges()

    def put(self, record: PodRecord) -> None:
        """Add or update a pod; an unbound one moves to the end."""
        # Count the namespace first, so that the namespace of a single pod is not removed meanwhile.
        self.namespaces.add(record.namespace)
        self._note_end(record.uid)
        self.by_uid[record.uid] = record
        if not (record.node or record.phase.is_terminal):
            self.unbound[record.uid] = record
            self.changes.waiting += 1
        self.changes.holding += record.holds_devices

    def pop(self, uid: str) -> PodRecord | None:
        """Remove a pod and return it; None if it is unknown."""
        self._note_end(uid)
        record = self.by_uid.pop(uid, None)
        if record is not None:
            self.memory.forget(uid)
        return record

    def _note_end(self, uid: str) -> None:
        """Count the change when a pod leaves its former state."""
        before = self.by_uid.get(uid)
        if before is not None:
            self.namespaces.remove(before.namespace)
            self.changes.holding += before.holds_devices
            self.changes.waiting += self.unbound.pop(uid, None) is not None
