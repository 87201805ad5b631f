"""Test which clients the ports serve when they are full, and the errors for refused clients."""

import asyncio
import contextlib
import gzip
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import uvloop
from aiohttp import web
from typing_extensions import override

from extender.api.status_routes import export_ports
from extender.runtime.metrics import Metrics
from extender.server import ports as ports_module
from extender.server.ports import _KEEPALIVE_SECONDS, ServerPorts
from extender.server.tls import TlsFailure, only_known
from extender.settings.api import Admission
from extender.settings.config import Settings
from testkit.certificates import client_context, issue, settings_for
from testkit.controlplane.process import free_port
from testkit.fake_kube import eventually

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
GO_IDLE_SECONDS: Final = 90.0
"""IdleConnTimeout of Go's http.DefaultTransport and of kube-scheduler's extender client."""
Run = Callable[[Coroutine[object, object, None]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    issue(tmp_path / "own")
    return tmp_path / "own"


async def answer(_: web.Request) -> web.Response:
    return web.Response(text="an answer")


@contextlib.asynccontextmanager
async def ports_with(**settings: Any) -> AsyncIterator[tuple[ServerPorts, Metrics]]:
    """Open the ports; yield them and their metrics."""
    found = Settings(listen="127.0.0.1:0", status_listen="127.0.0.1:0", **settings)
    apps = [web.Application() for _ in range(3)]
    if found.tls.is_used:
        apps[0] = web.Application(middlewares=[only_known(found.tls)])
    for app in apps:
        app.add_routes([web.get("/", answer)])
    server_ports = ServerPorts(found, apps[0], apps[1], apps[2] if found.admission.listen else None)
    metrics = Metrics()
    export_ports(metrics, server_ports.ports)
    await server_ports.open()
    try:
        yield server_ports, metrics
    finally:
        await server_ports.close()


async def is_answered(url: str, source: str, context: ssl.SSLContext | None = None) -> bool:
    connector = aiohttp.TCPConnector(local_addr=(source, 0), ssl=context or True)
    try:
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(url) as response,
        ):
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def test_kube_scheduler_is_answered_while_the_other_ports_are_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = folder / "extender"
    admission = Admission(
        listen=f"127.0.0.1:{free_port()}", cert_file=own / "tls.crt", key_file=own / "tls.key"
    )
    monkeypatch.setattr(ports_module, "MAX_CONNECTIONS", 10)
    async with ports_with(tls=settings_for(folder), admission=admission) as (server_ports, metrics):
        webhooks, status, _ = server_ports.urls
        ports = {port.name: port for port in server_ports.ports}
        greedy = []
        for name in ("status", "admission"):
            (address,) = ports[name].addresses
            for _ in range(30):
                _, writer = await asyncio.open_connection(*address, local_addr=("127.0.0.2", 0))
                greedy.append(writer)

        assert await is_answered(webhooks, "127.0.0.2", client_context(folder, shows=folder))
        kubelet = client_context(folder, shows=None)  # it requests /healthz
        assert await is_answered(status, "127.0.0.3", kubelet)
        for name in ("status", "admission"):
            assert sample(metrics, "idlegpu_connections", port=name) <= 10
        refusals = "idlegpu_connection_refusals_total"
        assert sample(metrics, refusals, port="status", reason="gave-way")
        assert not sample(metrics, refusals, port="webhooks", reason="full")
        for writer in greedy:
            writer.transport.abort()


async def test_a_used_connection_survives_silent_ones_from_its_address(folder: Path) -> None:
    context = client_context(folder, shows=folder)
    async with ports_with(tls=settings_for(folder), max_connections=20) as (server_ports, metrics):
        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(connector=connector) as session:
            async with session.get(server_ports.urls[0]) as response:
                assert response.status == 200
            (address,) = server_ports.ports[0].addresses
            silent = []
            for _ in range(40):
                _, writer = await asyncio.open_connection(
                    *address, ssl=context, server_hostname="localhost"
                )
                await eventually(lambda: not server_ports.ports[0].handshaking)
                silent.append(writer)
            assert sample(metrics, "idlegpu_connection_refusals_total", **EVICTED) == 21

            async with session.post(server_ports.urls[0]) as response:  # aiohttp repeats no POST
                assert response.status == 405
        for writer in silent:
            writer.transport.abort()


EVICTED = {"port": "webhooks", "reason": "gave-way"}


async def test_the_admission_port_reads_no_compressed_body(folder: Path) -> None:
    own = folder / "extender"
    admission = Admission(
        listen=f"127.0.0.1:{free_port()}", cert_file=own / "tls.crt", key_file=own / "tls.key"
    )
    connector = aiohttp.TCPConnector(ssl=client_context(folder, shows=None))
    async with (
        ports_with(tls=settings_for(folder), admission=admission) as (server_ports, _),
        aiohttp.ClientSession(connector=connector) as session,
    ):
        url, body = server_ports.urls[2], gzip.compress(b" " * (1 << 20))
        statuses = {}
        for encoding in ("gzip", "deflate", "br", "identity"):
            headers = {"Content-Encoding": encoding}
            async with session.request("GET", url, data=body, headers=headers) as response:
                statuses[encoding] = response.status

    assert statuses == {"gzip": 415, "deflate": 415, "br": 415, "identity": 200}


class Wire(asyncio.Transport):
    """Transport that drops all output."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed_at: float | None = None

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    @override
    def is_closing(self) -> bool:
        return self.closed_at is not None

    @override
    def close(self) -> None:
        self.closed_at = asyncio.get_running_loop().time()

    @override
    def abort(self) -> None:
        self.close()


REQUEST: Final = b"GET / HTTP/1.1\r\nHost: it\r\n\r\n"


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.Protocol, Wire]]:
    """Yield the protocol of a connection, and its transport."""
    app = web.Application()
    app.add_routes([web.get("/", answer)])
    heads = ports_module._Heads()
    runner = ports_module._runner(app, heads)
    await runner.setup()
    wire, connection = Wire(), ports_module._factory(runner, heads)(lambda: None)
    assert isinstance(connection, asyncio.Protocol)
    connection.connection_made(wire)
    yield connection, wire
    await runner.cleanup()


@pytest.mark.looptime
async def test_a_connection_is_kept_longer_than_kube_scheduler_keeps_an_idle_one() -> None:
    """Go's client does not repeat a POST whose connection was closed during the request."""
    async with connected() as (connection, wire):
        connection.data_received(REQUEST)
        await asyncio.sleep(GO_IDLE_SECONDS)

        assert wire.written.endswith(b"an answer")
        assert wire.closed_at is None
        await asyncio.sleep(_KEEPALIVE_SECONDS)
        assert wire.closed_at == pytest.approx(_KEEPALIVE_SECONDS)


@pytest.mark.looptime
@pytest.mark.parametrize("requests", [0, 1], ids=["first", "later"])
async def test_a_request_whose_head_comes_byte_by_byte_ends_its_connection(requests: int) -> None:
    loop = asyncio.get_running_loop()
    async with connected() as (connection, wire):
        for _ in range(requests):
            connection.data_received(REQUEST)
            await asyncio.sleep(60.0)
        assert not wire.is_closing()
        began_at = loop.time()

        connection.data_received(b"GET / HTTP/1.1\r\nX: ")
        while not wire.is_closing() and loop.time() < began_at + 30.0:
            connection.data_received(b"x")
            await asyncio.sleep(1.0)

        assert wire.closed_at == pytest.approx(began_at + ports_module._HEAD_SECONDS)


@pytest.mark.looptime
async def test_the_rest_of_a_body_after_the_answer_ends_no_connection() -> None:
    async with connected() as (connection, wire):
        connection.data_received(b"GET / HTTP/1.1\r\nHost: it\r\nContent-Length: 2\r\n\r\n1")
        await asyncio.sleep(1.0)
        assert wire.written.endswith(b"an answer")
        connection.data_received(b"2")
        await asyncio.sleep(60.0)

        assert wire.closed_at is None


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    value = metrics.registry.get_sample_value(name, labels)
    assert value is not None
    return value


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        pytest.param("nothing", TlsFailure.NO_CERTIFICATE, id="no-certificate"),
        pytest.param("expired", TlsFailure.EXPIRED, id="expired"),
        pytest.param("another-ca", TlsFailure.UNKNOWN_CA, id="another-ca"),
    ],
)
@LOOPS
def test_a_refused_certificate_of_kube_scheduler_is_counted_and_logged(
    run: Run,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    shown: str,
    reason: TlsFailure,
) -> None:
    shows = None if shown == "nothing" else tmp_path / shown
    if shown == "another-ca":
        issue(tmp_path / shown)
    elif shown == "expired":
        authority = {name: text for name, text in issue(folder).items() if name.startswith("ca.")}
        issue(tmp_path / shown, days_ago=366, files=authority)

    async def check() -> None:
        async with ports_with(tls=settings_for(folder)) as (server_ports, metrics):
            context = client_context(folder, shows=shows)
            for _ in range(3):
                assert not await is_answered(server_ports.urls[0], "127.0.0.1", context)

            name = "idlegpu_tls_handshake_failures_total"
            await eventually(
                lambda: sample(metrics, name, port="webhooks", reason=reason.value) >= 3
            )
            assert not sample(metrics, name, port="webhooks", reason="other")

    run(check())
    (line,) = [one for one in caplog.records if one.message == "a client's certificate is refused"]
    assert vars(line)["port"] == "webhooks"
    assert vars(line)["reason"] == reason.value
    assert vars(line)["address"] == "127.0.0.1"
    assert "tlsConfig.certFile" in vars(line)["hint"]


