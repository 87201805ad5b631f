"""What is fuzzed: each target feeds a body to the product and judges what comes of it.

A target returns whether the body was understood. A typed error is an answer; any other exception, a
fault that was logged and a wrong answer are raised.
"""

import asyncio
import contextlib
import io
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
import requests
import requests.adapters
import urllib3
from typing_extensions import override

from agent.report import ReportError, decode, decode_farewell, decode_update
from extender.admission.review import ReviewError, decode_review
from extender.admission.webhook import AdmissionWebhook
from extender.config import ConfigError, Prometheus, load_settings
from extender.core.policy import Foreign, Policy
from extender.core.resources import ResourceNames
from extender.effects.peer_wire import PeerError, decode_message, decode_receipt
from extender.effects.peers import Peers
from extender.kube import KubeClient, KubeError
from extender.logs import JsonFormatter
from extender.metrics import Metrics
from extender.settings.peers import Peers as PeersSettings
from extender.sources.agents.refusal import RefusedError
from extender.sources.agents.states import AgentState, readings_of
from extender.sources.cluster import ClusterSource
from extender.sources.dcgm_devices import DeviceTable
from extender.sources.prometheus_common import PrometheusError
from extender.sources.prometheus_http import PrometheusClient
from extender.sources.prometheus_queries import UNREADABLE
from extender.sources.prometheus_rows import Recognized
from extender.webhook.outcomes import Outcome
from tests.extender.served import BUSY, IDLE, NOW, World
from tests.extender.sources.asking import NODES

Target = Callable[[bytes], bool]

MOST_LOGGED: Final = 64 << 10
"""Characters that one body may have logged."""


class FaultError(AssertionError):
    """The product fails its promise; the message says which."""


