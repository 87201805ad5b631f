"""Reduces pods as the API server tells them: GPU pods to records, exporters to where they run."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import msgspec

from extender.core.nodes.inventory import ClaimedDevice, PodRecord
from extender.core.request.gpu_resources import ResourceNames
from extender.core.untyped import mapping_of, text_of
from extender.sources.kubernetes.host_use import HostUse
from extender.sources.kubernetes.json_text import PodGlance, WatchChange
from extender.sources.kubernetes.object_cache import ObjectCache, Pace
from extender.sources.kubernetes.object_kinds import InventorySink
from extender.sources.kubernetes.records import ExporterPod, reduce_exporter, reduce_pod


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
