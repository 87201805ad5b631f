"""Simulate thousands of node agents in one process, for `bench.agents`.

Each agent has its own connection and token, and sends the frames that a real agent sends. The
frames are encoded by the agent's own code before the measurement starts, so that the swarm uses
little CPU during it.
"""

import argparse
import asyncio
import base64
import contextlib
import random
import resource
import ssl
import sys
import time
from typing import Final

import msgspec
import orjson
import uvloop
from typing_extensions import override

from agent.options import ReportOptions
from agent.push.handshake import client_context
from agent.push.updates import DigestBuilder, UpdateBuilder
from agent.report.contract import PATH, UPGRADE, Device, Foreign, Report, Tenant, frame
from agent.tenants.foreign import Threshold
from bench.backend_fleet import BenchFleet, FleetSpec
from extender.core.devices.readings import Signal
from extender.core.policy import Thresholds
from simulation.models import MIB

TICK_SECONDS: Final = 0.02
PARALLEL: Final = 64
FIRST_RETRY_SECONDS: Final = 5.0
LAST_RETRY_SECONDS: Final = 60.0

_STEADY: Final = (
    Signal.POWER_LIMIT,
    Signal.TEMPERATURE,
    Signal.MEMORY_TEMPERATURE,
    Signal.CLOCK_EVENT_REASONS,
    Signal.ROW_REMAP_FAILURE,
    Signal.ROW_REMAP_PENDING,
    Signal.UNCORRECTABLE_REMAPPED_ROWS,
    Signal.ECC_DOUBLE_BIT_VOLATILE,
    Signal.RECOVERY_ACTION,
    Signal.FABRIC_MANAGER_STATUS,
    Signal.SRAM_THRESHOLD_EXCEEDED,
    Signal.FABRIC_HEALTH,
    Signal.NVLINKS_DOWN,
    Signal.INFOROM_CORRUPTED,
    Signal.TEMPERATURE_SHUTDOWN,
)


def report_of(fleet: BenchFleet, number: int, busy: dict[int, float]) -> Report:
    """Build the report that a node's agent would send.

    Args:
        fleet: the cluster.
        number: number of the node.
        busy: activity by row of the device, where it differs from the load of its pods.
    """
    node = fleet.nodes[number]
    rows = [row for some in node.devices.values() for row in some]
    devices, said = [], []
    for row in rows:
        device = fleet.devices[row]
        load = float(busy.get(row, fleet.load[row] / 1000))
        total = float(device.memory_mib * MIB)
        values: dict[str, float | None] = {
            **dict.fromkeys(_STEADY, 0.0),
            Signal.GPU_UTILIZATION: load,
            Signal.GRAPHICS_ACTIVE: load,
            Signal.SM_ACTIVE: load * 0.9,
            Signal.TENSOR_ACTIVE: load * 0.4,
            Signal.DRAM_ACTIVE: load * 0.5,
            Signal.MEMORY_COPY_UTILIZATION: load * 0.5,
            Signal.MEMORY_TOTAL: total,
            Signal.MEMORY_USED: total * 0.8 * load,
            Signal.MEMORY_FREE: total * (1 - 0.8 * load),
            Signal.MEMORY_RESERVED: 0.0,
            Signal.POWER: 100.0 + 400.0 * load,
            Signal.POWER_LIMIT: 700.0,
            Signal.TEMPERATURE: 35.0 + 30.0 * load,
            Signal.FABRIC_HEALTH: 1.0,
            Signal.FABRIC_MANAGER_STATUS: 3.0,
            Signal.TEMPERATURE_SHUTDOWN: 95.0,
        }
        said.append(values)
        devices.append(
            Device(
                uuid=device.uuid,
                gpu_instance_id=device.gpu_instance_id,
                mig_profile=device.profile,
                index=device.index,
                model=device.model.name,
                age_seconds=0.1,
                allocated_to=tuple(
                    Tenant(namespace=pod.namespace, pod=pod.name, uid=pod.uid)
                    for pod in fleet.tenants[row]
                ),
                used_by=(),
                foreign=Foreign(),
            )
        )
    return Report(
        node=node.name,
        at=1.0,
        driver_version="580.95.05",
        devices=tuple(devices),
        signals={name: tuple(values[name] for values in said) for name in said[0]},
    )


class Frames:
    """Encoded frames of one node's agent.

    Attributes:
        first: first update of a connection.
        same: heartbeats, sent in turn.
        changed: updates with changed values, sent in turn.
    """

    def __init__(self, fleet: BenchFleet, number: int) -> None:
        rows = [row for some in fleet.nodes[number].devices.values() for row in some]
        digest_builder = DigestBuilder(ReportOptions(), Thresholds(), Threshold())
        updates = UpdateBuilder()
        made = []
        # Each report is a pass ten seconds after the one before; so all but the first have
        # averages.
        for turn, busy in enumerate(({}, {rows[0]: 0.95}, {rows[0]: 0.05}), start=1):
            report = msgspec.structs.replace(
                report_of(fleet, number, busy), sequence=turn, at=10.0 * turn
            )
            update = updates.build(
                report, digest_builder.build(report), is_news=turn > 1, sent_at=10.0 * turn + 0.01
            )
            made.append(update)
        self.first = frame(made[0])
        self.changed = tuple(frame(update) for update in made[1:])
        self.same = tuple(
            frame(msgspec.structs.replace(update, is_news=False)) for update in made[1:]
        )


