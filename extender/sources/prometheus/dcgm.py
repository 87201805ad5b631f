"""Define the table of DCGM metrics: signal and unit of each metric.

Names and units are data, never guessed from values: dcgm-exporter 4.9.0 renamed half of its metrics
and changed eleven units. The user can override, add and remove rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from extender.core.devices.readings import GROWING, LARGEST_XID, Column, Signal
from extender.core.quantity import MIB

_LINK_COUNTERS: Final[Mapping[Signal, tuple[str, ...]]] = {
    Signal.PCIE_REPLAY_RATE: (
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
        "DCGM_FI_DEV_PCIE_REPLAY_TOTAL",
        "dcgm_pcie_replay_counter",
    ),
    Signal.NVLINK_REPLAY_RATE: (
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_TOTAL",
        "dcgm_nvlink_replay_error_count_total",
    ),
    Signal.NVLINK_RECOVERY_RATE: (
        "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
        "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_TOTAL",
        "dcgm_nvlink_recovery_error_count_total",
        # NVLink 5 and later: names up to 4.8, then names since 4.9.
        "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",
        "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS",
        "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
        "DCGM_FI_DEV_NVLINK_RECOVERY_EVENT_TOTAL",
        "DCGM_FI_DEV_NVLINK_RECOVERY_SUCCESSFUL_TOTAL",
        "DCGM_FI_DEV_NVLINK_RECOVERY_FAILED_TOTAL",
    ),
    Signal.NVLINK_CRC_RATE: (
        "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
        "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
        "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_TOTAL",
        "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_TOTAL",
        "dcgm_nvlink_flit_crc_error_count_total",
        "dcgm_nvlink_data_crc_error_count_total",
        # As above. DCGM reports a GPU as unhealthy when one of these counters grows.
        "DCGM_FI_DEV_NVLINK_COUNT_RX_MALFORMED_PACKET_ERRORS",
        "DCGM_FI_DEV_NVLINK_COUNT_RX_BUFFER_OVERRUN_ERRORS",
        "DCGM_FI_DEV_NVLINK_COUNT_RX_ERRORS",
        "DCGM_FI_DEV_NVLINK_COUNT_RX_REMOTE_ERRORS",
        "DCGM_FI_DEV_NVLINK_COUNT_RX_GENERAL_ERRORS",
        "DCGM_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
        "DCGM_FI_DEV_NVLINK_COUNT_TX_DISCARDS",
        "DCGM_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS",
        "DCGM_FI_DEV_NVLINK_COUNT_RX_SYMBOL_ERRORS",
        "DCGM_FI_DEV_NVLINK_RX_PACKET_MALFORMED_TOTAL",
        "DCGM_FI_DEV_NVLINK_RX_PACKET_DROPPED_TOTAL",
        "DCGM_FI_DEV_NVLINK_RX_ERROR_TOTAL",
        "DCGM_FI_DEV_NVLINK_RX_REMOTE_ERROR_TOTAL",
        "DCGM_FI_DEV_NVLINK_RX_GENERAL_ERROR_TOTAL",
        "DCGM_FI_DEV_NVLINK_INTEGRITY_ERROR_TOTAL",
        "DCGM_FI_DEV_NVLINK_EFFECTIVE_ERROR_TOTAL",
        "DCGM_FI_DEV_NVLINK_RX_SYMBOL_ERROR_TOTAL",
    ),
}
"""Counters of PCIe and NVLink errors by signal; the signal is the rate of the fastest one."""


class MetricUnit(StrEnum):
    """Unit of a metric's values, as the exporter writes them."""

    RATIO = "ratio"
    PERCENT = "percent"
    BYTES = "bytes"
    MIB = "MiB"
    WATTS = "watts"
    MILLIWATTS = "milliwatts"
    CELSIUS = "celsius"
    COUNT = "count"


