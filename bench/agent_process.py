"""Agent process for `bench.agent`: the agent of `python -m agent`, with a scripted driver.

It imports little beyond the real agent's modules, so that its memory is comparable.
"""

import agent.__main__  # isort: skip - imported first, as in the real agent

import asyncio
import random
import sys
from collections.abc import Sequence
from typing import Final

from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

import agent.gpu.nvml  # noqa: F401 - the real agent holds it in memory
from agent.app import serve
from agent.gpu.backend import Call, Card, Handle, ProcessList, ProcessUse, Values
from agent.options import Options, ReportOptions
from extender.core.devices.readings import Signal
from extender.runtime import logs
from extender.runtime.logs import LogFormat, LogLevel
from testkit.agent.scripted import GIB, ScriptedBackend, ScriptedCard

CARDS: Final = 8

_CHANGING: Final = frozenset({Call.POWER, Call.TEMPERATURE, Call.MEMORY})


def uuid_of(number: int) -> str:
    """Return the UUID of a card."""
    return f"GPU-43202e14-7a41-4c0e-9d53-5e0b8c11{number:04d}"


class LivelyBackend(ScriptedBackend):
    """Scripted driver whose cards have a random load at each call."""

    @override
    def read(self, call: Call, handle: Handle) -> Values:
        """Return random values for load, and the scripted values for the rest."""
        values = super().read(call, handle)
        if call not in _CHANGING:
            return values
        return {name: value * random.uniform(0.9, 1.1) for name, value in values.items()}

    @override
    def read_gpm(self, card: Card, gpu_instance_id: int | None) -> Values:
        """Return random activity."""
        values = super().read_gpm(card, gpu_instance_id)
        return {**values, Signal.GRAPHICS_ACTIVE: random.random()}


def main(argv: Sequence[str]) -> None:
    """Run the agent.

    Args:
        argv: port to serve on, socket of the kubelet, address of the extender, file with the token,
            and PIDs of the processes that use every card.
    """
    port, kubelet, extender, token, *pids = argv
    logs.configure(LogLevel.INFO, LogFormat.JSON)
    cards = [ScriptedCard(uuid_of(number)) for number in range(CARDS)]
    for card in cards:
        card.processes[ProcessList.COMPUTE] = tuple(
            ProcessUse(pid=int(pid), memory_bytes=GIB) for pid in pids
        )
    options = Options(
        port=int(port),
        node="gpu-7",
        kubelet_socket=kubelet,
        dcgm_names=True,
        reports=ReportOptions(service=extender, token_file=token),
    )
    backend = LivelyBackend(*cards)
    backend.event_seconds = 1.0  # the agent's own timeout for events
    asyncio.run(serve(options, backend))


if __name__ == "__main__":
    main(sys.argv[1:])
