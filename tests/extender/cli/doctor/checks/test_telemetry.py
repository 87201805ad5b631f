"""Checks that readings exist, name their node, and are recent."""

import pytest

from extender.cli.doctor.checks.schedulers import MAX_SCORE, SHORTLIST
from extender.cli.doctor.checks.telemetry import (
    EXPORTER_SECONDS,
    MAX_AGE_SECONDS,
    QUERY_SECONDS,
)
from extender.cli.doctor.facts import Facts
from extender.cli.doctor.objects import EXPORTER_WORDS
from extender.core.policy import Freshness
from extender.settings.service import ClusterSettings, Wire
from extender.settings.sources import Prometheus
from extender.sources.kubernetes.reflector import ReflectorSettings
from tests.extender.cli.doctor.things import (
    NOW,
    evidence,
    found,
    node,
    pod,
    sample,
    severities,
)

UTIL, ENGINE = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
USED, FREE = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"


# --- IG102 --------------------------------------------------------------------------------------


def test_series_that_name_no_node_are_reported() -> None:
    state = {"unmatched_series": 8, "unmatched_example": 'Hostname="nvidia-dcgm-x"'}
    facts = Facts(at=NOW, sources={"prometheus": state})

    assert severities("IG102", facts) == ["error"]
    assert 'prometheus: 8 series, one of them Hostname="nvidia-dcgm-x"' in evidence("IG102", facts)
    reported = (sample("idlegpu_unmatched_series", 3.0, source="prometheus"),)
    assert severities("IG102", Facts(at=NOW, metrics=reported)) == ["error"]


def test_series_that_all_name_nodes_are_well() -> None:
    assert found("IG102", Facts(at=NOW, sources={"prometheus": {"unmatched_series": 0}})) == []
    assert found("IG102", Facts(at=NOW, metrics=(sample("idlegpu_unmatched_series", 0.0),))) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("node-1", []),
        ("10.0.0.7", []),
        ("dcgm-exporter-x", []),
        ("localhost", ["error"]),
        ("web", ["error"]),
    ],
)
def test_host_names_of_a_scrape_are_nodes_addresses_or_exporters(
    name: str, expected: list[str]
) -> None:
    facts = Facts(
        at=NOW,
        exporter=(sample(UTIL, 0.0, Hostname=name),),
        nodes=(node(),),
        pods=(pod("dcgm-exporter-x"), pod("web")),
    )

    assert severities("IG102", facts) == expected


# --- IG103 --------------------------------------------------------------------------------------


def aged(seconds: float, limit: float | None = None, stat: str = "median") -> Facts:
    name = "idlegpu_telemetry_age_seconds"
    settings = None if limit is None else {"freshness": {"max_age_seconds": limit}}
    metrics = (sample(name, seconds, source="prometheus", stat=stat),)
    return Facts(at=NOW, metrics=metrics, settings=settings)


def test_readings_that_are_stale_when_they_come_are_reported() -> None:
    assert severities("IG103", aged(121.0)) == ["error"]
    assert "median age 121 s, fresh up to 120 s" in evidence("IG103", aged(121.0))
    assert severities("IG103", aged(100.0, limit=60.0)) == ["error"]


def test_young_readings_and_a_single_old_one_are_well() -> None:
    assert found("IG103", aged(119.0)) == []
    assert found("IG103", aged(121.0, limit=300.0)) == []
    assert found("IG103", aged(900.0, stat="max")) == []


def collecting(milliseconds: str, *, as_option: bool = False, expected: float = 30.0) -> Facts:
    reported = (
        {"command": ["dcgm-exporter", "-c", milliseconds]}
        if as_option
        else {"env": {"DCGM_EXPORTER_INTERVAL": milliseconds}}
    )
    settings = {"prometheus": {"exporter_interval_seconds": expected}}
    return Facts(at=NOW, pods=(pod("dcgm-exporter-x", **reported),), settings=settings)


def test_an_exporter_that_collects_too_rarely_is_reported() -> None:
    assert severities("IG103", collecting("120000")) == ["error"]
    assert severities("IG103", collecting("120000", as_option=True)) == ["error"]


def test_an_exporter_with_another_interval_than_the_settings_is_reported() -> None:
    facts = collecting("10000")

    assert severities("IG103", facts) == ["warning"]
    assert "{exporter_interval_seconds: 10}" in found("IG103", facts)[0].remedy
    assert found("IG103", collecting("10000", expected=10.0)) == []
    assert found("IG103", Facts(at=NOW, pods=(pod("dcgm-exporter-x"),), settings={})) == []


def test_the_defaults_are_those_of_the_settings() -> None:
    assert Freshness().max_age_seconds == MAX_AGE_SECONDS
    assert Prometheus().exporter_interval_seconds == EXPORTER_SECONDS
    assert Prometheus().interval_seconds == QUERY_SECONDS
    assert ClusterSettings().exporter_words == EXPORTER_WORDS == ReflectorSettings().exporter_words
    assert (Wire().max_score, Wire().shortlist) == (MAX_SCORE, SHORTLIST)
