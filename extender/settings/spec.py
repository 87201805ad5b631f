"""Describe settings: from their pydantic models for documentation, and in messages.

Tables in Markdown are for docs/settings.md. Messages name a setting, its invalid value and the
allowed values, or the differences between two sets of settings.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import override  # in typing from Python 3.12 on

from extender.core.quantity import MIB
from extender.settings.section import Unit, ValueForm

ENVIRONMENT_PREFIX: Final = "IDLEGPU_"

_UNIT_SUFFIXES: Final = {
    "_seconds": "seconds",
    "_per_second": "per second",
    "_per_minute": "per minute",
    "_mib": "MiB",
    "_celsius": "degrees Celsius",
}
_SECRET_WORDS: Final = ("token", "password", "secret", "headers", "authorization")
_BINARY_UNITS: Final = ("Ti", "Gi", "Mi", "Ki")

_HEADER: Final = "| setting | unit or type | default | bounds | meaning |\n|---|---|---|---|---|"


class SettingKind(StrEnum):
    """Kind of a setting's value; in messages it follows the words `must be`."""

    BOOLEAN = "true or false"
    CHOICE = "one of"
    WHOLE = "a whole number"
    NUMBER = "a number"
    QUANTITY = "a quantity"
    TEXT = "text"
    PATH = "a path"
    LIST = "a list"
    MAP = "a map"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Description of one setting.

    Attributes:
        path: names of its sections, then its own name.
        kind: kind of its value.
        unit: unit of its value, "" without one.
        bounds: range such as `1 to 100`, or the choices; "" without bounds.
        form: format of its value, "" if kind and bounds describe it.
        default: default value as text, "" without one.
        description: meaning.
        prefix: prefix of its environment variable.
    """

    path: tuple[str, ...]
    kind: SettingKind
    unit: str
    bounds: str
    form: str
    default: str
    description: str
    prefix: str = ENVIRONMENT_PREFIX

    @property
    def name(self) -> str:
        """Dotted name in the settings file."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return self.prefix + "_".join(self.path).upper()

    @property
    def allowed(self) -> str:
        """Allowed values; in messages they follow the words `must be`."""
        return self.form or " ".join(filter(None, (self.kind, self.limits)))

    @property
    def limits(self) -> str:
        """Bounds with their unit; in messages they follow the words `must be`."""
        is_spoken = self.unit not in {"bytes", "ratio"}  # quantities and plain numbers need none
        bounds = f"from {self.bounds}" if " to " in self.bounds else self.bounds
        return " ".join(filter(None, (bounds, self.unit if is_spoken else "")))


def is_secret(name: str) -> bool:
    """Return whether values under this name must be hidden."""
    return any(word in name.lower() for word in _SECRET_WORDS)


@cache
def list_settings(
    model: type[BaseModel], prefix: str = ENVIRONMENT_PREFIX
) -> Mapping[tuple[str, ...], Setting]:
    """Return every setting of a model and its sections by path, in the order of the fields.

    Args:
        model: the pydantic model.
        prefix: prefix of the environment variables.
    """
    return {setting.path: replace(setting, prefix=prefix) for setting in _walk(model, ())}


def _format_bytes(count: int) -> str:
    """Format bytes as the shortest exact quantity.

    Example:
        >>> _format_bytes(20 << 30), _format_bytes(1000)
        ('20Gi', '1000')
    """
    for power, unit in zip((4, 3, 2, 1), _BINARY_UNITS, strict=True):
        if count and count % (1 << 10 * power) == 0:
            return f"{count >> 10 * power}{unit}"
    return str(count)


def _format_value(value: object, kind: SettingKind) -> str:
    """Format a valid value as in the settings file; "" for no value."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if kind is SettingKind.QUANTITY and isinstance(value, int):
        return _format_bytes(value)
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, tuple | list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    return str(value)


def _walk(model: type[BaseModel], above: tuple[str, ...]) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        path = (*above, name)
        section = _section_of(field)
        if section is not None:
            yield from _walk(section, path)
        else:
            yield _describe(path, field)


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation: object = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _describe(path: tuple[str, ...], field: FieldInfo) -> Setting:
    plain, metadata = _unwrap(field.annotation, list(field.metadata))
    named = next((item.name for item in metadata if isinstance(item, Unit)), "")
    suffixed = next((unit for end, unit in _UNIT_SUFFIXES.items() if path[-1].endswith(end)), "")
    choices = _choices_of(plain)
    kind = SettingKind.QUANTITY if named == "bytes" else _kind_of(plain, is_choice=bool(choices))
    return Setting(
        path=path,
        kind=kind,
        unit=named or suffixed,
        bounds=", ".join(choices) or _bounds_of(metadata, kind),
        form=next((item.text for item in metadata if isinstance(item, ValueForm)), ""),
        default=_format_value(field.get_default(), kind),
        description=field.description or "",
    )


def _unwrap(annotation: object, metadata: list[object]) -> tuple[object, list[object]]:
    """Return a type without `| None` and Annotated, and its annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        flat = [part for item in more for part in getattr(item, "metadata", None) or [item]]
        return _unwrap(inner, [*metadata, *flat])
    if origin in (Union, UnionType):
        inner = next(item for item in get_args(annotation) if item is not type(None))
        return _unwrap(inner, metadata)
    return annotation, metadata


