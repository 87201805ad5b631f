"""The inventory: nodes and GPU pods, with what they hold by claims, as the API server has them.

Pods are followed but for those that have succeeded (field selector `status.phase!=Succeeded`): in
clusters that run jobs these are most of all, and they hold nothing. A pod that succeeds leaves the
selection, and the watch reports that as DELETED at once. Failed pods stay in: leaving the
selection, they would be reported as they were before they failed, and early failures never be
seen. Pending pods are needed for nominations, so there is no selection by node.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import msgspec

from extender.core.nodes.inventory import ClaimedDevice, NodeRecord, PodRecord
from extender.core.request.gpu_resources import ResourceNames
from extender.core.untyped import mapping_of, text_of
from extender.kube.client import KubeClient
from extender.runtime.cooperative import YieldControl, yield_to_loop
from extender.runtime.supervision import keep
from extender.sources.kubernetes.claims import CLAIMS, SLICES, ClaimBook
from extender.sources.kubernetes.host_use import HostUse
from extender.sources.kubernetes.json_text import PodGlance, WatchChange
from extender.sources.kubernetes.object_cache import ObjectCache, Pace
from extender.sources.kubernetes.object_kinds import Feed, FollowStatus, InventorySink, ObjectKind
from extender.sources.kubernetes.records import (
    ExporterPod,
    reduce_exporter,
    reduce_node,
    reduce_pod,
)
from extender.sources.kubernetes.reflector import FollowSettings, Reflector

# Reduces pods as the API server tells them: GPU pods to records, exporters to where they run.


class PodFeed:
    """Reduces pods as they arrive: GPU pods to records, exporters to where they run.

    Attributes:
        known: where other resources are GPUs than before, those of which all is known already;
            None once that is so of all. Of others waiting pods are not told to ask: nodes would
            look empty, for who holds these there is still being listed.
    """

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
        self._use = HostUse(sink.apply_host_use)
        self._glance = self._new_glance()
        self._index: tuple[Mapping[str, str], Mapping[str, str]] | None = None
        self.known: ResourceNames | None = None
        self._withheld = _new_shelf()
        self.object_cache: ObjectCache[PodRecord] = ObjectCache(
            replace=lambda records: sink.replace_pods([self._joined(one) for one in records]),
            apply=lambda record: sink.apply_pod(self._joined(record)),
            remove=lambda uid: sink.remove_pod(uid, clock()),
        )
        self._exporters: ObjectCache[ExporterPod] = ObjectCache(
            replace=self._forget_index, apply=self._forget_index, remove=self._forget_index
        )

    def read_by(
        self, resources: ResourceNames, early_seconds: float, exporter_words: tuple[str, ...]
    ) -> bool:
        """Read pods so from now on; tell whether that is otherwise than before."""
        before = (self._resources, self._early_seconds, self._words)
        if resources != self._resources:
            self._withheld = _new_shelf()
        self._resources, self._early_seconds = resources, early_seconds
        self._words = exporter_words
        self._glance = self._new_glance()
        return before != (resources, early_seconds, exporter_words)

    def _new_glance(self) -> PodGlance:
        return PodGlance(
            self._resources,
            self._words,
            listed=self._use.add_listed,
            watched=self._use.put,
        )

    def may_matter(self, text: msgspec.Raw) -> bool:
        """Whether a pod of the list, as text, is worth reading."""
        return self._glance.may_matter(text)

    def idle_change(self, line: bytes) -> WatchChange | None:
        """Return what an event of the watch says if its pod is not worth reading, else None."""
        change = self._glance.idle_change(line)
        if change is None or self._is_held(change.uid):
            return None
        return change

    def _is_held(self, uid: str) -> bool:
        shelves = (self.object_cache, self._exporters, self._withheld)
        return any(uid in object_cache.records for object_cache in shelves)

    def begin_list(self) -> None:
        """Start to take a complete list."""
        self.object_cache.begin_list()
        self._withheld.begin_list()
        self._exporters.begin_list()
        self._use.begin_list()

    def add_listed(self, raw: Mapping[str, object]) -> None:
        """Take one pod of the list."""
        uid, record = self._reduce(raw)
        shown = self._shown(record)
        self.object_cache.add_listed(uid, shown)
        self._withheld.add_listed(uid, None if shown is record else record)
        self._exporters.add_listed(uid, reduce_exporter(raw, self._words))

    def keep_listed(self, raw: Mapping[str, object]) -> None:
        """Keep what is held of a pod of the list that cannot be read: else its GPUs looked free."""
        uid = _uid(raw)
        self.object_cache.keep_listed(uid)
        self._withheld.keep_listed(uid)
        self._exporters.keep_listed(uid)
        self._use.keep_listed(uid)

    async def end_list(self, pace: Pace) -> int:
        """Take over the list; return how many records it corrected."""
        await self._withheld.end_list(pace)
        await self._use.end_list(pace)
        corrected = await self.object_cache.end_list(pace) + await self._exporters.end_list(pace)
        await self.show_withheld(pace)  # of its first pages, where all became known by its last
        return corrected

    def abort_list(self) -> None:
        """Forget the list: it did not come to its end."""
        self.object_cache.abort_list()
        self._withheld.abort_list()
        self._exporters.abort_list()
        self._use.abort_list()

    def put(self, raw: Mapping[str, object]) -> None:
        """Take a pod that was added or changed."""
        uid, record = self._reduce(raw)
        self._put(uid, record)
        self._exporters.put(uid, reduce_exporter(raw, self._words))

    def drop(self, raw: Mapping[str, object]) -> None:
        """Take a pod that is gone, as it was last."""
        uid, record = self._reduce(raw)
        if uid in self.object_cache.records and record is not None:
            self._put(uid, record)  # its last state may say how it failed
        self.object_cache.drop(uid)
        self._withheld.drop(uid)
        self._exporters.drop(uid)

    async def show_withheld(self, pace: Pace) -> None:
        """Tell all of the waiting pods once `known` is None."""
        while self.known is None and self._withheld.records:
            uid, record = next(iter(self._withheld.records.items()))
            self._put(uid, record)
            await pace.breathe()

    def _put(self, uid: str, record: PodRecord | None) -> None:
        shown = self._shown(record)
        self.object_cache.put(uid, shown)
        self._withheld.put(uid, None if shown is record else record)

    def _shown(self, record: PodRecord | None) -> PodRecord | None:
        """Return a pod as far as it is to be told."""
        if self.known is None or record is None or record.node:
            return record
        names = filter(self.known.matches, record.resources)
        resources = {name: record.resources[name] for name in names}
        if resources == record.resources:
            return record
        return replace(record, resources=resources) if resources or record.has_claims else None

    def tell_again(self, uid: str) -> None:
        """Tell the sink of a pod that may hold other GPUs by claims than before."""
        record = self.object_cache.records.get(uid)
        if record is not None and _may_hold_by_claims(record):
            self._sink.apply_pod(self._joined(record))

    async def tell_all_again(self, pace: Pace) -> None:
        """Tell the sink of all such pods."""
        for uid in tuple(self.object_cache.records):
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
        return _uid(raw), record

    def _forget_index(self, _: object) -> None:
        self._index = None


def _uid(raw: Mapping[str, object]) -> str:
    return text_of(mapping_of(raw.get("metadata")).get("uid"))


def _may_hold_by_claims(record: PodRecord) -> bool:
    return record.has_claims and bool(record.node)


def _new_shelf() -> ObjectCache[PodRecord]:
    """Return one that tells nobody."""
    return ObjectCache(apply=lambda _: None, remove=lambda _: None)


logger = logging.getLogger(__name__)

NODES: Final = ObjectKind(resource="nodes", path="/api/v1/nodes")
PODS: Final = ObjectKind(
    resource="pods", path="/api/v1/pods", field_selector="status.phase!=Succeeded"
)


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
        yield_control: lets others have a turn.
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
        yield_control: YieldControl = yield_to_loop,
    ) -> None:
        follow = settings or FollowSettings()
        self._known = self._wanted = resources
        self._nodes = _NodeFeed(sink, resources)
        self._pods = PodFeed(
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
        feeds: tuple[tuple[ObjectKind, Feed], ...] = (
            (NODES, self._nodes),
            (PODS, self._pods),
            (CLAIMS, self._claims.claims),
            (SLICES, self._claims.slices),
        )
        self._yield_control = yield_control
        self._are_claims_regained = asyncio.Event()
        calls = {CLAIMS.resource: self._are_claims_regained.set}
        self._reflectors = {
            kind.resource: Reflector(
                client,
                kind,
                feed,
                follow,
                clock=clock,
                yield_control=yield_control,
                regained=calls.get(kind.resource, lambda: None),
                relisted=self._note_relisted,
            )
            for kind, feed in feeds
        }

    def change(
        self, *, resources: ResourceNames, early_seconds: float, settings: FollowSettings
    ) -> None:
        """Follow otherwise from the next `run` on; not while it runs.

        What is held stays, and is corrected by complete lists where objects are read otherwise
        now; the watches go on where they were. Resources that were none before are in `resources`
        once these lists are complete.

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
        self._wanted = resources
        if self._known.covers(resources) or not self._is_outdated:
            self._know(resources)
        else:
            self._know(self._known.shared_with(resources))
            self._pods.known = self._known

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._pods.show_withheld(Pace(self._yield_control))
        async with asyncio.TaskGroup() as group:
            for resource, reflector in self._reflectors.items():
                group.create_task(keep(f"reflect {resource}", reflector.run), name=resource)
            group.create_task(self._tell_when_regained(), name="tell pods again")

    async def _tell_when_regained(self) -> None:
        """Tell of the pods anew whenever claims are heard of again: some may have been unknown."""
        while True:
            await self._are_claims_regained.wait()
            self._are_claims_regained.clear()
            await self._pods.tell_all_again(Pace(self._yield_control))

    @property
    def _is_outdated(self) -> bool:
        """Whether some of what is held is as it was read before a change."""
        return any(self._reflectors[kind.resource].is_outdated for kind in (NODES, PODS))

    async def _note_relisted(self) -> None:
        """Go by all resources that are wanted, if all is listed anew."""
        if not self._is_outdated and self._pods.known is not None:
            self._know(self._wanted)
            logger.info("all is known of other resources", extra={"resources": self._wanted.names})
            await self._pods.show_withheld(Pace(self._yield_control))

    def _know(self, resources: ResourceNames) -> None:
        self._known = resources
        self._pods.known = None

    def _held_by(self, uid: str) -> tuple[ClaimedDevice, ...] | None:
        return self._claims.held_by(uid)

    def _hears_of_claims(self) -> bool:
        """Whether a pod without a claim has none; a first list may be about to be taken over."""
        status = self._reflectors[CLAIMS.resource].status
        return status.is_connected or not status.is_listed

    @property
    def resources(self) -> ResourceNames:
        """Names of the GPU resources for which all nodes and pods are known."""
        return self._known

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
        return self._nodes.object_cache.records

    @property
    def pods(self) -> Mapping[str, PodRecord]:
        """GPU pods by UID."""
        return self._pods.object_cache.records

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
        self.object_cache: ObjectCache[NodeRecord] = ObjectCache(
            replace=sink.replace_nodes, apply=sink.apply_node, remove=sink.remove_node
        )

    def read_by(self, resources: ResourceNames) -> bool:
        """Read nodes so from now on; tell whether that is otherwise than before."""
        is_changed = resources != self._resources
        self._resources = resources
        return is_changed

    def may_matter(self, _: msgspec.Raw) -> bool:
        return True

    def idle_change(self, _: bytes) -> WatchChange | None:
        return None

    def begin_list(self) -> None:
        self.object_cache.begin_list()

    def add_listed(self, raw: Mapping[str, object]) -> None:
        record = reduce_node(raw, self._resources)
        if record is not None:
            self.object_cache.add_listed(record.name, record)

    def keep_listed(self, raw: Mapping[str, object]) -> None:
        self.object_cache.keep_listed(_name(raw))

    async def end_list(self, pace: Pace) -> int:
        return await self.object_cache.end_list(pace)

    def abort_list(self) -> None:
        self.object_cache.abort_list()

    def put(self, raw: Mapping[str, object]) -> None:
        record = reduce_node(raw, self._resources)
        if record is not None:
            self.object_cache.put(record.name, record)

    def drop(self, raw: Mapping[str, object]) -> None:
        self.object_cache.drop(_name(raw))


def _name(raw: Mapping[str, object]) -> str:
    return text_of(mapping_of(raw.get("metadata")).get("name"))
