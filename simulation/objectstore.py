"""Store the objects of the simulated API server, and log their changes for watches."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from simulation.objects import JsonObject, child

LOG_LENGTH: Final = 20_000
"""Most changes in the log; a watch from before them is answered with 410."""


class Kind(StrEnum):
    """Kinds that can be listed and watched, by plural name."""

    NODES = "nodes"
    PODS = "pods"


class ChangeType(StrEnum):
    """Type of a change of an object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of one object.

    Attributes:
        version: resource version after the change.
        kind: kind of the object.
        type: type of the change.
        item: the object after the change; never modified later.
    """

    version: int
    kind: Kind
    type: ChangeType
    item: JsonObject


class ExpiredError(LookupError):
    """The log no longer has the changes that a watch requests."""


@dataclass(slots=True, kw_only=True)
class ObjectStore:
    """All objects; use it on one event loop, and never across an await.

    Attributes:
        version: the latest resource version.
        items: objects by kind and (namespace, name).
        log: the latest changes, oldest first.
        forgotten_version: latest version that is no longer in the log.
    """

    version: int = 1
    items: dict[Kind, dict[tuple[str, str], JsonObject]] = field(
        default_factory=lambda: {kind: {} for kind in Kind}
    )
    log: deque[Change] = field(default_factory=deque)
    forgotten_version: int = 0
    _queues: set[asyncio.Queue[Change]] = field(default_factory=set)

    def get(self, kind: Kind, namespace: str, name: str) -> JsonObject | None:
        """Return an object, or None if it does not exist; do not modify it."""
        return self.items[kind].get((namespace, name))

    def put(self, kind: Kind, item: JsonObject) -> JsonObject:
        """Store an object with the next resource version, and notify the watches.

        The store owns the object afterwards: to change it, store a changed copy.
        """
        key = key_of(item)
        type_ = ChangeType.MODIFIED if key in self.items[kind] else ChangeType.ADDED
        self._stamp(item)
        self.items[kind][key] = item
        self._record(kind, type_, item)
        return item

    def remove(self, kind: Kind, namespace: str, name: str) -> JsonObject | None:
        """Remove an object and notify the watches; return None if it did not exist."""
        item = self.items[kind].pop((namespace, name), None)
        if item is not None:
            item = {**item, "metadata": dict(child(item, "metadata"))}
            self._stamp(item)
            self._record(kind, ChangeType.DELETED, item)
        return item

    def changes_since(self, version: int) -> tuple[Change, ...]:
        """Return the changes after a resource version.

        Raises:
            ExpiredError: the log no longer has all of them.
        """
        if version < self.forgotten_version:
            raise ExpiredError(f"too old resource version: {version} ({self.forgotten_version})")
        return tuple(change for change in self.log if change.version > version)

    def forget(self) -> None:
        """Clear the log, as etcd's compaction does."""
        self.log.clear()
        self.forgotten_version = self.version

    @contextmanager
    def watching(self) -> Iterator[asyncio.Queue[Change]]:
        """Yield a queue that receives every change while the context is open."""
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
