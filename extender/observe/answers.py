"""Answers of the JSON API: small ones at once, long ones piece by piece.

A fleet of 40,000 devices takes a second to write down: nothing here may hold the event loop for
longer than one piece takes, for kube-scheduler waits on the same loop.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from aiohttp import hdrs, web

from extender.observe.seen import write_json

Item = TypeVar("Item")

CONTENT_TYPE = "application/json"
ANSWER_SECONDS = 120.0
"""Whoever reads longer is let go: what an answer rests on, old decisions too, is kept for it."""
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
    response = web.StreamResponse(headers=NOT_KEPT)
    response.content_type = CONTENT_TYPE
    await response.prepare(request)
    if request.method == hdrs.METH_HEAD:
        return response
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await response.write(b"{%b:[" % write_json(name))
            separator = b""
            async for piece in _in_turns(pieces):
                for item in piece:
                    await response.write(separator + write_json(item))
                    separator = b","
            tail = write_json(rest or {})[1:]
            await response.write(b"]," + tail if rest else b"]" + tail)
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


async def _in_turns(
    pieces: Iterable[Sequence[object]] | AsyncIterable[Sequence[object]],
) -> AsyncIterator[Sequence[object]]:
    """Yield the pieces, with a turn of the loop for others after each."""
    if isinstance(pieces, AsyncIterable):
        async for piece in pieces:
            yield piece
            await asyncio.sleep(0)
        return
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)


def chunks(items: Iterable[Item], size: int) -> Iterable[list[Item]]:
    """Return the items, `size` at a time.

    Example:
        >>> list(chunks("abc", 2))
        [['a', 'b'], ['c']]
    """
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
