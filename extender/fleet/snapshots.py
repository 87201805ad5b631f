"""Makes each snapshot from the one before, as far as that still holds."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from math import inf
from types import MappingProxyType

from extender.core.decision.landing import NONE_OUT
from extender.core.decision.signals import estimate, estimate_again
from extender.core.nodes.node_index import NodeIndex
from extender.core.nodes.snapshot import Flags, Snapshot
from extender.core.policy import Policy
from extender.core.steps import Steps, finish
from extender.fleet.allocation import NodeAllocations
from extender.fleet.failures import FailureLog
from extender.fleet.pools import build_pools, fits_pools, patch_pools, refresh_pools
from extender.fleet.refresh import Refresh, with_rows_now
from extender.fleet.store import DeviceStore

RENEW_SECONDS = 10.0
"""Beliefs fade with time, over minutes, even when nothing new arrives: renewed so often."""

NEWS_SECONDS = 1.0
"""... and so often where more nodes have news than are believed anew one by one."""

MOST_PATCHED = 32
"""So many of them are: what was computed of a pool is corrected in each of their rows."""

PIECE_NODES = 256
"""Nodes that are patched before others may have their turn: about a millisecond."""

OVERDUE_SECONDS = 30.0
"""Where beliefs are renewed in steps, a question renews them itself only if that is so late."""


class Snapshots:
    """The latest snapshot, and what has changed since.

    Args:
        store: the devices.
        layouts: who holds them.
        failures: pods that died early.
        clock: seconds since the epoch.
        in_steps: somebody calls `refresh_in_steps` again and again.

    Attributes:
        current: the latest snapshot, None before the first.
        changed: nodes that are laid out anew since then.
        doubted: those of them whose devices must be believed anew.
    """

    def __init__(
        self,
        store: DeviceStore,
        layouts: NodeAllocations,
        failures: FailureLog,
        clock: Callable[[], float],
        *,
        in_steps: bool,
    ) -> None:
        self.current: Snapshot | None = None
        self.changed: set[str] = set()
        self.doubted: set[str] = set()
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
        self._shape, self._shown_shape = 1, 0
        self._outdated: set[str] = set()
        """Nodes whose devices were believed anew on other grounds than they have by now."""
        self._renewal: Refresh | None = None

    def is_out(self) -> Flags:
        """Return which devices are believed to be out, as `Telemetry` has it."""
        return NONE_OUT if self.current is None else self.current.telemetry.is_out

    @property
    def is_reshaped(self) -> bool:
        """Whether nodes or devices came or went since the latest snapshot."""
        return self._shape != self._shown_shape

    @property
    def is_far_behind(self) -> bool:
        """Whether so many nodes have changed that the next snapshot had better be made now."""
        is_patched = self._in_steps and self.current is not None
        return is_patched and len(self.changed) >= PIECE_NODES

    def reshape(self) -> None:
        """Note that nodes or devices came or went."""
        self._shape += 1

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
        self._outdated.discard(node)
        self.reshape()

    def outdate(self) -> None:
        """Note that nothing that was believed may be used any more."""
        self._is_believed, self._believed_at = False, -inf

    def get(self, nodes: Iterable[str], policy: Policy, now: float) -> Snapshot:
        """Return the fleet as it is laid out; the same object as long as nothing has changed.

        Where snapshots are renewed in steps, nodes and devices that came or went show from the next
        renewal on: until then a node that came is unknown, and one that went is not asked about.
        """
        is_reshaped = self.is_reshaped and not self._in_steps
        if self.current is None or self.changed or is_reshaped or not self._is_fresh(now):
            self.current = self._next(nodes, policy, now)
        return self.current

    def refresh_in_steps(
        self,
        nodes: Iterable[str],
        latest: Callable[[], Snapshot],
        prepare: Callable[[Snapshot], Steps[None]] | None,
    ) -> Steps[None]:
        """Believe all devices anew in steps, if it is time.

        Args:
            nodes: the names of all nodes.
            latest: returns the snapshot as it is by now.
            prepare: is given the snapshot to come, to do with it what takes long.
        """
        before, now = latest(), self._clock()
        pause = NEWS_SECONDS if self._has_news or self.is_reshaped else RENEW_SECONDS
        if self._is_believed and self._is_within(pause, now):
            return
        self._bases += 1
        # What changes from here on is for the next renewal.
        self._is_believed = True
        had_news, self._has_news, self._patched = self._has_news, False, 0
        shape, shown_shape = self._shape, self._shown_shape
        reshaped = (dict(self._layouts.rows), frozenset(nodes)) if shape != shown_shape else None
        renewal = Refresh(before, self._policy, now, self._store.capacity)
        self._renewal = renewal
        is_done = False
        try:
            suspicion = self._failures.suspicion(now)
            made = yield from renewal.steps(self._store, suspicion, self._bases, reshaped)
            if prepare is not None:
                yield from prepare(made)
            current = latest()
            # Where a question could not wait, everything has been made anew meanwhile.
            is_done = renewal.fits(self._policy) and shown_shape == self._shown_shape
        finally:
            self._renewal = None
            self._is_believed &= is_done
            self._has_news |= had_news and not is_done
        if is_done:
            rows = self._layouts.rows
            laid_out = {name: rows[name] for name in renewal.changed if name in rows}
            self.current = with_rows_now(made, laid_out, current.version + 1)
            self._outdated |= renewal.doubted
            self._believed_at, self._shown_shape = now, shape
        yield from self._show_outdated(latest)

    def _show_outdated(self, latest: Callable[[], Snapshot]) -> Steps[None]:
        """Have nodes that changed during a renewal believed anew, some of them in each step."""
        while self._outdated:
            for _ in range(min(PIECE_NODES, len(self._outdated))):
                self.touch(self._outdated.pop(), is_doubted=True)
            if self._outdated:
                yield
                latest()
                yield

    def _is_fresh(self, now: float) -> bool:
        """Tell whether what was last believed of the devices still holds."""
        if self._in_steps:
            return self._is_within(OVERDUE_SECONDS, now)
        return self._is_believed and self._is_within(RENEW_SECONDS, now)

    def _is_within(self, seconds: float, now: float) -> bool:
        """Whether devices were last believed so lately; a clock that was put back does not tell."""
        return 0 <= now - self._believed_at < seconds

    def _next(self, nodes: Iterable[str], policy: Policy, now: float) -> Snapshot:
        """Return a new snapshot, made from the old one where that still holds."""
        self._policy = policy
        if self._renewal is not None:
            self._renewal.changed |= self.changed
            self._renewal.doubted |= self.doubted
        changed, doubted = self.changed, self.doubted
        self.changed, self.doubted = set(), set()
        if self.current is None or not self._is_patchable(self.current, now):
            return self._afresh(nodes, changed, now)
        return self._patched_with(self.current, changed, doubted, now)

    def _is_patchable(self, before: Snapshot, now: float) -> bool:
        """Tell whether what has changed since a snapshot can be patched into it."""
        if self._in_steps:
            return self._is_fresh(now)
        is_same = self._store.capacity == len(before.telemetry.utilization)
        return is_same and not self.is_reshaped and self._is_fresh(now)

    def _patched_with(
        self, before: Snapshot, changed: Iterable[str], doubted: Collection[str], now: float
    ) -> Snapshot:
        """Return a snapshot with some nodes laid out anew, some of them believed anew too.

        Nodes that it does not show, or that have more devices than there is room for, stay as they
        are in it.
        """
        rows, capacity = self._layouts.rows, len(before.telemetry.utilization)
        fitting = {
            name: rows[name]
            for name in changed
            if name in rows and fits_pools(before.pools, name, rows[name], capacity)
        }
        telemetry, estimated = before.telemetry, fitting.keys() & doubted
        if estimated:
            again = self._store.rows_on(estimated)
            evidence = self._store.evidence(again)
            telemetry = estimate_again(telemetry, again, evidence, self._policy, now)
        pools = patch_pools(before.pools, fitting, estimated, telemetry)
        return replace(
            before,
            version=before.version + 1,
            at=now,
            pools=MappingProxyType(pools),
            telemetry=telemetry,
            models=self._layouts.models,
        )

    def _afresh(self, nodes: Iterable[str], changed: Iterable[str], now: float) -> Snapshot:
        """Return a snapshot for which all devices are believed anew, at once."""
        before, rows = self.current, self._layouts.rows
        telemetry, _ = estimate(self._store.evidence(), self._policy, now)
        suspicion = self._failures.suspicion(now)
        self._is_believed, self._believed_at = True, now
        if before is None or self.is_reshaped:
            names = frozenset(nodes)
            known = before.pools if before else {}
            pools = finish(build_pools(rows, telemetry, suspicion, known))
            node_index = NodeIndex(
                names, {resource: pool.nodes for resource, pool in pools.items()}
            )
        else:
            names, node_index = before.nodes, before.node_index
            of_changed = {name: rows[name] for name in changed}
            pools = refresh_pools(before.pools, of_changed, telemetry, suspicion)
        self._bases += 1
        self._shown_shape = self._shape
        pools = {resource: replace(pool, base=self._bases) for resource, pool in pools.items()}
        return Snapshot(
            version=before.version + 1 if before else 1,
            at=now,
            nodes=names,
            node_index=node_index,
            pools=MappingProxyType(pools),
            telemetry=telemetry,
            models=self._layouts.models,
        )
