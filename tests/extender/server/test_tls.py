"""Test webhooks over TLS: authorization, and certificates that change under load."""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import aiohttp
import pytest
import uvloop
from aiohttp import web

from extender.server import tls as tls_module
from extender.server.certificates.issuing import (
    Files,
    switched,
    trusted,
    with_next,
    without_previous,
)
from extender.server.certificates.storing import read_folder
from extender.server.ports import _KEEPALIVE_SECONDS, ServerPorts
from extender.server.tls import Certificates, TlsError, only_known
from extender.settings.api import ApiSettings
from extender.settings.config import Settings, load_settings
from extender.settings.loading import ConfigError
from testkit.certificates import WANTED, client_context, issue, reissue, settings_for
from testkit.controlplane.waiting import wait_for

ANSWER: Final = "an answer"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    issue(tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture(autouse=True)
def quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_module, "_POLL_SECONDS", 0.02)


async def answer(_: web.Request) -> web.Response:
    await asyncio.sleep(0.002)  # so that requests are open while certificates change
    return web.Response(text=ANSWER)


@asynccontextmanager
async def serving(folder: Path, *, port: str = "webhooks") -> AsyncIterator[str]:
    """Serve over TLS and reload certificates; yield the base URL of a port."""
    tls = settings_for(folder)
    settings = Settings(listen="127.0.0.1:0", status_listen="127.0.0.1:0", tls=tls)
    webhooks = web.Application(middlewares=[only_known(settings.tls)])
    status = web.Application()
    for app, path in ((webhooks, "/filter"), (webhooks, "/v1/peers/requests"), (status, "/filter")):
        app.add_routes([web.post(path, answer), web.get(path, answer)])
    server_ports = ServerPorts(settings, webhooks, status)
    await server_ports.open()
    source_manager = asyncio.create_task(server_ports.run(), name="certificates")
    try:
        yield dict(zip((each.name for each in server_ports.ports), server_ports.urls, strict=True))[
            port
        ]
    finally:
        source_manager.cancel()
        await asyncio.wait([source_manager])
        await server_ports.close()


async def call(url: str, context: ssl.SSLContext, path: str = "/filter") -> int:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
        session.post(f"{url}{path}", data=b"{}") as response,
    ):
        return response.status


async def test_a_client_with_kube_schedulers_certificate_is_answered(folder: Path) -> None:
    async with serving(folder) as url:
        assert url.startswith("https://")
        assert await call(url, client_context(folder, shows=folder)) == 200


@pytest.mark.parametrize(("is_plain", "scheme"), [(False, "https"), (True, "http")])
async def test_health_needs_no_certificate_and_uses_tls_unless_plain_http_is_set(
    folder: Path, is_plain: bool, scheme: str
) -> None:
    settings = Settings(
        listen="127.0.0.1:0",
        status_listen="127.0.0.1:0",
        tls=settings_for(folder),
        api=ApiSettings(allow_plain=is_plain),
    )
    status = web.Application()
    status.add_routes([web.get("/healthz", answer)])
    server_ports = ServerPorts(settings, web.Application(), status)
    await server_ports.open()
    try:
        _, url = server_ports.urls
        assert url.startswith(f"{scheme}://")
        context = client_context(folder, shows=None)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
            session.get(f"{url}/healthz") as response,
        ):
            assert await response.text() == ANSWER
    finally:
        await server_ports.close()


@pytest.mark.parametrize("shown", ["nothing", "another-ca", "expired"])
async def test_a_client_without_a_valid_certificate_is_refused(
    folder: Path, tmp_path: Path, shown: str
) -> None:
    files = issue(folder)
    if shown == "another-ca":
        issue(tmp_path / shown)
    elif shown == "expired":
        authority = {name: text for name, text in files.items() if name.startswith("ca.")}
        issue(tmp_path / shown, days_ago=366, files=authority)
    shows = None if shown == "nothing" else tmp_path / shown

    async with serving(folder) as url:
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            await call(url, client_context(folder, shows=shows))


async def test_certificate_with_another_name_is_refused_and_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = client_context(folder, shows=folder, side="extender")
    async with serving(folder) as url:
        assert [await call(url, context) for _ in range(2)] == [403, 403]

    (line,) = [record for record in caplog.records if "refused a client" in record.message]
    assert vars(line)["names"] == ["idlegpu-extender", *sorted(WANTED.names)]


