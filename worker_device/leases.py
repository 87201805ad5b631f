"""Assign devices to the workers of a container, by the lease file that the workers share.

A worker locks the file for about a millisecond while it chooses. A lease counts while its worker
runs. It is kept afterwards, so that a restarted worker gets its device back.
"""

import contextlib
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from worker_device.process_stat import PROC, process_stat
from worker_device.visible import Device

_VERSION: Final = 1
MAX_LEASES: Final = 256
"""Maximum number of leases in the file; the oldest leases of ended workers are dropped first."""

_MAX_FILE_BYTES: Final = 1 << 20

_LOCK_DEADLINE_SECONDS: Final = 10.0
_LOCK_PAUSE_SECONDS: Final = 0.005
_LOAD_STEPS: Final = 10
"""Loads are compared in tenths; otherwise noise would decide between equally idle devices."""
_MAX_ANCESTORS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Identity of the process that holds a lease.

    Attributes:
        pid: process id.
        started: start time in clock ticks since boot; it differs for a later process with the same
            pid.
        namespace: inode of the pid namespace; each run of a container has its own.
    """

    pid: int
    started: int
    namespace: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The assignment of a device to a worker.

    Attributes:
        worker: the worker's number.
        holder: the worker's process.
    """

    worker: int
    device: str
    holder: Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The device of one worker, and all leases with the new one.

    Attributes:
        device: the assigned device.
        leases: leases to write to the file, the new one last.
        reason: why this device was chosen.
        sharer_count: number of other workers on the device.
        workers: number of running workers, including this one.
    """

    device: Device
    leases: tuple[Lease, ...]
    reason: str
    sharer_count: int
    workers: int


_IsAlive = Callable[[Holder], bool]
_IsRelated = Callable[[Holder], bool]
"""Whether a process is the caller, its ancestor or its descendant: they count as one worker."""


def assign(
    leases: Sequence[Lease],
    *,
    worker: int,
    holder: Holder,
    devices: Sequence[Device],
    is_alive: _IsAlive,
    is_related: _IsRelated,
) -> Assignment:
    """Choose a device for a worker.

    A running worker keeps its device. Any other worker gets the device with the fewest running
    workers. Among equals it gets its previous device, then a device that no ended worker has a
    lease of, then the least loaded one, then the first one, counted from `worker % len(devices)`.

    Processes of another pid namespace cannot be observed: they may belong to another container of
    the pod, or to this container before a restart. Their leases count as running. When
    all devices are taken, a worker takes over the lease of its own number from another namespace.

    Args:
        leases: leases in the file.
        worker: the worker's number.
        holder: the worker's process.
        devices: devices to choose from; at least one.
        is_alive: whether a process of this pid namespace still runs.
        is_related: whether a running process is this worker under another pid.
    """
    unobservable = {lease for lease in leases if lease.holder.namespace != holder.namespace}
    alive = {lease for lease in leases if lease not in unobservable and is_alive(lease.holder)}
    own_lease = _find_lease(leases, alive, worker, holder, is_related)
    others = (alive | unobservable) - ({own_lease} - unobservable)
    taken = Counter(lease.device for lease in others)
    least = min(taken[device.id] for device in devices)
    by_id = {device.id: device for device in devices}
    previous = by_id.get(own_lease.device) if own_lease is not None else None
    if previous is not None and own_lease in alive:
        device, reason = previous, "keeps its device"
    elif previous is not None and taken[previous.id] == least:
        device, reason = previous, "its previous device"
        others.discard(own_lease)
    else:
        ended = {
            lease.device
            for lease in leases
            if lease not in alive | unobservable and lease != own_lease
        }
        device, reason = _choose(devices, worker, taken, ended)
    lease = Lease(worker=worker, device=device.id, holder=holder)
    return Assignment(
        device=device,
        leases=_leases_to_keep(
            [one for one in leases if one != own_lease or one in others], alive, lease
        ),
        reason=reason,
        sharer_count=sum(one.device == device.id for one in others),
        workers=len(others) + 1,
    )


def _find_lease(
    leases: Sequence[Lease], alive: set[Lease], worker: int, holder: Holder, is_related: _IsRelated
) -> Lease | None:
    """Return the worker's lease; None if only unrelated running processes have its number."""
    same_number = [lease for lease in leases if lease.worker == worker]
    for lease in same_number:
        if lease.holder == holder:
            return lease
    for lease in same_number:
        if lease in alive and is_related(lease.holder):
            return lease
    ended = [lease for lease in same_number if lease not in alive]
    same_namespace = [lease for lease in ended if lease.holder.namespace == holder.namespace]
    return (same_namespace or ended)[-1] if ended else None


def _choose(
    devices: Sequence[Device], worker: int, taken: Mapping[str, int], ended: set[str]
) -> tuple[Device, str]:
    first = worker % len(devices)
    ranks = [
        (
            taken.get(device.id, 0),
            device.id in ended,
            _busy_steps(device),
            (place - first) % len(devices),
        )
        for place, device in enumerate(devices)
    ]
    place = min(range(len(devices)), key=ranks.__getitem__)
    is_known = all(device.load is not None for device in devices)
    return devices[place], "least loaded" if is_known and len(devices) > 1 else "by worker number"


