"""The GPU pods that there are, and what is asked of all of them again and again."""

from extender.core.inventory import PodRecord
from extender.core.tally import Tally
from extender.fleet.pod_memory import PodMemory


class KnownPods:
    """GPU pods by UID; a pod's namespace never changes.

    Attributes:
        by_uid: all of them; to be read only.
        unbound: those that are on no node and have not ended; to be read only.
        namespaces: where they are.
        memory: what they were seen to hold of devices that they share.
    """

    def __init__(self) -> None:
        self.by_uid: dict[str, PodRecord] = {}
        self.unbound: dict[str, PodRecord] = {}
        self.namespaces = Tally()
        self.memory = PodMemory(self.by_uid)

    def put(self, record: PodRecord) -> None:
        """Take over a pod that was added or changed; it comes last of those that are unbound."""
        if record.uid not in self.by_uid:
            self.namespaces.add(record.namespace)
        self.by_uid[record.uid] = record
        self.unbound.pop(record.uid, None)
        if not (record.node or record.phase.is_terminal):
            self.unbound[record.uid] = record

    def pop(self, uid: str) -> PodRecord | None:
        """Forget a pod; return it, None where there is none."""
        self.unbound.pop(uid, None)
        record = self.by_uid.pop(uid, None)
        if record is not None:
            self.namespaces.remove(record.namespace)
            self.memory.forget(uid)
        return record
