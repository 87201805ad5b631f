"""Parse query parameters, and write JSON answers in parts that yield to the event loop.

Encoding 40,000 devices takes a second. kube-scheduler's requests share the event loop, so no part
may hold it for longer than a fraction of a millisecond.
"""

import asyncio
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import hdrs, web
from multidict import MultiMapping

from extender.answers.answer import Answer, ErrorAnswer
from extender.answers.routes import Route
from extender.core.nodes.node_names import near_names
from extender.core.request.annotations import BOOLEAN_ALLOWED, parse_boolean
from extender.runtime.cooperative import yield_to_loop
from extender.server.redaction import write_json

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SHOWN = 80
"""Maximum length of a value in error messages."""


class QueryError(ValueError):
    """A query parameter is invalid.

    Args:
        name: name of the parameter.
        value: its value; long values are cut in the message.
        problem: the fault and the allowed values; follows the value in the message.
    """

    def __init__(self, name: str, value: str, problem: str) -> None:
        shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        super().__init__(f"{name}={shown!r} {problem}")


def serve(route: Route[Any], handler: Handler) -> web.RouteDef:
    """Return the definition of a route; requests with unknown parameters get status 400."""

    async def handle(request: web.Request) -> web.StreamResponse:
        check_parameters(request.query, route.parameters)
        return await handler(request)

    return web.route(route.method, route.path, refusing(handle))


