"""`idlegpu regret`: compare the outcome of placements with idlegpu's choice and the best node."""

import click
from rich.console import RenderableType

from extender.answers.decisions import OutcomeAnswer, Regret, RegretMeans
from extender.answers.routes import REGRET
from extender.cli import formatting
from extender.cli.session import Session, connected, namespace_option
from extender.cli.tables import Cell, line, sheet, stack, unanswered, word

_MEANS = ["", ">PODS", ">GOT", ">FIRST CHOICE", ">BEST", ">GOT THEN", ">FIRST CHOICE THEN"]
_COLUMNS = [
    "POD",
    "NODE",
    "FIRST CHOICE",
    "?BEST",
    ">GOT",
    ">CHOICE",
    ">BEST",
    ">REGRET",
    "?FOLLOWED",
]
_WIDE_COLUMNS = [">GOT THEN", ">CHOICE THEN", ">GPUS", ">WATCHED", "BOUND"]


@click.command("regret")
@connected
@namespace_option
@formatting.number_option(REGRET, "limit", "Largest number of placements to show.", default=20)
def command(session: Session, *, namespace: str | None, limit: int) -> None:
    """Show the outcome of placements some time after the pods were bound, newest first.

    The values are the mean activity of GPUs: of those that the pod GOT, of those that it could
    have got on idlegpu's first CHOICE, and of those on the BEST of the recorded nodes (the 10
    best of the decision and the pod's own). GOT includes the pod's own work. THEN is the value at
    the time of the decision. REGRET is GOT minus CHOICE.
    """
    answer = session.client.regret(namespace=namespace, limit=limit)
    session.show(answer, lambda: _render(answer, is_wide=session.is_wide))


def _render(answer: Regret, *, is_wide: bool) -> RenderableType:
    after = formatting.span(answer.after_seconds)
    notes = [
        line(f"pods watched until {after} after their binding: {answer.watched}", "dim"),
        line(f"pods left out: {answer.left_out}", "dim") if answer.left_out else None,
        unanswered(answer.unreachable),
    ]
    if not answer.placements:
        return stack([line("no placement was compared yet"), *notes])
    means = [
        _mean_row("all", answer.all),
        _mean_row("followed", answer.followed),
        _mean_row("not followed", answer.not_followed),
    ]
    rows = (_row(one, is_wide=is_wide) for one in answer.placements)
    return stack(
        [
            sheet(_MEANS, means),
            line(""),
            sheet(_COLUMNS, rows, _WIDE_COLUMNS if is_wide else ()),
            *notes,
        ]
    )


def _mean_row(name: str, means: RegretMeans) -> list[Cell]:
    return [
        name,
        str(means.placements),
        formatting.percent(means.got_ratio),
        formatting.percent(means.choice_ratio),
        formatting.percent(means.best_ratio),
        formatting.percent(means.got_then_ratio),
        formatting.percent(means.choice_then_ratio),
    ]


def _row(one: OutcomeAnswer, *, is_wide: bool) -> list[Cell]:
    row: list[Cell] = [
        one.pod,
        one.node,
        one.choice or "none",
        one.best,
        formatting.percent(one.got_ratio) + ("" if one.is_known else "~"),
        formatting.percent(one.choice_ratio),
        formatting.percent(one.best_ratio),
        formatting.UNKNOWN if one.regret_ratio is None else f"{one.regret_ratio:+.0%}",
        word("yes" if one.is_followed else "no"),
    ]
    if is_wide:
        row += [
            formatting.percent(one.got_then_ratio),
            formatting.percent(one.choice_then_ratio),
            str(one.gpus),
            formatting.span(one.seconds),
            formatting.clock(one.bound_at),
        ]
    return row
