"""The next snapshot in the making: all devices believed anew, in steps, beside the answers."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import islice
from types import MappingProxyType

import numpy as np

from extender.core.causes import renumber
from extender.core.policy import Policy
from extender.core.signals import believe
from extender.core.snapshot import Pool, Snapshot, Telemetry
from extender.core.steps import Steps
from extender.fleet.pools import renewed, with_late_rows
from extender.fleet.store import DeviceStore

PIECE_NODES = 250
"""Nodes whose devices are believed in one step: about a millisecond's work."""


class Renewal:
    """All devices of a snapshot, believed anew.

    Args:
        before: the snapshot that is to be replaced.
        policy: the settings.
        now: seconds since the epoch.
    """

    def __init__(self, before: Snapshot, policy: Policy, now: float) -> None:
        self._before = before
        self._policy = policy
        self._now = now
        self._telemetry = Telemetry.missing(len(before.telemetry.utilization))
        self.doubted: set[str] = set()
        """Nodes whose devices are to be believed anew again: that rests on other things by now."""

    def steps(
        self, store: DeviceStore, suspicion: Mapping[str, float], base: int
    ) -> Steps[Snapshot]:
        """Return the snapshot to come; no node may come or go meanwhile."""
        names = iter(store.nodes)
        while some := list(islice(names, PIECE_NODES)):
            self._believe(store, some)
            yield
        pools = {}
        for resource, pool in self._before.pools.items():
            batch = with_late_rows(pool)
            yield
            telemetry = self._telemetry.take(pool.batch.slots)
            pools[resource] = replace(renewed(pool, batch, telemetry, suspicion), base=base)
            yield
        return replace(
            self._before, at=self._now, telemetry=self._telemetry, pools=MappingProxyType(pools)
        )

    def fits(self, current: Snapshot, policy: Policy, capacity: int) -> bool:
        """Tell whether what was made can still take the place of what there is."""
        return (
            policy is self._policy
            and capacity == len(self._telemetry.utilization)
            and current.pools.keys() == self._before.pools.keys()
            and all(
                _same_devices(pool, self._before.pools[resource])
                for resource, pool in current.pools.items()
            )
        )

    def _believe(self, store: DeviceStore, nodes: Iterable[str]) -> None:
        """Believe the devices of some nodes: all of each, for one may speak for its siblings."""
        rows = store.rows_on(nodes)
        part, _ = believe(store.evidence(rows), self._policy, self._now)
        part = replace(part, cause=renumber(part.cause, rows))
        for column in fields(part):
            getattr(self._telemetry, column.name)[rows] = getattr(part, column.name)


def with_rows_of(made: Snapshot, current: Snapshot, version: int) -> Snapshot:
    """Return a snapshot that was made, with who holds what as it is by now.

    What is believed of the nodes of which that rests on other things by now is patched by whoever
    takes it over.
    """
    pools = {}
    for resource, pool in made.pools.items():
        rows = current.pools[resource].rows
        pairs = enumerate(zip(rows, pool.rows, strict=True))
        patched = tuple(at for at, (row, before) in pairs if row is not before)
        pools[resource] = replace(pool, rows=rows, patched=patched)
    return replace(
        current,
        version=version,
        at=made.at,
        telemetry=made.telemetry,
        pools=MappingProxyType(pools),
    )


def _same_devices(pool: Pool, before: Pool) -> bool:
    """Tell whether a pool has the nodes and devices that it had."""
    slots = pool.batch.slots
    return pool.nodes is before.nodes and (
        slots is before.batch.slots or np.array_equal(slots, before.batch.slots)
    )
