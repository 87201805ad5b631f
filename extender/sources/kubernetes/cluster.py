"""Watch nodes and GPU pods, with the GPUs that pods hold through ResourceClaims.

Succeeded pods are left out (field selector `status.phase!=Succeeded`): in clusters that run jobs
they are the majority, and they hold nothing. A pod that succeeds leaves the selection, and the
watch reports it as DELETED at once. Failed pods stay in the selection. Otherwise the watch would
report their state before the failure, and early failures would be missed. Pending pods are needed
for nominations, so pods are not selected by node.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import msgspec

from extender.core.nodes.host_resources import PlacedPod
from extender.core.nodes.inventory import ClaimedDevice, NodeRecord, PodRecord
from extender.core.request.gpu_resources import ResourceNames
from extender.core.untyped import mapping_of, text_of
from extender.kube.client import KubeClient
from extender.runtime.cooperative import YieldControl, yield_to_loop
from extender.runtime.supervision import keep
from extender.sources.kubernetes.claims import CLAIMS, SLICES, ClaimIndex
from extender.sources.kubernetes.group_sizes import GroupSizes
from extender.sources.kubernetes.json_text import PodFilter, WatchChange
from extender.sources.kubernetes.objects import (
    Feed,
    HostUse,
    InventorySink,
    ObjectCache,
    ObjectKind,
    Pacer,
    RecordFeed,
    ReflectorStatus,
    uid_of,
)
from extender.sources.kubernetes.records import (
    ExporterPod,
    reduce_exporter,
    reduce_node,
    reduce_pod,
)
from extender.sources.kubernetes.reflector import Reflector, ReflectorSettings


class _PodFeed:
    """Reduce pods as they arrive, as a `Feed`: GPU pods to records, exporters to their nodes.

    Attributes:
        listed_resources: the previous GPU resources while all pods are listed again after a change
            of the GPU resources, otherwise None. During that time waiting pods are reported without
            requests for new resources, because the pods that hold these are unknown and nodes would
            look empty.
    """

    def __init__(
        self,
        sink: InventorySink,
        resources: ResourceNames,
        *,
        early_seconds: float,
        exporter_words: tuple[str, ...],
        reads_limits: bool = False,
        held_by: Callable[[str, str], tuple[ClaimedDevice, ...] | None],
        clock: Callable[[], float],
    ) -> None:
        self._sink = sink
        self._held_by = held_by
        self._clock = clock
        self._resources = resources
        self._early_seconds = early_seconds
        self._words = exporter_words
        self._reads_limits = reads_limits
        self.host_use = HostUse(sink.apply_host_use)
        self._filter = self._new_filter()
        self._index: tuple[Mapping[str, str], Mapping[str, str]] | None = None
        self.listed_resources: ResourceNames | None = None
        self._withheld = _silent_cache()
        self.object_cache: ObjectCache[PodRecord] = ObjectCache(
            self._report,
            replace=lambda records: sink.replace_pods([self._with_claimed(one) for one in records]),
        )
        self._exporters: ObjectCache[ExporterPod] = ObjectCache(
            self._clear_index, replace=self._clear_index
        )

    def configure(
        self, resources: ResourceNames, early_seconds: float, settings: ReflectorSettings
    ) -> bool:
        """Reduce pods by these settings from now on; return whether they have changed."""
        before = (self._resources, self._early_seconds, self._words, self._reads_limits)
        words, reads_limits = settings.exporter_words, settings.reads_limits
        if resources != self._resources:
            self._withheld = _silent_cache()
        self._resources, self._early_seconds = resources, early_seconds
        self._words, self._reads_limits = words, reads_limits
        self._filter = self._new_filter()
        return before != (resources, early_seconds, words, reads_limits)

    def _new_filter(self) -> PodFilter:
        return PodFilter(
            self._resources,
            self._words,
            on_listed=self.host_use.add_listed,
            on_watched=self.host_use.put,
        )

    def is_relevant(self, text: msgspec.Raw) -> bool:
        return self._filter.is_relevant(text)

    def irrelevant_change(self, line: bytes) -> WatchChange | None:
        change = self._filter.irrelevant_change(line)
        if change is None or self._has_record(change.uid):
            return None
        return change

    def _has_record(self, uid: str) -> bool:
        caches = (self.object_cache, self._exporters, self._withheld)
        return any(uid in cache.records for cache in caches)

    @property
    def _caches(self) -> tuple[ObjectCache[Any], ...]:
        return self.object_cache, self._withheld, self._exporters, self.host_use

    def begin_list(self) -> None:
        for cache in self._caches:
            cache.begin_list()

    def add_listed(self, raw: Mapping[str, object]) -> None:
        uid, record = self._reduce(raw)
        reportable = self._reportable(record)
        self.object_cache.add_listed(uid, reportable)
        self._withheld.add_listed(uid, None if reportable is record else record)
        self._exporters.add_listed(uid, reduce_exporter(raw, self._words))

    def keep_unreadable(self, raw: Mapping[str, object]) -> None:
        """Keep the record of a listed pod that cannot be read, or its GPUs would look free."""
        uid = uid_of(raw)
        self.object_cache.keep_unreadable(uid)
        self._withheld.keep_unreadable(uid)
        self._exporters.keep_unreadable(uid)
        self.host_use.keep_unreadable(_key(raw))

    async def end_list(self, pacer: Pacer) -> None:
        for cache in (self._withheld, self.host_use, self.object_cache, self._exporters):
            await cache.end_list(pacer)
        await self.report_withheld(pacer)  # withheld while the list was incomplete

    def abort_list(self) -> None:
        for cache in self._caches:
            cache.abort_list()

    def put(self, raw: Mapping[str, object]) -> None:
        uid, record = self._reduce(raw)
        self._put(uid, record)
        self._exporters.put(uid, reduce_exporter(raw, self._words))

    def drop(self, raw: Mapping[str, object]) -> None:
        uid, record = self._reduce(raw)
        if uid in self.object_cache.records and record is not None:
            self._put(uid, record)  # its last state may say how it failed
        self.object_cache.drop(uid)
        self._withheld.drop(uid)
        self._exporters.drop(uid)

    async def report_withheld(self, pacer: Pacer) -> None:
        """Report waiting pods with all their requests once `listed_resources` is None."""
        while self.listed_resources is None and self._withheld.records:
            uid, record = next(iter(self._withheld.records.items()))
            self._put(uid, record)
            await pacer.yield_if_due()

    def _put(self, uid: str, record: PodRecord | None) -> None:
        reportable = self._reportable(record)
        self.object_cache.put(uid, reportable)
        self._withheld.put(uid, None if reportable is record else record)

    def _reportable(self, record: PodRecord | None) -> PodRecord | None:
        """Return the record without requests that are withheld; None if nothing is left."""
        if self.listed_resources is None or record is None or record.node:
            return record
        names = filter(self.listed_resources.matches, record.resources)
        resources = {name: record.resources[name] for name in names}
        if resources == record.resources:
            return record
        return replace(record, resources=resources) if resources or record.has_claims else None

    def report_again(self, uid: str) -> None:
        """Report a pod again: the GPUs that it holds through claims may have changed."""
        record = self.object_cache.records.get(uid)
        if record is not None and _may_hold_by_claims(record):
            self._sink.apply_pod(self._with_claimed(record))

    def report_group_again(self, group: str) -> None:
        """Report the pods of a group again, by the group's key."""
        for uid in [
            uid
            for uid, record in self.object_cache.records.items()
            if record.has_claims and record.group is not None and record.group.key == group
        ]:
            self.report_again(uid)

    async def report_all_again(self, pacer: Pacer) -> None:
        """Report all pods with claims again."""
        for uid in tuple(self.object_cache.records):
            self.report_again(uid)
            await pacer.yield_if_due()

    def _with_claimed(self, record: PodRecord) -> PodRecord:
        """Return a pod's record with the GPUs that it holds through claims."""
        if not _may_hold_by_claims(record):
            return record
        group = "" if record.group is None else record.group.key
        return replace(record, claimed=self._held_by(record.uid, group))

    def exporter_index(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the nodes of the exporter pods, by name or `namespace/name`, and by IP address."""
        if self._index is None:
            pods = self._exporters.records.values()
            names = ((name, pod.node) for pod in pods for name in _names_of(pod))
            addresses = ((ip, pod.node) for pod in pods for ip in pod.addresses)
            self._index = (_of_one_node(names), _of_one_node(addresses))
        return self._index

    def _reduce(self, raw: Mapping[str, object]) -> tuple[str, PodRecord | None]:
        record = reduce_pod(
            raw, self._resources, early_seconds=self._early_seconds, reads_limits=self._reads_limits
        )
        return uid_of(raw), record

    def _report(self, uid: str, _: object, record: PodRecord | None) -> None:
        if record is None:
            self._sink.remove_pod(uid, self._clock())
        else:
            self._sink.apply_pod(self._with_claimed(record))

    def _clear_index(self, *_: object) -> None:
        self._index = None


def _names_of(pod: ExporterPod) -> tuple[str, str]:
    return pod.name, f"{pod.namespace}/{pod.name}"


def _of_one_node(pairs: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """Map names to nodes, without names of several nodes: any tenant may name a pod so."""
    nodes: dict[str, set[str]] = {}
    for name, node in pairs:
        nodes.setdefault(name, set()).add(node)
    return MappingProxyType({name: min(some) for name, some in nodes.items() if len(some) == 1})


def _key(raw: Mapping[str, object]) -> str:
    """Return the `namespace/name` of a Pod object."""
    metadata = mapping_of(raw.get("metadata"))
    return f"{text_of(metadata.get('namespace'))}/{text_of(metadata.get('name'))}"


def _may_hold_by_claims(record: PodRecord) -> bool:
    return record.has_claims and bool(record.node)


def _silent_cache() -> ObjectCache[PodRecord]:
    """Return a cache without a receiver of changes."""
    return ObjectCache(lambda *_: None)


logger = logging.getLogger(__name__)

_NODES: Final = ObjectKind(resource="nodes", path="/api/v1/nodes")
_PODS: Final = ObjectKind(
    resource="pods", path="/api/v1/pods", field_selector="status.phase!=Succeeded"
)


class ClusterSource:
    """Watch nodes and pods, and report changes to the sink.

    If the API server serves ResourceClaims and ResourceSlices, pods are reported with the GPUs that
    they hold through claims.

    Args:
        sink: receives the records. Equal node records are not reported twice; equal pod records
            only if claims changed or were listed.
        early_seconds: a container that fails within this time after its start failed early.
        settings: limits and intervals of lists and watches.
        clock: seconds since the epoch.
        yield_control: yields the event loop to other tasks.
    """

    def __init__(
        self,
        client: KubeClient,
        sink: InventorySink,
        *,
        resources: ResourceNames,
        early_seconds: float = 60.0,
        settings: ReflectorSettings | None = None,
        clock: Callable[[], float] = time.time,
        yield_control: YieldControl = yield_to_loop,
    ) -> None:
        reflector_settings = settings or ReflectorSettings()
        self._listed_resources = self._configured_resources = resources
        self._nodes = _NodeFeed(sink, resources)
        self._pods = _PodFeed(
            sink,
            resources,
            early_seconds=early_seconds,
            exporter_words=reflector_settings.exporter_words,
            reads_limits=reflector_settings.reads_limits,
            held_by=self._held_by,
            clock=clock,
        )
        self._claims = ClaimIndex(
            notify=self._pods.report_again,
            notify_group=self._pods.report_group_again,
            notify_all=self._pods.report_all_again,
            is_current=self._are_claims_current,
        )
        self._group_sizes = GroupSizes(
            sink.apply_group_size,
            lambda: self._listed_resources,
            is_used=reflector_settings.reads_groups,
        )
        self._group_objects = frozenset(kind.resource for kind, _ in self._group_sizes.feeds)
        feeds: tuple[tuple[ObjectKind, Feed], ...] = (
            (_NODES, self._nodes),
            (_PODS, self._pods),
            (CLAIMS, self._claims.claims),
            (SLICES, self._claims.slices),
            *self._group_sizes.feeds,
        )
        self._yield_control = yield_control
        self._are_claims_reconnected = asyncio.Event()
        on_reconnected = {CLAIMS.resource: self._are_claims_reconnected.set}
        self._reflectors = {
            kind.resource: Reflector(
                client,
                kind,
                feed,
                reflector_settings,
                clock=clock,
                yield_control=yield_control,
                on_reconnected=on_reconnected.get(kind.resource, lambda: None),
                on_relisted=self._note_relisted,
            )
            for kind, feed in feeds
        }

    def adopt(
        self, *, resources: ResourceNames, early_seconds: float, settings: ReflectorSettings
    ) -> None:
        """Apply new settings with the next `run`; call it only while the source does not run.

        Records stay. If objects are reduced differently now, complete lists correct them, and the
        watches continue where they were. New GPU resources are in `resources` once these lists are
        complete. The arguments are as in the constructor.
        """
        outdated: set[str] = set()
        if self._nodes.configure(resources):
            outdated.add(_NODES.resource)
        if self._pods.configure(resources, early_seconds, settings):
            outdated.add(_PODS.resource)
        if settings.reads_groups != self._group_sizes.is_used:
            self._group_sizes.use(is_used=settings.reads_groups)
            outdated |= self._group_objects
        for resource, reflector in self._reflectors.items():
            reflector.adopt(settings, is_outdated=resource in outdated)
        self._configured_resources = resources
        if self._listed_resources.covers(resources) or not self._is_outdated:
            self._set_listed_resources(resources)
        else:
            self._set_listed_resources(self._listed_resources.shared_with(resources))
            self._pods.listed_resources = self._listed_resources

    async def run(self) -> None:
        """List and watch until cancelled."""
        await self._pods.report_withheld(Pacer(self._yield_control))
        async with asyncio.TaskGroup() as group:
            for resource, reflector in self._used_reflectors.items():
                group.create_task(keep(f"reflect {resource}", reflector.run), name=resource)
            group.create_task(self._report_when_reconnected(), name="report pods again")

    async def _report_when_reconnected(self) -> None:
        """Report pods again after the watch of claims recovers: their claims were unknown."""
        while True:
            await self._are_claims_reconnected.wait()
            self._are_claims_reconnected.clear()
            await self._pods.report_all_again(Pacer(self._yield_control))

    @property
    def _is_outdated(self) -> bool:
        """Whether some records were reduced with earlier settings."""
        return any(self._reflectors[kind.resource].is_outdated for kind in (_NODES, _PODS))

    async def _note_relisted(self) -> None:
        """Switch to all configured resources once nodes and pods are listed again."""
        if not self._is_outdated and self._pods.listed_resources is not None:
            self._set_listed_resources(self._configured_resources)
            logger.info(
                "GPU resources changed", extra={"resources": self._configured_resources.names}
            )
            await self._pods.report_withheld(Pacer(self._yield_control))

    def _set_listed_resources(self, resources: ResourceNames) -> None:
        self._listed_resources = resources
        self._pods.listed_resources = None

    def _held_by(self, uid: str, group: str) -> tuple[ClaimedDevice, ...] | None:
        return self._claims.held_by(uid, group)

    def _are_claims_current(self) -> bool:
        """Return whether a pod without a known claim has none; True before the first list, too."""
        status = self._reflectors[CLAIMS.resource].status
        return status.is_connected or not status.is_listed

    @property
    def _used_reflectors(self) -> Mapping[str, Reflector]:
        if self._group_sizes.is_used:
            return self._reflectors
        unused = self._group_objects
        return {name: one for name, one in self._reflectors.items() if name not in unused}

    @property
    def resources(self) -> ResourceNames:
        """Names of the GPU resources whose nodes and pods are all listed."""
        return self._listed_resources

    @property
    def is_synced(self) -> bool:
        """Whether nodes and pods were listed once, and a list of claims was at least attempted."""
        status = {resource: reflector.status for resource, reflector in self._reflectors.items()}
        return all(status[kind.resource].is_listed for kind in (_NODES, _PODS)) and all(
            status[kind.resource].was_tried for kind in (CLAIMS, SLICES)
        )

    @property
    def status(self) -> Mapping[str, ReflectorStatus]:
        """Status of the list and watch of each resource; absent resources are left out."""
        return {
            resource: reflector.status
            for resource, reflector in self._used_reflectors.items()
            if not reflector.status.is_absent
        }

    @property
    def nodes(self) -> Mapping[str, NodeRecord]:
        """Node records by name."""
        return self._nodes.records

    @property
    def host_pods(self) -> Mapping[str, PlacedPod]:
        """Requests of every pod that has a node, by `namespace/name`."""
        return self._pods.host_use.records

    @property
    def exporter_pods(self) -> Mapping[str, str]:
        """Node by name, and by `namespace/name`, of its exporter pod.

        The same object until one changes.
        """
        return self._pods.exporter_index()[0]

    @property
    def exporter_addresses(self) -> Mapping[str, str]:
        """Node by IP address of its exporter pod; the same object until one changes."""
        return self._pods.exporter_index()[1]


def _name(raw: Mapping[str, object]) -> str:
    return text_of(mapping_of(raw.get("metadata")).get("name"))


class _NodeFeed(RecordFeed[NodeRecord]):
    def __init__(self, sink: InventorySink, resources: ResourceNames) -> None:
        super().__init__(self._reduce_node, self._report, key=_name, replace=sink.replace_nodes)
        self._sink = sink
        self._resources = resources

    def configure(self, resources: ResourceNames) -> bool:
        """Reduce nodes by these resources from now on; return whether they have changed."""
        is_changed = resources != self._resources
        self._resources = resources
        return is_changed

    def _reduce_node(self, raw: Mapping[str, object]) -> NodeRecord | None:
        return reduce_node(raw, self._resources)

    def _report(self, name: str, _: object, record: NodeRecord | None) -> None:
        if record is None:
            self._sink.remove_node(name)
        else:
            self._sink.apply_node(record)
