import ctypes
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from agent.gpu.backend import Call, Code, Extra, NvmlError, ProcessList
from agent.gpu.nvml import Nvml
from extender.core.devices.readings import Signal
from testkit.agent.fake_driver import FakeDriver, card
from testkit.agent.replay import Replay, nvml_on, refuse

GIB = 1 << 30


def test_a_recorded_card_has_its_recorded_description() -> None:
    card = nvml_on(Replay()).card(0)

    assert replace(card, handle="of the next listing") == card
    assert (card.model, card.index, card.minor) == ("NVIDIA H200", 0, 0)
    assert (card.pci_bus_id, card.has_gpm) == ("00000000:00:06.0", True)
    assert card.uuid == "GPU-00000000-1111-2222-3333-444444444444"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Call.POWER_LIMIT, {Signal.POWER_LIMIT: 700.0}),
        (Call.CLOCK_EVENTS, {Signal.CLOCK_EVENT_REASONS: 1.0}),
        (Call.ENERGY, {Extra.ENERGY: 2270.072}),
        (
            Call.THRESHOLDS,
            {
                Signal.TEMPERATURE_SHUTDOWN: 95.0,
                Signal.TEMPERATURE_SLOWDOWN: 89.0,
                Extra.TEMPERATURE_MEMORY_MAX: 95.0,
            },
        ),
        (
            Call.REMAPPED_ROWS,
            {
                Extra.CORRECTABLE_REMAPPED_ROWS: 0.0,
                Signal.UNCORRECTABLE_REMAPPED_ROWS: 0.0,
                Signal.ROW_REMAP_PENDING: 0.0,
                Signal.ROW_REMAP_FAILURE: 0.0,
            },
        ),
        (Call.FABRIC, {Signal.FABRIC_MANAGER_STATUS: 0.0}),
        (Call.CODECS, {Extra.ENCODER_UTILIZATION: 0.0, Extra.DECODER_UTILIZATION: 0.0}),
    ],
)
def test_recorded_values_are_in_base_units(call: Call, expected: dict[str, float]) -> None:
    replay = Replay()

    assert nvml_on(replay).read(call, replay.handle) == expected


def test_power_clocks_and_temperature_of_a_loaded_card_are_in_base_units() -> None:
    replay = Replay("full_big_matmul")
    nvml = nvml_on(replay)
    replay.now += 2

    assert 650 < nvml.read(Call.POWER, replay.handle)[Signal.POWER] < 700
    assert 55 < nvml.read(Call.TEMPERATURE, replay.handle)[Signal.TEMPERATURE] < 75
    assert nvml.read(Call.CLOCKS, replay.handle) == {
        Extra.SM_CLOCK: pytest.approx(1.485e9, rel=0.1),
        Extra.MEMORY_CLOCK: 3.201e9,
    }


def test_used_memory_excludes_reserved_memory() -> None:
    replay = Replay("loaded_but_idle_60GiB")
    replay.now += 2

    memory = nvml_on(replay).read(Call.MEMORY, replay.handle)

    assert memory[Signal.MEMORY_RESERVED] == replay.calls["memory_v2"]["value"]["reserved"]
    assert memory[Signal.MEMORY_USED] / GIB == pytest.approx(60.5, abs=0.2)
    assert (
        sum(memory[one] for one in (Signal.MEMORY_USED, Signal.MEMORY_FREE))
        < (memory[Signal.MEMORY_TOTAL])
    )


def test_a_driver_before_510_reports_no_reserved_memory() -> None:
    replay = Replay(has_memory_v2=False)
    nvml = nvml_on(replay)

    first = nvml.read(Call.MEMORY, replay.handle)
    requested = replay.requested.count("nvmlDeviceGetMemoryInfo")
    nvml.read(Call.MEMORY, replay.handle)

    assert Signal.MEMORY_RESERVED not in first
    assert first[Signal.MEMORY_USED] == 615 << 20
    assert replay.requested.count("nvmlDeviceGetMemoryInfo") == requested + 1, "the old call alone"


def test_a_start_resets_the_unsupported_calls() -> None:
    replay = Replay(has_memory_v2=False)
    nvml = nvml_on(replay)
    nvml.read(Call.MEMORY, replay.handle)
    replay._has_memory_v2 = True

    nvml.start()

    assert Signal.MEMORY_RESERVED in nvml.read(Call.MEMORY, replay.handle)


