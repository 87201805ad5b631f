"""`idlegpu explain`: explain a pod's placement, or predict that of a manifest."""

import re
from collections.abc import Callable
from functools import partial
from typing import Final

import click
from typing_extensions import override  # in typing from Python 3.12 on

from extender.cli.commands.explain_tables import render
from extender.cli.formatting import Whole
from extender.cli.manifests import read_pods
from extender.cli.remote.answers import Explanation
from extender.cli.remote.errors import ClientError, Failure
from extender.cli.session import FILE, Session, connected

FEW: Final = 10
EVERY: Final = 10_000
"""Largest number of nodes that the extender returns."""

_DECISION: Final = re.compile(r"(\w[\w.]*-)?[1-9][0-9]{0,8}", re.ASCII)


class DecisionName(click.ParamType[int | str]):
    """Option type for a decision: its number, or its id, which is unique across replicas."""

    name = "decision"

    @override
    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Parse a decision's number or id."""
        text = str(value)
        if not _DECISION.fullmatch(text):
            self.fail(
                f"{text!r}: must be a decision's number, such as 812, or its id, such as 7f3a-812: "
                "`idlegpu decisions -o wide` lists both",
                param,
                ctx,
            )
        return int(text) if text.isdecimal() else text


@click.command("explain")
@connected
@click.argument("pods", nargs=-1, metavar="[POD]...")
@click.option(
    "-f",
    "--filename",
    metavar="FILE",
    type=FILE,
    help="Predict the placement of this manifest's pods (- for standard input).",
)
@click.option("--number", "decisions", multiple=True, type=DecisionName(), metavar="N",
              help="Explain decision N instead: its number, or its id if several replicas have "
              "the number; repeatable.")  # fmt: skip
@click.option("--node", metavar="NAME",
              help="Show this node in detail, as far as it was recorded.")  # fmt: skip
@click.option("--limit", type=Whole(0, EVERY), help="Largest number of nodes to list; unless set, "
              "10 in the table, and all with -o wide, json or yaml.")  # fmt: skip
@click.option("--scores", is_flag=True, help="Show the parts of a detailed node's score.")
def command(
    session: Session,
    *,
    pods: tuple[str, ...],
    filename: str | None,
    decisions: tuple[int | str, ...],
    node: str | None,
    limit: int | None,
    scores: bool,
) -> None:
    """Explain the placement of each POD (namespace/name, name or UID), or why it waits.

    The explanation shows the record from which the decision was made: readings with source and age,
    and the pods that were assumed. -f creates nothing: it predicts the placement now.
    docs/decision.md explains the terms; --scores adds the arithmetic. Exits with status 1 if
    nothing is known of a pod, a decision or --node, or if with -f no node suits.
    """
    if sum(map(bool, (pods, filename, decisions))) != 1:
        raise click.UsageError("name one of: POD..., --filename FILE, --number N")
    client = session.client
    if limit is None:
        limit = FEW if session.output == "table" else EVERY
    requests: list[Callable[[], Explanation]] = [
        *(partial(client.explain, pod, limit=limit, node=node) for pod in pods),
        *(partial(client.explain, number=one, limit=limit, node=node) for one in decisions),
        *(
            partial(client.foresee, pod, limit=limit, node=node)
            for pod in (read_pods(filename) if filename else ())
        ),
    ]
    statuses = [
        _show(session, ask, node=node, limit=limit, is_only=len(requests) == 1, has_scores=scores)
        for ask in requests
    ]
    if any(statuses):
        click.get_current_context().exit(max(statuses))


def _show(
    session: Session,
    ask: Callable[[], Explanation],
    *,
    node: str | None,
    limit: int,
    is_only: bool,
    has_scores: bool,
) -> int:
    """Print one explanation; return the exit status.

    If there are several, an unknown or ambiguous pod does not prevent the others from being shown.

    Raises:
        ClientError: the only explanation failed, or the failure would affect the others too.
    """
    try:
        answer = ask()
    except ClientError as error:
        if is_only or error.failure not in {Failure.NOT_FOUND, Failure.BAD_QUESTION}:
            raise
        click.echo(f"idlegpu: {error}", err=True)
        status: int = error.failure.value
        return status
    session.show(
        answer,
        lambda: render(
            answer, node=node, limit=limit, is_wide=session.is_wide, has_scores=has_scores
        ),
    )
    return 1 if answer.state == "unplaceable" or _is_missed(answer, node) else 0


def _is_missed(answer: Explanation, node: str | None) -> bool:
    one = answer.asked_node
    return node is not None and (one is None or one.kept not in {"in-full", "in-short"})
