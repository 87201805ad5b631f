"""The worker process: query Prometheus, reduce its answers, and send columns to the extender.

Each round queries the current values (`collector`). The past is queried here, once: readings to
fill the windows, and the last use of each device.

Parsing megabytes of JSON holds the GIL; in this process no webhook waits for it. The process ends
when its standard input is closed, that is, when the extender has ended.
"""

import contextlib
import gc
import os
import queue
import resource
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from extender.core.devices.readings import Column, DeviceKey, Signal
from extender.core.nodes.snapshot import Flags
from extender.core.quantity import MIB
from extender.runtime import native_memory
from extender.sources.prometheus import promql, protocol
from extender.sources.prometheus.collector import Collector, Round
from extender.sources.prometheus.dcgm import Metric, convert
from extender.sources.prometheus.dcgm_devices import device_key, number
from extender.sources.prometheus.http import PrometheusClient
from extender.sources.prometheus.node_identity import NodeIdentity
from extender.sources.prometheus.protocol import (
    PATH_SETTINGS,
    Frame,
    PrometheusError,
    reduce_rows,
    table_of,
)
from extender.sources.prometheus.responses import Row

if TYPE_CHECKING:
    from extender.settings.sources import Prometheus

_T = TypeVar("_T")

_MAX_MEMORY: Final = 512 * MIB
"""Limit for this process's memory: 40,000 devices take 230 MiB. Two such processes and the extender
fit into the pod's limit; beyond that the kernel would end all three."""

_NICE_LEVEL: Final = 10
"""A tenth of the extender's CPU time where both need one core. With idle priority (SCHED_IDLE) the
worker got none on a busy machine: readings grew old, and a killed worker did not end."""

_FULL_COLLECTION_INTERVAL: Final = 30
"""Answers between two garbage collections of all generations."""
_YOUNGER, _OLDEST = 1, 2
"""Generations of the garbage collector: objects since the last collection, and all objects."""

_ITEMS_PER_FRAME: Final = 500
"""Devices per frame: the extender converts this many to records within two milliseconds."""

# A step says whether a device was active at any scrape in it. Activity between two scrapes is not
# recorded, and a pause shorter than a step is not visible.
_USE_STEP_SECONDS: Final = 900.0
_USE_STEPS_PER_QUERY: Final = 8
"""Steps per query: two hours, an answer of ten megabytes for forty thousand devices."""

_ACTIVITY_SIGNALS: Final = (Signal.GRAPHICS_ACTIVE, Signal.GPU_UTILIZATION)
"""Signals of activity; the highest value counts."""

_TIMEOUT_FACTOR: Final = 6.0
"""Factor of the time limit: the server needs longer for hours than for one instant."""

_Matrix = npt.NDArray[np.float16]
"""Ratios and XIDs need no more digits, and forty thousand devices have millions of past values."""

_LATE_SECONDS: Final = 3600.0
_LATE_STEP_SECONDS: Final = 60.0
_EARLY_STEP_SECONDS: Final = 450.0
"""The last hour is queried minute by minute; one value for each step of the forecast's windows is
enough for earlier hours, and keeps the values few."""

_STEPS_PER_QUERY: Final = 4
"""With 15 steps the process takes 30 MiB more for forty thousand devices, and a tenth less time."""
_DEVICES_PER_STEP: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _PastReadings:
    """Past readings; the axes are (device, step).

    Attributes:
        times: time of each step, seconds since the epoch, oldest first.
        utilization: ratio; NaN if missing.
        xid: number of the last XID; None if Prometheus has no such metric.
    """

    times: Column
    devices: tuple[DeviceKey, ...]
    utilization: _Matrix
    xid: _Matrix | None


def main() -> None:
    """Answer the extender's requests until it ends."""
    with contextlib.suppress(ValueError, OSError):  # the container may allow less already
        resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY))
    # Output that libraries print goes to the log: standard output is the pipe for frames.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Answers are trees of hundreds of thousands of objects without a cycle: automatic garbage
    # collection would traverse them again and again, and take most of the parsing time.
    gc.disable()
    native_memory.prefer_small()
    requests: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(requests, answers), daemon=True).start()
    while (request := protocol.read(sys.stdin.buffer)) is not None:
        requests.put(request)
    # Not sys.exit: it waits for threads, and a query may hang as long as its server does.
    os._exit(0)


def _lower_priority() -> None:
    """Let the extender go first: a round may take seconds, an answer of the extender may not."""
    level = os.getpriority(os.PRIO_PROCESS, 0) + _NICE_LEVEL
    with contextlib.suppress(OSError):  # only Linux has a priority for each thread
        for thread in threading.enumerate():
            if thread.native_id is not None:  # None before it starts
                os.setpriority(os.PRIO_PROCESS, thread.native_id, level)


