"""Lists a container's GPUs through the driver's library with nothing but `ctypes`.

A user's container has the driver's library, mounted by NVIDIA's runtime, but seldom a Python
binding for it. The dozen calls used here have had the same form since driver 450.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from agent.device_visible import Card, Instance, Load

LIBRARY: Final = "libnvidia-ml.so.1"

_UUID_BYTES: Final = 96
_NAME_BYTES: Final = 96
_INVALID_ARGUMENT: Final = 2


class DeviceNvmlError(Exception):
    """The library is absent, or a call failed that nothing can do without."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


_Handle = ctypes.c_void_p


class _Library:
    def __init__(self, path: str) -> None:
        try:
            self._calls = ctypes.CDLL(path)
        except OSError as error:
            raise DeviceNvmlError(str(error)) from error

    def call(self, name: str, *arguments: object) -> int:
        """Make a call and return NVML's code, 0 for success."""
        try:
            function: Callable[..., int] = getattr(self._calls, name)
        except AttributeError as error:
            raise DeviceNvmlError(f"the driver has no {name}") from error
        return function(*arguments)

    def need(self, name: str, *arguments: object) -> None:
        """Make a call that must succeed."""
        code = self.call(name, *arguments)
        if code:
            raise DeviceNvmlError(f"{name} failed with NVML error {code}")

    def number(self, name: str, handle: _Handle) -> int | None:
        """Return a number of a device, None where it has none."""
        value = ctypes.c_uint()
        return None if self.call(name, handle, ctypes.byref(value)) else value.value

    def text(self, name: str, handle: _Handle, size: int) -> str:
        """Return a text of a device, "" where it has none."""
        value = ctypes.create_string_buffer(size)
        if self.call(name, handle, value, ctypes.c_uint(size)):
            return ""
        return value.value.decode(errors="replace")


def nvml_cards(library: str = LIBRARY) -> tuple[Card, ...]:
    """Return the GPUs of this container in order of their PCI addresses, with how busy they are.

    Blocks as long as the driver does: call it with a deadline.

    Raises:
        DeviceNvmlError: there is no driver, or it does not answer rightly.
    """
    nvml = _Library(library)
    with _initialized(nvml):
        count = ctypes.c_uint()
        nvml.need("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return tuple(_card(nvml, handle) for handle in _handles(nvml, count.value))


@contextmanager
def _initialized(nvml: _Library) -> Iterator[None]:
    nvml.need("nvmlInit_v2")
    try:
        yield
    finally:
        nvml.call("nvmlShutdown")


def _handles(nvml: _Library, count: int) -> Iterator[_Handle]:
    for index in range(count):
        handle = _Handle()
        # A card that is lost or that the container may not open is counted, and CUDA skips it.
        if nvml.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)):
            continue
        yield handle


def _card(nvml: _Library, handle: _Handle) -> Card:
    return Card(
        uuid=nvml.text("nvmlDeviceGetUUID", handle, _UUID_BYTES),
        minor=nvml.number("nvmlDeviceGetMinorNumber", handle),
        model=nvml.text("nvmlDeviceGetName", handle, _NAME_BYTES),
        load=_load(nvml, handle),
        instances=_instances(nvml, handle),
    )


def _instances(nvml: _Library, handle: _Handle) -> tuple[Instance, ...] | None:
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    code = nvml.call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
    if code or not current.value:
        return None
    found = []
    for place in range(nvml.number("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        instance = _Handle()
        code = nvml.call(
            "nvmlDeviceGetMigDeviceHandleByIndex",
            handle,
            ctypes.c_uint(place),
            ctypes.byref(instance),
        )
        if code == _INVALID_ARGUMENT:
            break
        if code == 0:  # not: no instance at this place, or one of another container
            found.append(_instance(nvml, instance))
    return tuple(found)


def _instance(nvml: _Library, handle: _Handle) -> Instance:
    return Instance(
        uuid=nvml.text("nvmlDeviceGetUUID", handle, _UUID_BYTES),
        gpu_instance_id=nvml.number("nvmlDeviceGetGpuInstanceId", handle),
        compute_instance_id=nvml.number("nvmlDeviceGetComputeInstanceId", handle),
        load=_load(nvml, handle),
    )


def _load(nvml: _Library, handle: _Handle) -> Load | None:
    rates, memory = _Utilization(), _Memory()
    has_rates = nvml.call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates)) == 0
    has_memory = nvml.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)) == 0
    if not has_rates and not has_memory:
        return None
    return Load(
        utilization_ratio=min(rates.gpu, 100) / 100 if has_rates else None,
        memory_used_ratio=memory.used / memory.total if has_memory and memory.total else None,
    )
