"""Long work lets others have a turn before each of its steps."""

from extender.core.steps import Steps
from extender.runtime.cooperative import in_turns


async def test_other_tasks_run_before_each_step_including_the_first() -> None:
    happened: list[str] = []

    def work() -> Steps[str]:
        happened.append("first")
        yield
        happened.append("second")
        return "done"

    async def give_way() -> None:
        happened.append("others")

    assert await in_turns(work(), give_way) == "done"
    assert happened == ["others", "first", "others", "second"]
