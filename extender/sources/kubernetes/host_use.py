"""Sum the CPU, memory and storage that all pods request on each node, with or without GPUs."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from extender.core.nodes.host_resources import NONE, HostResources
from extender.core.untyped import mapping_of, text_of
from extender.sources.kubernetes.object_cache import Pacer

_OnHostUse = Callable[[str, HostResources], None]
"""Receives a node's name and the sum of its pods' requests."""


class PlacedPod(NamedTuple):
    """A pod's requests and its node."""

    node: str
    needs: HostResources


_NOWHERE: Final = PlacedPod("", NONE)


def pod_key(raw: Mapping[str, object]) -> str:
    """Return the `namespace/name` of a Pod object."""
    metadata = mapping_of(raw.get("metadata"))
    return f"{text_of(metadata.get('namespace'))}/{text_of(metadata.get('name'))}"


class HostUse:
    """Sum the pods' requests by node, from a watch and complete lists.

    Nothing else is stored of most pods. Use it on the event loop's thread only.

    Args:
        notify: receives a node's sum after each change.

    Attributes:
        pods: each pod's requests by `namespace/name`, which is unique at any time.
    """

    def __init__(self, notify: _OnHostUse) -> None:
        self._notify = notify
        self.pods: dict[str, PlacedPod] = {}
        self._sums: dict[str, HostResources] = {}
        self._listed: dict[str, PlacedPod] = {}
        self._touched: set[str] | None = None

    def put(self, key: str, placed: PlacedPod | None) -> None:
        """Apply a pod's change in the watch; None if it requests nothing of a node (any more)."""
        if self._touched is not None:
            self._touched.add(key)
        for node in self._change(key, placed):
            self._notify(node, self._sums.get(node, NONE))

    def begin_list(self) -> None:
        """Start a complete list."""
        self._listed, self._touched = {}, set()

    def add_listed(self, key: str, placed: PlacedPod | None) -> None:
        """Add one pod of the list."""
        if placed is not None:
            self._listed[key] = placed

    def keep_unreadable(self, key: str) -> None:
        """Keep the requests of a listed pod that cannot be read."""
        if self._touched is not None and key not in self._listed:
            self._touched.add(key)

    async def end_list(self, pacer: Pacer) -> None:
        """Apply the list, except to pods that the watch has changed meanwhile."""
        listed, self._listed = self._listed, {}
        changed: set[str] = set()
        for key in [key for key in self.pods if key not in listed]:
            if not self._is_touched(key):
                changed |= self._change(key, None)
            await pacer.yield_if_due()
        for key, placed in listed.items():
            if not self._is_touched(key):
                changed |= self._change(key, placed)
            await pacer.yield_if_due()
        self._touched = None
        for node in changed:
            self._notify(node, self._sums.get(node, NONE))
            await pacer.yield_if_due()

    def abort_list(self) -> None:
        """Discard an incomplete list."""
        self._listed, self._touched = {}, None

    def _is_touched(self, key: str) -> bool:
        return self._touched is not None and key in self._touched

    def _change(self, key: str, placed: PlacedPod | None) -> set[str]:
        """Store a pod's requests; return the nodes whose sums change."""
        before, after = self.pods.get(key, _NOWHERE), placed or _NOWHERE
        if before == after:
            return set()
        if placed is None:
            del self.pods[key]
        else:
            self.pods[key] = placed
        self._sums[before.node] = self._sums.get(before.node, NONE).less(before.needs)
        self._sums[after.node] = self._sums.get(after.node, NONE).plus(after.needs)
        for node in {before.node, after.node}:
            if self._sums[node] == NONE:
                del self._sums[node]
        return {before.node, after.node} - {""}
