"""Check definitions, their findings and remedies, and the report of a run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from extender.cli.doctor.facts import Facts, Object, is_called, is_over, name_of, node_of
from extender.core.untyped import mapping_of, objects_of, text_of


class Severity(StrEnum):
    """Severity of a finding, most severe first; reports are sorted in this order."""

    ERROR = "error"
    """Pods are placed without the extender, or wrongly, or cannot run."""
    WARNING = "warning"
    """A function is degraded, or will fail soon."""
    INFO = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem that a check found.

    Attributes:
        severity: gravity of the problem.
        what: the problem in one sentence.
        evidence: values that prove the problem, one line each; at least one.
        remedy: how to fix it: a command, or a line of YAML.
    """

    severity: Severity
    what: str
    evidence: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check of the doctor; the decorator `check` builds it from a function.

    Attributes:
        code: stable code; no other check ever had it.
        title: the condition that should hold.
        needs: names of `Facts` that are required; of `a|b` one is enough.
        find: yields the problems in the facts.
        unseen: returns the gaps in the facts, "" for none. If `find` yields nothing and there are
            gaps, the check counts as not run.
    """

    code: str
    title: str
    needs: tuple[str, ...]
    find: Callable[[Facts], Iterable[Problem]]
    unseen: Callable[[Facts], str] = lambda _: ""


def check(
    code: str, title: str, *, needs: tuple[str, ...], unseen: Callable[[Facts], str] = lambda _: ""
) -> Callable[[Callable[[Facts], Iterable[Problem]]], Check]:
    """Build a check from a function that yields problems; the arguments are those of `Check`.

    docs/doctor.md is generated from the function's docstring: a summary that begins with "Find",
    details, and a last paragraph that begins with "Remedy:".
    """
    return lambda find: Check(code=code, title=title, needs=needs, find=find, unseen=unseen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem together with the code of its check."""

    code: str
    severity: Severity
    what: str
    evidence: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """A check that could not run; it does not count as passed.

    Attributes:
        title: title of the check.
        why: missing facts, and how to provide them.
    """

    code: str
    title: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Result of all checks.

    Attributes:
        findings: problems, most severe first, then by code.
        passed: codes of the checks that ran and found nothing.
        not_run: checks that could not run.
    """

    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    not_run: tuple[NotRun, ...]

    @property
    def has_errors(self) -> bool:
        """Whether any finding has severity error."""
        return any(finding.severity is Severity.ERROR for finding in self.findings)


def examine(facts: Facts, checks: Iterable[Check]) -> DoctorReport:
    """Run every check whose facts are known, and sort the findings by severity."""
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
    return DoctorReport(findings=tuple(findings), passed=tuple(passed), not_run=tuple(not_run))


def _lacking(facts: Facts, needs: Iterable[str]) -> str:
    """Return the reason why a check cannot run, "" if it can."""
    whys = []
    for need in needs:
        names = need.split("|")
        if all(getattr(facts, name) is None for name in names):
            whys.append(" or ".join(facts.why_missing(name) for name in names))
    return "; ".join(dict.fromkeys(whys))


MOST: Final = 10
"""Largest number of objects to name in a command."""


def named(names: Iterable[str]) -> str:
    """Join distinct names into command arguments, with a note if some are left out.

    Example:
        >>> named(["b", "a", "b"]), named(str(number) for number in range(12))
        ('b a', '0 1 2 3 4 5 6 7 8 9 (and 2 more)')
    """
    every = list(dict.fromkeys(names))
    more = len(every) - MOST
    return " ".join(every[:MOST]) + (f" (and {more} more)" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class WorkloadPart:
    """A cluster component, identified by the names of its pods and DaemonSets.

    Attributes:
        words: substrings; a name contains at least one of them.
        others: substrings of other components' names, which exclude a match.
    """

    words: tuple[str, ...]
    others: tuple[str, ...] = ()

    def pods_on(self, facts: Facts, nodes: Iterable[str]) -> list[Object]:
        """Return the component's unfinished pods on the given nodes."""
        wanted = set(nodes)
        return [
            pod
            for pod in facts.pods or ()
            if node_of(pod) in wanted and self._is(pod) and not is_over(pod)
        ]

    def restart(self, facts: Facts, otherwise: str) -> str:
        """Return the commands that restart the component's DaemonSets, else `otherwise`."""
        found = {(_namespace(item), name_of(item)) for item in facts.daemon_sets or ()
                 if self._is(item)}  # fmt: skip
        for pod in filter(self._is, facts.pods or ()):
            found |= {(_namespace(pod), text_of(owner.get("name"))) for owner in _owners(pod)}
        commands = "; ".join(
            f"kubectl -n {namespace} rollout restart daemonset {name}"
            for namespace, name in sorted(found)
        )
        return commands or otherwise

    def _is(self, item: Object) -> bool:
        return is_called(item, self.words) and not is_called(item, self.others)


def logs(pods: Sequence[Object], otherwise: str) -> str:
    """Return the commands that print the pods' logs, or `otherwise` without pods."""
    every = [f"kubectl -n {_namespace(pod)} logs {name_of(pod)}" for pod in pods]
    more = len(every) - MOST
    commands = "; ".join(every[:MOST]) + (f" (and {more} more)" if more > 0 else "")
    return commands or otherwise


def delete(pods: Sequence[Object], otherwise: str) -> str:
    """Return the kubectl commands that delete pods, or `otherwise` if there are no pods."""
    by_namespace: dict[str, list[str]] = {}
    for pod in pods:
        by_namespace.setdefault(_namespace(pod), []).append(name_of(pod))
    commands = "; ".join(
        f"kubectl -n {namespace} delete pod {named(names)}"
        for namespace, names in sorted(by_namespace.items())
    )
    return commands or otherwise


def _owners(pod: Object) -> list[Mapping[str, object]]:
    owners = objects_of(mapping_of(pod.get("metadata")).get("ownerReferences"))
    return [owner for owner in owners if owner.get("kind") == "DaemonSet"]


def _namespace(item: Object) -> str:
    return text_of(mapping_of(item.get("metadata")).get("namespace")) or "default"
