"""From what the sources said to what is believed: freshness, cross-checks, three states."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from extender.core.causes import Sign, renumber
from extender.core.columns import known, within
from extender.core.health import HealthColumns, judge
from extender.core.policy import Foreign, Freshness, Policy
from extender.core.readings import Column, Signal
from extender.core.snapshot import Flags, Ratios, Rows, Telemetry
from extender.core.stress import stress

IDLE_POWER_SHARE = 0.30
"""Share of its power limit that a device is taken to draw at rest until that was seen: a loaded but
idle H200 drew 126 to 136 of 700 W, at 30 % duty 350 W."""

MOST_IDLE_POWER_SHARE = 0.60
"""No device draws more than this share of its limit at rest: idle ones draw 5 to 60 %."""

UTILIZATION = (Signal.GPU_UTILIZATION, Signal.GRAPHICS_ACTIVE)
"""What a device's activity is told by, if the source tells it at all."""

OTHER_ACTIVITY = (
    Signal.SM_ACTIVE,
    Signal.TENSOR_ACTIVE,
    Signal.DRAM_ACTIVE,
    Signal.MEMORY_COPY_UTILIZATION,
)
"""Other evidence of it."""

MEASURED = (Signal.GRAPHICS_ACTIVE, Signal.GPU_UTILIZATION, *OTHER_ACTIVITY, Signal.POWER)
"""All of it; of those that say the same, the first is told to people. Power stands last: what it
adds only orders devices."""

_CALLS_IT_IDLE, _CALLS_IT_BUSY = 0.05, 0.25  # far enough apart that noise is no disagreement

BOARD_POWER_WATTS: Mapping[str, float] = {
    "b200": 1000, "h200": 700, "h100 pcie": 350, "h100": 700, "h800": 700, "h20": 500,
    "gh200": 900, "a100 pcie": 300, "a100": 400, "a800": 400, "v100 pcie": 250, "v100": 300,
    "l40s": 350, "l40": 300, "l4": 72, "a10g": 300, "a10": 150, "a30": 165, "a40": 300,
    "a16": 250, "a2": 60, "t4": 70, "p100": 300, "p40": 250, "rtx 4090": 450, "rtx 3090": 350,
}  # fmt: skip
"""Board power by words of the model, for exporters that do not tell the limit. More specific
words come first. Source: NVIDIA's data sheets."""


def board_power(model: str) -> float:
    """Return the board power of a normalized model in watts, NaN where unknown.

    Example:
        >>> board_power("nvidia h100 80gb hbm3")
        700.0
    """
    for words, watts in BOARD_POWER_WATTS.items():
        if all(f" {word} " in f" {model} " for word in words.split()):
            return float(watts)
    return float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """How busy devices are, by one reading; ratios, NaN where no activity was read at all.

    Attributes:
        measured: by the signals that measure activity: what says idle or busy.
        agreed: what at least two of the signals say, power being one: what says in use. One alone
            may be wrong: GPU_UTIL stays at 100 % on some cards that do nothing.
        busiest: the busiest evidence, power included: what orders devices. Power says how a device
            compares with itself; cards at rest draw anything from 5 to 60 % of their limit.
        disagree: other evidence calls a device busy that its utilization calls idle.
    """

    measured: Column
    agreed: Column
    busiest: Column
    disagree: Flags


