"""What the landing devices are worth to a pod: idle, roomy, working. Feeds filter and score."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from extender.core.certainty import chance_of_all
from extender.core.columns import within
from extender.core.landing import Landing, landing_set
from extender.core.policy import Thresholds
from extender.core.snapshot import Batch, Flags, Ratios, Rows
from extender.core.steps import Steps, finish

UNKNOWN = 0.5
"""Chance to be idle of a device of which nothing is known."""

PRESUMED = 0.9
"""So much does presumed idleness count beside known: 0.95 of the way from busy to idle."""


STILL_SHARED = 0.5
"""A shared device comes behind others as busy from this part of the way from the threshold to full
on: two pods on one device slow each other down only beyond 75 % together."""

MOST_OF_SHARE = 0.9
"""The last even share of a device is smaller than the others by what the driver reserves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a pod asks of the devices behind one resource.

    Attributes:
        count: devices or replicas, at least 1.
        memory_bytes: room that each device must have, 0 where the pod does not say.
        thresholds: below both a device is idle to this pod.
        expected_bytes: what pods like it were measured to use of each, NaN where none was.
    """

    count: int
    memory_bytes: float
    thresholds: Thresholds
    expected_bytes: float = np.nan

    @property
    def columns(self) -> "Asks":
        """The same of every node."""
        return Asks.of_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """What pods ask, as columns: a row for each node of a batch, or one row for all of them.

    Attributes:
        count: devices or replicas; one axis.
        memory_bytes: room that each device must have; a column of a matrix, like the next three.
        likely_bytes: room that the pod will take of each: that, or what pods like it were measured
            to use; NaN where neither is known.
        utilization: threshold, ratio.
        memory: threshold, ratio.
        thresholds: the same where they are one pod's; None where pods differ.
    """

    count: Rows
    memory_bytes: Ratios
    likely_bytes: Ratios
    utilization: Ratios
    memory: Ratios
    thresholds: Thresholds | None = None

    @classmethod
    def of_all(cls, ask: Ask) -> "Asks":
        """Return what one pod asks of every node."""
        return replace(cls.joined([ask], [1]), thresholds=ask.thresholds)

    @classmethod
    def joined(cls, asks: Sequence[Ask], lengths: Sequence[int]) -> "Asks":
        """Return what each pod asks of so many nodes, one pod after the other."""

        def column(values: Iterable[float]) -> Ratios:
            return np.repeat(np.fromiter(values, np.float64, len(asks)), lengths)[:, None]

        return cls(
            count=np.repeat(np.fromiter((ask.count for ask in asks), np.intp), lengths),
            memory_bytes=column(ask.memory_bytes for ask in asks),
            likely_bytes=column(ask.memory_bytes or ask.expected_bytes for ask in asks),
            utilization=column(ask.thresholds.utilization for ask in asks),
            memory=column(ask.thresholds.memory for ask in asks),
        )

    def grounds(self, estimates: "Estimates") -> "Grounds | None":
        """Return what an assessment shares with those of other requests; None where they differ."""
        if self.thresholds is None:
            return None
        return estimates, self.thresholds, int(self.count[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What tenants that the readings do not show are believed to use.

    Attributes:
        utilization: ratio that each adds to a shared device.
        mps_share_bytes: room of an MPS share, None for an even share of the device.
    """

    utilization: float
    mps_share_bytes: float | None


