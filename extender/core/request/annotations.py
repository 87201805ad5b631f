"""Parse a pod's `idlegpu.io/` annotations.

An invalid value never raises: it becomes an `AnnotationProblem`, and the default applies.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from typing import Final, TypeVar

from typing_extensions import override  # in typing from Python 3.12 on

from extender.core.nodes.pod_groups import MAX_SIZE, read_size
from extender.core.policy import GroupPolicy, Policy, Strategy, Thresholds
from extender.core.quantity import MIB, TIB, parse_whole
from extender.core.untyped import mapping_of

_MAX_TARGETS: Final = 32
_MAX_LISTED: Final = 2 * _MAX_TARGETS
"""Limit for the entries of a list of targets, empty and repeated ones included."""
_MAX_DEVICES: Final = 64
_MAX_INDEX: Final = 255

_TARGETS_ALLOWED: Final = (
    f"1 to {_MAX_TARGETS} nodes separated by semicolons, each with GPU indices after :: if wanted, "
    "such as gpu-1::0,2; gpu-2"
)
_TARGET_POLICY_ALLOWED: Final = "require or prefer"

_NODE: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_INDEX: Final = re.compile(r"[0-9]{1,3}")


class TargetPolicy(StrEnum):
    """Behavior of a pod while none of its targets can take it."""

    REQUIRE = "require"
    """The pod waits."""
    PREFER = "prefer"
    """The pod goes to any other node."""


@dataclass(frozen=True, slots=True)
class Target:
    """A node that a pod names.

    Attributes:
        devices: indices of its GPUs that the pod prefers, ascending; () for any. The kubelet
            chooses among the free GPUs, so an index is a preference.
        is_usable: False if the node has no GPU with one of these indices.
    """

    node: str
    devices: tuple[int, ...] = ()
    is_usable: bool = True

    @override
    def __str__(self) -> str:
        """Return the target as an annotation spells it."""
        return f"{self.node}::{','.join(map(str, self.devices))}" if self.devices else self.node


def _parse_targets(text: str) -> tuple[Target, ...]:
    """Parse a list of targets, in the order in which they are tried.

    Example:
        >>> [str(target) for target in _parse_targets("gpu-1::2,0; GPU-2")]
        ['gpu-1::0,2', 'gpu-2']
    """
    listed = text.split(";", _MAX_LISTED)
    if len(listed) > _MAX_LISTED:  # thousands would delay other requests
        raise ValueError(f"must be {_TARGETS_ALLOWED}")
    targets = tuple(dict.fromkeys(_parse(each.strip()) for each in listed if each.strip()))
    if not 1 <= len(targets) <= _MAX_TARGETS:
        raise ValueError(f"must be {_TARGETS_ALLOWED}")
    return targets


def _parse(text: str) -> Target:
    node, separator, listed = text.lower().partition("::")
    indices = [each.strip() for each in listed.split(",")] if separator else []
    are_numbers = all(_INDEX.fullmatch(each) for each in indices)
    if not _NODE.fullmatch(node.strip()) or not are_numbers or len(indices) > _MAX_DEVICES:
        raise ValueError(f"{text!r}: must be {_TARGETS_ALLOWED}")
    devices = tuple(sorted(set(map(int, indices))))
    if devices and devices[-1] > _MAX_INDEX:
        raise ValueError(f"{text!r}: must be {_TARGETS_ALLOWED}")
    return Target(node.strip(), devices)


_T = TypeVar("_T")

PREFIX: Final = "idlegpu.io/"
_MAX_MODELS: Final = 16
_MAX_SHOWN: Final = 100
"""Maximum length of an annotation value in messages."""
_MAX_READ: Final = 200
"""Maximum length of a value before repeated spaces are removed."""
_MAX_UNKNOWN: Final = 8
"""Maximum number of unknown annotations reported per pod."""


class Annotation(StrEnum):
    """Annotations that a pod may set."""

    ENABLED = "idlegpu.io/enabled"
    GPU_MEMORY = "idlegpu.io/gpu-memory"
    REQUIRE_IDLE = "idlegpu.io/require-idle"
    MAX_UTILIZATION = "idlegpu.io/max-utilization"
    MAX_MEMORY = "idlegpu.io/max-memory"
    STRATEGY = "idlegpu.io/strategy"
    PREFER_MODELS = "idlegpu.io/prefer-models"
    REQUIRE_MODELS = "idlegpu.io/require-models"
    TARGET = "idlegpu.io/target"
    TARGET_POLICY = "idlegpu.io/target-policy"
    GROUP_SIZE = "idlegpu.io/group-size"
    GROUP_POLICY = "idlegpu.io/group-policy"


PROPOSAL: Final = "idlegpu.io/proposal"
"""Annotation of the admission webhook: the basis of the annotations that it proposed."""

_OWN_ANNOTATIONS: Final = frozenset(
    {"idlegpu.io/state", "idlegpu.io/decision", "idlegpu.io/reason", PROPOSAL}
)
"""Annotations that the extender writes itself; never reported as unknown."""

KNOWN: Final = frozenset({*Annotation, *_OWN_ANNOTATIONS})

_PERCENT_ALLOWED: Final = "a percentage from 1 to 100, such as 20 or 20%"
BOOLEAN_ALLOWED: Final = "true or false"
_MEMORY_ALLOWED: Final = "a quantity from 1Mi to 16Ti, such as 20Gi"
_STRATEGY_ALLOWED: Final = "auto, spread or pack"
_GROUP_SIZE_ALLOWED: Final = f"a number of pods from 1 to {MAX_SIZE}"
_GROUP_POLICY_ALLOWED: Final = "require, prefer or ignore"
_MODELS_ALLOWED: Final = f"1 to {_MAX_MODELS} models separated by commas, such as H100,A100"

_PERCENT: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%?")
_MODEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+()/-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationProblem:
    """An annotation, a variable or an argument with an invalid value.

    Attributes:
        annotation: its name.
        value: its value, truncated.
        allowed: description of valid values.
        default_used: value that applies instead.
        kind: `annotation`, `variable` or `argument`.
    """

    annotation: str
    value: str
    allowed: str
    default_used: str
    kind: str = "annotation"

    @property
    def message(self) -> str:
        """The problem as one sentence for users."""
        return (
            f'{self.kind} {self.annotation}: "{self.value}" is not allowed: must be '
            f"{self.allowed}; used instead: {self.default_used}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Parsed annotations of a pod, defaults filled in.

    Attributes:
        is_enabled: False if the pod opts out of the extender.
        memory_bytes: required memory per device, None if not set.
        requires_idle: the pod waits for devices known to be idle.
        thresholds: a device below both thresholds is idle for this pod.
        strategy: order among nodes of equal certainty.
        preferred_models: preferred GPU models, best first, as the pod writes them.
        required_models: the only GPU models that the pod accepts; () for all.
        targets: nodes that the pod names, in the order in which they are tried; () for any node.
        target_policy: behavior of the pod while no target can take it.
        group_size: number of pods with GPUs in the pod's group, None if not set.
        group_policy: effect of the pod's group.
        problems: invalid annotations.
    """

    is_enabled: bool = True
    memory_bytes: int | None = None
    requires_idle: bool = False
    thresholds: Thresholds
    strategy: Strategy
    preferred_models: tuple[str, ...] = ()
    required_models: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    target_policy: TargetPolicy = TargetPolicy.REQUIRE
    group_size: int | None = None
    group_policy: GroupPolicy = GroupPolicy.REQUIRE
    problems: tuple[AnnotationProblem, ...] = ()


