"""Properties of every decision on any fleet."""

from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from extender.core.decision.decision import decide
from extender.core.decision.dirty_rows import evaluate_cached, evaluate_together
from extender.core.decision.evaluation import (
    EvaluationInputs,
    Overlay,
    device_requests,
    evaluate_for,
    nominate,
    row_with_tenants,
)
from extender.core.nodes.snapshot import batch_rows
from extender.core.policy import Policy, Weights
from extender.core.request.request import GpuRequest
from testkit import strategies as fleet
from testkit.builders import (
    GIB,
    GPU,
    Gpu,
    Node,
    assessment_of,
    batch_of,
    decide_on,
    ranking,
    rejected,
    snapshot_of,
)


def decisions(data: st.DataObject, nodes: dict[str, Node], **how: Any) -> dict[str, Any]:
    """Draw the inputs of a decision besides the nodes."""
    return {
        "requested": data.draw(fleet.requests()),
        "policy": data.draw(fleet.policies),
        "overlay": data.draw(fleet.overlays(list(nodes))),
        "models": fleet.MODELS,
        **how,
    }


@given(nodes=fleet.fleets(), data=st.data())
def test_each_candidate_is_either_feasible_or_rejected(
    nodes: dict[str, Node], data: st.DataObject
) -> None:
    candidates = (*nodes, "node-unknown")

    decision = decide_on(nodes, **decisions(data, nodes, candidates=candidates))

    assert sorted([*ranking(decision), *rejected(decision)]) == sorted(candidates)


@given(nodes=fleet.fleets(), data=st.data())
def test_scores_are_ratios_for_any_telemetry(nodes: dict[str, Node], data: st.DataObject) -> None:
    decision = decide_on(nodes, **decisions(data, nodes))

    assert np.all((decision.scores >= 0) & (decision.scores <= 1))


@given(nodes=fleet.fleets(), data=st.data())
def test_the_order_of_the_candidates_changes_nothing(
    nodes: dict[str, Node], data: st.DataObject
) -> None:
    how = decisions(data, nodes)
    shuffled = tuple(data.draw(st.permutations(list(nodes))))

    one, other = decide_on(nodes, **how), decide_on(nodes, candidates=shuffled, **how)

    assert ranking(one) == ranking(other)
    assert rejected(one) == rejected(other)


@given(nodes=fleet.fleets(), data=st.data())
def test_nodes_outside_the_request_change_nothing(
    nodes: dict[str, Node], data: st.DataObject
) -> None:
    asked_about = tuple(data.draw(st.lists(st.sampled_from(list(nodes)), min_size=1, unique=True)))
    how = decisions(data, nodes)
    alone = {name: nodes[name] for name in asked_about}

    among_all = decide_on(nodes, candidates=asked_about, **how)
    among_themselves = decide_on(alone, candidates=asked_about, **how)

    assert ranking(among_all) == ranking(among_themselves)
    assert rejected(among_all) == rejected(among_themselves)
    assert among_all.scores.tolist() == among_themselves.scores.tolist()


def more_loaded(data: st.DataObject, device: Gpu) -> Gpu:
    """Draw the same device with at least as much load."""
    changes: dict[str, Any] = {}
    if device.freshness:
        changes["utilization"] = data.draw(st.floats(device.utilization, 1))
        latest = device.latest or 0.0
        changes["latest"] = data.draw(st.floats(latest, 1))
        changes["next_hour"] = data.draw(st.floats(device.next_hour or 0.0, 1))
    if device.memory_freshness:
        changes["memory_used"] = data.draw(st.floats(device.memory_used, 1))
    return replace(device, **changes)


