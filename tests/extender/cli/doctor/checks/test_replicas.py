"""Check that replicas shut down in time, and know each other."""

from typing import Any

import pytest

from extender.cli.doctor.checks.replicas import DRAIN_SECONDS, SHUTDOWN_SECONDS
from extender.cli.doctor.facts import Facts
from extender.settings.config import Settings, all_settings
from tests.extender.cli.doctor.described import replica
from tests.extender.cli.doctor.things import NOW, evidence, found, severities


def facts_of(*pods: dict[str, Any], **settings: object) -> Facts:
    return Facts(at=NOW, pods=pods, settings=settings)


def test_the_defaults_are_the_settings_own() -> None:
    settings = Settings()

    assert (settings.drain_seconds, settings.shutdown_seconds) == (DRAIN_SECONDS, SHUTDOWN_SECONDS)
    variables = {setting.variable for setting in all_settings().values()}
    names = ("DRAIN_SECONDS", "SHUTDOWN_SECONDS", "PEERS_SERVICE", "PEERS_ADDRESSES")
    assert variables >= {f"IDLEGPU_{name}" for name in names}


@pytest.mark.parametrize(
    ("grace_seconds", "settings", "expected"),
    [
        pytest.param(101, {}, [], id="enough"),
        pytest.param(100, {}, ["warning"], id="nothing to spare"),
        pytest.param(110, {"shutdown_seconds": 200}, ["warning"], id="the settings want more"),
        pytest.param(30, {"shutdown_seconds": 20}, [], id="the settings want less"),
        pytest.param(30, {"drain_seconds": 30, "shutdown_seconds": 0}, ["warning"], id="all of it"),
    ],
)
def test_grace_period_is_compared_with_the_settings(
    grace_seconds: int, settings: dict[str, object], expected: list[str]
) -> None:
    facts = facts_of(replica(grace_seconds=grace_seconds), **settings)

    assert severities("IG404", facts) == expected


def test_a_variable_comes_before_the_file() -> None:
    longer = replica(env={"IDLEGPU_SHUTDOWN_SECONDS": "120"})

    assert evidence("IG404", facts_of(longer, shutdown_seconds=20)) == (
        "idlegpu/idlegpu-extender-x: terminationGracePeriodSeconds 110, "
        "drain_seconds 5 + shutdown_seconds 120"
    )


def test_time_to_end_that_is_not_known_is_no_fault() -> None:
    unknown = replica()
    del unknown["spec"]["terminationGracePeriodSeconds"]

    assert found("IG404", facts_of(unknown)) == []


def test_replicas_that_do_not_report_each_other_are_reported() -> None:
    facts = facts_of(replica("x"), replica("y"))

    assert severities("IG405", facts) == ["warning"]
    assert "2 replicas: idlegpu/idlegpu-extender-x, idlegpu/idlegpu-extender-y" in evidence(
        "IG405", facts
    )


def leaving(suffix: str) -> dict[str, Any]:
    made = replica(suffix)
    made["metadata"]["deletionTimestamp"] = "2027-01-15T07:59:00Z"
    return made


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param([replica("x")], id="one"),
        pytest.param([replica("x"), replica("y", template="2")], id="a rollout"),
        pytest.param([replica("x"), leaving("y")], id="one that ends"),
        pytest.param([replica("x"), replica("y", ready=False)], id="one that starts"),
        pytest.param(
            [replica(name, env={"IDLEGPU_PEERS_SERVICE": "a:1"}) for name in "xy"],
            id="a variable says where the others are",
        ),
    ],
)
def test_a_single_replica_or_one_with_peers_has_no_finding(pods: list[dict[str, Any]]) -> None:
    assert found("IG405", facts_of(*pods)) == []


@pytest.mark.parametrize("peers", [{"service": "a:1"}, {"addresses": ["a:1"]}])
def test_the_settings_say_where_the_others_are(peers: dict[str, object]) -> None:
    assert found("IG405", facts_of(replica("x"), replica("y"), peers=peers)) == []
