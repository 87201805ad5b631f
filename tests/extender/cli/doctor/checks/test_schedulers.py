"""Checks of kube-scheduler's configuration and calls."""

from typing import Any

import pytest

from extender.cli.doctor.checks.schedulers import _plugin_weights, our_entry
from extender.cli.doctor.facts import Facts, Object
from tests.extender.cli.doctor.described import bypassed
from tests.extender.cli.doctor.things import (
    GPU,
    NOW,
    entry,
    evidence,
    found,
    node,
    sample,
    scheduler,
    severities,
)

# --- IG001 --------------------------------------------------------------------------------------


def at(*entries: Object, **facts: Any) -> Facts:
    return Facts(at=NOW, schedulers=(scheduler(*entries),), **facts)


def test_scheduler_without_our_entry_sends_no_requests() -> None:
    facts = at({"urlPrefix": "http://other:80", "managedResources": [{"name": "example.com/fpga"}]})
    two = Facts(at=NOW, schedulers=(scheduler(), scheduler(source="b.yaml")))

    assert severities("IG001", two) == ["error"]
    assert "b.yaml: extenders: none" in evidence("IG001", two)
    # The only extender may be idlegpu under any name.
    assert found("IG001", facts) == []


def test_one_scheduler_that_calls_us_is_enough() -> None:
    facts = Facts(at=NOW, schedulers=(scheduler(), scheduler(entry(), source="b.yaml")))

    assert found("IG001", facts) == []


@pytest.mark.parametrize(
    ("kind", "severity"),
    [("no-extender", "error"), ("wrong-path", "error"), ("unreachable", "error"),
     ("other-scheduler", "warning")],
)  # fmt: skip
def test_the_causes_that_the_extender_reports_are_found(kind: str, severity: str) -> None:
    facts = Facts(at=NOW, bypassed=bypassed(kind))

    assert severities("IG001", facts) == [severity]
    assert "3 pods of default-scheduler that request nvidia.com/gpu: not-called" in evidence(
        "IG001", facts
    )
    assert "team/train" in evidence("IG001", facts)


def test_check_passes_if_every_pod_got_a_request() -> None:
    facts = at(entry(), bypassed=bypassed())

    for code in ("IG001", "IG002", "IG005"):
        assert found(code, facts) == []


def test_a_cause_is_reported_by_one_check_alone() -> None:
    for kind, code in (
        ("http-timeout", "IG002"),
        ("prioritize-verb", "IG005"),
        ("managed-resources", "IG006"),
    ):
        facts = Facts(at=NOW, bypassed=bypassed(kind), nodes=())

        assert severities(code, facts) == ["error"]
        assert found("IG001", facts) == []


def test_the_entry_that_is_us_is_found_among_others() -> None:
    other = {"urlPrefix": "http://other:80"}
    by_resource = entry(urlPrefix="http://10.0.0.1:8888")
    by_name = {"urlPrefix": "https://10.96.0.88", "tlsConfig": {"serverName": "idlegpu-extender"}}

    assert our_entry({"extenders": [other, by_resource]}) == by_resource
    assert our_entry({"extenders": [other, by_name, by_resource]}) == by_name
    assert our_entry({"extenders": [other, other]}) is None


# --- IG002 --------------------------------------------------------------------------------------


def slow(limit: str, in_time: float) -> Facts:
    name = "idlegpu_request_duration_seconds_bucket"
    return at(
        entry(httpTimeout=limit),
        metrics=(
            sample(name, 100.0, verb="filter", outcome="ok", le="0.2"),
            sample(name, in_time, verb="filter", outcome="ok", le="1.0"),
            sample(name, 1000.0, verb="filter", outcome="ok", le="+Inf"),
        ),
    )


def test_answers_slower_than_the_timeout_are_reported() -> None:
    assert severities("IG002", slow("1s", 990.0)) == ["warning"]
    assert "10 of 1000 answers took longer than 1 s" in evidence("IG002", slow("1s", 990.0))
    assert severities("IG002", slow("200ms", 1000.0)) == ["warning"]


