"""Pods that died soon after their start, and what that costs their node."""

from collections.abc import Mapping

from extender.core.policy import EarlyFailures

FORGOTTEN_WEIGHT = 0.01
"""A failure that has faded to less counts no more."""


class FailureLog:
    """Early failures by node, as long as they count.

    Args:
        rule: how much a failure counts, and how fast it fades.
    """

    def __init__(self, rule: EarlyFailures) -> None:
        self._rule = rule
        self._by_node: dict[str, dict[str, float]] = {}

    def adopt(self, rule: EarlyFailures) -> None:
        """Let failures count by another rule from now on."""
        self._rule = rule

    def note(self, node: str, uid: str, at: float) -> None:
        """Note that a pod died early on a node; a pod counts once."""
        self._by_node.setdefault(node, {}).setdefault(uid, at)

    def forget(self, node: str) -> None:
        """Forget a node that is gone."""
        self._by_node.pop(node, None)

    def count(self, node: str) -> int:
        """Return how many failures on a node still count."""
        return len(self._by_node.get(node, ()))

    def suspicion(self, now: float) -> Mapping[str, float]:
        """Return the share of its score that each node loses, 0 to 1; the others lose none."""
        suspicion = {}
        for node, failures in list(self._by_node.items()):
            weights = {uid: self._weight(now - at) for uid, at in failures.items()}
            for uid, weight in weights.items():
                if weight < FORGOTTEN_WEIGHT:
                    del failures[uid]
            if failures:
                suspicion[node] = 1.0 - (1.0 - self._rule.weight) ** sum(weights.values())
            else:
                del self._by_node[node]
        return suspicion

    def _weight(self, age_seconds: float) -> float:
        """Return how much a failure counts, 1 when fresh; one from a clock ahead of ours is."""
        return float(0.5 ** (max(age_seconds, 0.0) / self._rule.half_life_seconds))
