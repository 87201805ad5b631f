"""Run the extender and measure every step of its event loop in CPU time.

`python -m bench.stepping --config FILE --out FILE` serves as `python -m extender` does, but on
asyncio's own loop, because uvloop has no hook for steps. Each SIGUSR1 writes the longest steps
since the last one to the file as JSON. Latencies depend on the load of the machine; CPU time does
not. A step of 20 ms of CPU delays every request by 20 ms on any machine.
"""

import argparse
import asyncio
import gc
import heapq
import os
import re
import signal
import sys
import time
from asyncio import events
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import orjson
from aiohttp import web

from extender.api.page.routes import STREAM
from extender.app import serve
from extender.runtime import logs
from extender.settings.config import load_settings

KEPT: Final = 60
NOTED_SECONDS: Final = 0.001
STREAM_FILE: Final = "observe/page/stream.py"
VIEWER_TASK: Final = "page viewer"
"""Task name of a request that streams to an open page."""
REQUEST_TASK: Final = "api request"
"""Prefix of the task name of an API request; its path follows."""
Handle = Callable[[web.Application, web.Request], Coroutine[Any, Any, web.StreamResponse]]

_NUMBER: Final = re.compile(r"-\d+$")


class Steps:
    """Longest steps so far, and CPU time by task.

    Args:
        path: output file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._longest: list[tuple[float, int, str]] = []
        self._count = 0
        self._total_seconds = 0.0
        self._over: dict[str, int] = {}
        self._by_task: dict[str, dict[str, float]] = {}

    def note(self, seconds: float, name: str) -> None:
        """Record a step."""
        self._count += 1
        self._total_seconds += seconds
        task = self._by_task.setdefault(
            _NUMBER.sub("", name.partition(":")[0]), {"steps": 0, "seconds": 0.0, "longest_ms": 0.0}
        )
        task["steps"] += 1
        task["seconds"] += seconds
        task["longest_ms"] = max(task["longest_ms"], 1000 * seconds)
        if seconds < NOTED_SECONDS:
            return
        for limit in (2, 5, 10, 20, 50):
            if seconds > limit / 1000:
                self._over[f"over_{limit}_ms"] = self._over.get(f"over_{limit}_ms", 0) + 1
        heapq.heappush(self._longest, (seconds, self._count, name))
        if len(self._longest) > KEPT:
            heapq.heappop(self._longest)

    def write(self) -> None:
        """Write the results, and reset them."""
        document = {
            "steps": self._count,
            "cpu_seconds": self._total_seconds,
            **self._over,
            "by_task": self._by_task,
            "longest": [
                {"ms": 1000 * seconds, "name": name}
                for seconds, _, name in sorted(self._longest, reverse=True)
            ],
        }
        part = self._path.with_suffix(".part")
        part.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
        part.replace(self._path)
        self._longest, self._count, self._total_seconds, self._over = [], 0, 0.0, {}
        self._by_task = {}


def name_of(handle: events.Handle) -> str:
    """Return the name of the task or callback that a step runs."""
    callback: Any = handle._callback  # type: ignore[attr-defined] # asyncio has no public name
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    task_name = task.get_name()
    where: Any = task.get_coro()
    while getattr(getattr(where, "cr_await", None), "cr_frame", None) is not None:
        where = where.cr_await
        if where.cr_frame.f_code.co_filename.endswith(STREAM_FILE):
            task_name = VIEWER_TASK
    frame = getattr(where, "cr_frame", None)
    if frame is None:
        return task_name
    file = Path(frame.f_code.co_filename).name
    return f"{task_name}: {frame.f_code.co_qualname} ({file}:{frame.f_lineno})"


def timed(steps: Steps) -> Callable[[events.Handle], None]:
    """Return a replacement of asyncio's function that runs a step."""
    original = events.Handle._run  # every step runs through this function

    def run(handle: events.Handle) -> None:
        name = name_of(handle)
        began = time.thread_time()
        try:
            original(handle)
        finally:
            seconds = time.thread_time() - began
            # A request that began in this step has set its task's name by now.
            task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined] # as above
            if isinstance(task, asyncio.Task) and task.get_name().startswith(REQUEST_TASK):
                name = f"{task.get_name()}:{name.partition(':')[2]}"
            steps.note(seconds, name)

    return run


def naming_requests() -> Handle:
    """Return a replacement of aiohttp's request handler that names the request's task.

    A connection has one task for all its requests, so a request outside the API resets the name.
    """
    original = web.Application._handle  # every request passes through this method

    async def handle(app: web.Application, request: web.Request) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        is_request = request.path.startswith("/v1/") and request.path != STREAM
        path = "/".join(request.path.split("/")[:4]) if "/page/" in request.path else request.path
        task.set_name(f"{REQUEST_TASK} {path}" if is_request else "Task-0")
        return await original(app, request)

    return handle


def noting_garbage(steps: Steps) -> Callable[[str, dict[str, int]], None]:
    """Return a callback that records garbage collections; the steps around them include them."""
    began = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time()
        else:
            steps.note(time.thread_time() - began, f"garbage of generation {info['generation']}")

    return note


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(prog="python -m bench.stepping", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    settings = load_settings(options.config, os.environ)
    logs.configure(settings.log.level, settings.log.format)
    steps = Steps(options.out)
    events.Handle._run = timed(steps)  # type: ignore[method-assign,assignment] # as above
    web.Application._handle = naming_requests()  # type: ignore[method-assign,assignment] # likewise
    gc.callbacks.append(noting_garbage(steps))
    signal.signal(signal.SIGUSR1, lambda *_: steps.write())
    sys.exit(asyncio.run(serve(settings)))


if __name__ == "__main__":
    main()
