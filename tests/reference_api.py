"""Render the reference of the JSON API from the route table and the types of the answers."""

import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from extender.answers.answer import Answer
from extender.answers.routes import ROUTES, Number, Route

SCALARS: Final = {str: "string", int: "integer", float: "number", bool: "boolean"}
FIELD: Final = re.compile(r"^    (\w+): (.+(?:\n {6,}.+)*)$", re.MULTILINE)
"""A field in the section "Attributes" of a docstring, with its meaning."""


def render_routes() -> str:
    """Render the table of the routes."""
    rows = ["| route | caller | what |\n|---|---|---|"]
    for route in ROUTES:
        name = f"`{route.method} {route.path}`"
        if route.answer is not Answer:
            name = f"[{name}](#{_anchor(route)})"
        caller = "any" if route.is_open else "with a token"
        what = route.summary or _described(route.answer)[0].partition("\n\n")[0]
        rows.append(f"| {name} | {caller} | {_joined(what)} |")
    return "\n".join(rows) + "\n"


def render_answers() -> str:
    """Render a section for each route that answers JSON: its parameters, and new types."""
    shown: set[type[Answer]] = set()
    sections = [_section(route, shown) for route in ROUTES if route.answer is not Answer]
    return "\n".join(sections)


def _section(route: Route[Any], shown: set[type[Answer]]) -> str:
    lines = [f"## `{route.method} {route.path}`\n"]
    if route.summary:
        lines.append(f"{route.summary}\n")
    lines.append(f"Answer: [{route.answer.__name__}](#{route.answer.__name__.lower()}).\n")
    if route.parameters:
        lines.append("| parameter | meaning |\n|---|---|")
        lines += [f"| `{name}` | {_meaning(it)} |" for name, it in route.parameters.items()]
        lines.append("")
    for kind in _types(route.answer):
        if kind not in shown:
            shown.add(kind)
            lines += _type(kind)
    return "\n".join(lines)


def _meaning(parameter: str | Number) -> str:
    if isinstance(parameter, str):
        return parameter
    bounds = f"{parameter.low} to {parameter.high}"
    if parameter.default >= parameter.low:
        bounds += f", default {parameter.default}"
    return f"{parameter.meaning} ({bounds})"


def _type(kind: type[Answer]) -> Iterator[str]:
    text, attributes = _described(kind)
    yield f"### {kind.__name__}\n"
    yield "\n\n".join(map(_joined, text.split("\n\n"))) + "\n"
    base = kind.__bases__[0]
    if base is not Answer:
        yield f"It has the fields of {_name(base)}, and:\n"
    yield "| field | type | meaning |\n|---|---|---|"
    meanings = dict(FIELD.findall(attributes))
    for field in _own_fields(kind):
        meaning = _joined(meanings[field.name])
        yield f"| `{field.name}` | {_name(field.type)} | {meaning[:1].upper()}{meaning[1:]} |"
    yield ""


def _own_fields(kind: type[Answer]) -> list[msgspec.structs.FieldInfo]:
    base: Any = kind.__bases__[0]
    own = msgspec.structs.fields(kind)
    return [field for field in own if field.name not in base.__struct_fields__]


def _described(kind: type) -> tuple[str, str]:
    """Return the text of a docstring, and its section "Attributes"."""
    text, _, fields = inspect.cleandoc(kind.__doc__ or "").partition("\n\nAttributes:\n")
    return text, fields


def _types(kind: Any) -> Iterator[type[Answer]]:
    """Yield the answer types in a type: the outer ones first, but a base before its subclass."""
    if isinstance(kind, type) and issubclass(kind, Answer):
        if kind.__bases__[0] is not Answer:
            yield from _types(kind.__bases__[0])
        yield kind
        for field in _own_fields(kind):
            yield from _types(field.type)
    else:
        for part in typing.get_args(kind):
            yield from _types(part)


def _name(kind: Any) -> str:
    """Return the JSON name of a type."""
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        named = [_name(part) for part in parts if part is not types.NoneType]
        return " or ".join([*named, *(["null"] if types.NoneType in parts else [])])
    if typing.get_origin(kind) is list:
        return f"list of {_name(parts[0])}"
    if typing.get_origin(kind) is dict:
        return f"object of {_name(parts[1])}"
    if isinstance(kind, type) and issubclass(kind, Answer):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    return SCALARS[kind]


def _joined(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _anchor(route: Route[Any]) -> str:
    return re.sub(r"[^\w\- ]", "", f"{route.method} {route.path}".lower()).replace(" ", "-")
