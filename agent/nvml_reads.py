"""What each call of NVML says, in base units: plain functions of the library and a handle."""

from collections.abc import Callable, Mapping
from ctypes import byref
from types import MappingProxyType
from typing import Any, Final

from agent.backend import Call, Code, Extra, Handle, NvmlError, Values
from agent.nvlink5 import LINK_COUNTERS
from agent.nvml_library import OLD_DRIVER, Library, number
from extender.core.readings import Signal

_FIELDS: Final[Mapping[int, str]] = MappingProxyType(
    {
        4: Signal.ECC_DOUBLE_BIT_VOLATILE,
        29: Signal.RETIRED_PAGES_SINGLE_BIT,
        30: Signal.RETIRED_PAGES_DOUBLE_BIT,
        31: Signal.RETIRED_PAGES_PENDING,
        # Of all links together, up to NVLink 4.
        38: Extra.NVLINK_CRC_FLITS,
        45: Extra.NVLINK_CRC_DATA,
        52: Extra.NVLINK_REPLAYS,
        59: Extra.NVLINK_RECOVERIES,
        82: Signal.MEMORY_TEMPERATURE,
        94: Extra.PCIE_REPLAYS,
        230: Signal.RECOVERY_ACTION,
    }
)
"""Field values that one call reads together, all in base units."""

_THRESHOLDS: Final = (
    (0, Signal.TEMPERATURE_SHUTDOWN),
    (1, Signal.TEMPERATURE_SLOWDOWN),
    (2, Extra.TEMPERATURE_MEMORY_MAX),
)

_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_NO_SUCH_LINK: Final = frozenset(
    {Code.NotSupported, Code.InvalidArgument, Code.NotFound, Code.NoPermission, Code.Deprecated}
)
"""What a card answers for links, and for counters of links, that it does not have or tell."""

_FABRIC_COMPLETED, _FABRIC_FAILED = 3, 4


def _rates(nvml: Library, handle: Handle) -> Values:
    rates = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
    return {
        Signal.GPU_UTILIZATION: rates.gpu / 100,
        Signal.MEMORY_COPY_UTILIZATION: rates.memory / 100,
    }


def _memory(nvml: Library, handle: Handle) -> Values:
    """Read memory; before driver 510 nothing tells what is reserved, and used includes it."""
    name = "nvmlDeviceGetMemoryInfo"
    memory = nvml.ask_newest(name, name, handle, since=(nvml.module.nvmlMemory_v2,))
    values: dict[str, float] = {
        Signal.MEMORY_TOTAL: float(memory.total),
        Signal.MEMORY_FREE: float(memory.free),
        Signal.MEMORY_USED: float(memory.used),
    }
    if hasattr(memory, "reserved"):
        values[Signal.MEMORY_RESERVED] = float(memory.reserved)
    return values


def _power(nvml: Library, handle: Handle) -> Values:
    return {Signal.POWER: nvml.ask("nvmlDeviceGetPowerUsage", handle) / 1000}


def _power_limit(nvml: Library, handle: Handle) -> Values:
    return {Signal.POWER_LIMIT: nvml.ask("nvmlDeviceGetEnforcedPowerLimit", handle) / 1000}


def _temperature(nvml: Library, handle: Handle) -> Values:
    new, old = "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"
    return {Signal.TEMPERATURE: float(nvml.ask_newest(new, old, handle, 0))}


def _clock_events(nvml: Library, handle: Handle) -> Values:
    new = "nvmlDeviceGetCurrentClocksEventReasons"
    old = "nvmlDeviceGetCurrentClocksThrottleReasons"
    return {Signal.CLOCK_EVENT_REASONS: float(nvml.ask_newest(new, old, handle))}


def _clocks(nvml: Library, handle: Handle) -> Values:
    return {
        Extra.SM_CLOCK: nvml.ask("nvmlDeviceGetClockInfo", handle, _SM_CLOCK) * 1e6,
        Extra.MEMORY_CLOCK: nvml.ask("nvmlDeviceGetClockInfo", handle, _MEMORY_CLOCK) * 1e6,
    }


def _fields(nvml: Library, handle: Handle) -> Values:
    return {
        _FIELDS[item.fieldId]: number(item.value, item.valueType)
        for item in nvml.ask("nvmlDeviceGetFieldValues", handle, list(_FIELDS))
        if item.nvmlReturn == Code.Success
    }


def _remapped_rows(nvml: Library, handle: Handle) -> Values:
    rows = nvml.ask("nvmlDeviceGetRemappedRows", handle)
    correctable, uncorrectable, pending, failure = rows
    return {
        Extra.CORRECTABLE_REMAPPED_ROWS: float(correctable),
        Signal.UNCORRECTABLE_REMAPPED_ROWS: float(uncorrectable),
        Signal.ROW_REMAP_PENDING: float(pending),
        Signal.ROW_REMAP_FAILURE: float(failure),
    }


