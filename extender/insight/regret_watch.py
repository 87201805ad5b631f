"""Compare the GPUs that pods got with the GPUs that they could have got instead.

Each bound pod is watched for a while. Then the mean activity of its GPUs is compared with that of
the GPUs of our first choice, and of the node that turned out best among the nodes that the decision
recorded in full. The activity of a pod's GPUs includes its own work; docs/trusting.md explains it.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from extender.core.decision.assessment import assess
from extender.core.decision.evaluation import estimates
from extender.core.devices.readings import DeviceKey
from extender.core.nodes.snapshot import Ratios, Rows, Telemetry
from extender.core.request.request import PodRef
from extender.fleet.fleet import Fleet
from extender.placement.history import DecisionRecord, PlacedEvidence

_PIECES: Final = 12
"""Number of parts of the watched time; a mean may begin up to one part late."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Sums of each device's activity at one time.

    Attributes:
        busy: seconds that each device was busy.
        seen: seconds for which its activity is known.
    """

    at: float
    busy: Ratios
    seen: Ratios


class _ActivityLog:
    """Sums of every device's activity, by row; only fresh readings count.

    Args:
        span_seconds: longest time over which means can be computed.
    """

    def __init__(self, span_seconds: float) -> None:
        self.span_seconds = span_seconds
        self._busy: Ratios = np.zeros(0)
        self._seen: Ratios = np.zeros(0)
        self._looked_at: float | None = None
        self._marks: deque[_Mark] = deque(maxlen=_PIECES + 2)

    def look(self, telemetry: Telemetry, now: float) -> None:
        """Add the current activity for the time since the previous sample.

        Args:
            now: seconds since the epoch.
        """
        rows = len(telemetry.latest)
        if rows > len(self._busy):
            self._busy, self._seen = _longer(self._busy, rows), _longer(self._seen, rows)
        piece = self.span_seconds / _PIECES
        passed = 0.0 if self._looked_at is None else min(max(now - self._looked_at, 0.0), piece)
        self._looked_at = now
        is_fresh = telemetry.freshness >= 1.0
        self._busy[:rows] += np.where(is_fresh, telemetry.latest, 0.0) * passed
        self._seen[:rows] += np.where(is_fresh, passed, 0.0)
        if not self._marks or now - self._marks[-1].at >= piece:
            self._marks.append(_Mark(now, self._busy.copy(), self._seen.copy()))

    def means(self, rows: Rows, since: float) -> Ratios:
        """Return the mean activity of devices since approximately a given time; NaN if unknown."""
        mark = next((mark for mark in self._marks if mark.at >= since), None)
        if mark is None or not len(rows):
            return np.full(len(rows), np.nan)
        seen = self._seen[rows] - _longer(mark.seen, len(self._seen))[rows]
        busy = self._busy[rows] - _longer(mark.busy, len(self._busy))[rows]
        with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: the device was not seen
            result: Ratios = busy / seen
        return result


def _longer(column: Ratios, rows: int) -> Ratios:
    """Extend a column with zeros to the given number of rows."""
    return np.concatenate([column, np.zeros(rows - len(column))]) if rows > len(column) else column


MOST_NODES: Final = 10
"""Number of best nodes to watch for each pod, besides its own node."""

_MAX_WAITING: Final = 500
"""Maximum number of bound pods that wait to be watched; further ones are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOutcome:
    """Outcome of one placement, as `OutcomeAnswer` describes it; activities are None if unknown.

    Attributes:
        bound_at: when its binding was seen, seconds since the epoch.
        decided_at: time of the decision; if two replicas decided, the later decision counts.
        choice: our first choice, "" if no node passed.
        is_known: whether the pod's GPUs are known; if not, all GPUs count that it could have got on
            its node.
        gpus: number of these GPUs.
        got: activity of these GPUs since the binding.
        choice_since: activity since then of the GPUs that it could have got on our first choice.
        best_since: activity since then of the GPUs on the node that turned out best.
        got_then: activity at the decision of the GPUs that it could have got on its node.
        choice_then: the same on our first choice.
    """

    pod: PodRef
    bound_at: float
    decided_at: float
    seconds: float
    node: str
    choice: str
    is_shadow: bool
    is_known: bool
    gpus: int
    got: float
    choice_since: float | None
    best_since: float
    best: str
    got_then: float | None
    choice_then: float | None

    @property
    def is_followed(self) -> bool:
        """Whether the pod is on our first choice."""
        return self.node == self.choice

    @property
    def regret(self) -> float | None:
        """Activity of the GPUs that it got, minus the activity of our first choice's GPUs."""
        return None if self.choice_since is None else self.got - self.choice_since

    @property
    def hindsight(self) -> float:
        """Activity of the GPUs that it got, minus the activity of the best node's GPUs."""
        return self.got - self.best_since