async def test_replicas_may_only_send_messages_and_kube_scheduler_only_requests(
    folder: Path,
) -> None:
    replica = client_context(folder, shows=folder, side="extender")
    scheduler = client_context(folder, shows=folder)
    async with serving(folder) as url:
        assert await call(url, replica, "/v1/peers/requests") == 200
        assert await call(url, scheduler, "/v1/peers/requests") == 403


async def test_plain_http_gets_no_answer_from_the_port(folder: Path) -> None:
    async with serving(folder) as url, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(url.replace("https", "http") + "/filter", data=b"{}")


async def test_the_client_rejects_another_server(folder: Path, tmp_path: Path) -> None:
    issue(tmp_path / "another")
    context = client_context(tmp_path / "another", shows=folder)
    async with serving(folder) as url:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await call(url, context)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("port", ["webhooks", "status"])
def test_no_call_fails_while_certificates_are_replaced_under_load(
    port: str, run: Callable[..., None], folder: Path, tmp_path: Path
) -> None:
    run(replace_under_load(folder, tmp_path / "requester", port))


async def replace_under_load(folder: Path, requester: Path, port: str) -> None:
    files = issue(folder)
    issue(requester, files=files)
    context = client_context(requester, shows=requester)
    answered: list[int] = []
    is_over = asyncio.Event()

    async def load(url: str, *, reconnects: bool) -> None:
        """Send requests until the end, with one connection or with a new one each time."""
        connector = aiohttp.TCPConnector(ssl=context, force_close=reconnects)
        async with aiohttp.ClientSession(connector=connector) as session:
            while not is_over.is_set():
                async with session.post(f"{url}/filter", data=b"{}") as response:
                    answered.append(response.status)

    async def went_on(since: int) -> bool:
        return len(answered) >= since + 10

    async with serving(folder, port=port) as url, asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(load(url, reconnects=bool(number % 2)), name=f"load {number}")
        seen = [await served_certificate(url, folder)]
        for _ in range(15):
            since = len(answered)
            await replaced(url, folder, files, seen)
            await wait_for(partial(went_on, since), "calls go on")
        is_over.set()

    assert len(set(seen)) == 16
    assert set(answered) == {200}


async def replaced(url: str, folder: Path, files: Files, seen: list[bytes]) -> None:
    """Replace the certificates, and wait until new connections get the new one."""
    reissue(folder, files)

    async def is_new() -> bool:
        return await served_certificate(url, folder) != seen[-1]

    await wait_for(is_new, "the new certificate is served")
    seen.append(await served_certificate(url, folder))


