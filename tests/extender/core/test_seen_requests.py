"""Table of the pods' requests."""

import pytest

from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.seen_requests import (
    _HALF_LIFE,
    _LEAST,
    _MAX_KINDS,
    _MAX_RESOURCES,
    RequestKind,
    RequestTable,
    SeenRequests,
)
from testkit.builders import GPU

ONE, EIGHT = RequestKind(1), RequestKind(8)


def table_of(*counts: tuple[RequestKind, int]) -> RequestTable:
    """Return a table that has seen each request this many times."""
    table = RequestTable()
    for kind, times in counts:
        for _ in range(times):
            table.add(GPU, kind)
    return table


def test_a_pod_counts_with_its_devices_cpu_memory_and_models() -> None:
    table = RequestTable()
    for _ in range(int(_LEAST) + 1):
        table.note(
            PodRecord(
                uid="1",
                namespace="team",
                name="pod",
                resources={GPU: 2},
                memory_bytes=5,
                host=HostResources(4000, 7),
            ),
            ("h100",),
        )

    assert table.publish()[GPU].kinds == (RequestKind(2, 5, 4000, 7, ("h100",)),)


def test_few_requests_do_not_count() -> None:
    assert not table_of((ONE, int(_LEAST) - 1)).publish()


def test_requests_count_by_their_share() -> None:
    seen = table_of((ONE, 30), (EIGHT, 10)).publish()[GPU]

    assert dict(zip(seen.kinds, seen.shares, strict=True)) == {
        ONE: pytest.approx(0.75, abs=0.02),
        EIGHT: pytest.approx(0.25, abs=0.02),
    }


def test_a_small_change_publishes_nothing_new() -> None:
    table = table_of((ONE, 100))
    before = table.publish()[GPU]

    for _ in range(5):
        table.add(GPU, EIGHT)

    assert table.publish()[GPU] is before


def test_a_large_change_is_published() -> None:
    table = table_of((ONE, 100))
    table.publish()

    for _ in range(50):
        table.add(GPU, EIGHT)

    assert EIGHT in table.publish()[GPU].kinds


def test_cleared_requests_no_longer_count() -> None:
    table = table_of((EIGHT, 100))
    assert table.publish()

    table.clear()

    assert not table.publish()


def test_old_requests_fade() -> None:
    seen = table_of((EIGHT, 1000), (ONE, int(3 * _HALF_LIFE))).publish()[GPU]

    assert dict(zip(seen.kinds, seen.shares, strict=True))[EIGHT] < 0.1


def test_the_table_is_bounded() -> None:
    table = RequestTable()
    for number in range(3 * _MAX_KINDS):
        for _ in range(20):
            table.add(GPU, RequestKind(1, millicores=number))
    for number in range(3 * _MAX_RESOURCES):
        for _ in range(20):
            table.add(f"nvidia.com/mig-{number}", ONE)

    published = table.publish()

    assert len(published) <= _MAX_RESOURCES
    assert all(len(seen.kinds) <= _MAX_KINDS for seen in published.values())


def test_weights_stay_finite_over_millions_of_requests() -> None:
    table = table_of((ONE, 60_000), (EIGHT, 60_000))

    assert sum(table.publish()[GPU].shares) == pytest.approx(1.0)


def test_the_distance_of_a_mix_to_itself_is_zero() -> None:
    seen = SeenRequests.of({ONE: 3.0, EIGHT: 1.0})

    assert seen.distance(seen) == 0
    assert seen.distance(SeenRequests()) == 1
