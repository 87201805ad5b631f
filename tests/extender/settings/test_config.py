import re
from pathlib import Path

import pytest

from extender.core.policy import HealthAction, LoadFilter, Policy, SharedPolicy, Strategy
from extender.settings.config import Settings, all_settings, load_settings
from extender.settings.loading import ConfigError
from extender.settings.service import split_address
from tests.extender.settings.settings_files import load

ROOT = Path(__file__).parents[3]
EVERYTHING = """
listen: "[::]:9000"
allow_plain: true
kubeconfig: /etc/kube/config
resources: [nvidia.com/gpu, example.com/gpu-*]
thresholds: {utilization: 20, memory: 40%}
strategy: Pack
shared_policy: packed
group_topology: [example.com/rack]
cluster: {memory_limits: true}
mps_share: 8Gi
recent_seconds: 300
freshness: {max_age_seconds: 60}
foreign: {memory: 512Mi, utilization: 5}
assumed: {utilization: 20, tentative_seconds: 10, warm_up_seconds: 60}
early_failures: {weight: 0.25}
health:
  xid: {94: exclude, 79: penalty}
  actions: {unknown_xid: ignore, dcgm_warn: exclude}
  temperature_high_celsius: 85
weights: {utilization: 0.4, memory: 0.4}
load_filter: {enabled: true}
prices: {H100: 2.5}
price: prefer
prometheus: {url: "http://prometheus:9090"}
"""


def test_the_defaults_are_the_core_s_own() -> None:
    assert Settings().policy() == Policy()
    assert load_settings(None, {}) == Settings()


def test_every_setting_of_the_decision_reaches_the_core(tmp_path: Path) -> None:
    settings = load(tmp_path, EVERYTHING)
    policy = settings.policy()

    assert settings.listen_address == ("::", 9000)
    assert settings.kubeconfig == Path("/etc/kube/config")
    assert settings.resource_patterns.matches("example.com/gpu-large")
    assert (policy.thresholds.utilization, policy.thresholds.memory) == (0.2, 0.4)
    assert (policy.strategy, policy.shared_policy) == (Strategy.PACK, SharedPolicy.PACKED)
    assert (policy.mps_share_bytes, policy.recent_seconds) == (8 << 30, 300)
    assert policy.freshness.max_age_seconds == 60
    assert (policy.foreign.memory_bytes, policy.foreign.utilization) == (512 << 20, 0.05)
    assert (policy.assumed.utilization, policy.assumed.tentative_seconds) == (0.2, 10)
    assert policy.early_failures.weight == 0.25
    assert policy.health.xid == {94: HealthAction.EXCLUDE, 79: HealthAction.PENALTY}
    assert policy.health.unknown_xid is HealthAction.IGNORE
    assert policy.health.dcgm_warn is HealthAction.EXCLUDE
    assert (policy.health.temperature_warn_celsius, policy.health.temperature_high_celsius) == (
        75,
        85,
    )
    assert policy.load_filter == LoadFilter(is_enabled=True)
    assert (policy.weights.utilization, policy.weights.memory) == (0.4, 0.4)


def test_full_settings_file_sets_every_part_of_the_policy(tmp_path: Path) -> None:
    policy, default = load(tmp_path, EVERYTHING).policy(), Policy()

    same = [name for name in Policy.__slots__ if getattr(policy, name) == getattr(default, name)]

    assert same == ["window_seconds"]  # a constant


@pytest.mark.parametrize(
    ("variable", "text", "path", "value"),
    [
        ("IDLEGPU_LISTEN", "127.0.0.2:80", "listen", "127.0.0.2:80"),
        ("IDLEGPU_KUBECONFIG", "/k", "kubeconfig", Path("/k")),
        ("IDLEGPU_PROMETHEUS_URL", "http://p:9090", "prometheus.url", "http://p:9090"),
        ("IDLEGPU_PROMETHEUS__URL", "http://p:9090", "prometheus.url", "http://p:9090"),
        ("IDLEGPU_THRESHOLDS__UTILIZATION", "25", "thresholds.utilization", 25.0),
        ("IDLEGPU_THRESHOLDS_MEMORY", " 25% ", "thresholds.memory", 25.0),
        ("IDLEGPU_EARLY_FAILURES_WEIGHT", "0.1", "early_failures.weight", 0.1),
        ("IDLEGPU_LOAD_FILTER__ENABLED", "true", "load_filter.enabled", True),
        ("IDLEGPU_RESOURCES", "a.b/c, d.e/f-*", "resources", ("a.b/c", "d.e/f-*")),
        ("IDLEGPU_RESOURCES", "['a.b/c']", "resources", ("a.b/c",)),
        ("IDLEGPU_HEALTH_XID", "{13: exclude}", "health.xid", {13: HealthAction.EXCLUDE}),
        ("IDLEGPU_PROMETHEUS_HEADERS", '{"A": "b"}', "prometheus.headers", {"A": "b"}),
        ("IDLEGPU_MPS_SHARE", "8Gi", "mps_share", 8 << 30),
        ("IDLEGPU_LOG_LEVEL", "DEBUG", "log.level", "debug"),
    ],
)
def test_a_variable_sets_a_setting(variable: str, text: str, path: str, value: object) -> None:
    settings: object = load_settings(None, {variable: text})

    for name in path.split("."):
        settings = getattr(settings, name)

    assert settings == value


