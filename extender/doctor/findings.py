"""What a check says, and what all of them together come to."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from extender.doctor.facts import Facts


class Severity(StrEnum):
    """How much it matters; the order is that in which findings are told."""

    ERROR = "error"
    """Pods are placed without us, or wrongly, or do not run."""
    WARNING = "warning"
    """Something works worse than it could, or soon will not."""
    INFO = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a check found.

    Attributes:
        severity: how much it matters.
        what: what is wrong, in a sentence.
        evidence: the values that say so, one line each; there is at least one.
        remedy: what to do: a command, or a line of YAML.
    """

    severity: Severity
    what: str
    evidence: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that is looked at.

    Attributes:
        code: stable; docs/doctor.md explains it.
        title: what is looked at.
        needs: names of `Facts`: each of them is needed, of `a|b` one.
        find: looks.
        unseen: tells what the facts, though given, leave out, "" for nothing; where nothing was
            found and something is left out, the check has not passed.
    """

    code: str
    title: str
    needs: tuple[str, ...]
    find: Callable[[Facts], Iterable[Problem]]
    unseen: Callable[[Facts], str] = lambda _: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem, with the code of the check that found it."""

    code: str
    severity: Severity
    what: str
    evidence: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """A check that could not look: it has not passed.

    Attributes:
        code: of the check.
        title: what it would have looked at.
        why: what was missing, and what would help.
    """

    code: str
    title: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What all checks came to.

    Attributes:
        findings: the gravest first, then by code.
        passed: codes of the checks that looked and found nothing.
        not_run: checks that could not look.
    """

    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    not_run: tuple[NotRun, ...]

    @property
    def has_errors(self) -> bool:
        """Whether a finding is an error."""
        return any(finding.severity is Severity.ERROR for finding in self.findings)


def examine(facts: Facts, checks: Iterable[Check]) -> Report:
    """Run every check that has what it needs."""
    findings: list[Finding] = []
    passed: list[str] = []
    not_run: list[NotRun] = []
    for check in checks:
        why = _lacking(facts, check.needs)
        problems = () if why else tuple(check.find(facts))
        if not problems:
            why = why or check.unseen(facts)
        if why:
            not_run.append(NotRun(code=check.code, title=check.title, why=why))
            continue
        findings += (
            Finding(
                code=check.code,
                severity=problem.severity,
                what=problem.what,
                evidence=problem.evidence,
                remedy=problem.remedy,
            )
            for problem in problems
        )
        if not problems:
            passed.append(check.code)
    ranks = {severity: rank for rank, severity in enumerate(Severity)}
    findings.sort(key=lambda finding: (ranks[finding.severity], finding.code))
    return Report(findings=tuple(findings), passed=tuple(passed), not_run=tuple(not_run))


def _lacking(facts: Facts, needs: Iterable[str]) -> str:
    """Return why a check cannot run, "" where it can."""
    whys = []
    for need in needs:
        names = need.split("|")
        if all(getattr(facts, name) is None for name in names):
            whys.append(" or ".join(facts.why_missing(name) for name in names))
    return "; ".join(dict.fromkeys(whys))
