"""Fuzz targets: each passes a body to the product and checks the result.

A target returns whether the body was valid. A typed error is a valid result; a target raises any
other exception, logged faults and wrong answers.
"""

import asyncio
import contextlib
import io
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
import requests
import requests.adapters
import urllib3
from typing_extensions import override

from agent.report.contract import ReportError, decode_farewell, decode_update
from extender.core.devices.readings import Readings
from extender.core.policy import Foreign, Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.core.steps import finish
from extender.effects.peer_link import PeerError, decode_message, decode_receipt
from extender.effects.peers import Peers
from extender.kube.client import KubeClient, KubeError
from extender.runtime.metrics import Metrics
from extender.settings.config import load_settings
from extender.settings.loading import ConfigError
from extender.settings.service import PeersSettings
from extender.settings.sources import Agents as AgentSettings
from extender.settings.sources import Prometheus
from extender.sources.agents.connection import AgentConnection
from extender.sources.agents.refusal import AgentRefusal, RefusedError
from extender.sources.agents.source import AgentSource
from extender.sources.agents.states import AgentState, readings_of
from extender.sources.agents.tokens import Sender
from extender.sources.kubernetes.cluster import ClusterSource
from extender.sources.kubernetes.reflector import Reflector
from extender.sources.prometheus import http, protocol
from extender.sources.prometheus.collector import Collector
from extender.sources.prometheus.http import PrometheusClient
from extender.sources.prometheus.protocol import Frame, PrometheusError
from extender.sources.prometheus.source import ReadingsBuilder, _read_history
from extender.sources.prometheus.worker import (
    _collect_past,
    _collect_use,
    _past_frames,
    round_frames,
)
from extender.webhook.admission import AdmissionWebhook, ReviewError, SchedulerLease, _decode_review
from testkit.builders import NOW
from testkit.cards import IDLE
from testkit.collecting import NODES
from testkit.world import World
from tests.fuzz.extender_requests import webhooks
from tests.fuzz.judging import FaultError, Target

KNOWN_NAMES: Final = (
    b'{"status":"success","data":["DCGM_FI_DEV_GPU_UTIL","DCGM_FI_DEV_FB_USED",'
    b'"DCGM_FI_DEV_FB_FREE","DCGM_FI_DEV_XID_ERRORS","DCGM_FI_PROF_GR_ENGINE_ACTIVE"]}'
)
ROUND_SECONDS: Final = 10.0
PAST_SECONDS: Final = 600.0

AGENT_TOKEN: Final = "the-token"
GRANTED: Final = b"HTTP/1.1 101 "
CHUNK_BYTES: Final = 700
SETTLING_TURNS: Final = 5


class _FreshLease:
    is_fresh = True

    async def run(self) -> None:
        """Do nothing."""


def admission() -> Target:
    """Return the target of admission reviews: each is allowed, with a patch that can be applied."""
    policy = Policy()
    webhook = AdmissionWebhook(
        "idlegpu",
        taint_key="idlegpu.io/only",
        resources=ResourceNames,
        policy=lambda: policy,
        lease=cast("SchedulerLease", _FreshLease()),
        admissions=Metrics().admissions,
    )

    def target(body: bytes) -> bool:
        try:
            review = _decode_review(body)
        except ReviewError as error:
            str(error).encode()
            return False
        _, answer = webhook.decide(review)
        response = json.loads(answer)["response"]
        if response["allowed"] is not True or response["uid"] != review.uid:
            raise FaultError(f"a wrong answer: {response}")
        return True

    return target


def agent_updates(body: bytes) -> bool:
    """Apply the updates of one agent's connection."""
    state = AgentState("node")
    is_understood = False
    for content in body.split(b"\n--\n"):
        decode_farewell(content)
        try:
            state.apply(decode_update(content), NOW)
        except (ReportError, RefusedError):
            continue
        is_understood = True
        with np.errstate(all="ignore"):
            found = readings_of([state], Foreign(), NOW, len(state.infos))
        if any(np.isinf(column).any() for column in found.columns.values()):
            raise FaultError("an infinite reading")
        if any(info.node != "node" for info in found.devices):
            raise FaultError("a reading of another node")
    return is_understood


def peers() -> Target:
    """Return the target of messages between replicas."""
    world = World()
    peers = Peers(PeersSettings(), world.request_log.note, Metrics(), monotonic=lambda: world.now)

    def target(body: bytes) -> bool:
        with contextlib.suppress(PeerError):
            decode_receipt(body)
        try:
            peers.receive(decode_message(body))
        except PeerError:
            return False
        if math.isnan(peers.since) or math.isnan(peers.until):
            raise FaultError("the start of complete messages is unknown")
        return True

    return target


