"""Feed of the fleet's state: encoded once for all viewers, in steps, only while there are viewers.

A `fleet` event contains everything, a `looks` event the state of every device, a `delta` event the
devices that changed since the previous version. Columns are base64 of little-endian numbers.
"""

import math
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from extender.api.page.device_index import (
    MEMORY_UNIT_BYTES,
    DeviceIndex,
    device_index_in_steps,
    is_current_in_steps,
)
from extender.core.decision.assessment import Assessment, DeviceRequest, assess
from extender.core.decision.evaluation import estimates
from extender.core.decision.verdicts import SHOWN_STATES, shown_codes
from extender.core.nodes.batches import take_batch, with_rows
from extender.core.nodes.snapshot import Batch, Pool, Rows, Snapshot, batch_rows
from extender.core.policy import Policy
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.insight.last_hour import UNKNOWN_BYTE, Small, half_percents
from extender.server.redaction import write_json
from extender.settings.config import Settings

_Json = Mapping[str, object]

_WHOLE_SHARE: Final = 0.3
"""Share of changed devices above which a `looks` event is smaller than a `delta`."""

_LOOKED_A_SECOND: Final = 8_000
"""Budget for updating all devices, in devices per second: 40,000 devices every five seconds."""
_LISTED_A_SECOND: Final = 4_000
"""Budget for rebuilding the device index when nodes change, which takes five times as long."""

_PACKED: Final = (
    *("node_state", "counts", "card", "index", "model", "profile", "resource", "replicas"),
    "memory_total",
)
"""Columns of the device index that a `fleet` event contains."""

_PIECE_NODES: Final = 64
"""Nodes to evaluate between two yields to the event loop, with eight devices each."""
_PIECE_ROWS: Final = 24
"""Single rows to evaluate between two yields; they must first be assembled into a batch."""

_LOOKS: Final = ("idle", "busy", "stale", "unknown", "unhealthy", "foreign", "excluded")
"""Display states; their codes are the positions."""
_UNKNOWN: Final = _LOOKS.index("unknown")

_HELD: Final = 8
"""Bit: a pod holds the device."""
_ASSUMED: Final = 16
"""Bit: pods were placed on the device that readings do not show yet."""
_LESS: Final = 32
"""Bit: the device works, but its score is reduced because of its health."""

_MOST_USED: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceStates:
    """Display state of all devices, in the order of the device index.

    Attributes:
        state: code from `_LOOKS`, and the bits above.
        activity: latest activity in half percents; 255 if unknown.
        memory: used memory in half percents; 255 if unknown.
        used: replicas in use.
    """

    state: Small
    activity: Small
    memory: Small
    used: Small

    @classmethod
    def blank(cls, count: int) -> "_DeviceStates":
        """Return the state of devices without any readings."""
        unknown = np.full(count, UNKNOWN_BYTE, dtype=np.uint8)
        return cls(
            state=np.full(count, _UNKNOWN, dtype=np.uint8),
            activity=unknown,
            memory=unknown.copy(),
            used=np.zeros(count, dtype=np.uint8),
        )

    def copy(self) -> "_DeviceStates":
        """Return a copy of all arrays."""
        return _DeviceStates(
            state=self.state.copy(),
            activity=self.activity.copy(),
            memory=self.memory.copy(),
            used=self.used.copy(),
        )

    def changed(self, before: "_DeviceStates") -> Rows:
        """Return the positions of the devices that differ from an earlier state."""
        differs = (
            (self.state != before.state)
            | (self.activity != before.activity)
            | (self.memory != before.memory)
            | (self.used != before.used)
        )
        return np.flatnonzero(differs)


_Looked = Mapping[str, tuple[int, int]]
"""Evaluated rows: by resource, the pool's version and the number of its dirty rows."""


def _looked_at(snapshot: Snapshot) -> _Looked:
    """Return the version and number of dirty rows of each pool."""
    return {name: (pool.version, len(pool.dirty)) for name, pool in snapshot.pools.items()}


def _rows_since(snapshot: Snapshot, looked: _Looked) -> Mapping[str, list[int]] | None:
    """Return the rows of each pool that may differ from `looked`; None if any row may differ."""
    since = {}
    for resource, pool in snapshot.pools.items():
        before = looked.get(resource)
        if before is None or pool.version != before[0]:
            return None
        since[resource] = sorted(set(pool.dirty[before[1] :]))
    return since


