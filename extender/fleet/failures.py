"""Record pods that failed soon after their start, and derive the suspicion against their nodes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.pod_groups import owner_key
from extender.core.policy import EarlyFailures
from extender.core.steps import Steps, finish

_FORGOTTEN_WEIGHT = 0.01
"""A failure that has faded below this weight is forgotten."""


_MOST_OWNERS = 64
"""Maximum number of owners remembered for a node: its suspicion hardly grows with more. Any tenant
can make pods with new names fail."""

_PIECE_NODES = 8
"""Nodes counted per cooperative step, a few milliseconds if all have `_MOST_OWNERS`."""

_MOST_AVOIDED = 64
"""Maximum number of nodes that an owner's next pods avoid; each takes an extra evaluation."""

_SHARE_DIGITS = 2
"""Digits of a share of certainty. Rounding keeps the value constant between two moments."""


@dataclass(slots=True)
class _Failure:
    """Failures of one owner's pods on one node.

    Attributes:
        at: time of the first failure, seconds since the epoch.
        reported_at: when a pod's status last named a device as the cause, None if never.
        measured_at: time of the last failure during which a device of the node had a fault, None if
            there was none.
    """

    at: float
    last_at: float
    reported_at: float | None = None
    measured_at: float | None = None

    @property
    def device_at(self) -> float | None:
        """Time when a device last was the cause, None if never."""
        return max(
            (at for at in (self.reported_at, self.measured_at) if at is not None), default=None
        )

    @property
    def fades_from(self) -> float:
        """Time from which the failure fades; a device that fails again counts in full again."""
        device_at = self.device_at
        return self.at if device_at is None else device_at

    def shift_back(self, seconds: float) -> None:
        """Move all times back by this many seconds."""
        self.at -= seconds
        self.last_at -= seconds
        self.reported_at = None if self.reported_at is None else self.reported_at - seconds
        self.measured_at = None if self.measured_at is None else self.measured_at - seconds


