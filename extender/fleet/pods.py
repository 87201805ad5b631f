"""Store the GPU pods, their corrected times, and the memory that they use on shared devices.

Times of bindings, starts, failures and ends are corrected if another clock is wrong. Agents report
the memory periodically, for advice. Exporters that report memory per pod give its current value.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final, TypeVar

from extender.core.devices.readings import DeviceKey
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.pod_groups import Kin


class NameCounts:
    """Reference counts of names; a name without references is removed.

    Example:
        >>> tally = NameCounts()
        >>> tally.add("a"), tally.add("a"), tally.remove("a")
        (None, None, None)
        >>> sorted(tally.names)
        ['a']
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._names: frozenset[str] | None = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """The names in use; the identical object until they change."""
        if self._names is None:
            self._names = frozenset(self._counts)
        return self._names

    def add(self, name: str) -> None:
        """Add one reference to a name."""
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if not count:
            self._names = None

    def remove(self, name: str) -> None:
        """Remove one reference that was added before."""
        count = self._counts[name] - 1
        if count:
            self._counts[name] = count
        else:
            del self._counts[name]
            self._names = None


LEAST_SAMPLES: Final = 15
"""Minimum number of samples: a quarter of an hour at one per minute."""

_SAMPLE_SECONDS: Final = 50.0
"""Minimum time between two samples. Agents report once a minute."""

_MOST_ALIKE: Final = 8
"""Maximum number of similar pods whose memory is stored."""

_MOST_KEYS: Final = 4096
"""Maximum number of keys of similar pods."""

_MOST_DEVICES: Final = 128
"""Maximum number of devices stored for a pod: 16 cards of 7 instances each, and a reserve."""

_Value = TypeVar("_Value")

Share = tuple[DeviceKey, str, int]
"""Device, pod UID, and the bytes of the device's memory that the pod's processes use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Measured use of a device.

    Attributes:
        activity_ratio: the `QUANTILE` of its activity, 0 to 1; None if unknown.
        memory_bytes: the `QUANTILE` of its memory in use; None if unknown.
        memory_most_bytes: the maximum of its memory in use; None if unknown.
        samples: number of activity samples.
        seconds: time from the first to the last sample.
    """

    activity_ratio: float | None = None
    memory_bytes: float | None = None
    memory_most_bytes: float | None = None
    samples: int = 0
    seconds: float = 0.0

    @property
    def is_enough(self) -> bool:
        """Whether the samples suffice for advice."""
        is_known = self.activity_ratio is not None and self.memory_bytes is not None
        return is_known and self.samples >= LEAST_SAMPLES


@dataclass(slots=True)
class _Seen:
    """Memory of a pod on a device; times in seconds since the epoch."""

    most_bytes: int
    samples: int
    first_at: float
    last_at: float


