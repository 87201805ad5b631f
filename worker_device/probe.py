"""Find the GPUs of this container through NVML; without it, from `/proc` or `/dev`.

Calls NVML through `ctypes`: a container has the driver's library, but rarely a Python binding. The
calls used here are unchanged since driver 450. Never initializes CUDA in this process: that would
fix the visible devices and break a later fork.
"""

import contextlib
import ctypes
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worker_device.visible import Card, Instance, Load

_ORDER_DEADLINE_SECONDS: Final = 10.0
"""Time limit for CUDA's device order: CUDA takes seconds to initialize with many cards."""

_CUDA_ORDER_SCRIPT: Final = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
found = []
for ordinal in range(count.value):
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    assert cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0
    assert cuda.cuDeviceGetUuid(ctypes.byref(uuid), device) == 0
    found.append(bytes(uuid).hex())
print(json.dumps(found))
"""
_LIBRARY: Final = "libnvidia-ml.so.1"

_UUID_BYTES: Final = 96
_NAME_BYTES: Final = 96
_INVALID_ARGUMENT: Final = 2


class _DeviceNvmlError(Exception):
    """NVML is missing, or a required call failed."""


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
            raise _DeviceNvmlError(str(error)) from error

    def call(self, name: str, *arguments: object) -> int:
        """Call an NVML function and return its code, 0 for success."""
        try:
            function: Callable[..., int] = getattr(self._calls, name)
        except AttributeError as error:
            raise _DeviceNvmlError(f"the driver has no {name}") from error
        return function(*arguments)

    def need(self, name: str, *arguments: object) -> None:
        """Call an NVML function that must succeed."""
        code = self.call(name, *arguments)
        if code:
            raise _DeviceNvmlError(f"{name} failed with NVML error {code}")

    def number(self, name: str, handle: _Handle) -> int | None:
        """Call an NVML function that returns an integer; None if the call fails."""
        value = ctypes.c_uint()
        return None if self.call(name, handle, ctypes.byref(value)) else value.value

    def text(self, name: str, handle: _Handle, size: int) -> str:
        """Call an NVML function that returns a string; "" if the call fails."""
        value = ctypes.create_string_buffer(size)
        if self.call(name, handle, value, ctypes.c_uint(size)):
            return ""
        return value.value.decode(errors="replace")


def _nvml_cards(library: str = _LIBRARY) -> tuple[Card, ...]:
    """Return the GPUs of this container with their loads, ordered by PCI address.

    A call to a lost card may never return: run it in a thread and wait with a deadline.

    Raises:
        DeviceNvmlError: NVML is missing, or a required call failed.
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
        # NVML also counts cards that are lost or that the container may not open; CUDA skips them.
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
        if code == 0:  # otherwise the slot is empty, or another container has the instance
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePaths:
    """Library and paths by which a container's GPUs are found.

    Attributes:
        library: name or path of NVML.
        proc_gpus: the driver's directory with one entry for each GPU. NVIDIA's container runtime
            hides the GPUs of other containers there.
        dev: directory of the device files `nvidia0`, `nvidia1` and so on.
    """

    library: str = _LIBRARY
    proc_gpus: Path = Path("/proc/driver/nvidia/gpus")
    dev: Path = Path("/dev")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProbeResult:
    """The GPUs found.

    Attributes:
        cards: GPUs in CUDA's order, unless `order_warning` says otherwise.
        order_warning: why the order may differ from CUDA's; "" if it does not.
    """

    cards: tuple[Card, ...]
    order_warning: str = ""


def find_cards(
    environment: Mapping[str, str], *, paths: ProbePaths, deadline_seconds: float
) -> _ProbeResult:
    """Return the GPUs of this container.

    Args:
        environment: the process environment; `CUDA_DEVICE_ORDER` and `NVIDIA_VISIBLE_DEVICES` are
            read.
        paths: library and paths by which GPUs are found.
        deadline_seconds: time limit for NVML; after it, GPUs come from files, without loads.
    """
    cards = _probe_nvml(paths.library, deadline_seconds)
    if cards is None:
        cards = _probe_kernel(paths, environment)
    return _in_cuda_order(cards, environment)


