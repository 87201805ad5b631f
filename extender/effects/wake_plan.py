"""Decide when to wake waiting pods, and which; does no I/O, but remembers past wakes.

A wake makes kube-scheduler try every pod that an extender rejected. It is cheap for the extender
and expensive for kube-scheduler, so wakes are rare, and rarer while they help no pod. A node with
free GPUs may still be unsuitable: we do not know pod affinity rules.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from extender.core.nodes.inventory import NodeRecord, may_go
from extender.core.nodes.node_selection import Selection
from extender.core.nodes.snapshot import Snapshot
from extender.core.request.request import GpuRequest, PodRef
from extender.fleet.groups import PodGroups

# Select the waiting pods that one check examines, so that every pod is examined in time.
#
# A check examines few distinct requests, because each may take milliseconds in a large cluster.
# Pods behind a scheduling gate are tried by this check only, so other pods must not delay them
# forever.

MAX_NEEDS: Final = 32
"""Maximum number of distinct requests that one check examines."""

_MAX_PROMISING: Final = MAX_NEEDS // 2
"""Maximum number of requests per check that had a node in their last check; the others are examined
in rotation. So requests that repeatedly have a node, without effect, take only this share."""

_Key = TypeVar("_Key")


class LookOrder:
    """Record of the check at which each waiting pod was last examined.

    The key is the pod, because its request may change between checks without losing its place.
    """

    def __init__(self) -> None:
        self._number = 0
        self._looked_at: dict[str, int] = {}
        self._promising: set[object] = set()

    def begin(self, waiting: Iterable[str]) -> None:
        """Begin a check of the waiting pods.

        Args:
            waiting: UIDs of all waiting pods. New pods count as examined at the last check, so all
                that have waited longer come first.
        """
        before, last = self._looked_at, self._number
        self._looked_at = {uid: before.get(uid, last) for uid in waiting}
        self._number += 1

    def looked_at(self, uid: str) -> int:
        """Return the number of the check that last examined a pod, or at which the pod appeared."""
        return self._looked_at[uid]

    def pick(self, needs: Mapping[_Key, Sequence[str]]) -> list[_Key]:
        """Return the requests that this check examines, in the order given.

        Args:
            needs: UIDs of the pods by request; the most urgent request first.
        """
        self._promising &= needs.keys()
        promising = [key for key in needs if key in self._promising][:_MAX_PROMISING]
        picked = set(promising)
        others = sorted(
            (key for key in needs if key not in picked),
            key=lambda key: min(map(self.looked_at, needs[key])),
        )
        picked.update(others[: MAX_NEEDS - len(promising)])
        return [key for key in needs if key in picked]

    def note(self, uids: Iterable[str]) -> None:
        """Record that this check examines these pods."""
        self._looked_at.update(dict.fromkeys(uids, self._number))

    def note_promising(self, examined: Collection[object], promising: Iterable[object]) -> None:
        """Record the results of the check.

        Args:
            examined: requests that were examined.
            promising: all requests for which a node was found.
        """
        self._promising.difference_update(examined)
        self._promising.update(promising)

    def forget(self) -> None:
        """Clear the whole record, because another replica takes over waking."""
        self._looked_at.clear()
        self._promising.clear()


_MAX_REPEAT_SECONDS: Final = 300.0
"""Longest pause: kube-scheduler retries such pods itself after five minutes."""

_FIRST_RETRY_SECONDS: Final = 0.005
"""Assumed time of a retry in kube-scheduler before it is measured: a value for tens of nodes."""

_LEAST_RETRIES: Final = 20
"""Minimum number of retries before their time is measured."""

_MAX_DOUBLINGS: Final = 20

_QUIET_INTERVALS: Final = 4
"""Number of maximum intervals without a wake after which useless wakes are forgotten, in all or for
one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakePace:
    """Limits of the rate and the repetition of wakes.

    No setting changes them: kube-scheduler's own back-off, 1 to 10 s, and its retry after five
    minutes are the same in every cluster.

    Attributes:
        check_seconds: time between two checks of the waiting pods.
        confirmations: checks in a row that must find a node for a pod before it is woken.
        min_interval_seconds: shortest time between two wakes.
        max_interval_seconds: longest time between two wakes, reached by doubling while they help no
            pod.
        repeat_seconds: first pause before a pod is woken for the same nodes again; doubled each
            time up to `_MAX_REPEAT_SECONDS`.
        retry_share: largest share of kube-scheduler's time that retries of woken pods may take, as
            measured; other pods wait during these retries.
    """

    check_seconds: float = 0.5
    confirmations: int = 2
    min_interval_seconds: float = 2.0
    max_interval_seconds: float = 30.0
    repeat_seconds: float = 10.0
    retry_share: float = 0.25


