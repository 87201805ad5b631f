"""Checks that clocks agree."""

from typing import Final

import pytest

from extender.cli.commands.doctor import CHECKS
from extender.cli.doctor.facts import Facts
from extender.cli.doctor.findings import examine
from tests.extender.cli.doctor.things import NOW, evidence, found, node, severities

CLOCKS: Final = [check for check in CHECKS if check.code == "IG104"]


@pytest.mark.parametrize(
    ("beat", "noted", "expected"),
    [
        ("2027-01-15T08:00:30Z", "2027-01-15T08:00:00Z", "node-1: 30 s ahead"),
        ("2027-01-15T07:59:00Z", "2027-01-15T08:00:00Z", "node-1: 60 s behind"),
        ("2027-01-15T08:00:05Z", "2027-01-15T08:00:00Z", ""),
        # A heartbeat older than the check proves nothing.
        ("2027-01-15T07:55:00Z", "2027-01-15T07:55:00Z", ""),
        ("2027-01-15T08:05:00Z", None, "node-1: 300 s ahead"),
    ],
)
def test_a_wrong_clock_is_found_by_the_api_servers_record(
    beat: str, noted: str | None, expected: str
) -> None:
    assert evidence("IG104", Facts(at=NOW, nodes=(node(beat=beat, noted=noted),))) == expected


def test_the_extenders_clock_is_reported() -> None:
    assert severities("IG104", Facts(at=NOW, nodes=(), extender_at=NOW + 60)) == ["warning"]
    assert found("IG104", Facts(at=NOW, nodes=(), extender_at=NOW + 5)) == []


@pytest.mark.parametrize("beat", ["2027-01-15T07:00:00Z", "2027-01-15T08:00:00Z"])
def test_without_the_api_servers_record_the_check_has_not_passed(beat: str) -> None:
    """kubectl omits managed fields: a clock an hour behind then looks like an old heartbeat."""
    nodes = (node(), node("node-2", beat=beat, noted=None))

    report = examine(Facts(at=NOW, nodes=nodes), CLOCKS)

    assert (report.findings, report.passed) == ((), ())
    (not_run,) = report.not_run
    assert "1 of 2 lack the time" in not_run.why
    assert "(node-2): kubectl get nodes -o json --show-managed-fields" in not_run.why


def test_a_partial_result_is_reported() -> None:
    nodes = (node(beat="2027-01-15T07:00:00Z"), node("node-2", noted=None))

    assert evidence("IG104", Facts(at=NOW, nodes=nodes)) == "node-1: 3600 s behind"


def test_nodes_without_a_heartbeat_hide_nothing() -> None:
    gone = node("gone", beat=None, noted=None)

    assert examine(Facts(at=NOW, nodes=(node(), gone)), CLOCKS).passed == ("IG104",)
