"""Evaluate the measured use of all held or shared devices and their pods for /v1/advice.

Samples come from our own history of an hour, or from Prometheus for a longer period.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import numpy as np

from extender.core.devices.readings import DeviceInfo, DeviceKey
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import PoolRow, Snapshot
from extender.fleet.fleet import Fleet
from extender.fleet.pods import LEAST_SAMPLES, PodMemory, Use
from extender.insight.advice_rules import (
    Card,
    CardRecommendation,
    CardVerdict,
    Column,
    Matrix,
    MemoryAdvice,
    MemoryVerdict,
    advise,
    fit,
    judge_memory,
    uses,
    uses_a_tenth,
)
from extender.insight.last_hour import Plots, ShortMemory, Values
from extender.insight.views import PRODUCT_LABEL
from extender.server.json_api import chunks
from extender.server.redaction import sees

OWN_SECONDS: Final = 3600
"""Length of our own history."""
_LONG_STEPS: Final = 241
"""Samples of a Prometheus query: one every six minutes for a day."""
_MOST_DEVICES: Final = 2048
"""Largest number of devices to query for one answer: 32 sequential queries for each metric."""

_KEPT_SECONDS: Final = 60.0
"""Lifetime of a cached Prometheus answer; its samples are a minute or more apart."""
_MOST_KEPT: Final = 64
"""Size of the cache: each entry has 64 devices and a quarter of a megabyte."""

_BY_US: Final = "memory"
_BY_PROMETHEUS: Final = "prometheus"


_CacheKey = tuple[float, tuple[DeviceKey, ...]]
"""Cache key: length of the period, and devices."""

_PIECE_NODES: Final = 8
"""Number of nodes to evaluate between two yields to the event loop."""

_PIECE_DEVICES: Final = 64
"""Number of devices in one Prometheus query."""

_BY_AGENT: Final = "agent"
"""Source name of a pod's memory on a shared device."""

