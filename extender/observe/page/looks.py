"""How each device looks now: state, activity, memory and shares in use, a byte each."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from extender.core.assessment import Ask, assess
from extender.core.batches import take_batch, with_rows
from extender.core.evaluation import estimates
from extender.core.explain import UNKNOWN
from extender.core.policy import Policy
from extender.core.snapshot import Batch, Flags, Pool, Ratios, Rows, Snapshot, batch_rows
from extender.core.steps import Steps
from extender.observe.page.roster import Roster, Small

PIECE_NODES: Final = 192
"""Nodes of eight devices that are looked at between two turns of the event loop."""

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

    def changed(self, before: "Looks") -> Rows:
        """Return the places of the devices that look otherwise than before."""
        differs = (
            (self.state != before.state)
            | (self.activity != before.activity)
            | (self.memory != before.memory)
            | (self.used != before.used)
        )
        return np.flatnonzero(differs)


def looks_in_steps(roster: Roster, snapshot: Snapshot, policy: Policy) -> Steps[Looks]:
    """Look at every device as the decisions see it, some nodes at a time."""
    looks = Looks.blank(len(roster))
    ask = Ask(count=1, memory_bytes=0.0, thresholds=policy.thresholds)
    for resource, pool in snapshot.pools.items():
        places = roster.places[resource]
        late = set(pool.late)
        for start in range(0, len(pool.nodes), PIECE_NODES):
            some = slice(start, min(start + PIECE_NODES, len(pool.nodes)))
            batch = _batch(pool, snapshot, some, late)
            assessment = assess(batch, ask.columns, estimates(policy))
            here = places[some]
            is_there = here >= 0
            at = here[is_there]
            telemetry = batch.telemetry
            looks.state[at] = _states(batch, assessment.idle_chance)[is_there]
            looks.activity[at] = _half_percents(telemetry.latest, telemetry.freshness)[is_there]
            looks.memory[at] = _half_percents(telemetry.memory_used, telemetry.memory_freshness)[
                is_there
            ]
            looks.used[at] = np.minimum(batch.used, MOST_USED)[is_there]
            yield
    return looks


def _batch(pool: Pool, snapshot: Snapshot, some: slice, late: set[int]) -> Batch:
    """Return some rows of a pool as arrays, the late ones as they are now."""
    batch = take_batch(pool.batch, some)
    rows = [row for row in range(some.start, some.stop) if row in late] if late else []
    if not rows:
        return batch
    fresh = batch_rows(
        tuple(pool.rows[row] for row in rows),
        snapshot.telemetry,
        pool.batch.suspicion[rows],
        width=batch.slots.shape[1],
    )
    return with_rows(batch, [row - some.start for row in rows], fresh)


def _states(batch: Batch, idle_chance: Ratios) -> Small:
    """Return the state of each device; the words are those of /v1/gpus but for the unknown.

    What is no longer known for sure looks stale or missing, whatever the last reading said.
    """
    telemetry = batch.telemetry
    least = np.minimum(telemetry.freshness, telemetry.memory_freshness)
    is_busy: Flags = idle_chance < UNKNOWN
    # By what is fresh, or by pods just placed there: that fades with no reading.
    is_busy_now = is_busy & (
        (np.maximum(telemetry.freshness, telemetry.memory_freshness) >= 1.0) | (batch.assumed > 0)
    )
    code = np.select(
        [
            telemetry.is_excluded,
            telemetry.is_foreign,
            idle_chance >= 1.0,
            is_busy_now,
            least > 0,
        ],
        [SICK, FOREIGN, IDLE, BUSY, STALE],
        default=MISSING,
    )
    counts_less = (telemetry.penalty > 0) | telemetry.is_excluded_multi
    bits = (
        HELD * (batch.used > 0)
        + ASSUMED * (batch.assumed > 0)
        + LESS * (counts_less & ~telemetry.is_excluded)
    )
    states: Small = (code + bits).astype(np.uint8)
    return states


def _half_percents(ratios: Ratios, freshness: Ratios) -> Small:
    """Return ratios as bytes."""
    halves = np.round(np.clip(ratios, 0.0, 1.0) * FULL)
    told: Small = np.where(freshness > 0, halves, UNKNOWN_BYTE).astype(np.uint8)
    return told
