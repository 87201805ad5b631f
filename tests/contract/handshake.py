"""Bytes with which agent and extender open and close a connection.

The agent's bytes are recorded from the agent and the extender's from the extender, each over a
plain socket.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Final

from agent.push.handshake import Token, open_stream
from agent.report.contract import frame
from testkit.agent.report_server import ReportServer, raw_connection, report_server, update
from testkit.agent.reviews import token

REQUEST: Final = "request.http"
"""The agent's request."""
GRANT: Final = "grant.http"
"""The extender's answer if updates may follow."""
REFUSAL: Final = "refusal.http"
"""The extender's answer to a token for another audience."""
FAREWELL: Final = "farewell.bin"
"""The extender's last bytes to an agent whose updates it accepted until then."""

SERVICE: Final = "idlegpu-agents.idlegpu.svc:9401"
PLACEHOLDER: Final = b"TOKEN"
"""Replacement of the token, which differs each time."""
HEAD_ENDS: Final = b"\r\n\r\n"
TIMEOUT_SECONDS: Final = 30.0


async def handshake(folder: Path) -> dict[str, bytes]:
    """Return the bytes that this checkout's programs send, by file name.

    Args:
        folder: folder for the extender's files.
    """
    async with asyncio.timeout(TIMEOUT_SECONDS):
        request = await agents_request()
        async with report_server(folder) as server:
            grant, farewell = await granted_and_ended(server, with_token(request, token("gpu-1")))
            others = token("gpu-1", audience="another")
            reader, _ = await raw_connection(server, with_token(request, others))
            refusal = await reader.read()
    return {REQUEST: request, GRANT: grant, REFUSAL: refusal, FAREWELL: farewell}


def with_token(request: bytes, text: str) -> bytes:
    """Return a recorded request with a token that is valid now."""
    return request.replace(PLACEHOLDER, text.encode())


async def agents_request() -> bytes:
    """Return the request of this checkout's agent."""
    requested: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requested.set_result(await reader.readuntil(HEAD_ENDS))
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()
        with contextlib.suppress(ConnectionError):
            await open_stream(address, SERVICE, Token(text=PLACEHOLDER.decode()))
        return await requested


async def granted_and_ended(server: ReportServer, request: bytes) -> tuple[bytes, bytes]:
    """Return the extender's bytes to an agent that then reports for another node."""
    reader, _ = await raw_connection(server, request, frame(update("gpu-2")))
    return await reader.readuntil(HEAD_ENDS), await reader.read()