def activity(
    columns: Mapping[Signal, Column], board_watts: Column, rest_watts: Column | None = None
) -> Activity:
    """Return how busy each device is, and where the sources disagree.

    The busiest evidence wins: one reading of GPU_UTIL is an alias of the load, and says 1 % at a
    true 30 % for seconds on end, while power and memory traffic tell.

    Args:
        columns: what was read; NaN where missing.
        board_watts: power limit by model, for devices whose source does not tell it.
        rest_watts: what each device was seen to draw at rest, NaN where it was not.
    """
    missing = np.full(len(board_watts), np.nan)

    def column(signal: Signal) -> Column:
        return columns.get(signal, missing)

    graphics = column(Signal.GRAPHICS_ACTIVE)
    primary = np.where(np.isnan(graphics), column(Signal.GPU_UTILIZATION), graphics)
    others, agreed = (
        column(Signal.GPU_UTILIZATION),
        np.minimum(graphics, column(Signal.GPU_UTILIZATION)),
    )
    most = np.fmax(graphics, others)
    for signal in OTHER_ACTIVITY:
        if signal in columns:
            agreed, most = _agree(agreed, most, columns[signal])
            others = np.fmax(others, columns[signal])
    limit = column(Signal.POWER_LIMIT)
    limit = np.where(limit > 0, limit, board_watts)
    by_power = _by_power(column(Signal.POWER), limit, missing if rest_watts is None else rest_watts)
    measured = np.fmax(primary, others)
    busiest = np.where(np.isnan(measured), np.nan, np.fmax(measured, by_power))
    return Activity(
        measured=within(measured, 0.0, 1.0),
        agreed=within(_agree(agreed, most, by_power)[0], 0.0, 1.0),
        busiest=within(busiest, 0.0, 1.0),
        disagree=(primary < _CALLS_IT_IDLE) & (np.fmax(others, by_power) >= _CALLS_IT_BUSY),
    )


def _agree(agreed: Column, most: Column, told: Column) -> tuple[Column, Column]:
    """Return the second highest and the highest value with one more signal; NaN is no value."""
    return np.fmax(agreed, np.minimum(most, told)), np.fmax(most, told)


def _by_power(watts: Column, limit: Column, rest_watts: Column) -> Column:
    """Return how far devices are from rest to their power limit, NaN where unknown."""
    seen = np.minimum(rest_watts, limit * MOST_IDLE_POWER_SHARE)
    rest = np.where(np.isnan(seen), limit * IDLE_POWER_SHARE, seen)
    return within((watts - rest) / (limit - rest), 0.0, 1.0)


def agreed_activity(reading: Mapping[str, float]) -> float | None:
    """Return the activity of a device as `Activity.agreed` has it; None where one signal tells it.

    Args:
        reading: what was read of it by the name of a signal, without what is missing.

    Example:
        >>> agreed_activity({Signal.GPU_UTILIZATION: 1.0, Signal.MEMORY_COPY_UTILIZATION: 0.2})
        0.2
        >>> agreed_activity({Signal.GPU_UTILIZATION: 1.0})
    """
    told = [reading[signal] for signal in MEASURED[:-1] if signal in reading]
    watts, limit = reading.get(Signal.POWER), reading.get(Signal.POWER_LIMIT, 0.0)
    if watts is not None and limit > 0:
        rest = limit * IDLE_POWER_SHARE
        told.append(min(max((watts - rest) / (limit - rest), 0.0), 1.0))
    return sorted(told)[-2] if len(told) > 1 else None


def busiest_signal(
    reading: Mapping[Signal, float], rest_watts: float = float("nan")
) -> Signal | None:
    """Return which signal tells a device's activity, as `activity` has it; None where none does.

    Args:
        reading: what was read of it, without what is missing; the power limit is known, or the
            model's.
        rest_watts: what it was seen to draw at rest, NaN where it was not.

    Example:
        >>> busiest_signal({Signal.GPU_UTILIZATION: 0.01, Signal.SM_ACTIVE: 0.3})
        <Signal.SM_ACTIVE: 'sm_active_ratio'>
    """
    told = {signal: reading[signal] for signal in MEASURED[:-1] if signal in reading}
    if not told:
        return None
    limit = reading.get(Signal.POWER_LIMIT, 0.0)
    if limit > 0 and Signal.POWER in reading:
        watts = np.array([reading[Signal.POWER], limit, rest_watts])[:, None]
        told[Signal.POWER] = float(_by_power(*watts)[0])
    return max(told, key=told.__getitem__)