def _choices_of(plain: object) -> tuple[str, ...]:
    if get_origin(plain) is Literal:
        return tuple(str(item) for item in get_args(plain))
    if isinstance(plain, type) and issubclass(plain, Enum):
        return tuple(str(item.value) for item in plain)
    return ()


def _kind_of(plain: object, *, is_choice: bool) -> SettingKind:
    if is_choice:
        return SettingKind.CHOICE
    kinds: dict[object, SettingKind] = {
        bool: SettingKind.BOOLEAN,
        int: SettingKind.WHOLE,
        float: SettingKind.NUMBER,
        Path: SettingKind.PATH,
        tuple: SettingKind.LIST,
        list: SettingKind.LIST,
        dict: SettingKind.MAP,
    }
    return kinds.get(get_origin(plain) or plain, SettingKind.TEXT)


def _bounds_of(metadata: list[object], kind: SettingKind) -> str:
    low, high = "", ""
    is_open = any(isinstance(item, Gt | Lt) for item in metadata)
    for item in metadata:
        match item:
            case Ge():
                low = f"{'at least ' if is_open else ''}{_format_bound(item.ge, kind)}"
            case Gt():
                low = f"more than {_format_bound(item.gt, kind)}"
            case Le():
                high = f"{'at most ' if is_open else ''}{_format_bound(item.le, kind)}"
            case Lt():
                high = f"less than {_format_bound(item.lt, kind)}"
            case _:
                pass  # not a bound
    if is_open:
        return ", ".join(filter(None, (low, high)))
    return f"{low} to {high}" if low and high else low or high


def _format_bound(bound: object, kind: SettingKind) -> str:
    if kind is SettingKind.QUANTITY and isinstance(bound, int) and bound >= MIB:
        return _format_bytes(bound)
    return f"{bound:.15g}" if isinstance(bound, int | float) else str(bound)


_TYPES: Final = {
    SettingKind.BOOLEAN: "true or false",
    SettingKind.CHOICE: "choice",
    SettingKind.WHOLE: "count",
    SettingKind.NUMBER: "number",
    SettingKind.QUANTITY: "quantity (bytes)",
    SettingKind.TEXT: "text",
    SettingKind.PATH: "path",
    SettingKind.LIST: "list",
    SettingKind.MAP: "map",
}


def render_table(settings: Iterable[Setting]) -> str:
    """Render a Markdown table with one row for each setting."""
    return "\n".join([_HEADER, *map(_row, settings)]) + "\n"


def _row(setting: Setting) -> str:
    is_plain_number = setting.kind in {SettingKind.NUMBER, SettingKind.WHOLE}
    unit = setting.unit if setting.unit and is_plain_number else _TYPES[setting.kind]
    cells = (
        f"`{setting.name}`",
        unit,
        f"`{setting.default}`" if setting.default else "",
        setting.form or setting.bounds,
        setting.description,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


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
    where: tuple[str, ...], setting: Setting | None, settings: Mapping[tuple[str, ...], Setting]
) -> str:
    """Describe an unknown name, with a suggestion if a known name is similar."""
    if setting is not None:
        return "is no known name"
    by_name = {candidate.name: candidate for candidate in settings.values()}
    sections = {path[0] for path in settings if len(path) > 1} if len(where) == 1 else set()
    close = difflib.get_close_matches(".".join(where), [*by_name, *sorted(sections)])
    if not close:  # perhaps the name is correct, but in the wrong section
        by_last = {path[-1]: ".".join(path) for path in settings}
        close = [by_last[name] for name in difflib.get_close_matches(where[-1], by_last)]
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
            name=setting.name, before=show_value(before, setting), after=show_value(after, setting)
        )
        for path, setting in settings.items()
        if _value_at(before, path) != _value_at(after, path)
    )


def show_value(values: BaseModel, setting: Setting) -> str:
    """Format a setting's value for people; "" for no value, secrets hidden."""
    value = _value_at(values, setting.path)
    # A path or a number, such as the lifetime of a token, reveals no secret.
    is_hidden = is_secret(setting.name) and not isinstance(value, Path | float) and bool(value)
    return _HIDDEN if is_hidden else _redact(_format_value(value, setting.kind))


def _value_at(values: BaseModel, path: tuple[str, ...]) -> object:
    value: object = values
    for name in path:
        value = getattr(value, name)
    return value
