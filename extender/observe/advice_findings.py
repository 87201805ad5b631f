"""Finds what there is to advise: looks at every device that pods hold or share, and at the pods."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import numpy as np

from extender.core.advice import (
    LEAST_SAMPLES,
    Ask,
    Card,
    CardAdvice,
    MemoryAdvice,
    Use,
    Verdict,
    advise,
    fit,
    judge_memory,
    uses,
    uses_a_tenth,
)
from extender.core.inventory import PodRecord
from extender.core.readings import DeviceInfo
from extender.core.snapshot import PoolRow, Snapshot
from extender.fleet.fleet import Fleet
from extender.fleet.pod_memory import PodMemory
from extender.observe.answers import chunks
from extender.observe.measured import Measured
from extender.observe.seen import sees
from extender.observe.views import PRODUCT_LABEL

PIECE_NODES: Final = 8
"""Nodes that are looked at between two turns of the event loop."""
PIECE_DEVICES: Final = 64
"""Devices about which Prometheus is asked at once."""

BY_AGENT: Final = "agent"
"""Who told what a pod holds of a device that it shares."""

TENTH: Final = "uses-a-tenth"
KINDS: Final = (*(ask.value for ask in Ask), TENTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that pods hold, or may hold together.

    Attributes:
        node: where.
        resource: behind which resource.
        row: in the telemetry.
        info: what is known of it besides numbers.
        model: as a source or a label writes it.
        pool_row: its node's.
        used: replicas in use.
        tenants: pods that are known to hold it.
        memory_bytes: what it has, 0 where unknown.
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
class Look:
    """How a device was used, and who remembered it."""

    use: Use
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFinding:
    """A card, and what is said of it."""

    device: Device
    card: Card
    advice: CardAdvice
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFinding:
    """A pod that asks for far too much, or too little.

    Attributes:
        record: the pod.
        kind: what is wrong.
        gpus: how many it has.
        use: the busiest of them and the fullest, in one.
        memory_bytes: what each of them has.
        per_card: so many pods that use as much would fit on one; None where that is not the point.
        memory: what it should ask for, likewise.
        source: who remembered its use.
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
class Findings:
    """What was found, in the order of the nodes' names.

    Attributes:
        most: so many of each kind are kept, the others are counted: what is said of forty thousand
            cards takes its time to forget.
        cards: by verdict, cards of which something is to be said.
        pods: by kind, pods that ask for too much or too little.
        counts: by verdict and kind, how many there are.
        unjudged: pods that hold devices and of which too little is known, or that share them.
        devices: how many were looked at.
        samples: the most that there are of one.
        seconds: the longest that one was looked at.
        sources: who remembered.
    """

    most: int
    cards: dict[Verdict, list[CardFinding]] = field(
        default_factory=lambda: {verdict: [] for verdict in Verdict}
    )
    pods: dict[str, list[PodFinding]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    counts: Counter[str] = field(default_factory=Counter)
    unjudged: int = 0
    devices: int = 0
    samples: int = 0
    seconds: float = 0.0
    sources: set[str] = field(default_factory=set)

    def add_card(self, card: CardFinding) -> None:
        """Note what is said of a card."""
        verdict = card.advice.verdict
        self.counts[verdict.value] += 1
        if len(self.cards[verdict]) < self.most:
            self.cards[verdict].append(card)

    def add_pod(self, pod: PodFinding) -> None:
        """Note what is said of a pod."""
        self.counts[pod.kind] += 1
        if len(self.pods[pod.kind]) < self.most:
            self.pods[pod.kind].append(pod)

    def note(self, looks: Iterable[Look]) -> None:
        """Note how some devices were used."""
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
) -> Findings:
    """Look at every device that pods hold or share, and at these pods.

    Args:
        fleet: the fleet.
        measured: what was measured of them.
        node: only its devices; None for all.
        namespace: only its pods, likewise; none at all where the caller may not read them.
        most: so many of each kind are told.
    """
    snapshot = fleet.snapshot()
    nodes = {name for pool in snapshot.pools.values() for name in pool.nodes}
    found = Findings(most=most)
    for names in chunks(sorted(nodes) if node is None else [node], PIECE_NODES):
        by_node = {name: list(_devices(fleet, snapshot, name)) for name in names}
        looks: dict[int, Look] = {}
        for some in chunks(chain.from_iterable(by_node.values()), PIECE_DEVICES):
            looks |= await _look(fleet, measured, some)
        found.note(looks.values())
        await asyncio.sleep(0)
        for name, devices in by_node.items():
            if devices:
                _judge_node(devices, fleet.pods_on(name), namespace, (found, looks, fleet))
                await asyncio.sleep(0)
    return found


