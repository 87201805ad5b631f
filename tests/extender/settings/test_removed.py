"""Settings of earlier versions: they are accepted, do nothing, and cause a warning."""

import importlib
from pathlib import Path

import pytest

from agent import config as agent
from extender.__main__ import main
from extender.core.policy import HealthAction, HealthSign
from extender.core.quantity import parse_whole
from extender.settings.config import Settings, all_settings, load
from extender.settings.loading import _MOVED, _NOW, _REMOVED, ConfigError, _new_path
from tests.extender.settings.settings_files import write_settings

REFLECTOR = "extender.sources.kubernetes.reflector:ReflectorSettings"
CONSTANTS = {
    "window_seconds": "extender.core.policy:Policy.window_seconds",
    "prometheus.parallel_queries": "extender.sources.prometheus.http:_PARALLEL_QUERIES",
    "prometheus.max_answer_mib": "extender.sources.prometheus.http:_MAX_ANSWER_MIB",
    "agents.batch_seconds": "extender.sources.agents.source:_BATCH_SECONDS",
    "agents.token_seconds": "extender.sources.agents.tokens:_TOKEN_SECONDS",
    "agents.reviews_per_second": "extender.sources.agents.tokens:_REVIEWS_PER_SECOND",
    "agents.review_timeout_seconds": "extender.kube.token_review:REVIEW_TIMEOUT_SECONDS",
    "api.token_seconds": "extender.api.caller:_TOKEN_SECONDS",
    "api.rights_seconds": "extender.api.caller:_RIGHTS_SECONDS",
    "api.reviews_per_second": "extender.api.caller:_REVIEWS_PER_SECOND",
    "api.review_timeout_seconds": "extender.kube.token_review:REVIEW_TIMEOUT_SECONDS",
    "api.max_connections": "extender.settings.config:MAX_CONNECTIONS",
    "admission.lease_check_seconds": "extender.webhook.admission:_LEASE_CHECK_SECONDS",
    "admission.max_connections": "extender.settings.config:MAX_CONNECTIONS",
    "freshness.fade_seconds": "extender.core.policy:Freshness.fade_seconds",
    "foreign.readings": "extender.core.policy:Foreign.readings",
    "early_failures.within_seconds": "extender.core.policy:EarlyFailures.within_seconds",
    "early_failures.half_life_seconds": "extender.core.policy:EarlyFailures.half_life_seconds",
    "health.penalty": "extender.core.policy:Health.penalty",
    "health.remapped_rows_per_day": "extender.core.policy:Health.remapped_rows_per_day",
    "health.remapped_rows_limit": "extender.core.policy:Health.remapped_rows_limit",
    "health.retired_pages_warn": "extender.core.policy:Health.retired_pages_warn",
    "health.retired_pages_limit": "extender.core.policy:Health.retired_pages_limit",
    "health.nvlink_crc_per_second": "extender.core.policy:Health.nvlink_crc_per_second",
    "ready.behind_seconds": "extender.server.readiness:_BEHIND_SECONDS",
    "cluster.page_size": f"{REFLECTOR}.page_size",
    "cluster.page_timeout_seconds": (f"{REFLECTOR}.page_timeout_seconds"),
    "cluster.resync_seconds": f"{REFLECTOR}.resync_seconds",
    "cluster.inactivity_timeout_seconds": (f"{REFLECTOR}.silence_seconds"),
    "events.rate_per_second": "extender.effects.events:_PER_SECOND",
    "wake.check_seconds": "extender.effects.wake_plan:WakePace.check_seconds",
    "wake.confirmations": "extender.effects.wake_plan:WakePace.confirmations",
    "wake.min_interval_seconds": "extender.effects.wake_plan:WakePace.min_interval_seconds",
    "wake.max_interval_seconds": "extender.effects.wake_plan:WakePace.max_interval_seconds",
    "wake.repeat_seconds": "extender.effects.wake_plan:WakePace.repeat_seconds",
    "wake.lease_seconds": "extender.kube.lease:_DURATION_SECONDS",
    "wake.retry_share": "extender.effects.wake_plan:WakePace.retry_share",
    "peers.interval_seconds": "extender.effects.peers:_INTERVAL_SECONDS",
    "peers.resolve_seconds": "extender.effects.peers:_RESOLVE_SECONDS",
    "peers.timeout_seconds": "extender.effects.peers:_TIMEOUT_SECONDS",
    "bypassed.grace_seconds": "extender.placement.bypassed_pods:_GRACE_SECONDS",
    "regret.sample_seconds": "extender.insight.shadow_mode:SAMPLE_SECONDS",
    "max_body_bytes": "extender.webhook.handlers:MAX_BODY_BYTES",
    "keepalive_seconds": "extender.server.ports:_KEEPALIVE_SECONDS",
}
"""Constant that replaced each removed setting; the others follow another setting."""

FOLLOWING = {
    "prometheus.round_timeout_seconds",
    "freshness.forget_seconds",
    "health.temperature_warn_celsius",
    "health.memory_temperature_warn_celsius",
}