def _serve(requests: "queue.SimpleQueue[Frame]", answers: BinaryIO) -> None:
    """Answer requests; end the process after an unexpected error.

    The extender then starts a new one.
    """
    try:
        settings = _read_settings(requests.get().header)
        collector = Collector(settings)
        identity = NodeIdentity()
        answered = count(1)
        while True:
            request = requests.get()
            if "window_seconds" in request.header:
                answer = _answer_past(settings, request.header)
            elif "use_seconds" in request.header:
                answer = _answer_use(settings, request.header)
            else:
                identity = _read_identity(request.header) or identity
                answer = _answer_round(collector, identity, request.header)
            try:
                for frame in answer:
                    protocol.write(answers, frame)
            except PrometheusError as error:  # raised before the first frame
                protocol.write(answers, Frame(header={"error": str(error)}))
            del answer
            number = next(answered)
            if number == 1:
                # Not at once: the extender is not ready without the first answer.
                _lower_priority()
            # Hundreds of thousands of objects live on between rounds: rarely collect all of them.
            gc.collect(_OLDEST if number % _FULL_COLLECTION_INTERVAL == 0 else _YOUNGER)
            native_memory.give_back()
    except BrokenPipeError:
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a thread's fault must end the process
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _read_settings(header: Mapping[str, Any]) -> "Prometheus":
    """Read the settings that the extender sent; it has validated them.

    They are not parsed by `Prometheus`, because pydantic would be a fifth of this process's memory.
    """
    bare = SimpleNamespace(**header)
    for name in PATH_SETTINGS:
        path = getattr(bare, name)
        setattr(bare, name, None if path is None else Path(path))
    bare.metrics = {
        name: None if row is None else SimpleNamespace(**row) for name, row in bare.metrics.items()
    }
    return cast("Prometheus", bare)


def _read_identity(header: Mapping[str, Any]) -> NodeIdentity | None:
    nodes = header.get("nodes")
    if nodes is None:
        return None
    return NodeIdentity(
        names=frozenset(nodes["names"]),
        addresses=nodes["addresses"],
        exporter_pods=nodes["exporter_pods"],
    )


def _answer_round(
    collector: Collector, identity: NodeIdentity, header: Mapping[str, Any]
) -> Iterator[Frame]:
    yield from round_frames(collector.collect(identity, header["now"]))


def round_frames(found: Round) -> Iterator[Frame]:
    """Encode a round: changed devices and tenants in parts, then one frame per column."""
    for part in _parts([tuple(row) for row in found.added]):
        yield Frame(header={"more": True, "added": part})
    for tenants in _parts([(*key, *pods) for key, pods in (found.tenants or {}).items()]):
        yield Frame(header={"more": True, "tenants": tenants})
    for shares in _parts([(*key, pod, held) for key, pod, held in found.shares]):
        yield Frame(header={"more": True, "shares": shares})
    for divided in _parts(found.divided):
        yield Frame(header={"more": True, "divided": divided})
    for signal, column in found.columns.items():
        yield Frame(header={"more": True, "signal": signal}, body=_block(column))
    yield Frame(
        header={
            "removed": found.removed,
            "has_tenants": found.tenants is not None,
            "tenants_at": found.tenants_at,
            "unmatched_series": found.unmatched_series,
            "unmatched_example": found.unmatched_example,
            "failed": found.failed,
            "partial_answers": found.partial_answers,
            "warning": found.warning,
        },
        body=_block(found.measured_at),
    )


def _answer_past(settings: "Prometheus", header: Mapping[str, Any]) -> Iterator[Frame]:
    with contextlib.closing(PrometheusClient(settings)) as client:
        past = _collect_past(
            client, settings, now=header["now"], window_seconds=header["window_seconds"]
        )
    yield from _past_frames(past)


def _past_frames(past: _PastReadings) -> Iterator[Frame]:
    """Encode past readings: the times, then the values of some devices per frame."""
    matrices = [past.utilization] if past.xid is None else [past.utilization, past.xid]
    yield Frame(header={"more": True, "times": past.times.tolist(), "matrices": len(matrices)})
    yield from _device_frames(past.devices, matrices, np.float16)


def _answer_use(settings: "Prometheus", header: Mapping[str, Any]) -> Iterator[Frame]:
    with contextlib.closing(PrometheusClient(settings)) as client:
        use = _collect_use(
            client,
            settings,
            now=header["now"],
            seconds=header["use_seconds"],
            active_from=header["active_from"],
        )
    yield from _device_frames(use.devices, [use.used_at, use.is_guess], np.float64)


