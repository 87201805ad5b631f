"""Load settings from a file and from environment variables, and collect all problems."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from extender.settings.layers import (
    Layer,
    accept_removed,
    merge,
    parse_file,
    read_environment,
    read_file,
    without,
)
from extender.settings.problems import Origin, describe
from extender.settings.removed import REMOVED
from extender.settings.spec import ENVIRONMENT_PREFIX, list_settings

_Model = TypeVar("_Model", bound=BaseModel)

_MOST_PROBLEMS: Final = 50
"""Maximum number of invalid values that are described; a suggestion takes a millisecond."""


class ConfigError(ValueError):
    """Settings that cannot be used; the message has one line for each problem.

    Attributes:
        problems: the lines of the message.
    """

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[_Model]):
    """Settings that were loaded.

    Attributes:
        settings: the settings.
        warnings: one line for each removed setting that is still set.
    """

    settings: _Model
    warnings: tuple[str, ...]


def load_model(
    model: type[_Model],
    path: Path | None,
    environ: Mapping[str, str],
    *,
    content: bytes | None = None,
    prefix: str = ENVIRONMENT_PREFIX,
    removed: Mapping[tuple[str, ...], str] = REMOVED,
) -> Loaded[_Model]:
    """Load settings: environment variables override the file, the file overrides defaults.

    Args:
        model: the settings.
        path: the settings file, or None for no file.
        environ: environment variables by name.
        content: content of the file if it was read already.
        prefix: prefix of the environment variables; others are ignored.
        removed: removed settings that are still accepted, by path.

    Raises:
        ConfigError: a setting is invalid; the message lists every problem found.
    """
    settings = list_settings(model, prefix)
    file = accept_removed(_read_layer(path, content), path, removed)
    environment = read_environment(environ, settings, prefix, removed)
    problems = [*file.problems, *environment.problems]
    origin = Origin(file="" if path is None else str(path), variables=environment.variables)
    values = merge(without(file.values, environment.variables), environment.values)
    try:
        loaded = model.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems += [describe(details, origin, settings) for details in found[:_MOST_PROBLEMS]]
        if len(found) > _MOST_PROBLEMS:
            problems.append(f"and {len(found) - _MOST_PROBLEMS} more problems")
        raise ConfigError(tuple(dict.fromkeys(problems))) from error
    if problems:
        raise ConfigError(tuple(problems))
    return Loaded(settings=loaded, warnings=(*file.warnings, *environment.warnings))


def _read_layer(path: Path | None, content: bytes | None) -> Layer:
    if path is None:
        return Layer()
    return read_file(path) if content is None else parse_file(path, content)
