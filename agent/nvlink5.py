"""The counters of errors that NVML keeps of NVLink 5 and later, link by link; DCGM's names too.

Such links do not answer the counters of the generations before, nor those these.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from agent.backend import Extra


@dataclass(frozen=True, slots=True)
class LinkCounter:
    """A counter.

    Attributes:
        name: as the agent calls it.
        dcgm: as DCGM does, up to 4.8.
        text: what it counts.
    """

    name: Extra
    dcgm: str
    text: str


LINK_COUNTERS: Final[Mapping[int, LinkCounter]] = MappingProxyType(
    {
        206: LinkCounter(
            Extra.NVLINK_MALFORMED,
            "DCGM_FI_DEV_NVLINK_COUNT_RX_MALFORMED_PACKET_ERRORS",
            "Malformed packets received over NVLink.",
        ),
        207: LinkCounter(
            Extra.NVLINK_OVERRUNS,
            "DCGM_FI_DEV_NVLINK_COUNT_RX_BUFFER_OVERRUN_ERRORS",
            "Packets dropped on receipt over NVLink for want of room.",
        ),
        208: LinkCounter(
            Extra.NVLINK_RECEIVE_ERRORS,
            "DCGM_FI_DEV_NVLINK_COUNT_RX_ERRORS",
            "Packets with errors received over NVLink.",
        ),
        209: LinkCounter(
            Extra.NVLINK_REMOTE_ERRORS,
            "DCGM_FI_DEV_NVLINK_COUNT_RX_REMOTE_ERRORS",
            "Packets received over NVLink that the other end marked bad.",
        ),
        210: LinkCounter(
            Extra.NVLINK_GENERAL_ERRORS,
            "DCGM_FI_DEV_NVLINK_COUNT_RX_GENERAL_ERRORS",
            "Packets with a wrong header received over NVLink.",
        ),
        211: LinkCounter(
            Extra.NVLINK_INTEGRITY_ERRORS,
            "DCGM_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
            "Times that local errors of NVLinks went beyond their threshold.",
        ),
        212: LinkCounter(
            Extra.NVLINK_DISCARDS,
            "DCGM_FI_DEV_NVLINK_COUNT_TX_DISCARDS",
            "Packets with errors dropped before they were sent over NVLink.",
        ),
        213: LinkCounter(
            Extra.NVLINK_RECOVERIES_GOOD,
            "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS",
            "Recoveries of NVLinks that succeeded.",
        ),
        214: LinkCounter(
            Extra.NVLINK_RECOVERIES_FAILED,
            "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
            "Recoveries of NVLinks that failed.",
        ),
        215: LinkCounter(
            Extra.NVLINK_RECOVERIES_BEGUN,
            "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",
            "Recoveries of NVLinks, whatever came of them.",
        ),
        # 216 to 218 are bit error rates that NVIDIA has withdrawn; 220 and 222 count nothing.
        219: LinkCounter(
            Extra.NVLINK_EFFECTIVE_ERRORS,
            "DCGM_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS",
            "Errors in packets received over NVLink that were left after correction.",
        ),
        221: LinkCounter(
            Extra.NVLINK_SYMBOL_ERRORS,
            "DCGM_FI_DEV_NVLINK_COUNT_RX_SYMBOL_ERRORS",
            "Errors in symbols received over NVLink.",
        ),
    }
)
"""By NVML's number of the field, whose scope is the link."""

RECOVERIES: Final = tuple(LINK_COUNTERS[field].name for field in (213, 214, 215))
ERRORS: Final = tuple(
    counter.name for counter in LINK_COUNTERS.values() if counter.name not in RECOVERIES
)