def read_annotations(pod: Mapping[str, object], defaults: Policy) -> Wishes:
    """Parse a pod's annotations; a missing or invalid one gets its value from `defaults`."""
    annotations = _annotations_of(pod)
    if not annotations.are_ours:
        return _silent(defaults.thresholds, defaults.strategy)
    utilization = defaults.thresholds.utilization
    memory = defaults.thresholds.memory
    wishes = Wishes(
        is_enabled=annotations.read(
            Annotation.ENABLED, parse_boolean, default=True, allowed=BOOLEAN_ALLOWED
        ),
        memory_bytes=_read_memory(annotations),
        requires_idle=annotations.read(
            Annotation.REQUIRE_IDLE, parse_boolean, default=False, allowed=BOOLEAN_ALLOWED
        ),
        thresholds=Thresholds(
            utilization=annotations.read(
                Annotation.MAX_UTILIZATION,
                _parse_percent,
                default=utilization,
                allowed=_PERCENT_ALLOWED,
                instead=f"{utilization * 100:g}%",
            ),
            memory=annotations.read(
                Annotation.MAX_MEMORY,
                _parse_percent,
                default=memory,
                allowed=_PERCENT_ALLOWED,
                instead=f"{memory * 100:g}%",
            ),
        ),
        strategy=annotations.read(
            Annotation.STRATEGY,
            lambda text: Strategy(text.lower()),
            default=defaults.strategy,
            allowed=_STRATEGY_ALLOWED,
        ),
        preferred_models=annotations.read(
            Annotation.PREFER_MODELS,
            parse_models,
            default=(),
            allowed=_MODELS_ALLOWED,
            instead="no preference",
        ),
        required_models=annotations.read(
            Annotation.REQUIRE_MODELS,
            parse_models,
            default=(),
            allowed=_MODELS_ALLOWED,
            instead="every model",
        ),
        targets=annotations.read(
            Annotation.TARGET,
            _parse_targets,
            default=(),
            allowed=_TARGETS_ALLOWED,
            instead="every node",
        ),
        target_policy=annotations.read(
            Annotation.TARGET_POLICY,
            lambda text: TargetPolicy(text.lower()),
            default=TargetPolicy.REQUIRE,
            allowed=_TARGET_POLICY_ALLOWED,
        ),
        group_size=annotations.read(
            Annotation.GROUP_SIZE,
            _parse_group_size,
            default=None,
            allowed=_GROUP_SIZE_ALLOWED,
            instead="the size in the group's own labels",
        ),
        group_policy=annotations.read(
            Annotation.GROUP_POLICY,
            lambda text: GroupPolicy(text.lower()),
            default=GroupPolicy.REQUIRE,
            allowed=_GROUP_POLICY_ALLOWED,
        ),
    )
    return replace(wishes, problems=(*annotations.problems, *annotations.unknown()))


