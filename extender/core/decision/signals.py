"""Turn raw device readings into `Telemetry`: age-weighted values, cross-checked, health judged."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from extender.core.decision.health import HealthColumns, Sign, judge, renumber, stress
from extender.core.devices.readings import Column, Signal
from extender.core.nodes.snapshot import Flags, Ratios, Rows, Telemetry, as_ratios, nan_to_zero
from extender.core.policy import Foreign, Freshness, Policy

_IDLE_POWER_SHARE = 0.30
"""Assumed idle power as a share of the power limit, used until idle power was measured. A loaded
but idle H200 drew 126 to 136 of 700 W, and 350 W at 30 % duty."""

_CERTAINLY_WORKING_SHARE = 0.44
"""Power as a share of the power limit that confirms activity, used until idle power was measured.
Idle T4, A10 and L4 cards draw 40 to 42 %, and some report 100 % GPU_UTIL while idle."""

_MOST_IDLE_POWER_SHARE = 0.60
"""Upper bound of idle power as a share of the power limit: idle devices draw 5 to 60 %."""

UTILIZATION = (Signal.GPU_UTILIZATION, Signal.GRAPHICS_ACTIVE)
"""Primary signals of a device's activity."""

OTHER_ACTIVITY = (
    Signal.SM_ACTIVE,
    Signal.TENSOR_ACTIVE,
    Signal.DRAM_ACTIVE,
    Signal.MEMORY_COPY_UTILIZATION,
)
"""Secondary signals of a device's activity."""

MEASURED = (Signal.GRAPHICS_ACTIVE, Signal.GPU_UTILIZATION, *OTHER_ACTIVITY, Signal.POWER)
"""All activity signals, best to show to users first. Power comes last: it only orders devices."""

_CALLS_IT_IDLE, _CALLS_IT_BUSY = 0.05, 0.25  # far enough apart for noise

_BOARD_POWER_WATTS: Mapping[str, float] = {
    "b200": 1000, "h200": 700, "h100 pcie": 350, "h100": 700, "h800": 700, "h20": 500,
    "gh200": 900, "a100 pcie": 300, "a100": 400, "a800": 400, "v100 pcie": 250, "v100": 300,
    "l40s": 350, "l40": 300, "l4": 72, "a10g": 300, "a10": 150, "a30": 165, "a40": 300,
    "a16": 250, "a2": 60, "t4": 70, "p100": 300, "p40": 250, "rtx 4090": 450, "rtx 3090": 350,
}  # fmt: skip
"""Board power in watts by words of the model name, for exporters that report no power limit. More
specific words come first. Source: NVIDIA's data sheets."""


def board_power(model: str) -> float:
    """Return the board power of a GPU model in watts, or NaN for an unknown model.

    Args:
        model: model name, normalized by `normalize_model`.

    Example:
        >>> board_power("nvidia h100 80gb hbm3")
        700.0
    """
    for words, watts in _BOARD_POWER_WATTS.items():
        if all(f" {word} " in f" {model} " for word in words.split()):
            return float(watts)
    return float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Activity of each device at one reading: ratios from 0 to 1, NaN without activity signals.

    Attributes:
        measured: the highest activity signal without power. Decides between idle and busy.
        agreed: the second highest value among all signals and power. Decides whether a device is in
            use. A single signal may be wrong: some cards report 100 % GPU_UTIL while idle.
        busiest: the highest value, power included. Only orders devices: idle cards draw 5 to 60 %
            of their power limit.
        disagree: whether the primary signal is idle while another signal is busy.
    """

    measured: Column
    agreed: Column
    busiest: Column
    disagree: Flags


def activity(
    columns: Mapping[Signal, Column], board_watts: Column, rest_watts: Column | None = None
) -> Activity:
    """Compute the activity of each device from its signals, and flag contradicting signals.

    The highest signal wins: GPU_UTIL aliases with the load and can read 1 % for seconds at a true
    load of 30 %, while power and memory traffic show that load.

    Args:
        columns: values by signal; NaN for a missing value.
        board_watts: power limit of the model in watts, for devices that report no limit.
        rest_watts: measured idle power of each device in watts, NaN if not yet measured.
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
    rest_watts = missing if rest_watts is None else rest_watts
    by_power = _by_power(column(Signal.POWER), limit, rest_watts)
    confirming = _by_power(column(Signal.POWER), limit, rest_watts, _CERTAINLY_WORKING_SHARE)
    measured = np.fmax(primary, others)
    busiest = np.where(np.isnan(measured), np.nan, np.fmax(measured, by_power))
    return Activity(
        measured=as_ratios(measured),
        agreed=as_ratios(_agree(agreed, most, confirming)[0]),
        busiest=as_ratios(busiest),
        disagree=(primary < _CALLS_IT_IDLE) & (np.fmax(others, by_power) >= _CALLS_IT_BUSY),
    )


