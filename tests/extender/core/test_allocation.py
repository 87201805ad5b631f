"""Pods that hold the devices behind a resource."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import NO_LIMIT
from extender.core.policy import Assumed, SharedPolicy
from testkit.builders import GIB, GPU, NOW
from tests.extender.core.holding import TENANCY, WARM_UP, pod, row_of, young

UNMAPPED = replace(TENANCY, is_mapped=False)


def test_mapped_pods_hold_their_devices() -> None:
    row = row_of([("a",), (), ("b",), ("b",)], pod("a"), pod("b", 2))

    assert (row.used, row.held, row.taken, row.is_agreed) == ((1, 0, 1, 1), 3, 0, True)


def test_unmapped_young_pod_takes_a_free_device() -> None:
    row = row_of([("a",), (), ()], pod("a"), young("b"))

    assert (row.used, row.held, row.taken, row.is_agreed) == ((1, 0, 0), 2, 1, True)


def test_partly_mapped_young_pod_takes_its_devices() -> None:
    row = row_of([("a",), (), ()], young("a", 2))

    assert (row.used, row.held, row.taken, row.is_agreed) == ((1, 0, 0), 2, 1, True)


@pytest.mark.parametrize(
    ("shown", "pods"),
    [
        pytest.param([(), ()], [pod("a")], id="an-old-pod-is-not-shown"),
        pytest.param([("a",), ("a",)], [pod("a")], id="on-more-devices-than-requested"),
        pytest.param([("a",), (), ()], [pod("a", 2)], id="on-fewer"),
        pytest.param([("a", "b"), ()], [pod("a"), pod("b")], id="two-pods-on-a-whole-device"),
    ],
)
def test_a_mapping_that_contradicts_the_counts_is_noticed(
    shown: list[tuple[str, ...]], pods: list[PodRecord]
) -> None:
    row = row_of(shown, *pods)

    assert not row.is_agreed
    assert row.held == sum(each.resources[GPU] for each in pods)


def test_without_any_mapping_nothing_is_agreed_where_pods_hold_devices() -> None:
    assert row_of(2, tenancy=UNMAPPED).is_agreed
    assert not row_of(2, young("a"), tenancy=UNMAPPED).is_agreed


@pytest.mark.parametrize(("lasting", "is_agreed"), [({}, True), ({GPU: 1}, False)])
def test_a_pod_is_shown_unless_only_its_init_containers_requested_devices(
    lasting: dict[str, int], is_agreed: bool
) -> None:
    row = row_of(2, pod("a", 2, lasting=lasting))

    assert (row.held, row.is_agreed) == (2, is_agreed)


@pytest.mark.parametrize(
    ("out", "allocatable", "used"),
    [
        pytest.param([True, False], 10, (0, 1), id="withdrawn"),
        pytest.param([True, False], 20, (1, 0), id="offered-although-out"),
        pytest.param([True, True], 10, (1, 0), id="unknown-which"),
    ],
)
def test_an_unseen_pod_is_on_a_shared_device_that_the_kubelet_may_offer(
    out: list[bool], allocatable: int, used: tuple[int, ...]
) -> None:
    tenancy = replace(TENANCY, is_out=np.array(out))

    row = row_of(2, young("a"), replicas=10, tenancy=tenancy, allocatable=allocatable)

    assert row.used == used


def test_a_pod_that_has_ended_or_is_of_no_concern_is_not_counted() -> None:
    row = row_of([("gone",), ()], pod("other", 0))

    assert (row.used, row.held, row.is_agreed) == ((0, 0), 0, True)


def test_more_holders_than_replicas_contradict_the_mapping() -> None:
    names = tuple("abcd")

    row = row_of([names], *(pod(name) for name in names), replicas=3)

    assert (row.used, row.held, row.is_agreed) == ((3,), 4, False)


def test_replicas_that_the_mapping_shows_on_fewer_devices_are_on_those() -> None:
    row = row_of([("a", "b"), ("a",)], pod("a", 3), pod("b"), replicas=10)

    assert (row.used, row.held, row.is_agreed) == ((3, 1), 4, True)
    assert row.undeclared == (3, 1)


def test_unseen_pods_are_allocated_by_the_sharing_policy_oldest_first() -> None:
    packed = replace(TENANCY, shared_policy=SharedPolicy.PACKED)
    pods = [young("b", memory_bytes=int(GIB)), young("a", bound_at=NOW - 9)]

    assert row_of(2, *pods, replicas=10).used == (1, 1)
    assert row_of(2, *pods, replicas=10, tenancy=packed).used == (2, 0)
    assert row_of(2, *pods, replicas=10).declared_bytes == (0.0, GIB)
    assert row_of(2, *pods, replicas=10).undeclared == (1, 0)


@pytest.mark.parametrize("shown", [[("a",)], [()]], ids=["mapped", "unmapped"])
def test_load_is_assumed_until_readings_after_the_warm_up(shown: list[tuple[str, ...]]) -> None:
    started = pod("a", started_at=NOW, memory_bytes=int(20 * GIB))

    late = row_of(shown, started, replicas=10, measured_at=NOW + WARM_UP - 1)
    covered = row_of(shown, started, replicas=10, measured_at=NOW + WARM_UP)

    assert (late.used, late.assumed, late.declared_bytes) == ((1,), (1,), (20 * GIB,))
    assert (covered.used, covered.assumed, covered.declared_bytes) == ((1,), (0,), (20 * GIB,))


@pytest.mark.parametrize(
    ("changes", "measured_at"), [({"started_at": None}, NOW), ({}, None)], ids=["waits", "unread"]
)
def test_pod_stays_assumed_until_started_and_read(
    changes: dict[str, Any], measured_at: float | None
) -> None:
    row = row_of([("a",)], pod("a", **changes), replicas=10, measured_at=measured_at)

    assert (row.assumed, row.assumed_shares) == ((1,), (1,))


@pytest.mark.parametrize("shown", [[("a",)], [()]], ids=["mapped", "unmapped"])
def test_memory_of_similar_pods_is_estimated_once_for_all_shares_until_measured(
    shown: list[tuple[str, ...]],
) -> None:
    tenancy = replace(TENANCY, expected=lambda _: int(6 * GIB))
    started = pod("a", 2, started_at=NOW)

    late = row_of(shown, started, replicas=10, tenancy=tenancy, measured_at=NOW)
    read = row_of(shown, started, replicas=10, tenancy=tenancy, measured_at=NOW + WARM_UP)

    assert (late.guessed_bytes, late.assumed_shares) == ((6 * GIB,), (0,))
    assert (read.guessed_bytes, read.assumed_shares) == ((0.0,), (0,))


@pytest.mark.parametrize("shown", [[("a",), ()], [(), ()]], ids=["mapped", "unmapped"])
@pytest.mark.parametrize(("seconds", "loading"), [(60.0, 0), (300.0, 1), (900.0, 0)])
def test_tenant_is_loading_between_its_warm_up_and_the_limit(
    shown: list[tuple[str, ...]], seconds: float, loading: int
) -> None:
    tenancy = replace(TENANCY, assumed=Assumed(warm_up_seconds=WARM_UP, loading_seconds=900.0))
    started = pod("a", started_at=NOW)

    row = row_of(shown, started, replicas=10, tenancy=tenancy, measured_at=NOW + seconds)

    assert sum(row.loading) == loading
    assert sum(row.assumed) == (seconds < WARM_UP)


def test_devices_that_the_kubelet_does_not_offer_are_withdrawn() -> None:
    assert [row_of(8, allocatable=count).withdrawn for count in (7, 8, 9)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (None, (NO_LIMIT, NO_LIMIT, NO_LIMIT)),
        (HostResources(5, 6, 7), (5, 6, 7)),
        (HostResources(-5, -6, -7), (0, 0, 0)),
    ],
)
def test_room_of_the_node_is_never_negative(
    free: HostResources | None, expected: tuple[int, ...]
) -> None:
    row = row_of(1, free=free)

    assert (row.free_millicores, row.free_bytes, row.free_storage_bytes) == expected
    assert row.zone_id == 0


@pytest.mark.parametrize("read_at", [(NOW + WARM_UP, NOW), (NOW, NOW + WARM_UP)])
def test_pod_may_be_on_a_device_whose_reading_is_older(read_at: tuple[float, ...]) -> None:
    started = pod("a", started_at=NOW)
    row = row_of(2, started, replicas=10, measured_at=read_at)

    assert (row.used, row.assumed, row.is_agreed) == ((1, 0), (1, 0), True)
