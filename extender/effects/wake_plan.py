"""Decides when waiting pods are worth a wake; pure, but for what it remembers of past ones.

A wake makes kube-scheduler try every pod that an extender refused: it is cheap for us and dear for
kube-scheduler, so it must be rare, and rarer still while it helps nobody. What we take for a node
that would do may be none: we know neither its CPU and memory, nor who may be beside whom.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from extender.core.inventory import NodeRecord
from extender.core.matching import may_go
from extender.core.request import GpuRequest, PodRef
from extender.core.selection import Selection
from extender.core.snapshot import Snapshot
from extender.settings.wake import Wake

MAX_REPEAT_SECONDS: Final = 300.0
"""kube-scheduler tries such pods by itself after five minutes."""

FIRST_RETRY_SECONDS: Final = 0.005
"""How long kube-scheduler takes to try a pod again, before that is measured: with tens of nodes."""

LEAST_RETRIES: Final = 20
"""From so many tries on their pace says how long one takes."""

MAX_DOUBLINGS: Final = 20

QUIET_INTERVALS: Final = 4
"""After so many times the longest interval without a wake, useless ones are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a waiting pod needs.

    Attributes:
        request: what it asks for.
        selection: which nodes it may go to by its own word.
    """

    request: GpuRequest
    selection: Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """Waiting pods that need the same, and what would do for them now.

    Attributes:
        request: what each asks for.
        pods: the pods.
        nodes: nodes that would do, best first.
    """

    request: GpuRequest
    pods: tuple[PodRef, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hope:
    """A pod that is worth a wake.

    Attributes:
        pod: the pod.
        node: a node that would do for it ...
        nodes: ... and all of them.
    """

    pod: PodRef
    node: str
    nodes: frozenset[str]


@dataclass(slots=True)
class _Past:
    """What is remembered of a waiting pod.

    Attributes:
        request: what it asks for.
        streak: so many looks in a row found a node for it.
        tried: nodes that it was woken for and is not again until `repeat_at`.
        repeat_at: seconds.
        repeat_seconds: how long it was not to be woken for the same nodes.
    """

    request: GpuRequest
    streak: int = 0
    tried: frozenset[str] = frozenset()
    repeat_at: float = 0.0
    repeat_seconds: float = 0.0


class WakePlan:
    """Says whom to wake.

    Args:
        settings: limits of rate and repetition; may be changed.
    """

    def __init__(self, settings: Wake) -> None:
        self.helped = 0
        """Pods that got a node after a wake for them."""
        self.settings = settings
        self._pods: dict[str, _Past] = {}
        self._hoping: set[str] = set()
        self._useless = 0
        self._failures = 0
        self._last_at = float("-inf")
        self._not_before = float("-inf")
        self._retry_seconds = FIRST_RETRY_SECONDS

    def note_retries(self, at: Sequence[float]) -> None:
        """Take when pods were tried after the last wake, each pod once, seconds of any clock.

        kube-scheduler tries one after the other, but for what comes between: the median counts.
        """
        if len(at) >= LEAST_RETRIES:
            self._retry_seconds = float(np.median(np.diff(np.sort(at))))

    def next_wake(
        self,
        prospects: Iterable[Prospect],
        waiting: Collection[str],
        now: float,
        *,
        is_placed: Callable[[str], bool] = lambda _: True,
    ) -> tuple[Hope, ...]:
        """Return the pods that are worth a wake now; none where there are none, or it is too soon.

        Args:
            prospects: what was found in this look; pods that no node would do for included.
            waiting: UIDs of all waiting pods, looked at or not.
            now: seconds of a clock that never goes back.
            is_placed: whether a pod (UID) that waits no more has got a node; others were deleted,
                or wait for something else.
        """
        self._note_gone(waiting, is_placed)
        hopes = tuple(hope for prospect in prospects for hope in self._hopes(prospect, now))
        return hopes if now >= self._earliest(len(waiting)) else ()

    def note_woken(self, hopes: Iterable[Hope], now: float) -> None:
        """Take that these pods were woken."""
        is_quiet = now - self._last_at > QUIET_INTERVALS * self._interval(MAX_DOUBLINGS)
        if is_quiet:
            self._useless = 0
        elif self._hoping:
            self._useless = min(self._useless + 1, MAX_DOUBLINGS)
        self._failures = 0
        self._last_at = now
        for hope in hopes:
            past = self._pods.get(hope.pod.uid)
            if past is None:
                continue
            # After as long again without a wake the pod's past counts no more.
            is_fresh = now > past.repeat_at + past.repeat_seconds
            doubled = self.settings.repeat_seconds if is_fresh else past.repeat_seconds * 2
            past.repeat_seconds = min(doubled, MAX_REPEAT_SECONDS)
            past.repeat_at = now + past.repeat_seconds
            past.tried |= hope.nodes
            past.streak = 0
            self._hoping.add(hope.pod.uid)

    def note_failed(self, now: float) -> None:
        """Take that a wake failed: the next try is less and less urgent."""
        self._not_before = now + self._interval(self._failures)
        self._failures = min(self._failures + 1, MAX_DOUBLINGS)

    def forget(self) -> None:
        """Forget everything: another replica wakes."""
        self._pods.clear()
        self._hoping.clear()

    def _note_gone(self, waiting: Collection[str], is_placed: Callable[[str], bool]) -> None:
        """Forget the pods that wait no more; where a wake helped one, others like it may hope."""
        gone = self._pods.keys() - waiting
        helped = {uid for uid in gone & self._hoping if is_placed(uid)}
        requests = {self._pods[uid].request for uid in helped}
        self._hoping -= gone
        for uid in gone:
            del self._pods[uid]
        if not helped:
            return
        self.helped += len(helped)
        self._useless = 0
        self._hoping.clear()
        for past in self._pods.values():
            if past.tried and past.request in requests:
                past.tried = frozenset()

    def _earliest(self, waiting: int) -> float:
        """Return when the next wake may be."""
        # Where those who hoped still wait, the last wake has helped nobody, as far as is known.
        useless = self._useless + bool(self._hoping)
        retries = waiting * self._retry_seconds / self.settings.retry_share
        interval = max(self._interval(useless - 1), min(retries, MAX_REPEAT_SECONDS))
        return max(self._last_at + interval, self._not_before)

    def _interval(self, doublings: int) -> float:
        """Return the least time between two wakes, in seconds, doubled so many times."""
        shortest = self.settings.min_interval_seconds
        longest = max(self.settings.max_interval_seconds, shortest)
        return min(shortest * 2.0 ** max(doublings, 0), longest)

    def _hopes(self, prospect: Prospect, now: float) -> Iterator[Hope]:
        """Yield the pods that a node would do for that they were not woken for lately."""
        every = frozenset(prospect.nodes)
        untried: dict[frozenset[str], Sequence[str]] = {frozenset(): prospect.nodes}
        for number, pod in enumerate(prospect.pods):
            past = self._pods.setdefault(pod.uid, _Past(prospect.request))
            past.request = prospect.request
            if past.tried and now >= past.repeat_at:
                past.tried = frozenset()
            if past.tried not in untried:
                untried[past.tried] = [node for node in prospect.nodes if node not in past.tried]
            nodes = untried[past.tried]
            past.streak = past.streak + 1 if nodes else 0
            if nodes and past.streak >= self.settings.confirmations:
                yield Hope(pod=pod, node=nodes[number % len(nodes)], nodes=every)


def nodes_with_room(
    snapshot: Snapshot, nodes: Mapping[str, NodeRecord], request: GpuRequest
) -> tuple[str, ...]:
    """Return the nodes that are ready, with as many devices left by the API's count as is asked."""
    pools = [(snapshot.pools.get(resource), count) for resource, count in request.resources]
    roomy: list[Iterable[str]] = []
    for pool, count in pools:
        if pool is None:
            return ()
        has_room = pool.batch.allocatable - pool.batch.held >= count
        for at in pool.late:
            has_room[at] = pool.rows[at].allocatable - pool.rows[at].held >= count
        roomy.append([pool.nodes[at] for at in np.flatnonzero(has_room).tolist()])
    others = [frozenset(names) for names in roomy[1:]]
    return tuple(
        name
        for name in roomy[0]
        if _is_ready(nodes.get(name)) and all(name in names for names in others)
    )


def open_to(
    selection: Selection, names: Iterable[str], nodes: Mapping[str, NodeRecord]
) -> tuple[str, ...]:
    """Return those of some nodes that a pod may go to by its own word."""
    records = ((name, nodes.get(name)) for name in names)
    return tuple(name for name, record in records if record and may_go(selection, record))


def _is_ready(node: NodeRecord | None) -> bool:
    return node is not None and node.is_ready
