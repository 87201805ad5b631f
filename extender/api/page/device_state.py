"""Display state of each device: state, activity, memory and used replicas, one byte each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from extender.api.page.device_index import DeviceIndex
from extender.core.decision.assessment import Assessment, DeviceRequest, assess
from extender.core.decision.evaluation import estimates
from extender.core.decision.health_causes import is_blamed_on_sibling
from extender.core.decision.verdicts import STATES, state_codes
from extender.core.nodes.batches import take_batch, with_rows
from extender.core.nodes.snapshot import (
    Batch,
    Pool,
    Rows,
    Snapshot,
    batch_rows,
)
from extender.core.policy import Policy
from extender.core.steps import Steps
from extender.insight.short_memory import UNKNOWN_BYTE, Small, half_percents

_PIECE_NODES: Final = 64
"""Nodes to evaluate between two yields to the event loop, with eight devices each."""
_PIECE_ROWS: Final = 24
"""Single rows to evaluate between two yields; they must first be assembled into a batch."""

LOOKS: Final = ("idle", "busy", "stale", "unknown", "unhealthy", "foreign", "excluded")
"""Display states; their codes are the positions. Excluded: another GPU of the node has failed."""
IDLE, BUSY, STALE, UNKNOWN, UNHEALTHY, FOREIGN, EXCLUDED = range(7)

HELD: Final = 8
"""Bit: a pod holds the device."""
_ASSUMED: Final = 16
"""Bit: pods were placed on the device that readings do not show yet."""
_LESS: Final = 32
"""Bit: the device works, but its score is reduced because of its health."""

_MOST_USED: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStates:
    """Display state of all devices, in the order of the device index.

    Attributes:
        state: code from `LOOKS`, and the bits above.
        activity: latest activity in half percents; 255 if unknown.
        memory: used memory in half percents; 255 if unknown.
        used: replicas in use.
    """

    state: Small
    activity: Small
    memory: Small
    used: Small

    @classmethod
    def blank(cls, count: int) -> "DeviceStates":
        """Return the state of devices without any readings."""
        unknown = np.full(count, UNKNOWN_BYTE, dtype=np.uint8)
        return cls(
            state=np.full(count, UNKNOWN, dtype=np.uint8),
            activity=unknown,
            memory=unknown.copy(),
            used=np.zeros(count, dtype=np.uint8),
        )

    def copy(self) -> "DeviceStates":
        """Return a copy of all arrays."""
        return DeviceStates(
            state=self.state.copy(),
            activity=self.activity.copy(),
            memory=self.memory.copy(),
            used=self.used.copy(),
        )

    def changed(self, before: "DeviceStates") -> Rows:
        """Return the positions of the devices that differ from an earlier state."""
        differs = (
            (self.state != before.state)
            | (self.activity != before.activity)
            | (self.memory != before.memory)
            | (self.used != before.used)
        )
        return np.flatnonzero(differs)


Looked = Mapping[str, tuple[int, int]]
"""Evaluated rows: by resource, the pool's version and the number of its dirty rows."""


def looked_at(snapshot: Snapshot) -> Looked:
    """Return the version and number of dirty rows of each pool."""
    return {name: (pool.version, len(pool.dirty)) for name, pool in snapshot.pools.items()}


def rows_since(snapshot: Snapshot, looked: Looked) -> Mapping[str, list[int]] | None:
    """Return the rows of each pool that may have changed since; None if any row may have."""
    since = {}
    for resource, pool in snapshot.pools.items():
        version, count = looked.get(resource, (-1, 0))
        if pool.version != version or len(pool.dirty) < count:
            return None
        since[resource] = sorted(set(pool.dirty[count:]))
    return since


def device_states_in_steps(
    device_index: DeviceIndex, snapshot: Snapshot, policy: Policy
) -> Steps[DeviceStates]:
    """Evaluate every device as decisions do, in steps."""
    looks = DeviceStates.blank(len(device_index))
    for resource, pool in snapshot.pools.items():
        places = device_index.places[resource]
        dirty = set(pool.unwritten)
        for start in range(0, len(pool.nodes), _PIECE_NODES):
            some = slice(start, min(start + _PIECE_NODES, len(pool.nodes)))
            _note(looks, places[some], _batch(pool, snapshot, some, dirty), policy)
            yield
    return looks


