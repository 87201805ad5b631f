"""Pods that died soon after their start, and what that costs their node."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import nlargest

from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.pod_owners import owner_key
from extender.core.policy import EarlyFailures

FORGOTTEN_WEIGHT = 0.01
"""A failure that has faded to less counts no more."""


MOST_AVOIDED = 64
"""Nodes that an owner's next pods avoid: each is evaluated once more for them."""

SHARE_DIGITS = 2
"""Of a share of certainty: no finer than that counts, and none else is another from moment to
moment."""


@dataclass(slots=True)
class _Failure:
    """How pods of one owner failed on one node.

    Attributes:
        at: when the first of them did, seconds since the epoch.
        last_at: when the last of them did.
        told_at: when the pod's status last said that a device was the cause, None where none did.
        measured_at: when a device of the node last had a fault at the time, None where none had.
    """

    at: float
    last_at: float
    told_at: float | None = None
    measured_at: float | None = None

    @property
    def device_at(self) -> float | None:
        """When a device last was the cause, None where none was."""
        return max((at for at in (self.told_at, self.measured_at) if at is not None), default=None)

    @property
    def fades_from(self) -> float:
        """From when on it fades; a device that fails again is no better than before."""
        device_at = self.device_at
        return self.at if device_at is None else device_at

    def put_back(self, seconds: float) -> None:
        """Date it back."""
        self.at -= seconds
        self.last_at -= seconds
        self.told_at = None if self.told_at is None else self.told_at - seconds
        self.measured_at = None if self.measured_at is None else self.measured_at - seconds


class FailureLog:
    """Early failures by node and owner, as long as they count.

    A failure by a device counts at once. Any other may be the program's own fault: it counts once
    pods of a second owner fail on the node too. An owner whose pods fail in one of these ways on
    several nodes is at fault itself, and that counts against none of these nodes; but where the
    node itself was measured to have a fault at the time, that counts whatever happens elsewhere.
    The owner's next pods try other nodes, whatever the cause was.

    Args:
        rule: how much a failure counts, and how fast it fades.
        had_fault: whether a device of a node had a fault around a time (seconds since the epoch).
    """

    def __init__(
        self,
        rule: EarlyFailures,
        had_fault: Callable[[str, float], bool] = lambda _node, _at: False,
    ) -> None:
        self._rule = rule
        self._had_fault = had_fault
        self._by_node: dict[str, dict[str, _Failure]] = {}
        self._by_owner: dict[str, dict[str, _Failure]] = {}

    def adopt(self, rule: EarlyFailures) -> None:
        """Let failures count by another rule from now on."""
        self._rule = rule

    def note(self, pod: PodRecord, at: float) -> None:
        """Note that a pod died early on its node; all pods of an owner count once."""
        owner = owner_key(pod.namespace, pod.owner, pod.name)
        failure = self._by_node.setdefault(pod.node, {}).setdefault(owner, _Failure(at, at))
        failure.last_at = max(failure.last_at, at)
        self._by_owner.setdefault(owner, {})[pod.node] = failure
        if pod.is_device_fault:
            failure.told_at = max(at, failure.told_at or at)

    def put_back(self, seconds: float) -> None:
        """Date all failures back: the clock was put back by so much."""
        for failures in self._by_node.values():
            for failure in failures.values():
                failure.put_back(seconds)

    def forget(self, node: str) -> None:
        """Forget a node that is gone."""
        for owner in self._by_node.pop(node, {}):
            self._forget(owner, node)

    def _forget(self, owner: str, node: str) -> None:
        """Forget how an owner's pods failed on a node."""
        nodes = self._by_owner[owner]
        del nodes[node]
        if not nodes:
            del self._by_owner[owner]

    def of_owner(self, owner: str, now: float) -> Mapping[str, float]:
        """Return the nodes on which an owner's pods failed, of many the latest.

        Args:
            owner: its key, as `core.nodes.pod_owners` has it.
            now: seconds since the epoch.

        Returns:
            The share of its certainty that each of them loses for further pods of this owner.
        """
        nodes = self._by_owner.get(owner)
        if nodes is None:
            return {}
        latest = nlargest(MOST_AVOIDED, nodes, key=lambda node: nodes[node].last_at)
        shares = {
            node: round(self._lost(self._weight(now - nodes[node].last_at)), SHARE_DIGITS)
            for node in latest
        }
        return {node: share for node, share in shares.items() if share}

    def count(self, node: str) -> int:
        """Return of how many owners the failures on a node count against it."""
        by_device, others = self._counting(node, *self._spread())
        return len(by_device) + (len(others) if len(others) > 1 else 0)

    def suspicion(self, now: float) -> Mapping[str, float]:
        """Return the share of its certainty that each node loses, 0 to 1; the others lose none."""
        self._refresh(now)
        spread = self._spread()
        suspicion = {}
        for node in self._by_node:
            by_device, others = (
                [self._weight(now - failure.fades_from) for failure in some]
                for some in self._counting(node, *spread)
            )
            # One owner's failures alone say nothing; the second's count, and the first's fade.
            total = sum(by_device) + sum(others) - max(others, default=0.0)
            if total > 0:
                suspicion[node] = self._lost(total)
        return suspicion

    def _lost(self, total: float) -> float:
        """Return the share of its certainty that a node loses for failures of so much weight."""
        return 1.0 - float((1.0 - self._rule.weight) ** total)

    def _refresh(self, now: float) -> None:
        """Forget what has faded, and note where a device turns out to have been the cause."""
        for node, failures in list(self._by_node.items()):
            for owner, failure in list(failures.items()):
                # First: what has faded otherwise may turn out to have been a device again.
                self._measure(node, failure)
                if self._weight(now - failure.fades_from) < FORGOTTEN_WEIGHT:
                    del failures[owner]
                    self._forget(owner, node)
            if not failures:
                del self._by_node[node]

    def _measure(self, node: str, failure: _Failure) -> None:
        """Note whether the node had a fault when pods first failed, or when they last did."""
        for at in (failure.at, failure.last_at):
            if at > (failure.measured_at or float("-inf")) and self._had_fault(node, at):
                failure.measured_at = at

    def _spread(self) -> tuple[Counter[str], Counter[str]]:
        """Return by owner on how many nodes its pods failed, by a device and at all.

        A device that was measured is its node's, and says nothing of the owner.
        """
        failed = [item for failures in self._by_node.values() for item in failures.items()]
        by_device = (
            owner
            for owner, failure in failed
            if failure.told_at is not None and failure.measured_at is None
        )
        return Counter(by_device), Counter(owner for owner, _ in failed)

    def _counting(
        self, node: str, by_device: Counter[str], at_all: Counter[str]
    ) -> tuple[list[_Failure], list[_Failure]]:
        """Return the failures on a node that no owner is at fault for, by a device and others."""
        counting: tuple[list[_Failure], list[_Failure]] = ([], [])
        for owner, failure in self._by_node.get(node, {}).items():
            is_other = failure.device_at is None
            spread = (at_all if is_other else by_device)[owner]
            if failure.measured_at is not None or spread == 1:
                counting[is_other].append(failure)
        return counting

    def _weight(self, age_seconds: float) -> float:
        """Return how much a failure counts, 1 when fresh; one from a clock ahead of ours is."""
        return float(0.5 ** (max(age_seconds, 0.0) / self._rule.half_life_seconds))
