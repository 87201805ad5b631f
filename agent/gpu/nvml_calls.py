"""NVML calls by `Call`, with results in base units; falls back to older calls on older drivers."""

from collections.abc import Callable, Mapping
from ctypes import byref, c_void_p, cast
from typing import Any, Final

from agent.gpu.backend import (
    LINK_COUNTERS,
    UNSUPPORTED_CODES,
    Call,
    Code,
    Extra,
    Handle,
    NvmlError,
    Values,
)
from extender.core.devices.readings import Signal

_FIELDS: Final[Mapping[int, str]] = {
    4: Signal.ECC_DOUBLE_BIT_VOLATILE,
    29: Signal.RETIRED_PAGES_SINGLE_BIT,
    30: Signal.RETIRED_PAGES_DOUBLE_BIT,
    31: Signal.RETIRED_PAGES_PENDING,
    # Totals over all links, up to NVLink 4.
    38: Extra.NVLINK_CRC_FLITS,
    45: Extra.NVLINK_CRC_DATA,
    52: Extra.NVLINK_REPLAYS,
    59: Extra.NVLINK_RECOVERIES,
    82: Signal.MEMORY_TEMPERATURE,
    94: Extra.PCIE_REPLAYS,
    230: Signal.RECOVERY_ACTION,
}
"""Signal or extra of each NVML field id; one call reads all of them, in base units."""

_THRESHOLDS: Final = (
    (0, Signal.TEMPERATURE_SHUTDOWN),
    (1, Signal.TEMPERATURE_SLOWDOWN),
    (2, Extra.TEMPERATURE_MEMORY_MAX),
)

_SM_CLOCK, _MEMORY_CLOCK = 1, 2
NO_SUCH_LINK: Final = frozenset(
    {Code.NotSupported, Code.InvalidArgument, Code.NotFound, Code.NoPermission, Code.Deprecated}
)
"""Errors for links, and for counters of links, that the card does not have."""

_FABRIC_COMPLETED, _FABRIC_FAILED = 3, 4
_MAX_TEXT: Final = 256
"""Maximum length of a name or id; NVML's own buffers have at most 96 bytes."""
_TYPE_FIELDS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Fields of NVML's value union by value type; only the field of the type is valid."""


