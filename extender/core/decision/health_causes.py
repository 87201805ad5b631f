"""Causes of ill health, encoded as numbers for columns and decoded to words for users.

A cause is one integer: the sign in the upper half, its value (an XID, a count, a row) in the lower.
Words are created only on demand.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MappingProxyType

import numpy as np

from extender.core.devices.readings import Signal
from extender.core.nodes.snapshot import Flags, Ratios, Rows, Telemetry

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


_WORDS: Mapping[Sign, str] = MappingProxyType(
    {
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
)

_XIDS: Mapping[int, str] = MappingProxyType(
    {
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
)

_NAMES: Mapping[Sign, Mapping[int, str]] = MappingProxyType(
    {
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
)


_SIGNALS: Mapping[Sign, tuple[Signal, ...]] = MappingProxyType(
    {
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
)


def encode(sign: Sign, values: Ratios | float = 0.0) -> Rows:
    """Encode a sign and its values as causes: one integer, or one per device."""
    numbers: Rows = np.asarray(np.clip(values, 0, _LARGEST_VALUE)).astype(np.intp)
    return numbers | (int(sign) << _VALUE_BITS)


def decode(cause: int) -> tuple[Sign, int]:
    """Decode a cause to its sign and value.

    Example:
        >>> decode(int(encode(Sign.XID, 79)))
        (<Sign.XID: 2>, 79)
    """
    return Sign(cause >> _VALUE_BITS), cause & _LARGEST_VALUE


def shown_by(
    cause: int, row: int, causes: Mapping[int, int] | Rows
) -> tuple[tuple[Signal, ...], int]:
    """Return the signals that show a cause, and the row of their device; () if no signal shows it.

    Args:
        cause: cause of a device.
        row: row of the device.
        causes: causes of other devices by row, in case a sibling caused it.

    Example:
        >>> shown_by(int(encode(Sign.XID, 79)), 7, {})
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
        >>> sibling = encode(Sign.SIBLING, np.array([1.0]))
        >>> decode(int(renumber(sibling, np.array([40, 41]))[0]))
        (<Sign.SIBLING: 1>, 41)
    """
    is_sibling = is_blamed_on_sibling(causes)
    renumbered = causes.copy()
    renumbered[is_sibling] = encode(
        Sign.SIBLING, rows[causes[is_sibling] & _LARGEST_VALUE].astype(np.float64)
    )
    return renumbered


def words(cause: int) -> str:
    """Return a cause in words, "" for none.

    Example:
        >>> words(int(encode(Sign.XID, 79))), words(int(encode(Sign.REMAPPED_ROWS, 12)))
        ('XID 79: fallen off the bus', '12 uncorrectable remapped rows')
    """
    sign, value = decode(cause)
    return _WORDS[sign].format(value=_NAMES.get(sign, {}).get(value, value))


def short_words(cause: int) -> str:
    """Return a cause in words without counts, for labels, which must have few values.

    Example:
        >>> short_words(int(encode(Sign.XID, 79))), short_words(int(encode(Sign.REMAPPED_ROWS, 12)))
        ('XID 79: fallen off the bus', 'remapped rows')
    """
    sign = decode(cause)[0]
    has_count = "{value}" in _WORDS[sign] and sign not in _NAMES
    return sign.name.lower().replace("_", " ") if has_count else words(cause)


def blamed_siblings(causes: Rows, all_causes: Rows) -> Mapping[int, int]:
    """Return the causes of the devices that exclude their siblings, by row.

    Args:
        causes: causes of some devices.
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
        other = f"{name(value)} of its node" if name else why
        of_other = int(telemetry.cause[value]) if siblings is None else siblings[value]
        why = f"{other} has {words(of_other)}"
    if telemetry.is_excluded[at]:
        return f"cannot work: {why}"
    if telemetry.is_excluded_multi[at]:
        return f"cannot work for pods with several GPUs: {why}"
    return f"counts less: {why}" if telemetry.penalty[at] else ""
