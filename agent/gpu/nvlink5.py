"""NVML's error counters of NVLink 5 and later, per link, with DCGM's names.

Earlier generations of NVLink have other counters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from agent.gpu.backend import Extra


@dataclass(frozen=True, slots=True)
class _LinkCounter:
    """An error counter of a link.

    Attributes:
        name: the agent's name of the counter.
        dcgm: DCGM's name, up to DCGM 4.8.
        text: help text of the metric.
    """

    name: Extra
    dcgm: str
    text: str


LINK_COUNTERS: Final[Mapping[int, _LinkCounter]] = MappingProxyType(
    {
        206: _LinkCounter(
            Extra.NVLINK_MALFORMED,
            "DCGM_FI_DEV_NVLINK_COUNT_RX_MALFORMED_PACKET_ERRORS",
            "Malformed packets received over NVLink.",
        ),
        207: _LinkCounter(
            Extra.NVLINK_OVERRUNS,
            "DCGM_FI_DEV_NVLINK_COUNT_RX_BUFFER_OVERRUN_ERRORS",
            "Packets received over NVLink and dropped for lack of buffer space.",
        ),
        208: _LinkCounter(
            Extra.NVLINK_RECEIVE_ERRORS,
            "DCGM_FI_DEV_NVLINK_COUNT_RX_ERRORS",
            "Packets with errors received over NVLink.",
        ),
        209: _LinkCounter(
            Extra.NVLINK_REMOTE_ERRORS,
            "DCGM_FI_DEV_NVLINK_COUNT_RX_REMOTE_ERRORS",
            "Packets received over NVLink that the sender marked as bad.",
        ),
        210: _LinkCounter(
            Extra.NVLINK_GENERAL_ERRORS,
            "DCGM_FI_DEV_NVLINK_COUNT_RX_GENERAL_ERRORS",
            "Packets with a wrong header received over NVLink.",
        ),
        211: _LinkCounter(
            Extra.NVLINK_INTEGRITY_ERRORS,
            "DCGM_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
            "Times that local NVLink errors exceeded their threshold.",
        ),
        212: _LinkCounter(
            Extra.NVLINK_DISCARDS,
            "DCGM_FI_DEV_NVLINK_COUNT_TX_DISCARDS",
            "Packets with errors dropped before they were sent over NVLink.",
        ),
        213: _LinkCounter(
            Extra.NVLINK_RECOVERIES_GOOD,
            "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS",
            "Recoveries of NVLinks that succeeded.",
        ),
        214: _LinkCounter(
            Extra.NVLINK_RECOVERIES_FAILED,
            "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
            "Recoveries of NVLinks that failed.",
        ),
        215: _LinkCounter(
            Extra.NVLINK_RECOVERIES_BEGUN,
            "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",
            "Recoveries of NVLinks, successful or not.",
        ),
        # 216 to 218 are withdrawn bit error rates; 220 and 222 are not counters.
        219: _LinkCounter(
            Extra.NVLINK_EFFECTIVE_ERRORS,
            "DCGM_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS",
            "Errors left after correction in packets received over NVLink.",
        ),
        221: _LinkCounter(
            Extra.NVLINK_SYMBOL_ERRORS,
            "DCGM_FI_DEV_NVLINK_COUNT_RX_SYMBOL_ERRORS",
            "Errors in symbols received over NVLink.",
        ),
    }
)
"""Counters by NVML field id; each field is read per link."""

RECOVERIES: Final = tuple(LINK_COUNTERS[field].name for field in (213, 214, 215))
ERRORS: Final = tuple(
    counter.name for counter in LINK_COUNTERS.values() if counter.name not in RECOVERIES
)