async def served_certificate(url: str, folder: Path) -> bytes:
    host, _, port = url.removeprefix("https://").partition(":")
    context = client_context(folder, shows=folder)
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        shown: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return shown.getpeercert(binary_form=True) or b""
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_dropped_ca_admits_no_new_client(folder: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    issue(old)
    issue(new)

    async def is_let_in(shows: Path, trusts: Path) -> bool:
        context = client_context(trusts, shows=shows)
        try:
            return await call(url, context) == 200
        except (aiohttp.ClientError, ssl.SSLError):
            return False

    issue(folder, files=read_folder(old))
    async with serving(folder) as url:
        assert await is_let_in(old, trusts=old)
        issue(folder, files=read_folder(new))

        await wait_for(partial(is_let_in, new, trusts=new), "the new CA's client is answered")
        assert not await is_let_in(old, trusts=new)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_connection_survives_new_certificates_until_its_ca_is_dropped(
    run: Callable[..., None], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(keep_until_dropped(folder, caplog))


async def keep_until_dropped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = issue(folder)
    both, new, context = another_ca(old, folder)
    is_kept: list[bool] = []
    connector = aiohttp.TCPConnector(ssl=context)
    async with serving(folder) as url, aiohttp.ClientSession(connector=connector) as session:
        renewed = {name: text for name, text in old.items() if name.startswith("ca.")}
        for files in (renewed, both, new):
            caplog.clear()
            issue(folder, files=files)
            await are_taken_over(caplog)
            async with session.post(f"{url}/filter", data=b"{}") as response:
                assert response.status == 200  # kube-scheduler does not repeat a request
                is_kept.append(response.headers.get("Connection") != "close")

        with pytest.raises(aiohttp.ClientError):
            await session.post(f"{url}/filter", data=b"{}")
    assert is_kept == [True, True, False]


async def test_a_connection_of_a_dropped_ca_is_refused_after_the_grace_period(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    _, new, context = another_ca(issue(folder), folder)
    async with serving(folder) as url:
        host, _, port = url.removeprefix("https://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        try:
            issue(folder, files=new)
            await are_taken_over(caplog)
            later = time.monotonic() + _KEEPALIVE_SECONDS + 1.0
            monkeypatch.setattr(tls_module, "time", SimpleNamespace(monotonic=lambda: later))

            writer.write(b"GET /filter HTTP/1.1\r\nHost: a\r\n\r\n")

            assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 403 Forbidden\r\n"
            assert ANSWER.encode() not in await reader.read()  # at the end of the connection
        finally:
            writer.close()


def another_ca(old: Files, folder: Path) -> tuple[Files, Files, ssl.SSLContext]:
    """Return the files during and after the change to another CA, and a client that trusts both."""
    both = with_next(old, datetime.now(UTC))
    context = client_context(folder, shows=folder)
    context.load_verify_locations(cadata=trusted(both).decode())
    return both, without_previous(switched(both)), context


async def are_taken_over(caplog: pytest.LogCaptureFixture) -> None:
    """Wait until files are in use that were written between two checks."""

    async def are_used() -> bool:
        return "using new certificates" in caplog.messages

    await wait_for(are_used, "the new certificates are used")


async def test_bad_files_change_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(folder) as url:
        before = await served_certificate(url, folder)
        (folder / "extender" / "tls.key").write_text("nonsense")

        async def is_logged() -> bool:
            return any("cannot use new certificates" in each.message for each in caplog.records)

        await wait_for(is_logged, "the bad key is logged")

        assert await call(url, client_context(folder, shows=folder)) == 200
        assert await served_certificate(url, folder) == before


def test_bad_files_are_logged_once_and_good_ones_used_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files = issue(folder)
    certificates = Certificates(settings_for(folder))
    (folder / "extender" / "tls.key").unlink()
    for _ in range(3):
        certificates._server_context.reload()
    reissue(folder, files)
    for _ in range(3):
        certificates._server_context.reload()

    assert caplog.messages == ["cannot use new certificates", "using new certificates"]


def test_mismatched_files_are_refused_at_the_start(folder: Path) -> None:
    (folder / "extender" / "tls.key").write_bytes((folder / "ca.key").read_bytes())

    with pytest.raises(TlsError, match=r"tls\.crt.*must be a certificate, its key"):
        Certificates(settings_for(folder))


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"IDLEGPU_LISTEN": "0.0.0.0:8888"}, "set tls.*, or allow_plain"),
        ({"IDLEGPU_LISTEN": "[::]:8888"}, "set tls.*, or allow_plain"),
        ({"IDLEGPU_TLS_CERT_FILE": "/a"}, "belong together"),
        (
            {
                "IDLEGPU_TLS_CERT_FILE": "/a",
                "IDLEGPU_TLS_KEY_FILE": "/b",
                "IDLEGPU_TLS_CLIENT_CA_FILE": "/c",
            },
            "status_listen must be set",
        ),
        (
            {"IDLEGPU_STATUS_LISTEN": "0.0.0.0:8889"},
            "status_listen (0.0.0.0:8889) is reached from other machines and there is no TLS: set "
            "tls.*, or api.cert_file and api.key_file, or api.allow_plain",
        ),
        (
            {"IDLEGPU_STATUS_LISTEN": "[::]:8889", "IDLEGPU_ALLOW_PLAIN": "true"},
            "or api.allow_plain",
        ),
    ],
)
def test_settings_that_leave_a_port_open_are_refused(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_settings(None, environ)

    assert problem in str(refusal.value)


@pytest.mark.parametrize("listen", ["127.0.0.1:8888", "[::1]:8888", "localhost:8888"])
def test_this_machine_itself_needs_no_tls(listen: str) -> None:
    assert load_settings(None, {"IDLEGPU_LISTEN": listen}).listen == listen


def test_plain_http_is_served_to_others_only_if_configured() -> None:
    environ = {"IDLEGPU_LISTEN": "0.0.0.0:8888", "IDLEGPU_ALLOW_PLAIN": "true"}

    assert not load_settings(None, environ).tls.is_used
