"""Compare the types of the answers with real answers, field by field in both directions."""

import asyncio
import json
import types
import typing
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final
from urllib.request import Request, urlopen

import msgspec
import pytest

from extender.answers import routes
from extender.answers.answer import Answer
from extender.answers.routes import Route
from extender.core.devices.readings import DeviceKey, ForeignProcess
from extender.core.nodes.pod_groups import likeness_of
from extender.insight.decisions import BypassedPodsTable
from extender.insight.regret_table import RegretTable
from extender.insight.regret_watch import RegretWatch
from extender.insight.usage import _SWEEP_SECONDS
from extender.placement.bypassed_pods import _BoundPods, _BypassEvidence
from extender.placement.request_log import BypassVerdict
from testkit.builders import GPU
from testkit.cli_serving import build_fleet, call, serving
from testkit.outcomes import OUTCOMES
from testkit.webhook_requests import pod
from tests.extender.cli.advised import build as build_advising

Seen = set[tuple[type[Answer], str]]

ROUTES: Final[dict[str, Route[Any]]] = {
    "/v1/nodes": routes.NODES,
    "/v1/nodes/node-1": routes.NODE,
    "/v1/gpus": routes.GPUS,
    "/v1/best?gpus=2": routes.BEST,
    "/v1/best?gpus=4&model=H100": routes.BEST,
    "/v1/defrag?gpus=4": routes.DEFRAG,
    "/v1/decisions": routes.DECISIONS,
    "/v1/decisions?brief=true": routes.DECISIONS,
    "/v1/decisions/1": routes.DECISION,
    "/v1/pending": routes.PENDING,
    "/v1/pods": routes.PODS,
    "/v1/holders?idle_for=0": routes.HOLDERS,
    "/v1/costs": routes.COSTS,
    "/v1/costs?by=pod": routes.COSTS,
    "/v1/explain?pod=fresh": routes.EXPLAIN,
    "/v1/explain?pod=big": routes.EXPLAIN,
    "/v1/explain?pod=team/short": routes.EXPLAIN,
    "/v1/explain?pod=team/short&node=node-3": routes.EXPLAIN,
    "/v1/bypassed": routes.BYPASSED,
    "/v1/regret": routes.REGRET,
    "/v1/usage": routes.USAGE,
    "advising/v1/advice": routes.ADVICE,
    "asking/v1/size": routes.SIZE,
    "asking/v1/explain": routes.FORESEE,
}
"""Paths, with their routes."""


class Bypassed:
    """Stand-in that reports one pod that was bound without a call."""

    def report(self) -> _BypassEvidence:
        group = _BoundPods(
            scheduler="default-scheduler",
            resources=(GPU,),
            verdict=BypassVerdict.NOT_CALLED,
            example="team/quiet",
        )
        return _BypassEvidence(pods=(group,), at=10.0, schedulers=("a",))


@pytest.fixture(scope="module")
def documents() -> Iterator[dict[str, Any]]:
    fleet = build_fleet()
    fleet.placer.detailed = 1  # other decisions keep only the score
    asyncio.run(call(fleet, "prioritize", "node-1", "node-2", "node-3", name="short"))
    watch = RegretWatch(fleet.fleet, lambda: fleet.now, pods=100, after_seconds=3600.0)
    watch.outcomes.extend(OUTCOMES)
    fleet.now += _SWEEP_SECONDS
    asyncio.run(fleet.why.usage.sweep())
    fleet.fleet._allocations.similar_pods.note(
        replace(fleet.fleet.pods["uid-train"], likeness=likeness_of(pod(gpus=2))), 1 << 30
    )
    app = fleet.build_app()
    app.add_routes(RegretTable(lambda: watch).routes())
    app.add_routes(BypassedPodsTable(Bypassed()).routes())  # type: ignore[arg-type] # it only reports
    for name in ("node-2", "node-3"):
        rack = {"topology.kubernetes.io/rack": "a"}
        fleet.fleet.apply_node(replace(fleet.fleet.nodes[name], other_labels=rack))
    process = ForeignProcess(
        pid=4711, name="python3", memory_bytes=1, started_at=0.0, pod="team/a", container="main"
    )
    fleet.fleet.note_foreign("node-3", {DeviceKey(("GPU-node-3-0", "")): (process,)})
    wishes = {"gpu-memory": "much", "prefer-models": "H100", "group-size": "2"}
    wish: dict[str, Any] = pod("what-if", gpus=2, **wishes)
    wish["metadata"]["labels"] = {"jobset.sigs.k8s.io/jobset-name": "train"}
    with ExitStack() as stack:
        url = stack.enter_context(serving(app))
        addresses = {
            "advising": stack.enter_context(serving(build_advising().build_app())),
            "asking": url,
            "": url,
        }

        def read(route_path: str) -> Any:
            where, _, path = route_path.partition("/v1")
            body = json.dumps(wish).encode() if where == "asking" else None
            request = Request(f"{addresses[where]}/v1{path}", body)
            with urlopen(request, timeout=30) as response:
                return json.load(response)

        yield {route_path: read(route_path) for route_path in ROUTES}


def walk(kind: Any, value: Any, at: str, seen: Seen) -> Iterator[str]:
    """Yield fields of a document that its type lacks; record the fields that it has."""
    if isinstance(kind, type) and issubclass(kind, Answer):
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        for name, part in value.items():
            if name not in fields:
                yield f"{at}.{name}"
            else:
                seen.add((kind, name))
                yield from walk(fields[name], part, f"{at}.{name}", seen)
    elif isinstance(kind, types.UnionType):
        if value is not None:
            (rest,) = (one for one in typing.get_args(kind) if one is not type(None))
            yield from walk(rest, value, at, seen)
    elif typing.get_origin(kind) is list:
        for number, part in enumerate(value):
            yield from walk(typing.get_args(kind)[0], part, f"{at}[{number}]", seen)
    elif typing.get_origin(kind) is dict:
        for name, part in value.items():
            yield from walk(typing.get_args(kind)[1], part, f"{at}.{name}", seen)


@pytest.mark.parametrize("route_path", ROUTES)
def test_the_type_has_each_field_of_the_answer(documents: dict[str, Any], route_path: str) -> None:
    assert list(walk(ROUTES[route_path].answer, documents[route_path], route_path, set())) == []


@pytest.mark.parametrize("route_path", ROUTES)
def test_each_value_is_of_its_type(documents: dict[str, Any], route_path: str) -> None:
    typed = msgspec.convert(documents[route_path], ROUTES[route_path].answer, strict=True)

    again = json.loads(msgspec.json.encode(typed))
    assert list(differences(documents[route_path], again)) == []


def differences(sent: Any, typed: Any, at: str = "") -> Iterator[str]:
    """Yield fields whose decoded value differs from the sent one; defaults may be added."""
    if isinstance(sent, dict):
        for name, value in sent.items():
            yield from differences(value, typed.get(name), f"{at}.{name}")
    elif isinstance(sent, list):
        for number, (one, other) in enumerate(zip(sent, typed, strict=True)):
            yield from differences(one, other, f"{at}[{number}]")
    elif sent != typed:
        yield f"{at}: {sent!r} is read as {typed!r}"


def test_the_server_sends_every_field_of_the_types(documents: dict[str, Any]) -> None:
    seen: Seen = set()
    for route_path, route in ROUTES.items():
        list(walk(route.answer, documents[route_path], route_path, seen))

    kinds = {kind for kind, _ in seen}
    assert {
        f"{kind.__name__}.{field.encode_name}"
        for kind in kinds
        for field in msgspec.structs.fields(kind)
        if (kind, field.encode_name) not in seen
    } == set()
