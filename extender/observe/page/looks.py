"""How each device looks now: state, activity, memory and shares in use, a byte each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from extender.core.assessment import Ask, Assessment, assess
from extender.core.batches import take_batch, with_rows
from extender.core.evaluation import estimates
from extender.core.explain import STATES, state_codes
from extender.core.policy import Policy
from extender.core.snapshot import Batch, Flags, Pool, Ratios, Rows, Snapshot, batch_rows
from extender.core.steps import Steps
from extender.observe.page.roster import Roster, Small

PIECE_NODES: Final = 64
"""Nodes of eight devices that are looked at between two turns of the event loop."""
PIECE_ROWS: Final = 24
"""Likewise where rows have to be put side by side first."""

LOOKS: Final = ("idle", "busy", "stale", "missing", "sick", "foreign")
"""What the page tells apart; the number of each is its place here."""
IDLE, BUSY, STALE, MISSING, SICK, FOREIGN = range(6)

HELD: Final = 8
"""Bit of a device that a pod holds."""
ASSUMED: Final = 16
"""Bit of a device on which pods count that the readings do not show."""
LESS: Final = 32
"""Bit of a device that works, and counts less for its health."""

FULL: Final = 200
"""Byte of a ratio of 1: half percents."""
UNKNOWN_BYTE: Final = 255
MOST_USED: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """A byte for each device, in the roster's order.

    Attributes:
        state: place in `LOOKS`, and the bits above.
        activity: the latest, in half percents; 255 where unknown.
        memory: in use, likewise.
        used: replicas in use.
    """

    state: Small
    activity: Small
    memory: Small
    used: Small

    @classmethod
    def blank(cls, count: int) -> "Looks":
        """Return the looks of devices of which nothing is known."""
        unknown = np.full(count, UNKNOWN_BYTE, dtype=np.uint8)
        return cls(
            state=np.full(count, MISSING, dtype=np.uint8),
            activity=unknown,
            memory=unknown.copy(),
            used=np.zeros(count, dtype=np.uint8),
        )

    def copy(self) -> "Looks":
        """Return the same in other arrays."""
        return Looks(
            state=self.state.copy(),
            activity=self.activity.copy(),
            memory=self.memory.copy(),
            used=self.used.copy(),
        )

    def changed(self, before: "Looks") -> Rows:
        """Return the places of the devices that look otherwise than before."""
        differs = (
            (self.state != before.state)
            | (self.activity != before.activity)
            | (self.memory != before.memory)
            | (self.used != before.used)
        )
        return np.flatnonzero(differs)


Looked = Mapping[str, tuple[int, int]]
"""What was looked at: by resource, the pool's base, and how many of its rows were patched."""


def looked_at(snapshot: Snapshot) -> Looked:
    """Return what there is to look at in a snapshot."""
    return {name: (pool.base, len(pool.patched)) for name, pool in snapshot.pools.items()}


def rows_since(snapshot: Snapshot, looked: Looked) -> Mapping[str, list[int]] | None:
    """Return which rows of each pool may look otherwise since; None where any of them may."""
    since = {}
    for resource, pool in snapshot.pools.items():
        base, count = looked.get(resource, (-1, 0))
        if pool.base != base or len(pool.patched) < count:
            return None
        since[resource] = sorted(set(pool.patched[count:]))
    return since


def looks_in_steps(roster: Roster, snapshot: Snapshot, policy: Policy) -> Steps[Looks]:
    """Look at every device as the decisions see it, some nodes at a time."""
    looks = Looks.blank(len(roster))
    for resource, pool in snapshot.pools.items():
        places = roster.places[resource]
        late = set(pool.late)
        for start in range(0, len(pool.nodes), PIECE_NODES):
            some = slice(start, min(start + PIECE_NODES, len(pool.nodes)))
            _note(looks, places[some], _batch(pool, snapshot, some, late), policy)
            yield
    return looks


