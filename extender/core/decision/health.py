"""Judge a device by its telemetry: whether it can work, its penalty, and its stress.

A verdict names its cause: one integer with the sign in the upper half, its value (an XID, a count,
a row) in the lower. Words are created only on demand. Stress is heat and throttling: it lowers a
device's score and never excludes it.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Final

import numpy as np

from extender.core.devices.readings import Column, Signal
from extender.core.nodes.snapshot import Flags, Ratios, Rows, Telemetry, nan_to_zero
from extender.core.policy import WARN_CELSIUS, Health, HealthAction

_VALUE_BITS = 32
_LARGEST_VALUE = (1 << _VALUE_BITS) - 1


class Sign(IntEnum):
    """Sign of ill health; the comment names its value."""

    NONE = 0
    SIBLING = 1  # row of the device that excludes its whole node
    XID = 2  # its number
    ROW_REMAP_FAILURE = 3
    ROW_REMAP_PENDING = 4
    REMAPPED_ROWS = 5  # how many
    DOUBLE_BIT_ERRORS = 6  # how many
    RETIRED_PAGES = 7  # how many
    RETIRED_PAGES_PENDING = 8
    RECOVERY_ACTION = 9  # DCGM's number of it
    FABRIC_MANAGER = 10  # DCGM's status
    DCGM_HEALTH = 11  # DCGM's verdict
    MISSING = 12
    NOT_OFFERED = 13
    SRAM_ERRORS = 14
    FABRIC_HEALTH = 15  # NVML's summary
    NVLINKS_DOWN = 16  # how many
    INFOROM_CORRUPTED = 17
    SHUTDOWN_TEMPERATURE = 18  # degrees Celsius
    PCIE_REPLAYS = 19  # a minute
    NVLINK_REPLAYS = 20  # a minute
    NVLINK_RECOVERIES = 21
    NVLINK_CRC_ERRORS = 22  # a second
    ROWS_REMAPPED_LATELY = 23  # how many


_WORDS: Mapping[Sign, str] = {
    Sign.NONE: "",
    Sign.SIBLING: "another GPU of its node",
    Sign.XID: "XID {value}",
    Sign.ROW_REMAP_FAILURE: "row remapping failed (RMA)",
    Sign.ROW_REMAP_PENDING: "a remapped row waits for a reset",
    Sign.REMAPPED_ROWS: "{value} uncorrectable remapped rows",
    Sign.DOUBLE_BIT_ERRORS: "{value} double-bit memory errors since the last reset",
    Sign.RETIRED_PAGES: "{value} retired memory pages",
    Sign.RETIRED_PAGES_PENDING: "a memory page waits to be retired",
    Sign.RECOVERY_ACTION: "recovery action: {value}",
    Sign.FABRIC_MANAGER: "fabric manager {value}",
    Sign.DCGM_HEALTH: "DCGM health: {value}",
    Sign.MISSING: "missing among its siblings",
    Sign.NOT_OFFERED: "the kubelet offers fewer GPUs than its node has",
    Sign.SRAM_ERRORS: "uncorrectable SRAM errors beyond their threshold",
    Sign.FABRIC_HEALTH: "NVLink fabric {value}",
    Sign.NVLINKS_DOWN: "{value} NVLinks that have gone down",
    Sign.INFOROM_CORRUPTED: "a damaged infoROM",
    Sign.SHUTDOWN_TEMPERATURE: "{value} °C, at which it switches itself off",
    Sign.PCIE_REPLAYS: "{value} PCIe packets a minute sent again",
    Sign.NVLINK_REPLAYS: "{value} NVLink packets a minute sent again",
    Sign.NVLINK_RECOVERIES: "NVLinks that had to recover in the last minutes",
    Sign.NVLINK_CRC_ERRORS: "{value} NVLink errors a second",
    Sign.ROWS_REMAPPED_LATELY: "memory rows remapped within a day: {value}",
}

_XIDS: Mapping[int, str] = {
    46: "GPU stopped processing",
    48: "double-bit memory error",
    54: "auxiliary power is not connected",
    62: "internal micro-controller halted",
    63: "row remapping recorded",
    64: "row remapping could not be recorded",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "many single-bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timed out",
    119: "GSP timed out",
    120: "GSP error",
    140: "unrecovered memory error",
    **dict.fromkeys(range(144, 151), "NVLink error"),
    154: "recovery action changed",
    167: "PCIe fatal timeout",
    168: "reduced memory capacity",
}

_NAMES: Mapping[Sign, Mapping[int, str]] = {
    Sign.XID: {xid: f"{xid}: {words}" for xid, words in _XIDS.items()},
    Sign.RECOVERY_ACTION: {
        1: "reset",
        2: "reboot",
        3: "drain P2P",
        4: "drain and reset",
        5: "recover IMEX",
        6: "bus reset",
        7: "system reboot",
    },
    Sign.FABRIC_MANAGER: {
        1: "not started",
        2: "still starting",
        4: "failed",
        5: "in an unknown state",
        6: "not supported by the driver",
    },
    Sign.DCGM_HEALTH: {10: "warning", 20: "failure"},
    Sign.FABRIC_HEALTH: {2: "unhealthy", 3: "of limited capacity"},
}


_SIGNALS: Mapping[Sign, tuple[Signal, ...]] = {
    Sign.XID: (Signal.XID,),
    Sign.ROW_REMAP_FAILURE: (Signal.ROW_REMAP_FAILURE,),
    Sign.ROW_REMAP_PENDING: (Signal.ROW_REMAP_PENDING,),
    Sign.REMAPPED_ROWS: (Signal.UNCORRECTABLE_REMAPPED_ROWS,),
    Sign.DOUBLE_BIT_ERRORS: (Signal.ECC_DOUBLE_BIT_VOLATILE,),
    Sign.RETIRED_PAGES: (Signal.RETIRED_PAGES_SINGLE_BIT, Signal.RETIRED_PAGES_DOUBLE_BIT),
    Sign.RETIRED_PAGES_PENDING: (Signal.RETIRED_PAGES_PENDING,),
    Sign.RECOVERY_ACTION: (Signal.RECOVERY_ACTION,),
    Sign.FABRIC_MANAGER: (Signal.FABRIC_MANAGER_STATUS,),
    Sign.DCGM_HEALTH: (Signal.HEALTH_STATUS,),
    Sign.SRAM_ERRORS: (Signal.SRAM_THRESHOLD_EXCEEDED,),
    Sign.FABRIC_HEALTH: (Signal.FABRIC_HEALTH,),
    Sign.NVLINKS_DOWN: (Signal.NVLINKS_DOWN,),
    Sign.INFOROM_CORRUPTED: (Signal.INFOROM_CORRUPTED,),
    Sign.SHUTDOWN_TEMPERATURE: (Signal.TEMPERATURE,),
    Sign.PCIE_REPLAYS: (Signal.PCIE_REPLAY_RATE,),
    Sign.NVLINK_REPLAYS: (Signal.NVLINK_REPLAY_RATE,),
    Sign.NVLINK_RECOVERIES: (Signal.NVLINK_RECOVERY_RATE,),
    Sign.NVLINK_CRC_ERRORS: (Signal.NVLINK_CRC_RATE,),
    Sign.ROWS_REMAPPED_LATELY: (Signal.ROWS_REMAPPED_LATELY,),
}


def _encode(sign: Sign, values: Ratios | float = 0.0) -> Rows:
    """Encode a sign and its values as causes: one integer, or one per device."""
    numbers: Rows = np.asarray(np.clip(values, 0, _LARGEST_VALUE)).astype(np.intp)
    return numbers | (int(sign) << _VALUE_BITS)


def decode(cause: int) -> tuple[Sign, int]:
    """Decode a cause to its sign and value.

    Example:
        >>> decode(int(_encode(Sign.XID, 79)))
        (<Sign.XID: 2>, 79)
    """
    return Sign(cause >> _VALUE_BITS), cause & _LARGEST_VALUE


def shown_by(
    cause: int, row: int, causes: Mapping[int, int] | Rows
) -> tuple[tuple[Signal, ...], int]:
    """Return the signals that reveal a cause, () for none, and the row of the faulty device.

    Args:
        cause: cause of a device.
        causes: causes of other devices by row, in case a sibling caused it.

    Example:
        >>> shown_by(int(_encode(Sign.XID, 79)), 7, {})
        ((<Signal.XID: 'xid'>,), 7)
    """
    sign, value = decode(cause)
    if sign is Sign.SIBLING:
        sign, row = decode(int(causes[value]))[0], value
    return _SIGNALS.get(sign, ()), row


def is_blamed_on_sibling(causes: Rows) -> Flags:
    """Flag the devices that another device of their node excludes.

    Args:
        causes: encoded causes, of any shape.
    """
    is_blamed: Flags = causes >> _VALUE_BITS == Sign.SIBLING
    return is_blamed


def renumber(causes: Rows, rows: Rows) -> Rows:
    """Replace sibling indexes in causes by the telemetry rows in `rows`.

    Example:
        >>> sibling = _encode(Sign.SIBLING, np.array([1.0]))
        >>> decode(int(renumber(sibling, np.array([40, 41]))[0]))
        (<Sign.SIBLING: 1>, 41)
    """
    is_sibling = is_blamed_on_sibling(causes)
    renumbered = causes.copy()
    renumbered[is_sibling] = _encode(
        Sign.SIBLING, rows[causes[is_sibling] & _LARGEST_VALUE].astype(np.float64)
    )
    return renumbered


def words(cause: int) -> str:
    """Return a cause in words, "" for none.

    Example:
        >>> words(int(_encode(Sign.XID, 79))), words(int(_encode(Sign.REMAPPED_ROWS, 12)))
        ('XID 79: fallen off the bus', '12 uncorrectable remapped rows')
    """
    sign, value = decode(cause)
    return _WORDS[sign].format(value=_NAMES.get(sign, {}).get(value, value))


def short_words(cause: int) -> str:
    """Return a cause in words without counts, for labels, which must have few values.

    Example:
        >>> short_words(int(_encode(Sign.XID, 79)))
        'XID 79: fallen off the bus'
    """
    sign = decode(cause)[0]
    has_count = "{value}" in _WORDS[sign] and sign not in _NAMES
    return sign.name.lower().replace("_", " ") if has_count else words(cause)


def blamed_siblings(causes: Rows, all_causes: Rows) -> Mapping[int, int]:
    """Return the causes, by row, of the faulty devices that exclude some of the given ones.

    Args:
        causes: causes of the given devices.
        all_causes: causes of every device, by row.
    """
    blaming = causes[is_blamed_on_sibling(causes)] & _LARGEST_VALUE
    return {row: int(all_causes[row]) for row in set(blaming.tolist())}


def ill_health(
    telemetry: Telemetry,
    at: int | tuple[int, int],
    name: Callable[[int], str] | None = None,
    siblings: Mapping[int, int] | None = None,
) -> str:
    """Return a device's ill health and its consequence in words, "" if healthy.

    Args:
        telemetry: telemetry of every device, or of a batch.
        at: row of the device, or its index in the batch.
        name: returns the name of another device of the node by its row, e.g. "GPU 2".
        siblings: causes of these other devices by row; by default read from `telemetry`.
    """
    cause = int(telemetry.cause[at])
    sign, value = decode(cause)
    why = words(cause)
    if sign is Sign.SIBLING:
        other = name(value) if name else "another GPU"
        of_other = int(telemetry.cause[value]) if siblings is None else siblings[value]
        return f"excluded with its node: {other} has {words(of_other)}"
    if telemetry.is_excluded[at]:
        return f"cannot work: {why}"
    if telemetry.is_excluded_multi[at]:
        return f"cannot work for pods with several GPUs: {why}"
    return f"counts less: {why}" if telemetry.penalty[at] else ""


# Values of DCGM's field 1523: reset, reboot, drain and reset, bus reset, system reboot.
_RECOVERY_RESETS = (1, 2, 4, 6, 7)
_RECOVERY_DRAIN_P2P = 3
_RECOVERY_IMEX = 5
_FABRIC_MANAGER_FAILED = (1, 4, 5, 6)
_FABRIC_MANAGER_STARTING = 2
_DCGM_WARN, _DCGM_FAIL = 10.0, 20.0
_FABRIC_UNHEALTHY, _FABRIC_LIMITED = 2.0, 3.0
_FEW_ROWS = 0.5
"""Share of the penalty for recently remapped memory rows, below the configured number."""


class HealthColumns:
    """Health verdicts, one row per device, filled action by action.

    Attributes:
        is_excluded: the device cannot work.
        is_excluded_multi: the device cannot work for a pod with several devices.
        is_node_excluded: no device of its node can work.
        penalty: share of its certainty that the device loses, 0 to 1.
        cause: cause of the most severe action, encoded by `_encode`; the first
            cause wins a tie.
    """

    def __init__(self, count: int, penalty: float) -> None:
        self.is_excluded = np.zeros(count, dtype=np.bool_)
        self.is_excluded_multi = np.zeros(count, dtype=np.bool_)
        self.is_node_excluded = np.zeros(count, dtype=np.bool_)
        self.penalty: Ratios = np.zeros(count)
        self.cause: Rows = np.zeros(count, dtype=np.intp)
        self._severity = np.zeros(count, dtype=np.int8)
        self._weight = penalty

    def apply(
        self,
        action: HealthAction,
        which: Flags,
        sign: Sign,
        values: Column | float = 0.0,
        share: float = 1.0,
    ) -> None:
        """Apply an action to the devices in `which`.

        Args:
            which: flags of the devices.
            sign: sign of ill health that caused the action.
            values: value to encode with the sign, one for all devices or one per device.
            share: share of the penalty to apply, for a penalty action.
        """
        if action is HealthAction.IGNORE or not which.any():
            return
        if action is HealthAction.EXCLUDE:
            self.is_excluded |= which
            self.is_excluded_multi |= which
        if action is HealthAction.EXCLUDE_NODE:
            self.is_node_excluded |= which
        if action is HealthAction.EXCLUDE_MULTI_GPU:
            self.is_excluded_multi |= which
        if action in {HealthAction.PENALTY, HealthAction.EXCLUDE_MULTI_GPU}:
            weight = self._weight * share
            self.penalty = np.where(which, np.maximum(self.penalty, weight), self.penalty)
        is_graver = which & (self._severity < action.severity)
        at_these = values[is_graver] if isinstance(values, np.ndarray) else values
        self.cause[is_graver] = _encode(sign, at_these)
        self._severity[is_graver] = action.severity

    def exclude_siblings(self, node_row: Rows) -> None:
        """Exclude every device of a node, this one too, if one of its devices excludes the node.

        Args:
            node_row: number of each device's node.
        """
        culprits = np.flatnonzero(self.is_node_excluded)
        if not culprits.size:
            return
        nodes, first = np.unique(node_row[culprits], return_index=True)
        culprit_of = np.full(int(node_row.max()) + 1, -1, dtype=np.intp)
        culprit_of[nodes] = culprits[first]
        culprit = culprit_of[node_row]
        self.apply(HealthAction.EXCLUDE, culprit >= 0, Sign.SIBLING, culprit.astype(np.float64))


def judge(
    columns: Mapping[Signal, Column],
    count: int,
    health: Health,
    xid_is_recent: Flags,
    is_suspect: Flags,
) -> HealthColumns:
    """Judge the health of each device; a missing value is never a sign of ill health.

    Telemetry reports the last XID for ever, so it counts only while recent. An XID that excludes
    also counts while another severe sign confirms it. The XID "recovery action changed" counts only
    if the recovery action itself is not reported.

    Args:
        columns: values by signal; NaN for a missing value.
        count: number of devices.
        xid_is_recent: whether the XID is recent enough to count by itself.
        is_suspect: whether evidence outside `columns` confirms an XID that excludes.
    """
    verdict = HealthColumns(count, health.penalty)

    def column(signal: Signal) -> Column:
        return columns.get(signal, np.full(count, np.nan))

    for rule in _signs(column, health):
        verdict.apply(*rule)
    lately = column(Signal.ROWS_REMAPPED_LATELY)
    verdict.apply(HealthAction.PENALTY, lately > 0, Sign.ROWS_REMAPPED_LATELY, lately, _FEW_ROWS)
    agrees = (
        is_suspect
        | (column(Signal.ROW_REMAP_FAILURE) > 0)
        | np.isin(column(Signal.RECOVERY_ACTION), _RECOVERY_RESETS)
        | (column(Signal.HEALTH_STATUS) >= _DCGM_FAIL)
    )
    xids = column(Signal.XID)
    for xid in np.unique(xids[~np.isnan(xids)]):
        action = health.xid_action(int(xid))
        counts = (
            xid_is_recent | agrees
            if action.severity > HealthAction.PENALTY.severity
            else xid_is_recent
        )
        if health.only_repeats_recovery(int(xid)):
            counts &= np.isnan(column(Signal.RECOVERY_ACTION))
        verdict.apply(action, counts & (xids == xid), Sign.XID, float(xid))
    return verdict


_Rule = tuple[HealthAction, Flags, Sign] | tuple[HealthAction, Flags, Sign, Column | float]


def _signs(column: Callable[[Signal], Column], health: Health) -> tuple[_Rule, ...]:
    """Return the rules for all signs except XIDs: arguments of `HealthColumns.apply`."""
    rows = column(Signal.UNCORRECTABLE_REMAPPED_ROWS)
    lately = column(Signal.ROWS_REMAPPED_LATELY)
    pages = nan_to_zero(column(Signal.RETIRED_PAGES_SINGLE_BIT))
    pages = pages + nan_to_zero(column(Signal.RETIRED_PAGES_DOUBLE_BIT))
    double_bit = column(Signal.ECC_DOUBLE_BIT_VOLATILE)
    recovery = column(Signal.RECOVERY_ACTION)
    fabric = column(Signal.FABRIC_MANAGER_STATUS)
    status = column(Signal.HEALTH_STATUS)
    is_failed = np.isin(fabric, _FABRIC_MANAGER_FAILED)
    is_starting = fabric == _FABRIC_MANAGER_STARTING
    needs_reset = np.isin(recovery, _RECOVERY_RESETS)
    is_warned = (status >= _DCGM_WARN) & (status < _DCGM_FAIL)
    remap_failed = column(Signal.ROW_REMAP_FAILURE) > 0
    remap_pending = column(Signal.ROW_REMAP_PENDING) > 0
    page_pending = column(Signal.RETIRED_PAGES_PENDING) > 0
    return (
        (health.row_remap_failure, remap_failed, Sign.ROW_REMAP_FAILURE),
        (health.double_bit_error, double_bit > 0, Sign.DOUBLE_BIT_ERRORS, double_bit),
        (health.worn_memory, rows >= health.remapped_rows_limit, Sign.REMAPPED_ROWS, rows),
        (
            HealthAction.PENALTY,
            lately >= health.remapped_rows_per_day,
            Sign.ROWS_REMAPPED_LATELY,
            lately,
        ),
        (health.worn_memory, pages >= health.retired_pages_limit, Sign.RETIRED_PAGES, pages),
        (HealthAction.PENALTY, pages >= health.retired_pages_warn, Sign.RETIRED_PAGES, pages),
        (health.fabric_manager_failed, is_failed, Sign.FABRIC_MANAGER, fabric),
        (health.fabric_manager_starting, is_starting, Sign.FABRIC_MANAGER, fabric),
        (health.recovery_reset, needs_reset, Sign.RECOVERY_ACTION, recovery),
        (
            health.recovery_drain_p2p,
            recovery == _RECOVERY_DRAIN_P2P,
            Sign.RECOVERY_ACTION,
            recovery,
        ),
        (health.recovery_imex, recovery == _RECOVERY_IMEX, Sign.RECOVERY_ACTION, recovery),
        (health.row_remap_pending, remap_pending, Sign.ROW_REMAP_PENDING),
        (health.retired_pages_pending, page_pending, Sign.RETIRED_PAGES_PENDING),
        (health.dcgm_fail, status >= _DCGM_FAIL, Sign.DCGM_HEALTH, _DCGM_FAIL),
        (health.dcgm_warn, is_warned, Sign.DCGM_HEALTH, _DCGM_WARN),
        *_signs_of_nvml(column, health),
        *_signs_of_links(column, health),
    )


def _signs_of_nvml(column: Callable[[Signal], Column], health: Health) -> tuple[_Rule, ...]:
    """Return the rules for signs that only the node agent reports."""
    summary = column(Signal.FABRIC_HEALTH)
    links = column(Signal.NVLINKS_DOWN)
    celsius = column(Signal.TEMPERATURE)
    too_hot = celsius >= column(Signal.TEMPERATURE_SHUTDOWN)
    sram = column(Signal.SRAM_THRESHOLD_EXCEEDED) > 0
    inforom = column(Signal.INFOROM_CORRUPTED) > 0
    return (
        (health.sram_errors, sram, Sign.SRAM_ERRORS),
        (health.fabric_unhealthy, summary == _FABRIC_UNHEALTHY, Sign.FABRIC_HEALTH, summary),
        (health.fabric_limited, summary == _FABRIC_LIMITED, Sign.FABRIC_HEALTH, summary),
        (health.nvlink_down, links > 0, Sign.NVLINKS_DOWN, links),
        (health.inforom_corrupted, inforom, Sign.INFOROM_CORRUPTED),
        (health.shutdown_temperature, too_hot, Sign.SHUTDOWN_TEMPERATURE, celsius),
    )


def _signs_of_links(column: Callable[[Signal], Column], health: Health) -> tuple[_Rule, ...]:
    """Return the rules for packet loss on links, by rate of errors rather than their total."""
    pcie = column(Signal.PCIE_REPLAY_RATE) * 60.0
    again = column(Signal.NVLINK_REPLAY_RATE) * 60.0
    recovers = column(Signal.NVLINK_RECOVERY_RATE) > 0
    crc = column(Signal.NVLINK_CRC_RATE)
    limit = health.link_replays_per_minute
    return (
        (health.link_replays, pcie > limit, Sign.PCIE_REPLAYS, pcie),
        (health.link_replays, again > limit, Sign.NVLINK_REPLAYS, again),
        (health.nvlink_errors, recovers, Sign.NVLINK_RECOVERIES),
        (health.nvlink_errors, crc >= health.nvlink_crc_per_second, Sign.NVLINK_CRC_ERRORS, crc),
    )


_POWER_CAP: Final = 0x04
_SW_THERMAL: Final = 0x20
HARD_SLOWDOWN: Final = 0x8 | 0x40 | 0x80
"""Bits of NVML's clock event reasons for hardware slowdown."""

