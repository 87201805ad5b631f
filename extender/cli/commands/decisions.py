"""`idlegpu decisions`: list the latest decisions."""

from collections.abc import Sequence
from typing import Final

import click
from rich.console import RenderableType

from extender.answers.decisions import DecisionAnswer, Decisions
from extender.answers.routes import DECISIONS
from extender.cli import formatting
from extender.cli.session import PODS, Session, connected
from extender.cli.tables import Cell, line, sheet, stack, unanswered, word

_COLUMNS = [">#", "=TIME", "POD", ">FEASIBLE", "CHOSE", "BOUND TO", "=FOLLOWED"]
_WIDE_COLUMNS = ["RUNNER-UP", "REQUESTS", ">MS", "REPLICA", "ID"]
_MOST: Final = DECISIONS.number("limit").high
"""Largest number of decisions that the extender returns."""

_FOLLOWED = {True: "yes", False: "no", None: formatting.NOTHING}
_SHADOWED = {True: "shadow: same", False: "shadow: another", None: "shadow"}
"""Texts for shadow mode, in which kube-scheduler did not receive idlegpu's first choice: whether
the pod is on it."""


@click.command("decisions")
@connected
@click.argument("pod", required=False, shell_complete=PODS)
@formatting.number_option(DECISIONS, "limit", "Largest number of decisions to show.", default=20)
def command(session: Session, *, pod: str | None, limit: int) -> None:
    """List the latest decisions, newest first, of POD (namespace/name, name or UID) or of all pods.

    kube-scheduler calls the extender twice for each pod: filter selects the nodes that suit,
    prioritize ranks them. Both calls are one row. FEASIBLE: nodes that suit, of the candidates;
    CHOSE: idlegpu's first choice; FOLLOWED: whether the pod was bound there. -o wide adds the
    runner-up, the pod's requests and the time of both calls; -o json lists each call.
    """
    calls = min(2 * limit, _MOST) if session.is_table else limit
    answer = session.client.decisions(pod=pod, limit=calls)
    session.show(answer, lambda: _render(answer, pod, limit, is_wide=session.is_wide))
    if pod is not None and not answer.decisions:
        click.echo(
            f"no decision about {pod!r} is remembered: `idlegpu decisions` lists the last, "
            f"`idlegpu pending` the pods that wait",
            err=True,
        )
        click.get_current_context().exit(1)


def _render(answer: Decisions, pod: str | None, limit: int, *, is_wide: bool) -> RenderableType:
    pairs = _joined(answer.decisions)[:limit]
    rows = (_row(one, filtered, is_wide=is_wide) for one, filtered in pairs)
    # For one pod, an empty list is an error: the caller prints it.
    none = None if pod else line("no decisions yet")
    return stack(
        [
            sheet(_COLUMNS, rows, _WIDE_COLUMNS if is_wide else ()) if answer.decisions else none,
            line(f"shadow: {formatting.SHADOW}")
            if any(one.is_shadow for one in answer.decisions)
            else None,
            unanswered(answer.unreachable),
        ]
    )


def _joined(decisions: Sequence[DecisionAnswer]) -> list[tuple[DecisionAnswer, DecisionAnswer]]:
    """Pair the last call of each attempt with its filter call, newest attempt first."""
    attempts: list[tuple[DecisionAnswer, DecisionAnswer]] = []
    ranked: dict[tuple[str, str | None], int] = {}
    for one in decisions:
        key = (one.pod, one.uid)
        at = ranked.pop(key, None)
        if one.verb == "filter" and at is not None:
            attempts[at] = (attempts[at][0], one)
            continue
        if one.verb == "prioritize":
            ranked[key] = len(attempts)
        attempts.append((one, one))
    return attempts


def _row(decision: DecisionAnswer, filtered: DecisionAnswer, *, is_wide: bool) -> list[Cell]:
    texts = _SHADOWED if decision.is_shadow else _FOLLOWED
    row: list[Cell] = [
        str(decision.number),
        formatting.clock(decision.at),
        decision.pod,
        f"{filtered.feasible}/{filtered.candidates}",
        decision.node or "none",
        decision.bound_node or formatting.NOTHING,
        word(texts[decision.is_followed]),
    ]
    if is_wide:
        calls = [decision, filtered] if filtered is not decision else [decision]
        known = [call.duration_seconds for call in calls if call.duration_seconds is not None]
        took = sum(known) if known else None
        row += [
            decision.runner_up or formatting.NOTHING,
            formatting.resources(decision.request.resources if decision.request else {}),
            formatting.UNKNOWN if took is None else f"{took * 1000:.1f}",
            decision.replica or formatting.NOTHING,
            decision.id or formatting.NOTHING,
        ]
    return row