def _device_states_in_steps(
    device_index: DeviceIndex, snapshot: Snapshot, policy: Policy
) -> Steps[_DeviceStates]:
    """Evaluate every device as decisions do, in steps."""
    looks = _DeviceStates.blank(len(device_index))
    for resource, pool in snapshot.pools.items():
        places = device_index.places[resource]
        dirty = set(pool.unwritten)
        for start in range(0, len(pool.nodes), _PIECE_NODES):
            some = slice(start, start + _PIECE_NODES)
            _note(looks, places[some], _batch(pool, snapshot, some, dirty), policy)
            yield
    return looks


def _changed_states_in_steps(
    before: _DeviceStates,
    device_index: DeviceIndex,
    snapshot: Snapshot,
    policy: Policy,
    rows: Mapping[str, list[int]],
) -> Steps[_DeviceStates]:
    """Evaluate the given rows of each pool again, in steps; keep the state of the others."""
    looks = before.copy()
    for resource, of_pool in rows.items():
        pool, places = snapshot.pools[resource], device_index.places[resource]
        for start in range(0, len(of_pool), _PIECE_ROWS):
            some = of_pool[start : start + _PIECE_ROWS]
            _note(looks, places[some], _rows(pool, snapshot, some), policy)
            yield
    return looks


def _note(looks: _DeviceStates, places: Rows, batch: Batch, policy: Policy) -> None:
    """Store the display state of the devices of the given rows.

    Args:
        looks: display state of all devices.
        places: position of each of the rows' devices, -1 if there is none.
    """
    requested = DeviceRequest(count=1, memory_bytes=0.0, thresholds=policy.thresholds)
    assessment = assess(batch, requested.columns, estimates(policy))
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


_LOOK_OF: Final = np.array([_LOOKS.index(state) for state in SHOWN_STATES], dtype=np.intp)


def _states(batch: Batch, assessment: Assessment) -> Small:
    """Return each device's display code and bits; the states are those of /v1/gpus."""
    telemetry = batch.telemetry
    look = _LOOK_OF[shown_codes(batch, assessment)]
    counts_less = (telemetry.penalty > 0) | telemetry.is_excluded_multi
    bits = (
        _HELD * (batch.used > 0)
        + _ASSUMED * (batch.assumed > 0)
        + _LESS * (counts_less & ~telemetry.is_excluded)
    )
    states: Small = (look + bits).astype(np.uint8)
    return states


