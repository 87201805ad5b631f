"""Choose the device of a worker, and explain the choice in one line."""

import contextlib
import operator
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from pathlib import Path
from typing import Final

from worker_device.agent_loads import AgentError, fetch_loads
from worker_device.leases import (
    Assignment,
    Lease,
    LeaseFile,
    assign,
    holder_of,
    is_alive,
    is_related,
)
from worker_device.probe import ProbePaths, find_cards
from worker_device.visible import Device, Visible, visible_devices

_CPU: Final = "cpu"

_AGENT_URL: Final = "IDLEGPU_AGENT_URL"
_LEASE_FILE: Final = "IDLEGPU_DEVICE_FILE"
_DEADLINE: Final = "IDLEGPU_DEVICE_DEADLINE_SECONDS"
_NODE_NAMES: Final = ("IDLEGPU_NODE", "NODE_NAME")

_FILE_NAME: Final = "idlegpu-devices.json"
_TEMPORARY: Final = Path("/tmp")  # noqa: S108 - not TMPDIR: each worker may have another
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - writable where a container's root is not
_DEFAULT_DEADLINE_SECONDS: Final = 2.0
_MAX_WORKER_ID: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The device chosen for a worker.

    Attributes:
        device: device name of PyTorch and other frameworks: `cuda:1`, or `cpu` without a GPU.
        index: n of `cuda:<n>`; None for `cpu`.
        uuid: UUID of the GPU or MIG device; "" for `cpu` or if unknown.
        selector: value of `CUDA_VISIBLE_DEVICES` that makes only this device visible, as `cuda:0`;
            "" hides all devices.
        needs_selector: whether `device` is valid only with `CUDA_VISIBLE_DEVICES` set to
            `selector`. CUDA shows a process at most one MIG instance.
        message: the device and the reason for the choice, in one line.
    """

    device: str
    index: int | None
    uuid: str
    selector: str
    needs_selector: bool
    message: str


def device_for_worker(
    worker_id: object = None, *, environment: Mapping[str, str] | None = None, quiet: bool = False
) -> str:
    """Choose the device of this process, and return its name: `cuda:1`, or `cpu` without a GPU.

    Call it before CUDA is initialized. If the container has several MIG instances, it sets
    `CUDA_VISIBLE_DEVICES` of this process: CUDA has no other way to select one.

    Args:
        worker_id: an int, a numeric string, or an object with such a `worker_id` attribute; None
            and "" mean worker 0.
        environment: used instead of this process's environment, which is then not modified.
        quiet: do not write the choice to stderr.

    Raises:
        ValueError: `worker_id` or a setting in the environment is invalid.
    """
    choice = choose_device(worker_id, environment=environment)
    if choice.needs_selector and environment is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = choice.selector
    if not quiet:
        sys.stderr.write(choice.message + "\n")
    return choice.device


def choose_device(
    worker_id: object = None,
    *,
    environment: Mapping[str, str] | None = None,
    pid: int | None = None,
    probe_paths: ProbePaths | None = None,
) -> Choice:
    """Choose the device of a worker, and lease it while the worker runs.

    Args:
        worker_id: as for `device_for_worker`.
        environment: used instead of this process's environment.
        pid: process that will use the device; None for this process.
        probe_paths: library and paths by which GPUs are found; None for the defaults.

    Raises:
        ValueError: `worker_id` or a setting in the environment is invalid.
    """
    worker = parse_worker_id(worker_id)
    environment = os.environ if environment is None else environment
    deadline_seconds = _deadline_seconds(environment)
    found = find_cards(
        environment, paths=probe_paths or ProbePaths(), deadline_seconds=deadline_seconds
    )
    visible = visible_devices(found.cards, environment)
    notes = [found.order_warning] if found.order_warning else []
    if not visible.devices:
        return _cpu_choice(worker, visible)
    devices = _with_loads(visible.devices, environment, deadline_seconds, notes)
    assigned = _lease_device(
        worker, os.getpid() if pid is None else pid, devices, environment, notes
    )
    return _gpu_choice(worker, assigned, len(devices), environment, notes)


def parse_worker_id(worker_id: object) -> int:
    """Parse a worker id: an integer, a numeric string, or an object with a `worker_id` attribute.

    Accepts every integer type with `__index__`, such as NumPy's. None, "" and an object without
    `worker_id` mean worker 0. A bool is refused although it is an integer: a caller that passes
    `rank == 0` would give all workers but one the same id.

    Raises:
        ValueError: any other value; the message contains it.

    Example:
        >>> parse_worker_id("3"), parse_worker_id(None), parse_worker_id(object())
        (3, 0, 0)
    """
    value = getattr(worker_id, "worker_id", worker_id)
    if value is None or (isinstance(value, str) and not value.strip()):
        return 0
    number: int | None = None
    if isinstance(value, str):
        if value.strip().isascii() and value.strip().isdigit():
            number = int(value)
    elif hasattr(value, "__index__") and not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # arrays have __index__, too
            number = operator.index(value)
    elif not isinstance(value, bool | Number | bytes | bytearray | Iterable):
        return 0
    if number is None or not 0 <= number <= _MAX_WORKER_ID:
        raise ValueError(
            f"worker id is {value!r}: must be an integer of at least 0, "
            "or an object with such a worker_id attribute"
        )
    return number


def _deadline_seconds(environment: Mapping[str, str]) -> float:
    text = environment.get(_DEADLINE, "").strip()
    try:
        seconds = float(text) if text else _DEFAULT_DEADLINE_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 60:  # noqa: PLR2004 - no driver takes a minute to start
        raise ValueError(f"{_DEADLINE}={text}: must be more than 0 and at most 60 seconds")
    return seconds


def _with_loads(
    devices: tuple[Device, ...],
    environment: Mapping[str, str],
    deadline_seconds: float,
    notes: list[str],
) -> tuple[Device, ...]:
    """Use the agent's loads: it also measures MIG instances, and over a longer time."""
    url = environment.get(_AGENT_URL, "").strip()
    if not url or len(devices) == 1:
        return devices
    try:
        loads = fetch_loads(url, deadline_seconds)
    except AgentError as error:
        notes.append(f"cannot read loads from the agent: {error}")
        return devices
    return tuple(replace(one, load=loads.get(one.id, one.load)) for one in devices)


