"""Checks that the extender's own parts work."""

from dataclasses import replace
from typing import Any, Final

import pytest

from extender.cli.commands.doctor import CHECKS
from extender.cli.doctor.checks.service import _DAY, _DRAIN_SECONDS, _EVERYDAY, _SHUTDOWN_SECONDS
from extender.cli.doctor.facts import Certificate, Facts, Sample
from extender.cli.doctor.findings import examine
from extender.settings.config import Settings, all_settings
from extender.sources.agents import refusal
from tests.extender.cli.doctor.described import replica, right
from tests.extender.cli.doctor.things import NOW, evidence, found, node, pod, sample, severities


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


@pytest.mark.parametrize("reason", sorted(_EVERYDAY))
def test_normal_refusals_are_not_reported(reason: str) -> None:
    assert found("IG401", Facts(at=NOW, metrics=refused(reason))) == []
    assert found("IG401", Facts(at=NOW, metrics=refused("expired", 0.0))) == []


def test_normal_refusals_are_those_of_the_extender() -> None:
    assert {reason.value for reason in refusal._EXPECTED_REASONS} == _EVERYDAY


def test_agents_on_unknown_nodes_are_reported() -> None:
    assert severities("IG401", Facts(at=NOW, metrics=(sample("idlegpu_agent_unknown_nodes", 1),)))


def ends_in(days: float) -> Facts:
    one = Certificate(source="Secret idlegpu/x tls.crt", subject="CN=x", ends_at=NOW + days * _DAY)
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


def facts_of(*pods: dict[str, Any], **settings: object) -> Facts:
    return Facts(at=NOW, pods=pods, settings=settings)


def test_the_defaults_are_the_settings_own() -> None:
    settings = Settings()

    assert (settings.drain_seconds, settings.shutdown_seconds) == (
        _DRAIN_SECONDS,
        _SHUTDOWN_SECONDS,
    )
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


@pytest.mark.parametrize(
    ("reporting", "what", "evidence_of_all"),
    [(1.0, "agents were refused; all report now", "1 agents report, 1 run"),
     (0.0, "agents are refused", "0 agents report, 1 run")],
)  # fmt: skip
def test_the_finding_says_whether_the_problem_is_solved(
    reporting: float, what: str, evidence_of_all: str
) -> None:
    agent = pod("idlegpu-agent-x", namespace="idlegpu-agent")
    (finding,) = found(
        "IG401", Facts(at=NOW, metrics=refused("expired", reporting=reporting), pods=(agent,))
    )

    assert finding.what == what
    assert finding.evidence[-1] == evidence_of_all
    assert finding.remedy.endswith("grep 'agent refused' shows why")


@pytest.mark.parametrize("days", [0, 7, 30])
def test_each_limit_of_a_certificates_life_is_inclusive(days: float) -> None:
    expected: dict[float, list[str]] = {0: ["error"], 7: ["warning"], 30: []}

    assert severities("IG402", ends_in(days)) == expected[days]
    if days == 0:
        assert "has ended" in evidence("IG402", ends_in(days))


def test_a_right_in_one_namespace_and_for_one_object_is_described() -> None:
    one = replace(
        right(is_allowed=False),
        group="coordination.k8s.io", resource="leases", name="idlegpu", namespace="idlegpu",
    )  # fmt: skip

    assert evidence("IG403", Facts(at=NOW, rights=(one,))) == (
        "idlegpu/idlegpu-extender may not watch leases.coordination.k8s.io idlegpu in idlegpu"
    )


def test_clocks_may_differ_by_the_limit_and_the_finding_says_which_is_ahead() -> None:
    edge = node(beat="2027-01-15T08:00:10Z", noted="2027-01-15T08:00:00Z")

    assert found("IG104", Facts(at=NOW, nodes=(edge,), extender_at=NOW - 10)) == []
    for skew, words in ((60, "60 s ahead of here"), (-60, "60 s behind here")):
        facts = Facts(at=NOW, nodes=(), extender_at=NOW + skew)
        assert evidence("IG104", facts) == f"the extender is {words}"
    assert found("IG104", Facts(at=NOW, nodes=())) == []


def test_only_the_kubelets_writes_of_the_status_record_a_heartbeat() -> None:
    one = node(beat="2027-01-15T07:59:00Z", noted="2027-01-15T08:00:00Z")
    one["metadata"]["managedFields"] += [
        {"manager": "kubelet", "time": "2027-01-15T09:00:00Z"},
        {"manager": "operator", "subresource": "status", "time": "2027-01-15T09:00:00Z"},
        {"manager": "kubelet", "subresource": "status", "time": "2027-01-15T07:00:00Z"},
        {"manager": "kubelet", "subresource": "status"},
    ]

    assert evidence("IG104", Facts(at=NOW, nodes=(one,))) == "node-1: 60 s behind"
