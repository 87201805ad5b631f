"""Choose the CUDA device for a worker process of a container.

    DEVICE=$(python -m agent.device --worker-id "$WORKER_ID")        # cuda:1
    eval "$(python -m agent.device --worker-id "$WORKER_ID" --env)"  # only this GPU, as cuda:0

In the worker itself: `agent.device.device_for_worker(worker_id)`. Standard library only; does not
initialize CUDA.
"""

import argparse
import contextlib
import operator
import os
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from pathlib import Path
from typing import Final

from agent.device_leases import Assignment, LeaseFile, assign, holder_of, is_alive, is_related
from agent.device_load import AgentError, fetch_loads
from agent.device_probe import ProbePaths, find_cards
from agent.device_visible import Device, Visible, visible_devices
from agent.proc_stat import process_stat

CPU: Final = "cpu"

AGENT_URL: Final = "IDLEGPU_AGENT_URL"
LEASE_FILE: Final = "IDLEGPU_DEVICE_FILE"
DEADLINE: Final = "IDLEGPU_DEVICE_DEADLINE_SECONDS"
NODE_NAMES: Final = ("IDLEGPU_NODE", "NODE_NAME")

_FILE_NAME: Final = "idlegpu-devices.json"
_TEMPORARY: Final = Path("/tmp")  # noqa: S108 - not TMPDIR: each worker may have another
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - writable where a container's root is not
_DEFAULT_DEADLINE_SECONDS: Final = 2.0
_MAX_WORKER_ID: Final = 2**63 - 1
_USAGE_ERROR: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The device chosen for a worker.

    Attributes:
        device: device string of PyTorch and other frameworks: `cuda:1`, or `cpu` without a GPU.
        index: n of `cuda:<n>`, None for `cpu`.
        uuid: UUID of the GPU or MIG device, "" for `cpu` or if unknown.
        selector: value of `CUDA_VISIBLE_DEVICES` that shows a process only this device, as
            `cuda:0`; "" hides all.
        needs_selector: `device` is valid only with `CUDA_VISIBLE_DEVICES` set to `selector`,
            because CUDA shows a process at most one MIG instance.
        message: the device and the reason for the choice, in one line.
    """

    device: str
    index: int | None
    uuid: str
    selector: str
    needs_selector: bool
    message: str


def device_for_worker(
    worker_id: object = None,
    *,
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> str:
    """Return the device that this process should use: `cuda:1`, or `cpu` without a GPU.

    Call it before CUDA is initialized. To select one of several MIG instances it sets
    `CUDA_VISIBLE_DEVICES` of this process, because there is no other way.

    Args:
        worker_id: an int, a numeric string, or an object with such a `worker_id`; None and "" mean
            worker 0.
        environment: replaces this process's environment, which is then not modified.
        quiet: do not write the choice to stderr.

    Raises:
        ValueError: `worker_id` is not a worker id.
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
        environment: replaces this process's environment.
        pid: process that will use the device; None for this process.
        probe_paths: library and paths by which GPUs are found.

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
    """Parse a worker id: an integer, a numeric string, or an object with `worker_id`.

    Accepts every integer type with `__index__`, such as NumPy's. None, "" and a context object
    without `worker_id` mean worker 0. A bool has `__index__`, too, but is the answer to another
    question (`rank == 0`): all workers but one would share an id.

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
            f"worker id is {value!r}: must be a whole number from 0 on, "
            "or an object with such a worker_id"
        )
    return number


def _deadline_seconds(environment: Mapping[str, str]) -> float:
    text = environment.get(DEADLINE, "").strip()
    try:
        seconds = float(text) if text else _DEFAULT_DEADLINE_SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 60:  # noqa: PLR2004 - a minute is longer than any driver's start
        raise ValueError(f"{DEADLINE}={text}: must be more than 0 and at most 60 seconds")
    return seconds


def _with_loads(
    devices: tuple[Device, ...],
    environment: Mapping[str, str],
    deadline_seconds: float,
    notes: list[str],
) -> tuple[Device, ...]:
    """Replace loads by the agent's, which cover MIG instances and a whole second."""
    url = environment.get(AGENT_URL, "").strip()
    if not url or len(devices) == 1:
        return devices
    try:
        loads = fetch_loads(url, deadline_seconds)
    except AgentError as error:
        notes.append(f"the agent does not answer: {error}")
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
    failures = []
    for path in _lease_files(environment, holder.namespace):
        try:
            with LeaseFile(path).locked() as held:
                assigned = assign(
                    held.read(),
                    worker=worker,
                    holder=holder,
                    devices=devices,
                    is_alive=lambda other: is_alive(other, namespace=holder.namespace),
                    is_related=lambda other: is_related(other, holder),
                )
                held.write(assigned.leases)
                return assigned
        except OSError as error:
            failures.append(f"{path}: {error.strerror or error}")
    notes.append(f"workers cannot agree ({'; '.join(failures)}): set {LEASE_FILE}")
    return assign(
        (),
        worker=worker,
        holder=holder,
        # Without loads, every worker chooses by its number, so that the choices differ.
        devices=[replace(device, load=None) for device in devices],
        is_alive=lambda _: False,
        is_related=lambda _: False,
    )


