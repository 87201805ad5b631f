"""Store the last decisions with their inputs."""

import pickle
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from extender.core.decision.decision import Decision
from extender.core.decision.health import shown_by, throttling_in_words
from extender.core.decision.signals import busiest_signal
from extender.core.decision.verdicts import (
    DeviceVerdict,
    NodeVerdict,
    ReportedSignal,
    VerdictEvidence,
    explain,
    part_of,
)
from extender.core.devices.readings import Column, DeviceInfo, Signal
from extender.core.nodes.node_names import NamesAt
from extender.core.nodes.snapshot import Rows, Telemetry, batch_rows
from extender.core.request.request import GpuRequest, PodRef
from extender.core.steps import Steps, finish
from extender.fleet.columns import ReportedValues
from extender.fleet.latest_values import ReportedSignals
from extender.fleet.pods import NameCounts
from extender.fleet.store import DeviceStore

_PIECE_NODES: Final = 16
"""Nodes per cooperative step: 3 ms with eight devices each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEvidence:
    """Inputs of the verdicts on some nodes, with their devices.

    Attributes:
        evidence: the columns; one row per node, one column per device slot.
        infos: per device, node by node, its identity; None if no source reported it.
        sources: per device, source of its activity.
        age_seconds: per device, age of its activity at the decision; NaN without a reading.
        at: time of the decision, seconds since the epoch.
        shown: other reported values of each device, with source and time.
        health: source and time of the reading behind the health cause, by device number; only for
            devices with such a cause.
        is_late: collected at the binding, because the inputs of the decision were gone.
    """

    evidence: VerdictEvidence
    infos: tuple[DeviceInfo | None, ...]
    sources: tuple[str, ...]
    age_seconds: Column
    at: float
    shown: ReportedValues
    health: Mapping[int, tuple[str, float]]
    is_late: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return self.evidence.nodes

    def explain(self) -> tuple[NodeVerdict, ...]:
        """Return the verdict on each node, with the identity of its devices."""
        return tuple(finish(self.explain_in_steps()))

    def explain_in_steps(self) -> Steps[list[NodeVerdict]]:
        """Return the verdicts as in `explain`, in cooperative steps."""
        at = iter(range(len(self.infos)))
        verdicts: list[NodeVerdict] = []
        for start in range(0, len(self.nodes), _PIECE_NODES):
            verdicts += (
                replace(
                    verdict,
                    is_late=self.is_late,
                    devices=tuple(self._named(device, next(at)) for device in verdict.devices),
                )
                for verdict in explain(part_of(self.evidence, start, start + _PIECE_NODES))
            )
            yield
        return verdicts

    def _named(self, device: DeviceVerdict, at: int) -> DeviceVerdict:
        info, age = self.infos[at], float(self.age_seconds[at])
        if info is None or not info.uuid:
            return device
        reading = self.shown.reading(at)
        reasons = reading.get(Signal.CLOCK_EVENT_REASONS)
        return replace(
            device,
            index=info.index,
            uuid=info.uuid,
            gpu_instance_id=info.gpu_instance_id,
            source=self.sources[at],
            age_seconds=None if np.isnan(age) else age,
            temperature_celsius=reading.get(Signal.TEMPERATURE),
            memory_temperature_celsius=reading.get(Signal.MEMORY_TEMPERATURE),
            throttling=None if reasons is None else throttling_in_words(reasons),
            signals=self._signals(at, busiest_signal(reading, float(self.shown.rest_watts[at]))),
        )

    def _signals(self, at: int, busiest: Signal | None) -> dict[str, ReportedSignal]:
        """Return source and age of each reported signal of a device."""
        age = float(self.age_seconds[at])
        of_activity = ReportedSignal(
            self.sources[at], age, "" if busiest is None else busiest.value
        )
        reported = {} if np.isnan(age) else {"utilization": of_activity}
        for name, word in {**self.shown.sources(at), "health": self.health.get(at)}.items():
            if word is not None:
                reported[name] = ReportedSignal(word[0], max(self.at - word[1], 0.0))
        return reported


def place_evidence(evidence: VerdictEvidence, store: DeviceStore, now: float) -> PlacedEvidence:
    """Combine the inputs of verdicts with the devices' identities and readings.

    Args:
        evidence: inputs from a snapshot whose rows still belong to the same devices.
        now: time of the decision, seconds since the epoch.
    """
    present = evidence.batch.present
    rows = evidence.batch.slots[present]
    sources, measured_at = store.activity_sources(rows)
    return PlacedEvidence(
        evidence=evidence,
        infos=tuple(map(store.info, rows.tolist())),
        sources=sources,
        age_seconds=np.maximum(now - measured_at, 0.0),
        at=now,
        shown=store.copy_reported(rows),
        health=_of_health(evidence, rows, evidence.batch.telemetry.cause[present], store),
    )


def _of_health(
    evidence: VerdictEvidence, rows: Rows, causes: Rows, store: DeviceStore
) -> dict[int, tuple[str, float]]:
    """Return source and time of the reading behind each health cause, by device number."""
    reported = {}
    for at in np.flatnonzero(causes).tolist():
        signals, row = shown_by(int(causes[at]), int(rows[at]), evidence.siblings)
        word = store.reported(signals, row)
        if word is not None:
            reported[at] = word
    return reported


_NO_BATCH: Final = batch_rows((), Telemetry.missing(0), np.zeros(0))
_NO_SIGNALS: Final = ReportedSignals(times=(), origins=(), names=())
_NO_VALUES: Final = ReportedValues(
    signals=(),
    values=np.zeros((0, 0), dtype=np.float32),
    limit_watts=np.zeros(0, dtype=np.float32),
    rest_watts=np.zeros(0, dtype=np.float32),
    memory=_NO_SIGNALS,
    heat=_NO_SIGNALS,
    clocks=_NO_SIGNALS,
)


class PackedEvidence:
    """Evidence with compressed columns: 8 KB instead of 60 for 20 nodes with 8 devices.

    Attributes:
        nodes: names of the nodes.
    """

    __slots__ = ("_columns", "_others", "nodes")

    def __init__(self, evidence: PlacedEvidence) -> None:
        self.nodes = evidence.nodes
        columns = (evidence.evidence.batch, evidence.age_seconds, evidence.shown)
        self._columns = zlib.compress(pickle.dumps(columns, pickle.HIGHEST_PROTOCOL), level=1)
        # The rest of the process stores most of the others, too.
        self._others = replace(
            evidence,
            evidence=replace(evidence.evidence, batch=_NO_BATCH),
            age_seconds=np.zeros(0),
            shown=_NO_VALUES,
        )

    def unpack(self) -> PlacedEvidence:
        """Return the evidence."""
        columns = pickle.loads(zlib.decompress(self._columns))  # noqa: S301 - of this process
        batch, age_seconds, shown = columns
        evidence = replace(self._others.evidence, batch=batch)
        return replace(self._others, evidence=evidence, age_seconds=age_seconds, shown=shown)


_Gather = Callable[[Sequence[str]], tuple[PlacedEvidence, ...]]
"""Collects the inputs of the verdicts on some nodes."""


@dataclass(slots=True, kw_only=True)
class DecisionRecord:
    """One decision about one pod.

    Attributes:
        number: number of the decision in this process, increasing.
        at: time of the decision, seconds since the epoch.
        verb: filter or prioritize.
        seconds: duration of the computation.
        packed: inputs of the verdicts on the best nodes and on the node of the binding.
        is_shadow: shadow mode: every candidate passed.
        bound_node: node of the pod; "" until it is bound.
        bound_at: time when the binding was seen, seconds since the epoch.
        gather: collects the inputs of the verdict on any candidate; None after some seconds, and
            once the pod is bound.
        gather_late: collects the current inputs instead, for any node; None once the pod is bound.
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
    packed: tuple[PackedEvidence, ...] = ()
    bound_node: str = ""
    bound_at: float = 0.0
    gather: _Gather | None = field(default=None, repr=False)
    gather_late: _Gather | None = field(default=None, repr=False)

    @property
    def leaves_none(self) -> bool:
        """Whether the answer refused every node."""
        return self.decision.best is None and not self.is_shadow

    @property
    def evidence(self) -> Iterator[PlacedEvidence]:
        """Unpack the recorded evidence."""
        return (part.unpack() for part in self.packed)

    @property
    def details(self) -> tuple[NodeVerdict, ...]:
        """Verdicts on the best nodes, and on the node of the binding."""
        return tuple(finish(self.details_in_steps()))

    def details_in_steps(self) -> Steps[list[NodeVerdict]]:
        """Return the verdicts as in `details`, in cooperative steps."""
        found: list[NodeVerdict] = []
        for part in self.evidence:
            found += yield from part.explain_in_steps()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Summary of the last decision about a pod, kept until the pod is bound.

    Attributes:
        number: number of the decision.
        at: time of the decision, seconds since the epoch.
        verb: filter or prioritize.
        best: first choice; None if no node passed.
    """

    number: int
    at: float
    verb: str
    best: str | None


_EXPLAINABLE = 8
"""Number of latest decisions that keep their snapshot, to explain the node of a later binding."""

_EXPLAINABLE_SECONDS = 3.0
"""Time for which a decision keeps its snapshot, because each takes megabytes. After that the node
is explained from the current state."""


_MAX_CHOICES: Final = 20_000
"""Minimum number of pods whose first choice is kept, about 5 MB: a decision may be dropped long
before its pod is bound."""

_PIECE_RECORDS = 256
"""Decisions dropped per cooperative step, a few milliseconds."""


_MAX_NAMES_BYTES: Final = 64 << 20
"""Limit for candidates in all decisions that are not numbers of known nodes, about in bytes. A
client that sends other names each time must not fill the memory."""

_NAME_BYTES: Final = 64
"""Size of a string without its characters."""


def _names_bytes(record: DecisionRecord) -> int:
    """Return the approximate size of a decision's candidates, 0 if they are numbers."""
    names = record.decision.candidates
    if isinstance(names, NamesAt):
        return 0
    return _NAME_BYTES * len(names) + sum(map(len, names))


