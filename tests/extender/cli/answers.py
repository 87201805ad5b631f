"""Helpers for answers of the API."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from rich.console import Console, RenderableType

from extender.answers.answer import Answer
from extender.answers.decisions import DeviceAnswer
from extender.answers.pods import Waiting

_Answer = TypeVar("_Answer", bound=Answer)


def missing(reported: object, typed: object, at: str = "") -> list[str]:
    """Return the paths at which the typed answer lacks or changes a value."""
    if isinstance(reported, dict) and isinstance(typed, dict):
        return [
            place
            for key, value in reported.items()
            for place in (
                missing(value, typed[key], f"{at}.{key}") if key in typed else [f"{at}.{key}"]
            )
        ]
    if isinstance(reported, list) and isinstance(typed, list) and len(reported) == len(typed):
        pairs = enumerate(zip(reported, typed, strict=True))
        return [place for n, (one, two) in pairs for place in missing(one, two, f"{at}[{n}]")]
    return [] if reported == typed else [at]


def filled(kind: type[_Answer], /, **changes: object) -> _Answer:
    """Return an answer in which each required field is empty, 0 or None, unless it is given."""
    values = {
        field.name: _empty(field.type)
        for field in msgspec.structs.fields(kind)
        if field.required and field.name not in changes
    }
    return kind(**values, **changes)


def waiting(**changes: Any) -> Waiting:
    """Return a waiting pod."""
    return filled(Waiting, pod="team/p", scheduler="s", waiting_seconds=90.0, **changes)


def device(**changes: Any) -> DeviceAnswer:
    """Return an idle device."""
    return filled(DeviceAnswer, state="idle", **changes)


def _empty(kind: Any) -> object:
    parts = get_args(kind)
    if type(None) in parts:
        return None
    bare = get_origin(kind) or kind
    return filled(bare) if issubclass(bare, msgspec.Struct) else bare()


def rendered(shown: RenderableType, width: int = 300) -> list[str]:
    """Return the lines that a command prints."""
    console = Console(width=width, markup=False, force_terminal=False)
    with console.capture() as captured:
        console.print(shown)
    return [line.rstrip() for line in captured.get().splitlines()]


def row_of(lines: Sequence[str], number: int = 1) -> list[str]:
    """Return the cells of a row of a table with wide gaps, the header being row 0."""
    return re.split(r" {2,}", lines[number].strip())
