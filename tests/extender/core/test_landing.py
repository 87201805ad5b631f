"""Landing sets of pods."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from extender.core.decision.landing import Landing, assume, batch_after, count_freed, landing_set
from extender.core.nodes.snapshot import Batch, PoolRow, Tenant
from testkit.builders import GIB, GPU, Gpu, Node, batch_of, busy, gpu, node, shared, snapshot_of

ONE_OF_TWO = {"allocatable": 4, "withdrawn": 4}


def landing_on(described: Node, count: int = 1) -> Landing:
    return landing_set(batch_of(described), np.array([count]))


def slots(described: Node, count: int = 1) -> list[int]:
    return np.flatnonzero(landing_on(described, count).devices[0]).tolist()


def used(*replicas: int, **changes: Any) -> Node:
    return shared(*(gpu(used=count) for count in replicas), **changes)


def test_a_whole_gpu_pod_lands_on_any_free_device() -> None:
    assert slots(node(gpu(used=1), gpu(), gpu(used=1), gpu())) == [1, 3]


def test_a_pod_that_is_not_mapped_yet_takes_one_of_the_free_devices() -> None:
    landing = landing_on(node(gpu(used=1), gpu(), gpu(), taken=1))

    assert (landing.size[0], landing.taken[0], landing.needed[0]) == (2, 1, 1)


def test_any_device_may_be_landed_on_if_mapping_and_counts_disagree() -> None:
    landing = landing_on(node(gpu(used=1), gpu(), gpu(), gpu(), held=3, is_agreed=False))

    assert landing.devices[0].all()
    assert landing.taken[0] == 3


def test_device_holders_are_ignored_if_they_contradict_the_free_count() -> None:
    assert slots(node(gpu(used=1), gpu(used=1), gpu(), held=1), count=2) == [0, 1, 2]


def test_if_all_devices_seem_held_any_of_them_may_have_been_released() -> None:
    landing = landing_on(node(gpu(used=1), gpu(used=1), held=9))

    assert landing.devices[0].all()
    assert (landing.needed[0], landing.taken[0]) == (1, 2)


def test_a_pod_needs_no_more_devices_than_there_are() -> None:
    assert landing_on(node(gpu()), count=4).needed[0] == 1


@pytest.mark.parametrize(
    ("described", "count", "expected"),
    [
        pytest.param(used(3, 1, 2), 1, [1], id="distributed-takes-the-least-used"),
        pytest.param(used(1, 1, 2), 1, [0, 1], id="ties-all-count"),
        pytest.param(used(0, 3, 3), 2, [0], id="distributed-takes-the-same-twice-if-still-least"),
        pytest.param(used(0, 1, 1), 2, [0, 1, 2], id="distributed-reaches-the-next-level"),
        pytest.param(used(3, 1, 2, is_packed=True), 1, [0], id="packed-takes-the-most-used"),
        pytest.param(used(10, 4, 2, is_packed=True), 1, [1], id="packed-passes-over-full-ones"),
        pytest.param(used(9, 0, is_packed=True), 2, [0, 1], id="packed-goes-on-with-the-next"),
        pytest.param(used(4, 0, is_packed=True), 2, [0], id="packed-stays-while-there-is-room"),
        pytest.param(used(10, 10), 1, [0, 1], id="full-by-our-count-means-any"),
        pytest.param(used(0, 5, is_agreed=False), 1, [0, 1], id="disagreement-means-any"),
        pytest.param(used(2, 2, replicas=3), 9, [0, 1], id="more-than-there-is-room-for"),
    ],
)
def test_a_shared_pod_lands_where_the_device_plugins_policy_puts_it(
    described: Node, count: int, expected: list[int]
) -> None:
    assert slots(described, count) == expected


def test_whole_and_shared_nodes_stand_side_by_side() -> None:
    landing = landing_set(batch_of(node(gpu(used=1), gpu()), used(2, 1, 0)), np.array([1]))

    assert landing.devices.tolist() == [[False, True, False], [False, False, True]]


def test_each_node_has_its_own_number_of_replicas_left_to_allocate() -> None:
    batch = batch_of(used(0, 0, replicas=1), used(0, 2))

    assert landing_set(batch, np.array([4])).devices.tolist() == [[True, True], [True, True]]


def test_no_tenants_change_nothing() -> None:
    row = node().row(0)

    assert assume(row, ()) == row


def test_tenants_of_whole_devices_are_taken_from_the_free_ones() -> None:
    row = assume(node(gpu(), gpu(), gpu()).row(0), (Tenant(uid="a", count=2),))

    assert (row.held, row.taken, row.used) == (2, 2, (0, 0, 0))


@pytest.mark.parametrize(
    ("is_packed", "expected"), [(False, (2, 2)), (True, (3, 1))], ids=["distributed", "packed"]
)
def test_shared_tenants_go_where_the_policy_puts_them(
    is_packed: bool, expected: tuple[int, int]
) -> None:
    before = used(2, 0, replicas=3, is_packed=is_packed).row(0)

    row = assume(before, (Tenant(uid="a", count=1), Tenant(uid="b", count=1)))

    assert row.used == expected
    assert sum(row.assumed) == row.held - before.held == 2


def test_a_tenant_takes_its_declared_memory_else_an_even_share() -> None:
    row = assume(
        used(0).row(0),
        (Tenant(uid="a", count=1, memory_bytes=int(20 * GIB)), Tenant(uid="b", count=2)),
    )

    assert row.declared_bytes == (20 * GIB,)
    assert row.assumed_shares == (2,)


@pytest.mark.parametrize("is_packed", [False, True], ids=["distributed", "packed"])
def test_more_tenants_than_replicas_are_counted_nevertheless(is_packed: bool) -> None:
    row = assume(
        used(1, 2, replicas=2, is_packed=is_packed).row(0),
        (Tenant(uid="a", count=3), Tenant(uid="b", count=9)),
    )

    assert row.held == 15
    assert sum(row.used) == 3 + 3 + 4


def one_by_one(row: PoolRow, count: int) -> list[int]:
    """Return the replicas in use after `count` more were allocated, each by the plugin's policy."""
    in_use = list(row.used)
    for _ in range(count):
        roomy = [slot for slot, used_on in enumerate(in_use) if used_on < row.replicas]
        if row.is_packed and roomy:
            slot = max(roomy, key=lambda slot: (in_use[slot], -slot))
        else:
            slot = min(range(len(in_use)), key=lambda slot: (in_use[slot], slot))
        in_use[slot] += 1
    return in_use


