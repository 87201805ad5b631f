"""Feed of the fleet's state: encoded once for all viewers, in steps, only while there are viewers.

A `fleet` event contains everything, a `looks` event the state of every device, a `delta` event the
devices that changed since the previous version. Columns are base64 of little-endian numbers.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
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
from extender.api.page.device_state import (
    LOOKS,
    DeviceStates,
    Looked,
    changed_states_in_steps,
    device_states_in_steps,
    looked_at,
    rows_since,
)
from extender.core.nodes.snapshot import Snapshot
from extender.core.policy import Policy
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.server.redaction import write_json
from extender.settings.config import Settings

Json = Mapping[str, object]

_WHOLE_SHARE: Final = 0.3
"""Share of changed devices above which a `looks` event is smaller than a `delta`."""

LOOKED_A_SECOND: Final = 8_000
"""Budget for updating all devices, in devices per second: 40,000 devices every five seconds."""
_LISTED_A_SECOND: Final = 4_000
"""Budget for rebuilding the device index when nodes change, which takes five times as long."""

_PACKED: Final = (
    *("node_state", "counts", "card", "index", "model", "profile", "resource", "replicas"),
    "memory_total",
)
"""Columns of the device index that a `fleet` event contains."""


class FleetFeed:
    """Versioned state of all devices.

    Args:
        fleet: state of the fleet.
        pool_labels: node labels for grouping, besides `GROUP_LABELS`.

    Attributes:
        version: grows when any device's state changes; 0 before the first update.
        pool_labels: node labels for grouping, besides `GROUP_LABELS`.
    """

    def __init__(self, fleet: Fleet, pool_labels: tuple[str, ...] = ()) -> None:
        self.pool_labels = pool_labels
        self.version = 0
        self._devices_version = 0
        self._fleet = fleet
        self._device_index: DeviceIndex | None = None
        self._looks = DeviceStates.blank(0)
        self._at = 0.0
        self._seen: tuple[int, float] = (-1, 0.0)
        self._looked: Looked = {}
        self._looked_all_at = 0.0
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
        if device_index is not None and self._seen == (snapshot.version, snapshot.at):
            return False
        rows = rows_since(snapshot, self._looked) if policy is self._policy else None
        if rows is None and self._rests(snapshot.at, LOOKED_A_SECOND):
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
            looks = yield from device_states_in_steps(device_index, snapshot, policy)
            self._looked_all_at = snapshot.at
        else:
            looks = yield from changed_states_in_steps(
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
        rest_seconds = (
            0 if self._device_index is None else len(self._device_index) // devices_a_second
        )
        return 0 <= at - self._looked_all_at < rest_seconds

    def _rebuild(self, snapshot: Snapshot, policy: Policy) -> Steps[None]:
        """Rebuild the device index and every device's state."""
        device_index = yield from device_index_in_steps(self._fleet, snapshot, self.pool_labels)
        fixed = yield from _encoded_in_steps(device_index)
        looks = yield from device_states_in_steps(device_index, snapshot, policy)
        self._looked_all_at = snapshot.at
        self._note(snapshot, policy, looks)
        self._device_index, self._fixed = device_index, fixed
        self.version += 1
        self._devices_version, self._delta = self.version, b""

    def _note(self, snapshot: Snapshot, policy: Policy, looks: DeviceStates) -> None:
        self._seen, self._at = (snapshot.version, snapshot.at), snapshot.at
        self._looked, self._policy, self._looks = looked_at(snapshot), policy, looks

    def forget(self) -> None:
        """Free the state while there are no viewers."""
        self._device_index, self._looks, self._looked = None, DeviceStates.blank(0), {}
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
        self, looks: DeviceStates, version: int, changed: npt.NDArray[np.intp]
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

    def _head(self) -> Json:
        return {"version": self.version, "at": self._at}

    def _encode_fleet(self) -> bytes:
        limits = self._fleet.policy.thresholds
        return event(
            "fleet",
            {
                **self._head(),
                "looks": LOOKS,
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


def _columns(looks: DeviceStates, places: npt.NDArray[np.intp] | slice) -> Json:
    return {
        name: _packed(getattr(looks, name)[places])
        for name in ("state", "activity", "memory", "used")
    }


def _packed(column: npt.NDArray[np.generic]) -> str:
    """Encode a column as base64 of little-endian numbers."""
    little = column.astype(column.dtype.newbyteorder("<"), copy=False)
    return b64encode(little.tobytes()).decode("ascii")


def event(name: str, document: Json) -> bytes:
    """Encode a server-sent event, redacted for the current caller; JSON contains no line breaks."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), write_json(document))