@LOOPS
def test_other_failed_handshakes_are_counted_by_reason(
    run: Run, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    own = folder / "extender"
    admission = Admission(
        listen=f"127.0.0.1:{free_port()}", cert_file=own / "tls.crt", key_file=own / "tls.key"
    )

    async def check() -> None:
        async with ports_with(admission=admission) as (server_ports, metrics):
            port = server_ports.ports[-1]
            (address,) = port.addresses

            async def said(content: bytes) -> None:
                reader, writer = await asyncio.open_connection(*address)
                writer.write(content)
                if content:
                    with contextlib.suppress(ConnectionError):
                        await reader.read()
                writer.close()

            await said(b"GET / HTTP/1.1\r\nHost: it\r\n\r\n")
            await said(b"\x00" * 64)
            await said(b"")
            await asyncio.to_thread(distrust, address)

            wanted = (
                TlsFailure.PLAIN,
                TlsFailure.PROTOCOL,
                TlsFailure.LEFT,
                TlsFailure.OURS_REFUSED,
            )
            name = "idlegpu_tls_handshake_failures_total"
            await eventually(
                lambda: all(
                    sample(metrics, name, port="admission", reason=reason.value) == 1
                    for reason in wanted
                )
            )

    run(check())
    assert (
        caplog.messages.count("TLS handshake failed") == 3
    )  # a client that only disconnects is not logged


def distrust(address: tuple[str, int]) -> None:
    """Connect as a client that rejects the port's CA."""
    context = ssl.create_default_context()
    with socket.create_connection(address) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname="localhost")


