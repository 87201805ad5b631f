"""How much memory of a device each of the pods that share it was seen to hold.

Agents tell it again and again, for advice; exporters that split memory by pod tell what it is now.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from extender.core.devices.readings import DeviceKey
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.pod_owners import Kin

LEAST_SAMPLES: Final = 15
"""Minimum number of samples: a quarter of an hour at one per minute."""


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


SAMPLE_SECONDS: Final = 50.0
"""What comes sooner after the last sample is none of its own: agents tell it once a minute."""

MOST_ALIKE: Final = 8
"""Pods with a key in common of which it is remembered what they used: the last ones."""

MOST_KEYS: Final = 4096
"""Keys of pods by which that is remembered."""

MOST_DEVICES: Final = 128
"""Devices of a pod of which that is remembered: 16 cards of 7 instances each, and room to spare."""

Value = TypeVar("Value")

Share = tuple[DeviceKey, str, int]
"""A device, the UID of a pod on it, and what its processes hold of the device's memory."""


@dataclass(slots=True)
class _Seen:
    """What was seen of a pod on a device; times are seconds since the epoch."""

    most_bytes: int
    samples: int
    first_at: float
    last_at: float


class LikePods:
    """Remembers what pods were measured to use of a device's memory, for others that are like them.

    That of the last few is remembered, also when they are gone.
    """

    def __init__(self) -> None:
        self._used: OrderedDict[str, OrderedDict[str, int]] = OrderedDict()

    def note(self, pod: PodRecord, used_bytes: int) -> None:
        """Take note of what a pod uses by now; the most that it ever did counts."""
        if used_bytes <= 0:
            return
        for key in pod.kin:
            used = self._used.setdefault(key, OrderedDict())
            self._used.move_to_end(key)
            used[pod.uid] = max(used_bytes, used.get(pod.uid, 0))
            if len(used) > MOST_ALIKE:
                used.popitem(last=False)
        while len(self._used) > MOST_KEYS:
            self._used.popitem(last=False)

    def of(self, pod: PodRecord) -> int | None:
        """Return what a pod will likely use, None where it declared that, or it is not known."""
        return self.expected(pod.kin) if pod.memory_bytes is None else None

    def expected(self, kin: Kin) -> int | None:
        """Return what a pod will likely use: as much as the one most like it that used the most.

        In bytes, rounded up by a quarter at most: what changes with every reading would have every
        decision made anew. None where none like it was measured.

        Args:
            kin: the pod's keys, the most telling first.
        """
        for key in kin:
            if used := self._used.get(key):
                most = max(used.values())
                step = 1 << max(most.bit_length() - 3, 0)
                return -(-most // step) * step
        return None


class PodMemory:
    """Remembers the most that each pod held of each device that it shares.

    Args:
        pods: the pods that there are, by UID.
    """

    def __init__(self, pods: Mapping[str, PodRecord]) -> None:
        self._pods = pods
        self._seen: dict[str, dict[DeviceKey, _Seen]] = {}
        self._last: dict[str, dict[DeviceKey, int]] = {}

    def note(self, node: str, shares: Iterable[Share], at: float) -> None:
        """Take note of what a node's agent tells, of the node's own pods alone.

        Args:
            node: the node.
            shares: each pod on each shared device once.
            at: when that was so, seconds since the epoch.
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
            if at - one.last_at >= SAMPLE_SECONDS:
                one.samples, one.last_at = one.samples + 1, at

    def use(self, uid: str, devices: Sequence[DeviceKey]) -> Use:
        """Return the most that a pod held of one of its devices, by the fewest samples of them.

        Nothing is known of its activity, nor of any memory where one device was not told of.
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
        """Take note of what pods hold by now, as any source tells."""
        for device, uid, count in shares:
            _put(self._last.setdefault(uid, {}), device, count)

    def last(self, uid: str, device: DeviceKey) -> int | None:
        """Return what a pod was last seen to hold of a device, None if unknown."""
        return self._last.get(uid, {}).get(device)

    def forget(self, uid: str) -> None:
        """Forget a pod that is gone."""
        self._seen.pop(uid, None)
        self._last.pop(uid, None)


def _put(of_pod: dict[DeviceKey, Value], device: DeviceKey, value: Value) -> None:
    """Remember something of a pod's device; of too many the first ones are forgotten."""
    of_pod[device] = value
    if len(of_pod) > MOST_DEVICES:
        del of_pod[next(iter(of_pod))]
