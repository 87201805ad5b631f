"""Test health, metrics, API and page over TLS: clients send a token, and no certificate."""

import ssl
from pathlib import Path

import aiohttp
import pytest

from extender.api.access import COOKIE
from extender.api.status_routes import certificate_ends
from extender.app import start
from extender.server.tls import TlsError
from extender.settings.api import ApiAccess, ApiSettings
from extender.settings.config import Settings, load_settings
from extender.settings.loading import ConfigError
from simulation.cluster import run_cluster
from simulation.demo_fleet import demo_fleet
from testkit.certificates import client_context, issue
from testkit.fake_kube import eventually
from testkit.reviewers import EVERYWHERE, reviewing

TOKEN = "token-of-alice"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    issue(tmp_path / "own")
    return tmp_path / "own"


def over_tls(folder: Path, kubeconfig: Path, access: ApiAccess) -> Settings:
    own = folder / "extender"
    return Settings(
        listen="127.0.0.1:0",
        status_listen="127.0.0.1:0",
        kubeconfig=kubeconfig,
        api=ApiSettings(cert_file=own / "tls.crt", key_file=own / "tls.key", access=access),
    )


def trusting(folder: Path) -> ssl.SSLContext:
    """Return the TLS context of a kubelet, Prometheus or a browser: no client certificate."""
    return client_context(folder, shows=None)


async def test_health_and_metrics_are_served_only_over_tls(folder: Path) -> None:
    async with run_cluster(demo_fleet(), interval_seconds=0.5) as cluster:
        settings = over_tls(folder, cluster.kubeconfig, ApiAccess.AUTO)
        async with start(settings) as extender:
            await eventually(lambda: extender.is_ready)
            _, url = extender.addresses
            connector = aiohttp.TCPConnector(ssl=trusting(folder))
            async with aiohttp.ClientSession(url, connector=connector) as session:
                answers = {}
                for path in ("/readyz", "/healthz", "/metrics", "/page/", "/v1/nodes"):
                    async with session.get(path) as answer:
                        answers[path] = (answer.status, await answer.text())
                with pytest.raises(aiohttp.ClientError):
                    await session.get(url.replace("https://", "http://") + "/readyz")

    assert url.startswith("https://")
    assert {status for status, _ in answers.values()} == {200}
    assert 'idlegpu_connections{port="status"}' in answers["/metrics"][1]
    assert (
        'idlegpu_certificate_end_timestamp_seconds{certificate="status"}' in answers["/metrics"][1]
    )


async def test_a_browser_sends_its_token_only_over_tls(folder: Path, tmp_path: Path) -> None:
    async with reviewing(tmp_path) as (reviewers, _):
        reviewers.users[TOKEN] = "alice"
        reviewers.rights["alice"] = {EVERYWHERE}
        settings = over_tls(folder, tmp_path / "kubeconfig", ApiAccess.TOKEN)
        async with start(settings) as extender:
            _, url = extender.addresses
            connector = aiohttp.TCPConnector(ssl=trusting(folder))
            jar = aiohttp.CookieJar(unsafe=True)  # also keeps cookies of IP addresses
            async with aiohttp.ClientSession(url, connector=connector, cookie_jar=jar) as session:
                async with session.post("/v1/session", json={"token": TOKEN}) as answer:
                    kept = answer.cookies[COOKIE]
                async with session.get("/v1/session") as answer:
                    body = await answer.json()

    assert (answer.status, body["user"]) == (200, "alice")
    assert (kept.value, kept["secure"], kept["httponly"]) == (TOKEN, True, True)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"API_CERT_FILE": "/a"}, "api.cert_file and api.key_file belong together"),
        ({"API_KEY_FILE": "/b"}, "api.cert_file and api.key_file belong together"),
        ({"API_CERT_FILE": "/a", "API_KEY_FILE": "/b"}, "status_listen must be set"),
        (
            {"API_CERT_FILE": "/a", "API_KEY_FILE": "/b", "API_ALLOW_PLAIN": "true"},
            r"api.allow_plain \(true\) is not allowed with api.cert_file",
        ),
    ],
    ids=["no-key", "no-certificate", "no-port", "plain-all-the-same"],
)
def test_a_certificate_that_no_port_would_use_is_refused(
    variables: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_settings(None, {f"IDLEGPU_{name}": text for name, text in variables.items()})


async def test_missing_files_are_refused_at_the_start(tmp_path: Path) -> None:
    async with reviewing(tmp_path):
        settings = over_tls(tmp_path / "gone", tmp_path / "kubeconfig", ApiAccess.TOKEN)

        with pytest.raises(TlsError, match="must be a certificate"):
            async with start(settings):
                pass
    assert certificate_ends(settings) == {}