class FleetFeed:
    """Versioned state of all devices, encoded for the viewers of the page.

    Args:
        pool_labels: node labels for grouping, besides `GROUP_LABELS`.

    Attributes:
        version: grows when any device's state changes; 0 before the first update.
        pool_labels: node labels for grouping, besides `GROUP_LABELS`.
    """

    def __init__(self, fleet: Fleet, pool_labels: tuple[str, ...] = ()) -> None:
        self.pool_labels = pool_labels
        self.version = self._devices_version = 0
        self._fleet = fleet
        self._device_index: DeviceIndex | None = None
        self._looks = _DeviceStates.blank(0)
        self._at = self._looked_all_at = -math.inf
        self._seen: tuple[int, float] | None = None
        self._looked: _Looked = {}
        self._policy: Policy | None = None
        self._fixed: Mapping[str, msgspec.Raw] = {}
        self._delta = b""
        self._encoded: dict[str, tuple[int, bytes]] = {}

    def adopt(self, settings: Settings) -> None:
        """Group nodes by the labels of new settings."""
        self.pool_labels = settings.pool_labels

    @property
    def is_there(self) -> bool:
        """Whether the state has been built and not been dropped."""
        return self._device_index is not None

    def refresh_in_steps(self) -> Steps[bool]:
        """Update the state in steps; return whether anything changed.

        After pod changes only their nodes are updated, after new readings all devices.
        """
        snapshot, policy = self._fleet.snapshot(), self._fleet.policy
        device_index = self._device_index
        if self._seen == (snapshot.version, snapshot.at):
            return False
        rows = _rows_since(snapshot, self._looked) if policy is self._policy else None
        if rows is None and self._rests(snapshot.at, _LOOKED_A_SECOND):
            return False
        yield
        if (
            device_index is None
            or device_index.pool_labels != self.pool_labels
            or not (yield from is_current_in_steps(device_index, self._fleet, snapshot))
        ):
            if not self._rests(snapshot.at, _LISTED_A_SECOND):
                yield from self._rebuild(snapshot, policy)
                return True
            return False
        if rows is None:
            looks = yield from _device_states_in_steps(device_index, snapshot, policy)
            self._looked_all_at = snapshot.at
        else:
            looks = yield from _changed_states_in_steps(
                self._looks, device_index, snapshot, policy, rows
            )
        changed = looks.changed(self._looks)
        self._note(snapshot, policy, looks)
        if not len(changed):
            return False
        yield
        delta = self._encode_delta(looks, self.version + 1, changed)
        self.version, self._delta = self.version + 1, delta
        return True

    def _rests(self, at: float, devices_a_second: int) -> bool:
        """Check whether the last update of all devices is too recent for the budget."""
        rest_seconds = len(self._looks.state) // devices_a_second
        return 0 <= at - self._looked_all_at < rest_seconds

    def _rebuild(self, snapshot: Snapshot, policy: Policy) -> Steps[None]:
        """Rebuild the device index and every device's state."""
        device_index = yield from device_index_in_steps(self._fleet, snapshot, self.pool_labels)
        fixed = yield from _encoded_in_steps(device_index)
        looks = yield from _device_states_in_steps(device_index, snapshot, policy)
        self._looked_all_at = snapshot.at
        self._note(snapshot, policy, looks)
        self._device_index, self._fixed = device_index, fixed
        self.version += 1
        self._devices_version, self._delta = self.version, b""

    def _note(self, snapshot: Snapshot, policy: Policy, looks: _DeviceStates) -> None:
        self._seen, self._at = (snapshot.version, snapshot.at), snapshot.at
        self._looked, self._policy, self._looks = _looked_at(snapshot), policy, looks

    def forget(self) -> None:
        """Free the memory of the state, because the last viewer has left."""
        self._device_index, self._looks, self._looked = None, _DeviceStates.blank(0), {}
        self._seen = None
        self._delta, self._encoded, self._fixed = b"", {}, {}

    def since(self, version: int) -> tuple[int, bytes]:
        """Return the event that updates a viewer from a version, and the version it leads to.

        Args:
            version: the viewer's version, 0 for none.
        """
        if version < self._devices_version:
            # The cached event may be older than the current version: a delta follows.
            return self._cached("fleet", self._devices_version, self._encode_fleet)
        if version == self.version - 1 and self._delta:
            return self.version, self._delta
        return self._cached("looks", self.version, self._encode_looks)

    def _cached(self, name: str, least: int, encode: Callable[[], bytes]) -> tuple[int, bytes]:
        """Return an event that is at least as new as a version, and its version."""
        cached = self._encoded.get(name)
        if cached is None or cached[0] < least:
            cached = self._encoded[name] = (self.version, encode())
        return cached

    def _encode_delta(
        self, looks: _DeviceStates, version: int, changed: npt.NDArray[np.intp]
    ) -> bytes:
        if len(changed) > _WHOLE_SHARE * len(looks.state):
            return b""
        return event(
            "delta",
            {
                "version": version,
                "at": self._at,
                "places": _packed(changed.astype(np.uint32)),
                **_columns(looks, changed),
            },
        )

    def _encode_looks(self) -> bytes:
        return event("looks", {**self._head(), **_columns(self._looks, slice(None))})

    def _head(self) -> _Json:
        return {"version": self.version, "at": self._at}

    def _encode_fleet(self) -> bytes:
        limits = self._fleet.policy.thresholds
        return event(
            "fleet",
            {
                **self._head(),
                "looks": _LOOKS,
                "thresholds": {"utilization": limits.utilization, "memory": limits.memory},
                "memory_unit_bytes": MEMORY_UNIT_BYTES,
                **self._fixed,
                **_columns(self._looks, slice(None)),
            },
        )


def _encoded_in_steps(device_index: DeviceIndex) -> Steps[dict[str, msgspec.Raw]]:
    """Encode the columns of the device index as JSON, one per step."""
    fixed = {}
    for name in ("nodes", "models", "profiles", "resources"):
        fixed[name] = msgspec.Raw(msgspec.json.encode(getattr(device_index, name)))
        yield
    labels = {
        label: {"values": values, "of": _packed(numbers)}
        for label, (values, numbers) in device_index.labels.items()
    }
    fixed["labels"] = msgspec.Raw(msgspec.json.encode(labels))
    yield
    for name in _PACKED:
        fixed[name] = msgspec.Raw(msgspec.json.encode(_packed(getattr(device_index, name))))
        yield
    return fixed


def _columns(looks: _DeviceStates, places: npt.NDArray[np.intp] | slice) -> _Json:
    return {
        name: _packed(getattr(looks, name)[places])
        for name in ("state", "activity", "memory", "used")
    }


def _packed(column: npt.NDArray[np.generic]) -> str:
    """Encode a column as base64 of little-endian numbers."""
    little = column.astype(column.dtype.newbyteorder("<"), copy=False)
    return b64encode(little.tobytes()).decode("ascii")


def event(name: str, document: _Json) -> bytes:
    """Encode a server-sent event, redacted for the current caller; JSON contains no line breaks."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), write_json(document))
