"""`idlegpu doctor`: find faults of the installation, and print evidence and remedies."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

import click
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from extender.cli.doctor import checks
from extender.cli.doctor.fact_collector import (
    FactCollector,
    add_files,
    gather_cluster,
    gather_extender,
)
from extender.cli.doctor.findings import Check, DoctorReport, Finding, NotRun, Severity, examine
from extender.cli.doctor.rights import ACCOUNT
from extender.cli.formatting import clean
from extender.cli.session import Session, connected, show_table
from extender.cli.tables import line, stack
from extender.cli.transports import ClientError, Failure

CHECKS: Final[tuple[Check, ...]] = tuple(
    sorted(
        (
            value
            for module in iter_modules(checks.__path__, f"{checks.__name__}.")
            for value in vars(import_module(module.name)).values()
            if isinstance(value, Check)
        ),
        key=lambda check: check.code,
    )
)

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
_SHOWN = 5
"""Lines of evidence to show for each finding, unless `-o wide`."""


@click.command("doctor")
@connected
@click.argument("files", nargs=-1)
@click.option("--offline", is_flag=True, help="Check only FILES: no cluster, no extender.")
@click.option(
    "--account",
    default=ACCOUNT,
    show_default=True,
    metavar="NS/NAME",
    help="The extender's service account, whose RBAC rights are checked.",
)
def command(session: Session, *, files: tuple[str, ...], offline: bool, account: str) -> None:
    """Find faults of the installation, with evidence and remedies.

    Checks the cluster of the kubeconfig and the extender. FILES add facts that neither provides,
    such as kube-scheduler's configuration. With --offline only FILES are checked: output of kubectl
    get -o json (nodes, pods, ...), configurations, metrics, answers of the extender, certificates.

    Exits with status 1 if a finding is an error, and 3 if nothing could be checked. A check that
    could not run has not passed; -o wide lists these checks one by one.
    """
    namespace, slash, name = account.partition("/")
    if not (namespace and slash and name):
        raise ClientError(
            f"account {account!r}: must be namespace/name, such as {ACCOUNT}", Failure.BAD_REQUEST
        )
    if offline and not files:
        raise ClientError("--offline checks files only: name some", Failure.BAD_REQUEST)
    collector, at = FactCollector(), time.time()
    collector.account = account
    if not offline:
        gather_cluster(collector, lambda: session.cluster, account)
        gather_extender(collector, lambda: session.client, at)
    add_files(collector, files)
    report = examine(collector.facts(at), CHECKS)
    causes = [why for why, count in Counter(collector.missing.values()).items() if count > 1]
    is_blind = not report.findings and not report.passed
    if not session.is_table:
        session.write(asdict(report))
    elif not is_blind:
        show_table(session.console, _sheet(report, causes, is_wide=session.is_wide))
    if is_blind:
        repeated = {one for one in causes for other in causes if one != other and one in other}
        unique = [one for one in causes if one not in repeated]
        why = "; ".join(unique) or "no file has facts that a check needs"
        raise ClientError(f"nothing could be checked: {why}", Failure.UNREACHABLE)
    if report.has_errors:
        click.get_current_context().exit(1)


def _sheet(report: DoctorReport, causes: Sequence[str], *, is_wide: bool) -> RenderableType:
    """Render the report as a table.

    Args:
        causes: reasons that several missing facts share; printed once, as numbered notes.
        is_wide: whether to show all evidence.
    """
    parts: list[RenderableType | None] = [
        _finding(finding, is_wide=is_wide) for finding in report.findings
    ]
    not_run, left = list(report.not_run), []
    if not is_wide:  # one line for all checks with the same missing facts
        for cause in causes:
            codes = [one.code for one in not_run if _is_only(one, cause)]
            not_run = [one for one in not_run if one.code not in codes]
            if codes:
                left.append(line(f"{len(codes)} checks could not run: {cause}", "yellow"))
    met = [cause for cause in causes if any(cause in one.why for one in not_run)]
    alike = Counter[str]() if is_wide else Counter(one.why for one in not_run)
    parts += [_not_run(one, met) for one in not_run if alike[one.why] <= 1]
    left += (
        line(f"{count} checks could not run: {_numbered(why, met)}", "yellow")
        for why, count in alike.items()
        if count > 1
    )
    parts += [line(f"({number}) {cause}") for number, cause in enumerate(met, 1)]
    parts += left
    counts = [f"{sum(one.severity is kind for one in report.findings)} {kind}" for kind in Severity]
    parts.append(
        line(
            f"findings: {', '.join(counts)}; checks passed: {len(report.passed)}, could not run: "
            f"{len(report.not_run)}"
        )
    )
    return stack(parts)


def _is_only(one: NotRun, cause: str) -> bool:
    """Return whether all missing facts of a check have the same cause."""
    return all("\0" in part for part in one.why.replace(cause, "\0").split("; "))


def _finding(finding: Finding, *, is_wide: bool) -> RenderableType:
    head = Text(f"{finding.code} {finding.severity}", style=_STYLES[finding.severity])
    head.append(f"  {clean(finding.what)}", style="default")
    shown = finding.evidence if is_wide else finding.evidence[:_SHOWN]
    more = len(finding.evidence) - len(shown)
    rows: list[RenderableType] = [line(text) for text in shown]
    if more:
        rows.append(line(f"... and {more} more (-o wide)", "dim"))
    rows += [
        line(f"{'-> ' if at == 0 else '   '}{text}", "bold")
        for at, text in enumerate(finding.remedy.splitlines())
    ]
    return Group(head, Padding(Group(*rows), (0, 0, 0, 6)), Text())


def _not_run(one: NotRun, causes: Sequence[str]) -> RenderableType:
    why = _numbered(one.why, causes)
    return Text(f"{one.code} could not run  {clean(one.title)}: {clean(why)}", style="dim")


def _numbered(why: str, causes: Sequence[str]) -> str:
    """Replace each cause by its number."""
    for number, cause in enumerate(causes, 1):
        why = why.replace(cause, f"({number})")
    return why