class Link(asyncio.Protocol):
    """Connection of a simulated agent.

    Args:
        frames: frames to send.
        name: name of the node.
        audience: audience of its token.
    """

    def __init__(self, frames: Frames, name: str, audience: str) -> None:
        self.is_granted = False
        self.is_refused = False
        self.is_lost = asyncio.Event()
        self.turn = 0
        self._frames = frames
        claims = {
            "aud": [audience],
            "exp": time.time() + 3600,
            "sub": "system:serviceaccount:idlegpu-agent:idlegpu-agent",
            "node": name,
        }
        body = base64.urlsafe_b64encode(orjson.dumps(claims)).rstrip(b"=")
        # As long as the tokens that the kubelet mounts.
        self._token = b"eyJhbGciOiJSUzI1NiJ9." + body + b"." + b"x" * 700
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment] # uvloop's class is not a subclass
        self.send(
            f"GET {PATH} HTTP/1.1\r\nHost: extender\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}"
            "\r\nAuthorization: Bearer ".encode()
            + self._token
            + b"\r\n\r\n"
        )

    @override
    def data_received(self, data: bytes) -> None:
        if not self.is_granted and data.startswith(b"HTTP/1.1 101"):
            self.is_granted = True
            self.send(self._frames.first)
        else:
            self.is_refused = True

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.is_granted, self._transport = False, None
        self.is_lost.set()

    def send(self, data: bytes) -> None:
        """Send data if connected."""
        if self._transport is not None:
            self._transport.write(data)

    def heartbeat(self) -> None:
        """Send a heartbeat: no values changed."""
        if self.is_granted:
            self.send(self._frames.same[self.turn % 2])

    def change(self) -> None:
        """Send an update with changed values."""
        self.turn += 1
        if self.is_granted:
            self.send(self._frames.changed[self.turn % 2])


async def keep(
    link_of: "dict[str, Link]",
    name: str,
    frames: Frames,
    options: argparse.Namespace,
    how: "tuple[asyncio.Semaphore, ssl.SSLContext | None]",
) -> None:
    """Keep a node's agent connected: reconnect whenever the connection ends."""
    loop, failures = asyncio.get_running_loop(), 0
    gate, tls = how
    while True:
        link = Link(frames, name, options.audience)
        with contextlib.suppress(OSError):
            async with gate:
                await loop.create_connection(
                    lambda: link,  # noqa: B023 - at once
                    "127.0.0.1",
                    options.port,
                    ssl=tls,
                    server_hostname=None if tls is None else "127.0.0.1",
                )
            link_of[name] = link
            await link.is_lost.wait()
        failures = failures + 1 if link.is_refused else 0
        pause = min(FIRST_RETRY_SECONDS * 2.0**failures, LAST_RETRY_SECONDS)
        await asyncio.sleep(pause * random.uniform(0.1, 1.0))


async def swarm(options: argparse.Namespace) -> None:
    """Run the agents until cancelled."""
    spec = FleetSpec(nodes=options.nodes, gpu_pods=options.gpu_pods)
    fleet = BenchFleet(spec)
    fleet.refresh()
    made = {node.name: Frames(fleet, number) for number, node in enumerate(fleet.nodes)}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    links: dict[str, Link] = {}
    how = (asyncio.Semaphore(PARALLEL), client_context(ReportOptions(ca_file=options.ca)))
    async with asyncio.TaskGroup() as group:
        for name, frames in made.items():
            group.create_task(keep(links, name, frames, options, how), name=name)
        group.create_task(send_updates(links, options), name="send updates")


async def send_updates(links: dict[str, Link], options: argparse.Namespace) -> None:
    """Send heartbeats and updates, spread evenly over time and nodes."""
    beats = changes = 0.0
    at, turn = time.monotonic(), 0
    while True:
        await asyncio.sleep(TICK_SECONDS)
        now = time.monotonic()
        known = list(links.values())
        beats += (now - at) * len(known) / options.heartbeat
        changes += (now - at) * options.changes if known else 0.0
        at = now
        for _ in range(int(beats)):
            turn = (turn + 1) % len(known)
            known[turn].heartbeat()
        for _ in range(int(changes)):
            random.choice(known).change()
        beats, changes = beats % 1.0, changes % 1.0


def main() -> None:
    """Run the agents until a signal ends the process."""
    parser = argparse.ArgumentParser(prog="python -m bench.agent_swarm", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="the extender's, on 127.0.0.1")
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpu-pods", type=int, default=10_000)
    parser.add_argument("--heartbeat", type=float, default=10.0, help="seconds between two")
    parser.add_argument("--changes", type=float, default=500.0, help="a second, on all nodes")
    parser.add_argument("--audience", default="idlegpu-extender")
    parser.add_argument("--ca", default="", help="CA file for TLS; without it plain HTTP")
    options = parser.parse_args()
    soft, hard = _files()
    if soft < options.nodes + 100:
        sys.exit(f"{options.nodes} connections need as many open files: {soft} of {hard} allowed")
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(swarm(options))


def _files() -> tuple[int, int]:
    """Raise the limit of open files to the maximum; return the limits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)


if __name__ == "__main__":
    main()
