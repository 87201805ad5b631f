"""Assessment of the landing devices for a pod."""

from typing import Any

import pytest

from extender.core.policy import Policy, Thresholds
from testkit.builders import (
    GIB,
    Gpu,
    Node,
    assessment_of,
    batch_of,
    busy,
    device_request,
    gpu,
    node,
    shared,
    unknown,
)


def chance_of(device: Gpu, **how: Any) -> float:
    return float(assessment_of(shared(device), **how).idle_chance[0, 0])


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        pytest.param(gpu(utilization=0.29, memory_used=0.49), 1.0, id="below-both-thresholds"),
        pytest.param(gpu(utilization=0.30), 0.0, id="as-busy-as-the-threshold"),
        pytest.param(gpu(memory_used=0.50), 0.0, id="as-full-as-the-threshold"),
        pytest.param(gpu(latest=0.9), 0.0, id="calm-over-the-window-and-busy-now"),
        pytest.param(gpu(utilization=0.9, latest=0.0), 0.0, id="busy-over-the-window"),
        pytest.param(unknown(), 0.5, id="nothing-known"),
        pytest.param(gpu(memory_freshness=0), 0.5, id="calm-and-memory-unknown"),
        pytest.param(gpu(freshness=0), 0.5, id="roomy-and-activity-unknown"),
        pytest.param(unknown(freshness=1, utilization=0.9), 0.0, id="busy-and-memory-unknown"),
        pytest.param(
            unknown(memory_freshness=1, memory_used=0.9), 0.0, id="full-and-activity-unknown"
        ),
        pytest.param(gpu(freshness=0.5, memory_freshness=0.5), 0.75, id="stale-good-news-fade"),
        pytest.param(busy(freshness=0.5, memory_freshness=0.5), 0.25, id="stale-bad-news-fade"),
    ],
)
def test_idle_takes_both_signals_and_busy_takes_one(device: Gpu, expected: float) -> None:
    assert chance_of(device) == expected


def test_a_stale_device_is_never_known_to_be_idle() -> None:
    assert not assessment_of(node(gpu(freshness=0.999))).is_idle.any()


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        pytest.param(gpu(assumed=2), 1.0, id="two-of-a-tenth-each-leave-it-idle"),
        pytest.param(gpu(assumed=3), 0.0, id="three-do-not"),
        pytest.param(unknown(assumed=3), 0.0, id="nor-where-nothing-else-is-known"),
        pytest.param(unknown(assumed=1), 0.5, id="one-leaves-the-unknown-unknown"),
        pytest.param(gpu(assumed=1, declared_bytes=41 * GIB), 0.0, id="room-that-it-said-it-takes"),
        pytest.param(unknown(assumed=6, assumed_shares=6), 0.0, id="even-shares"),
        pytest.param(
            gpu(utilization=0.25, freshness=0.02, memory_freshness=0.02, assumed=1),
            0.49,
            id="an-assumed-pod-does-not-refresh-stale-bad-news",
        ),
    ],
)
def test_assumed_tenants_count_as_load(device: Gpu, expected: float) -> None:
    assert chance_of(device) == pytest.approx(expected)


def test_pods_own_thresholds_decide_idleness() -> None:
    own = device_request(thresholds=Thresholds(utilization=0.8, memory=0.8))

    assert chance_of(gpu(utilization=0.7, memory_used=0.7), requested=own) == 1.0


@pytest.mark.parametrize("utilization", [0.0, 1.0])
def test_stale_load_fades_towards_the_threshold_from_both_sides(utilization: float) -> None:
    estimated = [
        float(assessment_of(node(gpu(utilization=utilization, freshness=fresh))).utilization[0, 0])
        for fresh in (1.0, 0.5, 0.0)
    ]

    assert estimated == pytest.approx([utilization, (utilization + 0.3) / 2, 0.3])


