"""The GPU pods that there are, and what is asked of all of them again and again."""

from dataclasses import dataclass

from extender.core.name_counts import NameCounts
from extender.core.nodes.inventory import PodRecord
from extender.fleet.pod_memory import PodMemory


@dataclass(slots=True)
class PodChanges:
    """How often pods of a kind came, went or became others.

    Attributes:
        waiting: of those that are on no node and have not ended.
        holding: of those that hold devices.
    """

    waiting: int = 0
    holding: int = 0


class KnownPods:
    """GPU pods by UID.

    Attributes:
        by_uid: all of them; to be read only.
        unbound: those that are on no node and have not ended; to be read only.
        namespaces: where they are.
        memory: what they were seen to hold of devices that they share.
        changes: how often those that wait and those that hold devices have changed.
    """

    def __init__(self) -> None:
        self.by_uid: dict[str, PodRecord] = {}
        self.unbound: dict[str, PodRecord] = {}
        self.namespaces = NameCounts()
        self.memory = PodMemory(self.by_uid)
        self.changes = PodChanges()

    def put(self, record: PodRecord) -> None:
        """Take over a pod that was added or changed; it comes last of those that are unbound."""
        # First: a namespace whose only pod this is never leaves the names.
        self.namespaces.add(record.namespace)
        self._note_end(record.uid)
        self.by_uid[record.uid] = record
        if not (record.node or record.phase.is_terminal):
            self.unbound[record.uid] = record
            self.changes.waiting += 1
        self.changes.holding += record.holds_devices

    def pop(self, uid: str) -> PodRecord | None:
        """Forget a pod; return it, None where there is none."""
        self._note_end(uid)
        record = self.by_uid.pop(uid, None)
        if record is not None:
            self.memory.forget(uid)
        return record

    def _note_end(self, uid: str) -> None:
        """Note that a pod is no longer what it was."""
        before = self.by_uid.get(uid)
        if before is not None:
            self.namespaces.remove(before.namespace)
            self.changes.holding += before.holds_devices
            self.changes.waiting += self.unbound.pop(uid, None) is not None
