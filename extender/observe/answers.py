"""Answers of the JSON API: small ones at once, long ones piece by piece.

A fleet of 40,000 devices takes a second to write down: nothing here may hold the event loop for
longer than one piece takes, for kube-scheduler waits on the same loop.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from itertools import islice
from typing import TypeVar

import msgspec
from aiohttp import hdrs, web

from extender.observe.seen import write_json
from extender.stepping import next_turn

Item = TypeVar("Item")

CONTENT_TYPE = "application/json"
ANSWER_SECONDS = 120.0
"""Whoever reads longer is let go: what an answer rests on, old decisions too, is kept for it."""
PIECE_ITEMS = 64
"""Items of a long list that are written between two turns of the loop: a node with eight devices
takes 0.03 ms."""
PIECE_BYTES = 1 << 18
"""Bytes of what is JSON already, that are written between two turns."""
NOT_KEPT = {hdrs.CACHE_CONTROL: "no-store"}
"""What one caller sees is for nobody else."""


def json_answer(document: Mapping[str, object], status: int = 200) -> web.Response:
    """Return a document whole, as the caller may see it."""
    return web.Response(
        body=write_json(document), status=status, content_type=CONTENT_TYPE, headers=NOT_KEPT
    )


def error_answer(status: int, message: str) -> web.Response:
    """Return what is wrong with a question."""
    return json_answer({"error": message}, status)


def unknown_node(name: str) -> str:
    """Return what is wrong with a node's name."""
    return f"node {name!r} is not known: GET /v1/nodes (idlegpu nodes) lists the nodes"


def unknown_decision(wanted: str) -> str:
    """Return what is wrong with a decision's id or number."""
    where = "GET /v1/decisions (idlegpu decisions) lists the last"
    return f"decision {wanted!r} is not remembered: {where}"


async def stream_answer(
    request: web.Request,
    name: str,
    pieces: Iterable[Sequence[object]] | AsyncIterable[Sequence[object]],
    rest: Mapping[str, object] | None = None,
) -> web.StreamResponse:
    """Write `{"name": [...], **rest}` as the caller may see it, making the list as it goes.

    Args:
        request: the question.
        name: the list's name.
        pieces: the list's items, some at a time; each piece is made between two turns of the loop.
        rest: other fields of the document, written last.
    """
    return await _stream(request, _listed(name, pieces, rest))


async def document_answer(
    request: web.Request, document: Mapping[str, object]
) -> web.StreamResponse:
    """Return a document as the caller may see it; long lists in it are written piece by piece."""
    if not any(map(_is_long, document.values())):
        return json_answer(document)
    return await _stream(request, _one_by_one(write_in_pieces(document, write_json)))


def write_in_pieces(
    document: Mapping[str, object], write: Callable[[object], bytes]
) -> Iterator[bytes]:
    """Write a document, of its long lists some items at a time; these are emptied on the way.

    To free thousands of records at once takes as long as to write some hundred.

    Args:
        document: a `msgspec.Raw` in it is JSON already, and goes as it is.
        write: writes a value, as those may see it whom it is for.
    """
    yield b"{"
    separator = b""
    for name, value in document.items():
        yield b"%b%b:" % (separator, write(name))
        separator = b","
        if isinstance(value, msgspec.Raw):
            text = bytes(value)
            yield from (text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES))
        elif isinstance(value, list) and _is_long(value):
            bracket = b"["
            while value:
                yield bracket + write(value[:PIECE_ITEMS])[1:-1]
                del value[:PIECE_ITEMS]
                bracket = b","
            yield b"]"
        else:
            yield write(value)
    yield b"}"


def _is_long(value: object) -> bool:
    is_list = isinstance(value, list) and len(value) > PIECE_ITEMS
    return is_list or isinstance(value, msgspec.Raw)


async def _one_by_one(
    pieces: Iterable[Item] | AsyncIterable[Item],
) -> AsyncGenerator[Item, None]:
    """Yield the pieces, with a turn of the loop for others after each."""
    if isinstance(pieces, AsyncIterable):
        async for piece in pieces:
            yield piece
            await next_turn()
        return
    for piece in pieces:
        yield piece
        await next_turn()


async def _listed(
    name: str,
    pieces: Iterable[Sequence[object]] | AsyncIterable[Sequence[object]],
    rest: Mapping[str, object] | None,
) -> AsyncGenerator[bytes, None]:
    """Yield what `stream_answer` writes."""
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
    tail = write_json(rest or {})[1:]
    yield b"]," + tail if rest else b"]" + tail


async def _stream(request: web.Request, parts: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Answer with what is written part by part."""
    response = web.StreamResponse(headers=NOT_KEPT)
    response.content_type = CONTENT_TYPE
    await response.prepare(request)
    if request.method == hdrs.METH_HEAD:
        return response
    try:
        async with asyncio.timeout(ANSWER_SECONDS), aclosing(parts):
            async for part in parts:
                await response.write(part)
            await response.write_eof()
    except ConnectionError:
        # The reader has gone away: that is no fault of ours.
        response.force_close()
    except TimeoutError:
        # Cut off, so that nobody takes it for the whole: what is still buffered goes with it.
        response.force_close()
        if request.transport is not None:
            request.transport.abort()
    return response


def chunks(items: Iterable[Item], size: int) -> Iterable[list[Item]]:
    """Return the items, `size` at a time.

    Example:
        >>> list(chunks("abc", 2))
        [['a', 'b'], ['c']]
    """
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
