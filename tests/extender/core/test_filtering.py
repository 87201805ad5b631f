"""Feasible nodes, and the reasons against the others."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from extender.core.decision.evaluation import EvaluationInputs, device_requests, evaluate_after
from extender.core.decision.filtering import Code, Rejection
from extender.core.policy import Policy
from testkit.builders import (
    GIB,
    GPU,
    Node,
    busy,
    decide_on,
    freed,
    gpu,
    node,
    rejected,
    request,
    shared,
    snapshot_of,
    unknown,
)

DEAD = gpu(is_excluded=True)
FOREIGN = gpu(is_foreign=True, is_in_use=True)
ROOM_FOR_20 = {"memory_bytes": int(20 * GIB)}


def verdict(described: Node, count: int = 1, **requested: Any) -> Code:
    decision = decide_on({"node": described}, request(count, **requested))
    return Code(rejected(decision).get("node", 0))


def test_a_healthy_idle_node_passes() -> None:
    assert verdict(node()) is Code.PASSES


@pytest.mark.parametrize(
    "described",
    [node(busy()), node(unknown()), shared(busy(used=9)), node(gpu(penalty=1.0), suspicion=1.0)],
    ids=["busy", "unknown", "shared-and-busy", "under-suspicion"],
)
def test_load_and_uncertainty_alone_refuse_no_node(described: Node) -> None:
    assert verdict(described) is Code.PASSES


@pytest.mark.parametrize(
    ("described", "count", "expected"),
    [
        pytest.param(node(DEAD), 1, Code.UNHEALTHY, id="dead"),
        pytest.param(node(DEAD, gpu()), 1, Code.PASSES, id="one-works"),
        pytest.param(node(DEAD, gpu()), 2, Code.UNHEALTHY, id="too-few-work"),
        pytest.param(node(gpu(used=1), DEAD), 1, Code.UNHEALTHY, id="the-free-one-is-dead"),
        pytest.param(node(FOREIGN), 1, Code.FOREIGN_USE, id="foreign"),
        pytest.param(node(FOREIGN, gpu()), 1, Code.PASSES, id="one-is-clean"),
        pytest.param(node(FOREIGN, gpu()), 2, Code.FOREIGN_USE, id="too-few-are-clean"),
        pytest.param(node(DEAD, FOREIGN), 1, Code.FOREIGN_USE, id="working-but-foreign"),
        pytest.param(shared(DEAD, gpu(used=3)), 1, Code.UNHEALTHY, id="shared-lands-on-the-dead"),
        pytest.param(node(is_reconfiguring=True), 1, Code.RECONFIGURING, id="reconfiguring"),
        pytest.param(node(DEAD, is_reconfiguring=True), 1, Code.RECONFIGURING, id="that-above-all"),
    ],
)
def test_too_few_working_or_clean_devices_refuse_a_node(
    described: Node, count: int, expected: Code
) -> None:
    assert verdict(described, count) is expected


def in_use(count: int, of: int, held: int, **changes: Any) -> Node:
    """Return a node whose devices are held, without a source that reports by which pods."""
    devices = [gpu(is_in_use=index < count) for index in range(of)]
    return node(*devices, held=held, is_agreed=False, **changes)


@pytest.mark.parametrize(
    ("described", "count", "expected"),
    [
        pytest.param(in_use(2, of=4, held=2), 2, Code.PASSES, id="as-many-in-use-as-held"),
        pytest.param(in_use(3, of=4, held=2), 1, Code.PASSES, id="one-foreign-one-left"),
        pytest.param(in_use(3, of=4, held=2), 2, Code.FOREIGN_USE, id="one-foreign-two-requested"),
        pytest.param(in_use(3, of=4, held=2), 3, Code.FOREIGN_USE, id="more-than-are-left"),
        pytest.param(in_use(4, of=4, held=4), 1, Code.PASSES, id="full-by-our-count-is-late"),
    ],
)
def test_more_devices_in_use_than_held_are_foreign_whichever_they_are(
    described: Node, count: int, expected: Code
) -> None:
    assert verdict(described, count) is expected


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        pytest.param(shared(gpu(memory_free_bytes=10 * GIB)), Code.NO_MEMORY, id="time-sliced"),
        pytest.param(
            shared(gpu(memory_free_bytes=10 * GIB), unknown(used=5)),
            Code.NO_MEMORY,
            id="time-sliced-lands-on-the-full-one",
        ),
        pytest.param(
            shared(gpu(used=1), gpu(memory_free_bytes=10 * GIB, used=1)),
            Code.PASSES,
            id="one-of-those-it-may-land-on-has-room",
        ),
        pytest.param(
            shared(gpu(assumed=1, declared_bytes=70 * GIB)),
            Code.NO_MEMORY,
            id="assumed-pods-fill-it",
        ),
        pytest.param(
            shared(gpu(used=2, assumed=2, assumed_shares=2), replicas=2),
            Code.PASSES,
            id="an-assumed-pod-that-is-gone-by-count-takes-its-memory-along",
        ),
        pytest.param(
            shared(gpu(used=2, assumed=1, memory_free_bytes=10 * GIB), replicas=2),
            Code.NO_MEMORY,
            id="what-is-measured-is-there-whatever-the-count-says",
        ),
        pytest.param(shared(unknown()), Code.PASSES, id="unknown"),
        pytest.param(
            shared(gpu(memory_free_bytes=10 * GIB), replicas=4, is_mps=True),
            Code.PASSES,
            id="an-mps-share-has-20",
        ),
        pytest.param(
            shared(gpu(), replicas=5, is_mps=True), Code.GPU_TOO_SMALL, id="an-mps-share-has-16"
        ),
        pytest.param(
            node(gpu(memory_total_bytes=16 * GIB)), Code.GPU_TOO_SMALL, id="a-card-too-small"
        ),
        pytest.param(
            shared(unknown(memory_total_bytes=16 * GIB)),
            Code.GPU_TOO_SMALL,
            id="a-card-too-small-by-its-label",
        ),
        pytest.param(
            node(gpu(memory_free_bytes=10 * GIB), gpu()),
            Code.PASSES,
            id="another-whole-one-has-room",
        ),
        pytest.param(node(gpu(memory_free_bytes=10 * GIB)), Code.NO_MEMORY, id="whole"),
        pytest.param(
            node(gpu(memory_free_bytes=10 * GIB), held=1, is_agreed=False),
            Code.PASSES,
            id="a-tenant-that-leaves-takes-its-memory-along",
        ),
    ],
)
def test_a_pod_with_a_memory_request_gets_the_memory_or_another_node(
    described: Node, expected: Code
) -> None:
    assert verdict(described, **ROOM_FOR_20) is expected


def test_each_whole_gpu_of_a_pod_must_have_the_room() -> None:
    full = gpu(memory_free_bytes=10 * GIB)
    late = node(full, full, full, gpu(), held=2, is_agreed=False)

    assert verdict(node(full, gpu()), 2, **ROOM_FOR_20) is Code.NO_MEMORY
    assert verdict(late, 2, **ROOM_FOR_20) is Code.NO_MEMORY
    assert verdict(late, 3, **ROOM_FOR_20) is Code.NO_MEMORY, "one of three is being released"
    assert verdict(late, 4, **ROOM_FOR_20) is Code.NO_MEMORY


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        pytest.param(node(gpu()), Code.PASSES, id="idle"),
        pytest.param(node(gpu(), busy(used=1)), Code.PASSES, id="the-only-one-to-get"),
        pytest.param(node(gpu(), busy()), Code.NOT_IDLE, id="the-busy-one-may-be-handed-out"),
        pytest.param(node(gpu(), gpu(is_excluded=True)), Code.NOT_IDLE, id="so-may-a-broken-one"),
        pytest.param(
            node(gpu(), gpu(is_excluded=True), allocatable=1, withdrawn=1),
            Code.PASSES,
            id="not-one-that-the-kubelet-withdrew",
        ),
        pytest.param(node(freed()), Code.NOT_IDLE, id="just-freed"),
        pytest.param(node(busy()), Code.NOT_IDLE, id="busy"),
        pytest.param(node(unknown()), Code.NOT_IDLE, id="unknown"),
        pytest.param(node(gpu(freshness=0.9)), Code.NOT_IDLE, id="stale"),
        pytest.param(node(gpu(memory_freshness=0.0)), Code.NOT_IDLE, id="memory-unknown"),
        pytest.param(node(gpu(), busy(), taken=1), Code.NOT_IDLE, id="the-idle-one-may-be-held"),
        pytest.param(shared(gpu(assumed=3)), Code.NOT_IDLE, id="assumed-pods-will-use-it"),
    ],
)
def test_idle_requirement_passes_only_nodes_known_idle(described: Node, expected: Code) -> None:
    assert verdict(described, requires_idle=True) is expected


def test_a_node_that_we_do_not_know_passes_unless_the_pod_requires_idle() -> None:
    for requires_idle, expected in ((False, {}), (True, {"new": Code.NOT_IDLE})):
        requested = request(requires_idle=requires_idle)

        assert rejected(decide_on({"a": node()}, requested, candidates=("new",))) == expected


LEAVES: dict[str, Any] = {"leaving": (0,)}


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        pytest.param(
            shared(gpu(memory_used=0.9, used=1), **LEAVES), Code.PASSES, id="their-memory"
        ),
        pytest.param(
            shared(gpu(used=2, declared_bytes=70 * GIB), **LEAVES),
            Code.PASSES,
            id="what-they-declared",
        ),
        pytest.param(node(busy(used=1), **LEAVES), Code.PASSES, id="their-load"),
        pytest.param(
            node(gpu(is_foreign=True, is_in_use=True, used=1), **LEAVES),
            Code.PASSES,
            id="use-that-no-pod-accounts-for-any-more",
        ),
        pytest.param(
            node(busy(is_in_use=True, used=1, was_foreign=True), **LEAVES),
            Code.FOREIGN_USE,
            id="but-not-foreign-use-from-before-they-came",
        ),
        pytest.param(
            shared(busy(memory_used=0.1, used=1, was_foreign=True), **LEAVES),
            Code.NOT_IDLE,
            id="nor-such-use-of-a-shared-gpu",
        ),
        pytest.param(
            node(gpu(is_excluded=True, used=1), **LEAVES),
            Code.UNHEALTHY,
            id="but-a-dead-gpu-stays-dead",
        ),
        pytest.param(
            node(gpu(memory_total_bytes=16 * GIB, used=1), **LEAVES),
            Code.GPU_TOO_SMALL,
            id="and-a-small-one-small",
        ),
        pytest.param(
            shared(gpu(memory_used=0.9, used=1), busy(used=1), replicas=1, leaving=(1,)),
            Code.PASSES,
            id="on-the-device-that-they-leave",
        ),
        pytest.param(
            shared(gpu(memory_used=0.9, used=1), busy(used=1), leaving=(1,)),
            Code.NOT_IDLE,
            id="but-not-while-it-could-get-a-share-of-the-other",
        ),
        pytest.param(
            node(gpu(), gpu(used=1), leaving=(1,)),
            Code.PASSES,
            id="where-they-make-each-idle-that-the-pod-could-get",
        ),
        pytest.param(
            node(busy(), gpu(used=1), leaving=(1,)),
            Code.NOT_IDLE,
            id="but-not-where-it-could-get-a-busy-one",
        ),
    ],
)
def test_devices_of_leaving_pods_count_for_the_nominated_pod(
    described: Node, expected: Code
) -> None:
    requested: dict[str, Any] = {**ROOM_FOR_20, "requires_idle": True, "nominated_node": "node"}

    assert verdict(described, **requested) is expected


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        pytest.param(shared(gpu(memory_free_bytes=10 * GIB)), Code.NO_MEMORY, id="memory"),
        pytest.param(node(busy(memory_used=0.5)), Code.NOT_IDLE, id="load"),
        pytest.param(node(FOREIGN), Code.FOREIGN_USE, id="foreign-use"),
        pytest.param(node(DEAD), Code.UNHEALTHY, id="health"),
        pytest.param(
            node(FOREIGN, gpu(used=1), leaving=(1,)),
            Code.FOREIGN_USE,
            id="two-requested-and-one-leaves",
        ),
    ],
)
def test_a_nomination_where_no_pod_leaves_enough_is_no_pass(
    described: Node, expected: Code
) -> None:
    count = len(described.gpus)
    requested: dict[str, Any] = {**ROOM_FOR_20, "requires_idle": True, "nominated_node": "node"}

    assert verdict(described, count, **requested) is expected


def test_leaving_pods_free_no_device_that_telemetry_does_not_know_yet() -> None:
    described = {"node": node(busy(used=1), busy(used=1), leaving=(0, 1))}
    snapshot = snapshot_of(described)
    older = replace(snapshot, telemetry=snapshot.telemetry.take(np.array([0])))
    ((_, devices),) = device_requests(request())
    inputs = EvaluationInputs(request=request(), devices=devices, policy=Policy(), overlay={})

    assert evaluate_after(snapshot, snapshot.pools[GPU], 0, inputs) is not None
    assert evaluate_after(older, older.pools[GPU], 0, inputs) is None


def test_only_memory_comes_free_by_preemption() -> None:
    assert [each for each in Rejection if each.is_resolvable] == [Rejection.NO_MEMORY]


def test_each_code_has_its_rejection_and_its_text() -> None:
    assert [*Code] == list(range(len(Code)))
    assert [code.rejection for code in Code] == [None, *Rejection]
    assert [code.text for code in Code] == ["", *(str(each) for each in Rejection)]
    assert all(text.startswith("node(s) ") for text in map(str, Rejection))