@pytest.mark.parametrize("is_packed", [False, True], ids=["distributed", "packed"])
@pytest.mark.parametrize("before", [(0,), (0, 0, 0), (2, 0, 1), (4, 4, 3), (6, 1, 1)], ids=str)
def test_replicas_allocated_together_are_those_allocated_one_by_one(
    before: tuple[int, ...], is_packed: bool
) -> None:
    row = used(*before, replicas=4, is_packed=is_packed).row(0)
    for count in range(4 * len(before) + 1):
        after = assume(row, (Tenant(uid="a", count=count, memory_bytes=7),))

        assert list(after.used) == one_by_one(row, count)
        assert sum(after.declared_bytes) == 7 * count


@pytest.mark.timeout(60)  # one by one they would take minutes
@pytest.mark.parametrize("is_packed", [False, True], ids=["distributed", "packed"])
def test_a_node_that_offers_millions_of_replicas_delays_no_other(is_packed: bool) -> None:
    row = used(*[0] * 256, replicas=1_000_000, is_packed=is_packed).row(0)

    after = assume(row, (Tenant(uid="a", count=100_000_000),))

    assert sum(after.used) == 100_000_000


def out(**changes: Any) -> Gpu:
    return gpu(is_out=True, **changes)


@pytest.mark.parametrize(
    ("described", "count", "expected"),
    [
        pytest.param(shared(gpu(used=1), out(), replicas=4, **ONE_OF_TWO), 1, [0], id="shared"),
        pytest.param(
            shared(gpu(used=4), out(), replicas=4, **ONE_OF_TWO), 1, [0], id="full-by-our-count"
        ),
        pytest.param(
            shared(gpu(used=1), out(), replicas=4, **ONE_OF_TWO),
            6,
            [0, 1],
            id="no-room-for-so-many",
        ),
        pytest.param(node(gpu(), out(), allocatable=1, withdrawn=1), 1, [0], id="whole"),
        pytest.param(node(gpu(), out(), allocatable=1, withdrawn=1), 2, [0, 1], id="two-requested"),
        pytest.param(
            node(gpu(), out(), allocatable=1, withdrawn=1, is_agreed=False), 1, [0], id="not-agreed"
        ),
        pytest.param(
            node(gpu(), out(), out(), allocatable=2, withdrawn=1), 1, [0, 1, 2], id="unknown-which"
        ),
        pytest.param(node(out(), out(), allocatable=0, withdrawn=2), 1, [0, 1], id="all-of-them"),
        pytest.param(node(gpu(), out()), 1, [0, 1], id="none-is-withdrawn"),
        pytest.param(node(gpu(), out(), allocatable=1), 1, [0], id="unseen-beyond-the-count"),
        pytest.param(
            node(gpu(), out(is_excluded=True), allocatable=1), 1, [0, 1], id="broken-and-for-claims"
        ),
    ],
)
def test_no_pod_lands_on_devices_that_are_certainly_withdrawn(
    described: Node, count: int, expected: list[int]
) -> None:
    assert slots(described, count) == expected


