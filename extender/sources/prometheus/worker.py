"""The worker process: query Prometheus, reduce its answers, and send columns to the extender.

Parsing megabytes of JSON holds the GIL; in this process no webhook waits for it. The process ends
when its standard input is closed, that is, when the extender has ended.
"""

import contextlib
import gc
import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar, cast

import numpy as np

from extender.core.devices.readings import Column
from extender.runtime import native_memory
from extender.sources.prometheus import frames
from extender.sources.prometheus.collector import Collector, Round
from extender.sources.prometheus.common import PATH_SETTINGS, PrometheusError
from extender.sources.prometheus.frames import Frame
from extender.sources.prometheus.history import PastReadings, collect_past, collect_use
from extender.sources.prometheus.http import PrometheusClient
from extender.sources.prometheus.node_identity import NodeIdentity

if TYPE_CHECKING:
    from extender.settings.sources import Prometheus

_T = TypeVar("_T")

_NICE_LEVEL: Final = 10
"""A tenth of the extender's CPU time where both need one core. With idle priority (SCHED_IDLE) the
worker got none on a busy machine: readings grew old, and a killed worker did not end."""

_FULL_COLLECTION_INTERVAL: Final = 30
"""Answers between two garbage collections of all generations."""
_YOUNGER, _OLDEST = 1, 2
"""Generations of the garbage collector: objects since the last collection, and all objects."""

_ITEMS_PER_FRAME: Final = 500
"""Devices per frame: the extender converts this many to records within two milliseconds."""


def main() -> None:
    """Answer the extender's requests until it ends."""
    # Output that libraries print goes to the log: standard output is the pipe for frames.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Answers are trees of hundreds of thousands of objects without a cycle: automatic garbage
    # collection would traverse them again and again, and take most of the parsing time.
    gc.disable()
    native_memory.prefer_small()
    requests: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(requests, answers), daemon=True).start()
    while (request := frames.read(sys.stdin.buffer)) is not None:
        requests.put(request)
    # Not sys.exit: it waits for threads, and a query may hang as long as its server does.
    os._exit(0)


def _lower_priority() -> None:
    """Let the extender go first: a round may take seconds, an answer of the extender may not."""
    level = os.getpriority(os.PRIO_PROCESS, 0) + _NICE_LEVEL
    with contextlib.suppress(OSError):  # only Linux has a priority for each thread
        for thread in threading.enumerate():
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, level)


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
            for frame in answer:
                frames.write(answers, frame)
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
    try:
        found = collector.collect(identity, header["now"])
    except PrometheusError as error:
        yield Frame(header={"error": str(error)})
        return
    yield from round_frames(found)


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
    client = PrometheusClient(settings)
    try:
        past = collect_past(
            client, settings, now=header["now"], window_seconds=header["window_seconds"]
        )
    except PrometheusError as error:
        yield Frame(header={"error": str(error)})
        return
    finally:
        client.close()
    yield from _past_frames(past)


def _past_frames(past: PastReadings) -> Iterator[Frame]:
    """Encode past readings: the times, then the values of some devices per frame."""
    matrices = [past.utilization] if past.xid is None else [past.utilization, past.xid]
    yield Frame(
        header={"more": True, "times": past.times.tolist(), "matrices": len(matrices)},
    )
    start = 0
    for devices in _parts(past.devices):
        some = slice(start, start + len(devices))
        start = some.stop
        body = np.stack([matrix[some] for matrix in matrices]).astype(np.float32).tobytes()
        yield Frame(header={"more": True, "devices": devices}, body=body)
    yield Frame(header={})


def _answer_use(settings: "Prometheus", header: Mapping[str, Any]) -> Iterator[Frame]:
    client = PrometheusClient(settings)
    try:
        use = collect_use(
            client,
            settings,
            now=header["now"],
            seconds=header["use_seconds"],
            active_from=header["active_from"],
        )
    except PrometheusError as error:
        yield Frame(header={"error": str(error)})
        return
    finally:
        client.close()
    start = 0
    for devices in _parts(use.devices):
        some = slice(start, start + len(devices))
        start = some.stop
        body = np.stack([use.used_at[some], use.is_guess[some].astype(np.float64)]).tobytes()
        yield Frame(header={"more": True, "devices": devices}, body=body)
    yield Frame(header={})


def _parts(items: Sequence[_T]) -> Iterator[list[_T]]:
    rest = iter(items)
    while part := list(islice(rest, _ITEMS_PER_FRAME)):
        yield part


def _block(column: Column) -> bytes:
    return column.astype(np.float64, copy=False).tobytes()


if __name__ == "__main__":
    main()