def refusing(handler: Handler) -> Handler:
    """Wrap a handler: answer a `QueryError` with status 400 and its message."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except QueryError as error:
            return error_answer(400, str(error))

    return handle


def check_parameters(query: MultiMapping[str], known: Collection[str]) -> None:
    """Check that all parameters are known and given once.

    Raises:
        QueryError: a parameter is unknown or repeated.
    """
    for name in query:
        if name not in known:
            use = ", ".join(sorted(known)) or "none"
            raise QueryError(
                name[:_SHOWN], query[name], f"is not a parameter of this path: use {use}"
            )
        if len(values := query.getall(name)) > 1:
            raise QueryError(name, values[1], "is given more than once: use one value")


def read_boolean(query: Mapping[str, str], name: str) -> bool:
    """Parse a boolean parameter; absent means false.

    Raises:
        QueryError: the value is not a boolean.
    """
    text = query.get(name, "false")
    try:
        return parse_boolean(text)
    except ValueError as error:
        raise QueryError(name, text, f"must be {BOOLEAN_ALLOWED}") from error


def read_number(query: Mapping[str, str], route: Route[Any], name: str) -> int:
    """Parse an integer parameter of a route.

    Raises:
        QueryError: the value is not an integer or out of the route's bounds.
    """
    number, text = route.number(name), query.get(name)
    if text is None:
        return number.default
    if not re.fullmatch(r"[0-9]{1,10}", text) or not number.low <= int(text) <= number.high:
        raise QueryError(name, text, f"must be a whole number from {number.low} to {number.high}")
    return int(text)


_Item = TypeVar("_Item")

CONTENT_TYPE = "application/json"
_ANSWER_SECONDS = 120.0
"""Time limit for a slow reader: an open answer keeps its data, such as old decisions, in memory."""
_PIECE_ITEMS = 64
"""Items of a long list to encode between two yields: a node with eight devices takes 0.03 ms."""
_PIECE_BYTES = 1 << 18
"""Bytes of encoded JSON to copy between two yields."""
NOT_KEPT = {hdrs.CACHE_CONTROL: "no-store"}
"""Headers that forbid caching: an answer contains only what its caller may see."""


_Document = Answer | Mapping[str, object]


def json_answer(document: _Document, status: int = 200) -> web.Response:
    """Return a document as a JSON response, redacted for the caller."""
    return web.Response(
        body=write_json(document), status=status, content_type=CONTENT_TYPE, headers=NOT_KEPT
    )


_NEAR: Final = 4
"""Number of similar node names to show for an unknown name."""


def error_answer(status: int, message: str) -> web.Response:
    """Return an error as a JSON response."""
    return json_answer(ErrorAnswer(error=message), status)


def unknown_node(name: str, nodes: Iterable[str]) -> str:
    """Return the error message for a node that is not among the known ones."""
    near = ", ".join(near_names(name, sorted(nodes), _NEAR))
    hint = f"did you mean {near}? " if near else ""
    return f"node {name!r} is not known: {hint}`idlegpu nodes` lists all (GET /v1/nodes)"


def unknown_decision(wanted: str) -> str:
    """Return the error message for an unknown decision id or number."""
    where = "`idlegpu decisions` lists the last (GET /v1/decisions)"
    return f"decision {wanted!r} is not remembered: {where}"


async def stream_answer(
    request: web.Request,
    answer: Answer,
    name: str,
    pieces: Iterable[Sequence[_Document]] | AsyncIterable[Sequence[_Document]],
) -> web.StreamResponse:
    """Stream an answer while one of its lists is being built, redacted for the caller.

    Args:
        request: the HTTP request.
        answer: the answer; its other fields are written after the list.
        name: field of the list, which is empty in `answer`.
        pieces: batches of the list's items; the event loop runs between two batches.
    """
    return await _stream(request, _listed(answer, name, pieces))


async def document_answer(request: web.Request, document: _Document) -> web.StreamResponse:
    """Return a document redacted for the caller; stream it if it contains long lists."""
    if not any(_is_long(value) for _, value in _fields(document)):
        return json_answer(document)
    return await _stream(request, _one_by_one(write_in_pieces(document, write_json)))


def _fields(document: _Document) -> Iterable[tuple[str, object]]:
    if isinstance(document, Answer):
        return ((name, getattr(document, name)) for name in document.__struct_fields__)
    return document.items()


def write_in_pieces(document: _Document, write: Callable[[object], bytes]) -> Iterator[bytes]:
    """Encode a document in parts; long lists are emptied while they are written.

    Freeing thousands of records at once would take as long as encoding some hundred.

    Args:
        document: the document; a `msgspec.Raw` value is already JSON and is copied.
        write: encodes a value, redacted for the reader.
    """
    yield b"{"
    separator = b""
    for name, value in _fields(document):
        yield b"%b%b:" % (separator, write(name))
        separator = b","
        if isinstance(value, msgspec.Raw):
            text = bytes(value)
            yield from (text[at : at + _PIECE_BYTES] for at in range(0, len(text), _PIECE_BYTES))
        elif isinstance(value, list) and _is_long(value):
            bracket = b"["
            while value:
                yield bracket + write(value[:_PIECE_ITEMS])[1:-1]
                del value[:_PIECE_ITEMS]
                bracket = b","
            yield b"]"
        else:
            yield write(value)
    yield b"}"


def _is_long(value: object) -> bool:
    is_list = isinstance(value, list) and len(value) > _PIECE_ITEMS
    return is_list or isinstance(value, msgspec.Raw)


async def _one_by_one(
    pieces: Iterable[_Item] | AsyncIterable[_Item],
) -> AsyncGenerator[_Item, None]:
    """Yield the parts, and let the event loop run after each."""
    if isinstance(pieces, AsyncIterable):
        async for piece in pieces:
            yield piece
            await yield_to_loop()
        return
    for piece in pieces:
        yield piece
        await yield_to_loop()


async def _listed(
    answer: Answer,
    name: str,
    pieces: Iterable[Sequence[_Document]] | AsyncIterable[Sequence[_Document]],
) -> AsyncGenerator[bytes, None]:
    """Encode the parts of a `stream_answer`."""
    yield b"{%b:[" % write_json(name)
    separator = b""
    async for piece in _one_by_one(pieces):
        for item in piece:
            if isinstance(item, dict) and any(map(_is_long, item.values())):
                yield separator
                async for part in _one_by_one(write_in_pieces(item, write_json)):
                    yield part
            else:
                yield separator + write_json(item)
            separator = b","
    rest = {other: value for other, value in _fields(answer) if other != name}
    yield b"]," + write_json(rest)[1:] if rest else b"]}"


async def _stream(request: web.Request, parts: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Send an answer part by part."""
    response = web.StreamResponse(headers=NOT_KEPT)
    response.content_type = CONTENT_TYPE
    await response.prepare(request)
    if request.method == hdrs.METH_HEAD:
        return response
    try:
        async with asyncio.timeout(_ANSWER_SECONDS), aclosing(parts):
            async for part in parts:
                await response.write(part)
            await response.write_eof()
    except ConnectionError:
        # The client has closed the connection.
        response.force_close()
    except TimeoutError:
        # Abort without an end marker, so that the client does not take the answer for complete.
        response.force_close()
        if request.transport is not None:
            request.transport.abort()
    return response


def chunks(items: Iterable[_Item], size: int) -> Iterable[list[_Item]]:
    """Split items into lists of at most `size`.

    Example:
        >>> list(chunks("abc", 2))
        [['a', 'b'], ['c']]
    """
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


def moment(at: float) -> str:
    """Format a time as RFC 3339 with milliseconds, in UTC.

    Example:
        >>> moment(0.5)
        '1970-01-01T00:00:00.500+00:00'
    """
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
