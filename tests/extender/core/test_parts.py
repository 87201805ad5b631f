"""What a score is made of."""

import pytest
from hypothesis import given, settings

from extender.core.evaluation import Question
from extender.core.explain import NodeVerdict, explain, gather
from extender.core.parts import (
    CHANCE,
    EARLY_FAILURES,
    ENOUGH,
    FULLNESS,
    HOPE,
    ILL_HEALTH,
    MODEL,
    NUMBER,
    Breakdown,
)
from extender.core.policy import Policy, Strategy
from extender.core.request import GpuRequest
from tests.builders import (
    GPU,
    Node,
    ask,
    busy,
    decide_on,
    gpu,
    node,
    request,
    snapshot_of,
)
from tests.extender.core.strategies import fleets, requests

MODELS = ("", "nvidia h100", "nvidia a100")


def verdicts(fleet: dict[str, Node], about: GpuRequest) -> tuple[NodeVerdict, ...]:
    snapshot = snapshot_of(fleet, models=MODELS)
    question = Question(
        request=about,
        ask=ask(about.count, float(about.memory_bytes or 0)),
        policy=Policy(),
        overlay={},
    )
    return explain(gather(snapshot, snapshot.pools[GPU], question, list(fleet)))


def names(verdict: NodeVerdict) -> list[str]:
    return [part.name for part in verdict.parts]


@settings(max_examples=150)
@given(fleets(), requests())
def test_the_parts_and_factors_come_to_the_score(fleet: dict[str, Node], about: GpuRequest) -> None:
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


def test_a_node_that_is_only_hoped_for_says_so() -> None:
    idle, full = verdicts({"idle": node(gpu()), "full": node(busy())}, request())

    assert names(idle)[:3] == [ENOUGH, CHANCE, NUMBER]
    assert names(full)[0] == HOPE
    assert full.parts[0].adds == 0.0


def test_a_preferred_model_is_a_part_of_its_own_only_where_one_is_there() -> None:
    fleet = {"first": node(model_id=1), "second": node(model_id=2)}
    wants = request(preferred_models=("H100", "A100"))

    first, second = verdicts(fleet, wants)
    values = [part.value for one in (first, second) for part in one.parts if part.name == MODEL]

    assert values == [1.0, 0.5]
    assert MODEL not in names(verdicts(fleet, request(preferred_models=("B200",)))[0])


def test_packing_rewards_full_nodes() -> None:
    (verdict,) = verdicts({"a": node(gpu(), gpu(used=1))}, request(strategy=Strategy.PACK))

    assert FULLNESS in names(verdict)


def test_ill_health_and_early_failures_take_their_shares() -> None:
    (verdict,) = verdicts({"a": node(gpu(penalty=0.25), suspicion=0.5)}, request())

    assert [(one.name, one.keeps) for one in verdict.factors] == [
        (ILL_HEALTH, 0.75),
        (EARLY_FAILURES, 0.5),
    ]
