"""Formats of the addresses of other replicas."""

from pathlib import Path

import pytest

from extender.settings.config import ConfigError, load_settings
from extender.settings.service import split_address


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