def _busy_steps(device: Device) -> tuple[int, int]:
    """Return utilization and memory in use, each in tenths; 5 if unknown."""
    load = device.load
    ratios = (
        None if load is None else load.utilization_ratio,
        None if load is None else load.memory_used_ratio,
    )
    busy, full = (int((0.5 if ratio is None else ratio) * _LOAD_STEPS) for ratio in ratios)
    return busy, full


def _leases_to_keep(
    others: Sequence[Lease], alive: set[Lease], own_lease: Lease
) -> tuple[Lease, ...]:
    """Drop leases of ended workers, except the newest one of each number and namespace."""
    newest = {(one.worker, one.holder.namespace): one for one in others if one not in alive}
    room = max(0, MAX_LEASES - 1 - len(alive))
    kept = alive | set(list(newest.values())[-room:] if room else ())
    return (*(one for one in others if one in kept), own_lease)


class LeaseFile:
    """Lease file of a container, created by its first worker. Workers may run as other users."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def locked(self) -> Iterator["_LockedLeases"]:
        """Lock the file and yield its content.

        Raises:
            OSError: the file cannot be created, or another process holds the lock for too long.
        """
        descriptor = self._open()
        try:
            _lock(descriptor, self._path)
            yield _LockedLeases(descriptor)
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        # Open before creating: O_CREAT fails on another user's file in a sticky /tmp. Never follow
        # a link: it could point to any file.
        flags = os.O_RDWR | os.O_NOFOLLOW
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                return os.open(self._path, flags)
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                with contextlib.suppress(OSError):
                    os.fchmod(descriptor, 0o666)  # the umask may have removed bits
                return descriptor
        return os.open(self._path, flags)


class _LockedLeases:
    """Content of the lease file while it is locked."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> tuple[Lease, ...]:
        """Return the leases; () if the file is new, truncated, or in another format."""
        return parse_leases(os.pread(self._descriptor, _MAX_FILE_BYTES, 0))

    def write(self, leases: Sequence[Lease]) -> None:
        """Replace the content in place: the file may belong to another user."""
        content = render_leases(leases)
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))


def render_leases(leases: Sequence[Lease]) -> bytes:
    """Encode leases as JSON."""
    return json.dumps({"version": _VERSION, "leases": [asdict(one) for one in leases]}).encode()


def parse_leases(content: bytes) -> tuple[Lease, ...]:
    """Decode leases from JSON; () if the format is unknown. Skips malformed entries."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        return ()
    listed = document.get("leases")
    parsed = (_parse(one) for one in (listed if isinstance(listed, list) else ()))
    return tuple(one for one in parsed if one is not None)


def _parse(value: object) -> Lease | None:
    if not isinstance(value, dict) or not isinstance(value.get("holder"), dict):
        return None
    worker, device = value.get("worker"), value.get("device")
    numbers = [value["holder"].get(field.name) for field in fields(Holder)]
    if type(worker) is not int or not isinstance(device, str):
        return None
    if not all(type(number) is int for number in numbers):
        return None
    pid, started, namespace = numbers
    holder = Holder(pid=pid, started=started, namespace=namespace)
    return Lease(worker=worker, device=device, holder=holder)


def _lock(descriptor: int, path: Path) -> None:
    until = time.monotonic() + _LOCK_DEADLINE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= until:
                raise TimeoutError(
                    f"another process has locked {path} for {_LOCK_DEADLINE_SECONDS:.0f} s"
                ) from error
            time.sleep(_LOCK_PAUSE_SECONDS)


def holder_of(pid: int) -> Holder:
    """Return the identity of a process; `started` is 0 if the process has ended."""
    stat = process_stat(pid)
    return Holder(
        pid=pid, started=0 if stat is None else stat.started_ticks, namespace=_process_namespace()
    )


def _process_namespace() -> int:
    """Return the inode of this process's pid namespace; 0 if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.stat(PROC / "self" / "ns" / "pid").st_ino  # noqa: PTH116 - follows the magic link
    return 0


def is_alive(holder: Holder, *, namespace: int) -> bool:
    """Return whether a process runs; False if its pid namespace is another one."""
    if holder.namespace != namespace:
        return False
    stat = process_stat(holder.pid)
    return stat is not None and stat.started_ticks == holder.started


def is_related(one: Holder, other: Holder) -> bool:
    """Return whether two running processes are the same, or one is an ancestor of the other."""
    return one.pid in _ancestors(other.pid) or other.pid in _ancestors(one.pid)


def _ancestors(pid: int) -> set[int]:
    ancestors: set[int] = set()  # and the process itself
    for _ in range(_MAX_ANCESTORS):
        stat = process_stat(pid)
        if stat is None:
            break
        ancestors.add(pid)
        pid = stat.parent
    return ancestors