@given(nodes=fleet.fleets(), data=st.data())
def test_more_load_never_raises_a_nodes_score_nor_lifts_its_rejection(
    nodes: dict[str, Node], data: st.DataObject
) -> None:
    how = decisions(data, nodes)
    name = data.draw(st.sampled_from(list(nodes)))
    devices = tuple(more_loaded(data, device) for device in nodes[name].gpus)
    busier = {**nodes, name: replace(nodes[name], gpus=devices)}

    before, after = decide_on(nodes, **how), decide_on(busier, **how)

    at = before.candidates.index(name)
    assert after.scores[at] <= before.scores[at]
    assert after.codes[at] or not before.codes[at]


@given(described=fleet.nodes())
def test_room_is_within_all_its_bounds(described: Node) -> None:
    assessment, batch = assessment_of(described), batch_of(described)

    telemetry, size = batch.telemetry, batch.telemetry.memory_total_bytes
    is_whole_held = (batch.used > 0) & ~batch.is_shared[:, None]
    is_measured = (telemetry.memory_freshness > 0) & ~is_whole_held
    beside = batch.declared_bytes + telemetry.others_bytes
    capped = batch.is_mps[:, None]
    room = assessment.free_bytes
    assert np.all(room >= 0)
    assert np.all(room <= assessment.declared_room_bytes)
    assert np.all(room <= assessment.full_bytes)
    assert np.all(capped | ~is_measured | (room <= telemetry.memory_free_bytes))
    by_size = np.where(size > 0, np.maximum(size - beside, 0.0), np.inf)
    assert np.all(capped | (room <= by_size * (1 + 1e-12)))


@given(nodes=fleet.fleets(), data=st.data())
def test_more_that_tenants_declared_never_lifts_a_rejection(
    nodes: dict[str, Node], data: st.DataObject
) -> None:
    how = decisions(data, nodes)
    name = data.draw(st.sampled_from([name for name in nodes if nodes[name].is_shared] or [""]))
    assume(name)
    more = data.draw(st.sampled_from([1.0, 10 * GIB, 100 * GIB]))
    devices = tuple(
        replace(device, declared_bytes=device.declared_bytes + more) for device in nodes[name].gpus
    )
    fuller = {**nodes, name: replace(nodes[name], gpus=devices)}

    before, after = decide_on(nodes, **how), decide_on(fuller, **how)

    at = before.candidates.index(name)
    assert after.scores[at] <= before.scores[at]
    assert after.codes[at] or not before.codes[at]


@given(nodes=fleet.fleets(), requested=fleet.requests(), data=st.data())
def test_an_updated_cache_entry_equals_an_evaluation_from_scratch(
    nodes: dict[str, Node], requested: GpuRequest, data: st.DataObject
) -> None:
    before, overlay = (data.draw(fleet.overlays(list(nodes))) for _ in range(2))
    nominated = data.draw(st.sampled_from(["", *nodes]))
    about = replace(requested, nominated_node=nominated)
    snapshot = snapshot_of(nodes, models=fleet.MODELS)
    pool, ((_, device_request),) = snapshot.pools[GPU], device_requests(about)

    def inputs_with(overlay: Overlay) -> EvaluationInputs:
        return EvaluationInputs(
            request=about, devices=device_request, policy=Policy(), overlay=overlay
        )

    entry = evaluate_cached(snapshot, pool, inputs_with(before))
    # For some nodes the overlay is the same object, for the others a new one.
    overlay = {node: before.get(node, tenants) for node, tenants in overlay.items()}
    again = evaluate_cached(snapshot, pool, inputs_with(overlay), [entry])
    corrected = nominate(again.evaluation, snapshot, pool, inputs_with(overlay))

    with_tenants = partial(row_with_tenants, overlay=overlay, is_out=snapshot.telemetry.is_out)
    rows = tuple(map(with_tenants, pool.rows, pool.nodes))
    from_scratch = evaluate_for(
        inputs_with(overlay),
        batch_rows(rows, snapshot.telemetry, pool.batch.suspicion),
        snapshot.models,
    )
    from_scratch = nominate(from_scratch, snapshot, pool, inputs_with(overlay))
    for column in ("codes", "scores", "bands", "utilization"):
        assert getattr(corrected, column).tolist() == getattr(from_scratch, column).tolist()


