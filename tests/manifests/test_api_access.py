"""Access to the shipped extender's API with real tokens and rights of a real API server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from testkit.controlplane.installing import Installation
from tests.manifests.api_readers import READER, STRANGER, Read, reading

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest_asyncio.fixture
async def read(installation: Installation, tmp_path: Path) -> AsyncIterator[Read]:
    async with reading(installation, tmp_path) as found:
        yield found


async def test_a_tenant_sees_its_own_pods_and_an_account_without_rights_none(read: Read) -> None:
    assert await read.pods(await read.token(READER)) == ["blue/p", "another pod"]
    token = await read.token(STRANGER)
    assert await read.pods(token) == ["another pod", "another pod"]
    _, nodes = await read.extender.read("/v1/nodes", token)
    assert nodes["nodes"][0]["resources"]["nvidia.com/gpu"]["held"] == 2


async def test_without_a_valid_token_only_health_and_metrics_are_answered(read: Read) -> None:
    for path in ("/v1/nodes", "/v1/gpus", "/v1/decisions", "/v1/bypassed", "/v1/session"):
        status, answer = await read.extender.read(path)

        assert status == 401, path
        assert "kubectl create token" in answer["error"]
    status, health = await read.extender.read("/readyz")
    assert (status, health["status"] == "starting") == (200, False)
    async with read.extender.server.session() as session, session.get("/metrics") as response:
        text = await response.text()
    assert "idlegpu_gpu_pods 2.0" in text
    assert 'outcome="no-token"' in text
    assert "blue" not in text

    # Tokens that are not for the API, and forged ones.
    good = await read.token(READER)
    header, claims, signature = good.split(".")
    for token in (
        await read.token(READER, "https://kubernetes.default.svc"),
        await read.token(READER, "idlegpu-extender"),
        f"{header}.{claims}.{signature[:-8]}AAAAAAAA",
        f"{header}.{claims}.",
        read.installation.plane.users["admin"].token,
    ):
        status, _ = await read.extender.read("/v1/nodes", token)

        assert status == 401
    assert (await read.extender.read("/v1/nodes", good))[0] == 200
