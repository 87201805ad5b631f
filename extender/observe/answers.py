"""Answers of the JSON API: small ones at once, long ones piece by piece.

A fleet of 40,000 devices takes a second to write down: nothing here may hold the event loop for
longer than one piece takes, for kube-scheduler waits on the same loop.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import orjson
from aiohttp import hdrs, web

CONTENT_TYPE = "application/json"


def json_answer(document: Mapping[str, object], status: int = 200) -> web.Response:
    """Return a document whole."""
    return web.Response(body=orjson.dumps(document), status=status, content_type=CONTENT_TYPE)


def error_answer(status: int, message: str) -> web.Response:
    """Return what is wrong with a question."""
    return json_answer({"error": message}, status)


async def stream_answer(
    request: web.Request,
    name: str,
    pieces: Iterable[Sequence[object]],
    rest: Mapping[str, object] | None = None,
) -> web.StreamResponse:
    """Write `{"name": [...], **rest}`, making the list as it goes.

    Args:
        request: the question.
        name: the list's name.
        pieces: the list's items, some at a time; each piece is made between two turns of the loop.
        rest: other fields of the document.
    """
    response = web.StreamResponse()
    response.content_type = CONTENT_TYPE
    await response.prepare(request)
    if request.method == hdrs.METH_HEAD:
        return response
    try:
        await response.write(b"{%b:[" % orjson.dumps(name))
        separator = b""
        for piece in pieces:
            for item in piece:
                await response.write(separator + orjson.dumps(item))
                separator = b","
            await asyncio.sleep(0)
        tail = orjson.dumps(rest or {})[1:]
        await response.write(b"]," + tail if rest else b"]" + tail)
        await response.write_eof()
    except ConnectionError:
        # The reader has gone away: that is no fault of ours.
        response.force_close()
    return response


def chunks(names: Iterable[str], size: int) -> Iterable[list[str]]:
    """Return the names, `size` at a time.

    Example:
        >>> list(chunks("abc", 2))
        [['a', 'b'], ['c']]
    """
    rest = iter(names)
    while chunk := list(islice(rest, size)):
        yield chunk