PACE: Final = WakePace()


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeNeed:
    """Requirements of a waiting pod.

    Attributes:
        selection: nodes that its own spec allows.
        group: key of its group if the cluster may be too small for the group, else "".
    """

    request: GpuRequest
    selection: Selection
    group: str = ""

    @classmethod
    def of(cls, request: GpuRequest, selection: Selection, groups: PodGroups) -> "WakeNeed":
        """Return the requirements of a pod."""
        group = request.group
        is_sized = group is not None and groups.stated_size(group) is not None
        return cls(
            request=request, selection=selection, group=group.key if group and is_sized else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """Waiting pods with equal requirements, and the nodes with room for one of them.

    Attributes:
        request: GPUs that each pod requests.
        nodes: suitable nodes, best first.
    """

    request: GpuRequest
    pods: tuple[PodRef, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hope:
    """A pod to wake, and the nodes that have room for it.

    Attributes:
        node: one suitable node.
        nodes: all suitable nodes.
    """

    pod: PodRef
    node: str
    nodes: frozenset[str]


@dataclass(slots=True)
class _Past:
    """History of a waiting pod.

    Attributes:
        streak: number of checks in a row that found a node.
        tried: nodes for which it was woken, and is not woken again until `repeat_at`.
        repeat_seconds: last pause before a wake for the same nodes.
    """

    request: GpuRequest
    streak: int = 0
    tried: frozenset[str] = frozenset()
    repeat_at: float = 0.0
    repeat_seconds: float = 0.0


class WakePlan:
    """Selects the pods to wake.

    Args:
        pace: limits of rate and repetition.
    """

    def __init__(self, pace: WakePace = PACE) -> None:
        self.helped = 0
        """Number of pods that were bound after a wake for them."""
        self._pace = pace
        self._pods: dict[str, _Past] = {}
        self._hoping: set[str] = set()
        self._useless = 0
        self._failures = 0
        self._last_at = float("-inf")
        self._not_before = float("-inf")
        self._retry_seconds = _FIRST_RETRY_SECONDS

    def note_retries(self, at: Sequence[float]) -> None:
        """Measure kube-scheduler's time for one retry from the times of the retries after a wake.

        kube-scheduler tries pods one after the other; the median ignores pauses in between.
        """
        if len(at) >= _LEAST_RETRIES:
            self._retry_seconds = float(np.median(np.diff(np.sort(at))))

    def next_wake(
        self,
        prospects: Iterable[Prospect],
        waiting: Collection[str],
        now: float,
        *,
        is_placed: Callable[[str], bool] = lambda _: True,
    ) -> tuple[Hope, ...]:
        """Return the pods to wake now; empty if there are none, or if it is too soon.

        Args:
            prospects: results of this check, including pods without a suitable node.
            waiting: UIDs of all waiting pods, examined or not.
            now: monotonic time in seconds.
            is_placed: returns whether a pod (UID) that no longer waits was bound; others were
                deleted, or wait for something else.
        """
        self._note_gone(waiting, is_placed)
        hopes = tuple(hope for prospect in prospects for hope in self._hopes(prospect, now))
        return hopes if now >= self._earliest(len(waiting)) else ()

    def note_woken(self, hopes: Iterable[Hope], now: float) -> None:
        """Record that these pods were woken."""
        is_quiet = now - self._last_at > _QUIET_INTERVALS * self._interval(_MAX_DOUBLINGS)
        if is_quiet:
            self._useless = 0
        elif self._hoping:
            self._useless = min(self._useless + 1, _MAX_DOUBLINGS)
        self._failures = 0
        self._last_at = now
        for hope in hopes:
            past = self._pods.get(hope.pod.uid)
            if past is None:
                continue
            # The doubled pause is forgotten after as much time again without a wake.
            is_fresh = now > past.repeat_at + past.repeat_seconds
            doubled = self._pace.repeat_seconds if is_fresh else past.repeat_seconds * 2
            past.repeat_seconds = min(doubled, _MAX_REPEAT_SECONDS)
            past.repeat_at = now + past.repeat_seconds
            past.tried |= hope.nodes
            past.streak = 0
            self._hoping.add(hope.pod.uid)

    def note_failed(self, now: float) -> None:
        """Record a failed wake, and delay the next one with each failure in a row."""
        self._not_before = now + self._interval(self._failures)
        self._failures = min(self._failures + 1, _MAX_DOUBLINGS)

    def forget(self) -> None:
        """Clear the whole record, because another replica takes over waking."""
        self._pods.clear()
        self._hoping.clear()

    def _note_gone(self, waiting: Collection[str], is_placed: Callable[[str], bool]) -> None:
        """Forget pods that no longer wait; if a wake helped one, equal pods may be woken again."""
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
        """Return the earliest time of the next wake."""
        # While woken pods still wait, the last wake counts as useless.
        useless = self._useless + bool(self._hoping)
        retries = waiting * self._retry_seconds / self._pace.retry_share
        interval = max(self._interval(useless - 1), min(retries, _MAX_REPEAT_SECONDS))
        return max(self._last_at + interval, self._not_before)

    def _interval(self, doublings: int) -> float:
        """Return the shortest time between two wakes, in seconds, after that many doublings."""
        shortest = self._pace.min_interval_seconds
        return min(shortest * 2.0 ** max(doublings, 0), self._pace.max_interval_seconds)

    def _hopes(self, prospect: Prospect, now: float) -> Iterator[Hope]:
        """Yield the pods with a suitable node for which they were not woken recently."""
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
            if nodes and past.streak >= self._pace.confirmations:
                yield Hope(pod=pod, node=nodes[number % len(nodes)], nodes=every)


def nodes_with_room(
    snapshot: Snapshot, nodes: Mapping[str, NodeRecord], request: GpuRequest
) -> tuple[str, ...]:
    """Return the ready nodes with enough free devices by the API's counts."""
    pools = [(snapshot.pools.get(resource), count) for resource, count in request.resources]
    roomy: list[Iterable[str]] = []
    for pool, count in pools:
        if pool is None:
            return ()
        has_room = pool.batch.allocatable - pool.batch.held >= count
        for at in pool.unwritten:
            has_room[at] = pool.rows[at].allocatable - pool.rows[at].held >= count
        roomy.append([pool.nodes[at] for at in np.flatnonzero(has_room).tolist()])
    others = [frozenset(names) for names in roomy[1:]]
    return tuple(
        name
        for name in roomy[0]
        if (node := nodes.get(name)) is not None
        and node.is_ready
        and all(name in names for names in others)
    )


def open_to(
    selection: Selection, names: Iterable[str], nodes: Mapping[str, NodeRecord]
) -> tuple[str, ...]:
    """Return the nodes that the pod's own spec allows."""
    records = ((name, nodes.get(name)) for name in names)
    return tuple(name for name, record in records if record and may_go(selection, record))


_MOST_NODES: Final = 256
"""Maximum number of suitable nodes that are remembered between checks, best first."""

_MAX_POD_REPEAT_SECONDS: Final = 3600.0
"""Longest pause before a pod is woken for the same node again: it lets a hundred others try."""

_MAX_POD_DOUBLINGS: Final = 20


@dataclass(slots=True)
class _Node:
    """History of a node for which pods were woken.

    Attributes:
        failures: number of pods in a row that were not bound to it.
        tried: UIDs of those that still wait.
        not_before: earliest time of the next wake for it, in seconds.
    """

    failures: int = 0
    tried: set[str] = field(default_factory=set)
    not_before: float = 0.0


@dataclass(slots=True)
class _Pod:
    """History of a woken pod.

    Attributes:
        node: node of its last wake.
        is_out: whether the result of that wake is still unknown.
        failures: number of wakes without effect.
        tried: nodes to which it was not bound, with the end of the pause for each.
    """

    node: str
    is_out: bool = True
    failures: int = 0
    tried: dict[str, float] = field(default_factory=dict)


class PodWakes:
    """Selects the pods to wake, and the node for each.

    Args:
        pace: limits of rate and repetition.

    Attributes:
        helped: number of pods that were bound after a wake for them.
    """

    def __init__(self, pace: WakePace = PACE) -> None:
        self.helped = 0
        self._pace = pace
        self._pods: dict[str, _Pod] = {}
        self._nodes: dict[str, _Node] = {}
        self._streaks: dict[object, dict[str, int]] = {}
        self._failures = 0
        self._not_before = float("-inf")

    def forget(self) -> None:
        """Clear the whole record, because another replica takes over waking."""
        self._pods.clear()
        self._nodes.clear()
        self._streaks.clear()

    def note_waiting(
        self,
        waiting: Collection[str],
        now: float,
        *,
        is_placed: Callable[[str], bool],
        is_assumed: Callable[[str], bool],
    ) -> None:
        """Update the results of past wakes.

        Args:
            waiting: UIDs of all waiting pods.
            now: monotonic time in seconds.
            is_placed: returns whether a pod (UID) that no longer waits was bound.
            is_assumed: returns whether a pod still counts on the node of its wake.
        """
        for uid, pod in list(self._pods.items()):
            if uid not in waiting:
                if pod.is_out and is_placed(uid):
                    self.helped += 1
                    self._nodes.pop(pod.node, None)
                del self._pods[uid]
                for node in self._nodes.values():
                    node.tried.discard(uid)
            elif pod.is_out and not is_assumed(uid):
                pod.is_out = False
                self._note_in_vain(uid, pod, now)
        quiet_seconds = _QUIET_INTERVALS * self._pace.max_interval_seconds
        for name, node in list(self._nodes.items()):
            if not node.tried and now - node.not_before > quiet_seconds:
                del self._nodes[name]

    def confirm(self, need: object, nodes: Iterable[str], now: float) -> list[str]:
        """Return the nodes that were suitable in enough checks in a row, best first.

        Args:
            need: requirements of the pods; equal for pods with equal requirements.
            nodes: suitable nodes, best first.
            now: monotonic time in seconds.
        """
        before = self._streaks.get(need, {})
        best = [node for node, _ in zip(nodes, range(_MOST_NODES), strict=False)]
        streaks = self._streaks[need] = {node: before.get(node, 0) + 1 for node in best}
        confirmed = (node for node in best if streaks[node] >= self._pace.confirmations)
        return self.open_nodes(confirmed, now)

    def open_nodes(self, nodes: Iterable[str], now: float) -> list[str]:
        """Return the nodes whose pause after a wake without effect is over."""
        return [node for node in nodes if self._is_open(node, now)]

    def keep_needs(self, needs: Collection[object]) -> None:
        """Forget requirements that no waiting pod has."""
        for need in self._streaks.keys() - needs:
            del self._streaks[need]

    def may_try(self, uid: str, node: str, now: float) -> bool:
        """Return whether a pod may be woken for a node."""
        pod = self._pods.get(uid)
        return pod is None or now >= pod.tried.get(node, now)

    def is_untried(self, uid: str, node: str) -> bool:
        """Return whether no wake of a pod for a node failed since another pod was bound to it."""
        known = self._nodes.get(node)
        return known is None or uid not in known.tried

    def is_free(self, now: float) -> bool:
        """Return whether the pause after a failed wake is over."""
        return now >= self._not_before

    def note_woken(self, uid: str, node: str) -> None:
        """Record that a pod was woken for a node, and count the pod on that node."""
        pod = self._pods.setdefault(uid, _Pod(node))
        pod.node, pod.is_out = node, True
        self._failures = 0

    def note_failed(self, now: float) -> None:
        """Record a wake that could not be written, and delay the next one with each failure."""
        self._not_before = now + self._pause(self._failures)
        self._failures = min(self._failures + 1, _MAX_POD_DOUBLINGS)

    def _is_open(self, node: str, now: float) -> bool:
        known = self._nodes.get(node)
        return known is None or now >= known.not_before

    def _note_in_vain(self, uid: str, pod: _Pod, now: float) -> None:
        """Record that a pod was not bound to the node of its wake."""
        node = self._nodes.setdefault(pod.node, _Node())
        node.not_before = now + self._pause(node.failures)
        node.failures = min(node.failures + 1, _MAX_POD_DOUBLINGS)
        node.tried.add(uid)
        pod.tried = {name: until for name, until in pod.tried.items() if until > now}
        repeat_seconds = self._pace.repeat_seconds * 2.0**pod.failures
        pod.tried[pod.node] = now + min(repeat_seconds, _MAX_POD_REPEAT_SECONDS)
        pod.failures = min(pod.failures + 1, _MAX_POD_DOUBLINGS)

    def _pause(self, doublings: int) -> float:
        """Return the pause after wakes without effect, in seconds, after that many doublings."""
        shortest = self._pace.min_interval_seconds
        return min(shortest * 2.0**doublings, self._pace.max_interval_seconds)
