"""Parts of a score."""

import pytest
from hypothesis import given

from extender.core.decision.evaluation import EvaluationInputs
from extender.core.decision.scoring import (
    _CALM,
    _DOUBT,
    _FULLNESS,
    _NUMBER,
    BAND,
    CERTAINTY,
    EARLY_FAILURES,
    ILL_HEALTH,
    MODEL,
    ROOM,
    Breakdown,
)
from extender.core.decision.verdicts import NodeVerdict, explain, gather
from extender.core.policy import Policy, Strategy
from extender.core.request.request import GpuRequest
from testkit.builders import (
    GPU,
    Node,
    busy,
    decide_on,
    device_request,
    gpu,
    node,
    request,
    shared,
    snapshot_of,
)
from testkit.strategies import fleets, requests

MODELS = ("", "nvidia h100", "nvidia a100")


def verdicts(fleet: dict[str, Node], about: GpuRequest) -> tuple[NodeVerdict, ...]:
    snapshot = snapshot_of(fleet, models=MODELS)
    inputs = EvaluationInputs(
        request=about,
        devices=device_request(about.count, float(about.memory_bytes or 0)),
        policy=Policy(),
        overlay={},
    )
    return explain(gather(snapshot, snapshot.pools[GPU], inputs, list(fleet)))


def names(verdict: NodeVerdict) -> list[str]:
    return [part.name for part in verdict.parts]


@given(fleets(), requests())
def test_the_parts_come_to_the_score(fleet: dict[str, Node], about: GpuRequest) -> None:
    for verdict in verdicts(fleet, about):
        made_of = Breakdown(parts=verdict.parts, factors=verdict.factors)
        assert made_of.score == pytest.approx(verdict.score, abs=1e-9)
        assert all(0 <= part.value <= 1 for part in verdict.parts)
        assert sum(part.share for part in verdict.parts) <= 1 + 1e-9


def test_the_parts_come_to_the_score_of_the_decision_itself() -> None:
    fleet = {"a": node(gpu(utilization=0.2), busy(used=1)), "b": node(gpu(penalty=0.5))}

    decided = decide_on(fleet, models=MODELS)

    for verdict, score in zip(verdicts(fleet, request()), decided.scores, strict=True):
        made_of = Breakdown(parts=verdict.parts, factors=verdict.factors)
        assert made_of.score == pytest.approx(score, abs=1e-9)


def test_the_parts_are_the_digits_of_the_order() -> None:
    idle, full = verdicts({"idle": node(gpu()), "full": node(busy())}, request())

    assert names(idle) == names(full) == [BAND, MODEL, ROOM, CERTAINTY, _FULLNESS, *_CALM.values()]
    assert [part.value for part in idle.parts[:4]] == [1.0] * 4
    assert [part.value for part in full.parts[:4]] == [0.0, 1.0, 1.0, 0.0]


def test_a_preferred_model_counts_by_its_place() -> None:
    fleet = {"first": node(model_id=1), "second": node(model_id=2), "other": node(model_id=0)}
    wants = request(preferred_models=("H100", "A100"))

    values = [one.parts[1].value for one in verdicts(fleet, wants)]

    assert values == [1.0, 15 / 16, 0.0]


def test_reason_names_the_strategy_or_the_load_of_shares() -> None:
    def names_of(described: Node, strategy: Strategy) -> list[str]:
        (verdict,) = verdicts({"a": described}, request(strategy=strategy))
        return names(verdict)[4:]

    for strategy, fit in [
        (Strategy.AUTO, _FULLNESS), (Strategy.PACK, _FULLNESS), (Strategy.SPREAD, _NUMBER)
    ]:  # fmt: skip
        assert names_of(node(gpu(), gpu(used=1)), strategy) == [fit, *_CALM.values()]
    assert names_of(shared(), Strategy.AUTO) == list(_CALM.values())
    assert names_of(shared(), Strategy.PACK) == [_FULLNESS, *_CALM.values()]


def test_unknown_state_health_and_failures_each_reduce_certainty() -> None:
    fleet = {"a": node(gpu(penalty=0.25), gpu(penalty=0.25), busy(), busy(), suspicion=0.5)}

    (verdict,) = verdicts(fleet, request())

    assert [(one.name, one.keeps) for one in verdict.factors] == [
        (_DOUBT, 0.5),
        (ILL_HEALTH, 0.875),
        (EARLY_FAILURES, 0.5),
    ]
    assert verdict.parts[3].value == 3 / 16  # of 3.5, rounded down
