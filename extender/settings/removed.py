"""Settings that earlier versions had. They are accepted for one release, with a warning."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

Path = tuple[str, ...]
"""Names of the sections of a setting, then its own name."""

NOW: Final[Mapping[str, str]] = MappingProxyType({})
"""The value that replaced each removed setting, by dotted name. The setting has no effect."""

MOVED: Final[Mapping[str, str]] = MappingProxyType({})
"""New name of each renamed setting, by its old dotted name. The old name keeps its effect."""

REMOVED: Final[Mapping[Path, str]] = MappingProxyType(
    {tuple(name.split(".")): name for name in (*NOW, *MOVED)}
)
"""Dotted names of all removed and renamed settings, by path."""


def removed_in(section: str) -> Mapping[Path, str]:
    """Return the removed and renamed settings of one section.

    Args:
        section: name of the section.
    """
    return {path: name for path, name in REMOVED.items() if path[0] == section}


def new_path(path: Path) -> Path | None:
    """Return the path of the setting that replaced a removed one, or None for a constant.

    Args:
        path: a path in `REMOVED`.
    """
    moved = MOVED.get(REMOVED[path])
    return None if moved is None else tuple(moved.split("."))


def describe_removed(path: Path, place: str) -> str:
    """Return the warning for a removed setting that is still set.

    Args:
        path: a path in `REMOVED`.
        place: variable, or file and dotted name, that sets it.
    """
    name = REMOVED[path]
    if name in MOVED:
        return f"{place}: is {MOVED[name]} now: rename it, the next release rejects the old name"
    return (
        f"{place}: has no effect any more, the value is {NOW[name]}: delete it, the next release "
        "rejects it"
    )
