"""A small HTTP server for what the agent shows: GET, and answers that are ready at once.

aiohttp would take 16 of the 60 MiB that the agent may take; h11 knows the protocol in half of one.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import h11

logger = logging.getLogger(__name__)

IDLE_SECONDS: Final = 120.0
"""An idle connection is kept so long: Prometheus scrapes every 15 to 60 s."""

REQUEST_SECONDS: Final = 10.0
"""A request has to arrive, and its answer to leave, in so long."""

MOST_CONNECTIONS: Final = 64
_READ_BYTES: Final = 16 << 10
_MOST_HEAD_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is answered.

    Attributes:
        status: HTTP status.
        content_type: of the body.
        body: the body.
    """

    status: int = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"
    body: bytes = b""


Headers = Mapping[str, str]
"""Headers of a request by their name in lower case."""

Route = Callable[[Headers], Answer]

Address = tuple[str, int]


@asynccontextmanager
async def serve_http(host: str, port: int, routes: Mapping[str, Route]) -> AsyncIterator[Address]:
    """Serve while the context is open; yield the address.

    Args:
        host: to listen on.
        port: to listen on, 0 for any.
        routes: what answers each path.

    Raises:
        OSError: the address cannot be used.
    """
    connections: dict[asyncio.Task[None], _Connection] = {}

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= MOST_CONNECTIONS:
            # The longest silent one gives way: idle connections keep neither kubelet nor
            # Prometheus out.
            silent = min(connections, key=lambda task: connections[task].heard_at)
            del connections[silent]
            silent.cancel()
        connection = _Connection(reader, writer, routes)
        task = asyncio.create_task(connection.run(), name="http")
        connections[task] = connection
        task.add_done_callback(lambda task: connections.pop(task, None))

    server = await asyncio.start_server(accept, host, port)
    try:
        name = server.sockets[0].getsockname()
        yield str(name[0]), int(name[1])
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.wait({*connections, asyncio.create_task(server.wait_closed())})


class _Connection:
    """One connection of a client, which may ask several times.

    Args:
        reader: what it sends.
        writer: what it is sent.
        routes: what answers each path.

    Attributes:
        heard_at: when the client last sent something, by the loop's clock.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        routes: Mapping[str, Route],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._routes = routes
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=_MOST_HEAD_BYTES)
        self.heard_at = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Answer until the client leaves, is silent for long, or says what cannot be read."""
        with contextlib.suppress(OSError, TimeoutError):
            try:
                while await self._answer_next():
                    self._protocol.start_next_cycle()
            finally:
                self._writer.close()

    async def _answer_next(self) -> bool:
        """Answer one request; tell whether another may follow."""
        try:
            request = await self._next_request()
            if request is None:
                return False
            answer = self._answer(request)
        except h11.RemoteProtocolError as error:
            if self._protocol.our_state is h11.ERROR:
                return False
            await self._send(_text(HTTPStatus(error.error_status_hint), str(error)), b"GET")
            return False
        await self._send(answer, request.method)
        return self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE

    async def _next_request(self) -> h11.Request | None:
        """Read a request to its end, None where the client has left."""
        request = None
        limit = IDLE_SECONDS
        while True:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout(limit):
                    self._protocol.receive_data(await self._reader.read(_READ_BYTES))
                self.heard_at = asyncio.get_running_loop().time()
                limit = REQUEST_SECONDS
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.EndOfMessage):
                return request
            elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return None

    def _answer(self, request: h11.Request) -> Answer:
        path = request.target.decode("ascii", "replace").partition("?")[0]
        if request.method not in {b"GET", b"HEAD"}:
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is allowed")
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(sorted(self._routes))
            return _text(HTTPStatus.NOT_FOUND, f"nothing is at {path}: there are {known}")
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers}
        try:
            return route(headers)
        except Exception:  # the other answers, and the agent's work, go on
            logger.exception("request failed", extra={"path": path})
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "the agent failed: see its log")

    async def _send(self, answer: Answer, method: bytes) -> None:
        head = h11.Response(
            status_code=answer.status,
            headers=[
                ("Content-Type", answer.content_type),
                ("Content-Length", str(len(answer.body))),
            ],
        )
        parts = [self._protocol.send(head)]
        if method != b"HEAD":
            parts.append(self._protocol.send(h11.Data(data=answer.body)))
        parts.append(self._protocol.send(h11.EndOfMessage()))
        self._writer.writelines(part for part in parts if part)
        async with asyncio.timeout(REQUEST_SECONDS):
            await self._writer.drain()


def _text(status: int, text: str) -> Answer:
    return Answer(status=status, body=f"{text}\n".encode())