def _device_frames(
    devices: Sequence[DeviceKey], columns: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike
) -> Iterator[Frame]:
    """Encode values of devices: some devices per frame, and an empty frame at the end."""
    start = 0
    for part in _parts(devices):
        some = slice(start, start + len(part))
        start = some.stop
        body = np.stack([column[some].astype(dtype) for column in columns]).tobytes()
        yield Frame(header={"more": True, "devices": part}, body=body)
    yield Frame(header={})


def _parts(items: Sequence[_T]) -> Iterator[list[_T]]:
    rest = iter(items)
    while part := list(islice(rest, _ITEMS_PER_FRAME)):
        yield part


def _block(column: Column) -> bytes:
    return column.astype(np.float64, copy=False).tobytes()


# --- last use -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _LastUse:
    """Last use of the devices that were not used in the latest step.

    Attributes:
        devices: devices without activity in the latest step.
        used_at: end of the last step in which each device was, or may have been, active.
        is_guess: True if the activity is not certain: the step has no data, or was not queried.
    """

    devices: tuple[DeviceKey, ...]
    used_at: Column
    is_guess: Flags


def _collect_use(
    client: PrometheusClient,
    settings: "Prometheus",
    *,
    now: float,
    seconds: float,
    active_from: float,
) -> _LastUse:
    """Query step by step into the past until each device's last use is found.

    Args:
        seconds: maximum time to look back.
        active_from: a device is in use from this ratio of activity on.

    Raises:
        PrometheusError: no usable answer came.
    """
    limit_seconds = settings.timeout_seconds * _TIMEOUT_FACTOR
    names = set(client.metric_names(since=now - seconds, timeout_seconds=limit_seconds))
    metrics = [
        one for one in table_of(settings) if one.signal in _ACTIVITY_SIGNALS and one.name in names
    ]
    selector = promql.bare_selector(settings.selector)
    steps = max(1, round(seconds / _USE_STEP_SECONDS))
    unused: list[DeviceKey] | None = None
    found: dict[DeviceKey, tuple[float, bool]] = {}
    for first in range(0, steps, _USE_STEPS_PER_QUERY):
        # Newest first: most devices that are used at all were used a moment ago.
        times: Column = now - _USE_STEP_SECONDS * np.arange(
            first, min(first + _USE_STEPS_PER_QUERY, steps), dtype=np.float64
        )
        highest: dict[DeviceKey, Column] = {
            key: np.full(len(times), np.nan) for key in unused or ()
        }
        for metric in metrics:
            rows = client.query_range(
                promql.max_query(metric, selector, _USE_STEP_SECONDS),
                start=times[-1],
                end=times[0],
                step_seconds=_USE_STEP_SECONDS,
                timeout_seconds=limit_seconds,
            )
            merge = partial(
                _merge_highest, metric=metric, times=times, highest=highest, is_first=unused is None
            )
            reduce_rows(merge, rows)
        unused = []
        for key, values in highest.items():
            maybe_active = np.flatnonzero(~(values < active_from))
            if len(maybe_active):
                at = int(maybe_active[0])
                is_unknown = bool(np.isnan(values[at]))
                # After a step without data, perhaps only the end of the next step has samples.
                found[key] = (float(times[at]) + _USE_STEP_SECONDS * is_unknown, is_unknown)
            else:
                unused.append(key)
        if not unused:
            break
    oldest = now - _USE_STEP_SECONDS * steps
    found |= dict.fromkeys(unused or (), (oldest, True))
    past_uses = {key: use for key, use in found.items() if use[0] < now}
    return _LastUse(
        devices=tuple(past_uses),
        used_at=np.array([at for at, _ in past_uses.values()], dtype=np.float64),
        is_guess=np.array([is_guess for _, is_guess in past_uses.values()], dtype=np.bool_),
    )


def _merge_highest(
    rows: Sequence[Row],
    *,
    metric: Metric,
    times: Column,
    highest: dict[DeviceKey, Column],
    is_first: bool,
) -> None:
    """Merge the answer for one metric into the highest activity by device and step.

    Args:
        times: ends of the steps, the newest first.
        highest: the highest activity by device and step; updated in place.
        is_first: add devices that `highest` does not have.
    """
    for row in rows:
        key = device_key(row["metric"])
        if key is not None and (is_first or key in highest):
            values = convert(_values(row, times), metric.unit, metric.signal)
            highest[key] = np.fmax(highest[key], values) if key in highest else values


def _values(row: Row, times: Column) -> Column:
    values = np.full(len(times), np.nan)
    for at, text in row["values"]:
        position = round((times[0] - at) / _USE_STEP_SECONDS)
        if 0 <= position < len(times):
            values[position] = number(text)
    return values


