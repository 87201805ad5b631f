"""How much CPU and memory of each node pods request, whether they have to do with GPUs or not."""

from collections.abc import Callable
from typing import Final, NamedTuple

from extender.core.nodes.host_resources import NONE, HostResources
from extender.sources.kubernetes.object_cache import Pace

TellUse = Callable[[str, HostResources], None]
"""Is given a node and what its pods request of it."""


class PlacedPod(NamedTuple):
    """What a pod requests of the node that it is on."""

    node: str
    needs: HostResources


_NOWHERE: Final = PlacedPod("", NONE)


class HostUse:
    """Sums up what pods request of each node, as a watch and complete lists tell of them.

    Of most pods nothing else is kept. Only the event loop's thread changes it.

    Args:
        tell: is given a node's sum whenever it changes.
    """

    def __init__(self, tell: TellUse) -> None:
        self._tell = tell
        self._pods: dict[str, PlacedPod] = {}
        self._sums: dict[str, HostResources] = {}
        self._listed: dict[str, PlacedPod] = {}
        self._touched: set[str] | None = None

    def put(self, uid: str, placed: PlacedPod | None) -> None:
        """Take what the watch says of a pod; None where it requests nothing of any node."""
        if self._touched is not None:
            self._touched.add(uid)
        for node in self._change(uid, placed):
            self._tell(node, self._sums.get(node, NONE))

    def begin_list(self) -> None:
        """Start to take a complete list."""
        self._listed, self._touched = {}, set()

    def add_listed(self, uid: str, placed: PlacedPod | None) -> None:
        """Take one pod of the list."""
        if placed is not None:
            self._listed[uid] = placed

    def keep_listed(self, uid: str) -> None:
        """Keep what is held of a pod of the list: it is there, and cannot be read."""
        if self._touched is not None and uid not in self._listed:
            self._touched.add(uid)

    async def end_list(self, pace: Pace) -> None:
        """Go by the list, but for pods of which the watch has told meanwhile."""
        listed, self._listed = self._listed, {}
        changed: set[str] = set()
        for uid in [uid for uid in self._pods if uid not in listed]:
            if not self._is_touched(uid):
                changed |= self._change(uid, None)
            await pace.breathe()
        for uid, placed in listed.items():
            if not self._is_touched(uid):
                changed |= self._change(uid, placed)
            await pace.breathe()
        self._touched = None
        for node in changed:
            self._tell(node, self._sums.get(node, NONE))
            await pace.breathe()

    def abort_list(self) -> None:
        """Forget a list that did not come to its end."""
        self._listed, self._touched = {}, None

    def _is_touched(self, uid: str) -> bool:
        return self._touched is not None and uid in self._touched

    def _change(self, uid: str, placed: PlacedPod | None) -> set[str]:
        """Take what is now so of a pod; return the nodes whose sums change by that."""
        before, after = self._pods.get(uid, _NOWHERE), placed or _NOWHERE
        if before == after:
            return set()
        if placed is None:
            del self._pods[uid]
        else:
            self._pods[uid] = placed
        self._sums[before.node] = self._sums.get(before.node, NONE).less(before.needs)
        self._sums[after.node] = self._sums.get(after.node, NONE).plus(after.needs)
        for node in {before.node, after.node}:
            if self._sums[node] == NONE:
                del self._sums[node]
        return {before.node, after.node} - {""}
