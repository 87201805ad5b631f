"""How much memory of a device each of the pods that share it was seen to hold.

Agents tell it again and again, for advice; exporters that split memory by pod tell what it is now.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from extender.core.advice import Use
from extender.core.inventory import PodRecord
from extender.core.readings import DeviceKey

SAMPLE_SECONDS: Final = 50.0
"""What comes sooner after the last sample is none of its own: agents tell it once a minute."""

Share = tuple[DeviceKey, str, int]
"""A device, the UID of a pod on it, and what its processes hold of the device's memory."""


@dataclass(slots=True)
class _Seen:
    """What was seen of a pod on a device; times are seconds since the epoch."""

    most_bytes: int
    samples: int
    first_at: float
    last_at: float


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
                of_pod[device] = _Seen(count, 1, at, at)
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
            self._last.setdefault(uid, {})[device] = count

    def last(self, uid: str, device: DeviceKey) -> int | None:
        """Return what a pod was last seen to hold of a device, None if unknown."""
        return self._last.get(uid, {}).get(device)

    def forget(self, uid: str) -> None:
        """Forget a pod that is gone."""
        self._seen.pop(uid, None)
        self._last.pop(uid, None)