@dataclass(frozen=True, slots=True)
class _Landing:
    """Devices of a node on which a pod could have landed.

    Attributes:
        keys: identities of the devices, because a row may be reused.
        activity: their mean activity at the decision, None if unknown.
    """

    rows: Rows
    keys: tuple[DeviceKey | None, ...]
    activity: float | None


@dataclass(slots=True)
class _Watched:
    """A pod that is watched.

    Attributes:
        got: the devices on which a source last showed the pod, None while no source names them.
    """

    pod: PodRef
    bound_at: float
    decided_at: float
    node: str
    choice: str
    is_shadow: bool
    landings: dict[str, _Landing]
    got: _Landing | None = None


class RegretWatch:
    """Watches bound pods and computes each pod's outcome once, on the event loop's thread only.

    Among several replicas the one that answered last about a pod watches it; see
    `BindingAttribution`.

    Args:
        clock: seconds since the epoch.
        pods: largest number of pods to watch, and of results to keep; 0 disables the watch.
        after_seconds: time from a pod's binding to its outcome.
        on_outcome: called with each result.

    Attributes:
        outcomes: results, the oldest first.
        left_out: number of bound pods without a result, because too many were bound at a time or
            they had too few readings.
    """

    def __init__(
        self,
        fleet: Fleet,
        clock: Callable[[], float],
        *,
        pods: int,
        after_seconds: float,
        on_outcome: Callable[[PlacementOutcome], None] = lambda _: None,
    ) -> None:
        self.outcomes: deque[PlacementOutcome] = deque(maxlen=pods)
        self.left_out = 0
        self._fleet = fleet
        self._clock = clock
        self._pods = pods
        self._on_outcome = on_outcome
        self._activity = _ActivityLog(after_seconds)
        self._waiting: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._watched: OrderedDict[str, _Watched] = OrderedDict()

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def after_seconds(self) -> float:
        """Time from a pod's binding to its outcome."""
        return self._activity.span_seconds

    @property
    def waiting(self) -> int:
        """Number of bound pods that are not watched yet."""
        return len(self._waiting)

    def note(self, record: DecisionRecord) -> None:
        """Queue a bound pod with the last decision about it, from any replica."""
        if not self._pods:
            return
        if len(self._waiting) >= _MAX_WAITING:
            self.left_out += 1
            return
        self._waiting[record.pod.uid] = record

    def take_next(self) -> bool:
        """Start to watch one queued pod, in half a millisecond; return whether there was one."""
        if not self._waiting:
            return False
        _, record = self._waiting.popitem(last=False)
        landings: dict[str, _Landing] = {}
        for part in record.evidence:
            if part.evidence.resource == record.request.resource:
                landings |= dict(_landings(part))
        best = [record.decision.candidates[at] for at in record.decision.order[:MOST_NODES]]
        node = record.bound_node
        if node not in landings:
            self.left_out += 1
            return True
        self._watched.pop(record.pod.uid, None)
        self._watched[record.pod.uid] = _Watched(
            pod=record.pod,
            bound_at=record.bound_at,
            decided_at=record.at,
            node=node,
            choice=record.decision.best or "",
            is_shadow=record.is_shadow,
            landings={name: landings[name] for name in (node, *best) if name in landings},
        )
        if len(self._watched) > self._pods:
            self._watched.popitem(last=False)
            self.left_out += 1
        return True

    def look(self) -> None:
        """Sample the activity of all devices; call it periodically."""
        self._activity.look(self._fleet.snapshot().telemetry, self._clock())

    def judge_in_steps(self) -> Iterator[None]:
        """Compute the outcomes of pods that ended or were watched long enough, one per step."""
        now = self._clock()
        for uid, watched in list(self._watched.items()):
            if self._watched.get(uid) is not watched:
                continue  # dropped between two steps, when there was no room for it
            record = self._fleet.pods.get(uid)
            has_ended = record is None or not record.holds_devices
            # Telemetry names pods, not their UIDs: for a while after the binding it may still show
            # the devices of a former pod of that name. Activity also counts only from then on.
            is_settled = now - watched.bound_at >= self.after_seconds / _PIECES
            if is_settled and not has_ended:
                watched.got = self._held_by(watched) or watched.got
            if has_ended or now - watched.bound_at >= self.after_seconds:
                self._watched.pop(uid, None)
                self._judge(watched, now)
            yield

    def _held_by(self, watched: _Watched) -> _Landing | None:
        """Return the devices on which a source shows the pod, None if there are none."""
        store = self._fleet.store
        rows = [
            row
            for row in store.rows_on([watched.node]).tolist()
            if watched.pod.key in self._fleet.tenants_of(row)
        ]
        infos = [store.info(row) for row in rows]
        keys = tuple(None if info is None else info.key for info in infos)
        return _Landing(np.array(rows, dtype=np.intp), keys, None) if rows else None

    def _judge(self, watched: _Watched, now: float) -> None:
        """Record the outcome of a pod, unless the activity of its devices is unknown."""
        got = watched.got or watched.landings[watched.node]
        since = {
            name: self._mean(landing, watched.bound_at)
            for name, landing in watched.landings.items()
        }
        since[watched.node] = mine = self._mean(got, watched.bound_at)
        if mine is None:
            self.left_out += 1
            return
        known = {name: mean for name, mean in since.items() if mean is not None}
        best = min(known, key=lambda name: (known[name], name != watched.node, name))
        choice = watched.landings.get(watched.choice)
        outcome = PlacementOutcome(
            pod=watched.pod,
            bound_at=watched.bound_at,
            decided_at=watched.decided_at,
            seconds=now - watched.bound_at,
            node=watched.node,
            choice=watched.choice,
            is_shadow=watched.is_shadow,
            is_known=watched.got is not None,
            gpus=len(got.rows),
            got=mine,
            choice_since=known.get(watched.choice),
            best_since=known[best],
            best=best,
            got_then=watched.landings[watched.node].activity,
            choice_then=choice.activity if choice else None,
        )
        self.outcomes.append(outcome)
        self._on_outcome(outcome)

    def _mean(self, landing: _Landing, since: float) -> float | None:
        """Return the mean activity since a time of the devices that still exist."""
        store = self._fleet.store
        infos = map(store.info, landing.rows.tolist())
        same = [
            info is not None and info.key == key
            for info, key in zip(infos, landing.keys, strict=True)
        ]
        means = self._activity.means(landing.rows[np.array(same, dtype=np.bool_)], since)
        means = means[~np.isnan(means)]
        return float(means.mean()) if len(means) else None


def _landings(part: PlacedEvidence) -> Iterator[tuple[str, _Landing]]:
    """Yield each node of the evidence with the devices on which the pod could have landed."""
    evidence = part.evidence
    batch = evidence.batch
    assessment = assess(batch, evidence.devices.columns, estimates(evidence.policy))
    ends = np.cumsum(batch.present.sum(axis=1))
    for at, node in enumerate(evidence.nodes):
        present = batch.present[at]
        first = int(ends[at]) - int(present.sum())
        devices = assessment.landing.devices[at][present]
        rows = batch.slots[at][present][devices].astype(np.intp)
        infos = [part.infos[first + place] for place in np.flatnonzero(devices).tolist()]
        is_known = batch.telemetry.freshness[at][present][devices] > 0
        activity = batch.telemetry.utilization[at][present][devices][is_known]
        yield (
            node,
            _Landing(
                rows=rows,
                keys=tuple(None if info is None else info.key for info in infos),
                activity=float(activity.mean()) if len(activity) else None,
            ),
        )