def _agree(agreed: Column, most: Column, value: Column) -> tuple[Column, Column]:
    """Return the second highest and the highest value after adding one signal; NaN is skipped."""
    return np.fmax(agreed, np.minimum(most, value)), np.fmax(most, value)


def _by_power(
    watts: Column, limit: Column, rest_watts: Column, unseen: float = _IDLE_POWER_SHARE
) -> Column:
    """Return the power draw above idle power, as a share of the range up to the power limit.

    Args:
        rest_watts: measured idle power, NaN if not yet measured.
        unseen: idle power as a share of the limit if it was not measured.
    """
    seen = np.minimum(rest_watts, limit * _MOST_IDLE_POWER_SHARE)
    rest = np.where(np.isnan(seen), limit * unseen, seen)
    return as_ratios((watts - rest) / (limit - rest))


def agreed_activity(reading: Mapping[str, float]) -> float | None:
    """Return the second highest activity value of one device, or None with fewer than two values.

    The scalar version of `Activity.agreed`.

    Args:
        reading: value by signal name, without missing values.

    Example:
        >>> agreed_activity({Signal.GPU_UTILIZATION: 1.0, Signal.MEMORY_COPY_UTILIZATION: 0.2})
        0.2
        >>> agreed_activity({Signal.GPU_UTILIZATION: 1.0})
    """
    values = [reading[signal] for signal in MEASURED[:-1] if signal in reading]
    watts, limit = reading.get(Signal.POWER), reading.get(Signal.POWER_LIMIT, 0.0)
    if watts is not None and limit > 0:
        rest = limit * _CERTAINLY_WORKING_SHARE
        values.append(min(max((watts - rest) / (limit - rest), 0.0), 1.0))
    return sorted(values)[-2] if len(values) > 1 else None


def busiest_signal(
    reading: Mapping[Signal, float], rest_watts: float = float("nan")
) -> Signal | None:
    """Return the signal with the highest activity of one device, or None if it has no such signal.

    Args:
        reading: value by signal, without missing values. Includes a power limit: the device's own,
            or else the model's.
        rest_watts: measured idle power in watts, NaN if not yet measured.

    Example:
        >>> busiest_signal({Signal.GPU_UTILIZATION: 0.01, Signal.SM_ACTIVE: 0.3})
        <Signal.SM_ACTIVE: 'sm_active_ratio'>
    """
    values = {signal: reading[signal] for signal in MEASURED[:-1] if signal in reading}
    if not values:
        return None
    limit = reading.get(Signal.POWER_LIMIT, 0.0)
    if limit > 0 and Signal.POWER in reading:
        watts = np.array([reading[Signal.POWER], limit, rest_watts])[:, None]
        values[Signal.POWER] = float(_by_power(*watts)[0])
    return max(values, key=values.__getitem__)


