"""A background task that fails is restarted, without an effect on others."""

import asyncio
import gc
import logging
from itertools import pairwise

import pytest

from extender.runtime.supervision import (
    _FIRST_SECONDS,
    _HEALTHY_SECONDS,
    _MOST_SECONDS,
    FAULTS,
    Tasks,
    keep,
)

pytestmark = pytest.mark.looptime


async def test_failing_task_restarts_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    started: list[float] = []
    names: set[str] = set()
    before = FAULTS["failing"]

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        names.add(task.get_name())
        started.append(loop.time())
        if len(started) == 10:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(3600))
            raise RuntimeError("hostile input")

    with caplog.at_level(logging.ERROR):
        await asyncio.create_task(keep("failing", run), name="failing")

    assert names == {"failing"}
    waits = [round(later - sooner) for sooner, later in pairwise(started)]
    assert waits == [_FIRST_SECONDS, 2, 4, 8, 16, *[_MOST_SECONDS] * 4]
    assert FAULTS["failing"] - before == 9
    (record,) = caplog.records  # however often
    assert (vars(record)["task"], vars(record)["also_unlogged"]) == ("failing", 0)


async def test_a_task_has_a_series_before_its_first_failure() -> None:
    FAULTS.pop("sound", None)

    await keep("sound", lambda: asyncio.sleep(0))

    assert dict(FAULTS)["sound"] == 0


@pytest.mark.parametrize(
    ("run_seconds", "pause_seconds"), [(_HEALTHY_SECONDS, 1), (_HEALTHY_SECONDS - 1, 2)]
)
async def test_the_pause_is_short_again_after_a_minute_without_a_failure(
    run_seconds: float, pause_seconds: float
) -> None:
    loop = asyncio.get_running_loop()
    started: list[float] = []

    async def run() -> None:
        started.append(loop.time())
        await asyncio.sleep(run_seconds if len(started) == 2 else 0)
        if len(started) < 3:
            raise KeyError

    await keep("recovered", run)

    assert started[2] - started[1] - run_seconds == pytest.approx(pause_seconds)


async def test_long_running_task_restarts_soon() -> None:
    loop = asyncio.get_running_loop()
    started: list[float] = []

    async def run() -> None:
        started.append(loop.time())
        if len(started) == 5:
            return
        await asyncio.sleep(100)
        raise KeyError

    await keep("long", run)

    assert loop.time() == pytest.approx(4 * (100 + _FIRST_SECONDS))


async def test_a_future_that_another_task_cancelled_ends_no_task() -> None:
    waited_for: list[asyncio.Future[None]] = []

    async def run() -> None:
        if not waited_for:
            waited_for.append(asyncio.get_running_loop().create_future())
            waited_for[0].cancel()
            await waited_for[0]

    before = FAULTS["cancelled"]

    await keep("cancelled", run)

    assert FAULTS["cancelled"] - before == 1


async def test_fatal_exceptions_are_raised_and_cancellation_cancels() -> None:
    async def fail() -> None:
        raise OSError("in use")

    with pytest.raises(OSError, match="in use"):
        await keep("fatal", fail, fatal=(OSError,))

    task = asyncio.create_task(keep("cancelled", lambda: asyncio.sleep(3600)))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_task_can_be_stopped_and_started_again_while_others_run() -> None:
    started: list[str] = []

    async def run(name: str) -> None:
        started.append(name)
        await asyncio.sleep(3600)

    async with Tasks() as tasks:
        tasks.start("one", lambda: run("one"))
        tasks.start("other", lambda: run("other"))
        await asyncio.sleep(1)
        await tasks.stop("one")
        await tasks.stop("unknown")
        assert "one" not in {task.get_name() for task in asyncio.all_tasks()}
        tasks.start("one", lambda: run("one again"))
        await asyncio.sleep(1)
        await tasks.stop("one")
        await tasks.stop("other")

    assert started == ["one", "other", "one again"]


async def test_fatal_error_of_a_task_ends_all_tasks() -> None:
    async def fail() -> None:
        raise OSError("the address is in use")

    async def run_both() -> None:
        async with Tasks() as tasks:
            tasks.start("idle", lambda: asyncio.sleep(3600))
            tasks.start("failing", fail, fatal=(OSError,))

    with pytest.raises(ExceptionGroup) as raised:
        await run_both()

    assert raised.group_contains(OSError, match="in use")


@pytest.mark.parametrize("is_grouped", [True, False])
async def test_task_that_fails_while_cancelled_ends_anyway(
    caplog: pytest.LogCaptureFixture, *, is_grouped: bool
) -> None:
    child: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        await child

    async def run() -> None:
        if is_grouped:
            async with asyncio.TaskGroup() as group:
                group.create_task(wait())
            return
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise ConnectionError("closing failed") from None

    task = asyncio.create_task(keep("cancelled", run))
    await asyncio.sleep(1)
    if is_grouped:
        child.set_exception(ValueError("at the same moment"))
    task.cancel()

    await asyncio.wait([task], timeout=10 * _MOST_SECONDS)
    assert task.cancelled()
    gc.collect()
    assert not caplog.messages  # asyncio logs an unread exception
