"""Assess the landing devices of each node for one pod: idle, enough memory, working.

The filter and the score both use the result.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from extender.core.decision.landing import Landing, chance_of_all, landing_set
from extender.core.nodes.snapshot import Batch, Flags, Ratios, Rows, as_ratios
from extender.core.policy import Thresholds
from extender.core.request.gpu_resources import ContainerDevices
from extender.core.steps import Steps, finish

UNKNOWN = 0.5
"""Idle probability of a device without data."""

_PRESUMED = 0.9
"""Weight of presumed idleness relative to measured idleness; the idle probability becomes 0.95."""


_STILL_SHARED = 0.5
"""A shared device ranks as busy above this fraction of the range from its threshold to full use:
two pods on one device slow each other down only above 75 % together."""

_MOST_OF_SHARE = 0.9
"""Usable part of an even share of a device: the driver reserves memory, so one share is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    """One pod's request for the devices of one resource.

    Attributes:
        count: devices or replicas, at least 1.
        containers: the containers that request the devices, in the kubelet's order; () for one that
            requests all.
        memory_bytes: required memory per device, 0 if the pod does not specify any.
        thresholds: a device below both thresholds is idle for this pod.
        expected_bytes: measured memory use of similar pods per device, NaN without such a pod.
        memory_share: required memory as a share of the card's memory, 0 without one.
    """

    count: int
    containers: tuple[ContainerDevices, ...] = ()
    memory_bytes: float
    thresholds: Thresholds
    expected_bytes: float = np.nan
    memory_share: float = 0.0

    @property
    def columns(self) -> "DeviceRequests":
        """The request as columns with one row that applies to every node."""
        return DeviceRequests.of_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequests:
    """Device requests of pods as columns: one row per node of a batch, or one row for all nodes.

    Attributes:
        count: devices or replicas; a 1-D array, like `pod`.
        pod: number of the row's pod.
        containers: the containers of each pod, as in `DeviceRequest`.
        memory_bytes: required memory per device; a 2-D column, like the other ratios.
        memory_share: required memory as a share of the node's cards.
        likely_bytes: memory that the pod will likely use per device: the required memory, else the
            measured use of similar pods; NaN if neither is known.
        utilization: idle threshold of utilization, ratio.
        memory: idle threshold of memory, ratio.
        thresholds: both thresholds if all rows belong to one pod, else None.
    """

    count: Rows
    pod: Rows
    containers: tuple[tuple[ContainerDevices, ...], ...]
    memory_bytes: Ratios
    memory_share: Ratios
    likely_bytes: Ratios
    utilization: Ratios
    memory: Ratios
    thresholds: Thresholds | None = None

    @classmethod
    def of_all(cls, requested: DeviceRequest) -> "DeviceRequests":
        """Return one pod's request as a single row that applies to every node."""
        return replace(cls.joined([requested], [1]), thresholds=requested.thresholds)

    @classmethod
    def joined(cls, requests: Sequence[DeviceRequest], lengths: Sequence[int]) -> "DeviceRequests":
        """Concatenate the requests of several pods, each repeated for its number of nodes."""

        def column(values: Iterable[float]) -> Ratios:
            return np.repeat(np.fromiter(values, np.float64, len(requests)), lengths)[:, None]

        def counts(values: Iterable[int]) -> Rows:
            return np.repeat(np.fromiter(values, np.intp, len(requests)), lengths)

        return cls(
            count=counts(one.count for one in requests),
            pod=counts(range(len(requests))),
            containers=tuple(one.containers for one in requests),
            memory_bytes=column(one.memory_bytes for one in requests),
            memory_share=column(one.memory_share for one in requests),
            likely_bytes=column(one.memory_bytes or one.expected_bytes for one in requests),
            utilization=column(one.thresholds.utilization for one in requests),
            memory=column(one.thresholds.memory for one in requests),
        )

    def grounds(self, estimates: "Estimates") -> "_Grounds | None":
        """Return the cache key for results shared with other requests, or None for several pods."""
        if self.thresholds is None:
            return None
        return estimates, self.thresholds, int(self.count[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Estimated use by tenants that the readings do not show yet.

    Attributes:
        utilization: utilization that each tenant adds to a shared device, ratio.
        mps_share_bytes: memory cap of an MPS share, None for an even share of the device.
    """

    utilization: float
    mps_share_bytes: float | None


_Grounds = tuple[Estimates, Thresholds, int]
"""Cache key of an assessment's shared parts: estimates, thresholds, number of devices. The shared
parts depend on these and on the batch, but not on the memory that the pod requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """Assessment of a batch's devices for one pod; matrices have a row per node, a column per slot.

    Attributes:
        landing: the landing set of each node.
        utilization: utilization with assumed tenants; a stale value fades towards the threshold. It
            only orders devices.
        next_hour: forecast of the utilization, with the same additions. It only orders devices.
        peak: utilization of the last minutes with assumed tenants. Decides between idle and busy.
        free_bytes: memory left for this pod after declared memory and other use; infinite if
            unknown.
        declared_room_bytes: `free_bytes` plus the estimated use of assumed tenants.
        full_bytes: memory for this pod on an empty device; infinite if unknown.
        requested_bytes: memory that the pod requests per device, for all its shares of that device.
        headroom: ratio of free memory; a stale value fades towards the threshold.
        idle_chance: idle probability: 1 idle, 0.95 presumed idle, 0.5 unknown, 0 busy; stale values
            lie between.
        is_idle: fresh values show the device idle.
        works: the device is in the landing set and its health does not exclude it.
        working: per node, number of landing devices that work.
        offered: per node, number of landing devices that the kubelet may allocate, broken ones
            included.
        is_clean: the device works and has no foreign use. On a shared device foreign use counts as
            load, like the use of any tenant.
        fits: the device is clean and has the memory that the pod requests, as far as known.
        holds: the device fits and has the memory that the pod will likely use. Without a similar
            measured pod that is an even share of a shared device.
        room: per node, share of clean landing devices that hold the pod. A device with less memory
            than the expected use counts in proportion.
        suits: the device fits and is idle.
        idle: per node, number of landing devices that suit, less the allocated ones.
        chance: per node, probability that every device of the pod is idle and has room for it.
        band_chance: as `chance`, but a shared device only needs some activity and memory left, see
            `_STILL_SHARED`. It decides the band of the order.
        is_sure: per node, whether all devices that the pod may get are known to suit.
        grounds: cache key of the parts shared between requests; None for several pods.
    """

    landing: Landing
    utilization: Ratios
    next_hour: Ratios
    peak: Ratios
    free_bytes: Ratios
    declared_room_bytes: Ratios
    full_bytes: Ratios
    requested_bytes: Ratios
    headroom: Ratios
    idle_chance: Ratios
    is_idle: Flags
    works: Flags
    working: Rows
    offered: Rows
    is_clean: Flags
    fits: Flags
    holds: Flags
    room: Ratios
    suits: Flags
    idle: Rows
    chance: Ratios
    band_chance: Ratios
    is_sure: Flags
    grounds: _Grounds | None = None


def assess(batch: Batch, requested: DeviceRequests, estimates: Estimates) -> Assessment:
    """Assess the devices of each node for the pods that request them."""
    grounds = requested.grounds(estimates)
    room, load, reach = finish(_shared(batch, requested, estimates, grounds))
    landing = reach.landing
    requested_bytes = _requested_bytes(batch, requested, landing)
    fits = reach.is_clean & (room.free_bytes >= requested_bytes)
    room_share = _room_share(room.likely_free_bytes, _likely_bytes(batch, requested, room), fits)
    holds = room_share >= 1.0
    suits = fits & load.is_idle
    suiting = suits.sum(axis=1)
    missing = np.maximum(landing.needed - (landing.size - landing.taken), 0)

    def chance_by(good: Ratios) -> Ratios:
        return _chance(np.where(holds, good, 0.0), reach, missing) * landing.certainty

    chance = chance_by(load.idle_chance)
    return Assessment(
        landing=landing,
        utilization=load.utilization,
        next_hour=load.next_hour,
        peak=load.peak,
        free_bytes=room.free_bytes,
        declared_room_bytes=room.declared_room_bytes,
        full_bytes=room.full_bytes,
        requested_bytes=requested_bytes,
        headroom=load.headroom,
        idle_chance=load.idle_chance,
        is_idle=load.is_idle,
        works=reach.works,
        working=reach.working,
        offered=reach.offered,
        is_clean=reach.is_clean,
        fits=fits,
        holds=holds,
        room=room_share.sum(axis=1) / np.maximum(reach.is_clean.sum(axis=1), 1),
        suits=suits,
        idle=np.maximum(suiting - landing.taken, 0),
        chance=chance,
        band_chance=chance_by(load.left_chance) if batch.is_shared.any() else chance,
        is_sure=(suiting >= reach.offered) & (missing <= 0) & (landing.certainty >= 1),
        grounds=grounds,
    )


def assess_in_steps(batch: Batch, requested: DeviceRequests, estimates: Estimates) -> Steps[None]:
    """Precompute in steps the parts of `assess` that one pod's request shares with other requests.

    The results go to `batch.shared_results`. Takes the arguments of `assess`; `requested` must
    be of one pod.
    """
    yield from _shared(batch, requested, estimates, requested.grounds(estimates))


def _shared(
    batch: Batch, requested: DeviceRequests, estimates: Estimates, grounds: _Grounds | None
) -> Steps[tuple["_Room", "_Load", "_Reach"]]:
    results = batch.shared_results
    room = results.get(grounds and ("room", grounds[0]), lambda: _room(batch, estimates))
    yield
    load = results.get(
        grounds and ("load", grounds[:2]), lambda: _load(batch, requested, estimates, room)
    )
    yield
    reach = results.get(grounds and ("reach", grounds[2]), lambda: _reach(batch, requested.count))
    return room, load, reach


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """Memory of each device, the same for every request.

    Attributes:
        taken: ratio of memory that tenants will use and that readings do not show yet.
        promised: ratio of memory that tenants declared or are estimated to use, in use or not.
        full_bytes: as in `Assessment`.
        free_bytes: as in `Assessment`.
        likely_free_bytes: as `free_bytes`, but a device that is presumed idle has all memory that
            was free before its pods came. No node is refused for it.
        declared_room_bytes: as in `Assessment`.
    """

    taken: Ratios
    promised: Ratios
    full_bytes: Ratios
    free_bytes: Ratios
    likely_free_bytes: Ratios
    declared_room_bytes: Ratios


def _room(batch: Batch, estimates: Estimates) -> _Room:
    """Compute the memory of each device that is left for a new pod.

    Time-sliced device: size less all declared memory and other use, but at most the measured free
    memory. MPS share: its cap, even if less is free, because MPS enforces caps on shares; only
    foreign processes reduce it. If a reading has expired, measured free memory is ignored. It is
    also ignored for an allocated whole device: its tenant's memory is released before this pod gets
    the device. Foreign use stays.
    """
    telemetry = batch.telemetry
    size = telemetry.memory_total_bytes
    share_bytes = size / batch.replicas[:, None]
    full_bytes = _full_bytes(batch, share_bytes, estimates)
    others = telemetry.others_bytes
    guessed = batch.assumed_shares * share_bytes + batch.guessed_bytes
    is_held = (batch.used > 0) & ~batch.is_shared[:, None]
    is_measured = (telemetry.memory_freshness > 0) & ~is_held
    # Memory in use by others is not the memory of pods that declared theirs.
    in_use = np.where(is_measured, np.maximum(telemetry.memory_used * size - others, 0.0), 0.0)
    promised = np.maximum(batch.declared_bytes - in_use, 0.0)
    # Memory in use fades with its reading's age, so the unused rest grows accordingly.
    fading = np.maximum(batch.declared_bytes - in_use * telemetry.memory_freshness, 0.0)
    free = np.where(is_measured, telemetry.memory_free_bytes, full_bytes - others)
    room = np.minimum(free, full_bytes) - promised
    is_capped = batch.is_mps[:, None]
    known_size = np.where(size > 0, size, np.inf)
    likely = room + np.where(telemetry.presumed > 0, others - telemetry.foreign_bytes, 0.0)
    capped = np.minimum(full_bytes, known_size - telemetry.foreign_bytes)
    return _Room(
        taken=(fading + guessed) / known_size,
        promised=(batch.declared_bytes + guessed) / known_size,
        full_bytes=full_bytes,
        free_bytes=np.maximum(np.where(is_capped, capped, room - guessed), 0.0),
        likely_free_bytes=np.maximum(np.where(is_capped, capped, likely - guessed), 0.0),
        declared_room_bytes=np.maximum(np.where(is_capped, capped, room), 0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """Load of each device relative to a request's thresholds; attributes as in `Assessment`.

    Attributes:
        left_chance: as `idle_chance`, but a shared device only needs some activity and memory left.
    """

    utilization: Ratios
    next_hour: Ratios
    peak: Ratios
    headroom: Ratios
    idle_chance: Ratios
    left_chance: Ratios
    is_idle: Flags


def _load(batch: Batch, requested: DeviceRequests, estimates: Estimates, room: _Room) -> _Load:
    telemetry = batch.telemetry
    added: Ratios = estimates.utilization * batch.assumed.astype(np.float64)
    # Tenants that are still loading count with at least the estimated utilization.
    least: Ratios = estimates.utilization * batch.loading.astype(np.float64)
    estimate = _Estimate(
        peak=np.minimum(np.maximum(telemetry.peak, least) + added, 1.0),
        memory_used=np.minimum(telemetry.memory_used + room.taken, 1.0),
        added=least + added,
        promised=room.promised,
    )
    idle_chance, is_idle = _idleness(batch, estimate, requested.utilization, requested.memory)
    left_chance = idle_chance
    if batch.is_shared.any():
        part = np.where(batch.is_shared, _STILL_SHARED, 0.0)[:, None]
        limits = (
            limit + part * (1.0 - limit) for limit in (requested.utilization, requested.memory)
        )
        left_chance, _ = _idleness(batch, estimate, *limits)
    limit, neutral = requested.utilization, 1.0 - requested.memory
    # Estimates have no age: only measured values fade.
    activity, filling = telemetry.freshness, telemetry.memory_freshness
    if telemetry.presumed.any():
        activity = np.maximum(activity, telemetry.presumed)
        filling = np.maximum(filling, telemetry.presumed)

    def with_estimates(load: Ratios) -> Ratios:
        faded = limit + (load - limit) * activity
        return np.minimum(np.maximum(faded, least) + added, 1.0)

    free = neutral + (1.0 - telemetry.memory_used - neutral) * filling
    return _Load(
        utilization=with_estimates(telemetry.utilization),
        next_hour=with_estimates(telemetry.next_hour),
        peak=estimate.peak,
        headroom=as_ratios(free - room.taken),
        idle_chance=idle_chance,
        left_chance=left_chance,
        is_idle=is_idle,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reach:
    """Devices that a pod could land on; depends only on the number of devices.

    Attributes:
        landing: as in `Assessment`, like all others.
    """

    landing: Landing
    works: Flags
    working: Rows
    is_clean: Flags
    offered: Rows


def _reach(batch: Batch, count: Rows) -> _Reach:
    telemetry = batch.telemetry
    landing = landing_set(batch, count)
    is_multi = (count > 1)[:, None]
    excluded = telemetry.is_excluded | (telemetry.is_excluded_multi & is_multi)
    works = landing.devices & ~excluded
    # A broken device that the kubelet no longer offers cannot be landed on.
    working = works.sum(axis=1)
    broken = landing.size - working
    return _Reach(
        landing=landing,
        works=works,
        working=working,
        is_clean=works & ~(telemetry.is_foreign & ~batch.is_shared[:, None]),
        offered=landing.size - np.minimum(broken, landing.unoffered),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """Measured plus estimated use per device, from which idleness is judged.

    Attributes:
        peak: utilization of the last minutes with assumed tenants.
        memory_used: ratio of memory in use with assumed tenants.
        added: the estimated part of the utilization.
        promised: ratio of memory that tenants declared or are estimated to use, in use or not.
    """

    peak: Ratios
    memory_used: Ratios
    added: Ratios
    promised: Ratios


def _idleness(
    batch: Batch, estimate: _Estimate, utilization: Ratios, memory: Ratios
) -> tuple[Ratios, Flags]:
    """Return the probability that each device is below two limits, and whether that is known.

    A device is idle if activity and memory use are both low, and busy if either is high. Measured
    values fade with the age of the reading. Estimated values do not.
    """
    telemetry = batch.telemetry
    is_calm = estimate.peak < utilization
    is_roomy = estimate.memory_used < memory
    is_filled = (estimate.added > 0) & (estimate.added >= utilization)
    is_full = (estimate.promised > 0) & (estimate.promised >= memory)
    busy = np.maximum(
        np.where(is_calm, 0.0, np.maximum(telemetry.freshness, is_filled)),
        np.where(is_roomy, 0.0, np.maximum(telemetry.memory_freshness, is_full)),
    )
    known = np.minimum(telemetry.freshness, telemetry.memory_freshness)
    if telemetry.presumed.any():
        known = np.maximum(known, _PRESUMED * telemetry.presumed)
    idle = np.where(is_calm & is_roomy, known, 0.0)
    return UNKNOWN + UNKNOWN * (idle - busy), idle >= 1.0


def _requested_bytes(batch: Batch, requested: DeviceRequests, landing: Landing) -> Ratios:
    """Return the memory that a pod requests per device, once per share that it gets of that device.

    Under MPS each share has its own cap, so shares do not add up there.
    """
    each = _declared_bytes(batch, requested)
    if (requested.count <= 1).all():
        return each
    shares = -(-requested.count // np.maximum(landing.size, 1))
    is_capped = batch.is_mps | ~batch.is_shared
    return each * np.where(is_capped, 1, shares)[:, None]


def _declared_bytes(batch: Batch, requested: DeviceRequests) -> Ratios:
    """Return the memory that a pod requests per share, with shares of the node's largest card."""
    if not requested.memory_share.any():
        return requested.memory_bytes
    total = batch.telemetry.memory_total_bytes.max(axis=1, initial=0.0)[:, None]
    declared: Ratios = np.maximum(requested.memory_bytes, requested.memory_share * total)
    return declared


def _likely_bytes(batch: Batch, requested: DeviceRequests, room: _Room) -> Ratios:
    """Return the memory that a pod will likely use per device."""
    likely = requested.likely_bytes
    if requested.memory_share.any():
        likely = np.where(requested.memory_share > 0, _declared_bytes(batch, requested), likely)
    if not np.isnan(likely).any():
        return likely
    share_bytes = batch.telemetry.memory_total_bytes / batch.replicas[:, None]
    even = _MOST_OF_SHARE * np.minimum(share_bytes, room.full_bytes)
    of_unknown = np.where(batch.is_shared[:, None], even, 0.0)
    return np.where(np.isnan(likely), of_unknown, likely)


def _room_share(free_bytes: Ratios, likely_bytes: Ratios, fits: Flags) -> Ratios:
    """Return the share of a pod's expected memory that each device has, 1 if it has all of it.

    Expected memory is the maximum of similar pods, so a pod may still fit with less. A device
    without the memory that the pod requests counts 0.
    """
    share = free_bytes / np.maximum(likely_bytes, 1.0)
    held: Ratios = np.where(fits, np.where(free_bytes >= likely_bytes, 1.0, share), 0.0)
    return held


def largest_bytes(batch: Batch, estimates: Estimates) -> float:
    """Return the most memory that a device of a batch, or a share under MPS, has when it is empty.

    Infinite if the size of a device is unknown. The result is cached with the batch.
    """

    def largest() -> float:
        share_bytes = batch.telemetry.memory_total_bytes / batch.replicas[:, None]
        full_bytes = _full_bytes(batch, share_bytes, estimates)
        return float(np.where(batch.present, full_bytes, 0.0).max(initial=0.0))

    return batch.shared_results.get(("largest", estimates.mps_share_bytes), largest)


def _full_bytes(batch: Batch, share_bytes: Ratios, estimates: Estimates) -> Ratios:
    """Return the memory that a tenant has on an empty device; under MPS at most its share's cap.

    A configured cap applies even if the size of the device is unknown, and is limited to that size.
    """
    size = batch.telemetry.memory_total_bytes
    known_size = np.where(size > 0, size, np.inf)
    cap = share_bytes if estimates.mps_share_bytes is None else estimates.mps_share_bytes
    known_cap = np.minimum(np.where(cap > 0, cap, np.inf), known_size)
    return np.where(batch.is_mps[:, None], known_cap, known_size)


def _chance(chances: Ratios, reach: _Reach, missing: Rows) -> Ratios:
    """Return the probability that all devices allocated to a pod are suitable.

    If it is unknown which devices are allocated, they do not change the probability: they are as
    likely suitable as the others.

    Args:
        chances: per device, probability that it suits, 0 if it cannot be landed on.
        reach: the devices that the pod could land on.
        missing: per node, number of needed devices that our count shows as allocated.
            kube-scheduler found room for the pod, so devices will be freed: their idleness is
            unknown.
    """
    chance = chance_of_all(chances, reach.offered, reach.landing.needed)
    return chance * UNKNOWN**missing if missing.any() else chance
