"""Attribution of used memory to pods and foreign processes, from readings of whole devices."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.fleet.device_holders import MemoryTenancy, Occupancy, account

NAN, INF = float("nan"), float("inf")

amounts = st.integers(0, 80).map(float)
known = st.just(NAN) | amounts


def held(declared: float, **changes: bool) -> MemoryTenancy:
    """Return the memory tenancy of one device."""
    flags = {"has_undeclared": False, "is_filling": False, "is_emptying": False, "is_free": False}
    columns = {name: np.array([value]) for name, value in {**flags, **changes}.items()}
    return MemoryTenancy(declared=np.array([declared]), **columns)


FREE = held(0, is_free=True)
WHOLE = held(INF)


def after(
    *readings: tuple[MemoryTenancy, float], reported: float = NAN, start: Occupancy | None = None
) -> tuple[float, float]:
    """Return the memory of other pods and of foreign processes after readings of one device."""
    nothing = np.array([NAN])
    found = start or Occupancy(used=nothing, others=nothing, foreign=nothing)
    for tenancy, used in readings:
        found = account(found, tenancy, np.array([used]), np.array([reported]))
    return float(found.others[0]), float(found.foreign[0])


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        pytest.param([(FREE, 40)], (40, 40), id="no-pod-there"),
        pytest.param([(FREE, 40), (held(30), 40)], (40, 40), id="there-before"),
        pytest.param([(FREE, 40), (held(30), 70)], (40, 40), id="the-growth-is-the-tenants"),
        pytest.param([(FREE, 40), (held(30), 75)], (45, 45), id="but-for-more-than-it-declared"),
        pytest.param([(FREE, 40), (held(30), 70), (held(30), 30)], (0, 0), id="others-went"),
        pytest.param([(FREE, 40), (held(30), 70), (held(30), 40)], (40, 40), id="it-gave-back"),
        pytest.param(
            [(FREE, 10), (held(40), 40), (held(40), 36)], (10, 10), id="it-gave-back-some"
        ),
        pytest.param([(FREE, 10), (held(40), 40), (held(40), 30.5)], (0.5, 0.5), id="nearly-went"),
        pytest.param([(FREE, 40), (held(30), 60), (held(30), 25)], (5, 5), id="more-than-its-own"),
        pytest.param([(held(30), 70)], (40, 40), id="known-from-the-first-reading"),
        pytest.param([(held(30, has_undeclared=True), 70)], (40, NAN), id="whose-is-not-known"),
        pytest.param([(WHOLE, 70)], (NAN, NAN), id="a-whole-gpu-is-its-tenants"),
        pytest.param([(FREE, 5), (WHOLE, 70)], (5, 5), id="but-for-what-was-there-before"),
        pytest.param([(FREE, 40), (WHOLE, 10)], (10, 10), id="never-more-than-is-in-use"),
        pytest.param(
            [(FREE, 0), (held(40), 0), (held(40, has_undeclared=True, is_filling=True), 30)],
            (30, 0),
            id="who-has-just-come-fills-it",
        ),
    ],
)
def test_each_reading_gives_the_memory_outside_pods_that_declared(
    readings: list[tuple[MemoryTenancy, float]], expected: tuple[float, float]
) -> None:
    assert after(*readings) == pytest.approx(expected, nan_ok=True)


def test_foreign_memory_of_an_agent_counts_first() -> None:
    undeclared = held(30, has_undeclared=True)

    assert after((held(30), 40), reported=40) == (40, 40)
    assert after((held(30), 40), reported=0) == (10, 0)
    assert after((WHOLE, 70), reported=10) == (10, 10)
    assert after((FREE, 0), (undeclared, 50), reported=10) == (20, 10)


tenancies = st.builds(
    held,
    st.sampled_from([NAN, 0.0, 20.0, 60.0, INF]),
    has_undeclared=st.booleans(),
    is_filling=st.booleans(),
    is_emptying=st.booleans(),
    is_free=st.booleans(),
)


@given(st.lists(st.tuples(tenancies, amounts), min_size=1, max_size=6), known)
def test_others_hold_all_undeclared_memory_in_use(
    readings: list[tuple[MemoryTenancy, float]], reported: float
) -> None:
    tenancy, used = readings[-1]

    others, foreign = after(*readings, reported=reported)

    if not np.isnan(others):
        assert 0 <= others <= used
    if not np.isnan(foreign):
        assert 0 <= foreign <= used
    declared = float(tenancy.declared[0])
    if declared < INF:
        assert others >= used - declared


def test_devices_are_accounted_for_each_on_its_own() -> None:
    one, other = held(30), replace(FREE)
    both = MemoryTenancy(
        **{
            name: np.concatenate([getattr(one, name), getattr(other, name)])
            for name in ("declared", "has_undeclared", "is_filling", "is_emptying", "is_free")
        }
    )
    blank = np.array([NAN, NAN])
    start = Occupancy(used=blank, others=blank, foreign=blank)

    found = account(start, both, np.array([40.0, 7.0]), blank)

    assert found.others.tolist() == [10.0, 7.0]
