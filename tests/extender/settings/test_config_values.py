"""Test values that settings allow, and the values that they give the other parts."""

from pathlib import Path

import pytest

from extender.core.devices.readings import Signal
from extender.core.policy import Policy
from extender.settings.api import ApiSettings
from extender.settings.loading import ConfigError
from extender.settings.service import Events
from tests.extender.settings.settings_files import load, problems


@pytest.mark.parametrize(("age", "forget"), [(60, Policy().freshness.forget_seconds), (1200, 1200)])
def test_a_fresh_device_is_never_forgotten(tmp_path: Path, age: float, forget: float) -> None:
    freshness = load(tmp_path, f"freshness: {{max_age_seconds: {age}}}").policy().freshness

    assert (freshness.max_age_seconds, freshness.forget_seconds) == (age, forget)


@pytest.mark.parametrize(("age", "is_allowed"), [(50, True), (49.9, False)])
def test_values_of_prometheus_are_fresh_between_two_queries(
    tmp_path: Path, age: float, is_allowed: bool
) -> None:
    times = "interval_seconds: 15, exporter_interval_seconds: 35"
    fresh = f"freshness: {{max_age_seconds: {age}}}\n"
    used = fresh + f"prometheus: {{{times}, url: 'http://p'}}"

    load(tmp_path, fresh + f"prometheus: {{{times}}}")
    if is_allowed:
        load(tmp_path, used)
        return
    with pytest.raises(ConfigError, match=r"prometheus\.interval_seconds \(50\)"):
        load(tmp_path, used)


def test_one_weight_is_enough_and_none_is_refused(tmp_path: Path) -> None:
    names = ("utilization", "memory", "sharing", "bursts", "stress")
    for one in names:
        text = ", ".join(f"{name}: {int(name == one)}" for name in names)
        weights = load(tmp_path, f"weights: {{{text}}}").policy().weights
        assert [getattr(weights, name) for name in names] == [name == one for name in names]

    (found,) = problems(tmp_path, f"weights: {{{': 0, '.join(names)}: 0}}")

    assert "one of the weights must be more than 0" in found


@pytest.mark.parametrize(
    ("enabled", "placements", "writes"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_placements_are_written_only_if_events_are(
    enabled: bool, placements: bool, writes: bool
) -> None:
    assert Events(enabled=enabled, placements=placements).writes_placements is writes


@pytest.mark.parametrize(
    "entry",
    ["H100", "A100 80GB", "node/gpu-7", "label/a.b/pool=cheap", "label/pool=", "node", "label"],
)
def test_a_price_is_of_a_model_a_label_or_a_node(tmp_path: Path, entry: str) -> None:
    assert load(tmp_path, f"prices: {{{entry!r}: 0.5}}").prices == {entry: 0.5}


@pytest.mark.parametrize(
    ("entry", "form"),
    [
        ("node/", "node/NAME"),
        ("nodes/a", "node/NAME or label/NAME=VALUE"),
        ("Label/a=b", "node/NAME or label/NAME=VALUE"),
        ("label/pool", "label/NAME=VALUE"),
        ("label/=cheap", "label/NAME=VALUE"),
        ("label/a b=c", "label/NAME=VALUE"),
    ],
)
def test_a_price_of_something_else_is_refused(tmp_path: Path, entry: str, form: str) -> None:
    (found,) = problems(tmp_path, f"prices: {{{entry!r}: 0.5}}")

    assert found.endswith(f"{entry!r} is not allowed: must be {form}")


@pytest.mark.parametrize(
    "url", ["http://p", "https://p:9090/x", "http://[::1]:1", "http://p:65535"]
)
def test_a_url_of_prometheus_is_http_or_https(tmp_path: Path, url: str) -> None:
    assert load(tmp_path, f"prometheus: {{url: '{url}'}}").prometheus.url == url


@pytest.mark.parametrize("url", ["p:9090", "ftp://p", "http://", "http://p:0", "http://p:65536"])
def test_any_other_url_is_refused(tmp_path: Path, url: str) -> None:
    (found,) = problems(tmp_path, f"prometheus: {{url: '{url}'}}")

    assert found.endswith("is not allowed: must be a URL like http://prometheus:9090")


@pytest.mark.parametrize("signal", list(Signal))
def test_a_metric_may_measure_any_signal(tmp_path: Path, signal: Signal) -> None:
    text = f"prometheus: {{metrics: {{a:b_9: {{signal: {signal}, unit: ratio}}, c: null}}}}"

    rows = load(tmp_path, text).prometheus.metrics

    assert rows["c"] is None
    assert [row.signal for row in rows.values() if row] == [signal]


def test_networks_of_proxies_and_names_of_hosts_are_checked(tmp_path: Path) -> None:
    api = load(
        tmp_path,
        "api: {proxies: [10.0.0.4, 'fd00::/64'], hosts: [gpus.example.com, '[::1]', a_b, x]}",
    ).api

    assert [str(network) for network in api.networks] == ["10.0.0.4/32", "fd00::/64"]
    assert api.hosts == ("gpus.example.com", "[::1]", "a_b", "x")
    assert ApiSettings().networks == ()
    for text in ("{proxies: [10.0.0.4/8]}", "{hosts: ['a:1']}", "{hosts: [-a]}", "{hosts: ['']}"):
        (found,) = problems(tmp_path, f"api: {text}")
        assert "is not allowed" in found


def test_labels_are_names_with_an_optional_prefix(tmp_path: Path) -> None:
    assert load(tmp_path, "pool_labels: [pool, example.com/pool]").pool_labels == (
        "pool",
        "example.com/pool",
    )
    assert len(load(tmp_path, f"group_topology: [{', '.join('abcdefgh')}]").group_topology) == 8

    for labels in ("'/pool'", "a/b/c", "'pool/'", "-a"):
        (found,) = problems(tmp_path, f"pool_labels: [{labels}]")
        assert "must be a label's name, such as pool" in found
    (found,) = problems(tmp_path, f"group_topology: [{', '.join('abcdefghi')}]")
    assert "must be a list of up to 8 names of labels" in found
