"""An NVML that returns or raises anything at any time: the agent must continue and report.

An odd answer must cost exactly the value that it stands for, with its cause, and not the card.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from agent.exporter.dcgm_names import DcgmCollector
from agent.exporter.metrics import AgentCollector
from agent.gpu.backend import Extra
from agent.gpu.events import XidWatcher
from agent.gpu.session import Cadence, Session
from agent.gpu.worker import CallTracker
from agent.options import Options
from agent.report import contract
from agent.sampler import Sampler
from extender.core.devices.readings import Signal
from testkit.agent.json_report import decode_report
from testkit.agent.replay import Replay, error, nvml_on, refuse

LOST = 15
RAISED = (
    *(IndexError("9"), KeyError(3), AttributeError("sVal"), TypeError("t"), ValueError("v")),
    *(MemoryError(), OSError(5, "io"), RecursionError(), OverflowError(), ZeroDivisionError()),
    *(UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"), StopIteration(), AssertionError()),
    *(error(code) for code in (0, -5, LOST, 17, 19, 999, 31_337)),
)
ANSWERED: tuple[object, ...] = (
    *(None, -1, 2**64, -(2**70), float("nan"), float("inf"), True),
    *("", "x" * 100_000, b"\xff\xfe", [], (), {}, [None], object()),
)


class Odd:
    """Wraps the module and sometimes answers in its place."""

    def __init__(self, module: object, seed: int, ratio: float) -> None:
        self._module = module
        self._random = random.Random(seed)
        self._ratio = ratio

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        if not name.startswith("nvml") or not name[4:5].isupper():
            return real
        return lambda *arguments: self._answer(real, arguments)

    def _answer(self, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        drawn = self._random.random()
        if drawn < self._ratio:
            raise self._random.choice(RAISED)
        if drawn < 2 * self._ratio:
            return self._random.choice(ANSWERED)
        return real(*arguments)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ratio", [0.02, 0.2])
async def test_every_pass_ends_in_a_report_for_any_nvml_answer_or_error(
    seed: int, ratio: float
) -> None:
    backend = nvml_on(Replay())
    sound = backend._nvml.module
    backend._nvml.module = Odd(sound, seed, ratio)
    cadence = Cadence(slow_seconds=0.0, process_seconds=0.0, retry_seconds=0.01)
    sampler = Sampler(backend, Options(node="gpu-7", cadence=cadence))
    sampler.watcher.close()  # its threads would consume the same random numbers

    for number in range(1, 16):
        report = await sampler.sample()
        assert decode_report(contract.encode(report, sent_at=1.0)).sequence == number
        assert list(AgentCollector(sampler, time.time).collect())
        list(DcgmCollector(sampler.latest, time.time).collect())

    backend._nvml.module = sound
    sampler.session._start_at = 0.0
    await sampler.sample()
    report = await sampler.sample()
    sampler.close()
    assert report.problem is None
    readable = [device for device in report.devices if device.uuid.startswith("GPU-0000")]
    assert [device.problem for device in readable] == [None], "it is well as soon as NVML is"


GPM = {
    *(Signal.GRAPHICS_ACTIVE, Signal.SM_ACTIVE, Signal.TENSOR_ACTIVE, Signal.DRAM_ACTIVE),
    *(Extra.SM_OCCUPANCY, "source"),
    *(Signal.GPU_UTILIZATION, Signal.MEMORY_COPY_UTILIZATION),  # read in its place
}
COSTS: dict[str, set[str]] = {
    "nvmlSystemGetDriverVersion": {"driver_version"},
    "nvmlDeviceGetName": {"model"},
    "nvmlDeviceGetMinorNumber": {"minor"},
    "nvmlDeviceGetPciInfo": {"pci_bus_id", "nvlink_peers"},  # a peer is known by its address
    "nvmlDeviceGetMigMode": set(),  # as on a card without MIG
    "nvmlGpmQueryDeviceSupport": {"has_gpm", *GPM},
    "nvmlGpmSampleAlloc": GPM,
    "nvmlGpmSampleGet": GPM,
    "nvmlGpmMetricsGet": GPM,
    "nvmlDeviceGetNvLinkState": {"nvlink_peers", Extra.NVLINKS_UP, Signal.NVLINKS_DOWN},
    "nvmlDeviceGetNvLinkRemotePciInfo": {"nvlink_peers"},
    "nvmlDeviceGetPowerUsage": {Signal.POWER},
    "nvmlDeviceGetEnforcedPowerLimit": {Signal.POWER_LIMIT},
    "nvmlDeviceGetTotalEnergyConsumption": {Extra.ENERGY},
    "nvmlDeviceGetTemperatureV": {Signal.TEMPERATURE},
    "nvmlDeviceGetTemperatureThreshold": {
        *(Signal.TEMPERATURE_SHUTDOWN, Signal.TEMPERATURE_SLOWDOWN, Extra.TEMPERATURE_MEMORY_MAX)
    },
    "nvmlDeviceGetCurrentClocksEventReasons": {Signal.CLOCK_EVENT_REASONS},
    "nvmlDeviceGetClockInfo": {Extra.SM_CLOCK, Extra.MEMORY_CLOCK},
    "nvmlDeviceGetMemoryInfo": {
        *(Signal.MEMORY_TOTAL, Signal.MEMORY_USED, Signal.MEMORY_FREE, Signal.MEMORY_RESERVED)
    },
    "nvmlDeviceGetRemappedRows": {
        *(Signal.UNCORRECTABLE_REMAPPED_ROWS, Extra.CORRECTABLE_REMAPPED_ROWS),
        *(Signal.ROW_REMAP_PENDING, Signal.ROW_REMAP_FAILURE),
    },
    "nvmlDeviceGetGpuFabricInfoV": {Signal.FABRIC_MANAGER_STATUS, Signal.FABRIC_HEALTH},
    "nvmlDeviceGetSramEccErrorStatus": {Signal.SRAM_THRESHOLD_EXCEEDED},
    "nvmlDeviceGetFieldValues": set(),  # not supported by the recorded card
    "nvmlDeviceGetEncoderUtilization": {Extra.ENCODER_UTILIZATION, Extra.DECODER_UTILIZATION},
    "nvmlDeviceGetDecoderUtilization": {Extra.ENCODER_UTILIZATION, Extra.DECODER_UTILIZATION},
    "nvmlDeviceGetComputeRunningProcesses": {"processes"},
    "nvmlDeviceGetMPSComputeRunningProcesses": set(),
    "nvmlDeviceGetGraphicsRunningProcesses": set(),
    "nvmlDeviceGetProcessUtilization": {"processes"},  # their utilization
    "nvmlDeviceGetUtilizationRates": set(),  # read in the first pass, before GPM
    "nvmlDeviceGetSamples": set(),  # likewise
}
"""What an odd answer of each call may cost; what a call does not name, it must not cost."""

OF_THE_SESSION = {
    "nvmlInit",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
}
"""Without these no card is known."""


class Watched(Replay):
    """A recorded card with a link to a switch, read twice from the start of the agent."""

    def __init__(self) -> None:
        super().__init__("duty_60pct")
        self.instead["nvmlDeviceGetNvLinkState"] = lambda _, link: link == 0 or refuse(2)()
        self.instead["nvmlDeviceGetNvLinkRemotePciInfo"] = lambda _, __: SimpleNamespace(
            busId="00000000:C6:00.0"
        )
        backend = nvml_on(self)
        watcher = XidWatcher(backend, lambda _: None)
        watcher.close()
        self.session = Session(backend, watcher, clock=lambda: self.now, monotonic=lambda: self.now)

    def facts(self) -> dict[str, object]:
        tracker = CallTracker(10.0)
        self.session.read(tracker, ())
        self.now += 1.0
        reading = self.session.read(tracker, ())
        (device,) = reading.devices
        assert (reading.problem, device.problem) == (None, None)
        return {
            "driver_version": reading.driver_version,
            **{name: getattr(device.card, name) for name in ("uuid", "index", "minor", "model")},
            **{name: getattr(device.card, name) for name in ("pci_bus_id", "has_gpm", "has_mig")},
            "nvlink_peers": device.topology.nvlink_peers,
            **{name: getattr(device, name) for name in ("source", "processes", "measured_at")},
            **device.values,
        }


def test_every_call_has_a_cost() -> None:
    sound = Watched()
    sound.facts()

    assert set(sound.requested) == COSTS.keys() | OF_THE_SESSION


@pytest.mark.parametrize("name", COSTS)
def test_an_odd_answer_from_the_start_costs_exactly_its_value(name: str) -> None:
    sound = Watched().facts()
    for odd in (*RAISED, *ANSWERED):
        if getattr(odd, "value", None) == LOST:
            continue  # which is the card's error, whatever call it answers
        node = Watched()
        node.instead[name] = partial(give, odd)
        facts = node.facts()
        lost = {one for one in sound.keys() | facts.keys() if sound.get(one) != facts.get(one)}
        assert lost <= COSTS[name], f"{odd!r:.40}"


@pytest.mark.parametrize(
    ("name", "value", "unknown"),
    [
        ("nvmlSystemGetDriverVersion", "driver_version", ""),
        ("nvmlDeviceGetName", "model", ""),
        ("nvmlDeviceGetMinorNumber", "minor", None),
        ("nvmlDeviceGetPciInfo", "pci_bus_id", ""),
        ("nvmlGpmQueryDeviceSupport", "has_gpm", False),
        ("nvmlDeviceGetMigMode", "has_mig", False),
        ("nvmlDeviceGetNvLinkState", "nvlink_peers", ()),
        ("nvmlDeviceGetNvLinkRemotePciInfo", "nvlink_peers", ()),
    ],
)
@pytest.mark.parametrize("odd", [error(999), IndexError("9")], ids=repr)
def test_a_missing_value_has_its_cause_and_is_read_once_it_can_be(
    name: str, value: str, unknown: object, odd: Exception
) -> None:
    node = Watched()
    sound = node.instead.get(name)
    node.instead[name] = partial(give, odd)

    assert node.facts()[value] == unknown
    causes = {call for call, code in node.session.failures if code == "Unknown"}
    assert causes & {name, "nvlink_peers"}

    del node.instead[name]
    node.instead |= {} if sound is None else {name: sound}
    node.now += 10.0
    assert node.facts()[value] == Watched().facts()[value]


def test_a_value_that_was_known_stays_known() -> None:
    node = Watched()
    sound = node.facts()
    fixed = ("model", "minor", "pci_bus_id", "has_gpm", "has_mig", "nvlink_peers")
    for name in COSTS:
        if name.startswith("nvmlDeviceGet") or name == "nvmlGpmQueryDeviceSupport":
            node.instead[name] = partial(give, error(999))
    node.instead["nvmlDeviceGetPowerUsage"] = lambda _: 80_000
    reader = node.session._readers[str(sound["uuid"])]
    node.now += 10.0

    facts = node.facts()

    assert {name: facts[name] for name in fixed} == {name: sound[name] for name in fixed}
    assert node.session._readers[str(sound["uuid"])] is reader, "and what was counted since"


def give(answer: object, *_: object) -> object:
    if isinstance(answer, Exception):
        raise answer
    return answer