def memory(columns: Mapping[Signal, Column], label_total: Column) -> tuple[Column, Column, Column]:
    """Return used, free and total memory of each device in bytes, NaN where unknown.

    Used excludes what the driver reserves. Without a total, it is used + free + reserved; without
    free, total - used - reserved; the label's total stands in where nothing else tells. A device
    that says it has no memory at all, neither used nor free, says nothing.
    """
    missing = np.full(len(label_total), np.nan)

    def column(signal: Signal) -> Column:
        return columns.get(signal, missing)

    used, free = column(Signal.MEMORY_USED), column(Signal.MEMORY_FREE)
    is_blank = used + free <= 0
    used, free = np.where(is_blank, np.nan, used), np.where(is_blank, np.nan, free)
    reserved = known(column(Signal.MEMORY_RESERVED))
    total = column(Signal.MEMORY_TOTAL)
    total = np.where(total > 0, total, used + free + reserved)
    total = np.where(total > 0, total, label_total)
    free = np.where(np.isnan(free), np.maximum(total - used - reserved, 0.0), free)
    used = np.where(np.isnan(used), np.maximum(total - free - reserved, 0.0), used)
    return used, free, total


def fade(age_seconds: Column, freshness: Freshness) -> Ratios:
    """Return how much values of an age count: 1 while fresh, then falling to 0.

    Example:
        >>> fade(np.array([60.0, 270.0, 1000.0, np.nan]), Freshness()).tolist()
        [1.0, 0.5, 0.0, 0.0]
    """
    beyond = (age_seconds - freshness.max_age_seconds) / max(freshness.fade_seconds, 1e-9)
    return known(within(1.0 - beyond, 0.0, 1.0))