def _devices(fleet: Fleet, snapshot: Snapshot, node: str) -> Iterator[Device]:
    """Yield a node's devices that pods hold or share."""
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
            yield Device(
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


async def _look(fleet: Fleet, measured: Measured, devices: Sequence[Device]) -> dict[int, Look]:
    """Return how some devices were used since their tenants last changed."""
    samples = await measured.of([device.row for device in devices])
    since = np.array([fleet.store.tenants_since(device.row) for device in devices])
    found = uses(samples.times, samples.activity, samples.memory_bytes, since)
    return {
        device.row: Look(use=use, source=samples.source)
        for device, use in zip(devices, found, strict=True)
    }


def _cards(
    devices: Sequence[Device], pods: Mapping[str, PodRecord], looks: Mapping[int, Look]
) -> Iterator[CardFinding]:
    """Yield the cards of a node of which something is to be said."""
    for device in devices:
        if device.info.gpu_instance_id:
            continue  # cut already; its instances cannot be told to be cut otherwise one by one
        row, look = device.pool_row, looks[device.row]
        count = max(device.used, len(device.tenants)) if device.tenants and row.is_agreed else 0
        if not row.is_shared:
            holder = pods.get(device.tenants[0]) if len(device.tenants) == 1 else None
            # A pod that has several wants to have them to itself: its parts wait for each other.
            is_one = holder is not None and sum(holder.resources.values()) == 1
            count = int(is_one and holder is not None and not holder.gives_way)
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
    devices: Sequence[Device],
    records: Sequence[PodRecord],
    namespace: str | None,
    into: tuple[Findings, Mapping[int, Look], Fleet],
) -> None:
    """Say what is to be said of a node's cards and pods."""
    found, looks, fleet = into
    pods = {record.key: record for record in records}
    for card in _cards(devices, pods, looks):
        found.add_card(card)
    for record in records:
        if namespace is None or (record.namespace == namespace and sees(namespace)):
            _judge(record, devices, found, looks, fleet.pod_memory)


def _judge(
    record: PodRecord,
    devices: Sequence[Device],
    found: Findings,
    looks: Mapping[int, Look],
    shares: PodMemory,
) -> None:
    """Say what is to be said of a pod."""
    if record.gives_way:
        return  # a placeholder uses nothing
    own = [device for device in devices if record.key in device.tenants]
    is_whole = not any(device.pool_row.is_shared or device.info.gpu_instance_id for device in own)
    asked = record.memory_bytes
    if not is_whole and asked is None:
        return  # it asked for a share, and for no memory
    is_complete = len(own) == sum(record.resources.values()) or not is_whole
    is_alone = all(device.tenants == (record.key,) for device in own)
    total = min((device.memory_bytes for device in own), default=0.0)
    if own and total and not is_alone and not is_whole:
        keys = [device.info.key for device in own]
        held = Look(use=shares.use(record.uid, keys), source=BY_AGENT)
        if held.use.samples >= LEAST_SAMPLES:
            _judge_memory(record, own, held, found)
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
                kind=TENTH,
                gpus=len(own),
                use=use,
                memory_bytes=total,
                per_card=fitting.count,
                memory=None,
                source=source,
            )
        )
    _judge_memory(record, own, Look(use=use, source=source), found)


def _judge_memory(record: PodRecord, own: Sequence[Device], held: Look, found: Findings) -> None:
    """Say whether a pod asks for far more memory than it holds, or for less."""
    asked, use = record.memory_bytes, held.use
    # What its annotation says is its owner's: others are not to learn it from our advice.
    if asked is None or not sees(record.namespace):
        return
    total = min(device.memory_bytes for device in own)
    memory = judge_memory(float(asked), use.memory_most_bytes or 0.0, total)
    if memory is not None:
        found.add_pod(
            PodFinding(
                record=record,
                kind=memory.ask.value,
                gpus=len(own),
                use=use,
                memory_bytes=total,
                per_card=None,
                memory=memory,
                source=held.source,
            )
        )


def _together(used: Sequence[Use]) -> Use:
    """Return the busiest and the fullest of a pod's devices, in one; of the fewest samples."""
    fewest = min(used, key=lambda use: use.samples)
    return Use(
        activity_ratio=max(use.activity_ratio or 0.0 for use in used),
        memory_bytes=max(use.memory_bytes or 0.0 for use in used),
        memory_most_bytes=max(use.memory_most_bytes or 0.0 for use in used),
        samples=fewest.samples,
        seconds=fewest.seconds,
    )
