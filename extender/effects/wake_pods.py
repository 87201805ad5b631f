"""Decides which waiting pods are woken one by one; pure, but for what it remembers of past wakes.

A pod is woken for a node that would do, and counts there from then on, so that no more pods are
woken than there came room for. What we take for room may be none: we know neither a node's CPU and
memory, nor which pods may be neighbors. So a pod that was woken in vain is not woken for the same
node soon, and a node that no pod came to has pods woken for it less and less often.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from extender.settings.wake import Wake

MOST_NODES: Final = 256
"""Of the nodes that would do so many are remembered from look to look, the best ones."""

MAX_REPEAT_SECONDS: Final = 3600.0
"""A pod that does not come to a node again and again leaves it to a hundred others meanwhile."""

MAX_DOUBLINGS: Final = 20


@dataclass(slots=True)
class _Node:
    """What is remembered of a node that pods were woken for.

    Attributes:
        failures: so many in a row did not come to it.
        tried: UIDs of those of them that wait.
        not_before: no pod is woken for it sooner, seconds.
    """

    failures: int = 0
    tried: set[str] = field(default_factory=set)
    not_before: float = 0.0


@dataclass(slots=True)
class _Pod:
    """What is remembered of a pod that was woken.

    Attributes:
        node: for which it was last.
        is_out: it is not known yet what came of that.
        failures: so many wakes were in vain.
        tried: nodes that it did not come to, and until when it is not woken for them again.
    """

    node: str
    is_out: bool = True
    failures: int = 0
    tried: dict[str, float] = field(default_factory=dict)


class PodWakes:
    """Says which pods to wake, and for which node.

    Args:
        settings: limits of rate and repetition; may be changed.

    Attributes:
        helped: pods that got a node after a wake for them.
    """

    def __init__(self, settings: Wake) -> None:
        self.helped = 0
        self.settings = settings
        self._pods: dict[str, _Pod] = {}
        self._nodes: dict[str, _Node] = {}
        self._streaks: dict[object, dict[str, int]] = {}
        self._failures = 0
        self._not_before = float("-inf")

    def forget(self) -> None:
        """Forget everything: another replica wakes."""
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
        """Take what came of past wakes.

        Args:
            waiting: UIDs of all waiting pods.
            now: seconds of a clock that never goes back.
            is_placed: whether a pod (UID) that waits no more has got a node.
            is_assumed: whether a pod still counts on the node that it was woken for.
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
        """Return which of the nodes that would do now have done so for long enough, best first.

        Args:
            need: what pods need; equal for all that need the same.
            nodes: the nodes that would do, best first.
            now: seconds of a clock that never goes back.
        """
        before = self._streaks.get(need, {})
        best = [node for node, _ in zip(nodes, range(MOST_NODES), strict=False)]
        streaks = self._streaks[need] = {node: before.get(node, 0) + 1 for node in best}
        confirmed = (node for node in best if streaks[node] >= self.settings.confirmations)
        return self.open_nodes(confirmed, now)

    def open_nodes(self, nodes: Iterable[str], now: float) -> list[str]:
        """Return those of some nodes that pods may be woken for now: not lately in vain."""
        return [node for node in nodes if self._is_open(node, now)]

    def keep_needs(self, needs: Collection[object]) -> None:
        """Forget what no waiting pod needs any more."""
        for need in self._streaks.keys() - needs:
            del self._streaks[need]

    def may_try(self, uid: str, node: str, now: float) -> bool:
        """Tell whether a pod may be woken for a node."""
        pod = self._pods.get(uid)
        return pod is None or now >= pod.tried.get(node, now)

    def is_untried(self, uid: str, node: str) -> bool:
        """Tell whether a pod was not woken for a node in vain since another one came to it."""
        known = self._nodes.get(node)
        return known is None or uid not in known.tried

    def is_free(self, now: float) -> bool:
        """Tell whether pods can be woken: lately the API server took it."""
        return now >= self._not_before

    def note_woken(self, uid: str, node: str) -> None:
        """Take that a pod was woken for a node, and counts there."""
        pod = self._pods.setdefault(uid, _Pod(node))
        pod.node, pod.is_out = node, True
        self._failures = 0

    def note_failed(self, now: float) -> None:
        """Take that a wake could not be written: the next try is less and less urgent."""
        self._not_before = now + self._pause(self._failures)
        self._failures = min(self._failures + 1, MAX_DOUBLINGS)

    def _is_open(self, node: str, now: float) -> bool:
        known = self._nodes.get(node)
        return known is None or now >= known.not_before

    def _note_in_vain(self, uid: str, pod: _Pod, now: float) -> None:
        """Take that a pod did not come to the node that it was woken for."""
        node = self._nodes.setdefault(pod.node, _Node())
        node.not_before = now + self._pause(node.failures)
        node.failures = min(node.failures + 1, MAX_DOUBLINGS)
        node.tried.add(uid)
        pod.tried = {name: until for name, until in pod.tried.items() if until > now}
        repeat_seconds = self.settings.repeat_seconds * 2.0**pod.failures
        pod.tried[pod.node] = now + min(repeat_seconds, MAX_REPEAT_SECONDS)
        pod.failures = min(pod.failures + 1, MAX_DOUBLINGS)

    def _pause(self, doublings: int) -> float:
        """Return the least time between two wakes in vain, in seconds, doubled so many times."""
        shortest = self.settings.min_interval_seconds
        longest = max(self.settings.max_interval_seconds, shortest)
        return min(shortest * 2.0**doublings, longest)