_TENTH: Final = "uses-a-tenth"
KINDS: Final = (*(verdict.value for verdict in MemoryVerdict), _TENTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Samples:
    """Samples of some devices.

    Attributes:
        source: "memory" or "prometheus".
        times: sample times in ascending order, seconds since the epoch.
        activity: activity ratios, shape (times, devices), NaN if unknown.
        memory_bytes: used memory, same shape, NaN if unknown.
    """

    source: str
    times: Column
    activity: Matrix
    memory_bytes: Matrix


class PrometheusCache:
    """Cache of Prometheus answers, shared by all callers because it contains no pod data.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[_CacheKey, tuple[float, _Samples]] = OrderedDict()

    def get(self, key: _CacheKey) -> _Samples | None:
        """Return the cached answer to a query, None if it is missing or expired."""
        until, samples = self._entries.get(key, (0.0, None))
        return samples if self._clock() < until else None

    def put(self, key: _CacheKey, samples: _Samples) -> None:
        """Cache an answer for `_KEPT_SECONDS`."""
        self._entries[key] = (self._clock() + _KEPT_SECONDS, samples)
        self._entries.move_to_end(key)
        if len(self._entries) > _MOST_KEPT:
            self._entries.popitem(last=False)


class Measured:
    """Reads the samples for one answer, with a limit on the Prometheus queries.

    Args:
        memory: our own history.
        plots: reads from Prometheus; None to use our own history.
        seconds: length of the period.
        kept: cache of Prometheus answers.

    Attributes:
        note: reason why our own history replaced Prometheus, "" if it did not.
    """

    def __init__(
        self,
        fleet: Fleet,
        memory: ShortMemory,
        plots: Plots | None,
        seconds: float,
        kept: PrometheusCache,
    ) -> None:
        self.note = ""
        self._fleet = fleet
        self._memory = memory
        self._plots = plots
        self._seconds = seconds
        self._cache = kept
        self._left = _MOST_DEVICES

    async def of(self, rows: Sequence[int]) -> _Samples:
        """Return the samples of some devices, at most as many as one query takes."""
        if self._plots is not None:
            samples = await self._query(self._plots, rows)
            if samples is not None:
                return samples
        times, activity, memory = self._memory.columns(rows)
        totals = self._fleet.snapshot().telemetry.memory_total_bytes[list(rows)]
        is_in = times >= times[-1:] - self._seconds
        return _Samples(
            source=_BY_US,
            times=times[is_in],
            activity=activity[is_in],
            # Without the card's total, a memory ratio cannot be converted to bytes.
            memory_bytes=np.where(totals > 0, memory[is_in] * totals, np.nan),
        )

    async def _query(self, plots: Plots, rows: Sequence[int]) -> _Samples | None:
        if self._left < len(rows):
            self.note = (
                self.note or f"only {_MOST_DEVICES} GPUs were queried in Prometheus: name a node"
            )
            return None
        self._left -= len(rows)
        infos = [self._fleet.store.info(row) for row in rows]
        keys = [DeviceKey(("", "")) if info is None else info.key for info in infos]
        key = (self._seconds, tuple(keys))
        samples = self._cache.get(key)
        if samples is not None:
            return samples
        answer = await plots.past(keys, seconds=self._seconds, steps=_LONG_STEPS)
        if answer.error:
            self.note = answer.error
            self._left = 0  # do not query a failing Prometheus again for this answer
            return None
        samples = _Samples(
            source=_BY_PROMETHEUS,
            times=np.array(answer.times, dtype=np.float64),
            activity=_matrix(answer.activity, keys, len(answer.times)),
            memory_bytes=_matrix(answer.memory_bytes, keys, len(answer.times)),
        )
        self._cache.put(key, samples)
        return samples


def _matrix(values: Mapping[DeviceKey, Values], keys: Sequence[DeviceKey], steps: int) -> Matrix:
    matrix = np.full((steps, len(keys)), np.nan)
    for at, key in enumerate(keys):
        if key in values:
            matrix[:, at] = [np.nan if value is None else value for value in values[key]]
    return matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredDevice:
    """A device that pods hold or can share.

    Attributes:
        resource: resource name under which the node offers the device.
        model: model name from a source or a node label.
        tenants: pods known to hold the device.
        memory_bytes: total memory, 0 if unknown.
    """

    node: str
    resource: str
    row: int
    info: DeviceInfo
    model: str
    pool_row: PoolRow
    used: int
    tenants: tuple[str, ...]
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceHistory:
    """Measured use of a device, and the source of the samples."""

    use: Use
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFinding:
    """Advice for a card."""

    device: _MeasuredDevice
    card: Card
    advice: CardRecommendation
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFinding:
    """A pod that requests far too much or too little.

    Attributes:
        kind: kind of finding.
        gpus: number of its GPUs.
        use: the highest activity and the highest memory use of any of its GPUs.
        memory_bytes: total memory of each GPU.
        per_card: number of such pods that would fit on one GPU; None for findings about memory.
        memory: recommended memory; None for other findings.
        source: source of the samples.
    """

    record: PodRecord
    kind: str
    gpus: int
    use: Use
    memory_bytes: float
    per_card: int | None
    memory: MemoryAdvice | None
    source: str


@dataclass(slots=True)
class _Findings:
    """Findings in the order of node names.

    Attributes:
        most: number of findings of each kind to keep; further ones are only counted, which bounds
            memory and the time to free it.
        cards: cards with advice, by verdict.
        pods: pods with oversized or undersized requests, by kind.
        counts: number of all findings by verdict and kind.
        unjudged: pods that hold devices but have too few samples.
        devices: number of evaluated devices.
        samples: largest number of samples of one device.
        seconds: longest sampled period of one device.
    """

    most: int
    cards: dict[CardVerdict, list[CardFinding]] = field(
        default_factory=lambda: {verdict: [] for verdict in CardVerdict}
    )
    pods: dict[str, list[PodFinding]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    counts: Counter[str] = field(default_factory=Counter)
    unjudged: int = 0
    devices: int = 0
    samples: int = 0
    seconds: float = 0.0
    sources: set[str] = field(default_factory=set)

    def add_card(self, card: CardFinding) -> None:
        """Add a card's advice."""
        verdict = card.advice.verdict
        self.counts[verdict.value] += 1
        if len(self.cards[verdict]) < self.most:
            self.cards[verdict].append(card)

    def add_pod(self, pod: PodFinding) -> None:
        """Add a pod's finding."""
        self.counts[pod.kind] += 1
        if len(self.pods[pod.kind]) < self.most:
            self.pods[pod.kind].append(pod)

    def note(self, looks: Iterable[_DeviceHistory]) -> None:
        """Add the use of devices to the totals."""
        for look in looks:
            self.devices += 1
            self.samples = max(self.samples, look.use.samples)
            self.seconds = max(self.seconds, look.use.seconds)
            self.sources.add(look.source)


async def find(
    fleet: Fleet,
    measured: Measured,
    *,
    node: str | None = None,
    namespace: str | None = None,
    most: int,
) -> _Findings:
    """Evaluate all devices that pods hold or share, and their pods.

    Args:
        measured: samples of the devices.
        node: only this node; None for all.
        namespace: only this namespace's pods; None for all. Empty if the caller may not read them.
        most: number of findings of each kind to keep.
    """
    snapshot = fleet.snapshot()
    nodes = {name for pool in snapshot.pools.values() for name in pool.nodes}
    found = _Findings(most=most)
    for names in chunks(sorted(nodes) if node is None else [node], _PIECE_NODES):
        by_node = {name: list(_devices(fleet, snapshot, name)) for name in names}
        looks: dict[int, _DeviceHistory] = {}
        for some in chunks(chain.from_iterable(by_node.values()), _PIECE_DEVICES):
            looks |= await _look(fleet, measured, some)
        found.note(looks.values())
        await asyncio.sleep(0)
        for name, devices in by_node.items():
            if devices:
                _judge_node(devices, fleet.pods_on(name), namespace, (found, looks, fleet))
                await asyncio.sleep(0)
    return found


def _devices(fleet: Fleet, snapshot: Snapshot, node: str) -> Iterator[_MeasuredDevice]:
    """Yield the devices of a node that pods hold or share."""
    record = fleet.nodes.get(node)
    for pool in snapshot.pools.values():
        at = pool.row_of.get(node)
        if at is None or record is None:
            continue
        pool_row = pool.rows[at]
        for row, used in zip(pool_row.slots, pool_row.used, strict=True):
            info, tenants = fleet.store.info(row), fleet.tenants_of(row)
            is_meant = pool_row.is_shared or bool(tenants)
            if info is None or row >= len(snapshot.telemetry.latest) or not is_meant:
                continue
            yield _MeasuredDevice(
                node=node,
                resource=pool.resource,
                row=row,
                info=info,
                model=info.model or record.labels.get(PRODUCT_LABEL, ""),
                pool_row=pool_row,
                used=used,
                tenants=tenants,
                memory_bytes=float(snapshot.telemetry.memory_total_bytes[row]),
            )


async def _look(
    fleet: Fleet, measured: Measured, devices: Sequence[_MeasuredDevice]
) -> dict[int, _DeviceHistory]:
    """Return the use of devices since their tenants last changed."""
    samples = await measured.of([device.row for device in devices])
    since = np.array([fleet.store.tenants_since(device.row) for device in devices])
    found = uses(samples.times, samples.activity, samples.memory_bytes, since)
    return {
        device.row: _DeviceHistory(use=use, source=samples.source)
        for device, use in zip(devices, found, strict=True)
    }


def _cards(
    devices: Sequence[_MeasuredDevice],
    pods: Mapping[str, PodRecord],
    looks: Mapping[int, _DeviceHistory],
) -> Iterator[CardFinding]:
    """Yield the cards of a node that get advice."""
    for device in devices:
        if device.info.gpu_instance_id:
            continue  # already partitioned by MIG: single instances cannot be divided further
        row, look = device.pool_row, looks[device.row]
        count = max(device.used, len(device.tenants)) if device.tenants and row.is_agreed else 0
        if not row.is_shared:
            holder = pods.get(device.tenants[0]) if len(device.tenants) == 1 else None
            # A pod with several GPUs should not share them: its processes wait for each other.
            count = int(
                holder is not None and not holder.gives_way and sum(holder.resources.values()) == 1
            )
        card = Card(
            model=device.model,
            memory_bytes=device.memory_bytes,
            replicas=row.replicas,
            is_shared=row.is_shared,
            pods=count,
            use=look.use,
        )
        advice = advise(card)
        if advice is not None:
            yield CardFinding(device=device, card=card, advice=advice, source=look.source)


def _judge_node(
    devices: Sequence[_MeasuredDevice],
    records: Sequence[PodRecord],
    namespace: str | None,
    into: tuple[_Findings, Mapping[int, _DeviceHistory], Fleet],
) -> None:
    """Add the findings of a node's cards and pods."""
    found, looks, fleet = into
    pods = {record.key: record for record in records}
    for card in _cards(devices, pods, looks):
        found.add_card(card)
    for record in records:
        if namespace is None or (record.namespace == namespace and sees(namespace)):
            _judge(record, devices, found, looks, fleet.pod_memory)


def _judge(
    record: PodRecord,
    devices: Sequence[_MeasuredDevice],
    found: _Findings,
    looks: Mapping[int, _DeviceHistory],
    shares: PodMemory,
) -> None:
    """Add the findings about a pod."""
    if record.gives_way:
        return  # a placeholder uses nothing
    own = [device for device in devices if record.key in device.tenants]
    is_whole = not any(device.pool_row.is_shared or device.info.gpu_instance_id for device in own)
    requested = record.memory_bytes
    if not is_whole and requested is None:
        return  # a share without a memory request: nothing to compare
    is_complete = len(own) == sum(record.resources.values()) or not is_whole
    is_alone = all(device.tenants == (record.key,) for device in own)
    total = min((device.memory_bytes for device in own), default=0.0)
    if own and total and not is_alone and not is_whole:
        keys = [device.info.key for device in own]
        look = _DeviceHistory(use=shares.use(record.uid, keys), source=_BY_AGENT)
        if look.use.samples >= LEAST_SAMPLES:
            _judge_memory(record, own, look, found)
        else:
            found.unjudged += 1
        return
    used = [looks[device.row].use for device in own]
    if not (own and is_complete and is_alone and total and all(use.is_enough for use in used)):
        found.unjudged += 1
        return
    use, source = _together(used), looks[own[0].row].source
    if is_whole and uses_a_tenth(used):
        fitting = fit(1, use.activity_ratio or 0.0, use.memory_bytes or 0.0, total)
        found.add_pod(
            PodFinding(
                record=record,
                kind=_TENTH,
                gpus=len(own),
                use=use,
                memory_bytes=total,
                per_card=fitting.count,
                memory=None,
                source=source,
            )
        )
    _judge_memory(record, own, _DeviceHistory(use=use, source=source), found)


def _judge_memory(
    record: PodRecord, own: Sequence[_MeasuredDevice], look: _DeviceHistory, found: _Findings
) -> None:
    """Add a finding if a pod requests far more memory than it uses, or less."""
    requested, use = record.memory_bytes, look.use
    # The annotation's value is visible only to callers who may read the pod.
    most = use.memory_most_bytes
    if requested is None or most is None or not sees(record.namespace):
        return
    total = min(device.memory_bytes for device in own)
    memory = judge_memory(float(requested), most, total)
    if memory is not None:
        found.add_pod(
            PodFinding(
                record=record,
                kind=memory.verdict.value,
                gpus=len(own),
                use=use,
                memory_bytes=total,
                per_card=None,
                memory=memory,
                source=look.source,
            )
        )


def _together(used: Sequence[Use]) -> Use:
    """Combine devices into the highest activity and memory of any, and the fewest samples."""
    fewest = min(used, key=lambda use: use.samples)
    return Use(
        activity_ratio=_most(use.activity_ratio for use in used),
        memory_bytes=_most(use.memory_bytes for use in used),
        memory_most_bytes=_most(use.memory_most_bytes for use in used),
        samples=fewest.samples,
        seconds=fewest.seconds,
    )


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
