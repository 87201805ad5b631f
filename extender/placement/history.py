"""The last decisions, each with what it was made from."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from extender.core.decision import Decision
from extender.core.explain import NodeVerdict
from extender.core.request import GpuRequest, PodRef


@dataclass(slots=True, kw_only=True)
class DecisionRecord:
    """One answer about one pod.

    Attributes:
        number: grows with every decision of this process.
        at: when it was made, seconds since the epoch.
        verb: filter or prioritize.
        pod: the pod.
        request: what it asks for.
        decision: the verdict on every candidate.
        snapshot_version: which snapshot it was made from.
        seconds: how long it took.
        details: the best nodes in full, and the one that the pod was bound to.
        bound_node: where kube-scheduler put the pod, "" while it is not known.
        explain: returns the full record of any candidate; dropped once the pod is bound.
    """

    number: int
    at: float
    verb: str
    pod: PodRef
    request: GpuRequest
    decision: Decision
    snapshot_version: int
    seconds: float
    details: tuple[NodeVerdict, ...] = ()
    bound_node: str = ""
    explain: Callable[[list[str]], tuple[NodeVerdict, ...]] | None = field(default=None, repr=False)


EXPLAINABLE = 32
"""So many of the newest decisions keep their snapshot, to explain the node bound to later."""


class DecisionHistory:
    """The last decisions, oldest first; bounded."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._records: OrderedDict[int, DecisionRecord] = OrderedDict()
        self._by_pod: dict[str, int] = {}
        self._numbers = 0

    def __iter__(self) -> Iterator[DecisionRecord]:
        """Iterate over the decisions, the newest first."""
        return reversed(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def next_number(self) -> int:
        """Return the number of the next decision."""
        self._numbers += 1
        return self._numbers

    def add(self, record: DecisionRecord) -> None:
        """Remember a decision; the oldest one is forgotten."""
        self._records[record.number] = record
        self._by_pod[record.pod.uid] = record.number
        released = self._records.get(record.number - EXPLAINABLE)
        if released is not None:
            released.explain = None
        while len(self._records) > self._length:
            _, oldest = self._records.popitem(last=False)
            if self._by_pod.get(oldest.pod.uid) == oldest.number:
                del self._by_pod[oldest.pod.uid]

    def last_of(self, uid: str) -> DecisionRecord | None:
        """Return the last decision about a pod, None where it is not remembered."""
        return self._records.get(self._by_pod.get(uid, -1))

    def note_bound(self, uid: str, node: str) -> DecisionRecord | None:
        """Note where kube-scheduler put a pod; return the decision it followed, once."""
        record = self.last_of(uid)
        if record is None or record.bound_node:
            return None
        before = self._records.get(record.number - 1)
        _note_bound(record, node)
        if before is not None and before.pod.uid == uid:
            # What filter said of the same attempt: kube-scheduler asks prioritize right after it.
            _note_bound(before, node)
        return record


def _note_bound(record: DecisionRecord, node: str) -> None:
    """Note the node in one record, and explain it there as long as that is possible."""
    record.bound_node = node
    if record.explain and node not in {detail.node for detail in record.details}:
        record.details = (*record.details, *record.explain([node]))
    record.explain = None
