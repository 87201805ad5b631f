"""Makes each snapshot from the one before, as far as that still holds."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from math import inf
from types import MappingProxyType

from extender.core.names import Roll
from extender.core.policy import Policy
from extender.core.signals import believe, believe_again
from extender.core.snapshot import Snapshot, Telemetry
from extender.core.steps import Steps
from extender.fleet.failures import FailureLog
from extender.fleet.layouts import NodeLayouts
from extender.fleet.pools import build_pools, patch_pools, renew_pools
from extender.fleet.renewal import Renewal, with_rows_of
from extender.fleet.store import DeviceStore

RENEW_SECONDS = 10.0
"""Beliefs fade with time, over minutes, even when nothing new arrives: renewed so often."""

NEWS_SECONDS = 1.0
"""... and so often where more nodes have news than are believed anew one by one."""

MOST_PATCHED = 32
"""So many of them are: what was computed of a pool is corrected in each of their rows."""

OVERDUE_SECONDS = 30.0
"""Where beliefs are renewed in steps, a question renews them itself only if that is so late."""


class Snapshots:
    """The latest snapshot, and what has changed since.

    Args:
        store: the devices.
        layouts: who holds them.
        failures: pods that died early.
        clock: seconds since the epoch.
        in_steps: somebody calls `renew_in_steps` again and again.

    Attributes:
        current: the latest snapshot, None before the first.
        changed: nodes that are laid out anew since then.
        doubted: those of them whose devices must be believed anew.
        is_reshaped: nodes or devices came or went.
    """

    def __init__(
        self,
        store: DeviceStore,
        layouts: NodeLayouts,
        failures: FailureLog,
        clock: Callable[[], float],
        *,
        in_steps: bool,
    ) -> None:
        self.current: Snapshot | None = None
        self.changed: set[str] = set()
        self.doubted: set[str] = set()
        self.is_reshaped = True
        self._store = store
        self._layouts = layouts
        self._failures = failures
        self._clock = clock
        self._in_steps = in_steps
        self._policy = Policy()
        self._is_believed = False
        self._believed_at = -inf
        self._has_news = False
        self._patched = 0
        self._bases = 0
        self._renewal: Renewal | None = None

    def doubt(self) -> None:
        """Note that there is something new to believe."""
        self._is_believed = False

    def note_news(self, nodes: Collection[str]) -> None:
        """Believe the devices of some nodes anew soon; of few at once."""
        if not self._in_steps or self._patched + len(nodes) > MOST_PATCHED:
            self._has_news = True
            self._is_believed &= self._in_steps
            return
        self._patched += len(nodes)
        for node in nodes:
            self.touch(node, is_doubted=True)

    def touch(self, node: str, *, is_doubted: bool) -> None:
        """Note that a node is laid out anew.

        Args:
            node: the node.
            is_doubted: what is believed of its devices rests on other things now.
        """
        self.changed.add(node)
        if is_doubted:
            self.doubted.add(node)

    def forget(self, node: str) -> None:
        """Note that a node is gone."""
        self.changed.discard(node)
        self.doubted.discard(node)
        self.is_reshaped = True

    def outdate(self) -> None:
        """Note that nothing that was believed may be used any more."""
        self._is_believed, self._believed_at = False, -inf

    def get(self, nodes: Iterable[str], policy: Policy, now: float) -> Snapshot:
        """Return the fleet as it is laid out; the same object as long as nothing has changed."""
        if self.current is None or self.changed or self.is_reshaped or not self._is_fresh(now):
            self.current = self._next(nodes, policy, now)
        return self.current

    def renew_in_steps(
        self,
        latest: Callable[[], Snapshot],
        prepare: Callable[[Snapshot], Steps[None]] | None,
    ) -> Steps[None]:
        """Believe all devices anew in steps, if it is time.

        Args:
            latest: returns the snapshot as it is by now.
            prepare: is given the snapshot to come, to do with it what takes long.
        """
        before, now = latest(), self._clock()
        pause = NEWS_SECONDS if self._has_news else RENEW_SECONDS
        if self._is_believed and now - self._believed_at < pause:
            return
        self._bases += 1
        # What changes from here on is for the next renewal.
        self._is_believed = True
        had_news, self._has_news, self._patched = self._has_news, False, 0
        renewal = self._renewal = Renewal(before, self._policy, now)
        is_done = False
        try:
            suspicion = self._failures.suspicion(now)
            made = yield from renewal.steps(self._store, suspicion, self._bases)
            if prepare is not None:
                yield from prepare(made)
            current = latest()
            is_done = renewal.fits(current, self._policy, self._store.capacity)
        finally:
            self._renewal = None
            self._is_believed &= is_done
            self._has_news |= had_news and not is_done
        if is_done:
            self.current = with_rows_of(made, current, current.version + 1)
            self.changed |= renewal.doubted
            self.doubted |= renewal.doubted
            self._believed_at = now

    def _is_fresh(self, now: float) -> bool:
        """Tell whether what was last believed of the devices still holds."""
        if self._in_steps:
            return now - self._believed_at < OVERDUE_SECONDS
        return self._is_believed and now - self._believed_at < RENEW_SECONDS

    def _next(self, nodes: Iterable[str], policy: Policy, now: float) -> Snapshot:
        """Return a new snapshot, made from the old one where that still holds."""
        self._policy = policy
        before, rows = self.current, self._layouts.rows
        version = before.version + 1 if before else 1
        changed = {name: rows[name] for name in self.changed}
        telemetry = self._patched_telemetry(before, policy, now)
        if before is not None and telemetry is not None:
            pools = patch_pools(before.pools, changed, self.doubted, telemetry)
        else:
            telemetry, _ = believe(self._store.evidence(), policy, now)
            suspicion = self._failures.suspicion(now)
            self._is_believed, self._believed_at = True, now
            if before is None or self.is_reshaped:
                pools = build_pools(rows, telemetry, suspicion, before.pools if before else {})
            else:
                pools = renew_pools(before.pools, changed, telemetry, suspicion)
            self._bases += 1
            pools = {resource: replace(pool, base=self._bases) for resource, pool in pools.items()}
        if before is None or self.is_reshaped:
            names = frozenset(nodes)
            roll = Roll(names, {resource: pool.nodes for resource, pool in pools.items()})
        else:
            names, roll = before.nodes, before.roll
        if self._renewal is not None:
            self._renewal.doubted |= self.doubted
        self.changed, self.doubted, self.is_reshaped = set(), set(), False
        return Snapshot(
            version=version,
            at=now,
            nodes=names,
            roll=roll,
            pools=MappingProxyType(pools),
            telemetry=telemetry,
            models=self._layouts.models,
        )

    def _patched_telemetry(
        self, before: Snapshot | None, policy: Policy, now: float
    ) -> Telemetry | None:
        """Return the last telemetry with the doubted nodes' devices believed anew.

        None where all devices must be.
        """
        if before is None or self.is_reshaped or not self._is_fresh(now):
            return None
        if self._store.capacity != len(before.telemetry.utilization):
            return None
        if not self.doubted:
            return before.telemetry
        rows = self._store.rows_on(self.doubted)
        return believe_again(before.telemetry, rows, self._store.evidence(rows), policy, now)
