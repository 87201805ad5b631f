"""DCGM's counters of errors on PCIe and NVLink: asked for is how fast they grow."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from extender.core.readings import Signal

LINK_COUNTERS: Final[Mapping[Signal, tuple[str, ...]]] = MappingProxyType(
    {
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
        ),
        Signal.NVLINK_CRC_RATE: (
            "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
            "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
            "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_TOTAL",
            "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_TOTAL",
            "dcgm_nvlink_flit_crc_error_count_total",
            "dcgm_nvlink_data_crc_error_count_total",
        ),
    }
)
"""Names of the counters by what they tell; of several the one that grows fastest counts."""
