"""The table of checks, and what is written of it."""

import re
from pathlib import Path

from extender.cli.doctor.facts import LABELS, Facts
from extender.cli.doctor.findings import Check, Problem, Severity, examine
from extender.cli.doctor.table import CHECKS
from tests.extender.cli.doctor.things import NOW

ROOT = Path(__file__).parents[4]


def test_every_code_is_documented_and_none_besides() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")

    reported = re.findall(r"^\| (IG\d{3}) \|", text, re.MULTILINE)
    assert reported == [check.code for check in CHECKS]
    assert len(set(reported)) == len(reported)


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
