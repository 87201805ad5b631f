"""Settings that a replay can change: those that affect only the decision itself."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from types import MappingProxyType
from typing import Any, Final

from extender.core.policy import Policy
from extender.core.request.request import GpuRequest
from extender.settings.config import ConfigError, load_settings

_REPLAYABLE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "strategy": ("strategy",),
        "thresholds.utilization": ("thresholds", "utilization"),
        "thresholds.memory": ("thresholds", "memory"),
        "weights.utilization": ("weights", "utilization"),
        "weights.memory": ("weights", "memory"),
        "weights.sharing": ("weights", "sharing"),
        "weights.bursts": ("weights", "bursts"),
        "weights.stress": ("weights", "stress"),
        "load_filter.enabled": ("load_filter", "is_enabled"),
        "assumed.utilization": ("assumed", "utilization"),
        "mps_share": ("mps_share_bytes",),
    }
)
"""Attribute path in `Policy` by setting. All other settings affect the estimates that are computed
from readings before a decision; the log has these estimates, not the readings."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Settings to change in a replay.

    Attributes:
        values: new values by setting, in the core's types.
    """

    values: Mapping[str, object] = field(default_factory=dict)

    def policy(self, before: Policy) -> Policy:
        """Return the policy with these settings replaced.

        Raises:
            ValueError: the combination is invalid.
        """
        policy = before
        for name, value in self.values.items():
            policy = _put(policy, _REPLAYABLE[name], value)
        weights = policy.weights
        if not any(getattr(weights, name) for name in type(weights).__slots__):
            raise ValueError("weights.*: one of them must be more than 0")
        return policy

    def request(self, asked: GpuRequest) -> GpuRequest:
        """Return a pod's request under the changed settings; its own annotations still win."""
        values = {name: value for name, value in self.values.items() if name not in asked.own}
        changed: dict[str, Any] = {}
        if "strategy" in values:
            changed["strategy"] = values["strategy"]
        limits: dict[str, Any] = {
            part: values[f"thresholds.{part}"]
            for part in ("utilization", "memory")
            if f"thresholds.{part}" in values
        }
        if limits:
            changed["thresholds"] = replace(asked.thresholds, **limits)
        return replace(asked, **changed) if changed else asked


def parse_changes(texts: Iterable[str]) -> Changes:
    """Parse `NAME=VALUE` texts into changed settings.

    Raises:
        ValueError: a text is invalid; the message says what is allowed.
    """
    values: dict[str, object] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or name not in _REPLAYABLE:
            raise ValueError(
                f"{text!r}: must be NAME=VALUE, NAME one of {', '.join(_REPLAYABLE)}; other "
                "settings affect estimates that are computed before a decision, from readings that "
                "the log does not have"
            )
        variable = f"IDLEGPU_{name.replace('.', '__').upper()}"
        try:
            policy = load_settings(None, {variable: value}).policy()
        except ConfigError as error:
            raise ValueError("; ".join(error.problems).replace(variable, name)) from error
        values[name] = reduce(getattr, _REPLAYABLE[name], policy)
    return Changes(values)


def _put(part: Any, path: tuple[str, ...], value: object) -> Any:  # noqa: ANN401 - parts of a policy
    """Return a copy of a policy part with the value at an attribute path replaced."""
    name, *rest = path
    inner = _put(getattr(part, name), tuple(rest), value) if rest else value
    return replace(part, **{name: inner})
