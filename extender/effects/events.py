"""Write Kubernetes Events about pods and their placements, at a limited rate.

The API is `events.k8s.io/v1`, not the older `v1`: it aggregates repeats as a series of one Event,
kube-scheduler uses it, and `kubectl describe` shows both.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from http import HTTPStatus
from typing import Final

from extender.core.decision.verdicts import DeviceVerdict, NodeVerdict, explain, only
from extender.core.quantity import GIB
from extender.core.request.annotations import AnnotationProblem, Target
from extender.core.request.request import PodRef
from extender.kube.client import KubeClient, KubeError
from extender.placement.history import DecisionRecord

logger = logging.getLogger(__name__)

_CONTROLLER: Final = "idlegpu.io/extender"
_ACTION: Final = "Scheduling"
_INVALID_ANNOTATION: Final = "InvalidAnnotation"

_MAX_NOTE_BYTES: Final = 1024  # the API server refuses longer notes
_MAX_REASON: Final = 128  # and longer reasons
_MAX_INSTANCE: Final = 128  # and longer names of the reporting instance
_MAX_POD_NAME: Final = 230  # of a pod's name in the name of its Event, which has 253 characters

_QUEUE_SIZE: Final = 1000
"""Maximum number of queued Events; further ones are dropped and counted."""
_PER_SECOND: Final = 5.0
"""Average number of Events written per second."""
_BURST: Final = 25
"""Maximum number of Events written at once."""
_REPEAT_SECONDS: Final = 300.0
"""Time after which a repeated Event is written again."""
_PER_POD: Final = 20
"""Maximum number of different Events of one pod; further ones are dropped and counted."""
_MAX_KNOWN: Final = 10_000
"""Maximum number of Events that are remembered to detect repeats."""
_TIMEOUT_SECONDS: Final = 5.0


class EventType(StrEnum):
    """Type of an Event."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(slots=True, kw_only=True)
class _EventCounts:
    """Counts of Events by outcome, updated as they are written.

    Attributes:
        written: created or updated at the API server.
        dropped: not queued, because the queue was full or the pod had too many.
        failed: refused by the API server, or not delivered.
    """

    written: int = 0
    dropped: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class _Text:
    """One Event of one pod; repeats compare equal."""

    pod: PodRef
    type: EventType
    reason: str
    note: str


@dataclass(slots=True)
class _Series:
    """Record of an Event that was queued.

    Attributes:
        written_at: time at which it was last queued, seconds since the epoch.
        is_created: whether the API server has it.
    """

    written_at: float
    count: int = 1
    is_created: bool = False


class EventWriter:
    """Writes aggregated Events at a limited rate; posting never blocks and never fails.

    Use it on the event loop's thread only.

    Args:
        instance: name of the reporting instance: the pod's name.
        clock: seconds since the epoch.
    """

    def __init__(
        self, client: KubeClient, *, instance: str, clock: Callable[[], float] = time.time
    ) -> None:
        self.counts = _EventCounts()
        self._client = client
        self._instance = instance[:_MAX_INSTANCE] or "extender"
        self._clock = clock
        self._queue: asyncio.Queue[_Text] = asyncio.Queue(_QUEUE_SIZE)
        self._known: OrderedDict[_Text, _Series] = OrderedDict()
        self._per_pod: dict[str, int] = {}
        self._last_failure = ""

    @property
    def waiting(self) -> int:
        """Number of Events in the queue."""
        return self._queue.qsize()

    def warn_annotation(self, pod: PodRef, problem: AnnotationProblem) -> None:
        """Warn about an invalid annotation, once for each value on the pod."""
        text = self._text(pod, EventType.WARNING, _INVALID_ANNOTATION, problem.message)
        if text not in self._known:
            self._post(text)

    def post(self, pod: PodRef, kind: EventType, reason: str, message: str) -> None:
        """Queue an Event; a repeat increases the count of its series.

        Args:
            pod: the pod that the Event describes.
            reason: reason in CamelCase, for machines.
            message: text for people.
        """
        self._post(self._text(pod, kind, reason, message))

    async def run(self) -> None:
        """Write queued Events until cancelled."""
        loop = asyncio.get_running_loop()
        tokens, counted_at = float(_BURST), loop.time()
        while True:
            text = await self._queue.get()
            now = loop.time()
            tokens = min(tokens + (now - counted_at) * _PER_SECOND, _BURST)
            counted_at = now
            await asyncio.sleep((1 - tokens) / _PER_SECOND)  # not at all while tokens are left
            tokens -= 1
            await self._write(text)

    def _text(self, pod: PodRef, kind: EventType, reason: str, message: str) -> _Text:
        note = message.encode(errors="replace")[:_MAX_NOTE_BYTES].decode(errors="ignore")
        return _Text(pod, kind, reason[:_MAX_REASON], note)

    def _post(self, text: _Text) -> None:
        """Queue an Event, unless it was queued recently or its pod has no name or UID."""
        if not (text.pod.namespace and text.pod.name and text.pod.uid):
            return
        now = self._clock()
        series = self._known.get(text)
        if series is not None:
            series.count += 1
            if 0 <= now - series.written_at < _REPEAT_SECONDS:  # not if set back
                return
        elif self._per_pod.get(text.pod.uid, 0) >= _PER_POD:
            self.counts.dropped += 1
            return
        try:
            self._queue.put_nowait(text)
        except asyncio.QueueFull:
            self.counts.dropped += 1
            return
        if series is None:
            self._remember(text, _Series(now))
        else:
            series.written_at = now
            self._known.move_to_end(text)

    def _remember(self, text: _Text, series: _Series) -> None:
        self._known[text] = series
        self._per_pod[text.pod.uid] = self._per_pod.get(text.pod.uid, 0) + 1
        if len(self._known) > _MAX_KNOWN:
            self._forget(next(iter(self._known)))

    def _forget(self, text: _Text) -> None:
        if self._known.pop(text, None) is None:
            return
        left = self._per_pod[text.pod.uid] - 1
        if left:
            self._per_pod[text.pod.uid] = left
        else:
            del self._per_pod[text.pod.uid]

    async def _write(self, text: _Text) -> None:
        """Create an Event, or update its series."""
        series = self._known.get(text)
        if series is None:
            return  # evicted, because too many Events followed
        try:
            if series.is_created:
                await self._bump(text, series)
            else:
                await self._create(text, series)
        except KubeError as error:
            self._note_failure(error)
            self._forget(text)  # so that the next post tries again
            return
        series.is_created = True
        self.counts.written += 1
        if self._last_failure:
            logger.info("writing events again")
            self._last_failure = ""

    async def _create(self, text: _Text, series: _Series) -> None:
        body = _build_event(text.pod, text.type, text.reason, text.note) | {
            "eventTime": _micro_time(series.written_at),
            "reportingInstance": self._instance,
        }
        try:
            await self._send("POST", _events_path(text.pod), body)
        except KubeError as error:
            # Another replica, or this one before a restart, wrote the same Event: update it.
            if error.status != HTTPStatus.CONFLICT:
                raise
            series.count = max(series.count, 2)
            await self._patch(text, series)

    async def _bump(self, text: _Text, series: _Series) -> None:
        try:
            await self._patch(text, series)
        except KubeError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            await self._create(text, series)  # the API server deletes Events after an hour

    async def _patch(self, text: _Text, series: _Series) -> None:
        name = _event_name(text.pod, text.type, text.reason, text.note)
        seen = {"count": series.count, "lastObservedTime": _micro_time(series.written_at)}
        await self._send("PATCH", f"{_events_path(text.pod)}/{name}", {"series": seen})

    async def _send(self, method: str, path: str, body: object) -> None:
        await self._client.send(
            method,
            path,
            body,
            action=f"{'create' if method == 'POST' else 'patch'} events.events.k8s.io",
            timeout_seconds=_TIMEOUT_SECONDS,
        )

    def _note_failure(self, error: KubeError) -> None:
        """Count a failed write, and log each new cause once."""
        self.counts.failed += 1
        # A refusal names the Event's namespace, so compare only the status.
        kind = str(error.status or error)
        if kind != self._last_failure:
            logger.warning("cannot write events", extra={"cause": str(error)})
            self._last_failure = kind


