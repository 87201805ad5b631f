"""`idlegpu replay`: repeat logged decisions, with changed settings."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import RenderableType

from extender.cli import formatting
from extender.cli.session import ConnectionOptions, Session, output_option, show_table
from extender.cli.tables import line, sheet, stack

if TYPE_CHECKING:
    from extender.insight.replay import ReplayReport, Side

_COLUMNS = ["PLACED BY", ">PODS PLACED", ">PODS WAITING", ">ACTIVITY", ">ON IDLE GPUS"]
_LEGEND = (
    "ACTIVITY: mean of the GPUs where the pods land, at the time of the decision; ON IDLE GPUS: "
    "share of the placed pods that get enough GPUs known to be idle"
)
_SHOWN = 10


@click.command("replay")
@click.argument("log", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False,
                                                                 path_type=Path))  # fmt: skip
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE",
              help="Change a setting: weights.memory=0.4; repeatable.")  # fmt: skip
@output_option
def command(*, log: tuple[Path, ...], settings: tuple[str, ...], output: str) -> None:
    """Repeat the decisions of the decision log LOG, with other settings.

    The server's own code decides offline, from the recorded state of the cluster. Name several
    files oldest first: decisions.2 decisions.1 decisions. Without --set every decision must be the
    same as logged; otherwise the exit status is 1.

    Each decision is repeated on its own: later consequences of a different choice are not
    simulated.
    """
    # Server code, which takes half a second to import.
    from extender.insight.decision_log.reader import read_log
    from extender.insight.replay import parse_changes, replay

    changes = dict(one.split("=", 1) for one in settings if "=" in one)
    try:
        report = replay(read_log(log), parse_changes(settings), changes)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    session = Session(ConnectionOptions(), output)
    if session.is_table:
        show_table(session.console, _render(report))
    else:
        session.write(report)
    if report.exact < report.decisions or not report.decisions:
        click.get_current_context().exit(1)


def _render(report: "ReplayReport") -> RenderableType:
    if not report.decisions:
        return line("the log contains no decision")
    rows = [_row("settings of the log", report.before)]
    if report.changes:
        rows.append(_row("changed settings", report.after))
    if report.bound:
        rows.append(_row("kube-scheduler", report.actual))
    parts: list[RenderableType | None] = [sheet(_COLUMNS, rows), line(_LEGEND, "dim"), line("")]
    if report.changes:
        share = formatting.percent(report.moved / report.pods)
        parts.append(line(f"{report.moved} of {report.pods} pods ({share}) would go elsewhere"))
        parts += [_move(report)] if report.moves else []
    if report.bound:
        parts.append(
            line(
                f"{report.followed} of the {report.bound} pods known to be bound are on "
                "idlegpu's first choice"
            )
        )
    if report.narrowed and report.changes:
        parts.append(
            line(
                f"for {report.narrowed} of {report.pods} pods the log has no filter call: repeated "
                "only among the nodes that had passed, or their shortlist",
                "yellow",
            )
        )
    parts.append(_exactness(report))
    return stack(parts)


def _exactness(report: "ReplayReport") -> RenderableType:
    summary = f"{report.exact} of {report.decisions} decisions come out exactly as they were logged"
    if report.exact == report.decisions:
        return line(summary, "dim")
    numbers = formatting.listed(map(str, report.inexact), 10)
    return line(
        f"{summary}; not {numbers}: were they made by another version of idlegpu?", "bold yellow"
    )


def _row(name: str, side: "Side") -> list[str]:
    return [
        name,
        str(side.placed),
        str(side.waits),
        formatting.UNKNOWN if side.activity is None else f"{side.activity:.1%}",
        formatting.percent(side.idle_share),
    ]


def _move(report: "ReplayReport") -> RenderableType:
    columns = ["POD", "FROM", "TO", "BOUND TO", ">ACTIVITY FROM", ">ACTIVITY TO"]
    rows = [
        [
            move.pod,
            move.before or "none",
            move.after or "none",
            move.bound or formatting.NOTHING,
            formatting.percent(move.activity_before),
            formatting.percent(move.activity_after),
        ]
        for move in report.moves[:_SHOWN]
    ]
    left = report.moved - len(rows)
    more = line(f"and {left} more (-o json names {len(report.moves)})", "dim") if left else None
    return stack([sheet(columns, rows), more, line("")])
