"""Load settings from a file and from environment variables, and collect all problems.

pydantic checks the values; pydantic-settings is not used. Its sources read only the environment of
the process, accept duplicate names in YAML, ignore misspelled variables, and do not say where a bad
value was set.
"""

import difflib
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from typing_extensions import override  # in typing from Python 3.12 on

from extender.core.policy import HealthSign
from extender.runtime.decoding import MalformedError, decode_with
from extender.runtime.yaml_documents import BoundedLoader
from extender.settings.spec import (
    ENVIRONMENT_PREFIX,
    Origin,
    Setting,
    SettingKind,
    describe,
    is_secret,
    list_settings,
)

# Settings that earlier versions had. They are accepted for one release, with a warning.

_Path = tuple[str, ...]
"""Names of the sections of a setting, then its own name."""

_NOW: Final[Mapping[str, str]] = {
    "window_seconds": "14400",
    "prometheus.round_timeout_seconds": "four times prometheus.timeout_seconds",
    "prometheus.parallel_queries": "4",
    "prometheus.max_answer_mib": "256",
    "agents.batch_seconds": "0.2",
    "agents.token_seconds": "3600",
    "agents.reviews_per_second": "200",
    "agents.review_timeout_seconds": "5",
    "api.token_seconds": "60",
    "api.rights_seconds": "30",
    "api.reviews_per_second": "20",
    "api.review_timeout_seconds": "5",
    "api.max_connections": "500",
    "admission.lease_check_seconds": "2",
    "admission.max_connections": "500",
    "freshness.fade_seconds": "300",
    "freshness.forget_seconds": "900, or freshness.max_age_seconds if that is longer",
    "foreign.readings": "2",
    "early_failures.within_seconds": "60",
    "early_failures.half_life_seconds": "600",
    "health.penalty": "0.5",
    "health.remapped_rows_per_day": "3",
    "health.remapped_rows_limit": "512",
    "health.retired_pages_warn": "15",
    "health.retired_pages_limit": "63",
    "health.nvlink_crc_per_second": "100",
    "health.temperature_warn_celsius": "10 degrees below health.temperature_high_celsius",
    "health.memory_temperature_warn_celsius": (
        "10 degrees below health.memory_temperature_high_celsius"
    ),
    "ready.behind_seconds": "30",
    "cluster.page_size": "100",
    "cluster.page_timeout_seconds": "30",
    "cluster.resync_seconds": "600",
    "cluster.inactivity_timeout_seconds": "150",
    "events.rate_per_second": "5",
    "wake.check_seconds": "0.5",
    "wake.confirmations": "2",
    "wake.min_interval_seconds": "2",
    "wake.max_interval_seconds": "30",
    "wake.repeat_seconds": "10",
    "wake.lease_seconds": "15",
    "wake.retry_share": "0.25",
    "peers.interval_seconds": "0.01",
    "peers.resolve_seconds": "5",
    "peers.timeout_seconds": "2",
    "bypassed.grace_seconds": "5",
    "regret.sample_seconds": "30",
    "max_body_bytes": "256Mi",
    "keepalive_seconds": "120",
}
"""The value that replaced each removed setting, by dotted name. The setting has no effect."""

_MOVED: Final[Mapping[str, str]] = {
    f"health.{sign}": f"health.actions.{sign}" for sign in HealthSign
}
"""New name of each renamed setting, by its old dotted name. The old name keeps its effect."""

_REMOVED: Final[Mapping[_Path, str]] = {tuple(name.split(".")): name for name in (*_NOW, *_MOVED)}
"""Dotted names of all removed and renamed settings, by path."""


def removed_in(section: str) -> Mapping[_Path, str]:
    """Return the removed and renamed settings of one section."""
    return {path: name for path, name in _REMOVED.items() if path[0] == section}


def _new_path(path: _Path) -> _Path | None:
    """Return the path of the setting that replaced a removed one, or None for a constant."""
    moved = _MOVED.get(_REMOVED[path])
    return None if moved is None else tuple(moved.split("."))


def _describe_removed(path: _Path, place: str) -> str:
    """Return the warning for a removed setting that is still set.

    Args:
        place: variable, or file and dotted name, that sets it.
    """
    name = _REMOVED[path]
    if name in _MOVED:
        return f"{place}: is {_MOVED[name]} now: rename it, the next release rejects the old name"
    return (
        f"{place}: has no effect any more, the value is {_NOW[name]}: delete it, the next release "
        "rejects it"
    )