def test_stale_memory_fades_towards_the_threshold() -> None:
    stale = gpu(memory_used=0.9, memory_freshness=0.5)

    assert float(assessment_of(node(stale)).headroom[0, 0]) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("described", "expected_gib"),
    [
        pytest.param(node(gpu(memory_used=0.75)), 20, id="what-is-free"),
        pytest.param(
            shared(gpu(assumed=1, declared_bytes=30 * GIB)), 50, id="less-what-assumed-pods-take"
        ),
        pytest.param(shared(gpu(assumed=1, assumed_shares=1)), 72, id="an-even-share-at-least"),
        pytest.param(node(unknown()), 80, id="unknown-is-bounded-by-the-size"),
        pytest.param(shared(unknown(declared_bytes=90 * GIB)), 0, id="never-negative"),
        pytest.param(shared(gpu(memory_used=0.9), is_mps=True), 8, id="mps-shares-have-their-cap"),
        pytest.param(
            node(gpu(memory_used=0.9, used=1), held=1), 80, id="a-held-gpu-comes-back-empty"
        ),
    ],
)
def test_the_room_for_a_pod(described: Node, expected_gib: float) -> None:
    assessment = assessment_of(described)

    assert float(assessment.free_bytes[0, 0]) == pytest.approx(expected_gib * GIB)


def test_the_room_of_a_device_of_unknown_size_is_unknown() -> None:
    nowhere_said = unknown(memory_total_bytes=0.0)

    for described in (node(nowhere_said), shared(nowhere_said, is_mps=True)):
        assert assessment_of(described).free_bytes[0, 0] == float("inf")


def test_a_setting_overrides_the_memory_of_an_mps_share() -> None:
    policy = Policy(mps_share_bytes=int(5 * GIB))

    assert assessment_of(shared(is_mps=True), policy=policy).free_bytes[0, 0] == 5 * GIB


@pytest.mark.parametrize(
    ("size_gib", "room_gib"),
    [pytest.param(0, 30, id="size-unknown"), pytest.param(24, 24, id="no-more-than-the-device")],
)
def test_a_cap_that_is_set_is_known_and_no_more_than_the_device_has(
    size_gib: int, room_gib: int
) -> None:
    policy = Policy(mps_share_bytes=int(30 * GIB))
    described = shared(unknown(memory_total_bytes=size_gib * GIB), is_mps=True)

    assert assessment_of(described, policy=policy).full_bytes[0, 0] == room_gib * GIB


@pytest.mark.parametrize(
    ("devices", "taken", "count", "expected"),
    [
        pytest.param((gpu(), gpu(), busy(), busy()), 0, 1, 1 / 2, id="one-of-four"),
        pytest.param((gpu(), gpu(), busy(), busy()), 0, 2, 1 / 6, id="two-of-four"),
        pytest.param((gpu(), busy()), 0, 2, 0.0, id="too-few"),
        pytest.param((gpu(), gpu(), gpu()), 2, 1, 1.0, id="all-are-good-held-or-not"),
        pytest.param((gpu(), gpu(), busy(), busy()), 2, 1, 1 / 2, id="held-ones-change-no-odds"),
    ],
)
def test_the_chance_is_that_of_drawing_only_suitable_devices(
    devices: tuple[Gpu, ...], taken: int, count: int, expected: float
) -> None:
    assessment = assessment_of(node(*devices, taken=taken), requested=device_request(count))

    assert float(assessment.chance[0]) == pytest.approx(expected)


def test_the_chance_is_less_where_use_alone_shows_which_devices_are_held() -> None:
    described = node(gpu(), busy(is_in_use=True), held=1, is_agreed=False)

    assessment = assessment_of(described)

    assert assessment.landing.devices.tolist() == [[True, False]]
    assert assessment.chance.tolist() == assessment.landing.certainty.tolist()
    assert 0.5 < assessment.chance[0] < 1


def test_a_broken_device_that_the_kubelet_withdrew_cannot_be_drawn() -> None:
    dead = gpu(is_excluded=True)

    offered = assessment_of(node(gpu(), dead))
    withdrawn = assessment_of(node(gpu(), dead, allocatable=1, withdrawn=1))

    assert (float(offered.chance[0]), float(withdrawn.chance[0])) == (0.5, 1.0)


def test_devices_that_held_ones_may_be_among_are_not_counted_as_idle() -> None:
    assert assessment_of(node(gpu(), gpu(), gpu(), taken=2)).idle[0] == 1


def test_a_link_fault_matters_to_pods_with_several_devices_only() -> None:
    faulty = node(gpu(is_excluded_multi=True), gpu(is_excluded_multi=True))

    assert assessment_of(faulty, requested=device_request(1)).works.all()
    assert not assessment_of(faulty, requested=device_request(2)).works.any()


def test_a_batch_of_nothing_is_assessed() -> None:
    assert len(batch_of()) == 0
    assert assessment_of().chance.tolist() == []
