"""Select the foreign processes that a report to the extender names. Pure functions."""

import re
from collections.abc import Sequence
from typing import Final

from agent.report import (
    MAX_DEVICE_PROCESSES,
    MAX_NAME,
    MAX_PROCESSES,
    Device,
    ForeignProcess,
    Place,
    Process,
)
from extender.runtime.terminal_escapes import plain_text

_MEMORY_STEP: Final = 256 << 20
"""Memory is rounded up to this step, so that small changes are not reported again."""

_CONTAINER_ID: Final = re.compile(r"([0-9a-f]{12})[0-9a-f]{52}")
"""Ids are shortened as `docker ps` and `crictl ps` show them."""


def foreign_processes(devices: Sequence[Device]) -> tuple[ForeignProcess, ...]:
    """Return the processes that use devices without holding them, by device, most memory first.

    If there are too many, each device keeps its largest ones.
    """
    ranked: list[tuple[int, ForeignProcess]] = []
    for number, device in enumerate(devices):
        pids = frozenset(() if device.foreign is None else device.foreign.pids)
        if not pids:
            continue
        inside = [one for one in device.used_by or () if one.pid in pids]
        inside.sort(key=lambda one: (-(one.memory_bytes or 0), one.pid))
        ranked += enumerate(_named(number, one) for one in inside[:MAX_DEVICE_PROCESSES])
    ranked.sort(key=lambda one: one[0])  # stable: the largest process of each device comes first
    return tuple(sorted((one for _, one in ranked[:MAX_PROCESSES]), key=lambda one: one.device))


def _named(device: int, process: Process) -> ForeignProcess:
    name = f"{process.namespace}/{process.pod}" if process.pod else process.uid
    memory = process.memory_bytes
    return ForeignProcess(
        device=device,
        pid=process.pid,
        name=plain_text(process.name, MAX_NAME),
        memory_bytes=None if memory is None else -(-memory // _MEMORY_STEP) * _MEMORY_STEP,
        started_at=process.started_at,
        pod=name if process.place is Place.POD else "",
        container=plain_text(_CONTAINER_ID.sub(r"\1", process.container), MAX_NAME),
    )