_Values = dict[str, object]
"""Values by name; the value of a section is another such dictionary."""

_AGENTS_OWN: Final = "AGENT_"
"""Prefix of the node agent's variables after IDLEGPU_."""

# Kubernetes sets these in each container for a Service named `idlegpu` or `idlegpu-...`.
_SERVICE_LINK: Final = re.compile(
    r".*_SERVICE_HOST|.*_SERVICE_PORT(_.+)?|(.*_)?PORT(_[0-9]+_(TCP|UDP|SCTP).*)?"
)
_SAME_NAME_RATIO: Final = 0.8
"""Similarity from which an unknown name counts as a misspelled known one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Settings from one source, before validation.

    Attributes:
        variables: for the environment, the variable of each value, by path.
        problems: messages about text that could not be parsed.
        warnings: messages about removed settings.
    """

    values: _Values = field(default_factory=dict)
    variables: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class _Loader(BoundedLoader):
    """YAML's safe loader, which rejects duplicate names: one of the values would be lost."""

    @override
    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = (key_node.tag, key_node.value)
            if isinstance(key_node, yaml.ScalarNode) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key_node.value!r} is given twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _read_file(path: Path) -> _Layer:
    """Read and parse the settings file."""
    try:
        return _parse_file(path, path.read_bytes())
    except OSError as error:
        return _Layer(problems=(describe_unreadable(path, error),))


def describe_unreadable(path: Path, error: OSError) -> str:
    """Return the message for a settings file that cannot be read."""
    return f"{path}: cannot be read: {error.strerror or error}"


def _parse_file(path: Path, content: bytes) -> _Layer:
    """Parse the settings file; an empty file sets nothing."""
    try:
        text = content.decode("utf-8-sig")
        document = decode_with(_load, text)
    except UnicodeDecodeError as error:
        return _Layer(problems=(f"{path}: is not UTF-8 text: byte {error.start} is wrong",))
    except MalformedError as error:
        return _Layer(problems=(f"{path}: {_reason(error)}",))
    if document is None:
        return _Layer()
    if not isinstance(document, dict):
        kind = type(document).__name__
        return _Layer(problems=(f"{path}: must map names to settings, is a {kind}",))
    return _Layer(values={str(name): value for name, value in document.items()})


def _read_environment(
    environ: Mapping[str, str],
    settings: Mapping[tuple[str, ...], Setting],
    prefix: str = ENVIRONMENT_PREFIX,
    removed: Mapping[tuple[str, ...], str] = _REMOVED,
) -> _Layer:
    """Parse the environment variables that name a setting; an empty variable sets nothing.

    A variable's name is `IDLEGPU_` and the setting's dotted name in capitals, with `_` or `__` for
    each dot.

    Args:
        removed: removed settings that are still accepted, by path.
    """
    by_variable = {setting.variable: setting for setting in settings.values()}
    gone = {prefix + "_".join(path).upper(): path for path in removed}
    values: _Values = {}
    variables: dict[tuple[str, ...], str] = {}
    problems: list[str] = []
    warnings: list[str] = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(prefix) or not text.strip():
            continue
        setting = by_variable.get(variable.replace("__", "_"))
        old_path = gone.get(variable.replace("__", "_"))
        if old_path is not None:
            warnings.append(_describe_removed(old_path, variable))
            if (path := _new_path(old_path)) is not None:
                variables[path] = variable
                _put(values, path, text.strip())
        elif setting is None:
            problems += _misspelled(variable, by_variable, prefix)
        elif setting.path in variables:
            problems.append(f"{variable}: {variables[setting.path]} sets the same: set only one")
        else:
            variables[setting.path] = variable
            try:
                _put(values, setting.path, _parse(text.strip(), setting))
            except ValueError as error:
                problems.append(f"{variable}: {error}")
    return _Layer(
        values=values, variables=variables, problems=tuple(problems), warnings=tuple(warnings)
    )


def _accept_removed(
    file: _Layer, path: Path | None, removed: Mapping[tuple[str, ...], str] = _REMOVED
) -> _Layer:
    """Drop removed settings from a file's values, and move renamed ones to their new names.

    Args:
        path: the file, for the warnings.
        removed: removed settings that are still accepted, by path.
    """
    values, warnings = file.values, []
    for old_path, name in removed.items():
        value = _value_at(values, old_path)
        if value is _NOT_SET:
            continue
        values = _without(values, {old_path: name})
        warnings.append(_describe_removed(old_path, f"{path}: {name}"))
        moved_to = _new_path(old_path)
        if moved_to is not None and _value_at(values, moved_to) is _NOT_SET:
            values = _merge(values, _nested(moved_to, value))
    return replace(file, values=values, warnings=tuple(warnings))


