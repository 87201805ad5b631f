"""What speaks against a device's health, row by row, as DCGM names it and as NVML does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from extender.core.policy import HealthAction

EXCLUDE, PENALTY = HealthAction.EXCLUDE, HealthAction.PENALTY
EXCLUDE_NODE, MULTI_GPU = HealthAction.EXCLUDE_NODE, HealthAction.EXCLUDE_MULTI_GPU
NONE = ""

Answers = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A row of the table.

    Attributes:
        dcgm: what dcgm-exporter says, by name of the metric; of counters how fast they grow.
        a_day_ago: what it said then, where that matters.
        fields: what NVML says, by number of the field, in the second pass; 0 in the first.
        calls: what it says by call.
        calls_before: likewise, in the first pass.
        xid: that happened.
        action, cause: the verdict.
        stress: how hot or throttled that is.
    """

    dcgm: Mapping[str, float]
    fields: Mapping[int, float] = field(default_factory=dict)
    calls: Answers = field(default_factory=dict)
    a_day_ago: Mapping[str, float] = field(default_factory=dict)
    calls_before: Answers = field(default_factory=dict)
    xid: int | None = None
    action: str = NONE
    cause: str = ""
    stress: float = 0.0


def remapped(correctable: int, uncorrectable: int, pending: int, failure: int) -> Answers:
    return {"nvmlDeviceGetRemappedRows": [correctable, uncorrectable, pending, failure]}


def reasons(mask: int) -> Answers:
    return {"nvmlDeviceGetCurrentClocksEventReasons": mask}


def fabric(state: int, status: int = 0, summary: int = 0) -> Answers:
    return {"fabric": {"state": state, "status": status, "healthSummary": summary}}


def xid(number: int, action: str, cause: str) -> Fact:
    return Fact(dcgm={"DCGM_FI_DEV_XID_ERRORS": number}, xid=number, action=action, cause=cause)


def recovery(number: int, action: str, cause: str) -> Fact:
    return Fact(
        dcgm={"DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION": number},
        fields={230: number},
        action=action,
        cause=cause,
    )


def manager(number: int, action: str, cause: str) -> Fact:
    return Fact(
        dcgm={"DCGM_FI_DEV_FABRIC_MANAGER_STATUS": number},
        calls=fabric(number),
        action=action,
        cause=cause,
    )


def slowed(mask: int, expected: float) -> Fact:
    name = "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"
    return Fact(dcgm={name: mask}, calls=reasons(mask), stress=expected)


