"""Test full ports, with real sockets from several addresses of this machine."""

import asyncio
import contextlib
import mmap
import platform
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest
import uvloop
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from extender.server import listener as module
from extender.server.listener import (
    _ALLOWED_UNUSED,
    _SILENT_SECONDS,
    Factory,
    Listener,
    _ConnectionRefusal,
    descriptors,
    raise_descriptor_limit,
    spare_for,
)
from extender.server.tls import Certificates, TlsFailure
from testkit.certificates import client_context, issue, settings_for
from testkit.fake_kube import eventually

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Coroutine[object, object, None]], None]


class Echo(asyncio.Protocol):
    """Protocol that sends back its input."""

    def __init__(self, on_bytes: Callable[[], None]) -> None:
        self._on_bytes = on_bytes

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        self._on_bytes()
        self._transport.write(data)  # type: ignore[attr-defined] # uvloop's is no Transport


class Full(Echo):
    """Transport whose read buffer is fully resident."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.buffer = transport.get_extra_info("uvloop.sslproto").get_buffer(1)
        self.buffer[:] = b"x" * len(self.buffer)


class Caller:
    """Client with one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def is_answered(self) -> bool:
        """Return whether sent bytes come back."""
        try:
            self.writer.write(b"hello")
            async with asyncio.timeout(30):
                return await self.reader.readexactly(5) == b"hello"
        except (OSError, asyncio.IncompleteReadError):
            return False


class Port:
    """Port that sends back its input, with its clients."""

    def __init__(self, listener: Listener, context: ssl.SSLContext | None) -> None:
        self.listener = listener
        self._context = context
        self._callers: list[Caller] = []
        self._raw: list[socket.socket] = []

    async def call(self, source: str = "127.0.0.1") -> Caller:
        (address,) = self.listener.addresses
        reader, writer = await asyncio.open_connection(
            *address,
            local_addr=(source, 0),
            ssl=self._context,
            server_hostname="localhost" if self._context else None,
        )
        caller = Caller(reader, writer)
        self._callers.append(caller)
        return caller

    async def stand(self, source: str = "127.0.0.1") -> socket.socket:
        """Connect without a handshake."""
        (address,) = self.listener.addresses
        before = self.listener.figures.connections
        made = socket.create_connection(address, source_address=(source, 0))
        self._raw.append(made)
        if before < self.listener._most():
            await eventually(lambda: self.listener.figures.connections > before)
        return made

    async def leave(self) -> None:
        for caller in self._callers:
            caller.writer.transport.abort()
            with contextlib.suppress(OSError):
                await caller.writer.wait_closed()
        for one in self._raw:
            one.close()


@contextlib.asynccontextmanager
async def port_with(
    most: int,
    *,
    tls: ssl.SSLContext | None = None,
    client: ssl.SSLContext | None = None,
    spare: int = 0,
    factory: Factory = Echo,
    monotonic: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Port]:
    listener = Listener(
        "test",
        ("127.0.0.1", 0),
        factory,
        most=lambda: most,
        tls=tls,
        spare=spare,
        monotonic=monotonic,
    )
    await listener.open()
    port = Port(listener, client)
    try:
        yield port
    finally:
        await port.leave()
        await listener.end()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    issue(tmp_path / "own")
    return tmp_path / "own"


@LOOPS
def test_connections_are_counted_until_they_end(run: Run) -> None:
    async def check() -> None:
        async with port_with(10) as port:
            callers = [await port.call() for _ in range(3)]
            assert all([await caller.is_answered() for caller in callers])
            assert port.listener.figures.connections == 3

            callers[0].writer.close()
            callers[1].writer.transport.abort()
            await eventually(lambda: port.listener.figures.connections == 1)
            assert await callers[2].is_answered()

    run(check())


@LOOPS
def test_the_address_with_most_connections_loses_one_to_another_address(run: Run) -> None:
    async def check() -> None:
        async with port_with(4) as port:
            greedy = [await port.call("127.0.0.2") for _ in range(4)]
            assert all([await caller.is_answered() for caller in greedy])

            assert await (await port.call("127.0.0.3")).is_answered()
            assert await (await port.call("127.0.0.4")).is_answered()

            # The newest two were closed, and none of a client that holds no more than the new one.
            assert [await caller.is_answered() for caller in greedy] == [True, True, False, False]
            await eventually(lambda: port.listener.figures.connections == 4)
            assert port.listener.figures.refusals[_ConnectionRefusal.EVICTED] == 2

    run(check())


@LOOPS
def test_a_client_with_its_fair_share_is_refused_with_an_answer(run: Run) -> None:
    async def check() -> None:
        async with port_with(2) as port:
            first = [await port.call("127.0.0.2"), await port.call("127.0.0.3")]
            assert all([await caller.is_answered() for caller in first])

            refused = await port.call("127.0.0.2")

            assert (await refused.reader.read()).startswith(b"HTTP/1.1 503 ")
            assert all([await caller.is_answered() for caller in first])
            assert port.listener.figures.refusals[_ConnectionRefusal.FULL] == 1
            first[0].writer.transport.abort()
            await eventually(lambda: port.listener.figures.connections == 1)
            assert await (await port.call("127.0.0.2")).is_answered()

    run(check())


@LOOPS
def test_a_connection_without_a_certificate_is_closed_first(run: Run, folder: Path) -> None:
    async def check() -> None:
        certificates = Certificates(settings_for(folder))
        context = client_context(folder, shows=folder)
        async with port_with(3, tls=certificates.server, client=context) as port:
            known = await port.call("127.0.0.2")
            assert await known.is_answered()
            for _ in range(20):  # many more than fit, from the same address
                await port.stand("127.0.0.2")

            newcomer = await port.call("127.0.0.2")

            assert await newcomer.is_answered()
            assert await known.is_answered()
            assert port.listener.figures.connections <= 3
            assert port.listener.figures.refusals[_ConnectionRefusal.FULL] == 0

    run(check())


