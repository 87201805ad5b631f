from pathlib import Path

import pytest

from agent import options as coded
from agent.config import Settings, all_settings, load, main
from agent.gpu.session import Cadence
from agent.options import Options, ReportOptions
from agent.report.verdict import VerdictPolicy
from agent.tenants.foreign import Threshold
from extender.core.policy import Health, HealthAction, Thresholds
from extender.settings.loading import ConfigError
from extender.settings.spec import show_value
from tests.files import ROOT


def test_without_settings_the_defaults_apply() -> None:
    options = load(None, {}).settings.value()

    assert options.node != ""
    assert options == Options(node=options.node)


def documented() -> dict[str, list[str]]:
    """Return the cells of each row of the agent's table in docs/settings.md, by setting."""
    page = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    table = page.partition("<!-- agent-settings:begin -->")[2].partition("<!--")[0]
    rows = (line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `"))
    return {cells[0].strip("`"): [cell.strip() for cell in cells[1:]] for cells in rows}


def test_the_settings_in_force_are_the_documented_defaults() -> None:
    loaded = load(None, {}).settings

    in_force = {
        setting.name: (show_value(loaded, setting), setting.form or setting.bounds)
        for setting in all_settings().values()
    }

    assert in_force == {name: (row[1].strip("`"), row[2]) for name, row in documented().items()}


EVERYTHING = """
listen: 10.0.0.1:1
loads_listen: 10.0.0.2:2
node: gpu-7
period_seconds: 2
slow_seconds: 3
process_seconds: 4
call_seconds: 5.5
start_seconds: 6
retry_seconds: 7
liveness_seconds: 8
dcgm_names: true
kubelet_socket: /kubelet.sock
proc: /host/proc
pod_logs: /logs
reports:
  service: extender:9401
  token_file: /token
  ca_file: /ca
  server_name: extender
  allow_plain: true
  heartbeat_seconds: 9
  utilization_step: 10
  memory_step: 11
  resolve_seconds: 12
  timeout_seconds: 13
  reconnect_seconds: 14
  max_backoff_seconds: 15
thresholds: {utilization: 16, memory: 17}
foreign: {memory: 2Gi, utilization: 18}
health: {xid_seconds: 19}
log: {level: debug, format: text}
"""


def test_every_setting_reaches_the_agent(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(EVERYTHING)

    options = load(file, {}).settings.value()

    assert options == Options(
        host="10.0.0.1",
        port=1,
        loads_host="10.0.0.2",
        loads_port=2,
        node="gpu-7",
        period_seconds=2,
        cadence=Cadence(slow_seconds=3, process_seconds=4, start_limit_seconds=6, retry_seconds=7),
        call_seconds=5.5,
        liveness_seconds=8,
        dcgm_names=True,
        kubelet_socket="/kubelet.sock",
        proc="/host/proc",
        pod_logs="/logs",
        verdict_policy=VerdictPolicy(
            thresholds=Thresholds(utilization=0.16, memory=0.17), health=Health(xid_seconds=19)
        ),
        foreign=Threshold(memory_bytes=2 << 30, utilization=0.18),
        reports=ReportOptions(
            service="extender:9401",
            token_file="/token",
            ca_file="/ca",
            server_name="extender",
            allow_plain=True,
            heartbeat_seconds=9,
            utilization_step=0.1,
            memory_step=0.11,
            resolve_seconds=12,
            timeout_seconds=13,
            reconnect_seconds=14,
            max_backoff_seconds=15,
        ),
        log_level="debug",
        log_format="text",
    )
    assert options.stale_seconds == 3 * 2 + 5.5


def test_a_checked_file_is_shown_as_far_as_it_matters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("node: gpu-7\nproc: null\n")
    monkeypatch.setenv("IDLEGPU_AGENT_THRESHOLDS_MEMORY", "40")

    assert main(["--check", "--config", str(file)]) == 0

    said = capsys.readouterr()
    assert said.out == (
        f"{file}: ok\n  listen: 127.0.0.1:9402\n  node: gpu-7\n  period_seconds: 1\n"
        "  proc: (none)\n  reports.service: (none)\n  thresholds.utilization: 30\n"
        "  thresholds.memory: 40\n"
    )
    assert said.err == ""


def test_invalid_settings_exit_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDLEGPU_AGENT_PERIOD_SECONDS", "61")

    assert main([]) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("IDLEGPU_AGENT_PERIOD_SECONDS: 61 is out of bounds")


def test_settings_are_printed_encoded_or_as_a_table(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(EVERYTHING)

    assert main(["--config", str(file)]) == 0
    encoded = capfdbinary.readouterr().out
    assert main(["--table"]) == 0
    table = capfdbinary.readouterr().out

    assert coded.decode(encoded) == load(file, {}).settings.value()
    assert len(table.splitlines()) == len(all_settings()) + 2


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
