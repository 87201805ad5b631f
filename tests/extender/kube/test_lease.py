import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extender.kube.client import KubeClient
from extender.kube.lease import Lease, make_identity
from testkit.fake_kube import eventually
from testkit.lease_server import LeaseServer, Object, serving, write_kubeconfig


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def server() -> AsyncIterator[LeaseServer]:
    async with serving("wake") as served:
        yield served


@pytest.fixture
async def client(server: LeaseServer, tmp_path: Path) -> AsyncIterator[KubeClient]:
    connected = await KubeClient.connect(write_kubeconfig(tmp_path, server.url))
    yield connected
    await connected.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def replica(
    client: KubeClient, clock: Clock, identity: str, duration_seconds: float = 15.0
) -> Lease:
    return Lease(
        client,
        namespace="ns",
        name="wake",
        identity=identity,
        duration_seconds=duration_seconds,
        monotonic=clock,
    )


def holds(lease: Lease) -> bool:
    return lease.is_held


def holder(server: LeaseServer) -> str:
    assert server.lease is not None
    return str(server.lease["spec"].get("holderIdentity", ""))


async def test_the_first_process_creates_and_holds_the_lease(
    client: KubeClient, server: LeaseServer, clock: Clock
) -> None:
    first, second = replica(client, clock, "a"), replica(client, clock, "b")

    await first.attempt()
    await second.attempt()

    assert (first.is_held, second.is_held) == (True, False)
    assert server.lease is not None
    spec = server.lease["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("a", 15)
    assert spec["leaseTransitions"] == 0


async def test_one_of_many_simultaneous_attempts_succeeds(
    client: KubeClient, server: LeaseServer, clock: Clock
) -> None:
    replicas = [replica(client, clock, f"r{number}") for number in range(8)]

    for _ in range(2):
        async with asyncio.TaskGroup() as group:
            for each in replicas:
                group.create_task(each.attempt())

        (held,) = [each for each in replicas if each.is_held]
        assert holder(server) == held.identity
        server.edit(holderIdentity="")  # released: all try again
        held._held_until = 0.0


async def test_a_renewal_keeps_the_holder_and_the_transitions(
    client: KubeClient, server: LeaseServer, clock: Clock
) -> None:
    lease = replica(client, clock, "a")
    await lease.attempt()
    assert server.lease is not None
    acquired = server.lease["spec"]["acquireTime"]

    for _ in range(10):
        clock.now += 5
        await lease.attempt()
        assert holds(lease)

    assert server.lease["spec"]["acquireTime"] == acquired
    assert server.lease["spec"]["leaseTransitions"] == 0


async def test_a_holder_that_cannot_renew_stops_before_another_may_begin(
    client: KubeClient, server: LeaseServer, clock: Clock
) -> None:
    first, second = replica(client, clock, "a"), replica(client, clock, "b")
    await first.attempt()
    await second.attempt()
    server.refused["PATCH"] = 503

    clock.now += 9.9
    await first._try()
    assert holds(first)
    assert first._pause_seconds() <= 3.0

    clock.now = 1010.0
    assert not holds(first)
    server.refused.clear()
    await second.attempt()
    assert not holds(second)

    clock.now += 5.1
    await second.attempt()
    assert holds(second)
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1


async def test_the_lease_expires_by_our_clock_not_by_its_times(
    client: KubeClient, server: LeaseServer, clock: Clock
) -> None:
    server.edit(
        holderIdentity="x", leaseDurationSeconds=15, renewTime="1999-01-01T00:00:00.000000Z"
    )
    lease = replica(client, clock, "a")

    for _ in range(5):
        await lease.attempt()
        assert not holds(lease)
        clock.now += 10
        server.edit(renewTime="1999-01-01T00:00:00.000000Z")

    await lease.attempt()
    clock.now += 16
    await lease.attempt()

    assert holds(lease)


@pytest.mark.parametrize(("written", "seconds"), [(60, 60), (1, 1), (0, 15), (None, 15)])
async def test_the_duration_that_the_holder_wrote_is_respected(
    client: KubeClient, server: LeaseServer, clock: Clock, written: int | None, seconds: int
) -> None:
    server.edit(holderIdentity="x", leaseDurationSeconds=written)
    lease = replica(client, clock, "a")
    await lease.attempt()

    clock.now += seconds
    await lease.attempt()
    assert not holds(lease)

    clock.now += 1
    await lease.attempt()
    assert holds(lease)


async def test_a_holder_that_lost_the_lease_notices_at_the_next_attempt(
    client: KubeClient, server: LeaseServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "extender.kube.lease")
    lease = replica(client, clock, "a")
    await lease._try()
    server.edit(holderIdentity="b")

    for _ in range(2):
        await lease._try()
        assert not holds(lease)

    assert caplog.messages == ["took the lease", "lost the lease"]


@pytest.mark.parametrize("spec", [{}, {"holderIdentity": None}, {"leaseDurationSeconds": "soon"}])
async def test_a_free_lease_is_taken(
    client: KubeClient, server: LeaseServer, clock: Clock, spec: Object
) -> None:
    server.edit(**spec)
    lease = replica(client, clock, "a")

    await lease.attempt()

    assert holds(lease)
    assert holder(server) == "a"
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1


async def test_the_lease_is_released_at_the_end(client: KubeClient, clock: Clock) -> None:
    first, second = replica(client, clock, "a"), replica(client, clock, "b")
    task = asyncio.create_task(first.run(), name="lease")
    await eventually(lambda: first.is_held)
    await second.attempt()
    assert not holds(second)

    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await second.attempt()

    assert (first.is_held, second.is_held) == (False, True)


async def test_a_lease_of_another_holder_is_not_released(
    client: KubeClient, server: LeaseServer, clock: Clock
) -> None:
    server.edit(holderIdentity="b", leaseDurationSeconds=15)
    lease = replica(client, clock, "a")

    await lease.release()

    assert server.requested == []
    assert holder(server) == "b"


async def test_a_lease_that_was_just_lost_is_not_released(
    client: KubeClient, server: LeaseServer, clock: Clock
) -> None:
    lease = replica(client, clock, "a")
    await lease.attempt()
    server.edit(holderIdentity="b")
    await lease.release()
    assert holder(server) == "b"

    server.lease = None
    await lease.attempt()
    server.lease = None
    await lease.release()

    assert "PATCH" not in server.requested


@pytest.mark.parametrize(
    ("method", "verb", "exists"),
    [("GET", "get", True), ("POST", "create", False), ("PATCH", "patch", True)],
)
async def test_a_missing_right_is_logged_once_and_named(
    client: KubeClient,
    server: LeaseServer,
    caplog: pytest.LogCaptureFixture,
    method: str,
    verb: str,
    *,
    exists: bool,
) -> None:
    caplog.set_level("INFO", "extender.kube.lease")
    lease = replica(client, Clock(), "a")

    for _ in range(2):
        server.lease = None
        if exists:
            server.edit()
        server.refused[method] = 403
        for _ in range(5):
            await lease._try()
        assert not holds(lease)
        server.refused.clear()
        await lease._try()
        assert holds(lease)
        await lease.release()

    once = ["cannot take the lease", "the lease can be taken again", "took the lease"]
    assert caplog.messages == 2 * once
    assert (
        f"RBAC must allow this identity to {verb} leases.coordination.k8s.io"
        in caplog.records[0].__dict__["cause"]
    )


async def test_refused_attempts_become_rarer(
    client: KubeClient, server: LeaseServer, clock: Clock
) -> None:
    server.refused["GET"] = 403
    lease = replica(client, clock, "a")
    pauses = []
    for _ in range(20):
        await lease._try()
        pauses.append(lease._pause_seconds())

    assert pauses[0] <= 6.0
    assert 48.0 <= pauses[-1] <= 60.0
    server.refused.clear()
    server.edit(holderIdentity="b")
    await lease._try()
    assert lease._pause_seconds() <= 3.0


async def test_a_lease_whose_server_fails_is_taken_once_it_answers(
    client: KubeClient, server: LeaseServer, clock: Clock
) -> None:
    lease = replica(client, clock, "a", duration_seconds=0.05)
    server.refused["GET"] = 500
    task = asyncio.create_task(lease.run(), name="lease")
    await eventually(lambda: len(server.requested) >= 2)
    server.refused.clear()

    await eventually(lambda: lease.is_held)

    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_identities_are_unique() -> None:
    assert make_identity() != make_identity()