class LogJudge(logging.Handler):
    """Raises where a fault is logged, or too much."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(JsonFormatter())
        self.trouble = ""
        self.characters = 0

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.characters += len(self.format(record))
        if record.levelno >= logging.ERROR or record.exc_info:
            self.trouble = self.trouble or self.format(record)

    def check(self) -> None:
        """Judge what was logged since the last time."""
        trouble, characters = self.trouble, self.characters
        self.trouble, self.characters = "", 0
        if trouble:
            raise FaultError(f"a fault was logged: {trouble}")
        if characters > MOST_LOGGED:
            raise FaultError(f"{characters} characters were logged")


def judged(target: Target) -> Target:
    """Return a target that fails where it logs a fault, or too much."""
    judge = LogJudge()
    root = logging.getLogger()

    def run(body: bytes) -> bool:
        level = root.level
        root.setLevel(logging.INFO)
        root.addHandler(judge)
        try:
            return target(body)
        finally:
            root.removeHandler(judge)
            root.setLevel(level)
            judge.check()

    return run


# --- what kube-scheduler asks ---------------------------------------------------------------------


def webhooks(verb: str, runner: asyncio.Runner) -> Target:
    """Answer a question as the webhooks do, and compare the answer with the question."""
    world = World()
    world.add({"idle": [IDLE, IDLE], "busy": [BUSY, BUSY], "gpu-node-0": [IDLE]})
    world.add_pod("holder", "busy")
    ask = getattr(world.webhooks(), verb)

    async def answered(body: bytes) -> tuple[Outcome, bytes]:
        outcome, response = await ask(body)
        await asyncio.sleep(0)  # what follows once the answer is on its way
        return outcome, cast(bytes, response.body)

    def target(body: bytes) -> bool:
        outcome, answer = runner.run(answered(body))
        if outcome is Outcome.FAULT:
            raise FaultError("a fault was answered")
        names = _named(json.loads(answer))
        if outcome is not Outcome.MALFORMED and (strangers := names - _strings(body)):
            raise FaultError(f"the answer names nodes that were not asked about: {strangers}")
        return outcome is not Outcome.MALFORMED

    return target


def _named(answer: Any) -> set[str]:
    """Return the nodes that an answer of any verb names."""
    if isinstance(answer, list):
        return {entry["Host"] for entry in answer}
    items = (answer.get("Nodes") or {}).get("items") or []
    whole = {_name_of(item) for item in items}
    fields = ("NodeNames", "FailedNodes", "FailedAndUnresolvableNodes", "NodeNameToMetaVictims")
    return whole.union(*(answer.get(field) or () for field in fields))


def _name_of(item: Any) -> str:
    return next((text for text in _walk(item) if isinstance(text, str)), "") if item else ""


def _strings(body: bytes) -> set[str]:
    """Return every string of a question, keys included, and "" for what has no name."""
    return {text for text in _walk(msgspec.json.decode(body)) if isinstance(text, str)} | {""}


def _walk(value: Any) -> Iterator[object]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner)
    else:
        yield value


# --- what others send -----------------------------------------------------------------------------


class _FreshLease:
    is_fresh = True

    async def run(self) -> None:
        """Do nothing."""


def admission() -> Target:
    """Judge an AdmissionReview: each is answered with leave, and a patch that can be applied."""
    policy = Policy()
    webhook = AdmissionWebhook(
        "idlegpu",
        taint_key="idlegpu.io/only",
        resources=ResourceNames,
        policy=lambda: policy,
        lease=_FreshLease(),
        admissions=Metrics().admissions,
    )

    def target(body: bytes) -> bool:
        try:
            review = decode_review(body)
        except ReviewError as error:
            str(error).encode()
            return False
        _, answer = webhook.judge(review)
        response = json.loads(answer)["response"]
        if response["allowed"] is not True or response["uid"] != review.uid:
            raise FaultError(f"a wrong answer: {response}")
        return True

    return target


def agent_updates(body: bytes) -> bool:
    """Take one update of an agent after the other, as one connection does."""
    state = AgentState("node")
    is_understood = False
    for content in body.split(b"\n--\n"):
        decode_farewell(content)
        try:
            state.take(decode_update(content), NOW)
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


def agent_report(body: bytes) -> bool:
    """Read the report that an agent serves."""
    try:
        decode(body)
    except ReportError:
        return False
    return True


def peers() -> Target:
    """Hear a message between replicas."""
    world = World()
    hearing = Peers(PeersSettings(), world.asked.note, Metrics(), monotonic=lambda: world.now)

    def target(body: bytes) -> bool:
        with contextlib.suppress(PeerError):
            decode_receipt(body)
        try:
            hearing.hear(decode_message(body))
        except PeerError:
            return False
        if math.isnan(hearing.since) or math.isnan(hearing.until):
            raise FaultError("it is not known since when all is told")
        return True

    return target


def settings(body: bytes) -> bool:
    """Read a settings file."""
    try:
        load_settings(Path("settings.yaml"), {}, body)
    except ConfigError:
        return False
    return True


class _Answer(requests.adapters.HTTPAdapter):
    """Answers every query with one body."""

    body = b""

    @override
    def send(self, request: requests.PreparedRequest, *_args: Any, **_rest: Any) -> Any:
        raw = urllib3.HTTPResponse(io.BytesIO(self.body), status=200, preload_content=False)
        return self.build_response(request, cast(Any, raw))


def prometheus() -> Target:
    """Ask a Prometheus that answers anything."""
    client = PrometheusClient(Prometheus(url="http://prometheus.test"))
    adapter = _Answer()
    client._connect._session.mount("http://prometheus.test", adapter)
    table = DeviceTable()

    def target(body: bytes) -> bool:
        adapter.body = body
        with contextlib.suppress(PrometheusError):
            client.metric_names(since=0.0, timeout_seconds=1.0)
        try:
            rows = client.query("up", 1.0, table.recognize)
            if isinstance(rows, Recognized):
                return True
            table.see(rows, NODES, ("Hostname", "node"))
            table.read(rows)
        except (PrometheusError, *UNREADABLE):
            return False
        return True

    return target


class _Events:
    """An API server whose watch tells what it is given."""

    lines: tuple[bytes, ...] = ()

    async def watch_lines(self, *_: object, **__: object) -> AsyncIterator[bytes]:
        for line in self.lines:
            yield line


def watch(resource: str, runner: asyncio.Runner) -> Target:
    """Take the events of a watch, a line each."""
    world = World()
    api = _Events()
    cluster = ClusterSource(
        cast(KubeClient, api), world.fleet, resources=ResourceNames(), clock=lambda: NOW
    )
    reflector = cluster._reflectors[resource]
    errors: list[Exception] = []
    setattr(reflector, "_note_unreadable", lambda _, error: errors.append(error))  # noqa: B010

    def target(body: bytes) -> bool:
        api.lines = tuple(line for line in body.split(b"\n") if line)
        errors.clear()
        with contextlib.suppress(KubeError):
            runner.run(reflector._watch())
        for error in errors:
            if not isinstance(error, KubeError):
                raise FaultError("an object could not be read") from error
        return bool(api.lines)

    return target


def targets(runner: asyncio.Runner) -> Mapping[str, Callable[[], Target]]:
    """Return what makes each target, by name.

    Args:
        runner: runs what is asynchronous.
    """
    return {
        **{verb: partial(webhooks, verb, runner) for verb in ("filter", "prioritize", "preempt")},
        "admission": admission,
        "agent-updates": lambda: agent_updates,
        "agent-report": lambda: agent_report,
        "peers": peers,
        "settings": lambda: settings,
        "prometheus": prometheus,
        **{f"watch-{kind}": partial(watch, kind, runner) for kind in WATCHED},
    }


WATCHED: Final = ("nodes", "pods", "resourceclaims", "resourceslices")
NAMES: Final = tuple(targets(cast(asyncio.Runner, None)))