def test_an_unsupported_call_is_made_once_per_start() -> None:
    replay = Replay()
    calls = ("nvmlDeviceGetMigMode", "nvmlDeviceGetMinorNumber", "nvmlGpmQueryDeviceSupport")
    for name in calls:
        setattr(replay, f"_{name}", refuse(3))
    nvml = nvml_on(replay)
    for _ in range(3):
        card = nvml.card(0)
        assert (card.minor, card.has_gpm, nvml.instances(card)) == (None, False, None)
    assert [replay.requested.count(name) for name in calls] == [1, 1, 1]

    nvml.start()
    nvml.instances(nvml.card(0))

    assert [replay.requested.count(name) for name in calls] == [2, 2, 2]


def test_an_older_driver_gets_the_newer_fabric_call_once() -> None:
    replay = Replay()
    requested = []

    def fabric(_: object, reference: Any) -> None:
        requested.append(type(reference._obj).__name__)
        if requested[-1] == "c_nvmlGpuFabricInfo_v3_t":
            refuse(25)()

    replay.instead["nvmlDeviceGetGpuFabricInfoV"] = fabric
    nvml = nvml_on(replay)

    for _ in range(2):
        assert nvml.read(Call.FABRIC, replay.handle) == {Signal.FABRIC_MANAGER_STATUS: 0.0}

    older = "c_nvmlGpuFabricInfo_v2_t"
    assert requested == ["c_nvmlGpuFabricInfo_v3_t", older, older]


@pytest.mark.parametrize("call", [Call.NVLINKS, Call.SRAM, Call.FIELDS])
def test_an_unsupported_call_raises_not_supported(call: Call) -> None:
    replay = Replay()

    with pytest.raises(NvmlError) as caught:
        nvml_on(replay).read(call, replay.handle)

    assert caught.value.code is Code.NotSupported


def test_gpm_needs_two_samples() -> None:
    replay = Replay("duty_60pct")
    nvml = nvml_on(replay)
    card = nvml.card(0)

    assert nvml.read_gpm(card, None) == {}
    replay.now += 1
    values = nvml.read_gpm(card, None)

    assert values[Signal.GRAPHICS_ACTIVE] == pytest.approx(0.585, abs=0.02)
    assert values[Signal.SM_ACTIVE] == pytest.approx(0.53, abs=0.02)
    assert values[Signal.TENSOR_ACTIVE] == pytest.approx(0.515, abs=0.02)
    assert values[Signal.DRAM_ACTIVE] == pytest.approx(0.10, abs=0.01)
    assert Extra.PCIE_SENT not in values, "a value that GPM does not report is missing"


def test_gpm_starts_over_after_a_failure() -> None:
    replay = Replay("duty_60pct")
    nvml = nvml_on(replay)
    card = nvml.card(0)
    nvml.read_gpm(card, None)
    replay.instead["nvmlGpmSampleGet"] = refuse(19)

    with pytest.raises(NvmlError, match="nvmlGpmSampleGet"):
        nvml.read_gpm(card, None)
    del replay.instead["nvmlGpmSampleGet"]
    replay.now += 1

    assert nvml.read_gpm(card, None) == {}
    replay.now += 1
    assert Signal.GRAPHICS_ACTIVE in nvml.read_gpm(card, None)


def test_a_card_that_is_listed_again_keeps_its_gpm_sample() -> None:
    replay = Replay("duty_60pct")
    nvml = nvml_on(replay)
    card = nvml.card(0)
    assert nvml.instances(card) is None
    nvml.read_gpm(card, None)
    replay.now += 1

    again = nvml.card(0)
    assert nvml.instances(again) is None
    assert Signal.GRAPHICS_ACTIVE in nvml.read_gpm(again, None)


def test_a_layout_change_drops_gpm_samples() -> None:
    replay = Replay("duty_60pct")
    nvml = nvml_on(replay)
    card = nvml.card(0)
    nvml.instances(card)
    nvml.read_gpm(card, None)
    replay.now += 1

    replay.instead["nvmlDeviceGetMigMode"] = lambda _: (1, 1)
    assert nvml.instances(nvml.card(0)) == ()
    assert nvml.read_gpm(card, None) == {}


def test_only_new_samples_are_read_and_by_their_value_type() -> None:
    replay = Replay("full_big_matmul", has_gpm=False)
    nvml = nvml_on(replay)
    card = nvml.card(0)
    since = int(replay.now * 1e6)
    replay.now += 1.01

    samples = nvml.samples(card, since)

    assert len(samples) == 5
    assert all(0.9 < sample.ratio <= 1 for sample in samples)
    assert all(sample.at_microseconds > since for sample in samples)
    assert nvml.samples(card, samples[-1].at_microseconds) == ()