def test_every_setting_has_a_variable_of_its_own() -> None:
    variables = [setting.variable for setting in all_settings().values()]

    assert len(set(variables)) == len(variables)


def test_the_environment_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        "thresholds: {utilization: 20, memory: 40}\nhealth: {xid: {79: ignore}}",
        IDLEGPU_THRESHOLDS_UTILIZATION="10",
        IDLEGPU_HEALTH_XID="{94: exclude}",
    )

    assert settings.thresholds.utilization == 10
    assert settings.thresholds.memory == 40
    assert settings.health.xid == {94: HealthAction.EXCLUDE}
    assert settings.wire.max_score == 400


def test_the_environment_mends_a_bad_value_of_the_file(tmp_path: Path) -> None:
    text = "thresholds: {utilization: 130}"

    assert load(tmp_path, text, IDLEGPU_THRESHOLDS_UTILIZATION="10").thresholds.utilization == 10


def test_settings_made_directly_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDLEGPU_LISTEN", "127.0.0.1:1")
    monkeypatch.setenv("LISTEN", "127.0.0.1:1")

    assert Settings().listen == "127.0.0.1:8888"


def test_a_variable_without_text_sets_nothing() -> None:
    assert load_settings(None, {"IDLEGPU_LISTEN": "", "IDLEGPU_MPS_SHARE": " "}) == Settings()


@pytest.mark.parametrize(
    "variable",
    [
        *("IDLEGPU_PORT", "IDLEGPU_SERVICE_HOST", "IDLEGPU_SERVICE_PORT_HTTP"),
        *("IDLEGPU_PORT_8888_TCP_ADDR", "IDLEGPU_EXTENDER_PORT_8888_TCP", "IDLEGPU_CACHE"),
        *("IDLEGPU_LISTEN_SERVICE_HOST", "OTHER_LISTEN", "IDLEGPU_AGENT_PERIOD_SECONDS"),
    ],
)
def test_variables_that_others_set_are_left_alone(variable: str) -> None:
    assert load_settings(None, {variable: "tcp://10.0.0.1:80"}) == Settings()


@pytest.mark.parametrize("text", ["", "---\n", "# nothing\n", "thresholds:\nlog:\n", "{}", "﻿"])
def test_a_file_that_sets_nothing_gives_the_defaults(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text) == Settings()


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("localhost:8888", ("localhost", 8888)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_a_listen_address_is_split(listen: str, address: tuple[str, int]) -> None:
    assert Settings(listen=listen).listen_address == address


@pytest.mark.parametrize(
    "listen",
    ["8888", ":8888", "host", "host:", "host:65536", "host:-1", "::1:80", "[host]:80", "a b:80"],
)
def test_invalid_listen_address_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="must be host:port with a port from 0 to 65535"):
        load_settings(None, {"IDLEGPU_LISTEN": listen})


def test_only_the_command_line_reads_the_environment() -> None:
    names = ("os.environ", "getenv")
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "extender").rglob("*.py")
        if any(name in path.read_text(encoding="utf-8") for name in names)
    }

    assert readers == {"extender/__main__.py"}


@pytest.mark.parametrize("name", ["drain_seconds", "shutdown_seconds"])
def test_the_chart_assumes_the_same_default(name: str) -> None:
    text = (ROOT / "charts/idlegpu/templates/extender/deployment.yaml").read_text(encoding="utf-8")

    assert re.findall(rf'dig "{name}" (\d+) \$settings', text) == [all_settings()[name,].default]