def settings(body: bytes) -> bool:
    """Parse a settings file."""
    try:
        load_settings(Path("settings.yaml"), {}, body)
    except ConfigError:
        return False
    return True


class _Answer(requests.adapters.HTTPAdapter):
    """Server that answers every query with one body, and metric names only from such a body."""

    body = b""

    @override
    def send(self, request: requests.PreparedRequest, *_args: Any, **_rest: Any) -> Any:
        is_names = "/label/" in (request.url or "") and b'"resultType"' in self.body
        body = KNOWN_NAMES if is_names else self.body
        raw = urllib3.HTTPResponse(io.BytesIO(body), status=200, preload_content=False)
        return self.build_response(request, cast(Any, raw))


def prometheus(runner: asyncio.Runner) -> Target:
    """Return the target of a Prometheus with any answers: a round, the past, and last use.

    The results pass through the same code as from the worker process into the fleet.
    """
    http._PARALLEL_QUERIES = 1
    settings = Prometheus(url="http://prometheus.test")
    adapter, client, collector = _Answer(), PrometheusClient(settings), Collector(settings)
    for each in (client, *collector._queries._clients):
        each._connect._session.mount("http://prometheus.test", adapter)
    builder, world = ReadingsBuilder(), World()
    world.add({"gpu-1": [IDLE]})

    async def take(answer: list[Frame]) -> None:
        readings, _ = await builder.apply(answer, world.now)
        if any(np.isinf(column).any() for column in readings.columns.values()):
            raise FaultError("an infinite reading")
        if strangers := {info.node for info in readings.devices} - NODES.names:
            raise FaultError(f"readings of nodes that are not there: {strangers}")
        world.fleet.apply_readings(readings)

    async def take_past(answer: list[Frame]) -> None:
        async for history in _read_history(answer):
            finish(world.fleet.history_in_steps(history))

    def target(body: bytes) -> bool:
        adapter.body = body
        world.now += ROUND_SECONDS
        understood = 0
        with contextlib.suppress(PrometheusError):
            runner.run(take(_sent(round_frames(collector.collect(NODES, world.now)))))
            understood += bool(len(collector._devices))
        with contextlib.suppress(PrometheusError):
            past = _collect_past(client, settings, now=world.now, window_seconds=PAST_SECONDS)
            runner.run(take_past(_sent(_past_frames(past))[:-1]))
            understood += bool(past.devices)
        with contextlib.suppress(PrometheusError):
            use = _collect_use(
                client, settings, now=world.now, seconds=PAST_SECONDS, active_from=0.01
            )
            understood += bool(use.devices)
        world.fleet.snapshot()
        return bool(understood)

    return target


def _sent(answer: Iterable[Frame]) -> list[Frame]:
    """Return frames as the extender receives them from the worker process."""
    pipe = io.BytesIO(b"".join(part for one in answer for part in protocol.encode(one)))
    return list(iter(lambda: protocol.read(pipe), None))


class _ApiServer:
    """API server that answers a list page by page, and a watch with events: one per line."""

    lines: tuple[bytes, ...] = ()

    async def get_text(self, *_: object, **__: object) -> bytes:
        page, *rest = self.lines or (b"",)
        self.lines = tuple(rest)
        return page

    async def watch_lines(self, *_: object, **__: object) -> AsyncIterator[bytes]:
        for line in self.lines:
            yield line


def _reflector(resource: str) -> tuple[World, _ApiServer, Reflector]:
    world, api = World(), _ApiServer()
    cluster = ClusterSource(
        cast(KubeClient, api), world.fleet, resources=ResourceNames(), clock=lambda: NOW
    )
    return world, api, cluster._reflectors[resource]


def _collect_unread(reflector: Reflector) -> list[Exception]:
    """Return a list that gets the cause of each unreadable object."""
    unread: list[Exception] = []
    note = reflector._note_unreadable

    def note_unread(raw: Mapping[str, object], error: Exception) -> None:
        unread.append(error)
        note(raw, error)

    reflector._note_unreadable = note_unread  # type: ignore[method-assign] # to see the cause
    return unread


def _check_unread(unread: list[Exception]) -> None:
    """Fail unless all unreadable objects were invalid JSON."""
    if causes := [error for error in unread if not isinstance(error, KubeError)]:
        raise FaultError(f"an object could not be read: {causes[0]!r}")


def watch(resource: str, runner: asyncio.Runner) -> Target:
    """Return the target of watch events, one per line; a decision follows."""
    world, api, reflector = _reflector(resource)
    unread = _collect_unread(reflector)

    def target(body: bytes) -> bool:
        api.lines = tuple(line for line in body.split(b"\n") if line)
        unread.clear()
        with contextlib.suppress(KubeError):
            runner.run(reflector._watch())
        _check_unread(unread)
        world.rank()
        return bool(api.lines)

    return target


