"""Test which ports may be open to other machines, their certificates, and their limits."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from extender.settings.api import Admission, ApiAccess, ApiSettings, Tls
from extender.settings.config import MAX_CONNECTIONS, Settings
from extender.settings.loading import ConfigError
from tests.extender.settings.settings_files import load, problems

TLS = "tls: {cert_file: c, key_file: k, client_ca_file: a}\n"
STATUS = "status_listen: 0.0.0.0:1\n"
API_TLS = "api: {cert_file: c, key_file: k}\n"
API_PLAIN = "api: {allow_plain: true}\n"
ADMISSION = "admission: {listen: 0.0.0.0:2}\n"
ADMISSION_TLS = "admission: {listen: 0.0.0.0:2, cert_file: c, key_file: k}\n"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("listen: '[::1]:1'\n", id="webhooks of this machine"),
        pytest.param("listen: localhost:1\n", id="webhooks of this machine by name"),
        pytest.param("listen: 0.0.0.0:1\nallow_plain: true\n", id="webhooks without TLS"),
        pytest.param(TLS + "listen: 0.0.0.0:3\n" + STATUS, id="webhooks with TLS"),
        pytest.param("status_listen: 127.0.0.1:1\n", id="API of this machine"),
        pytest.param(API_PLAIN + STATUS, id="API without TLS"),
        pytest.param(API_TLS + STATUS, id="API with TLS of its own"),
        pytest.param(TLS + STATUS, id="API with the TLS of the webhooks"),
        pytest.param(TLS + API_PLAIN + STATUS, id="API without the TLS of the webhooks"),
        pytest.param(ADMISSION_TLS, id="admission with TLS of its own"),
        pytest.param(TLS + STATUS + ADMISSION, id="admission with the TLS of the webhooks"),
        pytest.param(
            TLS + STATUS + "peers: {service: 'a:1', secret_file: absent}\n", id="replicas with TLS"
        ),
        pytest.param("tls: {}\nadmission: {proposals: false}\n", id="nothing"),
    ],
)
def test_a_port_that_is_protected_or_allowed_may_be_open(tmp_path: Path, text: str) -> None:
    load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("listen: 0.0.0.0:1\n", "listen (0.0.0.0:1) is reached from other machines"),
        (STATUS, "status_listen (0.0.0.0:1) is reached from other machines"),
        (STATUS + "allow_plain: true\n", "status_listen (0.0.0.0:1) is reached from other mach"),
        (API_PLAIN + "listen: 0.0.0.0:1\n", "listen (0.0.0.0:1) is reached from other machines"),
        (TLS, "status_listen must be set with tls: "),
        (API_TLS, "status_listen must be set with api.cert_file"),
        (ADMISSION, "admission.listen (0.0.0.0:2) needs a certificate"),
        (API_TLS + STATUS + ADMISSION, "admission.listen (0.0.0.0:2) needs a certificate"),
        ("peers: {service: 'a:1'}\n", "peers without TLS need peers.secret_file"),
        ("api: {cert_file: c}\n", "api.cert_file and api.key_file belong together"),
        ("api: {key_file: k}\n", "api.cert_file and api.key_file belong together"),
        ("admission: {cert_file: c}\n", "admission.cert_file and admission.key_file belong tog"),
        ("admission: {key_file: k}\n", "admission.cert_file and admission.key_file belong tog"),
        (
            STATUS + "api: {cert_file: c, key_file: k, allow_plain: true}\n",
            "api.allow_plain (true) is not allowed with api.cert_file",
        ),
    ],
)
def test_a_port_that_other_machines_reach_needs_tls(
    tmp_path: Path, text: str, problem: str
) -> None:
    (found,) = problems(tmp_path, text)

    assert problem in found


@pytest.mark.parametrize(
    "names",
    [
        names
        for count in (1, 2)
        for names in combinations(("cert_file", "key_file", "client_ca_file"), count)
    ],
    ids=", ".join,
)
def test_the_three_files_of_tls_belong_together(tmp_path: Path, names: tuple[str, ...]) -> None:
    files = ", ".join(f"{name}: file" for name in names)

    (found,) = problems(tmp_path, f"tls: {{{files}}}\n")

    assert "tls.cert_file, tls.key_file and tls.client_ca_file belong together" in found


LISTENS = {
    "listen": "listen: {}\n",
    "status_listen": "status_listen: {}\n",
    "agents.listen": "agents: {{listen: '{}'}}\n",
    "admission.listen": "admission: {{listen: '{}', cert_file: c, key_file: k}}\n",
}


@pytest.mark.parametrize("names", [*combinations(LISTENS, 2)], ids=" and ".join)
def test_no_two_ports_have_one_address(tmp_path: Path, names: tuple[str, str]) -> None:
    address = "127.0.0.1:7000"

    (found,) = problems(tmp_path, "".join(LISTENS[name].format(address) for name in names))

    assert found.endswith(f"{names[1]} ({address}) must differ from {names[0]}")


def test_the_limits_of_all_ports_in_use_add_up(tmp_path: Path) -> None:
    agents = "agents: {listen: 127.0.0.1:9401, max_connections: 70}\n"

    sums = [
        load(tmp_path, "max_connections: 30\n" + text).most_connections
        for text in ("", STATUS + API_PLAIN, ADMISSION_TLS, agents)
    ]

    assert sums == [30, 30 + MAX_CONNECTIONS, 30 + MAX_CONNECTIONS, 100]


@pytest.mark.parametrize(
    ("secret", "problem"),
    [
        ("a" * 16 + "\n", ""),
        ("a" * 15 + "\n", "holds 15 characters: must hold at least 16"),
        ("ä" * 16, "codec can't decode"),
        (None, "No such file"),
    ],
    ids=["long enough", "too short", "no plain text", "missing"],
)
def test_replicas_without_tls_share_a_long_secret(
    tmp_path: Path, secret: str | None, problem: str
) -> None:
    file = tmp_path / "secret"
    if secret is not None:
        file.write_text(secret, encoding="utf-8")
    text = f"peers: {{addresses: ['a:1'], secret_file: {file}}}\n"

    if not problem:
        assert load(tmp_path, text).peer_secret() == "a" * 16
        return
    with pytest.raises(ConfigError, match=f"peers.secret_file .*{problem}"):
        load(tmp_path, text)


OWN, SHARED = (Path("own.crt"), Path("own.key")), (Path("tls.crt"), Path("tls.key"))
WITH_TLS = Tls(cert_file=SHARED[0], key_file=SHARED[1], client_ca_file=Path("ca"))
WITH_OWN: dict[str, Any] = {"cert_file": OWN[0], "key_file": OWN[1]}


@pytest.mark.parametrize(
    ("own", "tls", "expected"),
    [
        ({}, Tls(), None),
        ({}, WITH_TLS, SHARED),
        ({"allow_plain": True}, WITH_TLS, None),
        (WITH_OWN, WITH_TLS, OWN),
        (WITH_OWN, Tls(), OWN),
    ],
    ids=["none", "that of the webhooks", "none on purpose", "its own", "its own alone"],
)
def test_the_api_has_a_certificate_of_its_own_or_that_of_the_webhooks(
    own: dict[str, Any], tls: Tls, expected: tuple[Path, Path] | None
) -> None:
    assert ApiSettings(**own).files(tls) == expected


def test_admission_has_a_certificate_of_its_own_or_that_of_the_webhooks() -> None:
    assert Admission(**WITH_OWN).files(WITH_TLS) == OWN
    assert Admission().files(WITH_TLS) == SHARED
    with pytest.raises(ValueError, match="needs a certificate"):
        Admission().files(Tls())


@pytest.mark.parametrize(
    ("access", "is_open"),
    [
        (ApiAccess.AUTO, {"127.0.0.1": True, "::1": True, "localhost": True, "10.0.0.1": False}),
        (ApiAccess.TOKEN, {"127.0.0.1": False, "10.0.0.1": False}),
        (ApiAccess.OPEN, {"127.0.0.1": True, "gpus": True}),
    ],
)
def test_who_needs_a_token_depends_on_setting_and_host(
    access: ApiAccess, is_open: dict[str, bool]
) -> None:
    api = ApiSettings(access=access)

    assert {host: api.is_open(host) for host in is_open} == is_open


@pytest.mark.parametrize("listen", ["", "127.0.0.1:9"])
def test_a_port_that_is_not_set_has_no_address(listen: str) -> None:
    expected = ("127.0.0.1", 9) if listen else ("", 0)

    assert Admission(listen=listen).address == expected
    assert Settings(status_listen=listen).status_address == (expected if listen else LOCAL)


LOCAL = ("127.0.0.1", 8888)
