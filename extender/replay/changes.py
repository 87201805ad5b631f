"""Settings that decisions are made again by: those that shape no more than the decision itself."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from types import MappingProxyType
from typing import Any, Final

from extender.config import ConfigError, load_settings
from extender.core.policy import Policy
from extender.core.request import GpuRequest

REPLAYABLE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
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
"""By name, where they stand in the policy. All others shape what is believed of the GPUs before a
pod is decided about: the log has what was believed, not the readings behind it."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Other settings.

    Attributes:
        values: by the setting's name, as the core takes them.
    """

    values: Mapping[str, object] = field(default_factory=dict)

    def policy(self, before: Policy) -> Policy:
        """Return settings with these in the place of their own.

        Raises:
            ValueError: together they cannot be.
        """
        policy = before
        for name, value in self.values.items():
            policy = _put(policy, REPLAYABLE[name], value)
        weights = policy.weights
        if not any(getattr(weights, name) for name in type(weights).__slots__):
            raise ValueError("weights.*: one of them must be more than 0")
        return policy

    def request(self, asked: GpuRequest) -> GpuRequest:
        """Return what a pod would have asked for; what it says itself stays."""
        told = {name: value for name, value in self.values.items() if name not in asked.own}
        changed: dict[str, Any] = {}
        if "strategy" in told:
            changed["strategy"] = told["strategy"]
        limits: dict[str, Any] = {
            part: told[f"thresholds.{part}"]
            for part in ("utilization", "memory")
            if f"thresholds.{part}" in told
        }
        if limits:
            changed["thresholds"] = replace(asked.thresholds, **limits)
        return replace(asked, **changed) if changed else asked


def parse_changes(texts: Iterable[str]) -> Changes:
    """Return what `NAME=VALUE` texts set.

    Raises:
        ValueError: one cannot be used; the message says what is allowed.
    """
    values: dict[str, object] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or name not in REPLAYABLE:
            raise ValueError(
                f"{text!r}: must be NAME=VALUE, NAME one of {', '.join(REPLAYABLE)}; other "
                "settings shape what is believed of the GPUs before anything is decided, and the "
                "log does not have the readings behind it"
            )
        variable = f"IDLEGPU_{name.replace('.', '__').upper()}"
        try:
            policy = load_settings(None, {variable: value}).policy()
        except ConfigError as error:
            raise ValueError("; ".join(error.problems).replace(variable, name)) from error
        values[name] = reduce(getattr, REPLAYABLE[name], policy)
    return Changes(values)


def _put(part: Any, path: tuple[str, ...], value: object) -> Any:  # noqa: ANN401 - parts of a policy
    """Return a part of the settings with a value at a path."""
    name, *rest = path
    inner = _put(getattr(part, name), tuple(rest), value) if rest else value
    return replace(part, **{name: inner})
