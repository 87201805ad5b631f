"""Whichever task fails, the extender goes on: every one that runs is made to fail."""

import asyncio
import logging
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from extender import supervision
from extender.app import start
from extender.config import Prometheus, Settings
from extender.settings.api import Api
from tests.extender.fake_kube import eventually, running_kube
from tests.extender.kube_objects import node

ROUNDS = 3
"""Some tasks are there again, and some are there only now and then."""


class InjectedError(Exception):
    """What a task gets from whatever it waits for."""


def fail(task: asyncio.Task[object]) -> bool:
    """Have what a task waits for raise; tell whether it waits for anything that can."""
    awaited = getattr(task.get_coro(), "cr_await", None)
    if task.get_name() == "extender" or getattr(awaited, "__name__", "") == "sleep":
        return False  # waits for the other tasks, or for its next start: nothing there can fail
    waited = task._fut_waiter  # type: ignore[attr-defined] # asyncio tells nobody
    if waited is None or isinstance(waited, asyncio.Task) or waited.done():
        return False
    waited.set_exception(InjectedError())
    return True


async def test_whichever_task_fails_the_extender_answers_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(supervision, "MOST_SECONDS", 0.01)
    caplog.set_level(logging.CRITICAL)
    own = asyncio.all_tasks()
    failed: Counter[str] = Counter()
    faults = supervision.FAULTS.total()
    each_anew = aiohttp.TCPConnector(force_close=True)  # a connection's task may have failed
    session = aiohttp.ClientSession(connector=each_anew, timeout=aiohttp.ClientTimeout(30))
    async with running_kube() as kube, session:
        kube.put("nodes", node("n"))
        settings = Settings(
            listen="127.0.0.1:0",
            status_listen="127.0.0.1:0",
            api=Api(allow_plain=True),
            kubeconfig=kube.write_kubeconfig(tmp_path / "kubeconfig"),
            prometheus=Prometheus(url="http://127.0.0.1:1"),
        )
        before = asyncio.all_tasks()
        async with start(settings) as extender:
            await eventually(lambda: extender.readiness.is_laid_out)
            for _ in range(ROUNDS):
                for task in asyncio.all_tasks() - own - before:
                    if fail(task):
                        failed[task.get_name()] += 1
                        await asyncio.sleep(0)
                async with session.get(f"{extender.addresses[1]}/healthz") as answer:
                    assert answer.status == 200
                await eventually(lambda: extender.readiness.is_laid_out)

    assert len(failed) > 10
    assert supervision.FAULTS.total() - faults > 10
