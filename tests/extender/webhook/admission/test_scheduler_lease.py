"""Test that a Lease counts from a renewal that was seen, for its own duration."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from extender.kube.client import KubeClient
from extender.webhook.admission import SchedulerLease
from testkit.reviewers import kubeconfig


@dataclass
class Held:
    """Lease at an API server, and the clock of its reader."""

    lease: SchedulerLease
    now: float = 1000.0
    status: int = 200
    renewals: int = 0
    holder: str | None = "scheduler-a"
    duration: object = 15

    async def get(self, _: web.Request) -> web.Response:
        spec: dict[str, Any] = {
            "holderIdentity": self.holder,
            "leaseDurationSeconds": self.duration,
            "renewTime": f"2026-01-01T00:00:{self.renewals:02}.000000Z",
        }
        return web.json_response({"spec": spec, "message": "made up"}, status=self.status)

    async def renew(self) -> None:
        """Renew the Lease, and check it."""
        self.renewals += 1
        await self.lease.check()


@pytest_asyncio.fixture
async def held(tmp_path: Path) -> AsyncIterator[Held]:
    app = web.Application()
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def get(request: web.Request) -> web.Response:
        return await found.get(request)

    app.router.add_get("/apis/coordination.k8s.io/v1/namespaces/idlegpu/leases/it", get)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(f"http://127.0.0.1:{runner.addresses[0][1]}"))
    client = await KubeClient.connect(path)
    found = Held(
        SchedulerLease(client, namespace="idlegpu", name="it", monotonic=lambda: found.now)
    )
    yield found
    await client.close()
    await runner.cleanup()


async def test_the_lease_of_a_dead_scheduler_is_not_fresh(held: Held) -> None:
    for _ in range(3):
        await held.lease.check()
        held.now += 1.0

    assert not held.lease.is_fresh


async def test_a_renewed_lease_is_fresh_for_its_duration(held: Held) -> None:
    await held.lease.check()
    await held.renew()
    assert held.lease.is_fresh

    held.now += 14.9
    assert held.lease.is_fresh

    held.now = 1000.0 + 15.0
    assert not held.lease.is_fresh


async def test_the_log_names_each_change_of_the_scheduler(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "extender.webhook.admission")

    await held.lease.check()
    assert caplog.messages == []

    await held.renew()
    await held.renew()
    held.now += 100.0
    await held.lease.check()
    await held.lease.check()
    assert caplog.messages == [
        "the scheduler renews its Lease: new GPU pods are assigned to it",
        "the scheduler does not renew its Lease: new GPU pods keep their scheduler",
    ]


@pytest.mark.parametrize(("bound", "seconds"), [(min, 1.8), (max, 2.2)])
async def test_replicas_do_not_check_all_at_once(
    held: Held, monkeypatch: pytest.MonkeyPatch, bound: Callable[..., float], seconds: float
) -> None:
    slept: list[float] = []

    async def check(_: SchedulerLease) -> None:
        pass

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr(SchedulerLease, "check", check)
    monkeypatch.setattr("extender.webhook.admission.random.uniform", bound)
    monkeypatch.setattr("extender.webhook.admission.asyncio.sleep", sleep)

    with pytest.raises(asyncio.CancelledError):
        await held.lease.run()

    assert slept == [pytest.approx(seconds)]


async def test_a_stale_lease_is_fresh_again_after_a_renewal(held: Held) -> None:
    await held.lease.check()
    await held.renew()
    held.now += 100.0
    await held.lease.check()
    assert not held.lease.is_fresh

    held.holder = "scheduler-b"
    await held.renew()

    assert held.lease.is_fresh


async def test_a_released_lease_is_no_longer_fresh(held: Held) -> None:
    await held.lease.check()
    await held.renew()

    held.holder = None
    await held.renew()

    assert not held.lease.is_fresh


async def test_a_deleted_lease_is_not_fresh_until_it_is_renewed_again(held: Held) -> None:
    await held.lease.check()
    await held.renew()
    held.status = 404
    await held.lease.check()
    assert not held.lease.is_fresh

    held.status = 200
    await held.lease.check()

    # It did not exist before: it has just been created.
    assert held.lease.is_fresh


async def test_briefly_silent_api_server_is_logged_once(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    await held.lease.check()
    await held.renew()
    held.status = 503

    await held.lease.check()
    was_fresh = held.lease.is_fresh
    assert was_fresh
    assert caplog.messages.count("cannot read the scheduler's Lease") == 1

    held.now += 15.1
    await held.lease.check()
    assert caplog.messages.count("cannot read the scheduler's Lease") == 1
    assert not held.lease.is_fresh


async def test_a_duration_of_a_second_counts(held: Held) -> None:
    held.duration = 1
    await held.lease.check()
    await held.renew()

    held.now += 1.1
    assert not held.lease.is_fresh


@pytest.mark.parametrize("duration", ["soon", 0, -1])
async def test_an_invalid_duration_counts_as_the_default(held: Held, duration: object) -> None:
    held.duration = duration
    await held.lease.check()
    await held.renew()

    held.now += 14.9
    assert held.lease.is_fresh
    held.now += 0.2
    assert not held.lease.is_fresh