def _lease_device(
    worker: int,
    pid: int,
    devices: Sequence[Device],
    environment: Mapping[str, str],
    notes: list[str],
) -> Assignment:
    holder = holder_of(pid)

    def assigned(leases: Sequence[Lease], devices: Sequence[Device]) -> Assignment:
        return assign(
            leases,
            worker=worker,
            holder=holder,
            devices=devices,
            is_alive=lambda other: is_alive(other, namespace=holder.namespace),
            is_related=lambda other: is_related(other, holder),
        )

    failures = []
    for path in _lease_files(environment, holder.namespace):
        try:
            with LeaseFile(path).locked() as held:
                found = assigned(held.read(), devices)
                held.write(found.leases)
                return found
        except OSError as error:
            failures.append(f"{path}: {error.strerror or error}")
    notes.append(f"no lease file ({'; '.join(failures)}): set {_LEASE_FILE} to a writable path")
    # Without a lease file, workers make different choices only because of their numbers.
    return assigned((), [replace(device, load=None) for device in devices])


def _lease_files(environment: Mapping[str, str], namespace: int) -> Iterator[Path]:
    named = environment.get(_LEASE_FILE, "").strip()
    if named:
        yield Path(named)
        return
    yield _TEMPORARY / _FILE_NAME  # only for this container, but it may be read-only
    # All containers of a pod may share /dev/shm, so the pid namespace is part of the name.
    yield _SHARED_MEMORY / f"{namespace}-{_FILE_NAME}"


def _cpu_choice(worker: int, visible: Visible) -> Choice:
    return Choice(
        device=_CPU,
        index=None,
        uuid="",
        selector="",
        needs_selector=False,
        message=f"Worker {worker} assigned to CPU; reason: {visible.reason}",
    )


def _gpu_choice(
    worker: int,
    assigned: Assignment,
    count: int,
    environment: Mapping[str, str],
    notes: Sequence[str],
) -> Choice:
    device = assigned.device
    name = f"cuda:{device.index}"
    uuid = "" if device.id.startswith("#") else device.id
    node = next(filter(None, map(environment.get, _NODE_NAMES)), None) or socket.gethostname()
    card = node if device.minor is None else f"{node}::{device.minor}"
    identity = ", ".join(filter(None, (card, uuid)))
    parts = [
        f"Worker {worker} assigned to GPU device: {name} ({identity})",
        f"reason: {assigned.reason}",
        f"devices: {count}",
        f"running workers: {assigned.workers}",
        f"other workers on this device: {assigned.sharer_count}",
    ]
    if device.needs_selector:
        parts.append(f"CUDA_VISIBLE_DEVICES={device.selector}")
    return Choice(
        device=name,
        index=device.index,
        uuid=uuid,
        selector=device.selector,
        needs_selector=device.needs_selector,
        message="; ".join([*parts, *notes]),
    )