def test_processes_have_memory_and_utilization() -> None:
    replay = Replay("duty_30pct")
    nvml = nvml_on(replay)
    card = nvml.card(0)

    (process,) = nvml.processes(ProcessList.COMPUTE, card.handle)
    (rate,) = nvml.process_rates(card, 0)

    assert (process.pid, process.memory_bytes, process.gpu_instance_id) == (457, 5211422720, None)
    assert (rate.pid, rate.utilization_ratio) == (457, 0.28)


def test_no_process_utilization_is_not_an_error() -> None:
    replay = Replay("idle")
    nvml = nvml_on(replay)

    assert nvml.process_rates(nvml.card(0), 0) == ()
    replay.instead["nvmlDeviceGetProcessUtilization"] = refuse(
        0
    )  # how pynvml reports an empty answer
    assert nvml.process_rates(nvml.card(0), 0) == ()


def test_a_list_that_grew_during_the_call_is_read_again() -> None:
    replay = Replay("duty_30pct")
    nvml = nvml_on(replay)
    answers = [refuse(7), replay._nvmlDeviceGetComputeRunningProcesses]

    def answer(handle: object) -> Any:
        return answers.pop(0)(handle)

    replay.instead["nvmlDeviceGetComputeRunningProcesses"] = answer

    assert [one.pid for one in nvml.processes(ProcessList.COMPUTE, replay.handle)] == [457]


def test_a_driver_before_510_lists_no_processes_but_other_reads_work(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path)  # has no nvmlDeviceGetComputeRunningProcesses_v3
    driver.has(card(0, busy=40))
    code = "from agent.gpu.backend import *; from agent.gpu.nvml import Nvml\n"
    code += "it = Nvml(); it.start()\n"
    code += "one = it.card(0); print(it.read(Call.RATES, one.handle))\n"
    code += "try: it.processes(ProcessList.COMPUTE, one.handle)\n"
    code += "except NvmlError as error: print(error.code.name)"

    result = subprocess.run(
        [sys.executable, "-c", code],
        env=driver.environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert "0.4" in result.stdout
    assert result.stdout.endswith("FunctionNotFound\n")


@pytest.mark.parametrize("used", [None, (1 << 64) - 1, (1 << 64) - 2, -1], ids=str)
def test_unreported_process_memory_is_unknown(used: int | None) -> None:
    replay = Replay()
    line = SimpleNamespace(pid=5, usedGpuMemory=used, gpuInstanceId=3)
    replay.instead["nvmlDeviceGetComputeRunningProcesses"] = lambda _: [line]

    (process,) = nvml_on(replay).processes(ProcessList.COMPUTE, replay.handle)

    assert (process.memory_bytes, process.gpu_instance_id) == (None, 3)


def test_failed_field_values_are_missing() -> None:
    replay = Replay()

    def field(number: int, value: int, failed: int = 0) -> Any:
        union = SimpleNamespace(uiVal=value, dVal=-1.0)
        return SimpleNamespace(fieldId=number, nvmlReturn=failed, valueType=1, value=union)

    replay.instead["nvmlDeviceGetFieldValues"] = lambda _, __: [
        field(82, 45),
        field(230, 1),
        field(4, 9, 3),
    ]

    assert nvml_on(replay).read(Call.FIELDS, replay.handle) == {
        Signal.MEMORY_TEMPERATURE: 45.0,
        Signal.RECOVERY_ACTION: 1.0,
    }


@pytest.mark.parametrize(
    ("state", "status", "expected"), [(3, 0, 3.0), (3, 999, 4.0), (2, 0, 2.0), (1, 0, 1.0)]
)
def test_a_fabric_with_an_error_status_has_failed(state: int, status: int, expected: float) -> None:
    replay = Replay()

    def fabric(_: object, reference: Any) -> None:
        info = reference._obj
        info.state, info.status, info.healthSummary = state, status, 2

    replay.instead["nvmlDeviceGetGpuFabricInfoV"] = fabric

    assert nvml_on(replay).read(Call.FABRIC, replay.handle) == {
        Signal.FABRIC_MANAGER_STATUS: expected,
        Signal.FABRIC_HEALTH: 2.0,
    }


def test_active_links_are_counted() -> None:
    replay = Replay()
    states = [1, 0, 1]
    replay.instead["nvmlDeviceGetNvLinkState"] = lambda _, link: (
        states[link] if link < len(states) else refuse(2)()
    )

    assert nvml_on(replay).read(Call.NVLINKS, replay.handle) == {Extra.NVLINKS_UP: 2.0}


@pytest.mark.parametrize("number", [0, 1])
def test_topology_has_numa_node_and_nvlink_peers(tmp_path: Path, number: int) -> None:
    replay = Replay()
    folder = tmp_path / "0000:00:06.0"
    folder.mkdir()
    (folder / "numa_node").write_text(f"{number}\n")
    buses = {0: "00000000:00:06.0", 1: "00000000:C6:00.0"}
    replay.instead["nvmlDeviceGetNvLinkState"] = lambda _, link: 1 if link in buses else refuse(2)()
    replay.instead["nvmlDeviceGetNvLinkRemotePciInfo"] = lambda _, link: SimpleNamespace(
        busId=buses[link]
    )
    nvml = nvml_on(replay, tmp_path)
    card = nvml.card(0)

    topology = nvml.topology(card, [card])

    assert (topology.numa_node, topology.nvlink_peers) == (number, (card.uuid, "switch"))
    other = replace(card, uuid="GPU-of-an-unknown-address", pci_bus_id="")
    (error,) = nvml.topology(card, [card, other]).unread
    assert "the peer may be a card whose PCI address is unknown" in error.text
    del buses[1]
    assert nvml.topology(card, [card, other]).nvlink_peers == (card.uuid,)


def test_the_numa_node_of_a_virtual_machine_is_unknown(tmp_path: Path) -> None:
    folder = tmp_path / "0000:00:06.0"
    folder.mkdir()
    (folder / "numa_node").write_text("-1\n")
    nvml = nvml_on(Replay(), tmp_path)
    card = nvml.card(0)

    assert nvml.topology(card, [card]).numa_node is None


@pytest.mark.parametrize("code", [1, 4, 9, 15, 16, 17, 18, 999, 12345])
def test_nvml_errors_keep_code_and_text(code: int) -> None:
    replay = Replay()
    replay.instead["nvmlDeviceGetPowerUsage"] = refuse(code)

    with pytest.raises(NvmlError) as caught:
        nvml_on(replay).read(Call.POWER, replay.handle)

    expected = code if code in {one.value for one in Code} else Code.Unknown
    assert caught.value.code == expected
    assert caught.value.call == "nvmlDeviceGetPowerUsage"
    assert str(caught.value) == f"nvmlDeviceGetPowerUsage: {caught.value.text} ({code})"


def test_error_codes_are_those_of_nvml_by_name() -> None:
    words = {one: re.sub(r"(?<!^)(?=[A-Z])", "_", one.name).upper() for one in Code if one}

    assert {one: getattr(pynvml, f"NVML_ERROR_{name}") for one, name in words.items()} == {
        one: one.value for one in words
    }


def test_the_real_library_without_a_driver_raises_library_not_found() -> None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a driver")

    with pytest.raises(NvmlError) as caught:
        Nvml().start()

    assert caught.value.code is Code.LibraryNotFound


def test_stop_undoes_every_successful_start() -> None:
    calls: list[str] = []
    module = SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        NVMLError=type("NVMLError", (Exception,), {}),
        NVMLLibraryMismatchError=type("NVMLLibraryMismatchError", (Exception,), {}),
    )
    nvml = Nvml(module)

    nvml.start()  # abandoned by the worker, but successful
    nvml.start()
    nvml.stop()
    nvml.start()
    nvml.stop()

    assert calls == ["init", "init", "shutdown", "shutdown", "init", "shutdown"]


