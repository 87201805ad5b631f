"""Work for several callers is done only once."""

import asyncio

import pytest

from extender.insight.holders import MOST_KEPT, Shared


class Maker:
    """Work that counts its runs; its clock only moves when a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.made = 0
        self.at_once = 0
        self.shared = Shared[int](lambda: self.now, 5.0)

    async def make(self) -> int:
        self.at_once += 1
        assert self.at_once == 1
        await asyncio.sleep(0)
        self.at_once -= 1
        self.made += 1
        return self.made


@pytest.fixture
def maker() -> Maker:
    return Maker()


async def test_concurrent_and_soon_following_callers_share_the_result(maker: Maker) -> None:
    async with asyncio.TaskGroup() as group:
        askers = [group.create_task(maker.shared.get("a", maker.make)) for _ in range(10)]
    maker.now += 4.9

    assert {requester.result() for requester in askers} == {1}
    assert await maker.shared.get("a", maker.make) == 1


async def test_an_old_result_or_another_key_is_computed_again(maker: Maker) -> None:
    assert await maker.shared.get("a", maker.make) == 1
    assert await maker.shared.get("b", maker.make) == 2
    maker.now += 5
    assert await maker.shared.get("a", maker.make) == 3
    maker.now -= 60  # a clock that was set back gives no age
    assert await maker.shared.get("a", maker.make) == 4
    maker.shared.clear()
    assert await maker.shared.get("a", maker.make) == 5


async def test_few_results_are_kept(maker: Maker) -> None:
    for key in range(MOST_KEPT + 1):
        await maker.shared.get(key, maker.make)

    assert await maker.shared.get(MOST_KEPT, maker.make) == MOST_KEPT + 1
    assert await maker.shared.get(0, maker.make) == MOST_KEPT + 2


async def test_an_unused_result_is_dropped() -> None:
    maker = Maker()
    maker.shared = Shared[int](lambda: maker.now, 0.01)
    await maker.shared.get("a", maker.make)

    async with asyncio.timeout(30):
        while maker.shared._entries:  # no event signals it
            await asyncio.sleep(0.01)


async def test_a_fault_stays_with_its_caller(maker: Maker) -> None:
    async def fail() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await maker.shared.get("a", fail)

    assert await maker.shared.get("a", maker.make) == 1