def looks_again_in_steps(
    before: Looks,
    roster: Roster,
    snapshot: Snapshot,
    policy: Policy,
    rows: Mapping[str, list[int]],
) -> Steps[Looks]:
    """Look again at some rows of each pool; the others look as before."""
    looks = before.copy()
    for resource, of_pool in rows.items():
        pool, places = snapshot.pools[resource], roster.places[resource]
        for start in range(0, len(of_pool), PIECE_ROWS):
            some = of_pool[start : start + PIECE_ROWS]
            _note(looks, places[some], _rows(pool, snapshot, some), policy)
            yield
    return looks


def _note(looks: Looks, places: Rows, batch: Batch, policy: Policy) -> None:
    """Note how the devices of some rows look.

    Args:
        looks: of all devices.
        places: of each device of the rows, -1 where there is none.
        batch: the rows.
        policy: the settings.
    """
    ask = Ask(count=1, memory_bytes=0.0, thresholds=policy.thresholds)
    assessment = assess(batch, ask.columns, estimates(policy))
    is_there = places >= 0
    at = places[is_there]
    telemetry = batch.telemetry
    looks.state[at] = _states(batch, assessment)[is_there]
    looks.activity[at] = half_percents(telemetry.latest, telemetry.freshness > 0)[is_there]
    is_known = telemetry.memory_freshness > 0
    looks.memory[at] = half_percents(telemetry.memory_used, is_known)[is_there]
    looks.used[at] = np.minimum(batch.used, MOST_USED)[is_there]


def _rows(pool: Pool, snapshot: Snapshot, rows: list[int]) -> Batch:
    """Return some rows of a pool as they are now."""
    return batch_rows(
        tuple(pool.rows[row] for row in rows),
        snapshot.telemetry,
        pool.batch.suspicion[rows],
        width=pool.batch.slots.shape[1],
    )


def _batch(pool: Pool, snapshot: Snapshot, some: slice, late: set[int]) -> Batch:
    """Return some rows of a pool as arrays, the late ones as they are now."""
    batch = take_batch(pool.batch, some)
    rows = [row for row in range(some.start, some.stop) if row in late] if late else []
    if not rows:
        return batch
    return with_rows(batch, [row - some.start for row in rows], _rows(pool, snapshot, rows))


_GRAVEST: Final = {"unhealthy": SICK, "foreign": FOREIGN, "idle": IDLE}
"""How states look of which there is no doubt; by `STATES`, the others depend on what is fresh."""
_OF_STATE: Final = np.array([_GRAVEST.get(state, MISSING) for state in STATES], dtype=np.intp)
_IS_SURE: Final = np.array([state in _GRAVEST for state in STATES], dtype=np.bool_)
_IS_BUSY: Final = np.array([state == "busy" for state in STATES], dtype=np.bool_)


def _states(batch: Batch, assessment: Assessment) -> Small:
    """Return the state of each device; the words are those of /v1/gpus but for the unknown.

    What is no longer known for sure looks stale or missing, whatever the last reading said.
    """
    telemetry = batch.telemetry
    codes = state_codes(batch, assessment)
    # By what is fresh, or by pods just placed there: that fades with no reading.
    is_busy_now = _IS_BUSY[codes] & (
        (telemetry.freshness >= 1.0) | (telemetry.memory_freshness >= 1.0) | (batch.assumed > 0)
    )
    is_old = (telemetry.freshness > 0) & (telemetry.memory_freshness > 0)
    fading = np.where(is_busy_now, BUSY, np.where(is_old, STALE, MISSING))
    look = np.where(_IS_SURE[codes], _OF_STATE[codes], fading)
    counts_less = (telemetry.penalty > 0) | telemetry.is_excluded_multi
    bits = (
        HELD * (batch.used > 0)
        + ASSUMED * (batch.assumed > 0)
        + LESS * (counts_less & ~telemetry.is_excluded)
    )
    states: Small = (look + bits).astype(np.uint8)
    return states


def half_percents(ratios: Ratios, is_told: Flags) -> Small:
    """Return ratios as bytes, `UNKNOWN_BYTE` where they are not told."""
    halves = np.round(np.minimum(np.maximum(ratios, 0.0), 1.0) * FULL)
    told: Small = np.where(is_told, halves, UNKNOWN_BYTE).astype(np.uint8)
    return told
