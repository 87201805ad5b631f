"""What the typed client sends to the extender."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest

from extender.answers import routes
from extender.cli.client import Client
from extender.cli.transports import ClientError

POD: dict[str, object] = {"spec": {"containers": []}}
BODY = b'{"spec":{"containers":[]}}'


class Recorder:
    """Extender that records each request, and answers with an empty object."""

    def __init__(self) -> None:
        self.requested: list[tuple[str, str, Mapping[str, str]]] = []
        self.bodies: list[bytes | None] = []

    def request(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> bytes:
        self.requested.append((method, path, dict(params or {})))
        self.bodies.append(body)
        return b"{}"


def sent(call: Callable[[Client], object]) -> tuple[str, str, Mapping[str, str]]:
    """Return method, path and query of a call's only request."""
    recorder = Recorder()
    with suppress(ClientError):  # no answer is empty
        call(Client(recorder))
    (requested,) = recorder.requested
    return requested


@pytest.mark.parametrize(
    ("call", "path", "params"),
    [
        (lambda one: one.nodes(), "/v1/nodes", {}),
        (lambda one: one.node("a/b c"), "/v1/nodes/a%2Fb%20c", {}),
        (lambda one: one.gpus("n"), "/v1/gpus", {"node": "n"}),
        (lambda one: one.gpus(), "/v1/gpus", {}),
        (lambda one: one.best(memory="1Gi", strategy="pack"), "/v1/best",
         {"gpus": "1", "memory": "1Gi", "strategy": "pack"}),
        (lambda one: one.defrag(gpus=4), "/v1/defrag", {"gpus": "4", "limit": "5"}),
        (lambda one: one.decisions(), "/v1/decisions", {"limit": "100", "brief": "true"}),
        (lambda one: one.decisions(brief=False, pod="p"), "/v1/decisions",
         {"limit": "100", "brief": "false", "pod": "p"}),
        (lambda one: one.pending(), "/v1/pending", {"limit": "200"}),
        (lambda one: one.pods(search="a", offset=3), "/v1/pods",
         {"search": "a", "limit": "100", "offset": "3"}),
        (lambda one: one.holders(), "/v1/holders", {"idle_for": "3600", "limit": "200"}),
        (lambda one: one.holders(some=True), "/v1/holders",
         {"idle_for": "3600", "limit": "200", "some": "true"}),
        (lambda one: one.costs(), "/v1/costs", {"by": "owner", "idle_for": "0", "limit": "200"}),
        (lambda one: one.costs(some=True, by="pod"), "/v1/costs",
         {"by": "pod", "idle_for": "0", "limit": "200", "some": "true"}),
        (lambda one: one.explain("p"), "/v1/explain", {"pod": "p", "limit": "100"}),
        (lambda one: one.explain(number=7), "/v1/explain", {"number": "7", "limit": "100"}),
        (lambda one: one.explain(number="x-7", node="n"), "/v1/explain",
         {"id": "x-7", "limit": "100", "node": "n"}),
        (lambda one: one.usage(), "/v1/usage", {"since": "86400"}),
        (lambda one: one.advice(), "/v1/advice", {"over": "3600", "limit": "200"}),
        (lambda one: one.advice(all_cards=True), "/v1/advice",
         {"over": "3600", "limit": "200", "all": "true"}),
        (lambda one: one.regret(), "/v1/regret", {"limit": "50"}),
        (lambda one: one.bypassed(), "/v1/bypassed", {}),
    ],
)  # fmt: skip
def test_a_method_sends_its_parameters_and_leaves_out_those_without_a_value(
    call: Callable[[Client], object], path: str, params: dict[str, str]
) -> None:
    method, requested, query = sent(call)

    offset = {"offset": "0"} if path == "/v1/pods" else {}
    assert (method, requested, query) == ("GET", path, offset | params)


@pytest.mark.parametrize(
    ("route", "call"),
    [
        (routes.DEFRAG, lambda one: one.defrag(gpus=1)),
        (routes.PENDING, lambda one: one.pending()),
        (routes.PODS, lambda one: one.pods()),
        (routes.HOLDERS, lambda one: one.holders()),
        (routes.COSTS, lambda one: one.costs()),
        (routes.ADVICE, lambda one: one.advice()),
    ],
)
def test_numbers_have_the_same_defaults_as_in_the_api(
    route: routes.Route[Any], call: Callable[[Client], object]
) -> None:
    _, _, query = sent(call)

    for name, parameter in route.parameters.items():
        if isinstance(parameter, routes.Number):
            assert query[name] == str(parameter.default), name


@pytest.mark.parametrize(
    ("call", "path", "params"),
    [
        (lambda one: one.foresee(POD), "/v1/explain", {"limit": "100"}),
        (lambda one: one.foresee(POD, node="n"), "/v1/explain", {"limit": "100", "node": "n"}),
        (lambda one: one.measured(POD, owner=""), "/v1/size", {}),
        (lambda one: one.measured(POD, owner="Job a"), "/v1/size", {"owner": "Job a"}),
    ],
)
def test_a_pod_is_sent_in_the_body(
    call: Callable[[Client], object], path: str, params: dict[str, str]
) -> None:
    recorder = Recorder()

    with suppress(ClientError):
        call(Client(recorder))

    assert recorder.requested == [("POST", path, params)]
    assert recorder.bodies == [BODY]
