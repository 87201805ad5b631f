"""Test the congestion control of a port's connections."""

import asyncio
import socket

import pytest
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from extender.server import listener as pacing
from extender.server.listener import Listener, _congestion_control, replace_bbr


class Pacing(socket.socket):
    """Socket of a machine with BBR as its default, and with some or no other algorithms."""

    def __init__(self, *known: str) -> None:
        super().__init__()
        self.known, self.used = known, "bbr"

    @override
    def getsockopt(self, *_: object) -> bytes:  # type: ignore[override] # as it is asked here
        return self.used.encode().ljust(16, b"\0")

    @override
    def setsockopt(self, _: int, option: int, name: bytes) -> None:  # type: ignore[override] # likewise
        assert option == socket.TCP_CONGESTION
        if name.decode() not in self.known:
            raise FileNotFoundError(name)
        self.used = name.decode()


@pytest.mark.parametrize(
    ("known", "used"),
    [(("cubic", "reno"), "cubic"), (("reno",), "reno"), ((), "bbr")],
    ids=["cubic", "reno", "none"],
)
def test_bbr_is_replaced_by_the_first_available_algorithm(
    known: tuple[str, ...], used: str
) -> None:
    with Pacing(*known) as one:
        replace_bbr(one)

        assert _congestion_control(one) == used


def test_an_algorithm_without_pacing_stays() -> None:
    with Pacing("cubic", "reno") as one:
        one.used = "dctcp"

        replace_bbr(one)

        assert _congestion_control(one) == "dctcp"


def test_a_system_without_congestion_control_is_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        replace_bbr(one)

        assert _congestion_control(one) == ""


async def test_accepted_connections_are_not_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as fresh:
        monkeypatch.setattr(pacing, "_BBR", _congestion_control(fresh))
    monkeypatch.setattr(pacing, "_ALTERNATIVES", ("reno",))  # every kernel has it and allows it
    listener = Listener("test", ("127.0.0.1", 0), lambda _: ReportingAlgorithm(), most=lambda: 1)
    await listener.open()
    try:
        reader, writer = await asyncio.open_connection(*listener.addresses[0])

        assert await reader.read() == b"reno"
        writer.close()
    finally:
        await listener.end()


class ReportingAlgorithm(asyncio.Protocol):
    """Protocol that reports its congestion control."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(_congestion_control(transport.get_extra_info("socket")).encode())
        transport.close()