class FailureLog:
    """Early failures by node and owner, as long as they count.

    A failure by a device counts at once. Any other failure may be the program's fault. It counts
    once pods of a second owner fail on the node too. An owner whose pods fail in the same way on
    several nodes is at fault itself, and then no node is suspected for it. If a device of the node
    was measured to have a fault at the time, the failure always counts against the node. The
    owner's next pods try other nodes, regardless of the cause.

    Args:
        rule: weight and half-life of failures.
        had_fault: returns whether a device of a node had a fault around a time (seconds since the
            epoch).
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
        """Switch to other settings for early failures."""
        self._rule = rule

    def note(self, pod: PodRecord, at: float) -> None:
        """Record that a pod failed early on its node; all pods of an owner count once."""
        owner = owner_key(pod.namespace, pod.owner, pod.name)
        failure = self._by_node.setdefault(pod.node, {}).setdefault(owner, _Failure(at, at))
        failure.last_at = max(failure.last_at, at)
        self._by_owner.setdefault(owner, {})[pod.node] = failure
        self._forget_surplus(pod.node)
        if pod.is_device_fault:
            failure.reported_at = max(at, failure.reported_at or at)

    def shift_back(self, seconds: float) -> None:
        """Shift all recorded times back after the clock was set back by this many seconds."""
        for failures in self._by_node.values():
            for failure in failures.values():
                failure.shift_back(seconds)

    def forget(self, node: str) -> None:
        """Forget a removed node."""
        for owner in list(self._by_node.get(node, {})):
            self._forget(owner, node)

    def _forget(self, owner: str, node: str) -> None:
        """Forget the failures of an owner's pods on a node."""
        for failures, first, second in (
            (self._by_node, node, owner),
            (self._by_owner, owner, node),
        ):
            del failures[first][second]
            if not failures[first]:
                del failures[first]

    def _forget_surplus(self, node: str) -> None:
        """Forget the oldest failure of a node with too many, first those without a device."""
        failures = self._by_node[node]
        if len(failures) > _MOST_OWNERS:
            oldest = min(
                failures,
                key=lambda owner: (failures[owner].device_at is not None, failures[owner].last_at),
            )
            self._forget(oldest, node)

    def of_owner(self, owner: str, now: float) -> Mapping[str, float]:
        """Return the nodes where an owner's pods failed; the latest ones if there are many.

        Args:
            owner: key of the owner, as in `core.nodes.pod_groups`.
            now: seconds since the epoch.

        Returns:
            Share of certainty that each node loses for further pods of this owner.
        """
        nodes = self._by_owner.get(owner)
        if nodes is None:
            return {}
        latest = nlargest(_MOST_AVOIDED, nodes, key=lambda node: nodes[node].last_at)
        shares = {
            node: round(self._lost(self._weight(now - nodes[node].last_at)), _SHARE_DIGITS)
            for node in latest
        }
        return {node: share for node, share in shares.items() if share}

    def count(self, node: str) -> int:
        """Return the number of owners whose failures count against a node."""
        by_device, others = self._counting(node)
        return len(by_device) + (len(others) if len(others) > 1 else 0)

    def suspicion(self, now: float) -> Mapping[str, float]:
        """Return the share of certainty that nodes lose, 0 to 1; other nodes lose none."""
        return finish(self.suspicion_in_steps(now))

    def suspicion_in_steps(self, now: float) -> Steps[Mapping[str, float]]:
        """Return the same as `suspicion`, in cooperative steps."""
        suspicion = {}
        for some in _pieces(self._by_node):
            self._refresh(some, now)
            yield
        for some in _pieces(self._by_node):
            for node in some:
                by_device, others = (
                    [self._weight(now - failure.fades_from) for failure in counting]
                    for counting in self._counting(node)
                )
                # One owner alone is no evidence: the heaviest failure without a device does not
                # count.
                total = sum(by_device) + sum(others) - max(others, default=0.0)
                if total > 0:
                    suspicion[node] = self._lost(total)
            yield
        return suspicion

    def _lost(self, total: float) -> float:
        """Return the share of certainty that a node loses for failures of this total weight."""
        return 1.0 - float((1.0 - self._rule.weight) ** total)

    def _refresh(self, nodes: Iterable[str], now: float) -> None:
        """Forget faded failures, and record device faults that were reported meanwhile."""
        for node in nodes:
            for owner, failure in list(self._by_node.get(node, {}).items()):
                # First: a device fault restores the weight of a failure that has faded.
                self._measure(node, failure)
                if self._weight(now - failure.fades_from) < _FORGOTTEN_WEIGHT:
                    self._forget(owner, node)

    def _measure(self, node: str, failure: _Failure) -> None:
        """Record whether the node had a device fault at the first or the last failure."""
        for at in (failure.at, failure.last_at):
            if at > (failure.measured_at or float("-inf")) and self._had_fault(node, at):
                failure.measured_at = at

    def _counting(self, node: str) -> tuple[list[_Failure], list[_Failure]]:
        """Return the failures that count against a node: caused by a device, and all others."""
        counting: tuple[list[_Failure], list[_Failure]] = ([], [])
        for owner, failure in self._by_node.get(node, {}).items():
            if failure.measured_at is not None or self._is_alone(owner, failure):
                counting[failure.device_at is None].append(failure)
        return counting

    def _is_alone(self, owner: str, failure: _Failure) -> bool:
        """Return whether a failure's node is the only one on which its owner's pods failed so.

        Of failures by a device, those with a measured fault are left out: the node causes them.
        """
        failures = self._by_owner[owner].values()
        if failure.device_at is None:
            return len(failures) == 1
        return sum(one.reported_at is not None and one.measured_at is None for one in failures) == 1

    def _weight(self, age_seconds: float) -> float:
        """Return the weight of a failure, 1 if fresh or in the future."""
        return float(0.5 ** (max(age_seconds, 0.0) / self._rule.half_life_seconds))


def _pieces(nodes: Iterable[str]) -> Iterator[list[str]]:
    """Split the names of nodes, which may change meanwhile."""
    names = iter(tuple(nodes))
    while some := list(islice(names, _PIECE_NODES)):
        yield some
