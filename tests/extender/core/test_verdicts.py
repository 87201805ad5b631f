"""Reasons of a node's verdict."""

from collections import Counter
from typing import Any

import pytest

from extender.core.decision.evaluation import EvaluationInputs
from extender.core.decision.filtering import Rejection
from extender.core.decision.health import Sign, _encode
from extender.core.decision.verdicts import (
    SHOWN_STATES,
    STATES,
    NodeVerdict,
    _device_states,
    count_states,
    explain,
    gather,
    scores_of,
    shown_codes,
    state_codes,
)
from extender.core.nodes.seen_requests import NONE_SEEN, RequestKind, SeenRequests
from extender.core.policy import Policy, Strategy
from extender.core.request.request import GpuRequest
from testkit.builders import (
    GIB,
    GPU,
    Gpu,
    Node,
    assessment_of,
    batch_of,
    busy,
    decide_on,
    device_request,
    freed,
    gpu,
    node,
    request,
    shared,
    snapshot_of,
    unknown,
)

SIBLING = int(_encode(Sign.SIBLING, 0))
"""Cause of a device that another device of its node excludes."""


def verdict_on(described: Node, **requested: Any) -> NodeVerdict:
    return verdict_of(described, request(**requested), NONE_SEEN)


def verdict_of(described: Node, about: GpuRequest, seen: SeenRequests) -> NodeVerdict:
    snapshot = snapshot_of({"node": described}, models=("", "nvidia h100"), seen=seen)
    inputs = EvaluationInputs(
        request=about,
        devices=device_request(about.count, float(about.memory_bytes or 0)),
        policy=Policy(),
        overlay={},
    )
    (verdict,) = explain(gather(snapshot, snapshot.pools[GPU], inputs, ["node"]))
    return verdict


@pytest.mark.parametrize(
    ("device", "state"),
    [
        (gpu(), "idle"),
        (busy(), "busy"),
        (busy(freshness=0.5, memory_freshness=0.5), "busy"),
        (unknown(), "unknown"),
        (gpu(freshness=0.9), "unknown"),
        (gpu(is_foreign=True), "foreign"),
        (gpu(is_foreign=True, is_excluded=True), "unhealthy"),
        (gpu(is_excluded=True, cause=SIBLING), "excluded"),
        (busy(is_excluded=True, is_foreign=True, cause=SIBLING), "excluded"),
        (gpu(is_excluded_multi=True), "idle"),
    ],
)
def test_each_device_has_its_state_in_words(device: Gpu, state: str) -> None:
    described = node(device)

    assert _device_states(batch_of(described), assessment_of(described)) == [[state]]


@pytest.mark.parametrize(
    ("device", "state"),
    [
        (gpu(), "idle"),
        (gpu(is_excluded=True), "unhealthy"),
        (gpu(is_excluded=True, cause=SIBLING), "excluded"),
        (gpu(is_foreign=True), "foreign"),
        (gpu(is_excluded_multi=True), "idle"),
        (busy(freshness=0.5), "busy"),
        (busy(freshness=0.5, memory_freshness=0.5), "stale"),
        (busy(freshness=0.5, memory_freshness=0.5, assumed=1), "busy"),
        (gpu(freshness=0.5), "stale"),
        (gpu(memory_freshness=0.5), "stale"),
        (gpu(memory_freshness=0.0), "unknown"),
        (gpu(freshness=0.0), "unknown"),
        (unknown(), "unknown"),
    ],
)
def test_people_see_which_devices_have_old_readings(device: Gpu, state: str) -> None:
    described = node(device)

    ((code,),) = shown_codes(batch_of(described), assessment_of(described)).tolist()

    assert SHOWN_STATES[code] == state


def test_to_a_pod_with_several_devices_a_link_fault_is_ill_health() -> None:
    described = node(gpu(is_excluded_multi=True), gpu())

    assert [each.state for each in verdict_on(described, count=2).devices] == ["unhealthy", "idle"]


def test_the_record_matches_the_decision() -> None:
    described = shared(busy(used=2, assumed=1, assumed_shares=1), suspicion=0.5, model_id=1)
    decided = decide_on({"node": described}, models=("", "nvidia h100"))

    verdict = verdict_on(described)

    assert verdict.score == decided.scores[0]
    assert verdict.rejection == ""
    assert (verdict.landing, verdict.idle, verdict.needed, verdict.taken) == (1, 0, 1, 0)
    assert (verdict.suspicion, verdict.model, verdict.chance) == (0.5, "nvidia h100", 0.0)
    (device,) = verdict.devices
    assert (device.can_land, device.state, device.used, device.assumed) == (True, "busy", 2, 1)
    assert (device.utilization_ratio, device.memory_used_ratio) == (0.9, 0.7)
    assert device.free_bytes == int(16 * GIB)


def test_the_memory_left_on_a_shared_gpu_is_explained() -> None:
    described = shared(gpu(memory_used=0.25, declared_bytes=30 * GIB, others_bytes=10 * GIB))

    verdict = verdict_on(described, memory_bytes=int(50 * GIB))

    (device,) = verdict.devices
    assert verdict.rejection == Rejection.NO_MEMORY
    assert (device.memory_total_bytes, device.memory_free_bytes) == (80 * GIB, 60 * GIB)
    assert (device.declared_bytes, device.others_bytes) == (30 * GIB, 10 * GIB)
    assert device.free_bytes == 40 * GIB


