"""The same facts under DCGM's and NVML's names give extender and agent the same verdict."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from agent.gpu.backend import Call, Code, ProcessList, XidEvent
from agent.gpu.nvml import Nvml
from agent.gpu.session import Cadence
from agent.options import Options
from agent.report.contract import Device, Report
from agent.sampler import Sampler
from extender.core.decision.health import HealthColumns, judge, stress, words
from extender.core.devices.readings import _NVML_ONLY, Column, Signal
from extender.core.policy import Health, HealthAction
from extender.sources.prometheus.dcgm import build_table
from testkit.agent.replay import Replay, error
from testkit.agent.scripted import ScriptedBackend, ScriptedCard
from testkit.collecting import NOW, CollectorState
from testkit.prometheus.fake import FakePrometheus, series, util

OPTIONS = Options(node="here", cadence=Cadence(slow_seconds=1.0))
SECONDS = 60.0
"""Time between two passes."""
EXCLUDE, PENALTY = HealthAction.EXCLUDE, HealthAction.PENALTY
EXCLUDE_NODE, MULTI_GPU = HealthAction.EXCLUDE_NODE, HealthAction.EXCLUDE_MULTI_GPU
NONE = ""

Answers = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A row of the table: one fact under DCGM's and NVML's names, with the expected verdict.

    Attributes:
        dcgm: values of dcgm-exporter by metric; for counters, the growth.
        a_day_ago: the values a day before, where they matter.
        fields: NVML field values in the second pass by field id; 0 in the first.
        calls: NVML answers by call.
        calls_before: NVML answers in the first pass, by call.
        xid: number of an XID error that happened, or None.
        action, cause: the expected health.
        stress: the expected stress ratio.
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
    "the driver asks for a recovery action": Fact(
        dcgm={}, xid=154, fields={230: 5}, action=PENALTY, cause="recovery action: recover IMEX"
    ),
    "the driver requests no recovery action any more": Fact(dcgm={}, xid=154, fields={230: 0}),
}


class Driver(Replay):
    """A recorded card with the answers of a fact."""

    def __init__(self, fact: Fact) -> None:
        super().__init__()
        self.say({**fact.calls, **fact.calls_before})
        self.fields = dict.fromkeys(fact.fields, 0.0)

    def say(self, calls: Answers) -> None:
        reported = dict(calls)
        if "fabric" in reported:
            reported["fabric"] = {**self.calls["fabric"]["value"], **reported["fabric"]}
        answers = {
            name: {"error": 3} if value is None else {"value": value}
            for name, value in reported.items()
        }
        self.calls = {**self.calls, **answers}

    def _nvmlDeviceGetFieldValues(self, _: Any, requested: list[Any]) -> list[Any]:
        return [
            self._field(*one) if isinstance(one, tuple) else self._field(one) for one in requested
        ]

    def _field(self, number: int, link: int = 0) -> Any:
        return SimpleNamespace(
            fieldId=number,
            nvmlReturn=0 if number in self.fields and not link else 3,
            valueType=0,
            value=SimpleNamespace(dVal=self.fields.get(number)),
        )

    @override
    def _nvmlDeviceGetTemperatureV(self, handle: Any, sensor: int) -> int:
        if "temperature" in self.calls:
            return int(self._recorded("temperature"))
        return super()._nvmlDeviceGetTemperatureV(handle, sensor)

    def _nvmlDeviceGetSramEccErrorStatus(self, _: Any, reference: Any) -> None:
        reference._obj.bThresholdExceeded = self._recorded("sram")

    @override
    def _nvmlDeviceGetGpuFabricInfoV(self, _: Any, reference: Any) -> None:
        info, known = reference._obj, self.calls["fabric"]["value"]
        if not hasattr(info, "healthSummary"):
            raise error(25)
        info.state, info.status = known["state"], known["status"]
        info.healthSummary = known.get("healthSummary", 0)


async def report_of(fact: Fact) -> Report:
    """Return the agent's report for a card with a fact."""
    driver = Driver(fact)

    def clock() -> float:
        return float(driver.now)

    with contextlib.closing(
        Sampler(Nvml(driver), OPTIONS, clock=clock, monotonic=clock)
    ) as sampler:
        first = await sampler.sample()
        driver.now += SECONDS
        driver.fields.update(fact.fields)
        driver.say(fact.calls)
        if fact.xid is not None:
            event = XidEvent(uuid=first.devices[0].uuid, gpu_instance_id=None, xid=fact.xid)
            sampler.xids.add(event, clock())
        return await sampler.sample()


def reported(columns: Mapping[Signal, Column]) -> tuple[str, str, float]:
    """Return the extender's action, cause and stress of the only device."""
    found = judge(columns, 1, Health(), np.array([True]), np.array([False]))
    return _action(found), words(int(found.cause[0])), float(stress(columns, 1, Health())[0])


