"""The extender survives the failure of any task: every running task is made to fail."""

import asyncio
import json
import logging
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from extender.app import start
from extender.runtime import supervision
from extender.settings.reload import SettingsFile
from testkit.certificates import issue
from testkit.controlplane.process import free_port
from testkit.fake_kube import FakeKube, eventually, running_kube
from testkit.kube_objects import node

MOST_ROUNDS = 100
"""Some tasks exist only now and then, or end with another one before they fail."""


KINDS = ("nodes", "pods", "resourceclaims", "resourceslices")
TASKS = {
    *(
        "admission",
        "agents",
        "certificates",
        "events",
        "gc",
        "idleness",
        "usage",
        "binding attribution",
    ),
    *("allocate", "new pods", "page memory", "page news", "page replicas", "past use"),
    *(
        "peer 127.0.0.1",
        "peers",
        "placement events",
        "prometheus",
        "regret",
        "regret pods",
        "settings",
    ),
    *("evaluate", "report pods again", "bypassed pods", "wake", "wake lease"),
    *(f"watch {kind}" for kind in KINDS),
    *(f"resync {kind}" for kind in KINDS),
}
"""All tasks that run; add new ones here."""


class InjectedError(Exception):
    """Error that a task's wait raises."""


def fail(task: asyncio.Task[object]) -> bool:
    """Make a task fail at its current wait; return whether that is possible."""
    outermost = task.get_coro()
    awaited = getattr(outermost, "cr_await", None)
    names = [getattr(one, "__name__", "") for one in (outermost, awaited)]
    if names == ["keep", "sleep"]:
        return False  # waits for its next start
    while (deeper := getattr(awaited, "cr_await", None)) is not None:
        innermost, awaited = awaited, deeper
        if getattr(innermost, "__name__", "") in {"__aexit__", "_run_once"}:
            return False  # waits for its own tasks, and fails with them
    waited = task._fut_waiter  # type: ignore[attr-defined] # not in asyncio's public API
    if waited is None or isinstance(waited, asyncio.Task) or waited.done():
        return False
    waited.set_exception(InjectedError())
    return True


def settings_file(folder: Path, kube: FakeKube) -> SettingsFile:
    """Return settings with which every task runs."""
    issue(folder / "own")
    own = folder / "own" / "extender"
    (folder / "secret").write_text("s" * 32)
    path = folder / "settings.yaml"
    admission = {"listen": f"127.0.0.1:{free_port()}"}
    settings = {
        "listen": f"127.0.0.1:{free_port()}",
        "status_listen": f"127.0.0.1:{free_port()}",
        "kubeconfig": str(kube.write_kubeconfig(folder / "kubeconfig")),
        "api": {"allow_plain": True},
        "prometheus": {"url": "http://127.0.0.1:1"},
        "agents": {"listen": f"127.0.0.1:{free_port()}"},
        "peers": {"addresses": ["127.0.0.1:1"], "secret_file": str(folder / "secret")},
        "admission": {
            **admission,
            "cert_file": str(own / "tls.crt"),
            "key_file": str(own / "tls.key"),
        },
    }
    path.write_text(json.dumps(settings))
    return SettingsFile(path, {})


async def test_extender_answers_after_any_task_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(supervision, "_MOST_SECONDS", 0.01)
    caplog.set_level(logging.CRITICAL)
    own = asyncio.all_tasks()
    failed: Counter[str] = Counter()
    faults = supervision.FAULTS.total()
    unpooled = aiohttp.TCPConnector(force_close=True)  # a connection's task may have failed
    session = aiohttp.ClientSession(connector=unpooled, timeout=aiohttp.ClientTimeout(30))
    async with running_kube() as kube, session:
        kube.put("nodes", node("n"))
        file = settings_file(tmp_path, kube)
        settings = file.load(file.read()).settings
        before = asyncio.all_tasks()
        async with start(settings, file=file) as extender:
            await eventually(lambda: extender.readiness.is_allocated)
            for _ in range(MOST_ROUNDS):
                if failed.keys() >= TASKS:
                    break
                for task in asyncio.all_tasks() - own - before:
                    if task.get_name() not in failed and fail(task):
                        failed[task.get_name()] += 1
                        await asyncio.sleep(0)
                async with session.get(f"{extender.addresses[1]}/healthz") as answer:
                    assert answer.status == 200
                await eventually(lambda: extender.readiness.is_allocated)
            (agents,) = extender.source_manager.ports
            await eventually(lambda: agents.addresses)
            _, writer = await asyncio.open_connection(*agents.addresses[0])
            writer.close()

    assert failed.keys() >= TASKS
    assert supervision.FAULTS.total() - faults > 20  # some fail with others, and count once
