"""The fleet as the page gets it: encoded once for all who look, in small steps, and only for them.

A `fleet` event has everything, a `looks` event how each device looks, a `delta` event the devices
that look otherwise than in the version before. Columns are base64 of little-endian numbers.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson

from extender.core.policy import Policy
from extender.core.snapshot import Snapshot
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.observe.page.looks import (
    LOOKS,
    Looked,
    Looks,
    looked_at,
    looks_again_in_steps,
    looks_in_steps,
    rows_since,
)
from extender.observe.page.roster import (
    MEMORY_UNIT_BYTES,
    Roster,
    is_current_in_steps,
    roster_in_steps,
)
from extender.observe.seen import write_json

Json = Mapping[str, object]

WHOLE_SHARE: Final = 0.3
"""From this share on all devices are told rather than which have changed: that is smaller."""

LOOKED_A_SECOND: Final = 8_000
"""All devices are looked at no more often than this many a second: 40,000 every five seconds."""
LISTED_A_SECOND: Final = 4_000
"""... and no more are listed anew where nodes are others: that takes five times as long."""

PACKED: Final = (
    *("standing", "counts", "card", "index", "model", "profile", "resource", "replicas"),
    "memory_total",
)
"""Columns of the roster that are told."""


class FleetFeed:
    """What the fleet looks like, by version.

    Attributes:
        version: grows whenever anything looks otherwise; 0 before the first look.
        roster_version: grows whenever devices or their nodes are others.
        pool_labels: labels by which nodes may be grouped, besides those that are known anyway.

    Args:
        fleet: the fleet.
        pool_labels: as above.
    """

    def __init__(self, fleet: Fleet, pool_labels: tuple[str, ...] = ()) -> None:
        self.pool_labels = pool_labels
        self.version = 0
        self.roster_version = 0
        self._fleet = fleet
        self._roster: Roster | None = None
        self._looks = Looks.blank(0)
        self._at = 0.0
        self._seen: tuple[int, float] = (-1, 0.0)
        self._looked: Looked = {}
        self._looked_all_at = 0.0
        self._policy: Policy | None = None
        self._fixed: Mapping[str, orjson.Fragment] = {}
        self._delta = b""
        self._encoded: dict[str, tuple[int, bytes]] = {}

    @property
    def is_there(self) -> bool:
        """Whether the fleet has been looked at, and is not forgotten."""
        return self._roster is not None

    def refresh_in_steps(self) -> Steps[bool]:
        """Look at the fleet; tell whether it looks otherwise than before.

        Where pods came or went, at their nodes alone; at all of it where readings are new.
        """
        snapshot, policy = self._fleet.snapshot(), self._fleet.policy
        roster = self._roster
        if roster is not None and self._seen == (snapshot.version, snapshot.at):
            return False
        rows = rows_since(snapshot, self._looked) if policy is self._policy else None
        if rows is None and self._rests(snapshot.at, LOOKED_A_SECOND):
            return False
        yield
        if (
            roster is None
            or roster.pool_labels != self.pool_labels
            or not (yield from is_current_in_steps(roster, self._fleet, snapshot))
        ):
            if not self._rests(snapshot.at, LISTED_A_SECOND):
                yield from self._list_anew(snapshot, policy)
                return True
            return False
        if rows is None:
            looks = yield from looks_in_steps(roster, snapshot, policy)
            self._looked_all_at = snapshot.at
        else:
            looks = yield from looks_again_in_steps(self._looks, roster, snapshot, policy, rows)
        changed = looks.changed(self._looks)
        self._note(snapshot, policy, looks)
        if not len(changed):
            return False
        yield
        delta = self._encode_delta(looks, self.version + 1, changed)
        self.version, self._delta = self.version + 1, delta
        return True

    def _rests(self, at: float, devices_a_second: int) -> bool:
        """Whether all devices have been looked at so lately that they are not, just now."""
        rest_seconds = 0 if self._roster is None else len(self._roster) // devices_a_second
        return 0 <= at - self._looked_all_at < rest_seconds

    def _list_anew(self, snapshot: Snapshot, policy: Policy) -> Steps[None]:
        """List all devices, and look at each."""
        roster = yield from roster_in_steps(self._fleet, snapshot, self.pool_labels)
        fixed = yield from _encoded_in_steps(roster)
        looks = yield from looks_in_steps(roster, snapshot, policy)
        self._looked_all_at = snapshot.at
        self._note(snapshot, policy, looks)
        self._roster, self._fixed = roster, fixed
        self.version += 1
        self.roster_version, self._delta = self.version, b""

    def _note(self, snapshot: Snapshot, policy: Policy, looks: Looks) -> None:
        self._seen, self._at = (snapshot.version, snapshot.at), snapshot.at
        self._looked, self._policy, self._looks = looked_at(snapshot), policy, looks

    def forget(self) -> None:
        """Keep nothing while nobody looks."""
        self._roster, self._looks, self._looked = None, Looks.blank(0), {}
        self._delta, self._encoded, self._fixed = b"", {}, {}

    def since(self, version: int) -> tuple[int, bytes]:
        """Return what brings a viewer who has some version on, and to which.

        Args:
            version: 0 for nothing yet.
        """
        if version < self.roster_version:
            # As it was when somebody first asked: what has changed since is the next event.
            return self._cached("fleet", self.roster_version, self._encode_fleet)
        if version == self.version - 1 and self._delta:
            return self.version, self._delta
        return self._cached("looks", self.version, self._encode_looks)

    def _cached(self, name: str, least: int, encode: Callable[[], bytes]) -> tuple[int, bytes]:
        """Return an event that is not older than a version, and its version."""
        kept = self._encoded.get(name)
        if kept is None or kept[0] < least:
            kept = self._encoded[name] = (self.version, encode())
        return kept

    def _encode_delta(self, looks: Looks, version: int, changed: npt.NDArray[np.intp]) -> bytes:
        if len(changed) > WHOLE_SHARE * len(looks.state):
            return b""
        return event(
            "delta",
            {
                "version": version,
                "at": self._at,
                "places": packed(changed.astype(np.uint32)),
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


def _encoded_in_steps(roster: Roster) -> Steps[dict[str, orjson.Fragment]]:
    """Return what a roster says as JSON by name, encoded one after the other."""
    fixed = {}
    for name in ("nodes", "models", "profiles", "resources"):
        fixed[name] = orjson.Fragment(orjson.dumps(getattr(roster, name)))
        yield
    labels = {
        label: {"values": values, "of": packed(numbers)}
        for label, (values, numbers) in roster.labels.items()
    }
    fixed["labels"] = orjson.Fragment(orjson.dumps(labels))
    yield
    for name in PACKED:
        fixed[name] = orjson.Fragment(orjson.dumps(packed(getattr(roster, name))))
        yield
    return fixed


def _columns(looks: Looks, places: npt.NDArray[np.intp] | slice) -> Json:
    return {
        name: packed(getattr(looks, name)[places])
        for name in ("state", "activity", "memory", "used")
    }


def packed(column: npt.NDArray[np.generic]) -> str:
    """Return a column as base64 of its little-endian numbers."""
    little = column.astype(column.dtype.newbyteorder("<"), copy=False)
    return b64encode(little.tobytes()).decode("ascii")


def event(name: str, document: Json) -> bytes:
    """Return a server-sent event, as the caller may see it; JSON has no line breaks in it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), write_json(document))