class SimilarPods:
    """Measured memory of pods on a device, to estimate the memory of similar pods.

    Only the few pods that started last count, including ended ones. The order of the records does
    not matter: replicas that see the same pods must expect the same memory.
    """

    def __init__(self) -> None:
        # By key and UID: start of the pod, seconds since the epoch, and its maximum in bytes.
        self._used: OrderedDict[str, dict[str, tuple[float, int]]] = OrderedDict()

    def note(self, pod: PodRecord, used_bytes: int) -> None:
        """Record the current memory of a pod; its maximum counts."""
        if used_bytes <= 0:
            return
        for key in pod.kin:
            used = self._used.setdefault(key, {})
            self._used.move_to_end(key)
            _, before = used.get(pod.uid, (0.0, 0))
            used[pod.uid] = (pod.started_at or 0.0, max(used_bytes, before))
            if len(used) > _MOST_ALIKE:
                del used[min(used, key=lambda uid: (used[uid][0], uid))]
        while len(self._used) > _MOST_KEYS:
            self._used.popitem(last=False)

    def clear(self) -> None:
        """Forget the memory of all pods."""
        self._used.clear()

    def of(self, pod: PodRecord) -> int | None:
        """Return the memory that a pod will likely use; None if unknown or declared."""
        return self.expected(pod.kin) if pod.memory_bytes is None else None

    def expected(self, kin: Kin) -> int | None:
        """Return the memory that a pod with these keys will likely use, in bytes; None if unknown.

        This is the maximum of the most similar pods, rounded up by a quarter at most. A value that
        changed with every reading would invalidate cached evaluations.

        Args:
            kin: keys of the pod, most specific first.
        """
        found = self.measured(kin)
        if found is None:
            return None
        most = max(found[1])
        step = 1 << max(most.bit_length() - 3, 0)
        return -(-most // step) * step

    def measured(self, kin: Kin) -> tuple[str, list[int]] | None:
        """Return the memory of each of the most similar pods in bytes, and the key they share."""
        for key in kin:
            if used := self._used.get(key):
                return key, [count for _, count in used.values()]
        return None


class PodMemory:
    """Maximum memory of each pod on each device that it shares.

    Args:
        pods: all pods by UID.
    """

    def __init__(self, pods: Mapping[str, PodRecord]) -> None:
        self._pods = pods
        self._seen: dict[str, dict[DeviceKey, _Seen]] = {}
        self._last: dict[str, dict[DeviceKey, int]] = {}

    def note(self, node: str, shares: Iterable[Share], at: float) -> None:
        """Record the memory that a node's agent reports for the pods of this node.

        Args:
            shares: memory by device and pod, without duplicates.
            at: time of the measurement, seconds since the epoch.
        """
        for device, uid, count in shares:
            pod = self._pods.get(uid)
            if pod is None or pod.node != node:
                continue
            self.note_last([(device, uid, count)])
            of_pod = self._seen.setdefault(uid, {})
            one = of_pod.get(device)
            if one is None:
                _put(of_pod, device, _Seen(count, 1, at, at))
                continue
            one.most_bytes = max(one.most_bytes, count)
            if at - one.last_at >= _SAMPLE_SECONDS:
                one.samples, one.last_at = one.samples + 1, at

    def use(self, uid: str, devices: Sequence[DeviceKey]) -> Use:
        """Return a pod's maximum memory on any of its devices, and the smallest number of samples.

        The activity is unknown. The memory is unknown, too, if a device was not reported.
        """
        of_pod = self._seen.get(uid, {})
        known = [one for one in map(of_pod.get, devices) if one is not None]
        if not known or len(known) < len(devices):
            return Use()
        fewest = min(known, key=lambda one: one.samples)
        return Use(
            memory_most_bytes=float(max(one.most_bytes for one in known)),
            samples=fewest.samples,
            seconds=fewest.last_at - fewest.first_at,
        )

    def note_last(self, shares: Iterable[Share]) -> None:
        """Record the current memory of pods, from any source."""
        for device, uid, count in shares:
            _put(self._last.setdefault(uid, {}), device, count)

    def last(self, uid: str, device: DeviceKey) -> int | None:
        """Return the memory that a pod was last seen to use on a device, None if unknown."""
        return self._last.get(uid, {}).get(device)

    def forget(self, uid: str) -> None:
        """Forget a removed pod."""
        self._seen.pop(uid, None)
        self._last.pop(uid, None)


def _put(of_pod: dict[DeviceKey, _Value], device: DeviceKey, value: _Value) -> None:
    """Store a value for a pod's device; drop the oldest if there are too many."""
    of_pod[device] = value
    if len(of_pod) > _MOST_DEVICES:
        del of_pod[next(iter(of_pod))]


@dataclass(slots=True)
class PodChanges:
    """Counters of changes to pods.

    Attributes:
        waiting: changes to pods that are not bound and have not ended.
        holding: changes to pods that hold devices.
    """

    waiting: int = 0
    holding: int = 0


class KnownPods:
    """GPU pods by UID.

    Attributes:
        by_uid: all GPU pods; read only.
        unbound: GPU pods that are not bound and have not ended; read only.
        namespaces: number of GPU pods by namespace.
        memory: memory that they use on shared devices.
        changes: counters of changes to the pods.
    """

    def __init__(self) -> None:
        self.by_uid: dict[str, PodRecord] = {}
        self.unbound: dict[str, PodRecord] = {}
        self.namespaces = NameCounts()
        self.memory = PodMemory(self.by_uid)
        self.changes = PodChanges()

    def put(self, record: PodRecord) -> None:
        """Add or update a pod; an unbound one moves to the end."""
        # Count the namespace first, so that the namespace of a single pod is not removed meanwhile.
        self.namespaces.add(record.namespace)
        self._note_end(record.uid)
        self.by_uid[record.uid] = record
        if not (record.node or record.phase.is_terminal):
            self.unbound[record.uid] = record
            self.changes.waiting += 1
        self.changes.holding += record.holds_devices

    def pop(self, uid: str) -> PodRecord | None:
        """Remove a pod and return it; None if it is unknown."""
        self._note_end(uid)
        record = self.by_uid.pop(uid, None)
        if record is not None:
            self.memory.forget(uid)
        return record

    def _note_end(self, uid: str) -> None:
        """Count the change when a pod leaves its former state."""
        before = self.by_uid.get(uid)
        if before is not None:
            self.namespaces.remove(before.namespace)
            self.changes.holding += before.holds_devices
            self.changes.waiting += self.unbound.pop(uid, None) is not None


_AGREE_SECONDS = 10.0
"""Maximum deviation of a correct clock. Kubelets report events within this time."""


@dataclass(frozen=True, slots=True)
class _Time:
    """A time as reported by the API server and as corrected, seconds since the epoch."""

    reported: float
    corrected: float


class PodClocks:
    """Corrected times of pods whose node or API server has a wrong clock.

    A binding has the API server's time. A binding in the future counts as now. Otherwise the pod
    would count as unmeasured until that time.

    Starts, failures and ends have the node's time. A new event counts as now if its time is in the
    future or too long ago. The event of a pod that was unknown before may be old: it counts as not
    before the binding and not in the future.
    """

    def __init__(self) -> None:
        self._bound_at: dict[str, _Time] = {}
        self._started_at: dict[str, float] = {}
        self._works_since: dict[str, float] = {}
        self._failed_at: dict[str, _Time] = {}

    def correct(self, before: PodRecord | None, pod: PodRecord, now: float) -> PodRecord:
        """Return a pod with corrected times of binding and failure.

        The correction of a time stays the same as long as the reported time does.

        Args:
            before: previously returned record, None for a new pod.
            pod: record from the API server.
            now: seconds since the epoch.
        """
        bound_at = self._bound(pod, now)
        failed_at = self._failed(before, pod, bound_at, now)
        if (bound_at, failed_at) == (pod.bound_at, pod.failed_at):
            return pod
        return replace(pod, bound_at=bound_at, failed_at=failed_at)

    def _bound(self, pod: PodRecord, now: float) -> float | None:
        reported, known = pod.bound_at, self._bound_at.get(pod.uid)
        if reported is None or (known is not None and known.reported == reported):
            return reported if known is None else known.corrected
        if reported <= now:
            return reported
        self._bound_at[pod.uid] = _Time(reported, now)
        return now

    def _failed(
        self, before: PodRecord | None, pod: PodRecord, bound_at: float | None, now: float
    ) -> float | None:
        reported, known = pod.failed_at, self._failed_at.get(pod.uid)
        if reported is None:
            return None
        if known is not None and known.reported == reported:
            return known.corrected
        if before is not None and not before.phase.is_terminal:
            corrected = _recent(reported, now)
        else:
            corrected = min(max(reported, bound_at or reported), now)
        self._failed_at[pod.uid] = _Time(reported, corrected)
        return corrected

    def works_since(self, pod: PodRecord) -> float | None:
        """Return when a pod's GPU containers last started; None if they have not.

        Infinite while one of them waits to start again.
        """
        if pod.last_started_at is None:
            return self.started_at(pod)
        return self._works_since.get(pod.uid, pod.last_started_at)

    def started_at(self, pod: PodRecord) -> float | None:
        """Return when a pod started, seconds since the epoch; None if it has not."""
        return self._started_at.get(pod.uid, pod.started_at)

    def note(self, before: PodRecord | None, pod: PodRecord, now: float) -> None:
        """Record the start of a pod.

        Args:
            before: previous record, None for a new pod.
            now: seconds since the epoch.
        """
        if not pod.holds_devices:
            self._started_at.pop(pod.uid, None)
            return
        self._note_last(before, pod, now)
        if pod.started_at is None or (before is not None and before.started_at is not None):
            return
        is_late = now - pod.started_at > _AGREE_SECONDS
        if pod.started_at > now or (before is not None and is_late):
            self._started_at[pod.uid] = now
        elif pod.bound_at is not None and pod.bound_at > pod.started_at:
            self._started_at[pod.uid] = min(pod.bound_at, now)

    def _note_last(self, before: PodRecord | None, pod: PodRecord, now: float) -> None:
        """Record when a pod's containers last started."""
        last = pod.last_started_at
        if last is None or (before is not None and before.last_started_at == last):
            return
        is_late = before is not None and now - last > _AGREE_SECONDS
        at = now if is_late else min(last, now)
        self._works_since[pod.uid] = inf if last == inf else at

    def shift_back(self, seconds: float) -> None:
        """Shift corrected times back after our clock was set back by this many seconds."""
        for reported_times in (self._bound_at, self._failed_at):
            for uid, time in reported_times.items():
                reported_times[uid] = replace(time, corrected=time.corrected - seconds)
        for times in (self._started_at, self._works_since):
            times.update({uid: at - seconds for uid, at in times.items()})

    def forget(self, uid: str) -> None:
        """Forget a removed pod."""
        for times in (self._bound_at, self._started_at, self._works_since, self._failed_at):
            times.pop(uid, None)

    def ended_at(self, pod: PodRecord, now: float) -> float:
        """Return when a pod ended that has just been reported as ended, seconds since the epoch.

        The API drops fractions of a second: a reading within that second may still show the pod.
        """
        return now if pod.ended_at is None else min(_recent(pod.ended_at, now) + 1.0, now)


def _recent(reported: float, now: float) -> float:
    """Return the time of a new event: as reported if plausible, else now."""
    return reported if now - _AGREE_SECONDS <= reported <= now else now
