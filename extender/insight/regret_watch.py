"""How placements turned out: the GPUs that pods got, against others that they could have got.

From its binding on a pod is watched for a while. Then the mean activity of the GPUs that it got is
set beside that of the GPUs of our first choice, and of the node that turned out best of those that
its decision keeps in full. A pod's own work is part of what its GPUs show: docs/trusting.md says
what that means.
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
from extender.placement.evidence import PlacedEvidence
from extender.placement.history import DecisionRecord

# How active every device was over the last while, from looks at all of them at once.

PIECES: Final = 12
"""The span is looked back to in so many pieces: a mean begins up to one of them late."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """What had been seen of each device by some time.

    Attributes:
        at: seconds since the epoch.
        busy: seconds that it was busy, of those.
        seen: seconds of which that is known.
    """

    at: float
    busy: Ratios
    seen: Ratios


class ActivityLog:
    """Sums up the activity of every device, by its row; only fresh readings count.

    Args:
        span_seconds: so far back means may begin.
    """

    def __init__(self, span_seconds: float) -> None:
        self.span_seconds = span_seconds
        self._busy: Ratios = np.zeros(0)
        self._seen: Ratios = np.zeros(0)
        self._looked_at: float | None = None
        self._marks: deque[_Mark] = deque(maxlen=PIECES + 2)

    def look(self, telemetry: Telemetry, now: float) -> None:
        """Count what devices have done since the last look as what they do now.

        Args:
            telemetry: of every device.
            now: seconds since the epoch.
        """
        rows = len(telemetry.latest)
        if rows > len(self._busy):
            self._busy, self._seen = _longer(self._busy, rows), _longer(self._seen, rows)
        piece = self.span_seconds / PIECES
        passed = 0.0 if self._looked_at is None else min(max(now - self._looked_at, 0.0), piece)
        self._looked_at = now
        is_fresh = telemetry.freshness >= 1.0
        self._busy[:rows] += np.where(is_fresh, telemetry.latest, 0.0) * passed
        self._seen[:rows] += np.where(is_fresh, passed, 0.0)
        if not self._marks or now - self._marks[-1].at >= piece:
            self._marks.append(_Mark(now, self._busy.copy(), self._seen.copy()))

    def means(self, rows: Rows, since: float) -> Ratios:
        """Return the mean activity of devices from soon after a time on; NaN where unknown."""
        mark = next((mark for mark in self._marks if mark.at >= since), None)
        if mark is None or not len(rows):
            return np.full(len(rows), np.nan)
        seen = self._seen[rows] - _longer(mark.seen, len(self._seen))[rows]
        busy = self._busy[rows] - _longer(mark.busy, len(self._busy))[rows]
        result: Ratios = np.where(seen > 0, busy / np.maximum(seen, 1e-9), np.nan)
        return result


def _longer(column: Ratios, rows: int) -> Ratios:
    """Return a column with zeros for rows that it does not have yet."""
    return np.concatenate([column, np.zeros(rows - len(column))]) if rows > len(column) else column


MOST_NODES: Final = 10
"""Of the best nodes so many are watched for each pod, besides the one that it got."""

MAX_WAITING: Final = 500
"""Bound pods that wait to be looked into: the others of a burst are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOutcome:
    """How one placement turned out; activities are mean ratios, None where unknown.

    Attributes:
        pod: the pod.
        bound_at: when its binding was seen, seconds since the epoch.
        decided_at: when it was decided: of two replicas that did so the later one counts.
        seconds: for how long it was watched: less than was wanted where it ended before.
        node: where it is.
        choice: our first choice, "" where no node passed.
        is_shadow: kube-scheduler was not told.
        is_known: it is known which GPUs it got; else all count that it could have got there.
        gpus: how many these are.
        got: of the GPUs that it got, since.
        choice_since: of those that it could have got on our first choice.
        best_since: of those on the node that turned out best.
        best: that node.
        got_then: of the GPUs that it could have got where it is, when it was decided.
        choice_then: likewise, on our first choice.
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
        """Whether it is where we would have put it."""
        return self.node == self.choice

    @property
    def regret(self) -> float | None:
        """By how much the GPUs that it got were busier than those of our first choice."""
        return None if self.choice_since is None else self.got - self.choice_since

    @property
    def hindsight(self) -> float:
        """By how much they were busier than those of the best node."""
        return self.got - self.best_since


@dataclass(frozen=True, slots=True)
class _Landing:
    """Where a pod could have landed on a node.

    Attributes:
        rows: the devices.
        keys: which devices these were: a row may be another's by now.
        activity: their mean activity when it was decided, None where unknown.
    """

    rows: Rows
    keys: tuple[DeviceKey | None, ...]
    activity: float | None


@dataclass(slots=True)
class _Watched:
    """A pod that is watched.

    Attributes:
        got: the devices that it was last seen on, None while nobody says.
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
    """Watches bound pods, and judges each once; only the event loop's thread may use it.

    Of several replicas the one that answered last about a pod judges it; see `LastWord`.

    Args:
        fleet: the fleet.
        clock: seconds since the epoch.
        pods: so many are watched at once, and so many results are kept; 0 for none.
        after_seconds: so long after its binding a pod is judged.
        on_outcome: called with each result.

    Attributes:
        outcomes: results, the oldest first.
        left_out: bound pods that were not judged: they came too fast, were too many, or too little
            was seen of them.
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
        self._activity = ActivityLog(after_seconds)
        self._waiting: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._watched: OrderedDict[str, _Watched] = OrderedDict()

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def after_seconds(self) -> float:
        """So long after its binding a pod is judged."""
        return self._activity.span_seconds

    @property
    def waiting(self) -> int:
        """How many bound pods are still to be looked into."""
        return len(self._waiting)

    def note(self, record: DecisionRecord) -> None:
        """Note a bound pod by the last decision about it, of any replica; takes no time."""
        if not self._pods:
            return
        if len(self._waiting) >= MAX_WAITING:
            self.left_out += 1
            return
        self._waiting[record.pod.uid] = record

    def take_next(self) -> bool:
        """Look into one pod that was noted: half a millisecond; tell whether there was one."""
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
        """Note how active every device is; to be called again and again."""
        self._activity.look(self._fleet.snapshot().telemetry, self._clock())

    def judge_in_steps(self) -> Iterator[None]:
        """Judge the pods whose time is up, or that have ended: one in each step."""
        now = self._clock()
        for uid, watched in list(self._watched.items()):
            if self._watched.get(uid) is not watched:
                continue  # others were taken in between two steps, and there was no room for it
            record = self._fleet.pods.get(uid)
            has_ended = record is None or not record.holds_devices
            # Telemetry names pods, not their UIDs: for a while after the binding it may still tell
            # where a former pod of that name was. Activity counts from then on only, too.
            is_settled = now - watched.bound_at >= self.after_seconds / PIECES
            if is_settled and not has_ended:
                watched.got = self._held_by(watched) or watched.got
            if has_ended or now - watched.bound_at >= self.after_seconds:
                self._watched.pop(uid, None)
                self._judge(watched, now)
            yield

    def _held_by(self, watched: _Watched) -> _Landing | None:
        """Return the devices that a pod is seen on."""
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
        """Set what a pod got beside what it could have got."""
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
        """Return the mean activity of devices since a time, of those that are still there."""
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
    """Yield where a pod could have landed on each node that some evidence speaks of."""
    evidence = part.evidence
    batch = evidence.batch
    assessment = assess(batch, evidence.ask.columns, estimates(evidence.policy))
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
