"""Many nodes in all states: evaluated as if each were alone, and updated as if from scratch."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from extender.core.decision.decision import decide
from extender.core.decision.dirty_rows import evaluate_cached, evaluate_together
from extender.core.decision.evaluation import Evaluation, avoid, evaluate_for, row_with_tenants
from extender.core.decision.filtering import RELATIVE_CODES, Code
from extender.core.decision.landing import Band
from extender.core.decision.scoring import UNITS, Nearness
from extender.core.decision.verdicts import explain, gather
from extender.core.nodes.batches import take_batch
from extender.core.nodes.snapshot import Snapshot, batch_rows
from extender.core.request.request import GpuRequest
from testkit.builders import GPU, snapshot_of
from tests.extender.core.crowd import MODELS, POLICY, REQUESTS, SEEN, crowd, inputs_of, overlay

NODES = crowd(120)


@pytest.fixture(scope="module", name="snapshot")
def snapshot_fixture() -> Snapshot:
    return snapshot_of(NODES, models=MODELS, seen=SEEN)


def rows_of(evaluation: Evaluation) -> list[tuple[float, ...]]:
    columns = [getattr(evaluation, column.name).tolist() for column in fields(evaluation)]
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("requested", REQUESTS, ids=range(len(REQUESTS)))
def test_each_node_is_evaluated_as_if_it_were_alone(
    snapshot: Snapshot, requested: GpuRequest
) -> None:
    pool = snapshot.pools[GPU]

    together = rows_of(evaluate_for(inputs_of(requested, {}), pool.batch, MODELS, SEEN))

    for at in range(len(pool.nodes)):
        alone = take_batch(pool.batch, slice(at, at + 1))
        assert [together[at]] == rows_of(
            evaluate_for(inputs_of(requested, {}), alone, MODELS, SEEN)
        ), at


def test_entries_of_several_requests_are_updated_as_if_evaluated_from_scratch(
    snapshot: Snapshot,
) -> None:
    pool = snapshot.pools[GPU]
    before, after = (overlay(list(NODES), seed) for seed in (1, 2))
    is_out = snapshot.telemetry.is_out
    rows = tuple(
        row_with_tenants(row, node, after, is_out)
        for row, node in zip(pool.rows, pool.nodes, strict=True)
    )
    batch = batch_rows(rows, snapshot.telemetry, pool.batch.suspicion)

    entries = [evaluate_cached(snapshot, pool, inputs_of(one, before)) for one in REQUESTS]
    again = inputs_of(REQUESTS[0], before)
    assert evaluate_cached(snapshot, pool, again, entries[:1]) is entries[0]
    renamed = replace(snapshot, models=MODELS[::-1])
    assert evaluate_cached(renamed, pool, again, entries[:1]) is not entries[0]
    updated = evaluate_together(
        snapshot, pool, [inputs_of(one, after) for one in REQUESTS], [[entry] for entry in entries]
    )

    for entry, requested in zip(updated, REQUESTS, strict=True):
        from_scratch = evaluate_for(inputs_of(requested, after), batch, MODELS, SEEN)
        assert rows_of(entry.evaluation) == rows_of(from_scratch)


@pytest.mark.parametrize("requested", REQUESTS, ids=range(len(REQUESTS)))
def test_each_explanation_is_that_of_the_evaluation(
    snapshot: Snapshot, requested: GpuRequest
) -> None:
    pool, tenants = snapshot.pools[GPU], overlay(list(NODES), 3)
    about = inputs_of(requested, tenants)
    evaluation = evaluate_cached(snapshot, pool, about).evaluation

    verdicts = explain(gather(snapshot, pool, about, NODES))

    for verdict, (code, score, band, _) in zip(verdicts, rows_of(evaluation), strict=True):
        assert verdict.rejection == Code(int(code)).text
        assert verdict.band == Band(int(band)).name.lower()
        assert verdict.score == score == pytest.approx(sum(part.adds for part in verdict.parts))
        assert all(0 <= part.value <= 1 for part in verdict.parts)
    for verdict in verdicts[::7]:
        (alone,) = explain(gather(snapshot, pool, about, [verdict.node]))
        # A part that is 0 for all nodes is left out.
        assert replace(alone, parts=()) == replace(verdict, parts=())


def test_a_node_that_a_pod_avoids_loses_certainty_alone(snapshot: Snapshot) -> None:
    requested = replace(REQUESTS[0], avoided={"node-003": 0.5, "gone": 1.0})
    pool, about = snapshot.pools[GPU], inputs_of(requested, {})
    before = evaluate_for(about, pool.batch, MODELS, SEEN)
    suspicion = pool.batch.suspicion.copy()
    suspicion[3] = 1 - (1 - suspicion[3]) * 0.5

    after = avoid(before, snapshot, pool, about)

    batch = replace(pool.batch, suspicion=suspicion)
    assert rows_of(after) == rows_of(evaluate_for(about, batch, MODELS, SEEN))
    verdicts = explain(gather(snapshot, pool, about, NODES))
    assert [one.score for one in verdicts] == after.scores.tolist()
    assert [one.suspicion for one in verdicts] == suspicion.tolist()


def test_nearness_to_a_group_adds_to_the_score(snapshot: Snapshot) -> None:
    evidence = gather(snapshot, snapshot.pools[GPU], inputs_of(REQUESTS[0], {}), ["node-003"])
    near = Nearness(units=50.0, words="same rack as its group", most=80.0)

    (alone,) = explain(evidence)
    (grouped,) = explain(replace(evidence, nearness={"node-003": near}))

    assert grouped.score == pytest.approx(alone.score + 50 / UNITS)
    assert grouped.score == pytest.approx(sum(part.adds for part in grouped.parts))


@pytest.mark.parametrize("is_numbered", [False, True])
def test_the_best_nodes_are_the_first_of_all(snapshot: Snapshot, is_numbered: bool) -> None:
    candidates: Sequence[str] = [*reversed(NODES), "unknown"]
    if is_numbered:
        candidates = snapshot.node_index.number([*reversed(NODES)])

    for requested in REQUESTS:

        def order(ranked: int | None, requested: GpuRequest = requested) -> list[int]:
            how: dict[str, Any] = {"overlays": {}, "ranked": ranked}
            found: list[int] = decide(snapshot, requested, candidates, POLICY, **how).order.tolist()
            return found

        full = order(None)
        for ranked in (0, 1, 5, 40, len(full) - 1, len(full), len(full) + 1):
            assert order(ranked) == full[:ranked]


def test_codes_that_depend_on_the_node_alone_are_the_others() -> None:
    snapshot = snapshot_of(NODES, models=MODELS)
    batch = snapshot.pools[GPU].batch

    found = {
        Code(code)
        for requested in REQUESTS
        for code in evaluate_for(inputs_of(requested, {}), batch, MODELS).codes.tolist()
    }

    assert found | set(RELATIVE_CODES) == set(Code)
    assert not found & set(RELATIVE_CODES)