SLOWDOWN_WORDS: Final[Mapping[int, str]] = {
    _POWER_CAP: "software power cap",
    0x08: "hardware slowdown",
    _SW_THERMAL: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Bits of NVML's clock event reasons that slow a card down. The software power cap causes no
stress: cards reach it under normal load."""

_MASK_LIMIT: Final = float(1 << 53)  # larger floats are not exact, and no bit mask is larger


def stress(columns: Mapping[Signal, Column], count: int, health: Health) -> Ratios:
    """Return the stress of each device, from 0 (none or unknown) to 1.

    Heat is rated against the card's slowdown temperature if known, else against the settings.

    Args:
        columns: values by signal; NaN for a missing value.
        count: number of devices.
    """
    missing = np.full(count, np.nan)
    slowdown = columns.get(Signal.TEMPERATURE_SLOWDOWN, missing)
    is_known = slowdown > WARN_CELSIUS
    heat = _heat(
        columns.get(Signal.TEMPERATURE, missing),
        np.where(is_known, slowdown - WARN_CELSIUS, health.temperature_warn_celsius),
        np.where(is_known, slowdown, health.temperature_high_celsius),
    )
    memory_heat = _heat(
        columns.get(Signal.MEMORY_TEMPERATURE, missing),
        np.full(count, health.memory_temperature_warn_celsius),
        np.full(count, health.memory_temperature_high_celsius),
    )
    mask = columns.get(Signal.CLOCK_EVENT_REASONS, missing)
    reasons = np.where(mask < _MASK_LIMIT, mask, 0.0).astype(np.int64)
    hard = (reasons & HARD_SLOWDOWN) != 0
    soft = (reasons & _SW_THERMAL) != 0
    throttling = np.where(hard, 1.0, np.where(soft, 0.5, 0.0))
    hottest: Ratios = np.maximum(np.maximum(heat, memory_heat), throttling)
    return hottest


def _heat(celsius: Column, warn: Column, high: Column) -> Ratios:
    """Return the heat from 0 (up to `warn`, or unknown) to 1 (from `high`)."""
    known = np.where(np.isnan(celsius), warn, celsius)
    return np.clip((known - warn) / np.maximum(high - warn, 1.0), 0.0, 1.0)


def stress_in_words(reading: Mapping[str, float], health: Health) -> str:
    """Return the causes of a device's stress in words, "" without stress.

    Args:
        reading: value by signal name.

    Example:
        >>> stress_in_words({"temperature_celsius": 86.0, "clock_event_reasons": 0x44}, Health())
        'hardware thermal slowdown, 86 °C'
    """
    return ", ".join(_causes(reading, health))


def throttling_in_words(mask: float) -> str:
    """Return the clock event reasons that cause stress in words, "" for none.

    Example:
        >>> throttling_in_words(0x44), throttling_in_words(0x04)
        ('hardware thermal slowdown', '')
    """
    bits = int(mask) & ~_POWER_CAP if mask < _MASK_LIMIT else 0
    return ", ".join(text for bit, text in SLOWDOWN_WORDS.items() if bits & bit)


def _causes(reading: Mapping[str, float], health: Health) -> Iterator[str]:
    if Signal.CLOCK_EVENT_REASONS in reading:
        throttling = throttling_in_words(reading[Signal.CLOCK_EVENT_REASONS])
        if throttling:
            yield throttling
    celsius = reading.get(Signal.TEMPERATURE, -np.inf)
    slowdown = reading.get(Signal.TEMPERATURE_SLOWDOWN, -np.inf)
    if slowdown > WARN_CELSIUS:
        if celsius > slowdown - WARN_CELSIUS:
            yield f"{celsius:.0f} °C, its clocks are held back from {slowdown:.0f} °C on"
    elif celsius > health.temperature_warn_celsius:
        yield f"{celsius:.0f} °C"
    of_memory = reading.get(Signal.MEMORY_TEMPERATURE, -np.inf)
    if of_memory > health.memory_temperature_warn_celsius:
        yield f"memory at {of_memory:.0f} °C"