def test_one_slow_answer_in_a_thousand_is_ignored() -> None:
    assert found("IG002", slow("1s", 999.0)) == []
    assert found("IG002", slow("30s", 100.0)) == []


def test_a_verb_without_answers_is_not_slow() -> None:
    name = "idlegpu_request_duration_seconds_bucket"
    metrics = tuple(sample(name, 0.0, verb="preempt", le=bound) for bound in ("0.2", "+Inf"))

    assert found("IG002", at(entry(), metrics=metrics)) == []


def test_without_a_configuration_the_shipped_timeout_counts() -> None:
    metrics = slow("1s", 990.0).metrics

    assert severities("IG002", Facts(at=NOW, metrics=metrics)) == ["warning"]
    assert "as shipped: httpTimeout: 1s" in evidence("IG002", Facts(at=NOW, metrics=metrics))


# --- IG003, IG005 -------------------------------------------------------------------------------


def test_whole_nodes_are_reported() -> None:
    assert severities("IG003", at(entry(nodeCacheCapable=False))) == ["error"]
    assert severities("IG003", at(entry(nodeCacheCapable=None))) == ["error"]
    assert found("IG003", at(entry())) == []


def test_uncalled_verbs_are_reported() -> None:
    assert severities("IG005", at(entry(prioritizeVerb=None))) == ["error"]
    assert severities("IG005", at(entry(filterVerb=""))) == ["error"]
    assert severities("IG005", at(entry(preemptVerb=None))) == ["warning"]
    assert "prioritizeVerb: prioritize" in found("IG005", at(entry(prioritizeVerb=None)))[0].remedy


# --- IG004 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "max_score", "expected"),
    [
        (1, 400, []),
        (4, 400, []),
        (5, 400, ["info"]),
        (10, 400, ["info"]),
        (10, 40, []),
        (4, 40, ["warning"]),
        (1, 40, ["error"]),
        (1, 10, ["error"]),
    ],
)
def test_a_weight_that_lets_one_side_alone_decide_is_reported(
    weight: int, max_score: int, expected: list[str]
) -> None:
    facts = at(entry(weight=weight), settings={"wire": {"max_score": max_score}})

    assert severities("IG004", facts) == expected


def test_the_evidence_is_the_arithmetic() -> None:
    facts = at(entry(weight=1), settings={"wire": {"max_score": 10}})

    assert "idlegpu's first choice counts 100 (weight 1 x score 10 x 10)" in evidence(
        "IG004", facts
    )
    assert "idle against busy counts 40 of it" in evidence("IG004", facts)
    assert "weights sum to 12: they count up to 1200" in evidence("IG004", facts)
    assert found("IG004", facts)[0].remedy.startswith("weight: 30: ")


def test_excessive_weight_is_reported_with_the_shipped_weight() -> None:
    facts = at(entry(weight=10))

    assert "it leads equal nodes by 200" in evidence("IG004", facts)
    assert found("IG004", facts)[0].remedy.startswith("weight: 1: ")


def test_weights_of_a_profile_count() -> None:
    heavy = {"plugins": {"score": {"enabled": [{"name": "NodeResourcesFit", "weight": 100}]}}}
    alone = {"plugins": {"score": {"disabled": [{"name": "*"}]}}}

    assert _plugin_weights(heavy)["NodeResourcesFit"] == 100
    assert _plugin_weights(alone) == {}
    facts = Facts(at=NOW, schedulers=(scheduler(entry(), profiles=[heavy]),))
    assert severities("IG004", facts) == ["error"]
    both = (scheduler(entry(), profiles=["default-scheduler", {**heavy, "schedulerName": "big"}]),)
    (reported,) = found("IG004", Facts(at=NOW, schedulers=both))
    assert reported.what == "profile big: kube-scheduler's own plugins outvote idlegpu's scores"
    facts = Facts(at=NOW, schedulers=(scheduler(entry(weight=1), profiles=[alone]),))
    assert found("IG004", facts) == []


