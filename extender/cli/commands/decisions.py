"""`idlegpu decisions`: what was decided."""

import click
from rich.console import RenderableType

from extender.cli import words
from extender.cli.session import Session, connected
from extender.cli.sheets import Cell, line, sheet, stack, word
from extender.remote.answers import Decision, Decisions

COLUMNS = [">#", "=TIME", "POD", "=VERB", ">FEASIBLE", "CHOSE", "BOUND TO", "=FOLLOWED"]
WIDE_COLUMNS = ["RUNNER-UP", "ASKS FOR", ">MS", "REPLICA", "ID"]

FOLLOWED = {True: "yes", False: "no", None: words.NOTHING}
SHADOWED = {True: "shadow: same", False: "shadow: another", None: "shadow"}
"""By whether the pod is on our first choice, of which kube-scheduler was not told."""


@click.command("decisions")
@connected
@click.argument("pod", required=False)
@click.option("--limit", default=20, show_default=True, type=words.Whole(1, 1000),
              help="How many decisions to show.")  # fmt: skip
def command(session: Session, *, pod: str | None, limit: int) -> None:
    """The last decisions, the newest first; about POD (namespace/name, name or UID), or all.

    kube-scheduler asks twice: filter, which nodes would do, and prioritize, which is best of those.
    FEASIBLE: so many would do, of those that it asked about; CHOSE: our first choice; FOLLOWED: the
    pod was bound there. -o wide says besides which node came second, and what the pod asks for.
    """
    answer = session.client.decisions(pod=pod, limit=limit)
    session.show(answer, lambda: _render(answer, pod, is_wide=session.is_wide))
    if pod is not None and not answer.decisions:
        click.echo(f"no decision about {pod!r} is remembered", err=True)
        click.get_current_context().exit(1)


def _render(answer: Decisions, pod: str | None, *, is_wide: bool) -> RenderableType:
    columns = COLUMNS + (WIDE_COLUMNS if is_wide else [])
    rows = (_row(one, is_wide=is_wide) for one in answer.decisions)
    # About one pod there may be none although others were decided about: that is told as a failure.
    none = None if pod else line("nothing was decided yet")
    away = words.listed(answer.unreachable)
    return stack(
        [
            sheet(columns, rows) if answer.decisions else none,
            line(f"shadow: {words.SHADOW}")
            if any(one.is_shadow for one in answer.decisions)
            else None,
            line(f"replicas that do not answer: {away}", "yellow") if answer.unreachable else None,
        ]
    )


def _row(decision: Decision, *, is_wide: bool) -> list[Cell]:
    told = SHADOWED if decision.is_shadow else FOLLOWED
    row: list[Cell] = [
        str(decision.number),
        words.clock(decision.at),
        decision.pod,
        decision.verb,
        f"{decision.feasible}/{decision.candidates}",
        decision.node or "none",
        decision.bound_node or words.NOTHING,
        word(told[decision.is_followed]),
    ]
    if is_wide:
        took = decision.duration_seconds
        row += [
            decision.runner_up or words.NOTHING,
            words.resources(decision.request.resources if decision.request else {}),
            words.UNKNOWN if took is None else f"{took * 1000:.1f}",
            decision.replica or words.NOTHING,
            decision.id or words.NOTHING,
        ]
    return row