def as_file(name: str, value: str) -> str:
    text = value
    for part in reversed(name.split(".")):
        text = f"{{{part}: {text}}}"
    return text


def constant(place: str) -> float:
    module, _, name = place.partition(":")
    owner, _, attribute = name.partition(".")
    found = getattr(importlib.import_module(module), owner)
    return float(getattr(found(), attribute) if attribute else found)


def test_no_setting_has_a_removed_name() -> None:
    assert not _REMOVED.keys() & all_settings().keys()
    assert len(all_settings()) <= 110


def test_every_removed_setting_is_a_constant_or_follows_another() -> None:
    assert _NOW.keys() == CONSTANTS.keys() | FOLLOWING


@pytest.mark.parametrize("name", CONSTANTS)
def test_the_warning_gives_the_value_of_the_constant(name: str) -> None:
    now = _NOW[name]
    assert constant(CONSTANTS[name]) == (parse_whole(now) if now.endswith("Mi") else float(now))


@pytest.mark.parametrize("name", _NOW)
def test_a_removed_setting_changes_nothing_and_is_warned_about(tmp_path: Path, name: str) -> None:
    path = write_settings(tmp_path, as_file(name, "7"))
    variable = f"IDLEGPU_{name.replace('.', '_').upper()}"

    for loaded, place in (
        (load(path, {}), f"{path}: {name}: "),
        (load(None, {variable: "7"}), f"{variable}: "),
    ):
        assert loaded.settings == Settings()
        (warning,) = loaded.warnings
        assert warning.startswith(f"{place}has no effect any more, the value is {_NOW[name]}: ")


@pytest.mark.parametrize("name", _MOVED)
def test_a_renamed_setting_keeps_its_effect_and_is_warned_about(tmp_path: Path, name: str) -> None:
    sign = HealthSign[name.removeprefix("health.").upper()]
    path = write_settings(tmp_path, as_file(name, "exclude-node"))
    variable = f"IDLEGPU_{name.replace('.', '_').upper()}"

    for loaded in (load(path, {}), load(None, {variable: "exclude-node"})):
        assert loaded.settings.health.actions == {sign: HealthAction.EXCLUDE_NODE}
        assert getattr(loaded.settings.policy().health, sign) is HealthAction.EXCLUDE_NODE
        (warning,) = loaded.warnings
        assert f"is {_MOVED[name]} now: rename it" in warning


def test_every_sign_of_ill_health_is_an_action_of_the_policy() -> None:
    health = Settings().policy().health
    actions = {
        name for name in type(health).__slots__ if isinstance(getattr(health, name), HealthAction)
    }

    assert actions == set(HealthSign)


def test_the_new_name_wins_over_the_old_one_and_the_environment_over_the_file(
    tmp_path: Path,
) -> None:
    both = write_settings(tmp_path, "health: {dcgm_warn: ignore, actions: {dcgm_warn: exclude}}")
    assert load(both, {}).settings.health.actions == {HealthSign.DCGM_WARN: HealthAction.EXCLUDE}

    loaded = load(both, {"IDLEGPU_HEALTH_DCGM_WARN": "penalty"})
    assert loaded.settings.health.actions == {HealthSign.DCGM_WARN: HealthAction.PENALTY}
    assert len(loaded.warnings) == 2


def test_a_bad_value_under_an_old_name_is_refused(tmp_path: Path) -> None:
    path = write_settings(tmp_path, "health: {dcgm_warn: often}")

    with pytest.raises(ConfigError, match=r"health\.actions\.dcgm_warn: 'often' is not allowed"):
        load(path, {})


def test_check_config_shows_the_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_settings(tmp_path, "peers: {timeout_seconds: 9}")

    assert main(["--check-config", str(path)]) == 0

    assert f"warning: {path}: peers.timeout_seconds: has no effect" in capsys.readouterr().out


def test_the_agent_accepts_those_that_it_had(tmp_path: Path) -> None:
    path = write_settings(tmp_path, "health: {penalty: 0.9, dcgm_fail: penalty}")

    loaded = agent.load(path, {"IDLEGPU_AGENT_HEALTH_WORN_MEMORY": "ignore"})

    assert loaded.settings.health.actions == {
        HealthSign.DCGM_FAIL: HealthAction.PENALTY,
        HealthSign.WORN_MEMORY: HealthAction.IGNORE,
    }
    assert len(loaded.warnings) == 3
    with pytest.raises(ConfigError, match="window_seconds"):
        agent.load(write_settings(tmp_path, "window_seconds: 7"), {})


def test_a_moved_path_is_under_a_map() -> None:
    for path, name in _REMOVED.items():
        moved = _new_path(path)
        assert (moved is None) is (name in _NOW)
        assert moved is None or moved[:-1] in all_settings()


def test_the_changelog_lists_every_removed_setting() -> None:
    text = (Path(__file__).parents[3] / "CHANGELOG.md").read_text(encoding="utf-8")
    removed = text.partition("### Removed")[2]

    assert [name for name in _NOW if f"`{name}`" not in removed] == []
