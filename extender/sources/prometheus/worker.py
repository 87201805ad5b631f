"""The worker process: asks Prometheus, parses and reduces, and sends the extender columns.

Parsing megabytes of JSON holds Python's lock for as long as it takes; here nobody waits for it.
The process ends when its standard input does, that is, when the extender has gone.
"""

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
from extender.sources.prometheus.common import PATHS, PrometheusError
from extender.sources.prometheus.frames import Frame
from extender.sources.prometheus.history import PastReadings, collect_past, collect_use
from extender.sources.prometheus.http import PrometheusClient
from extender.sources.prometheus.node_identity import NodeIdentity

if TYPE_CHECKING:
    from extender.settings.config import Prometheus

T = TypeVar("T")

NICENESS: Final = 19

_THOROUGH_AFTER: Final = 30
"""Answers between two searches for garbage among what has been there for long."""
_YOUNGER, _OLDEST = 1, 2
"""Generations of the collector: what came since it was last asked, and everything."""

PART_ITEMS: Final = 500
"""Devices in one frame: the extender turns so many into records within a millisecond or two."""


def main() -> None:
    """Serve the extender until it goes."""
    # Whatever a library prints goes to the log: the pipe belongs to the frames.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Answers are trees of hundreds of thousands of objects without a cycle: the collector would
    # walk them again and again, for most of the time that parsing takes.
    gc.disable()
    _yield_to_all()
    native_memory.prefer_small()
    questions: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    threading.Thread(target=_serve_or_die, args=(questions, answers), daemon=True).start()
    while (question := frames.read(sys.stdin.buffer)) is not None:
        questions.put(question)
    # Not sys.exit: it waits for threads, and a query may hang for as long as its server likes.
    os._exit(0)


def _yield_to_all() -> None:
    """Run only where nobody else would: a round has seconds to spare, an answer has none."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # no Linux, or it is forbidden
        os.nice(NICENESS)


def _serve_or_die(questions: "queue.SimpleQueue[Frame]", answers: BinaryIO) -> None:
    """Answer questions; after a fault of ours the extender gets a fresh process."""
    try:
        settings = read_settings(questions.get().header)
        collector = Collector(settings)
        identity = NodeIdentity()
        answered = count(1)
        while True:
            question = questions.get()
            if "window_seconds" in question.header:
                answer = _answer_past(settings, question.header)
            elif "use_seconds" in question.header:
                answer = _answer_use(settings, question.header)
            else:
                identity = _read_identity(question.header) or identity
                answer = _answer_round(collector, identity, question.header)
            for frame in answer:
                frames.write(answers, frame)
            del answer
            # Hundreds of thousands of objects stay from round to round: they are seldom searched.
            gc.collect(_OLDEST if next(answered) % _THOROUGH_AFTER == 0 else _YOUNGER)
            native_memory.give_back()
    except BrokenPipeError:
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a thread's fault must end the process
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def read_settings(header: Mapping[str, Any]) -> "Prometheus":
    """Read the settings as the extender sent them, which has checked them.

    Not as `Prometheus` itself: pydantic would be a fifth of this process's memory.
    """
    bare = SimpleNamespace(**header)
    for name in PATHS:
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
    """Write a round: changed devices and tenants in parts, then column by column."""
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
            "knows_tenants": found.tenants is not None,
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
    yield from past_frames(past)


def past_frames(past: PastReadings) -> Iterator[Frame]:
    """Write the past: the times, then some devices at a time with their values."""
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


def _parts(items: Sequence[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, PART_ITEMS)):
        yield part


def _block(column: Column) -> bytes:
    return column.astype(np.float64, copy=False).tobytes()


if __name__ == "__main__":
    main()
