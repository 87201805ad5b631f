"""What the landing devices are worth to a pod: idle, roomy, working. Feeds filter and score."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from extender.core.columns import within
from extender.core.landing import Landing, landing_set
from extender.core.policy import Thresholds
from extender.core.snapshot import Batch, Flags, Ratios, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a pod asks of the devices behind one resource.

    Attributes:
        count: devices or replicas, at least 1.
        memory_bytes: room that each device must have, 0 where the pod does not say.
        thresholds: below both a device is idle to this pod.
    """

    count: int
    memory_bytes: float
    thresholds: Thresholds

    @property
    def columns(self) -> "Asks":
        """The same of every node."""
        return Asks.joined([self], [1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """What pods ask, as columns: a row for each node of a batch, or one row for all of them.

    Attributes:
        count: devices or replicas; one axis.
        memory_bytes: room that each device must have; a column of a matrix, like the next two.
        utilization: threshold, ratio.
        memory: threshold, ratio.
    """

    count: Rows
    memory_bytes: Ratios
    utilization: Ratios
    memory: Ratios

    @classmethod
    def joined(cls, asks: Sequence[Ask], lengths: Sequence[int]) -> "Asks":
        """Return what each pod asks of so many nodes, one pod after the other."""

        def column(values: Iterable[float]) -> Ratios:
            return np.repeat(np.fromiter(values, np.float64, len(asks)), lengths)[:, None]

        return cls(
            count=np.repeat(np.fromiter((ask.count for ask in asks), np.intp), lengths),
            memory_bytes=column(ask.memory_bytes for ask in asks),
            utilization=column(ask.thresholds.utilization for ask in asks),
            memory=column(ask.thresholds.memory for ask in asks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What tenants that the readings do not show are believed to use.

    Attributes:
        utilization: ratio that each adds to a shared device.
        mps_share_bytes: room of an MPS share, None for an even share of the device.
    """

    utilization: float
    mps_share_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The devices of a batch as one pod sees them; matrices are in the shape of the slots.

    Attributes:
        landing: where the pod could land.
        utilization: assumed tenants counted in; a stale value has faded towards the threshold.
        free_bytes: room for this pod, assumed tenants counted in; infinite where unknown.
        full_bytes: room for this pod if nobody else were there; infinite where unknown.
        headroom: ratio of memory free, faded likewise.
        idle_chance: 1 known to be idle, 0 known to be busy, 0.5 unknown; stale lies between.
        is_idle: known to be idle, by fresh values.
        works: not excluded by ill health.
        is_clean: works, and nobody outside Kubernetes uses it.
        fits: clean, and has the room that the pod asks for as far as is known.
        suits: fits, and is idle.
        idle: per node, landing devices that suit, held ones taken off.
        chance: per node, chance that every device that the pod gets suits.
    """

    landing: Landing
    utilization: Ratios
    free_bytes: Ratios
    full_bytes: Ratios
    headroom: Ratios
    idle_chance: Ratios
    is_idle: Flags
    works: Flags
    is_clean: Flags
    fits: Flags
    suits: Flags
    idle: Rows
    chance: Ratios


def assess(batch: Batch, asks: Asks, estimates: Estimates) -> Assessment:
    """Return what the devices of each node are worth to a pod that asks this of it."""
    telemetry = batch.telemetry
    landing = landing_set(batch, asks.count)
    added: Ratios = estimates.utilization * batch.assumed.astype(np.float64)
    load = np.minimum(telemetry.utilization + added, 1.0)
    peak = np.maximum(load, np.minimum(telemetry.latest + added, 1.0))
    share_bytes = telemetry.memory_total_bytes / batch.replicas[:, None]
    assumed_bytes = batch.assumed_bytes + batch.assumed_shares * share_bytes
    total = np.where(telemetry.memory_total_bytes > 0, telemetry.memory_total_bytes, np.inf)
    memory_used = np.minimum(telemetry.memory_used + assumed_bytes / total, 1.0)

    believed = _Believed(
        peak=peak, memory_used=memory_used, added=added, taken=assumed_bytes / total
    )
    idle_chance, is_idle = _idleness(batch, believed, asks)
    limit = asks.utilization
    # What only the estimate adds is no news that could grow stale: it does not fade.
    utilization = np.minimum(
        limit + (telemetry.utilization - limit) * telemetry.freshness + added, 1.0
    )
    neutral = 1.0 - asks.memory
    headroom = within(
        neutral
        + (1.0 - telemetry.memory_used - neutral) * telemetry.memory_freshness
        - assumed_bytes / total,
        0.0,
        1.0,
    )
    full_bytes = _full_bytes(batch, share_bytes, estimates)
    free_bytes = _free_bytes(batch, full_bytes, assumed_bytes)
    is_multi = (asks.count > 1)[:, None]
    excluded = telemetry.is_excluded | (telemetry.is_excluded_multi & is_multi)
    works = landing.devices & ~excluded
    is_clean = works & ~telemetry.is_foreign
    fits = is_clean & (free_bytes >= asks.memory_bytes)
    suits = fits & is_idle
    idle = np.maximum(suits.sum(axis=1) - landing.taken, 0)
    # A broken device that the kubelet no longer offers cannot be landed on.
    broken = (landing.devices & excluded).sum(axis=1)
    offered = landing.size - np.minimum(broken, batch.withdrawn // batch.replicas)
    return Assessment(
        landing=landing,
        utilization=utilization,
        free_bytes=free_bytes,
        full_bytes=full_bytes,
        headroom=headroom,
        idle_chance=idle_chance,
        is_idle=is_idle,
        works=works,
        is_clean=is_clean,
        fits=fits,
        suits=suits,
        idle=idle,
        # The held ones are as likely to be good as the others: they change no odds.
        chance=_chance(suits.sum(axis=1), offered, landing.needed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Believed:
    """What idleness is judged by, per device.

    Attributes:
        peak: utilization, the higher of window and latest, assumed tenants counted in.
        memory_used: ratio of memory, likewise.
        added: the part of the utilization that is only assumed.
        taken: the part of the memory that is only assumed.
    """

    peak: Ratios
    memory_used: Ratios
    added: Ratios
    taken: Ratios


def _idleness(batch: Batch, believed: _Believed, asks: Asks) -> tuple[Ratios, Flags]:
    """Return how likely each device is idle, and whether that is known.

    Idle takes both signals; busy takes one. Either fades with the age of what it rests on; what
    is assumed alone makes a device busy does not.
    """
    telemetry = batch.telemetry
    is_calm = believed.peak < asks.utilization
    is_roomy = believed.memory_used < asks.memory
    has_tenants = batch.assumed > 0
    is_filled = has_tenants & (believed.added >= asks.utilization)
    is_full = has_tenants & (believed.taken >= asks.memory)
    busy = np.maximum(
        np.where(is_calm, 0.0, np.maximum(telemetry.freshness, is_filled)),
        np.where(is_roomy, 0.0, np.maximum(telemetry.memory_freshness, is_full)),
    )
    known = np.minimum(telemetry.freshness, telemetry.memory_freshness)
    idle = np.where(is_calm & is_roomy, known, 0.0)
    return 0.5 + 0.5 * (idle - busy), idle >= 1.0


def _full_bytes(batch: Batch, share_bytes: Ratios, estimates: Estimates) -> Ratios:
    """Return the room that a tenant has at best: under MPS a share has its cap."""
    total = batch.telemetry.memory_total_bytes
    cap = share_bytes if estimates.mps_share_bytes is None else estimates.mps_share_bytes
    at_best = np.where(batch.is_mps[:, None], cap, total)
    return np.where(total > 0, at_best, np.inf)


def _free_bytes(batch: Batch, full_bytes: Ratios, assumed_bytes: Ratios) -> Ratios:
    """Return the room that each device has for one more tenant, infinite where unknown.

    An MPS share has its cap, whatever is free. A reading that has faded away says nothing, and
    then only the size of the device bounds the room. So it is with a whole device that a pod
    holds: this pod gets it only once that one is gone, and its memory with it.
    """
    telemetry = batch.telemetry
    measured = telemetry.memory_free_bytes - assumed_bytes
    is_held = (batch.used > 0) & ~batch.is_shared[:, None]
    is_measured = (telemetry.memory_freshness > 0) & ~is_held
    bound = full_bytes - assumed_bytes
    free = np.where(is_measured, np.minimum(measured, bound), bound)
    return np.maximum(np.where(batch.is_mps[:, None], full_bytes, free), 0.0)


def _chance(good: Rows, size: Rows, needed: Rows) -> Ratios:
    """Return the chance that `needed` devices drawn from `size`, `good` of them good, all are."""
    chance = np.where(needed > 0, 1.0, 0.0)
    for drawn in range(int(needed.max(initial=0))):
        ratio = within((good - drawn) / np.maximum(size - drawn, 1), 0.0, 1.0)
        chance = np.where(drawn < needed, chance * ratio, chance)
    return chance