# --- IG006 --------------------------------------------------------------------------------------


def test_a_profile_that_is_not_managed_is_reported_with_its_line() -> None:
    nodes = (node(capacity={"nvidia.com/mig-1g.10gb": "7"}),)
    facts = at(entry(), nodes=nodes)

    assert severities("IG006", facts) == ["error"]
    assert evidence("IG006", facts) == "nvidia.com/mig-1g.10gb on node-1"
    line = "  - {name: nvidia.com/mig-1g.10gb, ignoredByScheduler: false}"
    assert line in found("IG006", facts)[0].remedy


def test_managed_or_absent_resources_are_not_reported() -> None:
    nodes = (node(capacity={GPU: "8", "nvidia.com/mig-1g.10gb": "0"}),)
    everything = entry(managedResources=None)

    assert found("IG006", at(entry(), nodes=nodes)) == []
    nodes = (node(capacity={"nvidia.com/mig-1g.10gb": "7"}),)
    assert found("IG006", at(everything, nodes=nodes)) == []


# --- IG009 --------------------------------------------------------------------------------------


def other(**changes: object) -> Object:
    return {"urlPrefix": "http://quota.team.svc:80", "filterVerb": "filter", **changes}


def test_later_extender_sees_only_our_shortlist() -> None:
    facts = at(entry(), other())

    assert severities("IG009", facts) == ["warning"]
    assert "http://quota.team.svc:80: filterVerb: filter, called for every pod" in evidence(
        "IG009", facts
    )
    assert "wire.shortlist: 100" in evidence("IG009", facts)
    (finding,) = found("IG009", facts)
    assert "wire.shortlist: 0" in finding.remedy
    assert "the entry of http://quota.team.svc:80 above ours: " in finding.remedy


def test_the_shortlist_that_is_set_counts() -> None:
    short, whole = ({"wire": {"shortlist": count}} for count in (10, 0))

    assert "wire.shortlist: 10" in evidence("IG009", at(entry(), other(), settings=short))
    assert found("IG009", at(entry(), other(), settings=whole)) == []


@pytest.mark.parametrize(
    ("extenders", "is_after"),
    [
        ((other(), entry()), False),
        ((other(ignorable=True), entry(ignorable=True)), False),
        ((entry(ignorable=True), other()), False),
        ((entry(), other(filterVerb="", prioritizeVerb="score")), False),
        ((entry(), entry(managedResources=[{"name": "nvidia.com/mig-1g.10gb"}])), False),
        ((entry(ignorable=True), other(ignorable=True)), True),
        ((other(ignorable=True), entry()), True),
    ],
    ids=[
        "listed-above-ours",
        "both-ignorable-and-above",
        "ours-is-ignorable-and-called-last",
        "scores-alone",
        "ours-again-for-other-resources",
        "both-ignorable-and-below",
        "ignorable-and-called-after-ours",
    ],
)
def test_extenders_that_filter_after_ours_are_reported(
    extenders: tuple[Object, ...], *, is_after: bool
) -> None:
    assert bool(found("IG009", at(*extenders))) is is_after


def test_remedy_moves_an_ignorable_extender_above_ours_as_not_ignorable() -> None:
    (finding,) = found("IG009", at(other(ignorable=True), entry()))

    assert "above ours, with ignorable: false" in finding.remedy