def plausible(values: Column) -> Column:
    """Return the values with those that cannot be as NaN: negative or infinite ones.

    Example:
        >>> plausible(np.array([0.5, -1.0, np.inf, np.nan])).tolist()
        [0.5, nan, nan, nan]
    """
    return np.where(np.isfinite(values) & (values >= 0), values, np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is held of each device between two readings; one row per device.

    Attributes:
        columns: the last good values; NaN where missing.
        measured_at: when anything of it was last measured, seconds since the epoch, NaN where
            never.
        activity_at: when what tells of its activity was measured, likewise.
        memory_at: when what tells of its memory was measured, likewise.
        freed_at: when its last tenant ended; readings from before it are nobody's.
        others_bytes: the part of the memory that was last seen in use and is not of pods that
            declared theirs, NaN where unknown.
        foreign_bytes: the part of that which no pod holds, likewise.
        label_total_bytes: memory by the node's labels or earlier readings, NaN where unknown.
        board_watts: power limit by model, NaN where unknown.
        rest_watts: what it was seen to draw at rest, NaN where it was not.
        window_mean: utilization since the tenants last changed, power included.
        window_spread: its standard deviation.
        window_count: how many readings that is.
        recent_mean: measured activity of the last minutes, likewise.
        recent_count: how many readings that is.
        has_tenants: pods hold it.
        is_unheld: no pod is seen on it, and mapping and API agree.
        is_in_use: readings showed use, enough of them since its tenants last changed.
        is_foreign: so they did while no pod can have held it.
        was_used: the last readings of it while no pod held it showed use, or any activity.
        xid_since: when the XID was first seen, NaN where there is none.
        xid_at: when it was last told, seconds since the epoch, likewise.
        recovery_at: when the recovery action was last told, NaN where it never was.
        is_lost: the node should have it and no source sees it, though it sees its siblings.
        withdrawn: devices that its node has of its kind and the kubelet does not offer.
        node_row: row of its node, for what concerns all devices of a node.
    """

    columns: Mapping[Signal, Column]
    measured_at: Column
    activity_at: Column
    memory_at: Column
    freed_at: Column
    others_bytes: Column
    foreign_bytes: Column
    label_total_bytes: Column
    board_watts: Column
    rest_watts: Column
    window_mean: Ratios
    window_spread: Ratios
    window_count: Rows
    recent_mean: Ratios
    recent_count: Rows
    has_tenants: Flags
    is_unheld: Flags
    is_in_use: Flags
    is_foreign: Flags
    was_used: Flags
    xid_since: Column
    xid_at: Column
    recovery_at: Column
    is_lost: Flags
    withdrawn: Rows
    node_row: Rows


def shows_use(used_bytes: Column, agreed: Column, foreign: Foreign) -> Flags:
    """Tell which devices are in use, by one reading.

    Args:
        used_bytes: memory in use, NaN where unknown.
        agreed: activity as `Activity.agreed` has it.
        foreign: from where on it is use.
    """
    return (used_bytes > foreign.memory_bytes) | (agreed > foreign.utilization)


REST_BELOW = 0.02
"""A device whose measured activity is below this ratio, now and on average, is at rest."""

REST_READINGS = 6
"""So many readings say so: a device between two steps of its work is not at rest, and GPU_UTIL
read now and then can miss a load."""

_REST_STEP = 0.1
"""Share of the way to a reading: one that is far off is no rest, dozens that agree are."""


def learn_rest(
    rest_watts: Column, watts: Column, measured: Column, recent: tuple[Ratios, Rows]
) -> Column:
    """Return what devices draw at rest, with what one more reading says of it.

    Args:
        rest_watts: what was seen of it, NaN where nothing was.
        watts: power now, NaN where missing.
        measured: activity now.
        recent: mean of the activity of the last minutes, and of how many readings.
    """
    mean, count = recent
    is_at_rest = (measured < REST_BELOW) & (mean < REST_BELOW) & (count >= REST_READINGS)
    is_at_rest &= ~np.isnan(watts)
    before = np.where(np.isnan(rest_watts), watts, rest_watts)
    return np.where(is_at_rest, before + _REST_STEP * (watts - before), rest_watts)


def step_streak(streak: Rows, verdict: Flags, shown: Flags, readings: int) -> tuple[Rows, Flags]:
    """Count one more reading; a verdict falls and is lifted by so many readings that agree.

    Args:
        streak: readings that spoke for the verdict, less those that spoke against it.
        verdict: as it stands.
        shown: whether this reading speaks for it.
        readings: how many it takes.
    """
    after = np.clip(np.where(shown, streak + 1, streak - 1), 0, readings)
    return after, (after >= readings) | (verdict & (after > 0))


def believe(evidence: Evidence, policy: Policy, now: float) -> tuple[Telemetry, Flags]:
    """Return what is believed of each device, and where sources disagree.

    Args:
        evidence: what is held of each device.
        policy: the settings.
        now: seconds since the epoch.
    """
    seen = activity(evidence.columns, evidence.board_watts, evidence.rest_watts)
    busy, measured = seen.busiest, seen.measured
    used, free, total = memory(evidence.columns, evidence.label_total_bytes)
    by_age = fade(now - evidence.measured_at, policy.freshness)

    def fresh(measured_at: Column) -> Ratios:
        counts = measured_at > evidence.freed_at
        return np.where(counts, fade(now - measured_at, policy.freshness), 0.0)

    activity_fresh = np.where(np.isnan(busy), 0.0, fresh(evidence.activity_at))
    memory_fresh = np.where(np.isnan(used) | np.isnan(total), 0.0, fresh(evidence.memory_at))
    is_own = (evidence.measured_at > evidence.freed_at) & (by_age > 0)
    latest = np.where(activity_fresh > 0, known(busy), 0.0)
    is_foreign = evidence.is_foreign & evidence.is_unheld & (by_age > 0)
    has_window = evidence.has_tenants & (activity_fresh > 0)
    has_hour = has_window & (evidence.window_count > 1)
    # Foreign use comes and goes as a tenant's work does, and counts from when it comes: a pause
    # makes no device idle.
    past = np.where(is_foreign & (activity_fresh > 0), evidence.window_mean, 0.0)
    now_busy = np.where(activity_fresh > 0, known(measured), 0.0)
    has_recent = (has_window | is_foreign) & (activity_fresh > 0) & (evidence.recent_count > 1)
    recent = np.where(has_recent, evidence.recent_mean, 0.0)
    verdict, is_out = _judge(evidence, policy, now, by_age)
    total_known = known(total)
    used_ratio = known(used) / np.maximum(total_known, 1.0)
    telemetry = Telemetry(
        utilization=np.where(has_hour, evidence.window_mean, np.maximum(latest, past)),
        latest=latest,
        peak=np.maximum(now_busy, recent),
        spread=np.where(has_hour, evidence.window_spread, 0.0),
        freshness=activity_fresh,
        memory_used=np.where(memory_fresh > 0, within(used_ratio, 0.0, 1.0), 0.0),
        memory_free_bytes=np.where(memory_fresh > 0, known(free), 0.0),
        memory_total_bytes=total_known,
        memory_freshness=memory_fresh,
        presumed=_presumed(evidence, policy, now, by_age),
        others_bytes=known(evidence.others_bytes),
        foreign_bytes=known(evidence.foreign_bytes),
        stress=stress(evidence.columns, len(busy), policy.health) * is_own,
        penalty=verdict.penalty,
        is_excluded=verdict.is_excluded,
        is_excluded_multi=verdict.is_excluded_multi,
        is_out=is_out,
        is_foreign=is_foreign,
        is_in_use=evidence.is_in_use & (by_age > 0),
        cause=verdict.cause,
    )
    return telemetry, seen.disagree


def _presumed(evidence: Evidence, policy: Policy, now: float, by_age: Ratios) -> Ratios:
    """Return how much it counts that devices were just freed, and are idle as they were before.

    That fades as a reading would that was measured when they were freed; of a device that its
    source has left, nothing is presumed.
    """
    may_be = ~(evidence.was_used | evidence.has_tenants)
    may_be &= ~(evidence.measured_at > evidence.freed_at)
    since = fade(now - evidence.freed_at, policy.freshness)
    return np.where(may_be, np.minimum(since, by_age), 0.0)


def believe_again(
    before: Telemetry, rows: Rows, evidence: Evidence, policy: Policy, now: float
) -> Telemetry:
    """Return `before` with some devices believed anew.

    Args:
        before: what was believed of each device.
        rows: the devices; whole nodes, for a device may speak against its siblings.
        evidence: what is held of these.
        policy: the settings.
        now: seconds since the epoch.
    """
    part, _ = believe(evidence, policy, now)
    return before.with_rows(rows, replace(part, cause=renumber(part.cause, rows)))


def _judge(
    evidence: Evidence, policy: Policy, now: float, by_age: Ratios
) -> tuple[HealthColumns, Flags]:
    """Return what speaks against each device, and which are out as `Telemetry` has it.

    Its node's and its siblings' word is included. A verdict lasts as long as the device would be
    remembered: telemetry that has been gone for longer locks nobody out.
    """
    is_old = now - evidence.measured_at >= policy.freshness.forget_seconds
    columns = evidence.columns
    if is_old.any():
        columns = {signal: np.where(is_old, np.nan, column) for signal, column in columns.items()}
    columns = _without_old_all_clear(columns, evidence, policy.freshness)
    health, node_row = policy.health, evidence.node_row
    newest = np.zeros(int(node_row.max(initial=0)) + 1)
    np.maximum.at(newest, node_row, by_age)
    # Silent among siblings that speak: perhaps it has fallen off the bus.
    is_behind = ~np.isnan(evidence.measured_at) & (newest[node_row] >= 1)
    is_silent = is_behind & (by_age <= 0)
    is_missing = evidence.is_lost | is_silent
    is_recent = now - evidence.xid_since < health.xid_seconds
    is_suspect = is_missing | (evidence.withdrawn > 0)
    verdict = judge(columns, len(by_age), health, is_recent, is_suspect)
    verdict.exclude_siblings(node_row)
    verdict.apply(health.missing_device, is_missing, Sign.MISSING)
    # Where as many devices of the node are known to be out, those are what the kubelet withdrew.
    out = np.bincount(node_row, weights=verdict.is_excluded | is_missing)[node_row]
    verdict.apply(health.not_offered, evidence.withdrawn > out, Sign.NOT_OFFERED)
    # Beside the kubelet's word a device need not be silent for long.
    return verdict, verdict.is_excluded | is_missing | (is_behind & (by_age < 1))


def _without_old_all_clear(
    columns: Mapping[Signal, Column], evidence: Evidence, freshness: Freshness
) -> Mapping[Signal, Column]:
    """Return the columns without recovery actions that said that there is nothing to do, long ago.

    Where the XID is told on and the action is not, as by a node agent that hangs or is gone, that
    says nothing of an XID that came since.
    """
    recovery = columns.get(Signal.RECOVERY_ACTION)
    if recovery is None:
        return columns
    is_old = evidence.xid_at - evidence.recovery_at > freshness.max_age_seconds
    told = np.where(is_old & (recovery == 0), np.nan, recovery)
    return {**columns, Signal.RECOVERY_ACTION: told}
