from pathlib import Path

import pytest

from agent import options as coded
from agent.config import Settings, all_settings, load
from agent.options import Options
from extender.core.policy import HealthAction
from extender.settings.loading import ConfigError


def test_without_settings_the_defaults_apply() -> None:
    options = load(None, {}).settings.value()

    assert options.node != ""
    assert options == Options(node=options.node)


def test_loads_listen_is_an_address_or_empty() -> None:
    shown = load(None, {"IDLEGPU_AGENT_LOADS_LISTEN": "[::]:9403"}).settings.value()

    assert (shown.loads_host, shown.loads_port) == ("::", 9403)
    with pytest.raises(ConfigError, match="IDLEGPU_AGENT_LOADS_LISTEN"):
        load(None, {"IDLEGPU_AGENT_LOADS_LISTEN": "9403"})


def test_a_variable_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("period_seconds: 5\nthresholds: {utilization: 20%, memory: 40}\n")
    environ = {"IDLEGPU_AGENT_PERIOD_SECONDS": "2", "IDLEGPU_AGENT_THRESHOLDS_MEMORY": "60"}

    options = load(file, environ).settings.value()

    assert options.period_seconds == 2
    thresholds = options.verdict_policy.thresholds
    assert (thresholds.utilization, thresholds.memory) == pytest.approx((0.2, 0.6))


def test_a_map_in_a_variable_replaces_the_map_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("health: {xid: {94: exclude}, xid_seconds: 60}\n")

    health = load(file, {"IDLEGPU_AGENT_HEALTH_XID": "{13: penalty}"}).settings.health

    assert (health.xid, health.xid_seconds) == ({13: HealthAction.PENALTY}, 60)


def test_the_extenders_variables_do_not_apply_to_the_agent() -> None:
    environ = {"IDLEGPU_LISTEN": "nonsense", "IDLEGPU_THRESHOLDS_MEMORY": "-5"}

    assert load(None, environ).settings == Settings()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"IDLEGPU_AGENT_PERIOD_SECONDS": "0"},
            "IDLEGPU_AGENT_PERIOD_SECONDS: 0 is out of bounds: must be from 0.25 to 60 seconds",
        ),
        (
            {"IDLEGPU_AGENT_LISTN": "a:1"},
            "IDLEGPU_AGENT_LISTN: names no setting: did you mean IDLEGPU_AGENT_LISTEN?",
        ),
        (
            {"IDLEGPU_AGENT_LISTEN": "everywhere"},
            "IDLEGPU_AGENT_LISTEN: 'everywhere' is not allowed: must be host:port",
        ),
        (
            {"IDLEGPU_AGENT_HEALTH_DOUBLE_BIT_ERROR": "shout"},
            "IDLEGPU_AGENT_HEALTH_DOUBLE_BIT_ERROR: 'shout' is not allowed: must be ignore",
        ),
    ],
)
def test_an_invalid_setting_is_named_with_the_allowed_values(
    environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, environ)

    assert message in str(caught.value)


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("perod_seconds: 1\nhung_calls: 0\n")

    with pytest.raises(ConfigError) as caught:
        load(file, {"IDLEGPU_AGENT_CALL_SECONDS": "never"})

    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert any(
        "perod_seconds: is no known setting: did you mean period_seconds?" in one for one in lines
    )


def test_null_disables_a_source(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("kubelet_socket: null\nproc: null\n")

    options = load(file, {}).settings.value()

    assert (options.kubelet_socket, options.proc) == ("", "")


def test_options_round_trip_between_two_processes() -> None:
    environ = {
        "IDLEGPU_AGENT_HEALTH_XID": "{94: exclude, 109: penalty}",
        "IDLEGPU_AGENT_FOREIGN_MEMORY": "2Gi",
        "IDLEGPU_AGENT_DCGM_NAMES": "true",
    }
    options = load(None, environ).settings.value()

    assert coded.decode(coded.encode(options)) == options
    assert options.foreign.memory_bytes == 2 << 30


def test_every_setting_has_a_description_and_bounds_where_it_is_a_number() -> None:
    for setting in all_settings().values():
        assert setting.description, setting.name
        assert setting.variable.startswith("IDLEGPU_AGENT_")
        if setting.kind in {"a number", "a whole number", "a quantity"}:
            assert setting.bounds, setting.name