def memory(columns: Mapping[Signal, Column], label_total: Column) -> tuple[Column, Column, Column]:
    """Return used, free and total memory of each device in bytes, NaN if unknown.

    Used memory excludes the part that the driver reserves. A missing total is used + free +
    reserved, else the total from the node's labels. A missing free value is total - used -
    reserved. A device that reports 0 bytes used and 0 free counts as missing.

    Args:
        columns: values by signal; NaN for a missing value.
        label_total: total memory from the node's labels in bytes, NaN if unknown.
    """
    missing = np.full(len(label_total), np.nan)

    def column(signal: Signal) -> Column:
        return columns.get(signal, missing)

    used, free = column(Signal.MEMORY_USED), column(Signal.MEMORY_FREE)
    is_blank = used + free <= 0
    used, free = np.where(is_blank, np.nan, used), np.where(is_blank, np.nan, free)
    reserved = nan_to_zero(column(Signal.MEMORY_RESERVED))
    total = column(Signal.MEMORY_TOTAL)
    total = np.where(total > 0, total, used + free + reserved)
    total = np.where(total > 0, total, label_total)
    free = np.where(np.isnan(free), np.maximum(total - used - reserved, 0.0), free)
    used = np.where(np.isnan(used), np.maximum(total - free - reserved, 0.0), used)
    return used, free, total


def _fade(age_seconds: Column, freshness: Freshness) -> Ratios:
    """Return the weight of values by age: 1 while fresh, then falling linearly to 0.

    Args:
        age_seconds: age of each value, NaN for a missing value, whose weight is 0.
        freshness: when values start to fade, and for how long.

    Example:
        >>> _fade(np.array([60.0, 270.0, 1000.0, np.nan]), Freshness()).tolist()
        [1.0, 0.5, 0.0, 0.0]
    """
    beyond = (age_seconds - freshness.max_age_seconds) / freshness.fade_seconds
    return nan_to_zero(as_ratios(1.0 - beyond))


