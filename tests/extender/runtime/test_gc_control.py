"""Garbage collection is complete, but only while no request waits."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from extender.runtime import gc_control, native_memory
from extender.runtime.gc_control import GcControl
from testkit.fake_kube import eventually


class Knot:
    """Object that only a search for cycles frees."""

    def __init__(self) -> None:
        self.itself = self


def make_knot() -> Callable[[], object]:
    """Create an unreachable cycle; return a check whether it still exists."""
    return weakref.ref(Knot())


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make collections due at all times; return a function that sets further limits."""

    def set_limits(**limits: float) -> None:
        for name, value in limits.items():
            monkeypatch.setattr(gc_control, f"_{name.upper()}", value)

    set_limits(pause_seconds=0.0, look_seconds=0.001)
    return set_limits


def garbage(is_idle: Callable[[], bool]) -> GcControl:
    return GcControl(is_idle, lambda _: False)


@asynccontextmanager
async def running(searching: GcControl) -> AsyncIterator[None]:
    task = asyncio.create_task(searching.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.usefixtures("limit")
async def test_cycles_are_freed_in_an_idle_moment_and_not_before() -> None:
    is_idle = False
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return is_idle

    async with running(garbage(look)):
        knot = make_knot()
        junk = [[number] for number in range(5000)]  # more than Python's own threshold
        before = looks
        await eventually(lambda: looks > before + 5)
        assert knot() is not None
        is_idle = True
        await eventually(lambda: knot() is None)
    assert junk


async def test_without_an_idle_moment_patience_ends(limit: Callable[..., None]) -> None:
    limit(patience_seconds=0.02)
    async with running(garbage(lambda: False)):
        knot = make_knot()
        await eventually(lambda: knot() is None)


@pytest.mark.looptime
async def test_too_many_objects_are_searched_at_once(limit: Callable[..., None]) -> None:
    limit(pause_seconds=1e6, patience_seconds=1e6, most_objects=20_000)
    async with running(garbage(lambda: False)):
        knot = make_knot()
        junk = [[number] for number in range(15_000)]
        await asyncio.sleep(0.05)
        assert knot() is not None
        junk += [[number] for number in range(15_000)]
        await eventually(lambda: knot() is None)


@pytest.mark.usefixtures("limit")
async def test_frozen_objects_are_not_searched_again() -> None:
    searching = garbage(lambda: False)
    async with running(searching):
        searching.tidy()
        frozen = gc.get_freeze_count()
        assert frozen > 10_000
        assert len(gc.get_objects()) < frozen / 10


@pytest.mark.usefixtures("limit")
async def test_objects_that_survived_a_collection_are_skipped_by_the_next() -> None:
    async with running(garbage(lambda: True)):
        kept = [[number] for number in range(1000)]
        await eventually(lambda: not any(one is kept for one in gc.get_objects()))
    assert kept


async def test_recent_garbage_is_collected_within_seconds() -> None:
    async with running(GcControl(lambda: True, lambda _: False)):
        knot = make_knot()
        await eventually(lambda: knot() is None)


@pytest.mark.parametrize(
    ("is_quiet", "patience_seconds"),
    [pytest.param(True, 1e6, id="no requests"), pytest.param(False, 0.02, id="patience has ended")],
)
async def test_a_frozen_object_that_became_garbage_later_is_found(
    is_quiet: bool, patience_seconds: float, limit: Callable[..., None]
) -> None:
    is_thorough = False
    limit(thorough_seconds=0.0, thorough_patience_seconds=patience_seconds)
    async with running(GcControl(lambda: True, lambda _: is_quiet and is_thorough)):
        in_use = [Knot()]
        knot = weakref.ref(in_use[0])
        await eventually(lambda: not any(one is in_use for one in gc.get_objects()))
        in_use.clear()
        is_thorough = True
        await eventually(lambda: knot() is None)


@pytest.mark.looptime
async def test_memory_is_returned_after_some_time_without_requests(
    monkeypatch: pytest.MonkeyPatch, limit: Callable[..., None]
) -> None:
    given: list[bool] = []
    is_quiet = False
    monkeypatch.setattr(native_memory, "give_back", lambda: given.append(is_quiet))
    limit(trim_seconds=0.0)

    async with running(GcControl(lambda: True, lambda _: is_quiet)):
        await asyncio.sleep(0.05)
        assert not given
        is_quiet = True
        await eventually(lambda: given)


async def test_all_free_memory_is_returned_at_once_on_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[bool] = []
    monkeypatch.setattr(native_memory, "give_back", lambda: given.append(True))

    garbage(lambda: False).tidy()
    gc.unfreeze()

    assert given == [True]


class Schedule:
    """Times of collections and of returns of memory, on the clock of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, objects: int = 0) -> None:
        self.clock = asyncio.get_running_loop().time
        self.searches: list[float] = []
        self.whole: list[float] = []
        self.trims: list[float] = []
        names = {
            "isenabled": lambda: True,
            "enable": lambda: None,
            "disable": lambda: None,
            "freeze": lambda: None,
            "unfreeze": lambda: self.whole.append(self.clock()),
            "collect": lambda: self.searches.append(self.clock()),
            "get_count": lambda: (objects, 0, 0),
        }
        clocks = {"monotonic": self.clock, "perf_counter": self.clock}
        monkeypatch.setattr(gc_control, "gc", SimpleNamespace(**names))
        monkeypatch.setattr(gc_control, "time", SimpleNamespace(**clocks))
        monkeypatch.setattr(native_memory, "give_back", lambda: self.trims.append(self.clock()))


@pytest.mark.looptime
async def test_without_requests_each_kind_of_collection_runs_when_it_is_due(
    monkeypatch: pytest.MonkeyPatch, limit: Callable[..., None]
) -> None:
    schedule = Schedule(monkeypatch)
    limit(look_seconds=1.0, pause_seconds=10.0, trim_seconds=30.0, thorough_seconds=100.0)

    async with running(GcControl(lambda: True, lambda _: True)):
        await asyncio.sleep(205.5)
        whole = list(schedule.whole)

    assert whole == [100.0, 200.0]
    # The quick one waits for a look after the whole one.
    assert schedule.searches == [*range(10, 100, 10), 100, 101, *range(111, 200, 10), 200, 201]
    assert schedule.trims == [30.0, 60.0, 90.0, 120.0, 150.0, 180.0]


@pytest.mark.looptime
async def test_with_requests_at_all_times_collections_wait_for_the_end_of_patience(
    monkeypatch: pytest.MonkeyPatch, limit: Callable[..., None]
) -> None:
    schedule = Schedule(monkeypatch)
    limit(look_seconds=1.0, pause_seconds=10.0, patience_seconds=20.0, trim_seconds=30.0)
    limit(thorough_seconds=100.0, thorough_patience_seconds=50.0)

    async with running(GcControl(lambda: False, lambda _: False)):
        await asyncio.sleep(155.5)
        whole = list(schedule.whole)

    assert whole == [150.0]
    assert schedule.searches == [30.0, 60.0, 90.0, 120.0, 150.0, 151.0]
    assert not schedule.trims


@pytest.mark.looptime
@pytest.mark.parametrize(("objects", "searches"), [(99, []), (100, [1.0, 2.0])])
async def test_the_limit_for_objects_is_inclusive(
    monkeypatch: pytest.MonkeyPatch, limit: Callable[..., None], objects: int, searches: list[float]
) -> None:
    schedule = Schedule(monkeypatch, objects)
    limit(look_seconds=1.0, pause_seconds=1e6, most_objects=100)

    async with running(GcControl(lambda: False, lambda _: False)):
        await asyncio.sleep(2.5)

    assert schedule.searches == searches


@pytest.mark.looptime
async def test_a_whole_collection_waits_for_half_a_minute_without_requests(
    monkeypatch: pytest.MonkeyPatch, limit: Callable[..., None]
) -> None:
    schedule = Schedule(monkeypatch)
    limit(look_seconds=1.0, pause_seconds=1e6, trim_seconds=1e6, thorough_seconds=10.0)
    quiet: list[float] = []

    def is_quiet(seconds: float) -> bool:
        quiet.append(seconds)
        return len(quiet) > 3

    async with running(GcControl(lambda: True, is_quiet)):
        await asyncio.sleep(15.5)

    assert schedule.searches == [13.0]
    assert set(quiet) == {30.0}


@pytest.mark.usefixtures("limit")
async def test_afterwards_python_does_as_before() -> None:
    was_enabled = gc.isenabled()
    searching = garbage(lambda: True)

    async with running(searching):
        assert not gc.isenabled()
        searching.tidy()

    assert gc.isenabled() == was_enabled
    assert gc.get_freeze_count() == 0
