"""Describe settings in messages: validation errors, and the differences between two sets."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel
from pydantic_core import ErrorDetails
from typing_extensions import override  # in typing from Python 3.12 on

from extender.settings.spec import Setting, SettingKind, format_value, is_secret

_MAX_SHOWN: Final = 80
"""Longest value in a message, in characters."""

_HIDDEN: Final = "(hidden)"
_QUOTES: Final = "'\""

_RANGE_ERRORS: Final = {"greater_than_equal", "greater_than", "less_than_equal", "less_than"}
_SECTION_ERRORS: Final = {"model_type", "model_attributes_type", "dict_type"}
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/\s]*@")
_QUERY: Final = re.compile(r"(?<=\?)\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Sources of the settings, for messages.

    Attributes:
        file: path of the settings file as the user wrote it, or "".
        variables: environment variables by path of the setting.
    """

    file: str
    variables: Mapping[tuple[str, ...], str]


def _redact(text: str) -> str:
    """Hide user, password and query of the URLs in a text.

    Example:
        >>> _redact("http://me:word@prometheus:9090/x?token=1")
        'http://(hidden)@prometheus:9090/x?(hidden)'
    """
    if "://" not in text:
        return text
    return _QUERY.sub(_HIDDEN, _CREDENTIALS.sub(f"{_HIDDEN}@", text))


def describe(
    error: ErrorDetails, origin: Origin, settings: Mapping[tuple[str, ...], Setting]
) -> str:
    """Format a validation error: its place, the value, and the allowed values."""
    where = tuple(str(part) for part in error["loc"])
    setting = _setting_at(where, settings)
    return f"{_place(error['loc'], origin, setting)}: {_problem(error, where, setting, settings)}"


def _setting_at(
    where: tuple[str, ...], settings: Mapping[tuple[str, ...], Setting]
) -> Setting | None:
    """Return the setting at a path, or the one that contains it."""
    starts = (where[:length] for length in range(len(where), 0, -1))
    return next((settings[start] for start in starts if start in settings), None)


def _place(loc: tuple[int | str, ...], origin: Origin, setting: Setting | None) -> str:
    """Name the variable, or the file and the path in it."""
    path = tuple(str(part) for part in loc)
    if path in origin.variables:
        return origin.variables[path]
    if setting is not None and setting.path in origin.variables:
        inner = _dotted(loc[len(setting.path) :], setting)
        return f"{origin.variables[setting.path]}{' ' if inner else ''}{inner}"
    return ": ".join(filter(None, (origin.file, _dotted(loc, setting)))) or "settings"


def _dotted(loc: tuple[int | str, ...], setting: Setting | None) -> str:
    """Format a path as in the file: `health.xid.79`, `resources[0]`."""
    is_list = setting is not None and setting.kind is SettingKind.LIST
    text = ""
    for part in loc:
        if part != "[key]":  # pydantic's mark for the key of a map
            text += f"[{part}]" if is_list and isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _problem(
    error: ErrorDetails,
    where: tuple[str, ...],
    setting: Setting | None,
    settings: Mapping[tuple[str, ...], Setting],
) -> str:
    """Describe the problem with a value, and the allowed values."""
    kind = error["type"]
    if kind == "extra_forbidden":
        return _unknown(where, setting, settings)
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return _redact(error["msg"].removeprefix("Value error, "))
    shown = _shown(error["input"], where)
    is_whole = setting is not None and where == setting.path
    if setting is not None and is_whole and kind in _RANGE_ERRORS:
        return f"{shown.strip(_QUOTES)} is out of bounds: must be {setting.limits}"
    if setting is not None and is_whole:
        return f"{shown} is not allowed: must be {setting.allowed}"
    if setting is None and kind in _SECTION_ERRORS:
        names = _names_in(where, settings)
        return f"{shown} is not allowed: must map names to values: {', '.join(names)}"
    message = error["msg"].replace("Input should be", "must be").replace("'", "")
    return f"{shown} is not allowed: {message[:1].lower()}{message[1:]}"


def _shown(value: object, where: tuple[str, ...]) -> str:
    """Format a value on one short line, without secrets."""
    if any(is_secret(part) for part in where):
        return _HIDDEN
    if isinstance(value, Mapping):
        return f"a map of {len(value)}"  # nested values may contain secrets
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()  # as YAML writes it
    text = _redact(repr(value))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _names_in(section: tuple[str, ...], settings: Mapping[tuple[str, ...], Setting]) -> list[str]:
    """Return the names that a section allows."""
    depth = len(section)
    return list(dict.fromkeys(path[depth] for path in settings if path[:depth] == section))


def _unknown(
    where: tuple[str, ...],
    setting: Setting | None,
    settings: Mapping[tuple[str, ...], Setting],
) -> str:
    """Describe an unknown name, with a suggestion if a known name is similar."""
    if setting is not None:
        return "is no known name"
    by_name = {candidate.name: candidate for candidate in settings.values()}
    sections = {path[0] for path in settings if len(path) > 1} if len(where) == 1 else set()
    close = difflib.get_close_matches(".".join(where), [*by_name, *sorted(sections)], n=1)
    if not close:  # perhaps the name is correct, but in the wrong section
        by_last = {path[-1]: ".".join(path) for path in settings}
        close = [by_last[name] for name in difflib.get_close_matches(where[-1], by_last, n=1)]
    if close:
        return f"is no known setting: did you mean {close[0]}?"
    return f"is no known setting: must be one of {', '.join(_names_in(where[:-1], settings))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """One setting with a changed value.

    Attributes:
        name: dotted name of the setting.
        before: old value as text, without secrets.
        after: new value as text, without secrets.
    """

    name: str
    before: str
    after: str

    @override
    def __str__(self) -> str:
        return f"{self.before or _NONE} -> {self.after or _NONE}"


_NONE = "(none)"


def list_changes(
    before: BaseModel, after: BaseModel, settings: Mapping[tuple[str, ...], Setting]
) -> tuple[SettingChange, ...]:
    """Return the settings with different values, in the order of the settings file."""
    return tuple(
        SettingChange(
            name=setting.name,
            before=show_value(before, setting),
            after=show_value(after, setting),
        )
        for path, setting in settings.items()
        if _value_at(before, path) != _value_at(after, path)
    )


def show_value(values: BaseModel, setting: Setting) -> str:
    """Format a setting's value for people; "" for no value, secrets hidden."""
    value = _value_at(values, setting.path)
    # A path or a number, such as the lifetime of a token, reveals no secret.
    is_hidden = is_secret(setting.name) and not isinstance(value, Path | float) and bool(value)
    return _HIDDEN if is_hidden else _redact(format_value(value, setting.kind))


def _value_at(values: BaseModel, path: tuple[str, ...]) -> object:
    value: object = values
    for name in path:
        value = getattr(value, name)
    return value