@LOOPS
def test_an_address_with_many_unused_connections_does_not_evict_a_handshake(
    run: Run, folder: Path
) -> None:
    async def check() -> None:
        certificates = Certificates(settings_for(folder))
        context = client_context(folder, shows=folder)
        most = _ALLOWED_UNUSED + 3
        async with port_with(most, tls=certificates.server, client=context) as port:
            silent = [await port.call("127.0.0.2") for _ in range(most - 1)]
            await eventually(lambda: not port.listener.handshaking)
            in_handshake = await port.stand("127.0.0.3")
            in_handshake.setblocking(False)

            newcomer = await port.call("127.0.0.2")

            assert await newcomer.is_answered()
            with pytest.raises(BlockingIOError):  # it has not ended
                in_handshake.recv(1)
            assert [await caller.is_answered() for caller in silent] == [
                False,
                *[True] * (most - 2),
            ]

    run(check())


@LOOPS
def test_handshakes_of_one_address_do_not_end_that_of_another(run: Run, folder: Path) -> None:
    async def check() -> None:
        certificates = Certificates(settings_for(folder))
        async with port_with(3, tls=certificates.server) as port:
            in_handshake = await port.stand("127.0.0.3")
            in_handshake.setblocking(False)
            for _ in range(20):
                await port.stand("127.0.0.2")
            figures = port.listener.figures
            await eventually(lambda: figures.refusals[_ConnectionRefusal.EVICTED] == 18)

            with pytest.raises(BlockingIOError):  # it has not ended
                in_handshake.recv(1)

    run(check())


@LOOPS
def test_a_connection_with_recent_requests_outlives_idle_ones_of_its_address(
    run: Run, folder: Path
) -> None:
    async def check() -> None:
        certificates = Certificates(settings_for(folder))
        context = client_context(folder, shows=folder)
        most = _ALLOWED_UNUSED + 3
        async with port_with(most, tls=certificates.server, client=context) as port:
            for _ in range(most - 1):
                await port.call()
            spoken = await port.call()
            assert await spoken.is_answered()

            newest = spoken
            for _ in range(2 * most):  # all through one address, as behind a Service
                newest = await port.call()
                await eventually(lambda: not port.listener.handshaking)

            assert await spoken.is_answered()
            assert await newest.is_answered()

    run(check())


@LOOPS
def test_the_longest_silent_connection_of_an_address_is_evicted(run: Run) -> None:
    now = 0.0

    async def check() -> None:
        nonlocal now
        async with port_with(3, monotonic=lambda: now) as port:
            callers = [await port.call() for _ in range(3)]
            for caller in (*callers, callers[0]):
                now += 1.0
                assert await caller.is_answered()
            assert (await (await port.call()).reader.read()).startswith(b"HTTP/1.1 503 ")
            now += _SILENT_SECONDS - 1.0

            assert await (await port.call()).is_answered()

            assert [await caller.is_answered() for caller in callers] == [True, False, True]

    run(check())


@LOOPS
def test_an_endless_handshake_is_ended(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HANDSHAKE_SECONDS", 0.2)

    async def check() -> None:
        async with port_with(3, tls=Certificates(settings_for(folder)).server) as port:
            await port.stand()

            await eventually(lambda: port.listener.figures.failures[TlsFailure.TIMEOUT] == 1)
            assert not port.listener.figures.connections

    run(check())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is not given back")
def test_a_tls_connection_holds_no_memory_for_a_read_buffer(folder: Path) -> None:
    async def check() -> None:
        handlers: list[Full] = []

        def make(on_bytes: Callable[[], None]) -> Full:
            handlers.append(Full(on_bytes))
            return handlers[-1]

        certificates = Certificates(settings_for(folder))
        context = client_context(folder, shows=folder)
        async with port_with(3, tls=certificates.server, client=context, factory=make) as port:
            caller = await port.call()
            assert await caller.is_answered()

            await eventually(lambda: bytes(handlers[0].buffer).count(b"x") < 2 * mmap.PAGESIZE)
            assert await caller.is_answered()

    uvloop.run(check())


async def test_the_last_file_descriptors_are_left_to_others() -> None:
    async with port_with(10, spare=descriptors()) as port:
        caller = await port.call()

        assert (await caller.reader.read()).startswith(b"HTTP/1.1 503 ")
        assert port.listener.figures.refusals[_ConnectionRefusal.DESCRIPTORS] == 1


async def test_accept_is_retried_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.02)
    async with port_with(10) as port:
        (listening,) = port.listener._sockets
        failures = [OSError(24, "Too many open files")] * 3

        class Refusing:
            """Socket on which accept fails for a while."""

            def __getattr__(self, name: str) -> object:
                return getattr(listening, name)

            def accept(self) -> object:
                if failures:
                    raise failures.pop()
                return listening.accept()

        loop = asyncio.get_running_loop()
        port.listener._sockets[:] = [refusing := Refusing()]  # type: ignore[list-item] # acts as one
        loop.remove_reader(listening)
        loop.add_reader(listening, port.listener._accept, refusing)  # type: ignore[arg-type] # as above

        assert await (await port.call()).is_answered()
        assert not failures
        assert caplog.messages.count("cannot accept connections") == 1
        loop.remove_reader(listening)
        port.listener._sockets[:] = [listening]


def test_every_other_port_leaves_descriptors_to_the_webhooks_port() -> None:
    assert spare_for(10) >= 10
    assert spare_for(1 << 40) == descriptors() // 2
    assert raise_descriptor_limit(1) > 0
