"""Settings that earlier versions had. They are accepted for one release, with a warning."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from extender.core.policy import HealthSign

_Path = tuple[str, ...]
"""Names of the sections of a setting, then its own name."""

_NOW: Final[Mapping[str, str]] = MappingProxyType(
    {
        "window_seconds": "3600",
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
)
"""The value that replaced each removed setting, by dotted name. The setting has no effect."""

_MOVED: Final[Mapping[str, str]] = MappingProxyType(
    {f"health.{sign}": f"health.actions.{sign}" for sign in HealthSign}
)
"""New name of each renamed setting, by its old dotted name. The old name keeps its effect."""

REMOVED: Final[Mapping[_Path, str]] = MappingProxyType(
    {tuple(name.split(".")): name for name in (*_NOW, *_MOVED)}
)
"""Dotted names of all removed and renamed settings, by path."""


def removed_in(section: str) -> Mapping[_Path, str]:
    """Return the removed and renamed settings of one section.

    Args:
        section: name of the section.
    """
    return {path: name for path, name in REMOVED.items() if path[0] == section}


def new_path(path: _Path) -> _Path | None:
    """Return the path of the setting that replaced a removed one, or None for a constant.

    Args:
        path: a path in `REMOVED`.
    """
    moved = _MOVED.get(REMOVED[path])
    return None if moved is None else tuple(moved.split("."))


def describe_removed(path: _Path, place: str) -> str:
    """Return the warning for a removed setting that is still set.

    Args:
        path: a path in `REMOVED`.
        place: variable, or file and dotted name, that sets it.
    """
    name = REMOVED[path]
    if name in _MOVED:
        return f"{place}: is {_MOVED[name]} now: rename it, the next release rejects the old name"
    return (
        f"{place}: has no effect any more, the value is {_NOW[name]}: delete it, the next release "
        "rejects it"
    )
