"""Prometheus with TLS: trusted certificates, and client certificates."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer

from extender.core.devices.readings import DeviceKey
from extender.settings.sources import Prometheus
from extender.sources.prometheus.http import PrometheusClient
from extender.sources.prometheus.plots import PrometheusPlots
from extender.sources.prometheus.protocol import PrometheusError
from extender.sources.prometheus.responses import Recognized, Rows

ANSWER = {
    "status": "success",
    "data": {"resultType": "vector", "result": [{"metric": {"UUID": "G"}, "value": [1.0, "7"]}]},
}
DEADLINE_SECONDS = 10.0
KEY = DeviceKey(("G", ""))


@dataclass(frozen=True)
class Secure:
    """A Prometheus with TLS, and the files of its clients.

    Attributes:
        url: its base URL.
        ca_file: certificate of the CA that signed its certificate.
        client_file: certificate and key of an accepted client.
    """

    url: str
    ca_file: Path
    client_file: Path


@pytest.fixture(params=[False, True], ids=["any-client", "known-clients-only"])
def is_mutual(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
async def secure(tmp_path: Path, *, is_mutual: bool) -> AsyncIterator[Secure]:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    if is_mutual:
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    ca_file, client_file = tmp_path / "ca.pem", tmp_path / "client.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    authority.issue_cert("extender").private_key_and_cert_chain_pem.write_to_path(str(client_file))

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(ANSWER)

    app = web.Application()
    app.router.add_get("/api/v1/query", answer)
    app.router.add_post("/api/v1/query", answer)
    app.router.add_post("/api/v1/query_range", answer)
    server = TestServer(app)
    await server.start_server(ssl=context)
    yield Secure(url=f"https://127.0.0.1:{server.port}", ca_file=ca_file, client_file=client_file)
    await server.close()


async def fetch(url: str, **values: object) -> int:
    """Query once; return the number of rows."""
    client = PrometheusClient(Prometheus.model_validate({"url": url, **values}))
    try:
        rows: Rows | Recognized[object] = await asyncio.to_thread(
            lambda: client.query("DCGM_FI_DEV_GPU_UTIL", DEADLINE_SECONDS)
        )
        assert not isinstance(rows, Recognized)
        return len(rows)
    finally:
        client.close()


async def test_a_server_with_a_trusted_certificate_is_queried(secure: Secure) -> None:
    files = {"ca_file": secure.ca_file, "cert_file": secure.client_file}

    assert await fetch(secure.url, **files, key_file=secure.client_file) == 1


async def test_plots_come_from_a_server_with_a_trusted_certificate_only(secure: Secure) -> None:
    async def error_of(**files: Path) -> str:
        chosen = Prometheus.model_validate({"url": secure.url, **files})
        return (await PrometheusPlots(lambda: chosen, time.time).hour([KEY])).error

    own = {"cert_file": secure.client_file, "key_file": secure.client_file}
    assert await error_of(ca_file=secure.ca_file, **own) == ""
    assert "certificate verify failed" in await error_of()


async def test_a_server_with_an_untrusted_certificate_is_not_queried(secure: Secure) -> None:
    with pytest.raises(PrometheusError, match="certificate verify failed"):
        await fetch(secure.url, cert_file=secure.client_file, key_file=secure.client_file)


async def test_verification_can_be_disabled(secure: Secure) -> None:
    files = {"cert_file": secure.client_file, "key_file": secure.client_file}

    assert await fetch(secure.url, **files, insecure_skip_verify=True) == 1


@pytest.mark.parametrize("is_mutual", [True], ids=["known-clients-only"], indirect=True)
async def test_a_client_without_a_certificate_gets_a_clear_error(secure: Secure) -> None:
    with pytest.raises(PrometheusError, match="cannot query Prometheus at https://"):
        await fetch(secure.url, ca_file=secure.ca_file)
