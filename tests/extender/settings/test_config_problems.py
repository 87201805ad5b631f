from pathlib import Path

import pytest

from extender.settings.config import load_settings
from extender.settings.loading import ConfigError
from tests.extender.settings.settings_files import load, problems


def test_of_thousands_of_problems_the_first_ones_are_described(tmp_path: Path) -> None:
    found = problems(tmp_path, "\n".join(f"unknown{at}: 1" for at in range(3000)))

    assert len(found) == 51
    assert found[-1] == "and 2950 more problems"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "thresholds: {utilization: 130}",
            "thresholds.utilization: 130 is out of bounds: must be from 1 to 100 percent",
        ),
        (
            "thresholds: {memory: 0.5}",
            "thresholds.memory: 0.5 is out of bounds: must be from 1 to 100 percent",
        ),
        (
            "thresholds: {memory: much}",
            "thresholds.memory: 'much' is not allowed: must be a number from 1 to 100 percent",
        ),
        (
            "thresholds: {utilisation: 3}",
            "thresholds.utilisation: is no known setting: did you mean thresholds.utilization?",
        ),
        ("tresholds: {memory: 3}", "tresholds: is no known setting: did you mean thresholds?"),
        ("max_score: 3", "max_score: is no known setting: did you mean wire.max_score?"),
        ("events: {zzz: 3}", "events.zzz: is no known setting: must be one of enabled, placements"),
        (
            "events: true",
            "events: true is not allowed: must map names to values: enabled, placements",
        ),
        ("strategy: Best", "strategy: 'Best' is not allowed: must be one of auto, spread, pack"),
        ("mps_share: 20GB", "mps_share: '20GB' is not allowed: must be a quantity from 1Mi to 1Ti"),
        ("mps_share: 20", "mps_share: 20 is out of bounds: must be from 1Mi to 1Ti"),
        (
            "decisions: {history: yes}",
            "decisions.history: true is not allowed: must be a whole number from 1 to 100000",
        ),
        (
            "recent_seconds: .nan",
            "recent_seconds: nan is not allowed: must be a number from 10 to 3600 seconds",
        ),
        (
            "listen: 8888",
            "listen: 8888 is not allowed: must be host:port with a port from 0 to 65535",
        ),
        ("resources: []", "resources: no GPU resource is named: name at least one, e.g. "),
        (
            "resources: [nvidia.com/gpu, 7]",
            "resources[1]: 7 is not allowed: must be a valid string",
        ),
        ("health: {xid: {-1: ignore}}", "health.xid.-1: -1 is not allowed: must be greater than"),
        ("health: {xid: {79: x}}", "health.xid.79: 'x' is not allowed: must be ignore, penalty, "),
        (
            "health: {actions: {dcgm_warm: ignore}}",
            "health.actions.dcgm_warm: 'dcgm_warm' is not allowed: must be unknown_xid, ",
        ),
        (
            "prometheus: {metrics: {A: {signal: gpu_utilization_ratio}}}",
            "prometheus.metrics.A.unit: is missing",
        ),
        ("prometheus: {metrics: {a-b: null}}", "prometheus.metrics: 'a-b' is not a metric's name"),
        (
            "prometheus: {metrics: {A: {signal: heat, unit: ratio}}}",
            "prometheus.metrics: A: signal 'heat' must be one of gpu_utilization_ratio, ",
        ),
        ("prometheus: {node_labels: [a-b]}", "prometheus.node_labels: 'a-b' is not a label's name"),
        (
            "pool_labels: [pool, a b]",
            "pool_labels[1]: 'a b' is not allowed: must be a label's name, such as pool",
        ),
        ("pool_labels: pool", "pool_labels: 'pool' is not allowed: must be a list of names of "),
        ("7: x", "7: is no known setting: must be one of listen, "),
    ],
)
def test_problem_names_setting_value_and_allowed_values(
    tmp_path: Path, text: str, problem: str
) -> None:
    (found,) = problems(tmp_path, text)

    assert found.startswith(f"settings.yaml: {problem}")


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("IDLEGPU_THRESHOLDS_MEMORY", "130", "130 is out of bounds: must be from 1 to 100 percent"),
        ("IDLEGPU_LISTEN", "here", "'here' is not allowed: must be host:port with a port from 0 "),
        ("IDLEGPU_LISTN", "x", "names no setting: did you mean IDLEGPU_LISTEN?"),
        ("IDLEGPU_PROMETHEUS__URI", "x", "names no setting: did you mean IDLEGPU_PROMETHEUS_URL?"),
        ("IDLEGPU_HEALTH_XID", "{79", "cannot be read: line 1, column 4: is not YAML: expected"),
        ("IDLEGPU_HEALTH_XID", "79", "'79' is not allowed: must be a map of XID (0 to 1000) to "),
    ],
)
def test_a_problem_names_the_variable_that_it_came_from(
    tmp_path: Path, variable: str, text: str, problem: str
) -> None:
    (found,) = problems(tmp_path, "", **{variable: text})

    assert found.replace(": 79 is", ": '79' is").startswith(f"{variable}: {problem}")


