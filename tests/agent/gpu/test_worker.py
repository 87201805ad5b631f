import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from agent.gpu.worker import CallTracker, HungError, Worker, _CallAbandonedError

LIMIT = 0.05


class Clock:
    """A monotonic clock that the test, or a call, advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def worker() -> Worker:
    return Worker(limit_seconds=LIMIT)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert condition()


async def hang(on: Worker, release: threading.Event, subject: str = "GPU-1") -> None:
    with pytest.raises(HungError):
        await on.run(lambda tracker: tracker.call(subject, "nvmlStuck", release.wait, 60))


async def test_a_job_returns_its_result() -> None:
    def job(tracker: CallTracker) -> int:
        return int(tracker.call("", "add", lambda a, b: a + b, 2, 3))

    assert await worker().run(job) == 5


async def test_all_jobs_run_in_one_separate_thread_that_the_process_does_not_wait_for() -> None:
    one = worker()

    (thread,) = {await one.run(lambda _: threading.current_thread()) for _ in range(5)}

    assert thread is not threading.current_thread()
    assert thread.daemon


async def test_an_exception_of_a_job_reaches_its_caller() -> None:
    one = worker()

    with pytest.raises(ZeroDivisionError):
        await one.run(lambda _: 1 // 0)
    assert await one.run(lambda _: "well") == "well"


async def test_a_hung_call_is_abandoned_and_named(release: threading.Event) -> None:
    one = worker()

    with pytest.raises(HungError) as caught:
        await one.run(lambda tracker: tracker.call("GPU-1", "nvmlStuck", release.wait, 60))

    assert (caught.value.subject, caught.value.call) == ("GPU-1", "nvmlStuck")
    assert one.hung_subjects() == {"GPU-1"}


async def test_the_next_job_runs_while_a_call_still_hangs(release: threading.Event) -> None:
    one = worker()
    await hang(one, release)

    assert await one.run(lambda _: "well") == "well"


async def test_calls_of_all_cards_may_hang(release: threading.Event) -> None:
    one = worker()
    for number in range(16):
        await hang(one, release, f"GPU-{number}")

    assert await one.run(lambda _: "well") == "well"
    assert len(one.hung_subjects()) == 16


async def test_the_cooldown_doubles_until_the_card_answers() -> None:
    clock = Clock()
    one = Worker(limit_seconds=LIMIT, monotonic=clock)

    async def cooldown() -> float:
        """Make a call return late; return the card's cooldown in dozens of limits."""
        returned = threading.Event()

        def slow() -> None:
            clock.advance(4 * LIMIT)
            returned.wait(60)

        with pytest.raises(HungError):
            await one.run(lambda tracker: tracker.call("GPU-1", "nvmlSlow", slow))
        assert one.hung_subjects() == {"GPU-1"}
        hang = one._hangs["GPU-1"]
        returned.set()
        await asyncio.to_thread(hang.thread.join)
        assert one.hung_subjects() == {"GPU-1"}, "its call has returned, and it rests"
        return round((hang.cooldown_until - clock.now) / LIMIT / 12, 6)

    rests = [await cooldown() for _ in range(7)]
    one.clear_hangs(frozenset({"GPU-1"}))
    rests.append(await cooldown())
    one.clear_hangs(frozenset())

    assert rests == [1, 2, 4, 8, 16, 16, 16, 16]
    assert await cooldown() == 1


async def test_a_call_without_card_is_retried_as_soon_as_it_returns(
    release: threading.Event,
) -> None:
    one = worker()
    await hang(one, release, "")
    release.set()

    async with asyncio.timeout(10):
        while one.hung_subjects():
            await asyncio.sleep(0)


async def test_an_abandoned_call_that_returns_ends_its_thread(release: threading.Event) -> None:
    one = worker()
    went_on = threading.Event()

    def job(tracker: CallTracker) -> None:
        tracker.call("GPU-1", "nvmlStuck", release.wait, 60)
        went_on.set()

    with pytest.raises(HungError):
        await one.run(job)
    release.set()
    await until(lambda: not one.hung_subjects())

    assert not went_on.is_set()
    assert await one.run(lambda _: "well") == "well"


async def test_an_abandoned_call_that_fails_ends_its_thread(release: threading.Event) -> None:
    one = worker()

    def late() -> None:
        release.wait(60)
        raise RuntimeError("too late")

    with pytest.raises(HungError):
        await one.run(lambda tracker: tracker.call("GPU-1", "nvmlStuck", late))
    release.set()
    await until(lambda: not one.hung_subjects())


async def test_many_short_calls_do_not_count_as_a_hang() -> None:
    clock = Clock()
    loop = asyncio.get_running_loop()

    def short() -> None:
        clock.advance(0.6 * LIMIT)
        # The worker looks for a call that is overdue while this one is being made.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(3 * LIMIT), loop).result()

    def job(tracker: CallTracker) -> str:
        for _ in range(4):
            tracker.call("", "short", short)
        return "well"

    assert await Worker(limit_seconds=LIMIT, monotonic=clock).run(job) == "well"


async def test_a_call_can_have_its_own_limit() -> None:
    def job(tracker: CallTracker) -> str:
        tracker.call("", "nvmlInit", time.sleep, 3 * LIMIT, limit_seconds=60)
        return "started"

    assert await worker().run(job) == "started"


async def test_time_in_calls_is_returned_once() -> None:
    clock = Clock()

    def job(tracker: CallTracker) -> float:
        tracker.call("", "short", clock.advance, 2.0)
        clock.advance(5.0)  # between calls
        tracker.call("", "short", clock.advance, 1.0)
        return tracker.take_busy_seconds()

    one = Worker(limit_seconds=60, monotonic=clock)

    assert await one.run(job) == 3.0
    assert await one.run(lambda tracker: tracker.take_busy_seconds()) == 0.0


async def test_close_ends_the_thread() -> None:
    one = worker()
    thread = await one.run(lambda _: threading.current_thread())

    one.close()
    await asyncio.to_thread(thread.join, 10)

    assert not thread.is_alive()


def test_a_call_that_returns_at_the_last_moment_is_not_abandoned() -> None:
    tracker = CallTracker(LIMIT)
    seen = tracker.call("GPU-1", "nvmlSlow", lambda: tracker.pending_call)
    assert seen is not None

    assert not tracker.abandon(seen)
    # No other thread replaces it: the thread continues with the next job.
    assert tracker.call("GPU-1", "nvmlNext", lambda: tracker.abandon(seen)) is False
    assert not tracker.is_abandoned


def test_an_abandoned_thread_makes_no_further_call() -> None:
    tracker = CallTracker(LIMIT)

    with pytest.raises(_CallAbandonedError):
        tracker.call(
            "GPU-1",
            "nvmlSlow",
            lambda: tracker.pending_call and tracker.abandon(tracker.pending_call),
        )