def test_agents_report_nowhere_unless_that_is_set() -> None:
    assert Settings().agents.address == ("", 0)


@pytest.mark.parametrize("address", ["127.0.0.1:9401", "[::1]:9401", "localhost:9401"])
def test_reports_of_this_machine_need_no_tls(address: str) -> None:
    assert load_settings(None, {"IDLEGPU_AGENTS_LISTEN": address}).agents.listen == address


@pytest.mark.parametrize("address", ["0.0.0.0:9401", "[::]:9401", "10.0.0.1:9401"])
def test_reports_of_other_machines_without_tls_must_be_allowed(address: str) -> None:
    with pytest.raises(ConfigError, match=r"allow_plain"):
        load_settings(None, {"IDLEGPU_AGENTS_LISTEN": address})

    allowed = {"IDLEGPU_AGENTS_LISTEN": address, "IDLEGPU_AGENTS_ALLOW_PLAIN": "true"}
    assert load_settings(None, allowed).agents.address[1] == 9401


def test_reports_of_other_machines_over_tls_need_no_leave() -> None:
    environ = {
        "IDLEGPU_AGENTS_LISTEN": "0.0.0.0:9401",
        "IDLEGPU_AGENTS_CERT_FILE": "/tls/tls.crt",
        "IDLEGPU_AGENTS_KEY_FILE": "/tls/tls.key",
    }

    assert load_settings(None, environ).agents.is_tls


@pytest.mark.parametrize("name", ["CERT_FILE", "KEY_FILE"])
def test_a_certificate_and_its_key_belong_together(name: str) -> None:
    with pytest.raises(ConfigError, match=r"agents\.cert_file and agents\.key_file"):
        load_settings(None, {f"IDLEGPU_AGENTS_{name}": "/tls/file"})


def test_service_accounts_are_named_as_the_api_server_names_them() -> None:
    agents = load_settings(None, {"IDLEGPU_AGENTS_SERVICE_ACCOUNTS": "ml/agent, gpu/a"}).agents

    assert agents.usernames == {"system:serviceaccount:ml:agent", "system:serviceaccount:gpu:a"}


@pytest.mark.parametrize("account", ["agent", "/agent", "ml/", "a/b/c", "system:a/b"])
def test_invalid_service_account_is_refused(account: str) -> None:
    with pytest.raises(ConfigError, match="namespace/name"):
        load_settings(None, {"IDLEGPU_AGENTS_SERVICE_ACCOUNTS": account})


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        pytest.param("idlegpu-peers:8888", ("idlegpu-peers", 8888), id="name"),
        pytest.param("a.b.svc.cluster.local.:1", ("a.b.svc.cluster.local.", 1), id="full-name"),
        pytest.param("10.0.0.1:65535", ("10.0.0.1", 65535), id="ipv4"),
        pytest.param("[fd00::1]:80", ("fd00::1", 80), id="ipv6"),
    ],
)
def test_address_is_host_and_port(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize(
    "address",
    [
        "",
        "a",
        "a:",
        ":80",
        "a:0",
        "a:65536",
        "a:x",
        "http://a:80",
        "a:80/x",
        "u@a:80",
        "fd00::1:80",
    ],
)
def test_anything_else_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="must be host:port with a port from 1 to 65535"):
        split_address(address)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param("peers: {service: idlegpu-peers}", "peers.service", id="service"),
        pytest.param("peers: {addresses: ['a:1', 'b']}", "peers.addresses", id="addresses"),
        pytest.param("prices: {Node/gpu-7: 1}", "must be node/NAME", id="price of a node"),
        pytest.param("prices: {labels/a=b: 1}", "must be node/NAME", id="price by label"),
        pytest.param("prices: {label/a: 1}", "must be label/NAME=VALUE", id="label"),
        pytest.param("prices: {H100: -1}", "prices", id="negative price"),
    ],
)
def test_bad_setting_is_named(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError) as caught:
        load_settings(path, {})

    (problem,) = caught.value.problems
    assert name in problem


def test_without_addresses_there_is_no_other_replica(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("known to all replicas")
    known = {"IDLEGPU_PEERS_SECRET_FILE": str(secret)}

    assert not load_settings(None, known).peers.is_used
    assert load_settings(None, {**known, "IDLEGPU_PEERS_SERVICE": "a:1"}).peers.is_used