def test_a_setting_that_two_variables_set_is_a_problem(tmp_path: Path) -> None:
    both = {"IDLEGPU_PROMETHEUS_URL": "http://a", "IDLEGPU_PROMETHEUS__URL": "http://b"}

    (found,) = problems(tmp_path, "", **both)

    assert "IDLEGPU_PROMETHEUS__URL" in found
    assert "set only one" in found


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        "wire: {max_score: 0}\nlog: {level: loud, colour: red}",
        IDLEGPU_DECISIONS_HISTORY="0",
        IDLEGPU_HEALTH__XIDS="{}",
    )

    assert len(found) == 5


def test_readings_that_could_never_be_fresh_are_refused(tmp_path: Path) -> None:
    text = "prometheus: {url: 'http://p'}\nfreshness: {max_age_seconds: 20}"

    (found,) = problems(tmp_path, text)

    assert found.startswith("settings.yaml: freshness.max_age_seconds (20) must be at least")


@pytest.mark.parametrize(
    "text",
    [
        "prometheus: {headers: {Authorization: [hunter2]}}",
        "prometheus: {headers: [hunter2]}",
        "prometheus: {headers: hunter2}",
        "prometheus: {password: hunter2}",
        "prometheus: {url: 'ftp://me:hunter2@host/x'}",
        "prometheus: {url: 'http://me:hunter2@host:99999'}",
        "prometheus: {url: 'http://me:hunter2@host:0'}",
        "prometheus: {url: 'http://me:hunter2@host:port'}",
        "prometheus: {url: 'http://me:hunter2@[::1'}",
        "prometheus: {url: ['http://me:hunter2@host/x']}",
        "prometheus: {timeout_seconds: {password: hunter2}}",
        "prometheus:\n  password: hunter2\n bad: [",
        "prometheus: {headers: {Authorization: 'hunter2}}",
    ],
)
def test_secrets_are_never_in_a_message(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)

    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in str(caught.value.__cause__)


def test_secrets_of_the_environment_are_never_in_a_message(tmp_path: Path) -> None:
    for text in ("{Authorization: 'hunter2}", "hunter2", "{A: [hunter2]}", "*hunter2"):
        found = problems(tmp_path, "", IDLEGPU_PROMETHEUS_HEADERS=text)
        assert "hunter2" not in "".join(found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1, 2", "line 1, column 9: is not YAML: "),
        ("a: 1\n b: 2", "line 2, column 3: is not YAML: mapping values are not allowed here"),
        ("log: {}\nlog: {}", "line 2, column 1: is not YAML: 'log' is given twice"),
        ("- a", "must map names to settings, is a list"),
        ("text", "must map names to settings, is a str"),
        ("a: 1\n---\nb: 2", "line 2, column 1: is not YAML: but found another document"),
        ("a: !!python/name:os.system x", "line 1, column 4: is not YAML: could not determine"),
        ("a: 2026-13-45", "is not YAML that can be read: "),
        ("a: \x01", "is not YAML: special characters are not allowed"),
        ("{a: " * 3000, "is not YAML that can be read: "),
    ],
)
def test_a_file_that_is_no_yaml_map_is_explained(tmp_path: Path, text: str, problem: str) -> None:
    (found,) = problems(tmp_path, text)

    assert found.startswith(f"settings.yaml: {problem}")


def test_a_file_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    for name, cause in {
        "missing.yaml": "cannot be read: No such file or directory",
        ".": "cannot be read: Is a directory",
        "latin.yaml": "is not UTF-8 text: byte 3 is wrong",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_settings(tmp_path / name, {})
        assert str(caught.value) == f"{tmp_path / name}: {cause}"


def test_proposals_of_the_admission_webhook_need_the_webhook(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"admission\.proposals needs the webhook"):
        load(tmp_path, "admission: {proposals: true}")
