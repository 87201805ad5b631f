"""The webhook's caBundle receives the CAs, and its other fields stay."""

import base64
import copy
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from extender.kube.client import KubeClient, KubeError
from extender.server.certificates.__main__ import main
from extender.server.certificates.storing import _WEBHOOKS_PATH, write_ca_bundle
from testkit.reviewers import kubeconfig

WEBHOOKS: list[dict[str, Any]] = [
    {
        "name": "a.idlegpu.io",
        "clientConfig": {"service": {"name": "idlegpu-extender"}, "caBundle": "b2xk"},
        "rules": [{"resources": ["pods"]}],
    },
    {"name": "b.idlegpu.io", "clientConfig": {"url": "https://localhost"}},
]


@dataclass
class Held:
    """MutatingWebhookConfiguration at an API server."""

    client: KubeClient
    patches: list[dict[str, Any]] = field(default_factory=list)
    webhooks: list[dict[str, Any]] = field(default_factory=lambda: copy.deepcopy(WEBHOOKS))

    async def get(self, _: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "7"}, "webhooks": self.webhooks})

    async def patch(self, request: web.Request) -> web.Response:
        change = await request.json()
        self.patches.append(change)
        self.webhooks = change["webhooks"]
        return web.json_response({})


@pytest_asyncio.fixture
async def held(tmp_path: Path) -> AsyncIterator[Held]:
    async def get(request: web.Request) -> web.Response:
        return await found.get(request)

    async def patch(request: web.Request) -> web.Response:
        return await found.patch(request)

    app = web.Application()
    app.add_routes([web.get(f"{_WEBHOOKS_PATH}/it", get), web.patch(f"{_WEBHOOKS_PATH}/it", patch)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(f"http://127.0.0.1:{runner.addresses[0][1]}"))
    found = Held(await KubeClient.connect(path))
    yield found
    await found.client.close()
    await runner.cleanup()


async def test_every_webhook_gets_the_cas_and_keeps_the_rest(held: Held) -> None:
    assert await write_ca_bundle(held.client, "it", b"new")

    wanted = base64.b64encode(b"new").decode()
    first, second = copy.deepcopy(WEBHOOKS)
    first["clientConfig"]["caBundle"] = second["clientConfig"]["caBundle"] = wanted
    assert held.webhooks == [first, second]
    # A concurrent change is not lost: the write conflicts.
    assert held.patches[0]["metadata"] == {"resourceVersion": "7"}


async def test_a_current_bundle_is_not_written(held: Held) -> None:
    await write_ca_bundle(held.client, "it", b"new")

    assert not await write_ca_bundle(held.client, "it", b"new")
    assert len(held.patches) == 1


async def test_a_missing_configuration_is_an_error(held: Held) -> None:
    with pytest.raises(KubeError) as caught:
        await write_ca_bundle(held.client, "another", b"new")

    assert "mutatingwebhookconfigurations" in str(caught.value)


def test_a_folder_does_not_need_an_api_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path), "--webhook", "it"])

    assert "--webhook goes with --secrets" in capsys.readouterr().err