def _action(found: HealthColumns) -> str:
    if found.is_node_excluded[0]:
        return EXCLUDE_NODE
    if found.is_excluded[0]:
        return EXCLUDE
    if found.is_excluded_multi[0]:
        return MULTI_GPU
    return PENALTY if found.penalty[0] else NONE


def by_agent(device: Device) -> tuple[str, str, float]:
    verdict = device.verdict
    assert verdict is not None
    assert bool(verdict.stress_ratio) == bool(verdict.stress_cause)
    return verdict.action, verdict.cause, verdict.stress_ratio


def columns_of(report: Report) -> dict[Signal, Column]:
    return {
        Signal(name): np.array(values, dtype=np.float64) for name, values in report.signals.items()
    }


@pytest.fixture
async def prometheus() -> AsyncIterator[FakePrometheus]:
    fake = FakePrometheus(clock=lambda: NOW)
    server = await fake.start()
    yield fake
    await server.close()


@pytest.mark.parametrize("fact", FACTS.values(), ids=FACTS.keys())
async def test_the_same_facts_by_dcgm_and_by_nvml_give_the_same_verdict(
    fact: Fact, prometheus: FakePrometheus
) -> None:
    labels: dict[str, Any] = {"UUID": "GPU-1", "Hostname": "gpu-1"}
    prometheus.series = [
        util(0),
        *(series(name, value, **labels) for name, value in fact.dcgm.items()),
    ]
    prometheus.a_day_ago = [series(name, value, **labels) for name, value in fact.a_day_ago.items()]
    requested = await CollectorState(prometheus.url).round(NOW)

    report = await report_of(fact)

    expected: object = (fact.action, fact.cause, pytest.approx(fact.stress))
    assert reported(requested.columns) == expected, "the extender, of DCGM"
    assert reported(columns_of(report)) == expected, "the extender, of the agent's report"
    assert by_agent(report.devices[0]) == expected, "the agent"


@pytest.mark.parametrize("fact", OF_NVML_ALONE.values(), ids=OF_NVML_ALONE.keys())
async def test_nvml_only_signals_give_extender_and_agent_the_same_verdict(fact: Fact) -> None:
    report = await report_of(fact)

    expected: object = (fact.action, fact.cause, pytest.approx(fact.stress))
    assert reported(columns_of(report)) == expected, "the extender"
    assert by_agent(report.devices[0]) == expected, "the agent"


def test_every_health_metric_is_in_the_table() -> None:
    of_load = ("_ratio", "_bytes", "_watts")
    signals = {
        one
        for one in Signal
        if one not in _NVML_ONLY | {Signal.HEALTH_STATUS} and not one.value.endswith(of_load)
    }
    names = {name for fact in FACTS.values() for name in fact.dcgm}

    assert {one.signal for one in build_table() if one.name in names} == signals


async def test_a_card_that_only_demands_a_reset_is_excluded() -> None:
    cards = ScriptedCard("GPU-0"), ScriptedCard("GPU-1")
    backend = ScriptedBackend(*cards)
    now = NOW

    def clock() -> float:
        return now

    with contextlib.closing(Sampler(backend, OPTIONS, clock=clock, monotonic=clock)) as sampler:
        await sampler.sample()
        calls = (*Call, *ProcessList, "samples", "process_rates")
        backend.faults = {(call, "GPU-1"): Code.ResetRequired for call in calls}
        now += SECONDS
        broken = (await sampler.sample()).devices[1]
        backend.faults.clear()
        now += SECONDS
        mended = (await sampler.sample()).devices[1]

    assert by_agent(broken) == (EXCLUDE, "recovery action: reset", 0.0)
    assert (broken.age_seconds, broken.problem is not None) == (0.0, True)
    assert (by_agent(mended), mended.problem) == ((NONE, "", 0.0), None)


async def test_a_changed_recovery_action_is_read_at_once() -> None:
    card = ScriptedCard("GPU-0")
    backend = ScriptedBackend(card)
    slow = Options(node="here", cadence=Cadence(slow_seconds=3600.0))
    with contextlib.closing(Sampler(backend, slow)) as sampler:
        await sampler.sample()
        card.set(Call.FIELDS, RECOVERY_ACTION=2.0)
        before = await sampler.sample()
        sampler._note_xid(XidEvent(uuid="GPU-0", gpu_instance_id=None, xid=154))
        after = await sampler.sample()

    assert by_agent(before.devices[0])[0] == NONE
    assert by_agent(after.devices[0]) == (EXCLUDE, "recovery action: reboot", 0.0)