@lru_cache(maxsize=64)
def _silent(thresholds: Thresholds, strategy: Strategy) -> Wishes:
    """Return the result for a pod without our annotations, the usual case."""
    return Wishes(thresholds=thresholds, strategy=strategy)


_OF_SETTINGS: Final = {
    Annotation.MAX_UTILIZATION: "thresholds.utilization",
    Annotation.MAX_MEMORY: "thresholds.memory",
    Annotation.STRATEGY: "strategy",
}
"""Setting that each annotation overrides."""


def own_settings(pod: Mapping[str, object], wishes: Wishes) -> frozenset[str]:
    """Return the names of the settings that a pod's valid annotations override.

    Args:
        wishes: the pod's parsed annotations.
    """
    annotations = mapping_of(mapping_of(pod.get("metadata")).get("annotations"))
    unusable = {problem.annotation for problem in wishes.problems}
    return frozenset(
        setting
        for annotation, setting in _OF_SETTINGS.items()
        if annotations.get(annotation) is not None and annotation not in unusable
    )


def has_memory(pod: Mapping[str, object]) -> bool:
    """Return whether a pod has the annotation for its memory, valid or not."""
    annotations = mapping_of(mapping_of(pod.get("metadata")).get("annotations"))
    return Annotation.GPU_MEMORY in annotations


def read_memory(pod: Mapping[str, object]) -> int | None:
    """Parse the required memory per device from a pod's annotation; None if not set."""
    return _read_memory(_annotations_of(pod))


def _annotations_of(pod: Mapping[str, object]) -> "_Annotations":
    return _Annotations(mapping_of(mapping_of(pod.get("metadata")).get("annotations")))


def _read_memory(annotations: "_Annotations") -> int | None:
    return annotations.read(
        Annotation.GPU_MEMORY,
        _parse_room,
        default=None,
        allowed=_MEMORY_ALLOWED,
        instead="no memory is reserved",
    )