def changed_states_in_steps(
    before: DeviceStates,
    device_index: DeviceIndex,
    snapshot: Snapshot,
    policy: Policy,
    rows: Mapping[str, list[int]],
) -> Steps[DeviceStates]:
    """Evaluate the given rows of each pool again, in steps; keep the state of the others."""
    looks = before.copy()
    for resource, of_pool in rows.items():
        pool, places = snapshot.pools[resource], device_index.places[resource]
        for start in range(0, len(of_pool), _PIECE_ROWS):
            some = of_pool[start : start + _PIECE_ROWS]
            _note(looks, places[some], _rows(pool, snapshot, some), policy)
            yield
    return looks


def _note(looks: DeviceStates, places: Rows, batch: Batch, policy: Policy) -> None:
    """Store the display state of the devices of the given rows.

    Args:
        looks: display state of all devices.
        places: position of each of the rows' devices, -1 if there is none.
        batch: the rows.
        policy: the settings.
    """
    ask = DeviceRequest(count=1, memory_bytes=0.0, thresholds=policy.thresholds)
    assessment = assess(batch, ask.columns, estimates(policy))
    is_there = places >= 0
    at = places[is_there]
    telemetry = batch.telemetry
    looks.state[at] = _states(batch, assessment)[is_there]
    looks.activity[at] = half_percents(telemetry.latest, telemetry.freshness > 0)[is_there]
    is_known = telemetry.memory_freshness > 0
    looks.memory[at] = half_percents(telemetry.memory_used, is_known)[is_there]
    looks.used[at] = np.minimum(batch.used, _MOST_USED)[is_there]


def _rows(pool: Pool, snapshot: Snapshot, rows: list[int]) -> Batch:
    """Assemble rows of a pool, with current values, into a batch."""
    return batch_rows(
        tuple(pool.rows[row] for row in rows),
        snapshot.telemetry,
        pool.batch.suspicion[rows],
        width=pool.batch.slots.shape[1],
    )


def _batch(pool: Pool, snapshot: Snapshot, some: slice, dirty: set[int]) -> Batch:
    """Return a range of a pool's rows as a batch, the dirty ones with current values."""
    batch = take_batch(pool.batch, some)
    rows = [row for row in range(some.start, some.stop) if row in dirty] if dirty else []
    if not rows:
        return batch
    return with_rows(batch, [row - some.start for row in rows], _rows(pool, snapshot, rows))


_GRAVEST: Final = {"unhealthy": UNHEALTHY, "foreign": FOREIGN, "idle": IDLE}
"""Display codes of definite states; those of the others depend on the freshness of readings."""
_OF_STATE: Final = np.array([_GRAVEST.get(state, UNKNOWN) for state in STATES], dtype=np.intp)
_IS_SURE: Final = np.array([state in _GRAVEST for state in STATES], dtype=np.bool_)
_IS_BUSY: Final = np.array([state == "busy" for state in STATES], dtype=np.bool_)


def _states(batch: Batch, assessment: Assessment) -> Small:
    """Return each device's display code and bits; the states are those of /v1/gpus, except unknown.

    A device without fresh readings is stale or unknown, even if its last reading said busy.
    """
    telemetry = batch.telemetry
    codes = state_codes(batch, assessment)
    # Busy by a fresh reading, or because of pods that were just placed: this state cannot become
    # stale.
    is_busy_now = _IS_BUSY[codes] & (
        (telemetry.freshness >= 1.0) | (telemetry.memory_freshness >= 1.0) | (batch.assumed > 0)
    )
    is_old = (telemetry.freshness > 0) & (telemetry.memory_freshness > 0)
    fading = np.where(is_busy_now, BUSY, np.where(is_old, STALE, UNKNOWN))
    look = np.where(_IS_SURE[codes], _OF_STATE[codes], fading)
    look[(look == UNHEALTHY) & is_blamed_on_sibling(telemetry.cause)] = EXCLUDED
    counts_less = (telemetry.penalty > 0) | telemetry.is_excluded_multi
    bits = (
        HELD * (batch.used > 0)
        + _ASSUMED * (batch.assumed > 0)
        + _LESS * (counts_less & ~telemetry.is_excluded)
    )
    states: Small = (look + bits).astype(np.uint8)
    return states
