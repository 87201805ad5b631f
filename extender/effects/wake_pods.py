"""Decide which pods to wake one by one; does no I/O, but remembers past wakes.

A pod is woken for a suitable node and counts there from then on, so no more pods are woken than
there is room for. The node may still be unsuitable: we do not know pod affinity rules. So a pod
that was woken without effect is not woken for the same node soon, and wakes for a node to which no
pod was bound become rarer.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from extender.effects.wake_plan import PACE, WakePace

_MOST_NODES: Final = 256
"""Maximum number of suitable nodes that are remembered between checks, best first."""

_MAX_REPEAT_SECONDS: Final = 3600.0
"""Longest pause before a pod is woken for the same node again: it lets a hundred others try."""

_MAX_DOUBLINGS: Final = 20


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
        """Forget everything, because another replica takes over waking."""
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
        """Record that a pod was woken for a node, and counts there."""
        pod = self._pods.setdefault(uid, _Pod(node))
        pod.node, pod.is_out = node, True
        self._failures = 0

    def note_failed(self, now: float) -> None:
        """Record a wake that could not be written, and delay the next one with each failure."""
        self._not_before = now + self._pause(self._failures)
        self._failures = min(self._failures + 1, _MAX_DOUBLINGS)

    def _is_open(self, node: str, now: float) -> bool:
        known = self._nodes.get(node)
        return known is None or now >= known.not_before

    def _note_in_vain(self, uid: str, pod: _Pod, now: float) -> None:
        """Record that a pod was not bound to the node of its wake."""
        node = self._nodes.setdefault(pod.node, _Node())
        node.not_before = now + self._pause(node.failures)
        node.failures = min(node.failures + 1, _MAX_DOUBLINGS)
        node.tried.add(uid)
        pod.tried = {name: until for name, until in pod.tried.items() if until > now}
        repeat_seconds = self._pace.repeat_seconds * 2.0**pod.failures
        pod.tried[pod.node] = now + min(repeat_seconds, _MAX_REPEAT_SECONDS)
        pod.failures = min(pod.failures + 1, _MAX_DOUBLINGS)

    def _pause(self, doublings: int) -> float:
        """Return the pause after wakes without effect, in seconds, after that many doublings."""
        shortest = self._pace.min_interval_seconds
        return min(shortest * 2.0**doublings, self._pace.max_interval_seconds)
