"""The inventory: nodes and GPU pods, with what they hold by claims, as the API server has them.

Pods are followed but for those that have succeeded (field selector `status.phase!=Succeeded`): in
clusters that run jobs these are most of all, and they hold nothing. A pod that succeeds leaves the
selection, and the watch reports that as DELETED at once. Failed pods stay in: leaving the
selection, they would be reported as they were before they failed, and early failures never be
seen. Pending pods are needed for nominations, so there is no selection by node.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Protocol

import msgspec

from extender.core.inventory import ClaimedDevice, NodeRecord, PodRecord
from extender.core.resources import ResourceNames
from extender.core.untyped import mapping_of, text_of
from extender.kube import KubeClient
from extender.sources.claims import CLAIMS, SLICES, ClaimBook
from extender.sources.kube_kind import Feed, FollowStatus, Kind
from extender.sources.kube_records import (
    ExporterPod,
    reduce_exporter,
    reduce_node,
    reduce_pod,
)
from extender.sources.kube_reflector import FollowSettings, Reflector
from extender.sources.kube_shelf import Pace, Shelf
from extender.sources.kube_text import Change, PodGlance
from extender.stepping import GiveWay, next_turn

NODES: Final = Kind(resource="nodes", path="/api/v1/nodes")
PODS: Final = Kind(resource="pods", path="/api/v1/pods", field_selector="status.phase!=Succeeded")


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


class ClusterSource:
    """Follows nodes and pods, and tells the sink what changes.

    Where the API server shows claims and slices, pods are told with the GPUs that they hold so.

    Args:
        client: the API server.
        sink: takes the records; of nodes, equal ones are not passed twice, and of pods only where
            claims changed or were listed.
        resources: which resources are GPUs.
        early_seconds: a container's failure so soon after its start is early.
        settings: how to follow.
        clock: seconds since the epoch.
        give_way: lets others have a turn.
    """

    def __init__(
        self,
        client: KubeClient,
        sink: InventorySink,
        *,
        resources: ResourceNames,
        early_seconds: float = 60.0,
        settings: FollowSettings | None = None,
        clock: Callable[[], float] = time.time,
        give_way: GiveWay = next_turn,
    ) -> None:
        follow = settings or FollowSettings()
        self._nodes = _NodeFeed(sink, resources)
        self._pods = _PodFeed(
            sink,
            resources,
            early_seconds=early_seconds,
            exporter_words=follow.exporter_words,
            held_by=self._held_by,
            clock=clock,
        )
        self._claims = ClaimBook(
            tell=self._pods.tell_again,
            tell_all=self._pods.tell_all_again,
            is_current=self._hears_of_claims,
        )
        feeds: tuple[tuple[Kind, Feed], ...] = (
            (NODES, self._nodes),
            (PODS, self._pods),
            (CLAIMS, self._claims.claims),
            (SLICES, self._claims.slices),
        )
        self._give_way = give_way
        self._are_claims_regained = asyncio.Event()
        calls = {CLAIMS.resource: self._are_claims_regained.set}
        self._reflectors = {
            kind.resource: Reflector(
                client,
                kind,
                feed,
                follow,
                clock=clock,
                give_way=give_way,
                regained=calls.get(kind.resource, lambda: None),
            )
            for kind, feed in feeds
        }

    def change(
        self, *, resources: ResourceNames, early_seconds: float, settings: FollowSettings
    ) -> None:
        """Follow otherwise from the next `run` on; not while it runs.

        What is held stays, and is corrected by complete lists where objects are read otherwise
        now; the watches go on where they were.

        Args:
            resources: which resources are GPUs.
            early_seconds: a container's failure so soon after its start is early.
            settings: how to follow.
        """
        are_nodes_outdated = self._nodes.read_by(resources)
        are_pods_outdated = self._pods.read_by(resources, early_seconds, settings.exporter_words)
        outdated = {NODES.resource: are_nodes_outdated, PODS.resource: are_pods_outdated}
        for resource, reflector in self._reflectors.items():
            reflector.change(settings, is_outdated=outdated.get(resource, False))

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            for resource, reflector in self._reflectors.items():
                group.create_task(reflector.run(), name=f"reflect {resource}")
            group.create_task(self._tell_when_regained(), name="tell pods again")

    async def _tell_when_regained(self) -> None:
        """Tell of the pods anew whenever claims are heard of again: some may have been unknown."""
        while True:
            await self._are_claims_regained.wait()
            self._are_claims_regained.clear()
            await self._pods.tell_all_again(Pace(self._give_way))

    def _held_by(self, uid: str) -> tuple[ClaimedDevice, ...] | None:
        return self._claims.held_by(uid)

    def _hears_of_claims(self) -> bool:
        """Whether a pod without a claim has none; a first list may be about to be taken over."""
        status = self._reflectors[CLAIMS.resource].status
        return status.is_connected or not status.is_listed

    @property
    def is_synced(self) -> bool:
        """Whether nodes and pods have been listed once, and claims too or in vain."""
        status = {resource: reflector.status for resource, reflector in self._reflectors.items()}
        return all(status[kind.resource].is_listed for kind in (NODES, PODS)) and all(
            status[kind.resource].was_tried for kind in (CLAIMS, SLICES)
        )

    @property
    def status(self) -> Mapping[str, FollowStatus]:
        """How well each kind of object is followed, by resource; without those that are absent."""
        return {
            resource: reflector.status
            for resource, reflector in self._reflectors.items()
            if not reflector.status.is_absent
        }

    @property
    def nodes(self) -> Mapping[str, NodeRecord]:
        """Nodes by name."""
        return self._nodes.shelf.records

    @property
    def pods(self) -> Mapping[str, PodRecord]:
        """GPU pods by UID."""
        return self._pods.shelf.records

    @property
    def exporter_pods(self) -> Mapping[str, str]:
        """Node by the name of an exporter's pod; the same object until one changes."""
        return self._pods.exporter_index()[0]

    @property
    def exporter_addresses(self) -> Mapping[str, str]:
        """Node by the IP address of an exporter's pod; the same object until one changes."""
        return self._pods.exporter_index()[1]