UNMAPPED: dict[str, Any] = {"is_agreed": False, "is_presumed": True}


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        pytest.param(
            node(busy(is_in_use=True), gpu(), held=1, just_freed=1, **UNMAPPED),
            [],
            id="those-that-pods-hold-are-held",
        ),
        pytest.param(
            node(*[busy(is_in_use=True)] * 4, held=2, just_freed=1, **UNMAPPED),
            [0],
            id="no-more-than-pods-left",
        ),
        pytest.param(
            node(*[busy(is_in_use=True)] * 4, held=3, just_freed=4, **UNMAPPED),
            [0],
            id="no-more-than-pods-leave-free",
        ),
        pytest.param(
            node(
                busy(is_in_use=True),
                gpu(memory_used=0.7, is_in_use=True),
                held=1,
                just_freed=1,
                **UNMAPPED,
            ),
            [1],
            id="the-calmest-stands-for-it",
        ),
        pytest.param(
            node(*[busy(is_in_use=True)] * 2, held=1, just_freed=1), [], id="not-where-it-is-known"
        ),
    ],
)
def test_devices_in_use_that_pods_have_just_left_are_free(
    described: Node, expected: list[int]
) -> None:
    seen = count_freed(batch_of(described)).telemetry

    assert np.flatnonzero(seen.presumed[0]).tolist() == expected
    assert not (seen.is_in_use & (seen.presumed > 0)).any()
    assert not (seen.freshness * seen.presumed).any()


@pytest.mark.parametrize(("activity", "memory"), [(1.0, 0.5), (0.5, 1.0)])
def test_a_freed_device_is_presumed_idle_as_far_as_any_reading_is_fresh(
    activity: float, memory: float
) -> None:
    left = busy(is_in_use=True, freshness=activity, memory_freshness=memory)

    seen = count_freed(batch_of(node(left, just_freed=1, **UNMAPPED))).telemetry

    assert seen.presumed.tolist() == [[1.0]]


def test_free_device_not_presumed_idle_is_unknown() -> None:
    described = node(*[busy(is_in_use=True)] * 2, held=1, just_freed=1, is_agreed=False)

    seen = count_freed(batch_of(described)).telemetry

    assert (seen.presumed[0].tolist(), seen.freshness[0].tolist()) == ([0.0, 0.0], [0.0, 1.0])


def test_devices_known_to_be_withdrawn_are_not_unknown_as_well() -> None:
    known = node(gpu(), gpu(is_out=True), allocatable=1, withdrawn=1)
    unknown = node(gpu(), gpu(), gpu(is_out=True), allocatable=1, withdrawn=2)

    assert landing_on(known).unoffered.tolist() == [0]
    assert landing_on(unknown).unoffered.tolist() == [1]


# --- a node that some pods leave ------------------------------------------------------------------

HELD = busy(
    latest=0.2,
    peak=0.95,
    memory_used=0.5,
    others_bytes=45 * GIB,
    presumed=0.5,
    is_foreign=True,
    is_in_use=True,
    used=1,
)
"""Device whose pods use 40 of 80 GiB; 5 GiB more seem to be in use."""

ACTIVITY = ("utilization", "latest", "peak", "presumed", "freshness")


def left_by_pods(
    *gpus: Gpu, tenants: tuple[Tenant, ...] = (), is_presumed_idle: bool = True, **changes: Any
) -> Batch:
    """Return a node of which all pods of the first device leave, as if readings showed it."""
    snapshot = snapshot_of({"n": node(*gpus, leaving=(0,))})
    leaving = snapshot.pools[GPU].rows[0].leaving
    assert leaving is not None
    return batch_after(
        replace(leaving, **changes),
        tenants,
        snapshot.telemetry,
        np.zeros(1),
        is_presumed_idle=is_presumed_idle,
    )


