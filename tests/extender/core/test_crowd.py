"""Many nodes in all states: each is evaluated as if it were alone, and updated as if anew."""

from dataclasses import fields, replace

import pytest

from extender.core.decision.dirty_rows import evaluate_cached, evaluate_together
from extender.core.decision.evaluation import (
    Evaluation,
    EvaluationInputs,
    Overlay,
    device_requests,
    evaluate_for,
    row_with_tenants,
)
from extender.core.decision.filtering import Code
from extender.core.decision.landing import Band
from extender.core.decision.verdicts import explain, gather
from extender.core.nodes.batches import take_batch
from extender.core.nodes.snapshot import Snapshot, batch_rows
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest
from testkit.builders import GIB, GPU, snapshot_of
from tests.extender.core.crowd import MODELS, REQUESTS, SEEN, crowd, overlay

NODES = crowd(200)
POLICY = Policy(mps_share_bytes=int(25 * GIB))


@pytest.fixture(scope="module", name="snapshot")
def snapshot_fixture() -> Snapshot:
    return snapshot_of(NODES, models=MODELS, seen=SEEN)


def inputs(requested: GpuRequest, tenants: Overlay | None = None) -> EvaluationInputs:
    ((_, devices),) = device_requests(requested)
    return EvaluationInputs(
        request=requested, devices=devices, policy=POLICY, overlay=tenants or {}
    )


def rows_of(evaluation: Evaluation) -> list[tuple[float, ...]]:
    columns = [getattr(evaluation, column.name).tolist() for column in fields(evaluation)]
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("requested", REQUESTS, ids=range(len(REQUESTS)))
def test_each_node_is_evaluated_as_if_it_were_alone(
    snapshot: Snapshot, requested: GpuRequest
) -> None:
    pool = snapshot.pools[GPU]

    together = rows_of(evaluate_for(inputs(requested), pool.batch, MODELS, SEEN))

    for at in range(len(pool.nodes)):
        alone = take_batch(pool.batch, slice(at, at + 1))
        assert [together[at]] == rows_of(evaluate_for(inputs(requested), alone, MODELS, SEEN)), at


def test_entries_of_several_requests_are_updated_as_if_evaluated_anew(snapshot: Snapshot) -> None:
    pool = snapshot.pools[GPU]
    before, after = (overlay(list(NODES), seed) for seed in (1, 2))
    is_out = snapshot.telemetry.is_out
    rows = tuple(
        row_with_tenants(row, node, after, is_out)
        for row, node in zip(pool.rows, pool.nodes, strict=True)
    )
    batch = batch_rows(rows, snapshot.telemetry, pool.batch.suspicion)

    entries = [evaluate_cached(snapshot, pool, inputs(one, before)) for one in REQUESTS]
    updated = evaluate_together(
        snapshot, pool, [inputs(one, after) for one in REQUESTS], [[entry] for entry in entries]
    )

    for entry, requested in zip(updated, REQUESTS, strict=True):
        anew = evaluate_for(inputs(requested, after), batch, MODELS, SEEN)
        assert rows_of(entry.evaluation) == rows_of(anew)


@pytest.mark.parametrize("requested", REQUESTS, ids=range(len(REQUESTS)))
def test_each_explanation_is_that_of_the_evaluation(
    snapshot: Snapshot, requested: GpuRequest
) -> None:
    pool, tenants = snapshot.pools[GPU], overlay(list(NODES), 3)
    about = inputs(requested, tenants)
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
