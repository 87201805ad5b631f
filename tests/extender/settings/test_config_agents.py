import pytest

from extender.settings.config import ConfigError, Settings, load_settings


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