def listing(resource: str, runner: asyncio.Runner) -> Target:
    """Return the target of lists, with a page per line; a complete list removes other objects."""
    world, api, reflector = _reflector(resource)
    unread = _collect_unread(reflector)

    def target(body: bytes) -> bool:
        api.lines = tuple(line for line in body.split(b"\n") if line)
        unread.clear()
        try:
            runner.run(reflector._list())
        except KubeError:
            return False
        _check_unread(unread)
        with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            said = {text for line in body.split(b"\n") for text in _texts(line)}
            if resource == "nodes" and (strangers := world.fleet.nodes.keys() - said):
                raise FaultError(f"nodes that were not listed: {strangers}")
        return True

    return target


def _texts(page: bytes) -> Iterator[str]:
    """Yield every text of a page."""
    waiting = [msgspec.json.decode(page)] if page else []
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


class _Wire(asyncio.Transport):
    """Transport of an agent's connection that stores the output."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 1)})
        self.written = b""
        self.is_open = True

    @override
    def write(self, data: Any) -> None:
        self.written += data

    @override
    def close(self) -> None:
        self.is_open = False

    abort = close

    @override
    def is_closing(self) -> bool:
        return not self.is_open

    @override
    def pause_reading(self) -> None:
        """Do nothing: the target holds back further input."""

    resume_reading = pause_reading


class _Agents(AgentSource):
    """Fleet that accepts agents' reports, with one valid token."""

    @override
    async def authenticate(self, connection: AgentConnection, token: str) -> Sender:
        await asyncio.sleep(0)
        if token != AGENT_TOKEN:
            raise RefusedError(AgentRefusal.BAD_TOKEN, "another token")
        return Sender(node="node", expires_at=2 * NOW, account="agent", audience="extender")


def agent_connection(runner: asyncio.Runner) -> Target:
    """Return the target of an agent's connection: its request, then its updates."""
    world = World()
    world.register_node("node")

    async def deliver(readings: Readings) -> None:
        if any(info.node != "node" for info in readings.devices):
            raise FaultError("a reading of another node")
        world.fleet.apply_readings(readings)

    source = _Agents(
        AgentSettings(),
        cast(KubeClient, None),
        world.fleet,
        is_known_node=world.fleet.nodes.__contains__,
        deliver=deliver,
        clock=lambda: NOW,
        monotonic=lambda: 0.0,
    )

    async def talk(body: bytes) -> tuple[bytes, bool]:
        wire, connection = _Wire(), AgentConnection(source, lambda: 0.0)
        connection.connection_made(wire)
        for start in range(0, len(body), CHUNK_BYTES):
            connection.data_received(body[start : start + CHUNK_BYTES])
            await asyncio.sleep(0)
            connection.resume()
        for _ in range(SETTLING_TURNS):
            await asyncio.sleep(0)
            connection.resume()
        waiting = {**source._routine, **source._urgent}
        source._routine, source._urgent = {}, {}
        await source._deliver_isolated(list(waiting.values()))
        connection.connection_lost(None)
        return wire.written, connection.sender is not None

    def target(body: bytes) -> bool:
        faults = source.refusals.counts[AgentRefusal.FAULT]
        written, is_granted = runner.run(talk(body))
        if source.refusals.counts[AgentRefusal.FAULT] != faults:
            raise FaultError("a fault of the extender ended the connection")
        if is_granted and (AGENT_TOKEN.encode() not in body or not written.startswith(GRANTED)):
            raise FaultError("a connection without the token was granted")
        if source._connections or source._by_node:
            raise FaultError("a connection that has ended is kept")
        return is_granted

    return target


def targets(runner: asyncio.Runner) -> Mapping[str, Callable[[], Target]]:
    """Return the constructor of each target by name.

    Args:
        runner: runner of asynchronous code.
    """
    return {
        **{verb: partial(webhooks, verb, runner) for verb in ("filter", "prioritize", "preempt")},
        "admission": admission,
        "agent-updates": lambda: agent_updates,
        "peers": peers,
        "settings": lambda: settings,
        "agent-connection": partial(agent_connection, runner),
        "prometheus": partial(prometheus, runner),
        **{f"watch-{kind}": partial(watch, kind, runner) for kind in WATCHED},
        **{f"list-{kind}": partial(listing, kind, runner) for kind in WATCHED},
    }


WATCHED: Final = ("nodes", "pods", "resourceclaims", "resourceslices")
NAMES: Final = tuple(targets(cast(asyncio.Runner, None)))