class DecisionHistory:
    """The last decisions, oldest first, up to a limit.

    Args:
        length: maximum number of decisions.
        clock: seconds since the epoch.

    Attributes:
        namespaces: number of decisions by namespace of the pod; read only.
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
        self._names_bytes = 0

    def __iter__(self) -> Iterator[DecisionRecord]:
        """Iterate over the decisions, newest first."""
        return reversed(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def resize_in_steps(self, length: int) -> Steps[None]:
        """Change the maximum number of decisions; drop the oldest ones beyond it in steps."""
        self._length = length
        while len(self._records) > length:
            for _ in range(min(_PIECE_RECORDS, len(self._records) - length)):
                self._forget_oldest()
            yield

    def next_number(self) -> int:
        """Return the number of the next decision."""
        self._numbers += 1
        return self._numbers

    def add(self, record: DecisionRecord) -> None:
        """Add a decision, and drop the oldest one beyond the limit."""
        self._records[record.number] = record
        self.namespaces.add(record.pod.namespace)
        self._by_pod[record.pod.uid] = record.number
        self._explainable.append(record)
        while (
            len(self._explainable) > _EXPLAINABLE
            or record.at - self._explainable[0].at > _EXPLAINABLE_SECONDS
        ):
            self._explainable.popleft().gather = None
        self._names_bytes += _names_bytes(record)
        is_full = len(self._records) > self._length
        while is_full or (self._names_bytes > _MAX_NAMES_BYTES and len(self._records) > 1):
            self._forget_oldest()
            is_full = False
        self._choices.pop(record.pod.uid, None)
        self._choices[record.pod.uid] = Choice(
            number=record.number, at=record.at, verb=record.verb, best=record.decision.best
        )
        if len(self._choices) > max(_MAX_CHOICES, self._length):
            self._choices.popitem(last=False)

    def _forget_oldest(self) -> None:
        _, oldest = self._records.popitem(last=False)
        self._names_bytes -= _names_bytes(oldest)
        self.namespaces.remove(oldest.pod.namespace)
        if self._by_pod.get(oldest.pod.uid) == oldest.number:
            del self._by_pod[oldest.pod.uid]

    def get(self, number: int) -> DecisionRecord | None:
        """Return the decision with a number, None if it was dropped."""
        return self._records.get(number)

    def last_of(self, uid: str) -> DecisionRecord | None:
        """Return the last decision about a pod, None if there is none."""
        return self._records.get(self._by_pod.get(uid, -1))

    def take_choice(self, uid: str) -> Choice | None:
        """Remove and return the last choice for a pod, even if its decision was dropped."""
        return self._choices.pop(uid, None)

    def note_bound(self, uid: str, node: str) -> DecisionRecord | None:
        """Record the node of a newly bound pod; return its decision, None if known already.

        Call this before the pod counts on its node, so that the pod is not its own neighbor.
        """
        record = self.last_of(uid)
        if record is None or record.bound_node:
            return None
        # Without a later decision the snapshot may still be kept, although it is too old.
        while self._explainable and self._clock() - self._explainable[0].at > _EXPLAINABLE_SECONDS:
            self._explainable.popleft().gather = None
        before = self._records.get(record.number - 1)
        _note_bound(record, node, self._clock())
        if before is not None and before.pod.uid == uid:
            # The filter decision of the same attempt, directly before prioritize.
            _note_bound(before, node, self._clock())
        return record


def _note_bound(record: DecisionRecord, node: str, at: float) -> None:
    """Record the node of a binding, and collect the inputs of its verdict if possible."""
    record.bound_node, record.bound_at = node, at
    gather = record.gather or record.gather_late
    if gather and all(node not in part.nodes for part in record.packed):
        record.packed = (*record.packed, *map(PackedEvidence, gather([node])))
    record.gather = record.gather_late = None