@given(nodes=fleet.fleets(), data=st.data())
def test_requests_are_evaluated_together_as_alone(
    nodes: dict[str, Node], data: st.DataObject
) -> None:
    requests = data.draw(st.lists(fleet.requests(), min_size=1, max_size=4, unique=True))
    before, overlay = (data.draw(fleet.overlays(list(nodes))) for _ in range(2))
    snapshot = snapshot_of(nodes, models=fleet.MODELS)
    pool = snapshot.pools[GPU]

    def all_inputs(overlay: Overlay) -> list[EvaluationInputs]:
        return [
            EvaluationInputs(
                request=requested, devices=device_request, policy=Policy(), overlay=overlay
            )
            for requested in requests
            for _, device_request in device_requests(requested)
        ]

    entries = [evaluate_cached(snapshot, pool, inputs) for inputs in all_inputs(before)]
    together = evaluate_together(snapshot, pool, all_inputs(overlay), [[one] for one in entries])
    alone = [evaluate_cached(snapshot, pool, inputs) for inputs in all_inputs(overlay)]

    for one, other in zip(together, alone, strict=True):
        for column in ("codes", "scores", "bands", "utilization"):
            assert (
                getattr(one.evaluation, column).tolist()
                == getattr(other.evaluation, column).tolist()
            )


@given(nodes=fleet.fleets(), data=st.data())
def test_cached_results_of_other_requests_make_no_difference(
    nodes: dict[str, Node], data: st.DataObject
) -> None:
    """Another memory request shares a batch's cached results; other settings and counts do not."""
    requests = data.draw(st.lists(fleet.requests(), min_size=2, max_size=6, unique=True))
    policies = [
        Policy(),
        Policy(weights=Weights(utilization=0.1, memory=0.9)),
        Policy(assumed=replace(Policy().assumed, utilization=0.9), mps_share_bytes=int(2 * GIB)),
    ]
    snapshot = snapshot_of(nodes, models=fleet.MODELS)
    batch = snapshot.pools[GPU].batch

    for requested in requests:
        for _, device_request in device_requests(requested):
            policy = data.draw(st.sampled_from(policies))
            inputs = EvaluationInputs(
                request=requested, devices=device_request, policy=policy, overlay={}
            )
            shared = evaluate_for(inputs, batch, snapshot.models)
            alone = evaluate_for(inputs, replace(batch), snapshot.models)
            for column in ("codes", "scores", "bands", "utilization"):
                assert getattr(shared, column).tolist() == getattr(alone, column).tolist()


@given(nodes=fleet.fleets(), data=st.data())
def test_the_load_filter_refuses_no_pod_that_would_else_have_a_node(
    nodes: dict[str, Node], data: st.DataObject
) -> None:
    how = decisions(data, nodes)

    without = decide_on(nodes, **{**how, "policy": fleet.POLICY})
    filtered = decide_on(nodes, **{**how, "policy": fleet.LOAD_FILTER})

    assert bool(ranking(filtered)) == bool(ranking(without))
    assert set(ranking(filtered)) <= set(ranking(without))


@given(nodes=fleet.fleets(), requested=fleet.requests())
def test_the_decision_reads_the_snapshot_and_never_writes_it(
    nodes: dict[str, Node], requested: GpuRequest
) -> None:
    snapshot = snapshot_of(nodes, models=fleet.MODELS)
    pool = snapshot.pools[GPU]
    columns = [
        value
        for part in (snapshot.telemetry, pool.batch, pool.batch.telemetry)
        for value in (getattr(part, each.name) for each in fields(part))
        if isinstance(value, np.ndarray)
    ]
    assert len(columns) > 20
    for column in columns:
        column.flags.writeable = False

    decide(snapshot, requested, tuple(nodes), Policy(), overlays={})
