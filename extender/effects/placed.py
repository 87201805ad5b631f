"""Tells the owner of a pod, in one Event at its binding, what it got.

Putting a placement in words takes a millisecond, and the API server writes each Event to its store.
So that is done at the rate of the Events alone, and once a burst of bindings is over: most pods of
a large one get none.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from extender.core.explain import DeviceVerdict, NodeVerdict, explain, only
from extender.effects.events import EventType, EventWriter
from extender.placement.history import DecisionRecord

REASON: Final = "GPUPlacement"
PRIORITIZE: Final = "prioritize"
GIB: Final = 1 << 30

MAX_WAITING: Final = 25
"""Placements that wait to be told: the newest, and none while so many Events wait already."""


class PlacementEvents:
    """Writes what pods got; noting a binding takes no time and never fails.

    Args:
        events: writes them.
        is_on: whether they are wanted.
        calm: returns once a burst is over.
    """

    def __init__(
        self,
        events: EventWriter,
        is_on: Callable[[], bool],
        calm: Callable[[], Awaitable[None]],
    ) -> None:
        self._events = events
        self._is_on = is_on
        self._calm = calm
        self._waiting: deque[DecisionRecord] = deque(maxlen=MAX_WAITING)
        self._is_noted = asyncio.Event()

    def note(self, record: DecisionRecord) -> None:
        """Note that a pod is bound, and which decision that followed.

        kube-scheduler asks no prioritize where filter leaves one node: only then is filter's word
        the last, and elsewhere another replica tells.
        """
        is_last = record.verb == PRIORITIZE or record.decision.feasible == 1
        if not is_last or not self._is_on():
            return
        if len(self._waiting) == MAX_WAITING or self._events.waiting >= MAX_WAITING:
            self._events.counts.dropped += 1
        if self._events.waiting < MAX_WAITING:
            self._waiting.append(record)
            self._is_noted.set()

    async def run(self) -> None:
        """Tell of what is noted until cancelled."""
        while True:
            await self._is_noted.wait()
            self._is_noted.clear()
            while self._waiting:
                await self._calm()
                self._tell(self._waiting.popleft())
                # Others first: this is never urgent.
                await asyncio.sleep(1 / self._events.settings.per_second)

    def _tell(self, record: DecisionRecord) -> None:
        text = describe(record)
        if text:
            self._events.post(record.pod, EventType.NORMAL, REASON, text)
        else:
            self._events.counts.dropped += 1


def describe(record: DecisionRecord) -> str:
    """Return what a pod got in one line, "" where that is not known any more."""
    node = record.bound_node
    parts = [only(part.evidence, node) for part in record.evidence if node in part.nodes]
    verdicts = [verdict for part in parts for verdict in explain(part)]
    if not verdicts:
        return ""
    told = ["; ".join(_gpus(verdict) for verdict in verdicts)]
    if record.decision.best not in {node, None}:
        told.append(f"idlegpu's first choice was {record.decision.best}")
    return f"GPU placement: {node}, {', '.join(told)}"


def _gpus(verdict: NodeVerdict) -> str:
    """Return how the GPUs are that a pod could land on."""
    landing = [device for device in verdict.devices if device.can_land] or list(verdict.devices)
    idle = sum(device.state == "idle" for device in verdict.devices)
    told = [f"{idle} of {len(verdict.devices)} GPUs idle"]
    busy = _known([device.utilization_ratio for device in landing])
    if busy:
        told.append(f"mean activity {100 * sum(busy) / len(busy):.0f} %")
    told += _free(landing)
    if not busy:
        told.append("activity unknown")
    return ", ".join(told)


def _free(landing: Sequence[DeviceVerdict]) -> list[str]:
    """Return how much memory the fullest of them has left."""
    free = _known([device.free_bytes for device in landing])
    if not free:
        return []
    each = " each" if len(landing) > 1 else ""
    return [f"{min(free) / GIB:.0f} GiB free{each}"]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
