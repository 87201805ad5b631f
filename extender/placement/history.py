"""The last decisions, each with what it was made from."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from extender.core.decision.decision import Decision
from extender.core.decision.verdicts import NodeVerdict
from extender.core.name_counts import NameCounts
from extender.core.request.request import GpuRequest, PodRef
from extender.core.steps import Steps, finish
from extender.placement.evidence import PlacedEvidence

Gather = Callable[[Sequence[str]], tuple[PlacedEvidence, ...]]
"""Returns what a verdict on some nodes is made from."""


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
        evidence: what the verdicts on the best nodes, and on the one that the pod was bound to,
            were made from.
        is_shadow: the answer changed nothing: every candidate passed.
        bound_node: where kube-scheduler put the pod, "" while it is not known.
        bound_at: when that was seen, seconds since the epoch.
        gather: returns the evidence on any candidate; dropped after a while, and once the pod is
            bound.
        gather_late: returns what is known of any node by now instead, where that is gone; dropped
            once the pod is bound.
    """

    number: int
    at: float
    verb: str
    pod: PodRef
    request: GpuRequest
    decision: Decision
    snapshot_version: int
    seconds: float
    is_shadow: bool = False
    evidence: tuple[PlacedEvidence, ...] = ()
    bound_node: str = ""
    bound_at: float = 0.0
    gather: Gather | None = field(default=None, repr=False)
    gather_late: Gather | None = field(default=None, repr=False)

    @property
    def leaves_none(self) -> bool:
        """Whether the answer leaves the pod no node."""
        return self.decision.best is None and not self.is_shadow

    @property
    def details(self) -> tuple[NodeVerdict, ...]:
        """The best nodes in full, and the one that the pod was bound to."""
        return tuple(finish(self.details_in_steps()))

    def details_in_steps(self) -> Steps[list[NodeVerdict]]:
        """Return them likewise, some nodes in each step."""
        found: list[NodeVerdict] = []
        for part in self.evidence:
            found += yield from part.explain_in_steps()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is left of the last decision about a pod until that is bound.

    Attributes:
        number: the decision's.
        at: when it was made, seconds since the epoch.
        verb: filter or prioritize.
        best: our first choice, None where no node passed.
    """

    number: int
    at: float
    verb: str
    best: str | None


EXPLAINABLE = 8
"""So many of the newest decisions keep their snapshot, to explain the node bound to later ..."""

EXPLAINABLE_SECONDS = 3.0
"""... for so long: snapshots of different seconds share little, and each takes megabytes. Where the
binding comes later, the node is explained as it is by then."""


MAX_CHOICES: Final = 20_000
"""Of so many pods that wait the first choice is remembered at least, some 5 MB: a decision may be
forgotten long before its pod is bound."""

PIECE_RECORDS = 256
"""Decisions that are forgotten before others may have their turn: few milliseconds."""


class DecisionHistory:
    """The last decisions, oldest first; bounded.

    Args:
        length: so many of them.
        clock: seconds since the epoch.

    Attributes:
        namespaces: where the pods are that they are about; to be read only.
    """

    def __init__(self, length: int, clock: Callable[[], float] = time.time) -> None:
        self.namespaces = NameCounts()
        self._clock = clock
        self._length = length
        self._records: OrderedDict[int, DecisionRecord] = OrderedDict()
        self._by_pod: dict[str, int] = {}
        self._choices: OrderedDict[str, Choice] = OrderedDict()
        self._explainable: deque[DecisionRecord] = deque()
        self._numbers = 0

    def __iter__(self) -> Iterator[DecisionRecord]:
        """Iterate over the decisions, the newest first."""
        return reversed(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def resize_in_steps(self, length: int) -> Steps[None]:
        """Remember so many decisions from now on; the oldest ones beyond are forgotten in steps."""
        self._length = length
        while len(self._records) > length:
            for _ in range(min(PIECE_RECORDS, len(self._records) - length)):
                self._forget_oldest()
            yield

    def next_number(self) -> int:
        """Return the number of the next decision."""
        self._numbers += 1
        return self._numbers

    def add(self, record: DecisionRecord) -> None:
        """Remember a decision; the oldest one is forgotten."""
        self._records[record.number] = record
        self.namespaces.add(record.pod.namespace)
        self._by_pod[record.pod.uid] = record.number
        self._explainable.append(record)
        while (
            len(self._explainable) > EXPLAINABLE
            or record.at - self._explainable[0].at > EXPLAINABLE_SECONDS
        ):
            self._explainable.popleft().gather = None
        if len(self._records) > self._length:
            self._forget_oldest()
        self._choices.pop(record.pod.uid, None)
        self._choices[record.pod.uid] = Choice(
            number=record.number, at=record.at, verb=record.verb, best=record.decision.best
        )
        if len(self._choices) > max(MAX_CHOICES, self._length):
            self._choices.popitem(last=False)

    def _forget_oldest(self) -> None:
        _, oldest = self._records.popitem(last=False)
        self.namespaces.remove(oldest.pod.namespace)
        if self._by_pod.get(oldest.pod.uid) == oldest.number:
            del self._by_pod[oldest.pod.uid]

    def get(self, number: int) -> DecisionRecord | None:
        """Return the decision of a number, None where it is not remembered."""
        return self._records.get(number)

    def last_of(self, uid: str) -> DecisionRecord | None:
        """Return the last decision about a pod, None where it is not remembered."""
        return self._records.get(self._by_pod.get(uid, -1))

    def take_choice(self, uid: str) -> Choice | None:
        """Return what was chosen last for a pod, once; also where the decision is forgotten."""
        return self._choices.pop(uid, None)

    def note_bound(self, uid: str, node: str) -> DecisionRecord | None:
        """Note where kube-scheduler put a pod; return the decision it followed, once.

        To be called before the pod counts on its node: it is no neighbour of its own.
        """
        record = self.last_of(uid)
        if record is None or record.bound_node:
            return None
        # Where no other decision came since, its snapshot is there, and as old as it is.
        while self._explainable and self._clock() - self._explainable[0].at > EXPLAINABLE_SECONDS:
            self._explainable.popleft().gather = None
        before = self._records.get(record.number - 1)
        _note_bound(record, node, self._clock())
        if before is not None and before.pod.uid == uid:
            # What filter said of the same attempt: kube-scheduler asks prioritize right after it.
            _note_bound(before, node, self._clock())
        return record


def _note_bound(record: DecisionRecord, node: str, at: float) -> None:
    """Note the node in one record, and explain it there as long as that is possible."""
    record.bound_node, record.bound_at = node, at
    gather = record.gather or record.gather_late
    if gather and all(node not in part.nodes for part in record.evidence):
        record.evidence = (*record.evidence, *gather([node]))
    record.gather = record.gather_late = None
