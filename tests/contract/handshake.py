"""How agent and extender greet and leave each other on a connection, as bytes.

What the agent says is recorded from the agent, and what the extender answers from the extender,
each over a plain socket.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Final

from agent.push_handshake import Token, open_stream
from agent.report import frame
from testkit.agent.report_server import ReportServer, raw_connection, report_server, update
from testkit.agent.reviews import token

REQUEST: Final = "request.http"
"""What the agent asks."""
GRANT: Final = "grant.http"
"""What the extender answers where updates may follow."""
REFUSAL: Final = "refusal.http"
"""What it answers to a token that is for somebody else."""
FAREWELL: Final = "farewell.bin"
"""Its last words to an agent whose updates it took until then."""

SERVICE: Final = "idlegpu-agents.idlegpu.svc:9401"
PLACEHOLDER: Final = b"TOKEN"
"""In place of the token, which is another each time."""
HEAD_ENDS: Final = b"\r\n\r\n"
TIMEOUT_SECONDS: Final = 30.0


async def handshake(folder: Path) -> dict[str, bytes]:
    """Return what this checkout's programs say, by the names of the files.

    Args:
        folder: for what the extender needs.
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
    """Return a recorded request with a token that is good today."""
    return request.replace(PLACEHOLDER, text.encode())


async def agents_request() -> bytes:
    """Return what the agent of this checkout asks."""
    asked: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set_result(await reader.readuntil(HEAD_ENDS))
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()
        with contextlib.suppress(ConnectionError):
            await open_stream(address, SERVICE, Token(text=PLACEHOLDER.decode()))
        return await asked


async def granted_and_ended(server: ReportServer, request: bytes) -> tuple[bytes, bytes]:
    """Return what the extender says to an agent that then speaks for another node."""
    reader, _ = await raw_connection(server, request, frame(update("gpu-2")))
    return await reader.readuntil(HEAD_ENDS), await reader.read()