def test_a_node_may_have_no_cards() -> None:
    replay = Replay()
    replay.instead["nvmlDeviceGetCount"] = lambda: 0

    assert nvml_on(replay).count() == 0


@pytest.mark.parametrize("count", [-1, 2**32 - 1, 2**64])
def test_an_absurd_number_of_cards_is_an_error_and_no_endless_list(count: int) -> None:
    replay = Replay()
    replay.instead["nvmlDeviceGetCount"] = lambda: count

    with pytest.raises(ValueError, match="cards"):
        nvml_on(replay).count()


@pytest.mark.parametrize("uuid", ["", b"", "x" * 257, "GPU-\x9b1", b"\xff", None, 7], ids=repr)
def test_a_card_without_a_valid_uuid_cannot_be_opened(uuid: object) -> None:
    replay = Replay()
    replay.instead["nvmlDeviceGetUUID"] = lambda _: uuid

    with pytest.raises((TypeError, ValueError)):
        nvml_on(replay).card(0)


@pytest.mark.parametrize("name", ["x" * 257, "H200\u202e", "H200\n", "\ud800"], ids=repr)
def test_a_malformed_name_is_unknown(name: str) -> None:
    replay = Replay()
    replay.instead["nvmlDeviceGetName"] = lambda _: name

    card = nvml_on(replay).card(0)

    assert (card.model, len(card.unread)) == ("", 1)
