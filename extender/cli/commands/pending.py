"""`idlegpu pending`: list GPU pods that wait, with the reasons."""

import click
from rich.console import RenderableType

from extender.answers.pods import PendingAnswer, ReasonCount, Waiting
from extender.answers.routes import PENDING
from extender.cli import formatting
from extender.cli.session import Session, connected, namespace_option
from extender.cli.tables import Cell, left_out, line, sheet, stack, unanswered, word

_COLUMNS = [
    "POD",
    ">WAITS",
    "REQUESTS",
    "STATE",
    "_NODES HELD BACK BY KUBE-SCHEDULER",
    "_BY IDLEGPU",
]
_WIDE_COLUMNS = ["SCHEDULER", "OWNER", "WHAT WOULD HELP"]
_MOST_REASONS = 2


@click.command("pending")
@connected
@namespace_option
@formatting.number_option(PENDING, "limit", "Largest number of pods to show.")
def command(session: Session, *, namespace: str | None, limit: int) -> None:
    """List GPU pods that are not bound, the longest wait first, with the reasons.

    kube-scheduler applies its own filters first (taints, affinity, CPU, memory, free GPUs by its
    count) and sends idlegpu the remaining nodes. -o wide adds hints.
    """
    answer = session.client.pending(namespace=namespace, limit=limit)
    session.show(answer, lambda: _render(answer, is_wide=session.is_wide))


def _render(answer: PendingAnswer, *, is_wide: bool) -> RenderableType:
    columns = _WIDE_COLUMNS if is_wide else ()
    return stack(
        [
            sheet(_COLUMNS, (_row(pod, is_wide=is_wide) for pod in answer.pods), columns)
            if answer.pods
            else line("no GPU pod waits"),
            left_out(answer.total - len(answer.pods)),
            unanswered(answer.unreachable),
        ]
    )


def _row(pod: Waiting, *, is_wide: bool) -> list[Cell]:
    row: list[Cell] = [
        pod.pod,
        formatting.span(pod.waiting_seconds),
        formatting.resources(pod.resources) or formatting.NOTHING,
        word(pod.state),
        _reasons(pod.by_scheduler, is_wide=is_wide),
        _reasons(pod.by_us, is_wide=is_wide),
    ]
    if is_wide:
        row += [
            pod.scheduler,
            pod.owner or formatting.NOTHING,
            "; ".join(pod.hints) or formatting.NOTHING,
        ]
    return row


def _reasons(counted: list[ReasonCount], *, is_wide: bool) -> str:
    """Format reasons with their counts, abbreviated unless `is_wide`."""
    texts = [f"{one.count} {_short(one.reason)}" for one in counted]
    return formatting.listed(texts, len(texts) if is_wide else _MOST_REASONS)


def _short(reason: str) -> str:
    """Strip the prefix that all reasons have in common.

    Example:
        >>> _short("node(s) had too few GPUs known to be idle")
        'too few GPUs known to be idle'
    """
    for start in ("node(s) had ", "node(s) "):
        if reason.startswith(start):
            return reason.removeprefix(start)
    return reason
