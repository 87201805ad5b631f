"""Fuzz targets of the three verbs, with checks of each answer by a second parser of the request."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import msgspec

from extender.webhook.handlers import RequestOutcome
from testkit.cards import BUSY, IDLE
from testkit.world import World
from tests.fuzz.judging import FaultError, Target

SHORTLIST: Final = 2
REQUIRE_IDLE: Final = b"require-idle"


def webhooks(verb: str, runner: asyncio.Runner) -> Target:
    """Answer a request as the webhooks do, with and without a shortlist, and check the answer."""
    judge = {"filter": _judge_filter, "prioritize": _judge_scores, "preempt": _judge_preemption}
    handlers = [(world, getattr(world.webhooks(), verb)) for world in map(_world, (0, SHORTLIST))]

    async def call(handler: Callable[[bytes], Any], body: bytes) -> tuple[RequestOutcome, bytes]:
        outcome, response = await handler(body)
        await asyncio.sleep(0)  # work that runs after the answer was sent
        return outcome, cast(bytes, response.body)

    def target(body: bytes) -> bool:
        understood = []
        for world, handler in handlers:
            outcome, answer = runner.run(call(handler, body))
            if outcome is RequestOutcome.FAULT:
                raise FaultError("a fault was answered")
            understood.append(outcome is not RequestOutcome.MALFORMED)
            if understood[-1]:
                judge[verb](body, answer, outcome, world)
            else:
                _judge_refusal(answer)
        if len(set(understood)) != 1:
            raise FaultError("whether a request is understood depends on the shortlist")
        return understood[0]

    return target


def _world(shortlist: int) -> World:
    world = World(shortlist=shortlist)
    world.add({"idle": [IDLE, IDLE], "busy": [BUSY, BUSY], "gpu-node-0": [IDLE]})
    world.add_pod("holder", "busy")
    return world


def _judge_refusal(answer: bytes) -> None:
    """Check that an unreadable request gets an error without nodes."""
    document = msgspec.json.decode(answer)
    if not document.pop("Error") or any(document.values()):
        raise FaultError(f"an unreadable request got an answer: {document}")


def _judge_filter(body: bytes, answer: bytes, outcome: RequestOutcome, world: World) -> None:
    """Check that each candidate passes or fails once; only a shortlist may leave nodes out."""
    request, found = _Sent(body), _fields(answer)
    names, items = found["nodenames"], found["nodes"]
    if request.objects is None:
        if items != b"null":
            raise FaultError("names were sent, objects came back")
        passed = msgspec.json.decode(names, type=list[str])
    else:
        if names != b"null":
            raise FaultError("objects were sent, names came back")
        objects = _items(_fields(items).get("items", b"null"))
        passed = list(map(_node_name, objects))
        if objects != [request.objects.get(name) for name in passed]:
            raise FaultError("a returned node differs from the sent one")
    failed = [*_keys(found["failednodes"]), *_keys(found["failedandunresolvablenodes"])]
    said = Counter([*passed, *failed])
    if passed != [name for name in request.nodes if name in set(passed)]:
        raise FaultError(f"{passed} pass of {request.nodes}, in this order")
    if max(said.values(), default=1) > 1 or not said.keys() <= set(request.nodes):
        raise FaultError(f"{passed} pass and {failed} fail of {request.nodes}")
    is_short = 0 < world.shortlist <= len(passed) and not failed
    if not is_short and len(said) != len(request.nodes):
        raise FaultError(f"no answer for {set(request.nodes) - said.keys()}")
    if outcome is not RequestOutcome.ANSWERED and len(passed) != len(request.nodes):
        raise FaultError("a node was refused for a pod that requests no GPU")
    if REQUIRE_IDLE not in body.lower() and (unknown := set(failed) - world.fleet.nodes.keys()):
        raise FaultError(f"unknown nodes were refused: {unknown}")


def _judge_scores(body: bytes, answer: bytes, outcome: RequestOutcome, world: World) -> None:
    """Check that each candidate has exactly one score, and that a feasible one has the highest."""
    scores, nodes = json.loads(answer), _Sent(body).nodes
    if [entry["Host"] for entry in scores] != nodes:
        raise FaultError(f"scores for {nodes}: {scores}")
    values = [entry["Score"] for entry in scores]
    most = world.max_score if outcome is RequestOutcome.ANSWERED else 0
    if any(type(value) is not int or not 0 <= value <= most for value in values):
        raise FaultError(f"scores outside 0 to {most}: {scores}")
    if any(values) and values.count(most) != 1:
        raise FaultError(f"no score is the highest, or several are: {scores}")
    unknown = set(nodes) - world.fleet.nodes.keys() if most else set()
    if unknown and not any(values) and REQUIRE_IDLE not in body.lower():
        raise FaultError(f"unknown nodes were refused: {unknown}")


def _judge_preemption(body: bytes, answer: bytes, outcome: RequestOutcome, _: World) -> None:
    """Check that the answer has only candidates of the request, with the same victims."""
    sent = {node: victims for node, victims in _victims(body) if victims[0]}
    kept = dict(_victims(answer))
    if any(sent.get(node) != victims for node, victims in kept.items()):
        raise FaultError(f"{kept} kept of {sent}")
    if outcome is not RequestOutcome.ANSWERED and kept != sent:
        raise FaultError(f"a candidate was refused for a pod that requests no GPU: {sent.keys()}")


class _Sent:
    """Nodes of a request, as a second parser finds them.

    Attributes:
        nodes: unique names of the nodes.
        objects: sent Node objects by name; None if names were sent.
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
    """Return the raw values of an object's fields by lower-case name; {} for null."""
    return {name.casefold(): value for name, value in _raw(text).items()}


def _items(text: bytes) -> list[bytes]:
    return [bytes(each) for each in msgspec.json.decode(text, type=list[msgspec.Raw] | None) or ()]


def _keys(text: bytes) -> list[str]:
    """Return the keys of an object, including duplicates."""
    return [key for key, _ in json.loads(text, object_pairs_hook=list)]


def _node_name(node: bytes) -> str:
    metadata = _fields(_fields(node).get("metadata", b"null"))
    return msgspec.json.decode(metadata.get("name", b"null"), type=str | None) or ""


def _victims(text: bytes) -> Iterator[tuple[str, tuple[list[str], int]]]:
    """Yield each candidate with its victims' UIDs and the number of violated disruption budgets."""
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
    """Return the raw values of an object's fields by name."""
    fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw] | None) or {}
    return {name: bytes(value) for name, value in fields.items()}