def of_first(batch: Batch, *columns: str) -> list[float]:
    return [float(getattr(batch.telemetry, column)[0, 0]) for column in columns]


@pytest.mark.parametrize(
    ("how", "freshness", "is_foreign"),
    [
        ({}, 1.0, False),
        ({"is_presumed_idle": False}, 0.0, False),
        ({"active": (True, False)}, 0.0, False),
        ({"foreign": (True, False)}, 0.0, True),
    ],
    ids=["idle", "left for another pod", "active before", "foreign before"],
)
def test_a_device_that_its_pods_leave_is_as_it_was_before_them(
    how: dict[str, Any], freshness: float, *, is_foreign: bool
) -> None:
    batch = left_by_pods(HELD, HELD, **how)

    assert of_first(batch, *ACTIVITY) == [0.0, 0.0, 0.0, 0.0, freshness]
    assert of_first(batch, "is_foreign", "is_in_use") == [is_foreign, False]
    assert of_first(batch, "memory_used", "memory_free_bytes") == [5 / 80, 75 * GIB]
    assert of_first(batch, "others_bytes", "memory_freshness") == [5 * GIB, 1.0]
    assert batch.used.tolist() == [[0, 1]]
    telemetry = batch.telemetry
    other = [float(getattr(telemetry, column)[0, 1]) for column in ACTIVITY]
    assert other == [0.9, 0.2, 0.95, 0.5, 1.0]
    assert telemetry.is_foreign[0, 1]
    assert telemetry.is_in_use[0, 1]
    assert telemetry.memory_free_bytes[0, 1] == 40 * GIB


def test_readings_since_the_end_of_its_pods_show_a_devices_own_activity() -> None:
    ended = left_by_pods(HELD, ended=(True,))
    was_foreign = left_by_pods(HELD, ended=(True,), foreign=(True,))
    nothing_released = left_by_pods(HELD, ended=(True,), released_bytes=(0.0,))
    unread = left_by_pods(replace(HELD, freshness=0.0), ended=(True,))

    # memory that is released late is no foreign use, and its mean is that of the pods
    assert of_first(ended, *ACTIVITY) == [0.9, 0.2, 0.2, 0.5, 1.0]
    assert of_first(ended, "is_foreign") == [False]
    for batch in (was_foreign, nothing_released):
        assert of_first(batch, *ACTIVITY) == [0.9, 0.2, 0.95, 0.5, 1.0]
        assert of_first(batch, "is_foreign") == [True]
    assert of_first(unread, *ACTIVITY) == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_the_memory_of_leaving_pods_is_free_where_others_stay() -> None:
    some: dict[str, Any] = {
        "freed": (False,),
        "released_bytes": (10 * GIB,),
        "released_others": (4 * GIB,),
    }
    more = {**some, "released_bytes": (90 * GIB,), "released_others": (90 * GIB,)}

    batch, most = left_by_pods(HELD, **some), left_by_pods(HELD, **more)

    columns = ("memory_used", "memory_free_bytes", "others_bytes", "utilization", "is_in_use")
    assert of_first(batch, *columns) == [30 / 80, 50 * GIB, 41 * GIB, 0.9, True]
    assert of_first(most, *columns) == [0.0, 80 * GIB, 0.0, 0.9, True]


def test_the_memory_of_a_device_of_unknown_size_stays_unknown() -> None:
    batch = left_by_pods(replace(HELD, memory_total_bytes=0.0))

    assert of_first(batch, "memory_used", "memory_freshness") == [0.0, 0.0]


def test_tentative_pods_follow_those_that_leave() -> None:
    batch = left_by_pods(HELD, HELD, tenants=(Tenant(uid="t", count=1),))

    assert batch.held.tolist() == [2]


@pytest.mark.parametrize(
    ("count", "placed", "after"),
    [
        pytest.param(2, (0, 0, 2), (0, 1, 2), id="all"),
        pytest.param(3, (0, 0, 2), (1, 1, 2), id="the-others-by-the-policy"),
        pytest.param(1, (0, 0, 2), (1, 1, 0), id="more-than-it-has"),
        pytest.param(2, (0, 2, 0), (1, 1, 1), id="more-than-the-device-has-left"),
    ],
)
def test_replicas_stay_where_they_were_assumed_if_there_is_room(
    count: int, placed: tuple[int, ...], after: tuple[int, ...]
) -> None:
    tenant = Tenant(uid="a", count=count, placed=placed)

    assert assume(used(0, 1, 0, replicas=2).row(0), (tenant,)).used == after
