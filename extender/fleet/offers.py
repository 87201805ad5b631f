"""When nodes came to have fewer devices, or came back: readings may not show that yet."""

from math import inf

from extender.core.nodes.inventory import NodeRecord
from extender.core.policy import Freshness


class OfferChanges:
    """When each node last came to offer fewer devices, or came back, as long as that is news."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def forget(self, node: str, now: float, freshness: Freshness) -> None:
        """Note that a node is gone; it may come back with fewer devices, or others."""
        oldest = now - freshness.forget_seconds
        self._at = {name: at for name, at in self._at.items() if at > oldest}
        self._at[node] = now

    def put_back(self, seconds: float) -> None:
        """Date all changes back: the clock was put back by so much."""
        self._at = {name: at - seconds for name, at in self._at.items()}

    def note(self, before: NodeRecord | None, node: NodeRecord, now: float) -> None:
        """Note if a node offers fewer devices than before, or is back."""
        is_back = before is None and node.name in self._at
        had = {} if before is None else before.capacity
        has_fewer = any(node.capacity.get(resource, 0) < count for resource, count in had.items())
        if is_back or has_fewer:
            self._at[node.name] = now

    def since(self, node: str) -> float:
        """Return when that was, seconds since the epoch; -inf for never."""
        return self._at.get(node, -inf)

    def is_news(self, node: str, now: float, freshness: Freshness) -> bool:
        """Tell whether readings may not show it yet; forget it where they must."""
        is_late = now - self.since(node) <= freshness.max_age_seconds
        if not is_late:
            self._at.pop(node, None)
        return is_late