def _without(values: _Values, paths: Mapping[tuple[str, ...], str]) -> _Values:
    """Drop the settings at `paths` from `values`, so that a map variable replaces a file's map."""
    kept: _Values = {}
    for name, value in values.items():
        if (name,) in paths:
            continue
        deeper = {path[1:]: origin for path, origin in paths.items() if path[0] == name}
        kept[name] = _without(value, deeper) if deeper and isinstance(value, dict) else value
    return kept


def _merge(under: _Values, over: _Values) -> _Values:
    """Merge two sources of values, section by section.

    Args:
        under: values that apply where `over` has none.
        over: values that override.

    Example:
        >>> _merge({"log": {"level": "info", "format": "text"}}, {"log": {"level": "debug"}})
        {'log': {'level': 'debug', 'format': 'text'}}
    """
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        if isinstance(below, dict) and isinstance(value, dict):
            merged[name] = _merge(below, value)
        else:
            merged[name] = value
    return merged


def _load(text: str) -> object:
    return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader


def _explain(error: yaml.YAMLError) -> str:
    """Describe a YAML error with its position, without the line, which may hold a secret."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    if mark is None:
        return f"is not YAML: {problem}"
    return f"line {mark.line + 1}, column {mark.column + 1}: is not YAML: {problem}"


def _parse(text: str, setting: Setting) -> object:
    """Convert a variable's text to a list or map; keep other text for validation."""
    is_listed = setting.kind is SettingKind.LIST and not text.startswith("[")
    if is_listed:
        return [item.strip() for item in text.split(",") if item.strip()]
    if setting.kind not in {SettingKind.LIST, SettingKind.MAP}:
        return text
    example = "[a, b]" if setting.kind is SettingKind.LIST else "{name: value}"
    try:
        value = decode_with(_load, text)
    except MalformedError as error:
        shown = "" if is_secret(setting.name) else f": {_reason(error)}"
        raise ValueError(f"cannot be read{shown}: must be {setting.kind} like {example}") from error
    return value


def _reason(error: MalformedError) -> str:
    cause = error.__cause__
    return (
        _explain(cause)
        if isinstance(cause, yaml.YAMLError)
        else f"is not YAML that can be read: {error}"
    )


_NOT_SET: Final = object()


def _value_at(values: object, path: tuple[str, ...]) -> object:
    """Return the value at a path of nested dictionaries, or `_NOT_SET`."""
    for name in path:
        if not isinstance(values, dict) or name not in values:
            return _NOT_SET
        values = values[name]
    return values


def _nested(path: tuple[str, ...], value: object) -> _Values:
    """Return nested dictionaries that hold one value at a path."""
    values: _Values = {}
    _put(values, path, value)
    return values


def _put(values: _Values, path: tuple[str, ...], value: object) -> None:
    """Store a value in the nested dictionaries at its path."""
    *sections, name = path
    for section in sections:
        inner = values.setdefault(section, {})
        if isinstance(inner, dict):
            values = inner
    values[name] = value


def _misspelled(variable: str, by_variable: Mapping[str, Setting], prefix: str) -> list[str]:
    """Return the problem with a variable that is probably a misspelled setting, or none.

    Other variables are ignored, because Kubernetes and other tools set variables with this prefix.
    """
    rest = variable.removeprefix(prefix)
    if _SERVICE_LINK.fullmatch(rest) or rest.startswith(_AGENTS_OWN):
        return []
    names = {name.removeprefix(prefix): name for name in by_variable}
    close = difflib.get_close_matches(
        rest.replace("__", "_"), names, n=1, cutoff=0.0 if "__" in rest else _SAME_NAME_RATIO
    )
    return [f"{variable}: names no setting: did you mean {names[name]}?" for name in close]


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
    removed: Mapping[tuple[str, ...], str] = _REMOVED,
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
    file = _accept_removed(_read_layer(path, content), path, removed)
    environment = _read_environment(environ, settings, prefix, removed)
    problems = [*file.problems, *environment.problems]
    origin = Origin(file="" if path is None else str(path), variables=environment.variables)
    values = _merge(_without(file.values, environment.variables), environment.values)
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


def _read_layer(path: Path | None, content: bytes | None) -> _Layer:
    if path is None:
        return _Layer()
    return _read_file(path) if content is None else _parse_file(path, content)