def _sram(nvml: Library, handle: Handle) -> Values:
    status = nvml.module.c_nvmlEccSramErrorStatus_v1_t()
    nvml.ask("nvmlDeviceGetSramEccErrorStatus", handle, byref(status))
    return {Signal.SRAM_THRESHOLD_EXCEEDED: float(status.bThresholdExceeded)}


def _fabric(nvml: Library, handle: Handle) -> Values:
    """Read the fabric's state, which NVML and DCGM's field 170 number alike."""
    info = _fabric_info(nvml, handle)
    is_failed = info.state == _FABRIC_COMPLETED and info.status != Code.Success
    values: dict[str, float] = {
        Signal.FABRIC_MANAGER_STATUS: float(_FABRIC_FAILED if is_failed else info.state)
    }
    health = getattr(info, "healthSummary", 0)
    return {**values, Signal.FABRIC_HEALTH: float(health)} if health else values


def _fabric_info(nvml: Library, handle: Handle) -> Any:
    """Ask for the third version of what the driver knows of the fabric, else for the second."""

    def ask(info: Any) -> Any:
        nvml.ask("nvmlDeviceGetGpuFabricInfoV", handle, byref(info))
        return info

    newer = "c_nvmlGpuFabricInfo_v3_t"
    return nvml.newest(
        newer,
        lambda: ask(getattr(nvml.module, newer)()),
        lambda: ask(nvml.module.c_nvmlGpuFabricInfo_v2_t()),
    )


def _nvlinks(nvml: Library, handle: Handle) -> Values:
    up = 0
    for link in range(nvml.module.NVML_NVLINK_MAX_LINKS):
        try:
            up += bool(nvml.ask("nvmlDeviceGetNvLinkState", handle, link))
        except NvmlError as error:
            if link and error.code in {Code.InvalidArgument, Code.NotSupported}:
                break  # no more links
            raise
    return {Extra.NVLINKS_UP: float(up)}


def _nvlink_errors(nvml: Library, handle: Handle) -> Values:
    """Read what NVLink 5 and later count, link by link, and add the links up.

    Raises:
        NvmlError: the card has no such links, or one of them could not be read: what the others
            count would look as if counters had gone back.
    """
    totals: dict[str, float] = {}
    for link in range(nvml.module.NVML_NVLINK_MAX_LINKS):
        asked = [(field, link) for field in LINK_COUNTERS]
        told = nvml.ask("nvmlDeviceGetFieldValues", handle, asked)
        if totals and all(item.nvmlReturn == Code.InvalidArgument for item in told):
            break  # no more links
        for item in told:
            if item.nvmlReturn == Code.Success:
                name = LINK_COUNTERS[item.fieldId].name
                totals[name] = totals.get(name, 0.0) + number(item.value, item.valueType)
            elif item.nvmlReturn not in _NO_SUCH_LINK:
                raise NvmlError("nvmlDeviceGetFieldValues", item.nvmlReturn)
    if not totals:
        raise NvmlError("nvmlDeviceGetFieldValues", Code.NotSupported)
    return totals


def _codecs(nvml: Library, handle: Handle) -> Values:
    encoder = nvml.ask("nvmlDeviceGetEncoderUtilization", handle)[0]
    decoder = nvml.ask("nvmlDeviceGetDecoderUtilization", handle)[0]
    return {Extra.ENCODER_UTILIZATION: encoder / 100, Extra.DECODER_UTILIZATION: decoder / 100}


def _energy(nvml: Library, handle: Handle) -> Values:
    return {Extra.ENERGY: nvml.ask("nvmlDeviceGetTotalEnergyConsumption", handle) / 1000}


def _thresholds(nvml: Library, handle: Handle) -> Values:
    values: dict[str, float] = {}
    for kind, name in _THRESHOLDS:
        try:
            values[name] = float(nvml.ask("nvmlDeviceGetTemperatureThreshold", handle, kind))
        except NvmlError as error:
            if error.code not in OLD_DRIVER:
                raise
    return values


READS: Final[Mapping[Call, Callable[[Library, Handle], Values]]] = MappingProxyType(
    {
        Call.RATES: _rates,
        Call.MEMORY: _memory,
        Call.POWER: _power,
        Call.POWER_LIMIT: _power_limit,
        Call.TEMPERATURE: _temperature,
        Call.CLOCK_EVENTS: _clock_events,
        Call.CLOCKS: _clocks,
        Call.FIELDS: _fields,
        Call.REMAPPED_ROWS: _remapped_rows,
        Call.SRAM: _sram,
        Call.FABRIC: _fabric,
        Call.NVLINKS: _nvlinks,
        Call.NVLINK_ERRORS: _nvlink_errors,
        Call.CODECS: _codecs,
        Call.ENERGY: _energy,
        Call.THRESHOLDS: _thresholds,
    }
)
"""Every call but GPM's, which needs two samples."""