class _NodeFeed:
    """Reduces nodes as they arrive."""

    def __init__(self, sink: InventorySink, resources: ResourceNames) -> None:
        self._resources = resources
        self.shelf: Shelf[NodeRecord] = Shelf(
            replace=sink.replace_nodes, apply=sink.apply_node, remove=sink.remove_node
        )

    def read_by(self, resources: ResourceNames) -> bool:
        """Read nodes so from now on; tell whether that is otherwise than before."""
        is_changed = resources != self._resources
        self._resources = resources
        return is_changed

    def may_matter(self, _: msgspec.Raw) -> bool:
        return True

    def idle_change(self, _: bytes) -> Change | None:
        return None

    def begin_list(self) -> None:
        self.shelf.begin_list()

    def add_listed(self, raw: Mapping[str, object]) -> None:
        record = reduce_node(raw, self._resources)
        if record is not None:
            self.shelf.add_listed(record.name, record)

    async def end_list(self, pace: Pace) -> int:
        return await self.shelf.end_list(pace)

    def abort_list(self) -> None:
        self.shelf.abort_list()

    def put(self, raw: Mapping[str, object]) -> None:
        record = reduce_node(raw, self._resources)
        if record is not None:
            self.shelf.put(record.name, record)

    def drop(self, raw: Mapping[str, object]) -> None:
        self.shelf.drop(text_of(mapping_of(raw.get("metadata")).get("name")))


