"""Findings of checks; the checks themselves, compared with their documentation."""

import re

from extender.cli.commands.doctor import CHECKS
from extender.cli.doctor.facts import LABELS, Facts
from extender.cli.doctor.findings import Check, Problem, Severity, examine
from tests.extender.cli.doctor.things import NOW
from tests.files import ROOT
from tests.reference import part_of

PAGE = ROOT / "docs" / "doctor.md"


def test_every_check_has_a_code_of_its_own_and_is_documented() -> None:
    assert len({check.code for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert re.fullmatch(r"Find .+\n\n +Remedy: .+", check.find.__doc__ or "", re.DOTALL)
        assert f"| {check.code} |" in part_of(PAGE.read_text(encoding="utf-8"), "checks")


def test_every_need_is_a_fact_with_a_name() -> None:
    for check in CHECKS:
        for need in check.needs:
            for name in need.split("|"):
                assert name in LABELS
                assert getattr(Facts(at=NOW), name) is None


def test_without_facts_no_check_runs_and_none_passes() -> None:
    report = examine(Facts(at=NOW, missing={"nodes": "forbidden"}), CHECKS)

    assert (report.findings, report.passed) == ((), ())
    assert {one.code for one in report.not_run} == {check.code for check in CHECKS}
    why = {one.code: one.why for one in report.not_run}
    assert why["IG203"] == "nodes: forbidden"
    assert " or " in why["IG001"]


def test_the_gravest_is_reported_first() -> None:
    def find(severity: Severity) -> Check:
        problem = Problem(severity=severity, what="x", evidence=("y",), remedy="z")
        return Check(code=f"IG-{severity}", title="t", needs=(), find=lambda _: [problem])

    report = examine(Facts(at=NOW), [find(kind) for kind in reversed(Severity)])

    assert [finding.severity for finding in report.findings] == list(Severity)
    assert report.has_errors
    assert not examine(Facts(at=NOW), [find(Severity.WARNING)]).has_errors