Grounds = tuple[Estimates, Thresholds, int]
"""What an assessment rests on besides the batch and the memory that the pod asks for: the number of
devices is the third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The devices of a batch as one pod sees them; matrices are in the shape of the slots.

    Attributes:
        landing: where the pod could land.
        utilization: assumed tenants counted in; a stale value has faded towards the threshold.
            It orders devices.
        peak: utilization of the last minutes, assumed tenants counted in: what says idle or busy.
        free_bytes: room for this pod beside what tenants declared and others hold; infinite where
            unknown.
        declared_room_bytes: likewise, but for tenants of which it is only guessed what they take.
        full_bytes: room for this pod if nobody else were there; infinite where unknown.
        asked_bytes: room that the pod asks for of each, for all the shares that it may get of it.
        headroom: ratio of memory free, faded likewise.
        idle_chance: 1 known to be idle, 0.95 presumed idle, 0 known to be busy, 0.5 unknown; stale
            lies between.
        is_idle: known to be idle, by fresh values.
        works: not excluded by ill health.
        working: per node, landing devices that work.
        offered: per node, landing devices that the kubelet may hand out, broken ones included.
        is_clean: works, and no process outside Kubernetes uses it, unless it is shared: such use is
            load there like that of any tenant.
        fits: clean, and has the room that the pod asks for as far as is known.
        holds: fits, and has the room that the pod will likely take: of shared devices an even share
            where no pod like it was measured.
        room: per node, share of the clean landing devices that hold the pod; where it is only
            expected what the pod takes, one with less room counts by the part of it that it has.
        suits: fits, and is idle.
        idle: per node, landing devices that suit, held ones taken off.
        chance: per node, chance that every device that the pod gets is idle and holds it.
        band_chance: likewise, but a shared device need not be idle: it must have some activity and
            memory left, `STILL_SHARED`. The band of the order is by this.
        is_sure: per node, whether all that the pod may get are known to suit.
        grounds: what all but `fits`, `holds` and what follows from them rests on besides the
            batch; None where requests differ.
    """

    landing: Landing
    utilization: Ratios
    peak: Ratios
    free_bytes: Ratios
    declared_room_bytes: Ratios
    full_bytes: Ratios
    asked_bytes: Ratios
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
    grounds: Grounds | None = None


def assess(batch: Batch, asks: Asks, estimates: Estimates) -> Assessment:
    """Return what the devices of each node are worth to a pod that asks this of it."""
    grounds = asks.grounds(estimates)
    room, load, reach = finish(_shared(batch, asks, estimates, grounds))
    landing = reach.landing
    asked_bytes = _asked_bytes(batch, asks, landing)
    fits = reach.is_clean & (room.free_bytes >= asked_bytes)
    room_share = _room_share(room.free_bytes, _likely_bytes(batch, asks, room), fits)
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
        peak=load.peak,
        free_bytes=room.free_bytes,
        declared_room_bytes=room.declared_room_bytes,
        full_bytes=room.full_bytes,
        asked_bytes=asked_bytes,
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


def assess_in_steps(batch: Batch, asks: Asks, estimates: Estimates) -> Steps[None]:
    """Work out in steps what `assess` then finds there: what one pod's request shares with others.

    Arguments as those of `assess`; `asks` is of one pod.
    """
    yield from _shared(batch, asks, estimates, asks.grounds(estimates))


def _shared(
    batch: Batch, asks: Asks, estimates: Estimates, grounds: Grounds | None
) -> Steps[tuple["_Room", "_Load", "_Reach"]]:
    memo = batch.memo
    room = memo.get(grounds and ("room", grounds[0]), lambda: _room(batch, estimates))
    yield
    load = memo.get(grounds and ("load", grounds[:2]), lambda: _load(batch, asks, estimates, room))
    yield
    reach = memo.get(grounds and ("reach", grounds[2]), lambda: _reach(batch, asks.count))
    return room, load, reach


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """Memory of each device, which no request makes another.

    Attributes:
        taken: ratio of it that tenants will use and that is not measured in use.
        promised: ratio of it that tenants declared or are guessed to take, measured or not.
        full_bytes: as in `Assessment`.
        free_bytes: as in `Assessment`.
        declared_room_bytes: likewise.
    """

    taken: Ratios
    promised: Ratios
    full_bytes: Ratios
    free_bytes: Ratios
    declared_room_bytes: Ratios


