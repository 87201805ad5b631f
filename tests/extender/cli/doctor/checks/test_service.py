"""Checks that the extender's own parts work."""

import pytest

from extender.cli.doctor.checks.service import DAY, EVERYDAY
from extender.cli.doctor.facts import Certificate, Facts, Sample
from extender.sources.agents import refusal
from tests.extender.cli.doctor.described import right
from tests.extender.cli.doctor.things import (
    NOW,
    evidence,
    found,
    pod,
    sample,
    severities,
)


def refused(reason: str, count: float = 3.0, reporting: float = 0.0) -> tuple[Sample, ...]:
    return (
        sample("idlegpu_agent_refusals_total", count, reason=reason),
        sample("idlegpu_agents", reporting),
        sample("idlegpu_agent_unknown_nodes", 0.0),
    )


def test_agents_that_are_refused_are_reported() -> None:
    facts = Facts(at=NOW, metrics=refused("wrong-account"))

    assert severities("IG401", facts) == ["error"]
    assert "wrong-account: 3 since the extender's start" in evidence("IG401", facts)
    assert "service_accounts" in found("IG401", facts)[0].remedy


def test_a_solved_problem_is_no_error() -> None:
    agent = pod("idlegpu-agent-x", namespace="idlegpu-agent")

    facts = Facts(at=NOW, metrics=refused("expired", reporting=1.0), pods=(agent,))
    assert severities("IG401", facts) == ["info"]
    two = (agent, pod("idlegpu-agent-y", namespace="idlegpu-agent"))
    facts = Facts(at=NOW, metrics=refused("expired", reporting=1.0), pods=two)
    assert severities("IG401", facts) == ["error"]


@pytest.mark.parametrize("reason", sorted(EVERYDAY))
def test_normal_refusals_are_not_reported(reason: str) -> None:
    assert found("IG401", Facts(at=NOW, metrics=refused(reason))) == []
    assert found("IG401", Facts(at=NOW, metrics=refused("expired", 0.0))) == []


def test_normal_refusals_are_those_of_the_extender() -> None:
    assert {reason.value for reason in refusal._EXPECTED_REASONS} == EVERYDAY


def test_agents_on_unknown_nodes_are_reported() -> None:
    assert severities("IG401", Facts(at=NOW, metrics=(sample("idlegpu_agent_unknown_nodes", 1),)))


def ends_in(days: float) -> Facts:
    one = Certificate(source="Secret idlegpu/x tls.crt", subject="CN=x", ends_at=NOW + days * DAY)
    return Facts(at=NOW, certificates=(one,))


@pytest.mark.parametrize(
    ("days", "expected"), [(-1, ["error"]), (6, ["error"]), (29, ["warning"]), (31, [])]
)
def test_a_certificate_that_ends_soon_is_reported(days: float, expected: list[str]) -> None:
    assert severities("IG402", ends_in(days)) == expected


def test_evidence_names_the_certificate_and_its_end() -> None:
    assert evidence("IG402", ends_in(6)) == (
        "Secret idlegpu/x tls.crt (CN=x): ends in 6 days, 2027-01-21 08:00 UTC"
    )
    assert "has ended" in evidence("IG402", ends_in(-1))


def test_a_right_that_is_missing_is_reported() -> None:
    facts = Facts(at=NOW, rights=(right(is_allowed=False), right(is_allowed=True)))

    assert severities("IG403", facts) == ["error"]
    assert evidence("IG403", facts) == (
        "idlegpu/idlegpu-extender may not watch pods in the whole cluster"
    )
    assert found("IG403", facts)[0].remedy == "kubectl apply -k manifests/rbac"
    assert found("IG403", Facts(at=NOW, rights=(right(is_allowed=True),))) == []
