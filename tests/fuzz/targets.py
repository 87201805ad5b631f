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
import resource
import time
from collections import Counter
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

MOST_CPU_SECONDS: Final = 2.0
MOST_GROWN_KIB: Final = 256 << 10
"""What one body may cost: CPU time, so that a busy machine does not count, and peak memory."""

SHORTLIST: Final = 2
REQUIRE_IDLE: Final = b"require-idle"


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
    """Return a target that fails where it logs a fault, or logs, computes or keeps too much."""
    judge = LogJudge()
    root = logging.getLogger()

    def run(body: bytes) -> bool:
        level = root.level
        root.setLevel(logging.INFO)
        root.addHandler(judge)
        began, peak = time.thread_time(), _peak_kib()
        try:
            is_understood = target(body)
        finally:
            root.removeHandler(judge)
            root.setLevel(level)
            judge.check()
        seconds, grown = time.thread_time() - began, _peak_kib() - peak
        if seconds > MOST_CPU_SECONDS or grown > MOST_GROWN_KIB:
            raise FaultError(f"it took {seconds:.1f} s of CPU time and {grown} KiB")
        return is_understood

    return run


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- what kube-scheduler asks ---------------------------------------------------------------------


def webhooks(verb: str, runner: asyncio.Runner) -> Target:
    """Answer a question as the webhooks do, with a shortlist and without, and judge the answer."""
    judge = {"filter": _judge_filter, "prioritize": _judge_scores, "preempt": _judge_preemption}
    asked = [(world, getattr(world.webhooks(), verb)) for world in map(_world, (0, SHORTLIST))]

    async def answered(ask: Callable[[bytes], Any], body: bytes) -> tuple[Outcome, bytes]:
        outcome, response = await ask(body)
        await asyncio.sleep(0)  # what follows once the answer is on its way
        return outcome, cast(bytes, response.body)

    def target(body: bytes) -> bool:
        understood = []
        for world, ask in asked:
            outcome, answer = runner.run(answered(ask, body))
            if outcome is Outcome.FAULT:
                raise FaultError("a fault was answered")
            understood.append(outcome is not Outcome.MALFORMED)
            if understood[-1]:
                judge[verb](body, answer, outcome, world)
            else:
                _judge_refusal(answer)
        if len(set(understood)) != 1:
            raise FaultError("whether a question is understood depends on the shortlist")
        return understood[0]

    return target


def _world(shortlist: int) -> World:
    world = World(shortlist=shortlist)
    world.add({"idle": [IDLE, IDLE], "busy": [BUSY, BUSY], "gpu-node-0": [IDLE]})
    world.add_pod("holder", "busy")
    return world


def _judge_refusal(answer: bytes) -> None:
    """What cannot be read is said to be so, and no node is named."""
    document = msgspec.json.decode(answer)
    if not document.pop("Error") or any(document.values()):
        raise FaultError(f"a question that cannot be read is answered: {document}")


def _judge_filter(body: bytes, answer: bytes, outcome: Outcome, world: World) -> None:
    """Each asked node passes or fails, once; those beyond the shortlist alone are left out."""
    question, found = _Asked(body), _fields(answer)
    names, items = found["nodenames"], found["nodes"]
    if question.objects is None:
        if items != b"null":
            raise FaultError("names were asked, objects are answered")
        passed = msgspec.json.decode(names, type=list[str])
    else:
        if names != b"null":
            raise FaultError("objects were asked, names are answered")
        objects = _items(_fields(items).get("items", b"null"))
        passed = list(map(_node_name, objects))
        if objects != [question.objects.get(name) for name in passed]:
            raise FaultError("a node does not come back as it was sent")
    failed = [
        *_keys(found["failednodes"]),
        *_keys(found["failedandunresolvablenodes"]),
    ]
    said = Counter([*passed, *failed])
    if passed != [name for name in question.nodes if name in set(passed)]:
        raise FaultError(f"{passed} pass of {question.nodes}, in this order")
    if max(said.values(), default=1) > 1 or not said.keys() <= set(question.nodes):
        raise FaultError(f"asked of {question.nodes}: {passed} pass, {failed} fail")
    is_short = 0 < world.shortlist <= len(passed) and not failed
    if not is_short and len(said) != len(question.nodes):
        raise FaultError(f"nothing is said of {set(question.nodes) - said.keys()}")
    if outcome is not Outcome.ANSWERED and len(passed) != len(question.nodes):
        raise FaultError("a pod that is none of ours is refused a node")
    if REQUIRE_IDLE not in body.lower() and (strange := set(failed) - world.fleet.nodes.keys()):
        raise FaultError(f"nodes that are not known are refused: {strange}")