class _PodFeed:
    """Reduces pods as they arrive: GPU pods to records, exporters to where they run."""

    def __init__(
        self,
        sink: InventorySink,
        resources: ResourceNames,
        *,
        early_seconds: float,
        exporter_words: tuple[str, ...],
        held_by: Callable[[str], tuple[ClaimedDevice, ...] | None],
        clock: Callable[[], float],
    ) -> None:
        self._sink = sink
        self._held_by = held_by
        self._resources = resources
        self._early_seconds = early_seconds
        self._words = exporter_words
        self._glance = PodGlance(resources, exporter_words)
        self._index: tuple[Mapping[str, str], Mapping[str, str]] | None = None
        self.shelf: Shelf[PodRecord] = Shelf(
            replace=lambda records: sink.replace_pods([self._joined(one) for one in records]),
            apply=lambda record: sink.apply_pod(self._joined(record)),
            remove=lambda uid: sink.remove_pod(uid, clock()),
        )
        self._exporters: Shelf[ExporterPod] = Shelf(
            replace=self._forget_index, apply=self._forget_index, remove=self._forget_index
        )

    def read_by(
        self, resources: ResourceNames, early_seconds: float, exporter_words: tuple[str, ...]
    ) -> bool:
        """Read pods so from now on; tell whether that is otherwise than before."""
        before = (self._resources, self._early_seconds, self._words)
        self._resources, self._early_seconds = resources, early_seconds
        self._words = exporter_words
        self._glance = PodGlance(resources, exporter_words)
        return before != (resources, early_seconds, exporter_words)

    def may_matter(self, text: msgspec.Raw) -> bool:
        return self._glance.may_matter(text)

    def idle_change(self, line: bytes) -> Change | None:
        change = self._glance.idle_change(line)
        if change is None or self._is_held(change.uid):
            return None
        return change

    def _is_held(self, uid: str) -> bool:
        return uid in self.shelf.records or uid in self._exporters.records

    def begin_list(self) -> None:
        self.shelf.begin_list()
        self._exporters.begin_list()

    def add_listed(self, raw: Mapping[str, object]) -> None:
        uid, record = self._reduce(raw)
        self.shelf.add_listed(uid, record)
        self._exporters.add_listed(uid, reduce_exporter(raw, self._words))

    async def end_list(self, pace: Pace) -> int:
        return await self.shelf.end_list(pace) + await self._exporters.end_list(pace)

    def abort_list(self) -> None:
        self.shelf.abort_list()
        self._exporters.abort_list()

    def put(self, raw: Mapping[str, object]) -> None:
        uid, record = self._reduce(raw)
        self.shelf.put(uid, record)
        self._exporters.put(uid, reduce_exporter(raw, self._words))

    def drop(self, raw: Mapping[str, object]) -> None:
        uid, record = self._reduce(raw)
        if uid in self.shelf.records and record is not None:
            self.shelf.put(uid, record)  # its last state may say how it failed
        self.shelf.drop(uid)
        self._exporters.drop(uid)

    def tell_again(self, uid: str) -> None:
        """Tell the sink of a pod that may hold other GPUs by claims than before."""
        record = self.shelf.records.get(uid)
        if record is not None and _may_hold_by_claims(record):
            self._sink.apply_pod(self._joined(record))

    async def tell_all_again(self, pace: Pace) -> None:
        """Tell the sink of all such pods."""
        for uid in tuple(self.shelf.records):
            self.tell_again(uid)
            await pace.breathe()

    def _joined(self, record: PodRecord) -> PodRecord:
        """Return a pod's record with the GPUs that it holds by claims."""
        if not _may_hold_by_claims(record):
            return record
        return replace(record, claimed=self._held_by(record.uid))

    def exporter_index(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return where exporters run, by name and by address."""
        if self._index is None:
            pods = self._exporters.records.values()
            self._index = (
                MappingProxyType({pod.name: pod.node for pod in pods}),
                MappingProxyType({ip: pod.node for pod in pods for ip in pod.addresses}),
            )
        return self._index

    def _reduce(self, raw: Mapping[str, object]) -> tuple[str, PodRecord | None]:
        record = reduce_pod(raw, self._resources, early_seconds=self._early_seconds)
        return text_of(mapping_of(raw.get("metadata")).get("uid")), record

    def _forget_index(self, _: object) -> None:
        self._index = None


def _may_hold_by_claims(record: PodRecord) -> bool:
    return record.has_claims and bool(record.node)
