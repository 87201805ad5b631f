"""Serve GET requests over HTTP, and limit connections and slow clients."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import h11

from extender.runtime.logs import LogThrottle

# aiohttp was tried in place of h11: 89 lines of code instead of 126, and 12 MiB of memory instead
# of 0.5. Most limits stay ours, because its server has none for the number of connections, for a
# slow head, or for a response that is not read. It also logs a traceback for each malformed
# request, so any client could flood the log.

logger = logging.getLogger(__name__)

_IDLE_SECONDS: Final = 120.0
"""Idle time after which a connection is closed; Prometheus scrapes every 15 to 60 s."""

_REQUEST_SECONDS: Final = 10.0
"""Time limit for receiving a request, and for sending its response."""

_MAX_CONNECTIONS: Final = 64
"""Limit of open connections; above it, the connection that has been silent longest is closed."""
_READ_BYTES: Final = 16 << 10
_MAX_HEAD_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An HTTP response.

    Attributes:
        content_type: media type of the body.
    """

    status: int = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"
    body: bytes = b""


Headers = Mapping[str, str]
"""Request headers by lower-case name."""

Route = Callable[[Headers], Answer]

Address = tuple[str, int]


@asynccontextmanager
async def serve_http(host: str, port: int, routes: Mapping[str, Route]) -> AsyncIterator[Address]:
    """Serve routes while the context is open; yield the bound address.

    Args:
        host: address to listen on.
        port: port to listen on; 0 for any free port.
        routes: handler of each path.

    Raises:
        OSError: the address cannot be used.
    """
    connections: dict[asyncio.Task[None], _Connection] = {}
    throttle = LogThrottle()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= _MAX_CONNECTIONS:
            # Close the connection that has been silent longest: idle connections must not keep
            # the kubelet or Prometheus out.
            silent = min(connections, key=lambda task: connections[task].last_received_at)
            del connections[silent]
            silent.cancel()
        connection = _Connection(reader, writer, routes, throttle)
        task = asyncio.create_task(connection.run(), name="http")
        connections[task] = connection

        def release(task: asyncio.Task[None]) -> None:
            # A callback: a task that is canceled before its first step runs no `finally`. Abort,
            # because `close` waits until the client has read everything, which may be never.
            connections.pop(task, None)
            writer.transport.abort()

        task.add_done_callback(release)

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
    """One client connection; serves several requests in sequence.

    Args:
        throttle: decides whether a failed request is logged.

    Attributes:
        last_received_at: event-loop time at which the client last sent data.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        routes: Mapping[str, Route],
        throttle: LogThrottle,
    ) -> None:
        self._throttle = throttle
        self._reader = reader
        self._writer = writer
        self._routes = routes
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._method = b"GET"
        self.last_received_at = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Serve requests until the client disconnects, times out, or sends malformed HTTP."""
        with contextlib.suppress(OSError, TimeoutError):
            while await self._answer_next():
                self._protocol.start_next_cycle()
            self._writer.close()
            async with asyncio.timeout(_REQUEST_SECONDS):
                await self._writer.wait_closed()

    async def _answer_next(self) -> bool:
        """Serve one request; return whether another may follow."""
        try:
            request = await self._next_request()
            if request is None:
                return False
            answer = self._answer(request)
        except h11.RemoteProtocolError as error:
            if self._protocol.our_state is h11.ERROR:
                return False
            answer = _text_answer(HTTPStatus(error.error_status_hint), str(error))
            await self._send(answer, self._method)
            return False
        await self._send(answer, request.method)
        return self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE

    async def _next_request(self) -> h11.Request | None:
        """Receive a complete request; None if the client has disconnected."""
        request, self._method = None, b"GET"
        clock = asyncio.get_running_loop().time
        deadline, is_idle = clock() + _IDLE_SECONDS, True
        while True:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout_at(deadline):
                    self._protocol.receive_data(await self._reader.read(_READ_BYTES))
                self.last_received_at = clock()
                if is_idle:  # the limit is for the whole request, however it arrives
                    deadline, is_idle = self.last_received_at + _REQUEST_SECONDS, False
            elif isinstance(event, h11.Request):
                request, self._method = event, event.method
            elif isinstance(event, h11.EndOfMessage):
                return request
            elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return None

    def _answer(self, request: h11.Request) -> Answer:
        path = request.target.decode("ascii", "replace").partition("?")[0]
        if request.method not in {b"GET", b"HEAD"}:
            return _text_answer(HTTPStatus.METHOD_NOT_ALLOWED, "the method must be GET or HEAD")
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(sorted(self._routes))
            return _text_answer(
                HTTPStatus.NOT_FOUND, f"no such path: {path}: the paths are {known}"
            )
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers}
        try:
            return route(headers)
        except Exception:  # one failed request must not stop the agent
            if (unlogged := self._throttle.due(path)) is not None:
                extra = {"path": path, "also_unlogged": unlogged}
                logger.exception("request failed", extra=extra)
            return _text_answer(
                HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed: see the agent's log"
            )

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
        async with asyncio.timeout(_REQUEST_SECONDS):
            await self._writer.drain()


def _text_answer(status: int, text: str) -> Answer:
    return Answer(status=status, body=f"{text}\n".encode())