async def test_invalid_http_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with ports_with() as (server_ports, _):
        for port in server_ports.ports:
            (address,) = port.addresses
            for _ in range(20):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(b"GET /\x01 HTTP/9.9\r\nno header at all\r\n\r\n")
                assert b" 400 " in await reader.readline()
                writer.close()
        assert await is_answered(server_ports.urls[1], "127.0.0.1")

    errors = [text for text in caplog.messages if text.startswith("Error handling request")]
    assert len(errors) == len(server_ports.ports)


@LOOPS
def test_connections_are_listed_from_before_the_handshake_until_they_end(
    run: Run, folder: Path
) -> None:
    async def check() -> None:
        async with ports_with(tls=settings_for(folder)) as (server_ports, _):
            webhooks, status = (port.addresses[0] for port in server_ports.ports)
            _, scraper = await asyncio.open_connection(*status)
            assert server_ports.callers() == ()

            _, writer = await asyncio.open_connection(*webhooks)
            await eventually(lambda: len(server_ports.callers()) == 1)
            (at_the_handshake,) = server_ports.callers()

            await writer.start_tls(client_context(folder, shows=folder))
            await eventually(lambda: at_the_handshake not in server_ports.callers())
            (connected,) = server_ports.callers()
            assert isinstance(connected, web.RequestHandler)

            writer.close()
            await eventually(lambda: server_ports.callers() == ())
            scraper.close()

    run(check())
