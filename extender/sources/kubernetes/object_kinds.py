"""A kind of object that is followed: which, how well, and who takes the objects."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.sources.kubernetes.json_text import WatchChange
from extender.sources.kubernetes.object_cache import Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectKind:
    """Which objects are followed.

    Attributes:
        resource: the kind as RBAC names it ("pods").
        path: path of the list of all of them.
        field_selector: leaves objects out at the API server, "" for none.
        is_optional: the API server may not have such objects, or not show them to us.
    """

    resource: str
    path: str
    field_selector: str = ""
    is_optional: bool = False


class InventorySink(Protocol):
    """Takes what the API server says. Called on the event loop; every call returns soon."""

    def replace_nodes(self, records: Iterable[NodeRecord]) -> None:
        """Take the first complete list of nodes."""

    def apply_node(self, record: NodeRecord) -> None:
        """Take a node that was added or changed."""

    def remove_node(self, name: str) -> None:
        """Forget a node."""

    def replace_pods(self, records: Iterable[PodRecord]) -> None:
        """Take the first complete list of GPU pods."""

    def apply_pod(self, record: PodRecord) -> None:
        """Take a GPU pod that was added or changed."""

    def remove_pod(self, uid: str, at: float) -> None:
        """Forget a pod that was gone by `at`, seconds since the epoch."""

    def apply_host_use(self, node: str, requested: HostResources) -> None:
        """Take what all pods of a node request of it, those without GPUs too."""


@dataclass(slots=True, kw_only=True)
class FollowStatus:
    """How well one kind of object is followed; live, read it when it is asked for.

    Attributes:
        is_listed: a complete list has been taken once.
        is_absent: the API server has no such objects, or does not show them; optional ones alone.
        is_connected: the last attempt to list or watch went well.
        last_event_at: when the API server last said anything, seconds since the epoch; None
            before that.
        last_error: what failed last, "" where nothing is wrong now.
        watches: watches started.
        lists: complete lists taken.
        errors: attempts that failed.
        expired: watches or lists that the API server called too old (410).
        corrections: records that a list had to correct, for the watch had lost them.
        unreadable: objects that our code failed on, and that were left out.
        unreadable_since_list: those since the last complete list began.
        unreadable_names: namespace and name of the last of them, each once.
    """

    is_listed: bool = False
    is_absent: bool = False
    is_connected: bool = False
    last_event_at: float | None = None
    last_error: str = ""
    watches: int = 0
    lists: int = 0
    errors: int = 0
    expired: int = 0
    corrections: int = 0
    unreadable: int = 0
    unreadable_since_list: int = 0
    unreadable_names: tuple[tuple[str, str], ...] = ()

    @property
    def was_tried(self) -> bool:
        """Whether an attempt to list has ended, well or not."""
        return self.is_listed or self.is_absent or self.errors > 0


class Feed(Protocol):
    """Takes the objects of one kind."""

    def begin_list(self) -> None:
        """Start to take a complete list."""

    def may_matter(self, text: msgspec.Raw) -> bool:
        """Whether an object of the list, as text, is worth reading."""

    def idle_change(self, line: bytes) -> WatchChange | None:
        """Return what an event of the watch says if its object is not worth reading, else None."""

    def add_listed(self, raw: Mapping[str, object]) -> None:
        """Take one object of the list."""

    def keep_listed(self, raw: Mapping[str, object]) -> None:
        """Keep what is held of an object of the list of which only the metadata may be read."""

    async def end_list(self, pace: Pace) -> int:
        """Take over the list; return how many records it corrected."""

    def abort_list(self) -> None:
        """Forget the list: it did not come to its end."""

    def put(self, raw: Mapping[str, object]) -> None:
        """Take an object that was added or changed."""

    def drop(self, raw: Mapping[str, object]) -> None:
        """Take an object that is gone, as it was last."""