def _judge_scores(body: bytes, answer: bytes, outcome: Outcome, world: World) -> None:
    """Each asked node has a score, once; where one passes, one has the highest."""
    scores, nodes = json.loads(answer), _Asked(body).nodes
    if [entry["Host"] for entry in scores] != nodes:
        raise FaultError(f"asked of {nodes}: {scores}")
    values = [entry["Score"] for entry in scores]
    most = world.max_score if outcome is Outcome.ANSWERED else 0
    if any(type(value) is not int or not 0 <= value <= most for value in values):
        raise FaultError(f"scores outside 0 to {most}: {scores}")
    if any(values) and values.count(most) != 1:
        raise FaultError(f"no score is the highest, or several are: {scores}")
    strangers = set(nodes) - world.fleet.nodes.keys() if most else set()
    if strangers and not any(values) and REQUIRE_IDLE not in body.lower():
        raise FaultError(f"nodes that are not known are refused: {strangers}")


def _judge_preemption(body: bytes, answer: bytes, outcome: Outcome, _: World) -> None:
    """Candidates are asked ones, with the very victims that were asked about."""
    asked = {node: victims for node, victims in _victims(body) if victims[0]}
    kept = dict(_victims(answer))
    if any(asked.get(node) != victims for node, victims in kept.items()):
        raise FaultError(f"asked of {asked}: {kept}")
    if outcome is not Outcome.ANSWERED and kept != asked:
        raise FaultError(f"a pod that is none of ours is refused a candidate: {asked.keys()}")


class _Asked:
    """The nodes of a question as another reader finds them.

    Attributes:
        nodes: their names, each once.
        objects: each node as it was sent, by name; None where names were sent.
    """

    def __init__(self, body: bytes) -> None:
        fields = _fields(body)
        names = msgspec.json.decode(fields.get("nodenames", b"null"), type=list[str | None] | None)
        nodes = fields.get("nodes", b"null")
        self.objects: dict[str, bytes] | None = None
        if names or nodes == b"null":
            self.nodes = list(dict.fromkeys(name or "" for name in names or ()))
            return
        self.objects = {}
        for item in _items(_fields(nodes).get("items", b"null")):
            self.objects.setdefault(_node_name(item), item)
        self.nodes = list(self.objects)


def _fields(text: bytes) -> dict[str, bytes]:
    """Return the fields of an object as they stand, their names in lower case; null has none."""
    return {name.casefold(): value for name, value in _raw(text).items()}


def _items(text: bytes) -> list[bytes]:
    return [bytes(each) for each in msgspec.json.decode(text, type=list[msgspec.Raw] | None) or ()]


def _keys(text: bytes) -> list[str]:
    """Return the keys of an object, those that are there twice included."""
    return [key for key, _ in json.loads(text, object_pairs_hook=list)]


def _node_name(node: bytes) -> str:
    metadata = _fields(_fields(node).get("metadata", b"null"))
    return msgspec.json.decode(metadata.get("name", b"null"), type=str | None) or ""


def _victims(text: bytes) -> Iterator[tuple[str, tuple[list[str], int]]]:
    """Yield each candidate with its victims' UIDs and the disruption budgets that they violate."""
    fields = _fields(text)
    forms = (fields.get(form, b"null") for form in ("nodenametometavictims", "nodenametovictims"))
    by_node = next((found for form in forms if (found := _raw(form))), {})
    for node, victims in by_node.items():
        found = _fields(victims)
        pods = [_fields(pod) for pod in _items(found.get("pods", b"null"))]
        uids = [
            msgspec.json.decode(pod.get("uid") or _fields(pod["metadata"])["uid"], type=str)
            for pod in pods
        ]
        count = found.get("numpdbviolations", b"null")
        yield node, (uids, msgspec.json.decode(count, type=int | None) or 0)


def _raw(text: bytes) -> dict[str, bytes]:
    """Return the fields of an object, their names in their own case."""
    fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw] | None) or {}
    return {name: bytes(value) for name, value in fields.items()}


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