@pytest.mark.parametrize("leaving", [(), (0,)])
def test_refusal_lifted_by_leaving_pods_is_not_named(leaving: tuple[int, ...]) -> None:
    described = shared(gpu(memory_used=0.9, used=1), leaving=leaving)
    requested = {"memory_bytes": int(50 * GIB), "nominated_node": "node"}

    rejection = "" if leaving else Rejection.NO_MEMORY
    assert verdict_on(described, **requested).rejection == rejection


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (freed(), "presumed to get an idle GPU, just freed"),
        (gpu(freshness=0.9, memory_freshness=0.9), "likely to get an idle GPU (95 %)"),
    ],
)
def test_only_a_gpu_that_was_freed_is_called_just_freed(device: Gpu, why: str) -> None:
    assert verdict_on(node(gpu(used=1), device)).reason == f"{why}; leaves none of 2 usable"


def test_no_idle_gpu_is_presumed_where_one_of_the_freed_ones_is_too_small() -> None:
    small = freed(memory_total_bytes=GIB, memory_free_bytes=GIB)

    verdict = verdict_on(node(freed(), small), memory_bytes=int(20 * GIB))

    assert "presumed" not in verdict.reason


@pytest.mark.parametrize("scarce", ["millicores", "host_bytes", "storage_bytes"])
def test_gpus_beyond_the_nodes_cpu_memory_or_storage_are_not_left_usable(scarce: str) -> None:
    wanted = {"millicores": 4, "host_bytes": 4, "storage_bytes": 4}
    left = {name: 16 if name == scarce else 100 for name in wanted}
    described = node(
        *[gpu()] * 8,
        free_millicores=left["millicores"],
        free_bytes=left["host_bytes"],
        free_storage_bytes=left["storage_bytes"],
    )

    # 12 of it are left, which is enough for 6 more devices like the pod's two
    assert verdict_on(described, count=2, **wanted).reason.endswith("leaves 6 of 8 usable")
    left[scarce] = 11
    described = node(
        *[gpu()] * 8,
        free_millicores=left["millicores"],
        free_bytes=left["host_bytes"],
        free_storage_bytes=left["storage_bytes"],
    )
    assert verdict_on(described, count=2, **wanted).reason.endswith("leaves 3 of 8 usable")


@pytest.mark.parametrize(
    ("seen", "clause"),
    [
        (RequestKind(2), ", makes 1 useless for recent requests"),
        (RequestKind(1), ""),
        (RequestKind(1, millicores=8000), ", takes 1 that recent requests could not use"),
    ],
)
def test_the_reason_names_devices_that_are_stranded_or_were(seen: RequestKind, clause: str) -> None:
    described = node(gpu(), gpu(), free_millicores=4000)

    verdict = verdict_of(described, request(), SeenRequests.of({seen: 1.0}))

    assert verdict.reason.endswith(f"leaves 1 of 2 usable{clause}")


def test_a_pod_takes_as_many_shared_devices_as_its_replicas_need() -> None:
    described = shared(gpu(), gpu(), gpu(), replicas=2)
    seen = SeenRequests.of({RequestKind(4): 1.0})

    verdict = verdict_of(described, request(3, strategy=Strategy.PACK), seen)

    assert verdict.reason.endswith(", makes 1 useless for recent requests")


def test_a_refusal_is_named() -> None:
    verdict = verdict_on(node(gpu(memory_total_bytes=GIB)), memory_bytes=int(20 * GIB))

    assert verdict.rejection == Rejection.GPU_TOO_SMALL


def test_unknown_values_are_reported_as_unknown() -> None:
    (device,) = verdict_on(node(unknown(memory_total_bytes=0.0))).devices

    assert (device.utilization_ratio, device.memory_used_ratio, device.free_bytes) == (None,) * 3
    assert device.freshness == 0.0


def test_devices_that_the_pod_cannot_get_are_named_too() -> None:
    devices = verdict_on(node(gpu(used=1), gpu())).devices

    assert [each.can_land for each in devices] == [False, True]


def test_no_nodes_need_no_explanation() -> None:
    snapshot = snapshot_of({"a": node()})
    inputs = EvaluationInputs(
        request=request(), devices=device_request(), policy=Policy(), overlay={}
    )
    evidence = gather(snapshot, snapshot.pools[GPU], inputs, ["unknown"])

    assert explain(evidence) == ()


def test_counts_of_states_match_the_states() -> None:
    nodes = (
        node(gpu(), busy(), unknown()),
        node(gpu(is_excluded=True), gpu(is_excluded=True, cause=SIBLING)),
        node(gpu(is_foreign=True)),
    )
    batch, assessment = batch_of(*nodes), assessment_of(*nodes)

    counted = Counter(
        state
        for states, present in zip(_device_states(batch, assessment), batch.present, strict=True)
        for state, is_there in zip(states, present, strict=True)
        if is_there
    )

    found = count_states(batch, state_codes(batch, assessment))
    assert found == dict.fromkeys(STATES, 1) == dict(counted)


@pytest.mark.parametrize("strategy", list(Strategy))
def test_scores_alone_are_those_of_the_whole_verdict(strategy: Strategy) -> None:
    nodes = {
        "idle": node(gpu(), gpu()),
        "mixed": node(gpu(utilization=0.2), busy(), suspicion=0.25),
        "late": node(gpu(freshness=0.5), unknown()),
        "penalized": node(gpu(penalty=0.5), busy()),
    }
    snapshot = snapshot_of(nodes)
    about = request(strategy=strategy)
    inputs = EvaluationInputs(
        request=about, devices=device_request(about.count, 0.0), policy=Policy(), overlay={}
    )
    evidence = gather(snapshot, snapshot.pools[GPU], inputs, list(nodes))

    scores = {one.node: one for one in scores_of(evidence)}

    for verdict in explain(evidence):
        score = scores[verdict.node]
        assert score.score == pytest.approx(verdict.score)
        assert (score.parts, score.factors) == (verdict.parts, verdict.factors)
