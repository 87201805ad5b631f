"""The fleet as the page gets it: encoded once for all who look, in small steps, and only for them.

A `fleet` event has everything, a `looks` event how each device looks, a `delta` event the devices
that look otherwise than in the version before. Columns are base64 of little-endian numbers.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.observe.page.looks import LOOKS, Looks, looks_in_steps
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


class FleetFeed:
    """What the fleet looks like, by version.

    Attributes:
        version: grows whenever anything looks otherwise; 0 before the first look.
        roster_version: grows whenever devices or their nodes are others.

    Args:
        fleet: the fleet.
        prices: price of a GPU-hour by words of the model, as the settings say.
    """

    def __init__(self, fleet: Fleet, prices: Mapping[str, float]) -> None:
        self.version = 0
        self.roster_version = 0
        self._prices = dict(prices)
        self._fleet = fleet
        self._roster: Roster | None = None
        self._looks = Looks.blank(0)
        self._at = 0.0
        self._seen: tuple[int, float] = (-1, 0.0)
        self._delta = b""
        self._encoded: dict[str, tuple[int, bytes]] = {}

    @property
    def is_there(self) -> bool:
        """Whether the fleet has been looked at, and is not forgotten."""
        return self._roster is not None

    def refresh_in_steps(self) -> Steps[bool]:
        """Look at the fleet; tell whether it looks otherwise than before."""
        snapshot = self._fleet.snapshot()
        if self._roster is not None and self._seen == (snapshot.version, snapshot.at):
            return False
        yield
        roster, is_other = self._roster, False
        if roster is None or not (yield from is_current_in_steps(roster, self._fleet, snapshot)):
            roster, is_other = (yield from roster_in_steps(self._fleet, snapshot)), True
        looks = yield from looks_in_steps(roster, snapshot, self._fleet.policy)
        self._seen, self._at = (snapshot.version, snapshot.at), snapshot.at
        before, self._looks = self._looks, looks
        if is_other:
            self._roster = roster
            self.version += 1
            self.roster_version = self.version
            self._delta = b""
            return True
        changed = looks.changed(before)
        if not len(changed):
            return False
        self.version += 1
        self._delta = self._encode_delta(changed)
        return True

    def set_prices(self, prices: Mapping[str, float]) -> None:
        """Go by other prices from now on, and tell all viewers."""
        if prices != self._prices:
            self._prices = dict(prices)
            if self._roster is not None:
                self.version += 1
                self.roster_version, self._delta = self.version, b""

    def forget(self) -> None:
        """Keep nothing while nobody looks."""
        self._roster, self._looks = None, Looks.blank(0)
        self._delta, self._encoded = b"", {}

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

    def _encode_delta(self, changed: npt.NDArray[np.intp]) -> bytes:
        if len(changed) > WHOLE_SHARE * len(self._looks.state):
            return b""
        return event(
            "delta",
            {
                **self._head(),
                "places": packed(changed.astype(np.uint32)),
                **_columns(self._looks, changed),
            },
        )

    def _encode_looks(self) -> bytes:
        return event("looks", {**self._head(), **_columns(self._looks, slice(None))})

    def _head(self) -> Json:
        return {"version": self.version, "at": self._at}

    def _encode_fleet(self) -> bytes:
        roster = self._roster
        assert roster is not None  # noqa: S101 - a version above 0 has one
        limits = self._fleet.policy.thresholds
        return event(
            "fleet",
            {
                **self._head(),
                "looks": LOOKS,
                "thresholds": {"utilization": limits.utilization, "memory": limits.memory},
                "memory_unit_bytes": MEMORY_UNIT_BYTES,
                "prices": self._prices,
                "nodes": roster.nodes,
                "standing": packed(roster.standing),
                "counts": packed(roster.counts),
                "models": roster.models,
                "profiles": roster.profiles,
                "resources": roster.resources,
                "labels": {
                    label: {"values": values, "of": packed(numbers)}
                    for label, (values, numbers) in roster.labels.items()
                },
                **{
                    name: packed(getattr(roster, name))
                    for name in (
                        *("card", "index", "model", "profile", "resource", "replicas"),
                        "memory_total",
                    )
                },
                **_columns(self._looks, slice(None)),
            },
        )


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
