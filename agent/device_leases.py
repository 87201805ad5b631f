"""Who of a container's workers has which device: the rule (pure), and the file that they share.

The file is locked while a worker chooses, for a millisecond; what it says of a worker counts while
that worker lives, and is remembered afterwards so that it gets its device back.
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

from agent.device_visible import Device

VERSION: Final = 1
MOST_LEASES: Final = 256
"""So many are remembered; the oldest of workers that have ended are forgotten first."""

_LARGEST_FILE_BYTES: Final = 1 << 20

_LOCK_DEADLINE_SECONDS: Final = 10.0
_LOCK_PAUSE_SECONDS: Final = 0.005
_LOAD_STEPS: Final = 10
"""Devices whose load differs by less than a tenth are equally idle; else noise would decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process for which a device was chosen.

    Attributes:
        pid: its number.
        started: its start in clock ticks; tells it from a later process of the same number.
        namespace: number of the process namespace that `pid` is of: another container has another,
            and so has the same container after its restart.
    """

    pid: int
    started: int
    namespace: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A worker's device.

    Attributes:
        worker: its number.
        device: id of the device.
        holder: the process.
    """

    worker: int
    device: str
    holder: Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """What a worker gets.

    Attributes:
        device: the device.
        leases: all that are to be remembered, this one last.
        reason: why this device, to show people.
        sharers: how many other workers have it.
        workers: how many workers live, with this one.
    """

    device: Device
    leases: tuple[Lease, ...]
    reason: str
    sharers: int
    workers: int


IsAlive = Callable[[Holder], bool]
IsKin = Callable[[Holder], bool]
"""Whether a process is the caller, or an ancestor or descendant: the same worker, then."""


def assign(
    leases: Sequence[Lease],
    *,
    worker: int,
    holder: Holder,
    devices: Sequence[Device],
    is_alive: IsAlive,
    is_kin: IsKin,
) -> Assigned:
    """Choose a device for a worker.

    It keeps the one that it has. Otherwise it gets one that the fewest living workers have: its
    own from before if that is one of them, else one that no ended worker may come back to, the
    idlest, and of equally idle ones number `worker % len(devices)` or the next.

    Args:
        leases: what is remembered.
        worker: its number.
        holder: the process that asks, or that is asked for.
        devices: those that it may get; at least one.
        is_alive: whether a process still runs; False for another process namespace.
        is_kin: whether a process that runs is this worker under another number.
    """
    alive = {lease for lease in leases if is_alive(lease.holder)}
    own = _own(leases, alive, worker, holder, is_kin)
    others = alive - {own}
    taken = Counter(lease.device for lease in others)
    least = min(taken[device.id] for device in devices)
    by_id = {device.id: device for device in devices}
    before = by_id.get(own.device) if own is not None else None
    if before is not None and own in alive:
        device, reason = before, "as before"
    elif before is not None and taken[before.id] == least:
        device, reason = before, "its own again"
    else:
        ended = {lease.device for lease in leases if lease not in alive and lease != own}
        device, reason = _choose(devices, worker, taken, ended)
    lease = Lease(worker=worker, device=device.id, holder=holder)
    return Assigned(
        device=device,
        leases=_remembered([one for one in leases if one != own], alive, lease),
        reason=reason,
        sharers=taken[device.id],
        workers=len(others) + 1,
    )


def _own(
    leases: Sequence[Lease], alive: set[Lease], worker: int, holder: Holder, is_kin: IsKin
) -> Lease | None:
    """Return the worker's lease; one of the same number that lives and is no kin is another's."""
    same = [lease for lease in leases if lease.worker == worker]
    for lease in same:
        if lease.holder == holder:
            return lease
    for lease in same:
        if lease in alive and is_kin(lease.holder):
            return lease
    ended = [lease for lease in same if lease not in alive]
    here = [lease for lease in ended if lease.holder.namespace == holder.namespace]
    return (here or ended)[-1] if ended else None


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
    return devices[place], "idlest" if is_known and len(devices) > 1 else "by its number"


def _busy_steps(device: Device) -> tuple[int, int]:
    """Return activity and memory in use in tenths; half where unknown."""
    load = device.load
    ratios = (
        None if load is None else load.utilization_ratio,
        None if load is None else load.memory_used_ratio,
    )
    busy, full = (int((0.5 if ratio is None else ratio) * _LOAD_STEPS) for ratio in ratios)
    return busy, full


def _remembered(others: Sequence[Lease], alive: set[Lease], own: Lease) -> tuple[Lease, ...]:
    """Keep living workers, and the newest of the ended, one for each number and namespace."""
    newest = {(one.worker, one.holder.namespace): one for one in others if one not in alive}
    room = max(0, MOST_LEASES - 1 - len(alive))
    kept = alive | set(list(newest.values())[-room:] if room else ())
    return (*(one for one in others if one in kept), own)


class LeaseFile:
    """The file that the workers of a container share; made when first used, by whichever user."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def locked(self) -> Iterator["LockedLeases"]:
        """Hold the file alone.

        Raises:
            OSError: it cannot be made, or somebody holds it for long.
        """
        descriptor = self._open()
        try:
            _lock(descriptor, self._path)
            yield LockedLeases(descriptor)
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        """Open without creating first: others' files in a sticky /tmp may not be opened to create.

        Never through a link: that could make us write into any file.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                return os.open(self._path, flags)
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                with contextlib.suppress(OSError):
                    os.fchmod(descriptor, 0o666)  # workers may run as several users
                return descriptor
        return os.open(self._path, flags)


class LockedLeases:
    """The content of the file while it is held."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> tuple[Lease, ...]:
        """Return what is remembered; nothing where the file is new, torn, or none of ours."""
        return parse_leases(os.pread(self._descriptor, _LARGEST_FILE_BYTES, 0))

    def write(self, leases: Sequence[Lease]) -> None:
        """Replace what is remembered, in place: the file may belong to another user."""
        content = render_leases(leases)
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))


def render_leases(leases: Sequence[Lease]) -> bytes:
    """Write leases as JSON."""
    return json.dumps({"version": VERSION, "leases": [asdict(one) for one in leases]}).encode()


def parse_leases(content: bytes) -> tuple[Lease, ...]:
    """Read leases; () where the content is no such file, and without those that are not leases."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(document, dict) or document.get("version") != VERSION:
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
                raise TimeoutError(f"{path} is held by another process for too long") from error
            time.sleep(_LOCK_PAUSE_SECONDS)