class _Annotations:
    """The annotations of one pod, and the problems found while parsing them."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values
        self.problems: list[AnnotationProblem] = []

    @property
    def are_ours(self) -> bool:
        """Whether any annotation has our prefix."""
        return any(name.startswith(PREFIX) for name in self._values)

    def read(
        self,
        name: Annotation,
        parse: Callable[[str], _T],
        *,
        default: _T,
        allowed: str,
        instead: str = "",
    ) -> _T:
        """Parse an annotation's value; return the default if it is missing or invalid.

        Args:
            allowed: description of valid values.
            instead: description of the default in the problem; "" for the default itself.
        """
        value = self._values.get(name)
        if value is None:
            return default
        try:
            return parse(value.strip() if isinstance(value, str) else "")
        except ValueError:
            self.problems.append(
                AnnotationProblem(
                    annotation=name,
                    value=shorten(value),
                    allowed=allowed,
                    default_used=instead or str(default).lower(),
                )
            )
            return default

    def unknown(self) -> list[AnnotationProblem]:
        """Return a problem for each annotation with our prefix and an unknown name."""
        names = [name for name in self._values if name.startswith(PREFIX) and name not in KNOWN]
        return [
            AnnotationProblem(
                annotation=shorten(name),
                value=shorten(self._values[name]),
                allowed=f"under one of the names {', '.join(Annotation)}",
                default_used=f"nothing, it is ignored{_meant(name)}",
            )
            for name in sorted(names)[:_MAX_UNKNOWN]
        ]


def _meant(name: str) -> str:
    """Return a hint at the most similar annotation, "" if none is similar."""
    similar = get_close_matches(name, [*Annotation], n=1, cutoff=0.8)
    return f" (did you mean {similar[0]}?)" if similar else ""


def shorten(value: object) -> str:
    r"""Return a value as one line of limited length, without control characters.

    It becomes part of Events and of warnings, which terminals show.

    Example:
        >>> shorten("20\x1b[31m \n Gi")
        '20�[31m Gi'
    """
    text = value if isinstance(value, str) else type(value).__name__
    line = " ".join(text[:_MAX_READ].split())
    if not line.isprintable():
        line = "".join(one if one.isprintable() else "\ufffd" for one in line)
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}..."


def parse_boolean(text: str) -> bool:
    """Parse "true" or "false" in any case.

    Raises:
        ValueError: `text` is neither true nor false.

    Example:
        >>> parse_boolean("True")
        True
    """
    lowered = text.lower()
    if lowered not in {"true", "false"}:
        raise ValueError(f"{text!r}: must be {BOOLEAN_ALLOWED}")
    return lowered == "true"


def _parse_percent(text: str) -> float:
    """Parse a percentage as a ratio.

    Values below 1 are rejected: with 0 no device would ever be idle, and 0.2 probably means a
    ratio.

    Example:
        >>> _parse_percent("20"), _parse_percent("12.5%")
        (0.2, 0.125)
    """
    match = _PERCENT.fullmatch(text)
    if match is None or not 1 <= float(match[1]) <= 100:  # noqa: PLR2004 - a percentage's bounds
        raise ValueError(f"{text!r}: must be {_PERCENT_ALLOWED}")
    return float(match[1]) / 100


def _parse_group_size(text: str) -> int:
    size = read_size(text)
    if size is None:
        raise ValueError(f"{text!r}: must be {_GROUP_SIZE_ALLOWED}")
    return size


def parse_models(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of models, without duplicates.

    Raises:
        ValueError: `text` is not a valid list of models.

    Example:
        >>> parse_models("H100, A100,H100")
        ('H100', 'A100')
    """
    models = tuple(dict.fromkeys(model.strip() for model in text.split(",") if model.strip()))
    if not 1 <= len(models) <= _MAX_MODELS or not all(map(_MODEL.fullmatch, models)):
        raise ValueError(f"must be {_MODELS_ALLOWED}")
    return models


def _parse_room(text: str) -> int:
    """Parse the required memory per device as bytes.

    Values below 1Mi are rejected because the unit is probably missing (`20`), values above 16Ti
    because no node has that much.
    """
    room_bytes = parse_whole(text)
    if not MIB <= room_bytes <= 16 * TIB:
        raise ValueError(f"{text!r}: must be {_MEMORY_ALLOWED}")
    return room_bytes