def _build_event(pod: PodRef, kind: EventType, reason: str, note: str) -> dict[str, object]:
    """Build an Event without its time and its reporting instance."""
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": _event_name(pod, kind, reason, note), "namespace": pod.namespace},
        "type": kind.value,
        "reason": reason,
        "note": note,
        "action": _ACTION,
        "reportingController": _CONTROLLER,
        "regarding": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": pod.namespace,
            "name": pod.name,
            "uid": pod.uid,
        },
    }


def _event_name(pod: PodRef, kind: EventType, reason: str, note: str) -> str:
    """Return the name of an Event; equal Events get equal names from every replica."""
    text = f"{pod.uid}\0{kind}\0{reason}\0{note}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{pod.name[:_MAX_POD_NAME].rstrip('.-')}.{digest}"


def _events_path(pod: PodRef) -> str:
    return f"/apis/events.k8s.io/v1/namespaces/{pod.namespace}/events"


def _micro_time(seconds: float) -> str:
    """Format a time as the API's MicroTime.

    Example:
        >>> _micro_time(0.5)
        '1970-01-01T00:00:00.500000Z'
    """
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


_REMEMBERED: Final = 10_000
"""Maximum number of reported annotations that are remembered."""


class AnnotationWarnings:
    """Reports invalid annotations in the log, and in an Event if Events are on.

    Args:
        events: writes the Events.
        writes_events: returns whether Events are on.
    """

    def __init__(self, events: EventWriter, writes_events: Callable[[], bool]) -> None:
        self._events = events
        self._writes_events = writes_events
        self._made: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    def warn(self, pod: PodRef, problem: AnnotationProblem) -> None:
        """Report an invalid annotation of a pod, unless it was reported before."""
        key = (pod.uid, problem.annotation, problem.value)
        if key in self._made:
            return
        self._made[key] = None
        if len(self._made) > _REMEMBERED:
            self._made.popitem(last=False)
        logger.warning(
            "annotation cannot be used",
            extra={
                "pod": pod.key,
                "annotation": problem.annotation,
                "value": problem.value,
                "allowed": problem.allowed,
                "used_instead": problem.default_used,
            },
        )
        if self._writes_events():
            self._events.warn_annotation(pod, problem)


_REASON: Final = "GPUPlacement"
_PRIORITIZE: Final = "prioritize"

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
                await asyncio.sleep(1 / _PER_SECOND)

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
        part = f"{count} of " if (count := record.request.count) < len(free) else ""
        return f"It gets {part}GPU {open_to} as requested"
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
    return [f"{min(free) / GIB:.0f} GiB free{each}"]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
