import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from agent.worker import ExhaustedError, GivenUpError, HungError, Lane, Worker

LIMIT = 0.05


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def worker(most_hung: int = 2) -> Worker:
    return Worker(limit_seconds=LIMIT, most_hung=most_hung)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert condition()


async def hang(on: Worker, release: threading.Event, subject: str = "GPU-1") -> None:
    with pytest.raises(HungError):
        await on.run(lambda lane: lane.call(subject, "nvmlStuck", release.wait, 60))


async def test_a_job_returns_what_it_makes() -> None:
    def job(lane: Lane) -> int:
        return lane.call("", "add", lambda a, b: a + b, 2, 3)

    assert await worker().run(job) == 5


async def test_all_jobs_run_in_one_thread_that_is_not_the_loops() -> None:
    one = worker()
    names = {await one.run(lambda _: threading.current_thread().name) for _ in range(5)}

    assert len(names) == 1
    assert threading.current_thread().name not in names


async def test_a_fault_of_a_job_is_its_callers() -> None:
    one = worker()

    with pytest.raises(ZeroDivisionError):
        await one.run(lambda _: 1 // 0)
    assert await one.run(lambda _: "well") == "well"


async def test_a_call_that_does_not_return_is_given_up_and_named(release: threading.Event) -> None:
    one = worker()

    with pytest.raises(HungError) as caught:
        await one.run(lambda lane: lane.call("GPU-1", "nvmlStuck", release.wait, 60))

    assert (caught.value.subject, caught.value.call) == ("GPU-1", "nvmlStuck")
    assert one.hung_subjects() == {"GPU-1"}
    assert one.given_up == 1


async def test_the_next_job_runs_while_a_call_still_hangs(release: threading.Event) -> None:
    one = worker()
    await hang(one, release)

    assert await one.run(lambda _: "well") == "well"


async def test_no_more_threads_than_allowed_are_left_behind(release: threading.Event) -> None:
    one = worker(most_hung=2)
    await hang(one, release)
    await hang(one, release, "GPU-2")

    with pytest.raises(ExhaustedError):
        await one.run(lambda _: "well")
    assert one.given_up == 2


async def test_a_call_that_returns_late_ends_its_thread_and_does_no_more(
    release: threading.Event,
) -> None:
    one = worker(most_hung=1)
    went_on = threading.Event()

    def job(lane: Lane) -> None:
        lane.call("GPU-1", "nvmlStuck", release.wait, 60)
        went_on.set()

    with pytest.raises(HungError):
        await one.run(job)
    release.set()
    await until(lambda: not one.hung_subjects())

    assert not went_on.is_set()
    assert await one.run(lambda _: "well") == "well"


async def test_a_call_that_fails_late_ends_its_thread_as_well(release: threading.Event) -> None:
    one = worker(most_hung=1)

    def late() -> None:
        release.wait(60)
        raise RuntimeError("too late")

    with pytest.raises(HungError):
        await one.run(lambda lane: lane.call("GPU-1", "nvmlStuck", late))
    release.set()
    await until(lambda: not one.hung_subjects())


async def test_many_short_calls_are_not_taken_for_one_that_hangs() -> None:
    limit = 0.5  # on a busy machine a short call is not that short

    def job(lane: Lane) -> int:
        started = time.monotonic()
        calls = 0
        while time.monotonic() - started < 2 * limit:
            lane.call("", "short", time.sleep, limit / 100)
            calls += 1
        return calls

    assert await Worker(limit_seconds=limit, most_hung=2).run(job) > 2


async def test_a_call_may_have_a_limit_of_its_own() -> None:
    def job(lane: Lane) -> str:
        lane.call("", "nvmlInit", time.sleep, 3 * LIMIT, limit_seconds=60)
        return "started"

    assert await worker().run(job) == "started"


async def test_time_in_calls_is_told_once() -> None:
    def job(lane: Lane) -> float:
        lane.call("", "short", time.sleep, 0.02)
        return lane.take_busy_seconds()

    one = Worker(limit_seconds=60, most_hung=2)  # a busy machine takes its time

    assert 0.02 <= await one.run(job) < 60
    assert await one.run(lambda lane: lane.take_busy_seconds()) == 0.0


async def test_a_closed_worker_ends_its_thread() -> None:
    one = worker()
    thread = await one.run(lambda _: threading.current_thread())

    one.close()
    await asyncio.to_thread(thread.join, 10)

    assert not thread.is_alive()


def test_a_call_that_has_returned_at_the_last_moment_is_not_given_up() -> None:
    lane = Lane(LIMIT)
    seen = lane.call("GPU-1", "nvmlSlow", lambda: lane.step)
    assert seen is not None

    assert not lane.give_up(seen)
    # Nor is another one in its place: the thread goes on, and takes the next job.
    assert lane.call("GPU-1", "nvmlNext", lambda: lane.give_up(seen)) is False
    assert not lane.is_given_up


def test_a_thread_that_was_given_up_goes_no_further_than_its_call() -> None:
    lane = Lane(LIMIT)

    with pytest.raises(GivenUpError):
        lane.call("GPU-1", "nvmlSlow", lambda: lane.step and lane.give_up(lane.step))