class Aggregation(StrEnum):
    """PromQL operator that merges several series of one device into one value."""

    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of DCGM, with its signal and unit.

    Attributes:
        name: name of the metric in Prometheus.
        signal: signal that it measures.
        unit: unit of its values.
    """

    name: str
    signal: Signal
    unit: MetricUnit

    @property
    def aggregation(self) -> Aggregation:
        """How several values are merged: the one that makes the device look busier counts."""
        return Aggregation.MIN if self.signal in _LESS_IS_BUSIER else Aggregation.MAX

    @property
    def is_counter(self) -> bool:
        """Whether the metric is a counter whose growth is the signal."""
        return self.signal in GROWING


_LESS_IS_BUSIER: Final = frozenset({Signal.MEMORY_FREE, Signal.POWER_LIMIT})

IDENTITY_SIGNALS: Final = (
    Signal.GPU_UTILIZATION,
    Signal.GRAPHICS_ACTIVE,
    Signal.MEMORY_USED,
    Signal.TEMPERATURE,
)
"""Each device has at least one of these, so they show which devices exist and how old readings are.
"""

USE_SIGNALS: Final = frozenset(
    {
        Signal.GPU_UTILIZATION,
        Signal.GRAPHICS_ACTIVE,
        Signal.SM_ACTIVE,
        Signal.TENSOR_ACTIVE,
        Signal.DRAM_ACTIVE,
        Signal.MEMORY_COPY_UTILIZATION,
        Signal.MEMORY_USED,
        Signal.MEMORY_FREE,
        Signal.POWER,
    }
)
"""Signals that show whether a device is in use."""

SIZE_SIGNALS: Final = frozenset({Signal.MEMORY_TOTAL, Signal.MEMORY_RESERVED, Signal.POWER_LIMIT})
"""Signals that stay constant unless an administrator changes a limit."""

FAULT_SIGNALS: Final = frozenset(
    {
        Signal.XID,
        Signal.ROW_REMAP_FAILURE,
        Signal.ROW_REMAP_PENDING,
        Signal.UNCORRECTABLE_REMAPPED_ROWS,
        Signal.ECC_DOUBLE_BIT_VOLATILE,
        Signal.RETIRED_PAGES_PENDING,
        Signal.RETIRED_PAGES_SINGLE_BIT,
        Signal.RETIRED_PAGES_DOUBLE_BIT,
    }
)
"""Signals that are 0 on nearly all devices."""

_ROWS: Final[tuple[tuple[Signal, MetricUnit, tuple[str, ...]], ...]] = (
    # Within a signal: 2.x to 4.8, then 4.9, then 1.x and --use-old-namespace. DCGM 4.6 has an alias
    # DCGM_FI_DEV_GPU_UTIL_RATIO in percent: for a custom CSV that uses it the user must add a row.
    # Without this row values above 1 are missing, and 1 % reads as busy, which is the safe side.
    (Signal.GPU_UTILIZATION, MetricUnit.PERCENT, ("DCGM_FI_DEV_GPU_UTIL", "dcgm_gpu_utilization")),
    (Signal.GPU_UTILIZATION, MetricUnit.RATIO, ("DCGM_FI_DEV_GPU_UTIL_RATIO",)),
    (
        Signal.GRAPHICS_ACTIVE,
        MetricUnit.RATIO,
        (
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
            "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO",
            "dcgm_fi_prof_gr_engine_active",
        ),
    ),
    (
        Signal.SM_ACTIVE,
        MetricUnit.RATIO,
        ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO", "dcgm_fi_prof_sm_active"),
    ),
    (
        Signal.TENSOR_ACTIVE,
        MetricUnit.RATIO,
        (
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
            "DCGM_FI_PROF_TENSOR_UTIL_RATIO",
            "dcgm_fi_prof_pipe_tensor_active",
        ),
    ),
    (
        Signal.DRAM_ACTIVE,
        MetricUnit.RATIO,
        ("DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_DRAM_UTIL_RATIO", "dcgm_fi_prof_dram_active"),
    ),
    (
        Signal.MEMORY_COPY_UTILIZATION,
        MetricUnit.PERCENT,
        ("DCGM_FI_DEV_MEM_COPY_UTIL", "dcgm_mem_copy_utilization"),
    ),
    (Signal.MEMORY_COPY_UTILIZATION, MetricUnit.RATIO, ("DCGM_FI_DEV_MEMORY_UTIL_RATIO",)),
    (Signal.MEMORY_USED, MetricUnit.MIB, ("DCGM_FI_DEV_FB_USED", "dcgm_fb_used")),
    (Signal.MEMORY_USED, MetricUnit.BYTES, ("DCGM_FI_DEV_FB_USED_BYTES",)),
    (Signal.MEMORY_FREE, MetricUnit.MIB, ("DCGM_FI_DEV_FB_FREE", "dcgm_fb_free")),
    (Signal.MEMORY_FREE, MetricUnit.BYTES, ("DCGM_FI_DEV_FB_FREE_BYTES",)),
    (Signal.MEMORY_RESERVED, MetricUnit.MIB, ("DCGM_FI_DEV_FB_RESERVED", "dcgm_fb_reserved")),
    (Signal.MEMORY_RESERVED, MetricUnit.BYTES, ("DCGM_FI_DEV_FB_RESERVED_BYTES",)),
    (Signal.MEMORY_TOTAL, MetricUnit.MIB, ("DCGM_FI_DEV_FB_TOTAL", "dcgm_fb_total")),
    (Signal.MEMORY_TOTAL, MetricUnit.BYTES, ("DCGM_FI_DEV_FB_CAPACITY_BYTES",)),
    (
        Signal.POWER,
        MetricUnit.WATTS,
        ("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_BOARD_POWER_WATTS", "dcgm_power_usage"),
    ),
    (
        Signal.POWER_LIMIT,
        MetricUnit.WATTS,
        (
            "DCGM_FI_DEV_ENFORCED_POWER_LIMIT",
            "DCGM_FI_DEV_POWER_MGMT_LIMIT",
            "DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS",
            "DCGM_FI_DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS",
        ),
    ),
    (
        Signal.TEMPERATURE,
        MetricUnit.CELSIUS,
        ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS", "dcgm_gpu_temp"),
    ),
    (
        Signal.MEMORY_TEMPERATURE,
        MetricUnit.CELSIUS,
        ("DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_MEMORY_TEMP_CELSIUS", "dcgm_memory_temp"),
    ),
    (
        Signal.CLOCK_EVENT_REASONS,
        MetricUnit.COUNT,
        ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"),
    ),
    (
        Signal.XID,
        MetricUnit.COUNT,
        (
            "DCGM_FI_DEV_XID_ERRORS",
            "DCGM_FI_DEV_XID_ERROR",
            "DCGM_EXP_XID_ERRORS_COUNT",
            "dcgm_xid_errors",
        ),
    ),
    (
        Signal.ROW_REMAP_FAILURE,
        MetricUnit.COUNT,
        ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "DCGM_FI_DEV_ROW_REMAP_FAILED"),
    ),
    (Signal.ROW_REMAP_PENDING, MetricUnit.COUNT, ("DCGM_FI_DEV_ROW_REMAP_PENDING",)),
    (
        Signal.UNCORRECTABLE_REMAPPED_ROWS,
        MetricUnit.COUNT,
        ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL"),
    ),
    (
        Signal.ECC_DOUBLE_BIT_VOLATILE,
        MetricUnit.COUNT,
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "dcgm_ecc_dbe_volatile_total"),
    ),
    (
        Signal.RETIRED_PAGES_PENDING,
        MetricUnit.COUNT,
        (
            "DCGM_FI_DEV_RETIRED_PENDING",
            "DCGM_FI_DEV_PAGE_RETIRED_PENDING",
            "dcgm_retired_pages_pending",
        ),
    ),
    (
        Signal.RETIRED_PAGES_SINGLE_BIT,
        MetricUnit.COUNT,
        ("DCGM_FI_DEV_RETIRED_SBE", "dcgm_retired_pages_sbe"),
    ),
    (
        Signal.RETIRED_PAGES_DOUBLE_BIT,
        MetricUnit.COUNT,
        ("DCGM_FI_DEV_RETIRED_DBE", "dcgm_retired_pages_dbe"),
    ),
    (
        Signal.RECOVERY_ACTION,
        MetricUnit.COUNT,
        ("DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", "DCGM_FI_DEV_GPU_RECOVERY_ACTION"),
    ),
    (Signal.FABRIC_MANAGER_STATUS, MetricUnit.COUNT, ("DCGM_FI_DEV_FABRIC_MANAGER_STATUS",)),
    (Signal.HEALTH_STATUS, MetricUnit.COUNT, ("DCGM_EXP_GPU_HEALTH_STATUS",)),
    *((signal, MetricUnit.COUNT, names) for signal, names in _LINK_COUNTERS.items()),
)

DEFAULT_METRICS: Final = tuple(
    Metric(name=name, signal=signal, unit=unit) for signal, unit, names in _ROWS for name in names
)


def build_table(overrides: Iterable[tuple[str, Metric | None]] = ()) -> tuple[Metric, ...]:
    """Merge the user's rows into the default table.

    Metrics of remapped rows are used twice: for the number of rows, and for its growth in a day.

    Args:
        overrides: metric name and the row that replaces or joins the default one; None removes it.

    Example:
        >>> old = Metric(name="a_gpu_util", signal=Signal.GPU_UTILIZATION, unit=MetricUnit.PERCENT)
        >>> old in build_table([("a_gpu_util", old)])
        True
        >>> len(build_table()) - len(build_table([("dcgm_fb_used", None)]))
        1
    """
    table: dict[str, Metric | None] = {metric.name: metric for metric in DEFAULT_METRICS}
    table.update(overrides)
    rows = [metric for metric in table.values() if metric is not None]
    remapped = [one for one in rows if one.signal is Signal.UNCORRECTABLE_REMAPPED_ROWS]
    return (*rows, *(replace(one, signal=Signal.ROWS_REMAPPED_LATELY) for one in remapped))


_FACTOR: Final[Mapping[MetricUnit, float]] = {
    MetricUnit.RATIO: 1.0,
    MetricUnit.PERCENT: 0.01,
    MetricUnit.BYTES: 1.0,
    MetricUnit.MIB: float(MIB),
    MetricUnit.WATTS: 1.0,
    MetricUnit.MILLIWATTS: 0.001,
    MetricUnit.CELSIUS: 1.0,
    MetricUnit.COUNT: 1.0,
}

# Profiling counters exceed a full interval slightly; larger values are not ratios.
_RATIO: Final = 1.1
_MEMORY: Final = float(16 << 40)
_POWER: Final = 5_000.0
_TEMPERATURE: Final = 200.0
_FLAG: Final = 1.0
_ENUM: Final = 100.0
_MASK: Final = float((1 << 16) - 1)
_MEMORY_ROWS: Final = 1e5
_ERRORS: Final = 1e9

_HIGHEST: Final[Mapping[Signal, float]] = {
    Signal.GPU_UTILIZATION: _RATIO,
    Signal.GRAPHICS_ACTIVE: _RATIO,
    Signal.SM_ACTIVE: _RATIO,
    Signal.TENSOR_ACTIVE: _RATIO,
    Signal.DRAM_ACTIVE: _RATIO,
    Signal.MEMORY_COPY_UTILIZATION: _RATIO,
    Signal.MEMORY_USED: _MEMORY,
    Signal.MEMORY_FREE: _MEMORY,
    Signal.MEMORY_RESERVED: _MEMORY,
    Signal.MEMORY_TOTAL: _MEMORY,
    Signal.POWER: _POWER,
    Signal.POWER_LIMIT: _POWER,
    Signal.TEMPERATURE: _TEMPERATURE,
    Signal.MEMORY_TEMPERATURE: _TEMPERATURE,
    Signal.CLOCK_EVENT_REASONS: _MASK,
    Signal.XID: float(LARGEST_XID),
    Signal.ROW_REMAP_FAILURE: _FLAG,
    Signal.ROW_REMAP_PENDING: _FLAG,
    Signal.UNCORRECTABLE_REMAPPED_ROWS: _MEMORY_ROWS,
    Signal.ROWS_REMAPPED_LATELY: _MEMORY_ROWS,
    Signal.ECC_DOUBLE_BIT_VOLATILE: _ERRORS,
    Signal.RETIRED_PAGES_PENDING: _MEMORY_ROWS,
    Signal.RETIRED_PAGES_SINGLE_BIT: _MEMORY_ROWS,
    Signal.RETIRED_PAGES_DOUBLE_BIT: _MEMORY_ROWS,
    Signal.RECOVERY_ACTION: _ENUM,
    Signal.FABRIC_MANAGER_STATUS: _ENUM,
    Signal.HEALTH_STATUS: _ENUM,
    Signal.PCIE_REPLAY_RATE: _ERRORS,
    Signal.NVLINK_REPLAY_RATE: _ERRORS,
    Signal.NVLINK_RECOVERY_RATE: _ERRORS,
    Signal.NVLINK_CRC_RATE: _ERRORS,
}
"""Largest possible value of each signal in base units; larger values count as missing."""

# DCGM marks a blank value (not supported, not found, no permission ...) by the last 16 numbers of
# the field's type: 0x7ffffff0 and up, 0x7ffffffffffffff0 and up, 140737488355328.0 and up.
_INT32_BLANK: Final = float(0x7FFFFFF0)
_INT64_BLANK: Final = 9.2e18
_DOUBLE_BLANK: Final = 140737488355328.0
_BLANKS: Final = 16


def convert(values: Column, unit: MetricUnit, signal: Signal) -> Column:
    """Convert an exporter's values to base units; invalid values become NaN.

    NaN, infinities, negative values, DCGM's blanks and impossible magnitudes are missing, never 0.
    A ratio slightly above 1 becomes 1.

    Args:
        values: values as the exporter writes them.
        unit: unit of the values.
        signal: signal that they measure.

    Example:
        >>> values = np.array([50.0, -1.0, 2147483632.0, 101.0])
        >>> convert(values, MetricUnit.PERCENT, Signal.GPU_UTILIZATION).tolist()
        [0.5, nan, nan, 1.0]
    """
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = values * _FACTOR[unit]
        is_value = np.isfinite(values) & (values >= 0) & (values < _INT64_BLANK)
        is_value &= ~((values >= _DOUBLE_BLANK) & (values < _DOUBLE_BLANK + _BLANKS))
        if unit is not MetricUnit.BYTES:  # in bytes a 32-bit blank may be a real value of 2 GiB
            is_value &= ~((values >= _INT32_BLANK) & (values < _INT32_BLANK + _BLANKS))
        is_value &= scaled <= _HIGHEST[signal]
        if _HIGHEST[signal] == _RATIO:
            scaled = np.minimum(scaled, 1.0)
    return np.where(is_value, scaled, np.nan)
