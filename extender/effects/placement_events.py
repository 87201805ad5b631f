"""Write one Event for a bound pod that describes its placement.

A description takes a millisecond, and the API server stores each Event. So Events are written at
their limited rate and after a burst of bindings: most pods of a large burst get none.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from extender.core.decision.verdicts import DeviceVerdict, NodeVerdict, explain, only
from extender.core.request.annotations import Target
from extender.effects.events import EventType, EventWriter
from extender.placement.history import DecisionRecord

_REASON: Final = "GPUPlacement"
_PRIORITIZE: Final = "prioritize"
_GIB: Final = 1 << 30

_MAX_WAITING: Final = 25
"""Maximum number of queued placements; none is added while as many Events are queued."""


class PlacementEvents:
    """Writes Events about placements; noting a binding is fast and never fails.

    Args:
        events: writes the Events.
        is_on: returns whether these Events are on.
        wait_for_quiet: waits for the end of a burst of requests.
    """

    def __init__(
        self,
        events: EventWriter,
        is_on: Callable[[], bool],
        wait_for_quiet: Callable[[], Awaitable[None]],
    ) -> None:
        self._events = events
        self._is_on = is_on
        self._wait_for_quiet = wait_for_quiet
        self._waiting: deque[DecisionRecord] = deque(maxlen=_MAX_WAITING)
        self._is_noted = asyncio.Event()

    def note(self, record: DecisionRecord) -> None:
        """Queue the placement of a bound pod, if this replica answered last about it.

        If filter leaves one node, kube-scheduler sends no prioritize request, so filter's answer
        was the last. Otherwise another replica may have answered prioritize, and writes the Event.
        """
        is_last = record.verb == _PRIORITIZE or record.decision.feasible == 1
        if not is_last or not self._is_on():
            return
        if len(self._waiting) == _MAX_WAITING or self._events.waiting >= _MAX_WAITING:
            self._events.counts.dropped += 1
        if self._events.waiting < _MAX_WAITING:
            self._waiting.append(record)
            self._is_noted.set()

    async def run(self) -> None:
        """Write Events for queued placements until cancelled."""
        while True:
            await self._is_noted.wait()
            self._is_noted.clear()
            while self._waiting:
                await self._wait_for_quiet()
                self._write(self._waiting.popleft())
                # This work is never urgent, so other work runs first.
                await asyncio.sleep(1 / self._events.settings.per_second)

    def _write(self, record: DecisionRecord) -> None:
        text = _describe(record)
        if text:
            self._events.post(record.pod, EventType.NORMAL, _REASON, text)
        else:
            self._events.counts.dropped += 1


def _describe(record: DecisionRecord) -> str:
    """Describe a pod's placement in one line; "" if the decision is no longer known in detail."""
    node = record.bound_node
    parts = [only(part.evidence, node) for part in record.evidence if node in part.nodes]
    verdicts = [verdict for part in parts for verdict in explain(part)]
    if not verdicts:
        return ""
    texts = [_chosen(record, verdicts)]
    texts.append(f"At that time {'; '.join(map(_gpus, verdicts))}")
    target = next((one for one in record.request.targets if one.node == node), None)
    if target is not None and target.devices:
        texts.append(_wanted(record, target))
    return f"GPU placement: {'. '.join(texts)}"


def _chosen(record: DecisionRecord, verdicts: Sequence[NodeVerdict]) -> str:
    """Describe whether the pod's node was idlegpu's first choice, and why."""
    node, best = record.bound_node, record.decision.best
    if best not in {node, None}:
        return f"{node}; idlegpu's first choice was {best}"
    why = next((verdict.reason for verdict in verdicts if verdict.reason), "")
    return f"{node}, idlegpu's first choice: {why}" if why else node


def _wanted(record: DecisionRecord, target: Target) -> str:
    """Describe whether the pod gets its target's GPUs; the kubelet chooses among the free ones.

    Args:
        record: the decision.
        target: the target with the pod's node.
    """
    verdicts = (one for part in record.evidence for one in part.explain())
    devices = (
        device for verdict in verdicts if verdict.node == target.node for device in verdict.devices
    )
    free = {device.index for device in devices if device.can_land and device.index is not None}
    named, open_to = ",".join(map(str, target.devices)), ",".join(map(str, sorted(free)))
    if not free:
        return f"It is unknown whether it gets the requested GPU {named}"
    if free <= set(target.devices):
        return f"It gets GPU {open_to} as requested"
    return f"It requested GPU {named}, and the kubelet chooses from GPU {open_to}"


def _gpus(verdict: NodeVerdict) -> str:
    """Describe a node's idle GPUs, and activity and free memory of those that a pod could get."""
    landing = [device for device in verdict.devices if device.can_land] or list(verdict.devices)
    idle = sum(device.state == "idle" for device in verdict.devices)
    parts = []
    busy = _known([device.utilization_ratio for device in landing])
    if busy:
        parts.append(f"mean activity {100 * sum(busy) / len(busy):.0f} %")
    parts += _free(landing)
    if not busy:
        parts.append("activity unknown")
    all_of_it = f"{idle} of its {len(verdict.devices)} GPUs were idle"
    return f"{all_of_it}; GPUs open to the pod: {', '.join(parts)}"


def _free(landing: Sequence[DeviceVerdict]) -> list[str]:
    """Describe the least free memory among the landing devices."""
    free = _known([device.free_bytes for device in landing])
    if not free:
        return []
    each = " each" if len(landing) > 1 else ""
    return [f"{min(free) / _GIB:.0f} GiB free{each}"]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
