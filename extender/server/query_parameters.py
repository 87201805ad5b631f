"""Parse and check query parameters; an error names the value and what is allowed."""

import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from aiohttp import web
from multidict import MultiMapping

from extender.answers.routes import Route
from extender.core.request.annotations import BOOLEAN_ALLOWED, parse_boolean
from extender.server.json_answers import error_answer

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
    """Return the definition of a route; parameters that the route lacks get status 400."""

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
            raise QueryError(name[:_SHOWN], query[name], f"is no parameter of this path: use {use}")
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
