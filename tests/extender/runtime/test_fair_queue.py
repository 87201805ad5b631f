"""Order of turns among many clients."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from extender.runtime.fair_queue import BusyError, FairQueue


class Many:
    """Requests that last until they are ended; records the order of their turns."""

    def __init__(self, turns: FairQueue) -> None:
        self.had: list[str] = []
        self._fair_queue = turns
        self._end = asyncio.Event()

    async def call(self, name: str) -> None:
        async with self._fair_queue.of(name):
            self.had.append(name)
            await self._end.wait()

    async def ask_shortly(self, name: str) -> None:
        async with self._fair_queue.of(name):
            self.had.append(name)
            await asyncio.sleep(0)


def turns(**changes: Any) -> FairQueue:
    return FairQueue(**{"at_once": 1, "waiting_each": 100, "wait_seconds": 20.0, **changes})


async def all_of(call: Callable[[str], Awaitable[None]], names: list[str]) -> None:
    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(call(name))  # type: ignore[arg-type] # a coroutine


async def test_a_caller_with_many_requests_waits_for_a_caller_with_few() -> None:
    many = Many(turns())

    await all_of(many.ask_shortly, ["greedy"] * 50 + ["modest", "other"])

    assert many.had[:4] == ["greedy", "greedy", "modest", "other"]
    assert many.had.count("greedy") == 50


async def test_no_more_requests_run_at_once_than_allowed() -> None:
    many = Many(turns(at_once=3))
    tasks = [asyncio.create_task(many.call("a")) for _ in range(10)]
    for _ in range(5):
        await asyncio.sleep(0)

    assert len(many.had) == 3
    for task in tasks[:2]:
        task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(many.had) == 5
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_only_the_caller_with_too_many_waiting_requests_gets_an_error() -> None:
    taken = turns(waiting_each=2)
    many = Many(taken)
    tasks = [asyncio.create_task(many.call("greedy")) for _ in range(3)]
    await asyncio.sleep(0)

    with pytest.raises(BusyError, match="2 requests of the same caller"):
        await many.call("greedy")
    tasks.append(asyncio.create_task(many.call("modest")))
    await asyncio.sleep(0)
    assert not tasks[-1].done()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await many.ask_shortly("greedy")  # no client is left over


async def test_a_request_that_waits_too_long_fails_and_takes_no_slot() -> None:
    taken = turns(wait_seconds=0.02)
    many = Many(taken)
    first = asyncio.create_task(many.call("a"))
    await asyncio.sleep(0)

    with pytest.raises(BusyError, match=r"no slot became free within 0\.02 s"):
        await many.call("b")
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()  # its slot is free, and nothing of b is left
    await many.ask_shortly("b")
    assert many.had == ["a", "b"]


async def test_a_request_that_gave_up_frees_no_slot_and_takes_no_place_in_the_queue() -> None:
    taken = turns(wait_seconds=0.01, waiting_each=1)
    many = Many(taken)
    first = asyncio.create_task(many.call("a"))
    await asyncio.sleep(0)

    for _ in range(3):
        with pytest.raises(BusyError, match="no slot became free"):
            await many.call("b")

    assert many.had == ["a"]
    first.cancel()
    await asyncio.wait([first])


async def test_a_slot_that_comes_too_late_goes_to_the_next() -> None:
    many = Many(turns())
    first, second, third = (asyncio.create_task(many.call(name)) for name in "abc")
    await asyncio.sleep(0)

    first.cancel()
    await asyncio.sleep(0)
    second.cancel()  # it has the slot, but has not run since
    await asyncio.wait([second])
    await asyncio.sleep(0)

    assert many.had == ["a", "c"]
    third.cancel()
    await asyncio.wait([third])


async def test_a_caller_that_gives_up_one_request_keeps_its_others() -> None:
    many = Many(turns())
    first, second, third = (asyncio.create_task(many.call(name)) for name in ("a", "b", "b"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])

    first.cancel()
    await asyncio.wait([first])
    await asyncio.sleep(0)

    assert many.had == ["a", "b"]
    third.cancel()
    await asyncio.wait([third])


@pytest.mark.looptime(start=1000.0)
async def test_requests_start_at_the_rate_after_a_burst_of_one_second() -> None:
    many = Many(turns(at_once=1000, per_second=20))
    begun = asyncio.get_running_loop().time()

    await all_of(many.ask_shortly, ["a"] * 30 + ["b"])

    # 21 at once; the other ten one after the other, and b's requests are among the first two of
    # these.
    assert asyncio.get_running_loop().time() - begun == pytest.approx(10 / 20)
    assert many.had.index("b") <= 22
