"""Parameters of the API's questions: read, bounded, and refused with what is allowed."""

import re
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from multidict import MultiMapping

from extender.core.annotations import BOOLEAN_ALLOWED, parse_boolean
from extender.observe.answers import error_answer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SHOWN = 80
"""So many characters of a value are enough to recognize it."""


class QueryError(ValueError):
    """A parameter of a question that cannot be used.

    Args:
        name: the parameter.
        value: its value; shown, and cut where it is long.
        problem: what is wrong with it and what is allowed, to follow the value.
    """

    def __init__(self, name: str, value: str, problem: str) -> None:
        shown = value if len(value) <= SHOWN else f"{value[:SHOWN]}..."
        super().__init__(f"{name}={shown!r} {problem}")


def refusing(handler: Handler) -> Handler:
    """Return the handler; a parameter that cannot be used is answered with what is allowed."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except QueryError as error:
            return error_answer(400, str(error))

    return handle


def check_parameters(query: MultiMapping[str], known: frozenset[str]) -> None:
    """Refuse parameters that mean nothing here, and ones that are given twice.

    Raises:
        QueryError: which one.
    """
    for name in query:
        if name not in known:
            use = ", ".join(sorted(known)) or "none"
            raise QueryError(name[:SHOWN], query[name], f"is no parameter of this path: use {use}")
        if len(values := query.getall(name)) > 1:
            raise QueryError(name, values[1], "is given more than once: use one value")


def read_boolean(query: Mapping[str, str], name: str) -> bool:
    """Read a parameter that is true or false; absent is false.

    Raises:
        QueryError: it is neither.
    """
    text = query.get(name, "false")
    try:
        return parse_boolean(text)
    except ValueError as error:
        raise QueryError(name, text, f"must be {BOOLEAN_ALLOWED}") from error


def read_number(query: Mapping[str, str], name: str, *, default: int, low: int, high: int) -> int:
    """Read a whole number.

    Raises:
        QueryError: it is none, or out of bounds.
    """
    text = query.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise QueryError(name, text, f"must be a whole number from {low} to {high}")
    return int(text)
