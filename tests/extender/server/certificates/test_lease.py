import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extender.kube.client import KubeClient, KubeError
from extender.server.certificates.storing import LEASE_NAME, hold_lease
from testkit.fake_kube import eventually
from testkit.lease_server import LeaseServer, serving, write_kubeconfig


@pytest.fixture
async def server() -> AsyncIterator[LeaseServer]:
    async with serving(LEASE_NAME) as served:
        yield served


@pytest.fixture
async def client(server: LeaseServer, tmp_path: Path) -> AsyncIterator[KubeClient]:
    connected = await KubeClient.connect(write_kubeconfig(tmp_path, server.url))
    yield connected
    await connected.close()


def holder(server: LeaseServer) -> str:
    assert server.lease is not None
    return str(server.lease["spec"].get("holderIdentity", ""))


async def test_a_free_lease_is_taken_without_waiting(
    client: KubeClient, server: LeaseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with asyncio.timeout(30), hold_lease(client, "ns", wait_seconds=0.1):
        assert server.requested[:2] == ["GET", "POST"]
        assert holder(server) != ""

    assert holder(server) == ""
    assert capsys.readouterr().err == ""


async def test_several_runs_act_one_at_a_time(client: KubeClient, server: LeaseServer) -> None:
    acting: list[int] = []
    done: list[int] = []

    async def act(number: int) -> None:
        async with hold_lease(client, "ns"):
            acting.append(number)
            requested = server.requested.count("GET")
            if len(done) < 3:  # other Jobs keep trying meanwhile
                await eventually(lambda: server.requested.count("GET") >= requested + 3)
            assert acting == [number]
            acting.remove(number)
        done.append(number)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(act(number))

    assert sorted(done) == [0, 1, 2, 3]


async def test_the_holder_renews_the_lease_and_releases_it_even_after_a_fault(
    client: KubeClient, server: LeaseServer
) -> None:
    async def act_and_fail() -> None:
        async with hold_lease(client, "ns"):
            await eventually(lambda: server.requested.count("PATCH") > 0)
            raise KubeError("gone")

    with pytest.raises(KubeError, match="gone"):
        await act_and_fail()

    assert holder(server) == ""


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_without_the_right_a_run_warns_once_and_continues(
    client: KubeClient, server: LeaseServer, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    server.refused[method] = 403

    async with asyncio.timeout(30), hold_lease(client, "ns"):
        requested = len(server.requested)
    assert len(server.requested) == requested

    (reported,) = capsys.readouterr().err.splitlines()
    assert reported.startswith("warning: another run may change the Secrets at the same time: ")
    assert "RBAC must allow this identity to " in reported
    assert "leases.coordination.k8s.io" in reported


async def test_a_holder_that_never_releases_the_lease_does_not_prevent_renewals(
    client: KubeClient, server: LeaseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.edit(holderIdentity="another", leaseDurationSeconds=1 << 30)

    async with asyncio.timeout(30), hold_lease(client, "ns", wait_seconds=1.0):
        assert holder(server) == "another"

    assert "another run holds the Lease idlegpu-certs for more than 1 s" in capsys.readouterr().err
    assert holder(server) == "another"


async def test_an_unreachable_api_server_is_an_error(
    client: KubeClient, server: LeaseServer
) -> None:
    server.refused["GET"] = 503

    with pytest.raises(KubeError):
        async with hold_lease(client, "ns"):
            pytest.fail("nothing was taken")