# --- remedies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "code", "remedy"),
    [
        ("http-timeout", "IG002", "httpTimeout: 1s"),
        ("prioritize-verb", "IG005", "prioritizeVerb: prioritize"),
        ("managed-resources", "IG006", "managedResources: [{name: RESOURCE"),
        ("wrong-path", "IG001", "urlPrefix: https://ADDRESS:8888 (no path)"),
        ("unreadable", "IG001", "nodeCacheCapable: true"),
        ("other-scheduler", "IG001", "bypassed.schedulers: [NAMES]"),
        ("unreachable", "IG001", "the entry under extenders"),
    ],
)
def test_each_cause_has_its_remedy(kind: str, code: str, remedy: str) -> None:
    (finding,) = found(code, Facts(at=NOW, bypassed=bypassed(kind), nodes=()))

    assert finding.remedy.startswith(remedy)
    assert f"likely cause: {kind}, 3 pods" in finding.evidence


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [
        ("200ms", "httpTimeout: 1s, or more CPU"),
        ("1s", "httpTimeout: 2s, or more CPU"),
        ("2s", "more CPU"),
        ("3s", "more CPU"),
        (None, "more CPU"),
    ],
)
def test_a_longer_timeout_is_a_remedy_only_if_it_is_short(limit: str | None, remedy: str) -> None:
    name = "idlegpu_request_duration_seconds_bucket"
    metrics = tuple(
        sample(name, count, verb=verb, le=bound)
        for verb, count, bound in (
            ("filter", 900.0, "10"), ("filter", 1000.0, "+Inf"), ("preempt", 1000.0, "+Inf"),
        )
    )  # fmt: skip
    facts = at(entry(httpTimeout=limit), metrics=metrics)
    (finding,) = found("IG002", facts)

    assert finding.remedy.startswith(remedy)
    seconds = {"200ms": "0.2", None: "5"}.get(limit, str(limit)[:1])
    assert finding.evidence == (
        f"100 of 1000 answers took longer than {seconds} s",
        f"a.yaml: httpTimeout: {limit or 'not set'}",
    )


def test_the_remedy_for_weights_is_the_smallest_that_suffices() -> None:
    small = at(entry(weight=100), settings={"wire": {"max_score": 40}})

    assert severities("IG004", small) == ["info"]
    assert found("IG004", small)[0].remedy.startswith("weight: 8: ")  # 1200 of 8 x 400 x 0.4


def test_a_plugin_without_a_weight_counts_once() -> None:
    own = {"plugins": {"score": {"enabled": [{"name": "Own"}]}}}
    known = {"plugins": {"multiPoint": {"enabled": [{"name": "Own"}, {"name": "NodeAffinity"}]}}}
    without = {"plugins": {"score": {"disabled": [{"name": "NodeAffinity"}]}}}

    assert _plugin_weights(own)["Own"] == 1
    assert sum(_plugin_weights(known).values()) == sum(_plugin_weights({}).values())
    assert sum(_plugin_weights(without).values()) == sum(_plugin_weights({}).values()) - 2


def test_one_entry_for_every_pod_manages_all_resources() -> None:
    nodes = (node(capacity={"nvidia.com/mig-1g.10gb": "7"}),)
    both = (
        scheduler(entry()),
        scheduler(entry(managedResources=None), source="b.yaml", profiles=["second"]),
    )

    assert found("IG006", Facts(at=NOW, schedulers=both, nodes=nodes)) == []
    assert found("IG006", Facts(at=NOW, schedulers=(scheduler(),), nodes=nodes)) == []


def test_an_extender_without_an_address_is_described() -> None:
    nameless = other(urlPrefix=None, managedResources=[{"name": "example.com/fpga"}])

    assert evidence("IG009", at(entry(), nameless)).startswith(
        "a.yaml: extenders: without urlPrefix: filterVerb: filter, called for example.com/fpga"
    )


def test_groups_that_were_answered_are_no_evidence() -> None:
    bound: list[Object] = [
        {**group, "resources": resources}
        for group, resources in (({"verdict": "called"}, []), ({"verdict": "late"}, None))
    ]
    causes = [{"kind": "wrong-path", "pods": 2, "text": "because"}]
    facts = Facts(at=NOW, bypassed={"bound": bound, "likely_causes": causes})

    assert evidence("IG001", facts).splitlines() == [
        "None pods of None that request : late, for example None",
        "likely cause: wrong-path, 2 pods",
    ]
