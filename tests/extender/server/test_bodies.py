"""Test that hostile bodies are cheap: they are not unpacked, and authorization comes first."""

import asyncio
import contextlib
import gzip
import io
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from extender.app import Extender, start
from extender.server import ports
from extender.settings.api import ApiAccess, ApiSettings
from extender.settings.config import Settings
from extender.settings.service import PeersSettings
from testkit.fake_kube import FakeKube, eventually, running_kube
from testkit.kube_objects import node

SECRET = "s" * 32
BOMB = gzip.compress(b" " * (16 << 20))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    return path


@pytest.fixture
async def extender(tmp_path: Path, secret: Path) -> AsyncIterator[Extender]:
    async with running_kube() as kube, start(settings_of(kube, tmp_path, secret)) as running:
        await eventually(lambda: running.readiness.is_allocated)
        yield running


def settings_of(
    kube: FakeKube, folder: Path, secret: Path, access: ApiAccess = ApiAccess.AUTO
) -> Settings:
    kube.put("nodes", node("n"))
    return Settings(
        listen="127.0.0.1:0",
        status_listen="127.0.0.1:0",
        api=ApiSettings(allow_plain=True, access=access),
        kubeconfig=kube.write_kubeconfig(folder / "kubeconfig"),
        peers=PeersSettings(addresses=("127.0.0.1:1",), secret_file=secret),
    )


PATHS = (
    (0, "POST", "/filter"),
    (0, "POST", "/v1/peers/requests"),
    (0, "GET", "/nowhere"),
    (1, "GET", "/healthz"),
    (1, "GET", "/metrics"),
    (1, "POST", "/v1/explain"),
)
ENCODINGS = ("gzip", "deflate", "br", "gzip, identity", "unknown")


async def test_compressed_bodies_are_refused_unread(extender: Extender) -> None:
    async with aiohttp.ClientSession() as session:
        for (port, method, path), encoding in product(PATHS, ENCODINGS):
            url = f"{extender.addresses[port]}{path}"
            headers = {"Content-Encoding": encoding, "Authorization": f"Bearer {SECRET}"}
            async with session.request(method, url, data=BOMB, headers=headers) as answer:
                assert answer.status == 415
                assert "send the body uncompressed" in await answer.text()


async def test_an_unauthorized_client_is_answered_before_its_body_arrives(
    tmp_path: Path, secret: Path
) -> None:
    async with running_kube() as kube:
        settings = settings_of(kube, tmp_path, secret, ApiAccess.TOKEN)
        async with start(settings) as extender:
            answered = {path: await answer_to_head(extender, *path) for path in REFUSED}

    assert answered == REFUSED


@pytest.mark.parametrize("expect", ["100-continue", "100-Continue", "", "anything"])
async def test_no_client_gets_100_continue(extender: Extender, expect: str) -> None:
    paths = {(port, path) for port, _, path in PATHS}
    header = f"Expect: {expect}\r\n"

    answered = {await answer_to_head(extender, port, path, header) for port, path in paths}

    assert answered == {417}


REFUSED = {
    (0, "/v1/peers/requests"): 403,
    (0, "/v1/peers/decisions"): 403,
    (1, "/v1/explain"): 401,
    (1, "/v1/nothing"): 401,
}


async def answer_to_head(extender: Extender, port: int, path: str, expect: str = "") -> int:
    """Return the status of a request whose body never arrives."""
    url = URL(extender.addresses[port])
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {path} HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer wrong\r\n"
    writer.write(f"{head}{expect}Content-Length: 100\r\n\r\n".encode())
    async with asyncio.timeout(ports._BODY_SECONDS / 2):
        answered = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return int(answered.split()[1])


async def test_a_client_that_leaves_before_its_body_is_no_fault(
    extender: Extender, caplog: pytest.LogCaptureFixture
) -> None:
    left = []
    for port, path in ((0, "/filter"), (1, "/v1/explain"), (1, "/v1/size")):
        url = URL(extender.addresses[port])
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {path} HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: 100\r\n\r\n"
        writer.write(head.encode() + b"{")
        writer.write_eof()
        left.append(await reader.read())
        writer.close()

    assert not any(left)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_body_larger_than_the_limit_is_refused(extender: Extender) -> None:
    body = io.BytesIO(b" " * (9 << 20))
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{extender.addresses[0]}/filter", data=body) as answer,
    ):
        assert "Maximum request body size" in (await answer.json())["Error"]


async def test_without_tls_replicas_must_know_the_secret(extender: Extender) -> None:
    url = f"{extender.addresses[0]}/v1/peers/requests"
    async with aiohttp.ClientSession() as session:
        for given in ("", "Bearer ", "Bearer wrong", f"bearer {SECRET}", "\u00e9"):
            async with session.post(url, data=b"{}", headers={"Authorization": given}) as answer:
                assert answer.status == 403
        headers = {"Authorization": f"Bearer {SECRET}"}
        async with session.post(url, data=b"{}", headers=headers) as answer:
            assert answer.status == 400  # not a valid message


async def test_without_tls_and_secret_no_client_is_accepted_as_a_replica(tmp_path: Path) -> None:
    async with running_kube() as kube:
        settings = Settings(
            listen="127.0.0.1:0", kubeconfig=kube.write_kubeconfig(tmp_path / "kubeconfig")
        )
        async with start(settings) as extender, aiohttp.ClientSession() as session:
            url = f"{extender.addresses[0]}/v1/peers/decisions"
            for given in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}):
                async with session.get(url, headers=given) as answer:
                    assert answer.status == 403


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "127.0.0.1:0"])
def test_peers_without_tls_need_a_secret(listen: str) -> None:
    with pytest.raises(ValueError, match=r"peers\.secret_file"):
        Settings(listen=listen, allow_plain=True, peers=PeersSettings(addresses=("a:1",)))


def test_an_easily_guessed_secret_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short")
    with pytest.raises(ValueError, match="must hold at least 16"):
        PeersSettings(secret_file=secret).secret()
    with pytest.raises(ValueError, match="No such file"):
        PeersSettings(secret_file=tmp_path / "nowhere").secret()


async def test_a_body_that_does_not_arrive_ends_its_connection(
    extender: Extender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_BODY_SECONDS", 0.05)
    for port, path in ((0, "/filter"), (0, "/v1/peers/requests"), (1, "/v1/explain")):
        url = URL(extender.addresses[port])
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {path} HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {SECRET}\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())

        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