# --- readings that fill the windows ---------------------------------------------------------------


class _Grid:
    """Collect the rows of several answers with the same steps and a growing set of devices."""

    def __init__(self, times: Column) -> None:
        self._times = times
        self._devices: dict[DeviceKey, int] = {}
        self._matrices: dict[Signal, _Matrix] = {}

    @property
    def devices(self) -> tuple[DeviceKey, ...]:
        """The devices, in the order of the first axis."""
        return tuple(self._devices)

    def add(self, rows: Sequence[Row], metric: Metric, steps: slice) -> None:
        """Merge one answer; of two values the higher one counts."""
        place_of = {round(at): place for place, at in enumerate(self._times[steps].tolist())}
        found: dict[int, list[float]] = {}
        for row in rows:
            key = device_key(row["metric"])
            if key is None:
                continue
            values = [np.nan] * len(place_of)
            for at, text in row["values"]:
                place = place_of.get(round(at))
                if place is not None:
                    values[place] = number(text)
            found[self._devices.setdefault(key, len(self._devices))] = values
        matrix = self.matrix(metric.signal)
        for some in _batches(list(found)):
            values_of = np.array([found.pop(device) for device in some])
            converted = convert(values_of, metric.unit, metric.signal)
            matrix[some, steps] = np.fmax(matrix[some, steps], converted)

    def fill(self, signal: Signal, fallback: Signal) -> None:
        """Fill in the missing values of a signal from another one, and forget that one."""
        matrix, other = self.matrix(signal), self.matrix(fallback)
        del self._matrices[fallback]
        np.copyto(matrix, other, where=np.isnan(matrix))

    def matrix(self, signal: Signal) -> _Matrix:
        """Return the values of a signal, one row per device."""
        matrix = self._matrices.get(signal)
        missing = len(self._devices) - (0 if matrix is None else len(matrix))
        if matrix is None or missing:
            more = np.full((missing, len(self._times)), np.nan, dtype=np.float16)
            matrix = more if matrix is None else np.concatenate([matrix, more])
            self._matrices[signal] = matrix
        return matrix


def _collect_past(
    client: PrometheusClient, settings: "Prometheus", *, now: float, window_seconds: float
) -> _PastReadings:
    """Query the last `window_seconds`: activity of the graphics engine, else utilization.

    The time is split into several queries: a single answer would have a hundred megabytes. The
    last hour has more steps than the hours before.

    Raises:
        PrometheusError: no usable answer came.
    """
    late = np.arange(0.0, min(window_seconds, _LATE_SECONDS) + 1.0, _LATE_STEP_SECONDS)
    early = np.arange(late[-1] + _EARLY_STEP_SECONDS, window_seconds + 1.0, _EARLY_STEP_SECONDS)
    times = round(now) - np.concatenate([early[::-1], late[::-1]])
    queries = [
        (slice(first, min(first + _STEPS_PER_QUERY, end)), step_seconds)
        for start, end, step_seconds in (
            (0, len(early), _EARLY_STEP_SECONDS),
            (len(early), len(times), _LATE_STEP_SECONDS),
        )
        for first in range(start, end, _STEPS_PER_QUERY)
    ]
    grid = _Grid(times)
    limit_seconds = settings.timeout_seconds * _TIMEOUT_FACTOR
    names = set(client.metric_names(since=times[0], timeout_seconds=limit_seconds))
    selector = promql.bare_selector(settings.selector)

    def query(signal: Signal) -> bool:
        metrics = [
            metric
            for metric in table_of(settings)
            if metric.signal is signal and metric.name in names
        ]
        for metric in metrics:
            for steps, step_seconds in queries:
                rows = client.query_range(
                    promql.metric_query(metric, selector),
                    start=times[steps][0],
                    end=times[steps][-1],
                    step_seconds=step_seconds,
                    timeout_seconds=limit_seconds,
                )
                reduce_rows(partial(grid.add, metric=metric, steps=steps), rows)
        return bool(metrics)

    query(Signal.GRAPHICS_ACTIVE)
    query(Signal.GPU_UTILIZATION)
    grid.fill(Signal.GRAPHICS_ACTIVE, Signal.GPU_UTILIZATION)
    try:
        has_xid = query(Signal.XID)
    except PrometheusError:
        has_xid = False  # the windows are more important than the times of old errors
    return _PastReadings(
        times=times,
        devices=grid.devices,
        utilization=grid.matrix(Signal.GRAPHICS_ACTIVE),
        xid=grid.matrix(Signal.XID) if has_xid else None,
    )


def _batches(devices: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(devices), _DEVICES_PER_STEP):
        yield devices[start : start + _DEVICES_PER_STEP]


if __name__ == "__main__":
    main()