def _room(batch: Batch, estimates: Estimates) -> _Room:
    """Return the room of each device: what is free, less what is promised and not yet in use.

    A time-sliced device has room for what its size leaves beside all that its tenants declared,
    and beside what others hold of it, but never for more than is free. An MPS share has its cap,
    whatever is free: MPS keeps other shares to theirs, but no process outside Kubernetes to
    anything. A reading that has faded away says nothing of what is free. So it is with a
    whole device that a pod holds: this pod gets it only once that one is gone, and its memory with
    it; what no pod holds stays.
    """
    telemetry = batch.telemetry
    size = telemetry.memory_total_bytes
    share_bytes = size / batch.replicas[:, None]
    full_bytes = _full_bytes(batch, share_bytes, estimates)
    others = telemetry.others_bytes
    guessed = batch.assumed_shares * share_bytes + batch.guessed_bytes
    is_held = (batch.used > 0) & ~batch.is_shared[:, None]
    is_measured = (telemetry.memory_freshness > 0) & ~is_held
    # Others hold part of what is measured in use: only the rest can be of those that declared.
    in_use = np.where(is_measured, np.maximum(telemetry.memory_used * size - others, 0.0), 0.0)
    promised = np.maximum(batch.declared_bytes - in_use, 0.0)
    # What was seen in use fades, and what was not yet with it: both are of one reading.
    fading = np.maximum(batch.declared_bytes - in_use * telemetry.memory_freshness, 0.0)
    free = np.where(is_measured, telemetry.memory_free_bytes, full_bytes - others)
    room = np.minimum(free, full_bytes) - promised
    is_capped = batch.is_mps[:, None]
    known_size = np.where(size > 0, size, np.inf)
    capped = np.minimum(full_bytes, known_size - telemetry.foreign_bytes)
    return _Room(
        taken=(fading + guessed) / known_size,
        promised=(batch.declared_bytes + guessed) / known_size,
        full_bytes=full_bytes,
        free_bytes=np.maximum(np.where(is_capped, capped, room - guessed), 0.0),
        declared_room_bytes=np.maximum(np.where(is_capped, capped, room), 0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """How busy each device is beside the thresholds of a request; as in `Assessment`.

    Attributes:
        left_chance: chance that it is idle or, where it is shared, has enough left.
    """

    utilization: Ratios
    peak: Ratios
    headroom: Ratios
    idle_chance: Ratios
    left_chance: Ratios
    is_idle: Flags


def _load(batch: Batch, asks: Asks, estimates: Estimates, room: _Room) -> _Load:
    telemetry = batch.telemetry
    added: Ratios = estimates.utilization * batch.assumed.astype(np.float64)
    # Of tenants that get ready at least so much is believed, until they are seen at work.
    least: Ratios = estimates.utilization * batch.loading.astype(np.float64)
    believed = _Believed(
        peak=np.minimum(np.maximum(telemetry.peak, least) + added, 1.0),
        memory_used=np.minimum(telemetry.memory_used + room.taken, 1.0),
        added=least + added,
        promised=room.promised,
    )
    idle_chance, is_idle = _idleness(batch, believed, asks.utilization, asks.memory)
    left_chance = idle_chance
    if batch.is_shared.any():
        part = np.where(batch.is_shared, STILL_SHARED, 0.0)[:, None]
        limits = (asked + part * (1.0 - asked) for asked in (asks.utilization, asks.memory))
        left_chance, _ = _idleness(batch, believed, *limits)
    limit, neutral = asks.utilization, 1.0 - asks.memory
    # What only the estimate adds is no news that could grow stale: it does not fade.
    activity, filling = telemetry.freshness, telemetry.memory_freshness
    if telemetry.presumed.any():
        activity = np.maximum(activity, telemetry.presumed)
        filling = np.maximum(filling, telemetry.presumed)
    faded = limit + (telemetry.utilization - limit) * activity
    free = neutral + (1.0 - telemetry.memory_used - neutral) * filling
    return _Load(
        utilization=np.minimum(np.maximum(faded, least) + added, 1.0),
        peak=believed.peak,
        headroom=within(free - room.taken, 0.0, 1.0),
        idle_chance=idle_chance,
        left_chance=left_chance,
        is_idle=is_idle,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reach:
    """Where a number of devices could be landed on.

    Attributes:
        landing: likewise.
        works: as in `Assessment`.
        working: likewise.
        is_clean: likewise.
        offered: likewise.
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
class _Believed:
    """What idleness is judged by, per device.

    Attributes:
        peak: utilization of the last minutes, assumed tenants counted in.
        memory_used: ratio of memory, likewise.
        added: the part of the utilization that is only assumed.
        promised: ratio of memory that tenants declared or are guessed to take, measured or not.
    """

    peak: Ratios
    memory_used: Ratios
    added: Ratios
    promised: Ratios


def _idleness(
    batch: Batch, believed: _Believed, utilization: Ratios, memory: Ratios
) -> tuple[Ratios, Flags]:
    """Return how likely each device is below two limits, and whether that is known.

    That takes both signals; to be above takes one. Either fades with the age of what it rests on;
    what is assumed alone makes a device busy does not.
    """
    telemetry = batch.telemetry
    is_calm = believed.peak < utilization
    is_roomy = believed.memory_used < memory
    is_filled = (believed.added > 0) & (believed.added >= utilization)
    is_full = (believed.promised > 0) & (believed.promised >= memory)
    busy = np.maximum(
        np.where(is_calm, 0.0, np.maximum(telemetry.freshness, is_filled)),
        np.where(is_roomy, 0.0, np.maximum(telemetry.memory_freshness, is_full)),
    )
    known = np.minimum(telemetry.freshness, telemetry.memory_freshness)
    if telemetry.presumed.any():
        known = np.maximum(known, PRESUMED * telemetry.presumed)
    idle = np.where(is_calm & is_roomy, known, 0.0)
    return UNKNOWN + UNKNOWN * (idle - busy), idle >= 1.0


def _asked_bytes(batch: Batch, asks: Asks, landing: Landing) -> Ratios:
    """Return the room that a pod asks for of each device: as much for each share that it gets.

    Several shares may be of one device. Under MPS each has its own cap.
    """
    if (asks.count <= 1).all():
        return asks.memory_bytes
    shares = -(-asks.count // np.maximum(landing.size, 1))
    is_capped = batch.is_mps | ~batch.is_shared
    return asks.memory_bytes * np.where(is_capped, 1, shares)[:, None]


def _likely_bytes(batch: Batch, asks: Asks, room: _Room) -> Ratios:
    """Return the room that a pod will likely take of each device."""
    if not np.isnan(asks.likely_bytes).any():
        return asks.likely_bytes
    share_bytes = batch.telemetry.memory_total_bytes / batch.replicas[:, None]
    even = MOST_OF_SHARE * np.minimum(share_bytes, room.full_bytes)
    of_unknown = np.where(batch.is_shared[:, None], even, 0.0)
    return np.where(np.isnan(asks.likely_bytes), of_unknown, asks.likely_bytes)


def _room_share(free_bytes: Ratios, likely_bytes: Ratios, fits: Flags) -> Ratios:
    """Return how much of a pod each device holds: all of it where it has the room.

    What is expected of a pod is the most that those like it took. With less room it may still fit,
    the more likely the more there is. Room that the pod asks for is not expected: it fits or not.
    """
    share = np.minimum(free_bytes / np.maximum(likely_bytes, 1.0), 1.0)
    held: Ratios = np.where(fits, np.where(free_bytes >= likely_bytes, 1.0, share), 0.0)
    return held


def _full_bytes(batch: Batch, share_bytes: Ratios, estimates: Estimates) -> Ratios:
    """Return the room that a tenant has at best: under MPS a share has its cap.

    A cap that is set is known though the size of the device is not, and is no more than that.
    """
    size = batch.telemetry.memory_total_bytes
    known_size = np.where(size > 0, size, np.inf)
    cap = share_bytes if estimates.mps_share_bytes is None else estimates.mps_share_bytes
    known_cap = np.minimum(np.where(cap > 0, cap, np.inf), known_size)
    return np.where(batch.is_mps[:, None], known_cap, known_size)


def _chance(chances: Ratios, reach: _Reach, missing: Rows) -> Ratios:
    """Return the chance that every device which a pod is handed suits.

    Of the devices that are held although it is unknown which, each is as likely to be good as the
    others: they change no odds.

    Args:
        chances: that each device suits, 0 where it cannot be landed on.
        reach: where the pod could land.
        missing: so many of the devices that it needs are held by our own count. kube-scheduler
            says that there is room: what comes free is unknown.
    """
    chance = chance_of_all(chances, reach.offered, reach.landing.needed)
    return chance * UNKNOWN**missing if missing.any() else chance
