"""What the simulated API server remembers: nodes, pods, and the changes that watchers follow."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from simulation.objects import JsonObject, child

LOG_LENGTH: Final = 20_000
"""So many changes are kept; a watch from before them is answered 410."""


class Kind(StrEnum):
    """The kinds that can be listed and watched, by their plural name."""

    NODES = "nodes"
    PODS = "pods"


class ChangeType(StrEnum):
    """What happened to an object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of one object.

    Attributes:
        version: the resource version that it made.
        kind: what was changed.
        type: how.
        item: the object as it was then; never changed afterwards.
    """

    version: int
    kind: Kind
    type: ChangeType
    item: JsonObject


class ExpiredError(LookupError):
    """A watch asks for changes that are not remembered any more."""


@dataclass(slots=True, kw_only=True)
class ObjectStore:
    """All objects; changed and read on one event loop, never across an await.

    Attributes:
        version: the latest resource version.
        items: objects by kind and (namespace, name).
        log: the latest changes, oldest first.
        forgotten_version: changes up to this version are not in the log any more.
    """

    version: int = 1
    items: dict[Kind, dict[tuple[str, str], JsonObject]] = field(
        default_factory=lambda: {kind: {} for kind in Kind}
    )
    log: deque[Change] = field(default_factory=deque)
    forgotten_version: int = 0
    _queues: set[asyncio.Queue[Change]] = field(default_factory=set)

    def get(self, kind: Kind, namespace: str, name: str) -> JsonObject | None:
        """Return an object, None if there is none; not to be changed."""
        return self.items[kind].get((namespace, name))

    def put(self, kind: Kind, item: JsonObject) -> JsonObject:
        """Store an object, give it the next resource version, and tell the watchers.

        The object belongs to the store afterwards: whoever changes one stores a changed copy.
        """
        key = key_of(item)
        type_ = ChangeType.MODIFIED if key in self.items[kind] else ChangeType.ADDED
        self._stamp(item)
        self.items[kind][key] = item
        self._record(kind, type_, item)
        return item

    def remove(self, kind: Kind, namespace: str, name: str) -> JsonObject | None:
        """Remove an object and tell the watchers; None if there was none."""
        item = self.items[kind].pop((namespace, name), None)
        if item is not None:
            item = {**item, "metadata": dict(child(item, "metadata"))}
            self._stamp(item)
            self._record(kind, ChangeType.DELETED, item)
        return item

    def changes_since(self, version: int) -> tuple[Change, ...]:
        """Return the changes after a resource version.

        Raises:
            ExpiredError: some of them are forgotten.
        """
        if version < self.forgotten_version:
            raise ExpiredError(f"too old resource version: {version} ({self.forgotten_version})")
        return tuple(change for change in self.log if change.version > version)

    def forget(self) -> None:
        """Forget all changes, as etcd's compaction does."""
        self.log.clear()
        self.forgotten_version = self.version

    @contextmanager
    def watching(self) -> Iterator[asyncio.Queue[Change]]:
        """Receive every change while the context is open."""
        queue: asyncio.Queue[Change] = asyncio.Queue()
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def _stamp(self, item: JsonObject) -> None:
        self.version += 1
        child(item, "metadata")["resourceVersion"] = str(self.version)

    def _record(self, kind: Kind, type_: ChangeType, item: JsonObject) -> None:
        change = Change(version=self.version, kind=kind, type=type_, item=item)
        self.log.append(change)
        if len(self.log) > LOG_LENGTH:
            self.forgotten_version = self.log.popleft().version
        for queue in self._queues:
            queue.put_nowait(change)


def key_of(item: JsonObject) -> tuple[str, str]:
    """Return an object's (namespace, name); the namespace of a node is ""."""
    metadata = child(item, "metadata")
    return str(metadata.get("namespace", "")), str(metadata.get("name", ""))
