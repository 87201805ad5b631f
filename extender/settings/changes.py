"""List the differences between two sets of settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel
from typing_extensions import override  # in typing from Python 3.12 on

from extender.settings.problems import HIDDEN, redact
from extender.settings.spec import Setting, format_value, is_secret


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
    return HIDDEN if is_hidden else redact(format_value(value, setting.kind))


def _value_at(values: BaseModel, path: tuple[str, ...]) -> object:
    value: object = values
    for name in path:
        value = getattr(value, name)
    return value
