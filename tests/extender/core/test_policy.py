"""Default settings and constants of the decision."""

import re
from operator import attrgetter
from pathlib import Path
from typing import Final

import pytest

from extender.core.policy import WARN_CELSIUS, Health, HealthAction, HealthSign, Policy, Weights
from extender.core.quantity import parse_quantity

PAGE: Final = (Path(__file__).parents[3] / "docs/settings.md").read_text(encoding="utf-8")

ATTRIBUTES: Final = {
    "foreign.memory": "foreign.memory_bytes",
    "load_filter.enabled": "load_filter.is_enabled",
    "cluster.memory_limits": "reads_memory_limits",
    "price": "prices.mode",
    "spot_share": "prices.spot_share",
}
"""Attributes of a policy that are not named as their settings."""


def table(name: str, row: str) -> dict[str, tuple[str, str]]:
    """Return two cells of each row of a table of the page, by the first cell."""
    text = PAGE.partition(f"<!-- {name}:begin -->")[2].partition(f"<!-- {name}:end -->")[0]
    return {first: (second, third) for first, second, third in re.findall(row, text)}


def value_of(unit: str, text: str) -> object:
    match unit:
        case "percent":
            return float(text) / 100
        case "true or false":
            return text == "true"
        case "choice":
            return text
        case "list":
            return tuple(text.split(", "))
        case _:
            return float(parse_quantity(text))


def test_the_defaults_of_a_policy_are_the_documented_ones() -> None:
    documented = table("settings", r"\| `(\S+)` \| ([^|]+) \| `([^|]+)` \|")
    sections = {"thresholds", "freshness", "foreign", "assumed", "early_failures", "health"}
    sections |= {"weights", "strategy", "shared_policy", "recent_seconds", "group_topology"}
    attributes = {name: name for name in documented if name.partition(".")[0] in sections}

    policy = Policy()
    for name, attribute in (attributes | ATTRIBUTES).items():
        assert attrgetter(attribute)(policy) == value_of(*documented[name]), name
    assert sum(policy.weights.shares.values()) == pytest.approx(1.0)


def test_the_default_action_of_each_sign_is_the_documented_one() -> None:
    documented = table("signs", r"\| `(\S+)` \| `(\S+)` \| (.+) \|")

    assert documented == {sign: (getattr(Health(), sign), sign.description) for sign in HealthSign}


def test_limits_that_no_setting_changes() -> None:
    policy = Policy()

    assert policy.window_seconds == 4 * 3600
    assert (policy.freshness.fade_seconds, policy.freshness.forget_seconds) == (300, 900)
    failures = policy.early_failures
    assert (failures.within_seconds, failures.half_life_seconds) == (60, 600)
    assert policy.foreign.readings == 2
    assert policy.assumed.simulated_seconds == 1
    health = policy.health
    assert (health.remapped_rows_per_day, health.remapped_rows_limit) == (3, 512)
    assert (health.retired_pages_warn, health.retired_pages_limit) == (15, 63)
    assert (health.penalty, health.nvlink_crc_per_second) == (0.5, 100)
    assert health.temperature_high_celsius - health.temperature_warn_celsius == WARN_CELSIUS
    of_memory = health.memory_temperature_high_celsius - health.memory_temperature_warn_celsius
    assert of_memory == WARN_CELSIUS
    assert health.xid_action(79) is HealthAction.EXCLUDE_NODE


def test_weights_count_by_their_ratios() -> None:
    doubled = Weights(utilization=0.1, memory=0.5, sharing=0.8, bursts=0.5, stress=0.1)

    assert doubled.shares == pytest.approx(Weights().shares)
    assert sum(doubled.shares.values()) == pytest.approx(1.0)
