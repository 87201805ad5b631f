"""Record the answers of a real GPU for `testkit.agent.replay`: `python -m tests.agent.record FILE`.

It reads the first card through NVML: constant values once, changing values five times a second
under loads of known duty cycle. Needs Hopper or later, because GPM is the reference for the loads,
and exclusive use of the card. Replaces the card's UUID.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from ctypes import byref
from pathlib import Path
from typing import Any, Final

import pynvml

from testkit.agent.loads import load

UUID: Final = "GPU-00000000-1111-2222-3333-444444444444"
PERIOD_SECONDS: Final = 0.2
MIB: Final = 1 << 20
HELD_GIB: Final = 60
READINGS: Final = 40
SETTLE_SECONDS: Final = 3.0

LOADS: Final[Mapping[str, tuple[float, float] | None]] = {
    "idle": None,
    f"loaded_but_idle_{HELD_GIB}GiB": (0.0, HELD_GIB),
    "duty_10pct": (0.1, 4),
    "duty_30pct": (0.3, 4),
    "duty_60pct": (0.6, 4),
    "full": (1.0, 4),
    "after": None,
}
"""Loads by name: (share of time that the card is busy, GiB of memory held); None for no load."""

PLAIN: Final = (
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetEncoderUtilization",
    "nvmlDeviceGetDecoderUtilization",
)
GPM: Final[Mapping[str, int]] = {
    "graphics_util": 1,
    "sm_util": 2,
    "sm_occupancy": 3,
    "tensor": 5,
    "dram_bw": 10,
}


def plain(value: Any) -> Any:
    """Convert an answer to JSON types."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "_fields_"):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if hasattr(value, "__len__") and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def answer(call: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return the result of a call, or the code of its error."""
    try:
        return {"value": plain(call(*arguments))}
    except pynvml.NVMLError as error:
        return {"error": error.value}


def fabric(handle: Any) -> Any:
    """Return version 2 of the driver's fabric info."""
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    return info


def calls(handle: Any) -> dict[str, Any]:
    """Return the constant values."""
    found = {
        "nvmlSystemGetDriverVersion": answer(pynvml.nvmlSystemGetDriverVersion),
        "nvmlDeviceGetCount": answer(pynvml.nvmlDeviceGetCount),
        "nvmlDeviceGetUUID": {"value": UUID},
    }
    for name in PLAIN:
        found[name] = answer(getattr(pynvml, name), handle)
    for kind, name in enumerate(("SHUTDOWN", "SLOWDOWN", "MEM_MAX")):
        found[f"threshold_{name}"] = answer(pynvml.nvmlDeviceGetTemperatureThreshold, handle, kind)
    return found | {
        "clock_MEM": answer(pynvml.nvmlDeviceGetClockInfo, handle, 2),
        "memory_v2": answer(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2),
        "nvlink0": answer(pynvml.nvmlDeviceGetNvLinkState, handle, 0),
        "process_utilization": answer(pynvml.nvmlDeviceGetProcessUtilization, handle, 0),
        "fabric": answer(fabric, handle),
        "gpm_support": answer(pynvml.nvmlGpmQueryDeviceSupport, handle),
    }


class Gpm:
    """GPM activity between consecutive readings."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
        self._count = 0

    def read(self) -> dict[str, float | None]:
        """Return activity in percent; None on the first call."""
        self._samples.reverse()
        pynvml.nvmlGpmSampleGet(self._handle, self._samples[1])
        self._count += 1
        if self._count == 1:
            return dict.fromkeys(GPM)
        arguments = pynvml.c_nvmlGpmMetricsGet_t()
        arguments.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        arguments.sample1, arguments.sample2 = self._samples
        arguments.numMetrics = len(GPM)
        for at, metric in enumerate(GPM.values()):
            arguments.metrics[at].metricId = metric
        found = pynvml.nvmlGpmMetricsGet(arguments).metrics
        return {
            name: None if found[at].nvmlReturn else round(found[at].value, 3)
            for at, name in enumerate(GPM)
        }


def reading(handle: Any) -> dict[str, Any]:
    """Return the changing values of one reading."""
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {
        "gpu": rates.gpu,
        "mem_ctrl": rates.memory,
        "used_mib": memory.used // MIB,
        "free_mib": memory.free // MIB,
        "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temp_c": pynvml.nvmlDeviceGetTemperatureV(handle, 0),
        "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, 1),
    }


def processes(handle: Any) -> list[dict[str, Any]]:
    """Return the processes on the card."""
    since = int((time.time() - SETTLE_SECONDS) * 1e6)
    with contextlib.suppress(pynvml.NVMLError):
        rates = {
            line.pid: line.smUtil for line in pynvml.nvmlDeviceGetProcessUtilization(handle, since)
        }
        return [
            {"pid": line.pid, "memory": line.usedGpuMemory, "sm": rates.get(line.pid)}
            for line in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]
    return [
        {"pid": line.pid, "memory": line.usedGpuMemory, "sm": None}
        for line in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ]


def series(handle: Any) -> dict[str, Any]:
    """Record readings for a period."""
    gpm = Gpm(handle)
    rows, counted, times = [], [], []
    start, begun = time.time(), time.monotonic()
    for number in range(READINGS):
        time.sleep(max(begun + number * PERIOD_SECONDS - time.monotonic(), 0.0))
        times.append(round(time.monotonic() - begun, 3))
        counted.append(gpm.read())
        rows.append(reading(handle))
    return {
        "start": round(start, 3),
        "t": times,
        **{name: [row[name] for row in rows] for name in rows[0]},
        "gpm": {name: [row[name] for row in counted] for name in GPM},
        "processes": processes(handle),
    }


@contextlib.contextmanager
def under(name: str) -> Iterator[None]:
    """Run a load and wait until the card's values are steady."""
    how = LOADS[name]
    with contextlib.nullcontext() if how is None else load(*how):
        # Record the end of the load, but not its start, when the duty cycle is not yet reached.
        time.sleep(0.0 if how is None else SETTLE_SECONDS)
        yield


def main() -> None:
    """Record a card to a file."""
    parser = argparse.ArgumentParser(prog="python -m tests.agent.record", description=__doc__)
    parser.add_argument("file", type=Path, help="where to write")
    file: Path = parser.parse_args().file
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    recorded: dict[str, Any] = {"calls": calls(handle), "series": {}}
    for name in LOADS:
        with under(name):
            recorded["series"][name] = series(handle)
        sys.stdout.write(f"{name}: {READINGS} readings\n")
    file.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
