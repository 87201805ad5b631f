"""Replay of a recorded card in place of pynvml, for the real `agent.gpu.nvml`."""

import ctypes
import json
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

from agent.gpu.nvml import Nvml

DATA = Path(__file__).parents[2] / "tests" / "agent" / "data"
RECORDED = {name: json.loads((DATA / f"{name}.json").read_text()) for name in ("h100", "h200")}
LOADS = [(card, load) for card, recorded in RECORDED.items() for load in recorded["series"]]

MIB = 1 << 20
_GPM = {1: "graphics_util", 2: "sm_util", 3: "sm_occupancy", 5: "tensor", 10: "dram_bw"}
_THRESHOLDS = {0: "threshold_SHUTDOWN", 1: "threshold_SLOWDOWN", 2: "threshold_MEM_MAX"}
_NOT_SUPPORTED, _NOT_FOUND = 3, 6
_NO_INSTANCE = 0xFFFFFFFF


def error(code: int) -> Exception:
    made: Exception = pynvml.NVMLError(code)
    return made


class Replay:
    """Driver that returns the recorded answers at time `now`; unrecorded calls are not supported.

    Args:
        load: name of the recorded series.
        card: name of the recording.
        has_gpm: whether the card supports GPM; False for a card before Hopper.
        has_memory_v2: whether the driver supports version 2 of the memory call.
    """

    def __init__(
        self,
        load: str = "idle",
        card: str = "h200",
        *,
        has_gpm: bool = True,
        has_memory_v2: bool = True,
    ) -> None:
        self.calls: dict[str, Any] = RECORDED[card]["calls"]
        self._series = RECORDED[card]["series"][load]
        self._times = [self._series["start"] + t for t in self._series["t"]]
        self._has_gpm = has_gpm
        self._has_memory_v2 = has_memory_v2
        self.now = self._times[0]
        self.end = self._times[-1]
        self.requested: list[str] = []
        self.instead: dict[str, Callable[..., Any]] = {}
        self._kept: list[Any] = []
        self._sampled: dict[int, float] = {}
        self.handle = self._pointer()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml") and name[4].isupper():
            return lambda *arguments: self._answer(name, arguments)
        return getattr(pynvml, name)

    def _pointer(self) -> Any:
        """Return a pointer to use as a handle."""
        self._kept.append(ctypes.c_int(0))
        return ctypes.cast(ctypes.pointer(self._kept[-1]), pynvml.c_nvmlGpmSample_t)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.requested.append(name)
        own = self.instead.get(name) or getattr(self, f"_{name}", None)
        if own is not None:
            return own(*arguments)
        return self._recorded(name)

    def _recorded(self, name: str) -> Any:
        answer = self.calls.get(name, {"error": _NOT_SUPPORTED})
        if "error" in answer:
            raise error(answer["error"])
        value = answer["value"]
        return SimpleNamespace(**value) if isinstance(value, dict) else value

    def _at(self, column: str) -> Any:
        """Return the latest reading of a column at `now`."""
        return self._series[column][max(bisect_right(self._times, self.now) - 1, 0)]

    def _between(self, after: float, until: float) -> range:
        return range(bisect_right(self._times, after), bisect_right(self._times, until))

    def _nvmlInit(self) -> None:
        pass

    def _nvmlShutdown(self) -> None:
        pass

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        assert index == 0
        return self.handle

    def _nvmlGpmQueryDeviceSupport(self, _: Any) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self._has_gpm))

    def _nvmlDeviceGetUtilizationRates(self, _: Any) -> Any:
        return SimpleNamespace(gpu=self._at("gpu"), memory=self._at("mem_ctrl"))

    def _nvmlDeviceGetMemoryInfo(self, _: Any, version: int = 0) -> Any:
        free, used = self._at("free_mib") * MIB, self._at("used_mib") * MIB
        total = self.calls["memory_v2"]["value"]["total"]
        if not version:
            return SimpleNamespace(total=total, free=free, used=used)
        if not self._has_memory_v2:
            raise error(13)
        reserved = self.calls["memory_v2"]["value"]["reserved"]
        used = max(used - reserved, 0)
        return SimpleNamespace(total=total, free=free, used=used, reserved=reserved)

    def _nvmlDeviceGetPowerUsage(self, _: Any) -> int:
        return int(self._at("power_w") * 1000)

    def _nvmlDeviceGetTemperatureV(self, _: Any, sensor: int) -> int:
        assert sensor == 0
        return int(self._at("temp_c"))

    def _nvmlDeviceGetTemperatureThreshold(self, _: Any, kind: int) -> int:
        return int(self._recorded(_THRESHOLDS[kind]))

    def _nvmlDeviceGetClockInfo(self, _: Any, kind: int) -> int:
        return int(self._at("sm_mhz") if kind == 1 else self._recorded("clock_MEM"))

    def _nvmlDeviceGetNvLinkState(self, _: Any, __: int) -> int:
        return int(self._recorded("nvlink0"))

    def _nvmlDeviceGetGpuFabricInfoV(self, _: Any, reference: Any) -> None:
        info = reference._obj
        recorded = self.calls["fabric"]["value"]
        if info.version != recorded["version"]:
            raise error(25)
        info.state, info.status = recorded["state"], recorded["status"]

    def _nvmlDeviceGetComputeRunningProcesses(self, _: Any) -> list[Any]:
        return [
            SimpleNamespace(pid=one["pid"], usedGpuMemory=one["memory"], gpuInstanceId=_NO_INSTANCE)
            for one in self._series["processes"]
        ]

    def _nvmlDeviceGetProcessUtilization(self, _: Any, __: int) -> list[Any]:
        lines = [
            SimpleNamespace(pid=one["pid"], timeStamp=int(self.now * 1e6), smUtil=one["sm"])
            for one in self._series["processes"]
            if one["sm"] is not None
        ]
        if not lines:
            raise error(self.calls["process_utilization"]["error"])
        return lines

    def _nvmlDeviceGetSamples(self, _: Any, kind: int, since: int) -> Any:
        assert kind == 1
        found = [at for at in self._between(0, self.now) if _microseconds(self._times[at]) > since]
        if not found:
            raise error(_NOT_FOUND)
        return 1, [
            SimpleNamespace(
                timeStamp=_microseconds(self._times[at]),
                # Like the driver, set only the field of the value's type; the others hold garbage.
                sampleValue=SimpleNamespace(uiVal=self._series["gpu"][at], dVal=1e-188),
            )
            for at in found
        ]

    def _nvmlGpmSampleAlloc(self) -> Any:
        return self._pointer()

    def _nvmlGpmSampleFree(self, sample: Any) -> None:
        del self._sampled[_address(sample)]

    def _nvmlGpmSampleGet(self, _: Any, sample: Any) -> Any:
        self._sampled[_address(sample)] = self.now
        return sample

    def _nvmlGpmMetricsGet(self, request: Any) -> Any:
        older, newer = (self._sampled[_address(s)] for s in (request.sample1, request.sample2))
        found = self._between(older, newer)
        for at in range(request.numMetrics):
            metric = request.metrics[at]
            column = self._series["gpm"].get(_GPM.get(metric.metricId, ""))
            known = [column[row] for row in found if column[row] is not None] if column else []
            metric.nvmlReturn = 0 if known else _NOT_SUPPORTED
            metric.value = sum(known) / len(known) if known else float("nan")
        return request


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _address(pointer: Any) -> int:
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    assert address is not None
    return address


def nvml_on(replay: Replay, tmp_path: Path = Path("/nowhere")) -> Nvml:
    nvml = Nvml(replay, sys_pci=tmp_path)
    nvml.start()
    return nvml


def refuse(code: int) -> Any:
    def answer(*_: object) -> Any:
        raise error(code)

    return answer