def plausible(values: Column) -> Column:
    """Replace impossible values, negative or infinite, by NaN.

    Example:
        >>> plausible(np.array([0.5, -1.0, np.inf, np.nan])).tolist()
        [0.5, nan, nan, nan]
    """
    return np.where(np.isfinite(values) & (values >= 0), values, np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalEvidence:
    """Raw data of each device from which `estimate` computes telemetry; one row per device.

    Times are in seconds since the epoch, NaN if the event never happened.

    Attributes:
        columns: last valid value of each signal; NaN if missing.
        measured_at: time of the newest value of any signal.
        activity_at: time of the newest activity value.
        memory_at: time of the newest memory value.
        freed_at: when the last tenant ended; older readings describe that tenant.
        others_bytes: memory in use by processes other than pods that declared their memory, NaN if
            unknown.
        foreign_bytes: the part of `others_bytes` that belongs to no pod, NaN if unknown.
        label_total_bytes: total memory from node labels or earlier readings, NaN if unknown.
        board_watts: power limit of the model in watts, NaN if unknown.
        rest_watts: measured idle power in watts, NaN if not yet measured.
        hour_mean: mean utilization of the last hour since the tenants last changed, power included.
        hour_count: number of readings behind `hour_mean`.
        next_hour: forecast of the same utilization.
        recent_mean: mean measured activity of the last minutes since the tenants last changed.
        recent_count: number of readings behind `recent_mean`.
        has_tenants: pods hold the device.
        is_unheld: no pod holds the device; device holders and API server agree.
        is_in_use: enough readings since the tenants last changed showed use.
        is_foreign: enough readings showed use while no pod can have held the device.
        was_used: the last readings without a tenant showed use or any activity.
        xid_since: when the current XID first appeared, NaN without an XID.
        xid_at: when the XID was last reported.
        recovery_at: when the recovery action was last reported.
        is_lost: the node should have the device, and only its siblings appear in telemetry.
        withdrawn: number of the node's devices of this kind that the kubelet does not offer.
        node_row: number of the device's node; groups the devices of a node.
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
    hour_mean: Ratios
    hour_count: Column
    next_hour: Ratios
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
    """Flag the devices that one reading shows in use.

    Args:
        used_bytes: memory in use, NaN if unknown.
        agreed: activity, as in `Activity.agreed`.
        foreign: thresholds of memory and activity above which a device is in use.
    """
    return (used_bytes > foreign.memory_bytes) | (agreed > foreign.utilization)


_REST_BELOW = 0.02
"""A device is at rest if its measured activity is below this ratio, both now and on average."""

_REST_READINGS = 6
"""Readings needed before a device counts as at rest: a device between two steps of its work is not
at rest, and a single GPU_UTIL reading can miss a load."""

_REST_STEP = 0.1
"""Weight of one reading in the moving average of idle power: dozens of readings must agree."""


def learn_rest(
    rest_watts: Column, watts: Column, measured: Column, recent: tuple[Ratios, Rows]
) -> Column:
    """Return the idle power of each device, updated with one more reading.

    Args:
        rest_watts: idle power so far, NaN if not yet measured.
        watts: power now, NaN if missing.
        measured: activity now.
        recent: mean activity of the last minutes, and the number of readings behind the mean.
    """
    mean, count = recent
    is_at_rest = (measured < _REST_BELOW) & (mean < _REST_BELOW) & (count >= _REST_READINGS)
    is_at_rest &= ~np.isnan(watts)
    before = np.where(np.isnan(rest_watts), watts, rest_watts)
    return np.where(is_at_rest, before + _REST_STEP * (watts - before), rest_watts)


def step_streak(streak: Rows, verdict: Flags, shown: Flags, readings: int) -> tuple[Rows, Flags]:
    """Update a verdict with hysteresis by one reading; return the new streak and verdict.

    A verdict is set, or cleared, only after `readings` readings that agree.

    Args:
        streak: readings for the verdict less readings against it, between 0 and `readings`.
        verdict: the verdict so far.
        shown: whether this reading supports the verdict.
        readings: readings needed to set or clear the verdict.
    """
    after = np.clip(np.where(shown, streak + 1, streak - 1), 0, readings)
    return after, (after >= readings) | (verdict & (after > 0))


def estimate(evidence: SignalEvidence, policy: Policy, now: float) -> tuple[Telemetry, Flags]:
    """Compute telemetry from the raw data of each device, and flag contradicting signals.

    Args:
        evidence: raw data of each device.
        now: seconds since the epoch.
    """
    seen = activity(evidence.columns, evidence.board_watts, evidence.rest_watts)
    busy, measured = seen.busiest, seen.measured
    used, free, total = memory(evidence.columns, evidence.label_total_bytes)
    by_age = _fade(now - evidence.measured_at, policy.freshness)

    def fresh(measured_at: Column) -> Ratios:
        counts = measured_at > evidence.freed_at
        return np.where(counts, _fade(now - measured_at, policy.freshness), 0.0)

    activity_fresh = np.where(np.isnan(busy), 0.0, fresh(evidence.activity_at))
    memory_fresh = np.where(np.isnan(used) | np.isnan(total), 0.0, fresh(evidence.memory_at))
    is_own = (evidence.measured_at > evidence.freed_at) & (by_age > 0)
    latest = np.where(activity_fresh > 0, nan_to_zero(busy), 0.0)
    is_foreign = evidence.is_foreign & evidence.is_unheld & (by_age > 0)
    has_window = evidence.has_tenants & (activity_fresh > 0)
    has_hour = has_window & (evidence.hour_count > 1)
    # Foreign use may pause, like a tenant's work: a device is not idle after a short pause.
    past = np.where(is_foreign & (activity_fresh > 0), evidence.hour_mean, 0.0)
    now_busy = np.where(activity_fresh > 0, nan_to_zero(measured), 0.0)
    has_recent = (has_window | is_foreign) & (activity_fresh > 0) & (evidence.recent_count > 1)
    recent = np.where(has_recent, evidence.recent_mean, 0.0)
    verdict, is_out = _judge(evidence, policy, now, by_age)
    total_known = nan_to_zero(total)
    used_ratio = nan_to_zero(used) / np.maximum(total_known, 1.0)
    least = np.maximum(latest, past)
    telemetry = Telemetry(
        utilization=np.where(has_hour, evidence.hour_mean, least),
        latest=latest,
        peak=np.maximum(now_busy, recent),
        next_hour=np.where(has_hour, evidence.next_hour, least),
        freshness=activity_fresh,
        memory_used=np.where(memory_fresh > 0, as_ratios(used_ratio), 0.0),
        memory_free_bytes=np.where(memory_fresh > 0, nan_to_zero(free), 0.0),
        memory_total_bytes=total_known,
        memory_freshness=memory_fresh,
        presumed=_presumed(evidence, policy, now, by_age),
        others_bytes=nan_to_zero(evidence.others_bytes),
        foreign_bytes=nan_to_zero(evidence.foreign_bytes),
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


def _presumed(evidence: SignalEvidence, policy: Policy, now: float, by_age: Ratios) -> Ratios:
    """Return the weight of the assumption that devices which were just freed are idle.

    It fades like a reading measured at the time of release, and is 0 once telemetry has expired.
    """
    may_be = ~(evidence.was_used | evidence.has_tenants)
    may_be &= ~(evidence.measured_at > evidence.freed_at)
    since = _fade(now - evidence.freed_at, policy.freshness)
    return np.where(may_be, np.minimum(since, by_age), 0.0)


def estimate_again(
    before: Telemetry, rows: Rows, evidence: SignalEvidence, policy: Policy, now: float
) -> Telemetry:
    """Return telemetry in which some devices are recomputed.

    Args:
        before: telemetry of all devices.
        rows: rows to replace; always whole nodes, because a device can exclude its siblings.
        evidence: raw data of these rows.
        now: seconds since the epoch.
    """
    part, _ = estimate(evidence, policy, now)
    return before.with_rows(rows, replace(part, cause=renumber(part.cause, rows)))


def _judge(
    evidence: SignalEvidence, policy: Policy, now: float, by_age: Ratios
) -> tuple[HealthColumns, Flags]:
    """Return the health of each device, and the devices that are out (`Telemetry.is_out`).

    Includes verdicts on the node and on sibling devices. A verdict expires after `forget_seconds`
    without telemetry: lost telemetry must not exclude a device for ever.
    """
    is_old = now - evidence.measured_at >= policy.freshness.forget_seconds
    columns = evidence.columns
    if is_old.any():
        columns = {signal: np.where(is_old, np.nan, column) for signal, column in columns.items()}
    columns = _without_old_all_clear(columns, evidence, policy.freshness)
    health, node_row = policy.health, evidence.node_row
    newest = np.zeros(int(node_row.max(initial=0)) + 1)
    np.maximum.at(newest, node_row, by_age)
    # Telemetry of its siblings is fresh and its own is not: it may have fallen off the bus.
    is_behind = ~np.isnan(evidence.measured_at) & (newest[node_row] >= 1)
    is_silent = is_behind & (by_age <= 0)
    is_missing = evidence.is_lost | is_silent
    is_recent = now - evidence.xid_since < health.xid_seconds
    is_suspect = is_missing | (evidence.withdrawn > 0)
    verdict = judge(columns, len(by_age), health, is_recent, is_suspect)
    verdict.apply(health.missing_device, is_missing, Sign.MISSING)
    # If as many devices of the node are known to be out, the kubelet withdrew exactly those.
    out = np.bincount(node_row, weights=verdict.is_excluded | is_missing)[node_row]
    verdict.apply(health.not_offered, evidence.withdrawn > out, Sign.NOT_OFFERED)
    verdict.exclude_siblings(node_row)
    # The kubelet's count confirms the loss, so a short silence is enough here.
    return verdict, verdict.is_excluded | is_missing | (is_behind & (by_age < 1))


def _without_old_all_clear(
    columns: Mapping[Signal, Column], evidence: SignalEvidence, freshness: Freshness
) -> Mapping[Signal, Column]:
    """Return the columns without outdated recovery actions of 0 ("nothing to do").

    If a node agent stops while another source still reports XIDs, its last recovery action says
    nothing about a newer XID.
    """
    recovery = columns.get(Signal.RECOVERY_ACTION)
    if recovery is None:
        return columns
    is_old = evidence.xid_at - evidence.recovery_at > freshness.max_age_seconds
    current = np.where(is_old & (recovery == 0), np.nan, recovery)
    return {**columns, Signal.RECOVERY_ACTION: current}