def _probe_nvml(library: str, deadline_seconds: float) -> tuple[Card, ...] | None:
    """Call NVML in a thread, because a call to a lost card may never return."""
    found: list[tuple[Card, ...]] = []

    def probe() -> None:
        with contextlib.suppress(_DeviceNvmlError):
            found.append(_nvml_cards(library))

    thread = threading.Thread(target=probe, name="nvml", daemon=True)
    thread.start()
    thread.join(deadline_seconds)
    return found[0] if found else None


def _probe_kernel(paths: ProbePaths, environment: Mapping[str, str]) -> tuple[Card, ...]:
    cards = tuple(_from_proc(paths.proc_gpus)) or tuple(_from_dev(paths.dev))
    given = environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    instances = [name.partition("::")[0] for name in given if name.startswith("MIG-")]
    if cards and instances:
        return (Card(uuid="", instances=tuple(Instance(uuid=uuid) for uuid in instances)),)
    return cards


def _from_proc(directory: Path) -> list[Card]:
    cards = []
    with contextlib.suppress(OSError):
        for entry in sorted(directory.iterdir()):  # PCI addresses of equal length
            text = (entry / "information").read_text(encoding="utf-8", errors="replace")
            fields = {
                name.strip(): value.strip()
                for name, _, value in (line.partition(":") for line in text.splitlines())
            }
            uuid, minor = fields.get("GPU UUID", ""), fields.get("Device Minor", "")
            cards.append(
                Card(
                    uuid="" if "?" in uuid else uuid,  # `GPU-???…` until the GPU is initialized
                    minor=int(minor) if minor.isdigit() else None,
                    model=fields.get("Model", ""),
                )
            )
    return cards


def _from_dev(directory: Path) -> list[Card]:
    with contextlib.suppress(OSError):
        names = (re.fullmatch(r"nvidia(\d+)", entry.name) for entry in directory.iterdir())
        return [Card(uuid="", minor=minor) for minor in sorted(int(one[1]) for one in names if one)]
    return []


def _in_cuda_order(cards: tuple[Card, ...], environment: Mapping[str, str]) -> _ProbeResult:
    """Sort cards into CUDA's order, which is fastest first by default.

    How CUDA ranks models is not documented, so a child process queries CUDA if the models differ.
    Cards of one model are in the order of their PCI addresses.
    """
    is_by_address = environment.get("CUDA_DEVICE_ORDER", "").strip() == "PCI_BUS_ID"
    if is_by_address or len({card.model for card in cards}) <= 1:
        return _ProbeResult(cards=cards)
    order = _query_cuda_order(environment)
    places = {uuid: place for place, uuid in enumerate(order)}
    if not all(_normalize_uuid(card.uuid) in places for card in cards):
        return _ProbeResult(
            cards=cards,
            order_warning="the GPUs are of different models and CUDA's order is unknown: "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    return _ProbeResult(
        cards=tuple(sorted(cards, key=lambda card: places[_normalize_uuid(card.uuid)]))
    )


def _normalize_uuid(uuid: str) -> str:
    return uuid.partition("-")[2].replace("-", "").lower()


def _query_cuda_order(environment: Mapping[str, str]) -> Sequence[str]:
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CUDA_ORDER_SCRIPT],
            # CUDA_VISIBLE_DEVICES would select and reorder devices.
            env={k: value for k, value in environment.items() if k != "CUDA_VISIBLE_DEVICES"},
            capture_output=True,
            text=True,
            timeout=_ORDER_DEADLINE_SECONDS,
            check=True,
        )
        answer = json.loads(child.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
    return [str(uuid) for uuid in answer]
