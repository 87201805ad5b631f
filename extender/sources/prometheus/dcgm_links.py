"""DCGM's counters of errors on PCIe and NVLink: asked for is how fast they grow."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from extender.core.devices.readings import Signal

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
            # Since NVLink 5, by their names up to 4.8 and since.
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
            # Likewise; DCGM itself calls a GPU unhealthy as soon as one of these grows at all.
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
)
"""Names of the counters by what they tell; of several the one that grows fastest counts."""
