"""The same facts by DCGM's names and by NVML's: one verdict, the extender's and the agent's."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent.backend import Call, Code, ProcessList, XidEvent
from agent.nvml import Nvml
from agent.options import Options
from agent.report import Device, Report
from agent.sampler import Sampler
from agent.session import Cadence
from extender.core.causes import words
from extender.core.health import HealthColumns, judge
from extender.core.policy import Health
from extender.core.readings import NVML_ONLY, Column, Signal
from extender.core.stress import stress
from extender.sources.dcgm import build_table
from tests.agent.health_facts import (
    EXCLUDE,
    EXCLUDE_NODE,
    FACTS,
    MULTI_GPU,
    NONE,
    OF_NVML_ALONE,
    PENALTY,
    Answers,
    Fact,
)
from tests.agent.replay import Replay, error
from tests.agent.scripted import ScriptedBackend, ScriptedCard
from tests.extender.sources.asking import NOW, Asked
from tests.extender.sources.fake_prometheus import FakePrometheus, series, util

OPTIONS = Options(node="here", cadence=Cadence(slow_seconds=1.0))
SECONDS = 60.0
"""Between two passes."""


class Driver(Replay):
    """A recorded card of which a fact is true."""

    def __init__(self, fact: Fact) -> None:
        super().__init__()
        self.say({**fact.calls, **fact.calls_before})
        self.fields = dict.fromkeys(fact.fields, 0.0)

    def say(self, calls: Answers) -> None:
        told = dict(calls)
        if "fabric" in told:
            told["fabric"] = {**self.calls["fabric"]["value"], **told["fabric"]}
        answers = {
            name: {"error": 3} if value is None else {"value": value}
            for name, value in told.items()
        }
        self.calls = {**self.calls, **answers}

    def _nvmlDeviceGetFieldValues(self, _: Any, asked: list[Any]) -> list[Any]:
        return [self._field(*one) if isinstance(one, tuple) else self._field(one) for one in asked]

    def _field(self, number: int, link: int = 0) -> Any:
        return SimpleNamespace(
            fieldId=number,
            nvmlReturn=0 if number in self.fields and not link else 3,
            valueType=0,
            value=SimpleNamespace(dVal=self.fields.get(number)),
        )

    def _nvmlDeviceGetTemperatureV(self, handle: Any, sensor: int) -> int:
        if "temperature" in self.calls:
            return self._recorded("temperature")
        return super()._nvmlDeviceGetTemperatureV(handle, sensor)

    def _nvmlDeviceGetSramEccErrorStatus(self, _: Any, reference: Any) -> None:
        reference._obj.bThresholdExceeded = self._recorded("sram")

    def _nvmlDeviceGetGpuFabricInfoV(self, _: Any, reference: Any) -> None:
        info, known = reference._obj, self.calls["fabric"]["value"]
        if not hasattr(info, "healthSummary"):
            raise error(25)
        info.state, info.status = known["state"], known["status"]
        info.healthSummary = known.get("healthSummary", 0)


async def report_of(fact: Fact) -> Report:
    """Return what the agent reports where a fact is true of the card."""
    driver = Driver(fact)

    def clock() -> float:
        return driver.now

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


def told(columns: Mapping[Signal, Column]) -> tuple[str, str, float]:
    """Return what the extender makes of columns: action, cause and stress of the one device."""
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
    labels = {"UUID": "GPU-1", "Hostname": "gpu-1"}
    prometheus.series = [
        util(0),
        *(series(name, value, **labels) for name, value in fact.dcgm.items()),
    ]
    prometheus.a_day_ago = [series(name, value, **labels) for name, value in fact.a_day_ago.items()]
    asked = await Asked(prometheus.url).round(NOW)

    report = await report_of(fact)

    expected = (fact.action, fact.cause, pytest.approx(fact.stress))
    assert told(asked.columns) == expected, "the extender, of DCGM"
    assert told(columns_of(report)) == expected, "the extender, of the agent's report"
    assert by_agent(report.devices[0]) == expected, "the agent"


@pytest.mark.parametrize("fact", OF_NVML_ALONE.values(), ids=OF_NVML_ALONE.keys())
async def test_what_nvml_alone_tells_the_extender_and_the_agent_judge_alike(fact: Fact) -> None:
    report = await report_of(fact)

    expected = (fact.action, fact.cause, pytest.approx(fact.stress))
    assert told(columns_of(report)) == expected, "the extender"
    assert by_agent(report.devices[0]) == expected, "the agent"


def test_every_metric_that_tells_health_stands_in_the_table() -> None:
    of_load = ("_ratio", "_bytes", "_watts")
    signals = {
        one
        for one in Signal
        if one not in NVML_ONLY | {Signal.HEALTH_STATUS} and not one.value.endswith(of_load)
    }
    names = {name for fact in FACTS.values() for name in fact.dcgm}

    assert {one.signal for one in build_table() if one.name in names} == signals


async def test_a_card_that_says_only_that_it_must_be_reset_cannot_work() -> None:
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