FACTS: Mapping[str, Fact] = {
    "an application's XID": xid(31, NONE, ""),
    "an XID that informs": xid(137, NONE, ""),
    "rows were remapped": xid(63, PENALTY, "XID 63: row remapping recorded"),
    "many corrected errors": xid(92, PENALTY, "XID 92: many single-bit memory errors"),
    "a contained error": xid(94, PENALTY, "XID 94: contained memory error"),
    "a double-bit XID": xid(48, EXCLUDE, "XID 48: double-bit memory error"),
    "a GSP timeout": xid(119, EXCLUDE, "XID 119: GSP timed out"),
    "no auxiliary power": xid(54, EXCLUDE, "XID 54: auxiliary power is not connected"),
    "an NVLink XID": xid(74, MULTI_GPU, "XID 74: NVLink error"),
    "a Blackwell NVLink XID": xid(145, MULTI_GPU, "XID 145: NVLink error"),
    "off the bus": xid(79, EXCLUDE_NODE, "XID 79: fallen off the bus"),
    "less memory": xid(168, PENALTY, "XID 168: reduced memory capacity"),
    "an unknown XID": xid(999, PENALTY, "XID 999"),
    "the recovery action changed": xid(154, EXCLUDE, "XID 154: recovery action changed"),
    "row remapping failed": Fact(
        dcgm={"DCGM_FI_DEV_ROW_REMAP_FAILURE": 1},
        calls=remapped(0, 0, 0, 1),
        action=EXCLUDE,
        cause="row remapping failed (RMA)",
    ),
    "a remapped row waits": Fact(
        dcgm={"DCGM_FI_DEV_ROW_REMAP_PENDING": 1},
        calls=remapped(0, 0, 1, 0),
        action=PENALTY,
        cause="a remapped row waits for a reset",
    ),
    "rows remapped long ago": Fact(
        dcgm={"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 90},
        a_day_ago={"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 90},
        calls=remapped(0, 90, 0, 0),
    ),
    "rows remapped on a new card": Fact(
        dcgm={"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 9}, calls=remapped(0, 9, 0, 0)
    ),
    "rows remapped lately": Fact(
        dcgm={"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 92},
        a_day_ago={"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 90},
        calls_before=remapped(0, 90, 0, 0),
        calls=remapped(0, 92, 0, 0),
        action=PENALTY,
        cause="memory rows remapped within a day: 2",
    ),
    "too many remapped rows": Fact(
        dcgm={"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 512},
        calls=remapped(0, 512, 0, 0),
        action=EXCLUDE,
        cause="512 uncorrectable remapped rows",
    ),
    "corrected rows": Fact(
        dcgm={"DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": 900}, calls=remapped(900, 0, 0, 0)
    ),
    "double-bit errors": Fact(
        dcgm={"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2},
        fields={4: 2},
        action=EXCLUDE,
        cause="2 double-bit memory errors since the last reset",
    ),
    "some retired pages": Fact(
        dcgm={"DCGM_FI_DEV_RETIRED_SBE": 10, "DCGM_FI_DEV_RETIRED_DBE": 6},
        fields={29: 10, 30: 6},
        action=PENALTY,
        cause="16 retired memory pages",
    ),
    "too many retired pages": Fact(
        dcgm={"DCGM_FI_DEV_RETIRED_SBE": 60, "DCGM_FI_DEV_RETIRED_DBE": 3},
        fields={29: 60, 30: 3},
        action=EXCLUDE,
        cause="63 retired memory pages",
    ),
    "a page waits": Fact(
        dcgm={"DCGM_FI_DEV_RETIRED_PENDING": 1},
        fields={31: 1},
        action=PENALTY,
        cause="a memory page waits to be retired",
    ),
    "nothing to recover": recovery(0, NONE, ""),
    "reset": recovery(1, EXCLUDE, "recovery action: reset"),
    "reboot": recovery(2, EXCLUDE, "recovery action: reboot"),
    "drain P2P": recovery(3, MULTI_GPU, "recovery action: drain P2P"),
    "drain and reset": recovery(4, EXCLUDE, "recovery action: drain and reset"),
    "recover IMEX": recovery(5, PENALTY, "recovery action: recover IMEX"),
    "bus reset": recovery(6, EXCLUDE, "recovery action: bus reset"),
    "system reboot": recovery(7, EXCLUDE, "recovery action: system reboot"),
    "no NVSwitch": manager(0, NONE, ""),
    "fabric not started": manager(1, EXCLUDE_NODE, "fabric manager not started"),
    "fabric starting": manager(2, PENALTY, "fabric manager still starting"),
    "fabric up": manager(3, NONE, ""),
    "fabric failed": Fact(
        dcgm={"DCGM_FI_DEV_FABRIC_MANAGER_STATUS": 4},
        calls=fabric(3, status=999),
        action=EXCLUDE_NODE,
        cause="fabric manager failed",
    ),
    "PCIe replays": Fact(
        dcgm={"DCGM_FI_DEV_PCIE_REPLAY_COUNTER": 0.5},
        fields={94: 30},
        action=PENALTY,
        cause="30 PCIe packets a minute sent again",
    ),
    "few PCIe replays": Fact(dcgm={"DCGM_FI_DEV_PCIE_REPLAY_COUNTER": 0.125}, fields={94: 7.5}),
    "NVLink replays": Fact(
        dcgm={"DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": 0.5},
        fields={52: 30},
        action=PENALTY,
        cause="30 NVLink packets a minute sent again",
    ),
    "NVLinks recovered": Fact(
        dcgm={"DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": 0.5},
        fields={59: 30},
        action=MULTI_GPU,
        cause="NVLinks that had to recover in the last minutes",
    ),
    "checksums of flits": Fact(
        dcgm={"DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": 150},
        fields={38: 9000},
        action=MULTI_GPU,
        cause="150 NVLink errors a second",
    ),
    "checksums of data": Fact(
        dcgm={"DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": 150},
        fields={45: 9000},
        action=MULTI_GPU,
        cause="150 NVLink errors a second",
    ),
    "NVLinks of the fifth generation recovered": Fact(
        dcgm={"DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS": 0.5},
        fields={215: 30},
        action=MULTI_GPU,
        cause="NVLinks that had to recover in the last minutes",
    ),
    "errors of symbols": Fact(
        dcgm={"DCGM_FI_DEV_NVLINK_COUNT_RX_SYMBOL_ERRORS": 150},
        fields={221: 9000},
        action=MULTI_GPU,
        cause="150 NVLink errors a second",
    ),
    "few errors of packets": Fact(
        dcgm={"DCGM_FI_DEV_NVLINK_COUNT_RX_ERRORS": 50}, fields={208: 3000}
    ),
    "few checksums": Fact(
        dcgm={"DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": 50}, fields={45: 3000}
    ),
    "idle, held by settings, the power cap or for display": slowed(0x117, 0.0),
    "software thermal slowdown": slowed(0x20, 0.5),
    "hardware slowdown": slowed(0x8, 1.0),
    "hardware thermal slowdown": slowed(0x40, 1.0),
    "hardware power brake": slowed(0x80, 1.0),
    "a hot chip": Fact(
        dcgm={"DCGM_FI_DEV_GPU_TEMP": 86},
        calls={"temperature": 86, "threshold_SLOWDOWN": None},
        stress=0.6,
    ),
    "hot memory": Fact(dcgm={"DCGM_FI_DEV_MEMORY_TEMP": 100}, fields={82: 100}, stress=0.5),
}

OF_NVML_ALONE: Mapping[str, Fact] = {
    "SRAM errors": Fact(
        dcgm={},
        calls={"sram": 1},
        action=EXCLUDE,
        cause="uncorrectable SRAM errors beyond their threshold",
    ),
    "an unhealthy fabric": Fact(
        dcgm={}, calls=fabric(3, summary=2), action=EXCLUDE, cause="NVLink fabric unhealthy"
    ),
    "a limited fabric": Fact(
        dcgm={},
        calls=fabric(3, summary=3),
        action=PENALTY,
        cause="NVLink fabric of limited capacity",
    ),
    "as hot as can be": Fact(
        dcgm={},
        calls={"temperature": 95},
        action=EXCLUDE,
        cause="95 °C, at which it switches itself off",
        stress=1.0,
    ),
    "near where its clocks are held back": Fact(dcgm={}, calls={"temperature": 84}, stress=0.5),
    "told to recover, and to what": Fact(
        dcgm={},
        xid=154,
        fields={230: 5},
        action=PENALTY,
        cause="recovery action: recover IMEX",
    ),
    "told that nothing is left to recover": Fact(dcgm={}, xid=154, fields={230: 0}),
}