class Library:
    """Calls pynvml, maps its errors to `NvmlError`, and remembers unsupported calls.

    Args:
        module: pynvml, or a test's substitute; untyped.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._outdated: set[tuple[str, Any]] = set()
        self._unsupported: set[tuple[str, str]] = set()

    def reset(self) -> None:
        """Clear the record of unsupported calls: the driver may have been upgraded."""
        self._outdated.clear()
        self._unsupported.clear()

    def call(self, name: str, *arguments: object) -> Any:
        """Make a call and return its result.

        Raises:
            NvmlError: the call failed.
        """
        try:
            return getattr(self.module, name)(*arguments)
        except self.module.NVMLError as error:
            raise NvmlError(name, error.value, str(error)) from error
        except self.module.NVMLLibraryMismatchError as error:  # raised for drivers before 510
            raise NvmlError(name, Code.FunctionNotFound, "Function Not Found") from error

    def call_supported(self, name: str, uuid: str, *arguments: object) -> Any:
        """Make a call and return its result; None if the card does not support the call.

        Args:
            name: name of the call.
            uuid: UUID of the card.
            *arguments: arguments of the call.

        Raises:
            NvmlError: the call failed for another reason.
        """
        if (name, uuid) in self._unsupported:
            return None
        try:
            return self.call(name, *arguments)
        except NvmlError as error:
            if error.code not in UNSUPPORTED_CODES:
                raise
        self._unsupported.add((name, uuid))
        return None

    def call_newest(
        self, new: str, old: str, handle: Handle, *arguments: object, since: tuple[int, ...] = ()
    ) -> Any:
        """Make the newer of two calls, or the older one if the card lacks the newer.

        Args:
            new: name of the newer call.
            old: name of the older call; may be the same name with fewer arguments.
            handle: handle of the card or MIG device, the first argument of both calls.
            *arguments: further arguments of both calls.
            since: additional arguments of the newer call.

        Raises:
            NvmlError: the call failed.
        """
        return self.call_with_fallback(
            new,
            handle,
            lambda: self.call(new, handle, *arguments, *since),
            lambda: self.call(old, handle, *arguments),
        )

    def call_with_fallback(
        self, name: str, handle: Handle, newer: Callable[[], Any], older: Callable[[], Any]
    ) -> Any:
        """Return the result of `newer`, or of `older` if the card does not support `newer`.

        Missing support is remembered per card: a card of another generation, or a malformed answer
        of one card, must not cost the others the newer call.

        Args:
            name: name of the newer call.
            handle: handle of the card or MIG device.
            newer: makes the newer call.
            older: makes the older call.

        Raises:
            NvmlError: the call failed.
        """
        key = name, _address(handle)
        if key not in self._outdated:
            try:
                return newer()
            except NvmlError as error:
                if error.code not in UNSUPPORTED_CODES:
                    raise
        answer = older()
        self._outdated.add(key)
        return answer


def _address(handle: Any) -> int | None:
    """Return the address that a handle points to: each listing makes new handles of a card."""
    return cast(handle, c_void_p).value


def number(union: Any, value_type: int) -> float:
    """Return the number in a value union."""
    return float(getattr(union, _TYPE_FIELDS[value_type]))


def text(value: Any) -> str:
    """Return text as `str`; older bindings return bytes.

    Raises:
        TypeError: the value is not text.
        ValueError: the text is too long, or has control characters.
    """
    found = value.decode() if isinstance(value, bytes) else value
    if not isinstance(found, str):
        raise TypeError(f"not text: {found!r}")
    if len(found) > _MAX_TEXT or not found.isprintable():
        raise ValueError(f"neither a name nor an id: {found[:_MAX_TEXT]!r}")
    return found


def _rates(nvml: Library, handle: Handle) -> Values:
    rates = nvml.call("nvmlDeviceGetUtilizationRates", handle)
    return {
        Signal.GPU_UTILIZATION: rates.gpu / 100,
        Signal.MEMORY_COPY_UTILIZATION: rates.memory / 100,
    }


def _memory(nvml: Library, handle: Handle) -> Values:
    """Read memory; before driver 510, reserved memory is not reported and counts as used."""
    name = "nvmlDeviceGetMemoryInfo"
    memory = nvml.call_newest(name, name, handle, since=(nvml.module.nvmlMemory_v2,))
    values: dict[str, float] = {
        Signal.MEMORY_TOTAL: float(memory.total),
        Signal.MEMORY_FREE: float(memory.free),
        Signal.MEMORY_USED: float(memory.used),
    }
    if hasattr(memory, "reserved"):
        values[Signal.MEMORY_RESERVED] = float(memory.reserved)
    return values


def _thousandths(name: str, call: str) -> Callable[[Library, Handle], Values]:
    """Return a read of one value that NVML returns in thousandths of its unit."""
    return lambda nvml, handle: {name: nvml.call(call, handle) / 1000}


def _temperature(nvml: Library, handle: Handle) -> Values:
    new, old = "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"
    return {Signal.TEMPERATURE: float(nvml.call_newest(new, old, handle, 0))}


def _clock_events(nvml: Library, handle: Handle) -> Values:
    new = "nvmlDeviceGetCurrentClocksEventReasons"
    old = "nvmlDeviceGetCurrentClocksThrottleReasons"
    return {Signal.CLOCK_EVENT_REASONS: float(nvml.call_newest(new, old, handle))}


def _clocks(nvml: Library, handle: Handle) -> Values:
    return {
        Extra.SM_CLOCK: nvml.call("nvmlDeviceGetClockInfo", handle, _SM_CLOCK) * 1e6,
        Extra.MEMORY_CLOCK: nvml.call("nvmlDeviceGetClockInfo", handle, _MEMORY_CLOCK) * 1e6,
    }


def _fields(nvml: Library, handle: Handle) -> Values:
    return {
        _FIELDS[item.fieldId]: number(item.value, item.valueType)
        for item in nvml.call("nvmlDeviceGetFieldValues", handle, list(_FIELDS))
        if item.nvmlReturn == Code.Success
    }


def _remapped_rows(nvml: Library, handle: Handle) -> Values:
    rows = nvml.call("nvmlDeviceGetRemappedRows", handle)
    correctable, uncorrectable, pending, failure = rows
    return {
        Extra.CORRECTABLE_REMAPPED_ROWS: float(correctable),
        Signal.UNCORRECTABLE_REMAPPED_ROWS: float(uncorrectable),
        Signal.ROW_REMAP_PENDING: float(pending),
        Signal.ROW_REMAP_FAILURE: float(failure),
    }


def _sram(nvml: Library, handle: Handle) -> Values:
    status = nvml.module.c_nvmlEccSramErrorStatus_v1_t()
    nvml.call("nvmlDeviceGetSramEccErrorStatus", handle, byref(status))
    return {Signal.SRAM_THRESHOLD_EXCEEDED: float(status.bThresholdExceeded)}


def _fabric(nvml: Library, handle: Handle) -> Values:
    """Read the fabric's state, in the numbering that NVML and DCGM's field 170 share."""
    info = _fabric_info(nvml, handle)
    is_failed = info.state == _FABRIC_COMPLETED and info.status != Code.Success
    values: dict[str, float] = {
        Signal.FABRIC_MANAGER_STATUS: float(_FABRIC_FAILED if is_failed else info.state)
    }
    health = getattr(info, "healthSummary", 0)
    return {**values, Signal.FABRIC_HEALTH: float(health)} if health else values


def _fabric_info(nvml: Library, handle: Handle) -> Any:
    """Return fabric info version 3, or version 2 from older drivers."""

    def fill(info: Any) -> Any:
        nvml.call("nvmlDeviceGetGpuFabricInfoV", handle, byref(info))
        return info

    newer = "c_nvmlGpuFabricInfo_v3_t"
    return nvml.call_with_fallback(
        newer,
        handle,
        lambda: fill(getattr(nvml.module, newer)()),
        lambda: fill(nvml.module.c_nvmlGpuFabricInfo_v2_t()),
    )


def _nvlinks(nvml: Library, handle: Handle) -> Values:
    up = 0
    for link in range(nvml.module.NVML_NVLINK_MAX_LINKS):
        try:
            up += bool(nvml.call("nvmlDeviceGetNvLinkState", handle, link))
        except NvmlError as error:
            if link and error.code in {Code.InvalidArgument, Code.NotSupported}:
                break  # no more links
            raise
    return {Extra.NVLINKS_UP: float(up)}


def _nvlink_errors(nvml: Library, handle: Handle) -> Values:
    """Read the error counters of NVLink 5 and later, and add up the links.

    Raises:
        NvmlError: the card has no such links, or one link could not be read. The sum of the other
            links would look as if counters had decreased.
    """
    totals: dict[str, float] = {}
    for link in range(nvml.module.NVML_NVLINK_MAX_LINKS):
        fields = [(field, link) for field in LINK_COUNTERS]
        items = nvml.call("nvmlDeviceGetFieldValues", handle, fields)
        if totals and all(item.nvmlReturn == Code.InvalidArgument for item in items):
            break  # no more links
        for item in items:
            if item.nvmlReturn == Code.Success:
                name = LINK_COUNTERS[item.fieldId].name
                totals[name] = totals.get(name, 0.0) + number(item.value, item.valueType)
            elif item.nvmlReturn not in NO_SUCH_LINK:
                raise NvmlError("nvmlDeviceGetFieldValues", item.nvmlReturn)
    if not totals:
        raise NvmlError("nvmlDeviceGetFieldValues", Code.NotSupported)
    return totals


def _codecs(nvml: Library, handle: Handle) -> Values:
    encoder = nvml.call("nvmlDeviceGetEncoderUtilization", handle)[0]
    decoder = nvml.call("nvmlDeviceGetDecoderUtilization", handle)[0]
    return {Extra.ENCODER_UTILIZATION: encoder / 100, Extra.DECODER_UTILIZATION: decoder / 100}


def _thresholds(nvml: Library, handle: Handle) -> Values:
    values: dict[str, float] = {}
    for kind, name in _THRESHOLDS:
        try:
            values[name] = float(nvml.call("nvmlDeviceGetTemperatureThreshold", handle, kind))
        except NvmlError as error:
            if error.code not in UNSUPPORTED_CODES:
                raise
    return values


READS: Final[Mapping[Call, Callable[[Library, Handle], Values]]] = {
    Call.RATES: _rates,
    Call.MEMORY: _memory,
    Call.POWER: _thousandths(Signal.POWER, "nvmlDeviceGetPowerUsage"),
    Call.POWER_LIMIT: _thousandths(Signal.POWER_LIMIT, "nvmlDeviceGetEnforcedPowerLimit"),
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
    Call.ENERGY: _thousandths(Extra.ENERGY, "nvmlDeviceGetTotalEnergyConsumption"),
    Call.THRESHOLDS: _thresholds,
}
"""Function of each call; GPM is missing because it needs two samples."""
