"""Long work yields to others before each of its steps."""

import asyncio

import pytest

from extender.core.steps import Steps
from extender.runtime.cooperative import run_in_steps


async def test_other_tasks_run_before_each_step_including_the_first() -> None:
    happened: list[str] = []

    def work() -> Steps[str]:
        happened.append("first")
        yield
        happened.append("second")
        return "done"

    async def yield_control() -> None:
        happened.append("others")

    assert await run_in_steps(work(), yield_control) == "done"
    assert happened == ["others", "first", "others", "second"]


@pytest.mark.looptime
async def test_steps_that_no_task_waits_for_take_no_time() -> None:
    def work() -> Steps[None]:
        yield

    await run_in_steps(work())

    assert asyncio.get_running_loop().time() == 0.0