def _lease_files(environment: Mapping[str, str], namespace: int) -> Iterator[Path]:
    """Yield candidate paths of the lease file.

    /tmp belongs to the container alone, but may be read-only.
    """
    named = environment.get(LEASE_FILE, "").strip()
    if named:
        yield Path(named)
        return
    yield _TEMPORARY / _FILE_NAME
    # All containers of a pod may share /dev/shm, so the pid namespace is part of the name.
    yield _SHARED_MEMORY / f"{namespace}-{_FILE_NAME}"


def _cpu_choice(worker: int, visible: Visible) -> Choice:
    return Choice(
        device=CPU,
        index=None,
        uuid="",
        selector="",
        needs_selector=False,
        message=f"worker {worker}: {CPU} ({visible.reason})",
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
    of = f" of {assigned.workers}" if assigned.workers > worker else ""
    node = next(filter(None, map(environment.get, NODE_NAMES)), None) or socket.gethostname()
    identity = ", ".join(
        part
        for part in (
            f"{node}::{device.minor}" if device.minor is not None else node,
            "" if device.id.startswith("#") else device.id,
        )
        if part
    )
    others = f"{assigned.sharer_count} other{'s' * (assigned.sharer_count > 1)}"
    shared = f", shared with {others}" if assigned.sharer_count else ""
    message = f"worker {worker}{of}: {name} (of {count}; {identity}), {assigned.reason}{shared}"
    if device.needs_selector:
        message += f", with CUDA_VISIBLE_DEVICES={device.selector}"
    return Choice(
        device=name,
        index=device.index,
        uuid="" if device.id.startswith("#") else device.id,
        selector=device.selector,
        needs_selector=device.needs_selector,
        message="; ".join([message, *notes]),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a worker's device; return 2 for invalid arguments, else 0."""
    options = _parser().parse_args(arguments)
    try:
        pid = _caller_pid() if options.pid is None else _running(options.pid)
        choice = choose_device(options.worker_id, pid=pid)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return _USAGE_ERROR
    if not options.quiet:
        sys.stderr.write(choice.message + "\n")
    sys.stdout.write(_answer(choice, options.form) + "\n")
    return 0


def _running(pid: int) -> int:
    if process_stat(pid) is None:
        raise ValueError(f"--pid is {pid}: must be the number of a running process")
    return pid


def _answer(choice: Choice, form: str) -> str:
    if form == "index":
        return "" if choice.index is None else str(choice.index)
    if form == "uuid":
        return choice.selector
    if form == "env":
        return f"export CUDA_VISIBLE_DEVICES={shlex.quote(choice.selector)}"
    return choice.device


def _caller_pid() -> int:
    """Return the parent's pid: the calling shell outlives this process.

    The shell starts the worker or becomes the worker by `exec`, which keeps the pid.
    """
    return os.getppid() or os.getpid()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agent.device",
        description="Print which CUDA device a worker of this container should take.",
    )
    parser.add_argument(
        "--worker-id", default="", metavar="N", help="the worker's number from 0 on; nothing is 0"
    )
    parser.add_argument(
        "--pid",
        type=int,
        help="the process that will use the device, whose end frees it (the calling process)",
    )
    form = parser.add_mutually_exclusive_group()
    for name, help_text in (
        ("index", "print 1 instead of cuda:1, nothing where there is no GPU"),
        ("uuid", "print the UUID, for CUDA_VISIBLE_DEVICES"),
        ("env", "print a line for eval that leaves this device alone visible, as cuda:0"),
    ):
        form.add_argument(
            f"--{name}", dest="form", action="store_const", const=name, help=help_text
        )
    parser.set_defaults(form="device")
    parser.add_argument("--quiet", action="store_true", help="say nothing on stderr")
    return parser


if __name__ == "__main__":
    sys.exit(main())
