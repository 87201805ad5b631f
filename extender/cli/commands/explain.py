"""`idlegpu explain`: why a pod went where it went, or waits; what would happen to another."""

import re
from collections.abc import Callable
from functools import partial
from typing import Final

import click
from typing_extensions import override  # in typing from Python 3.12 on

from extender.cli.commands.explain_tables import render
from extender.cli.manifests import read_pods
from extender.cli.session import FILE, Session, connected
from extender.cli.words import Whole
from extender.remote.answers import Explanation
from extender.remote.errors import ClientError, Failure

FEW: Final = 10
EVERY: Final = 10_000
"""As many as the extender tells."""

_DECISION: Final = re.compile(r"(\w[\w.]*-)?[1-9][0-9]{0,8}", re.ASCII)


class DecisionName(click.ParamType[int | str]):
    """A decision's number, or its id, which no decision of another replica has."""

    name = "decision"

    @override
    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Read one."""
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
    help="Say what would happen to the pods of this manifest (- for standard input).",
)
@click.option("--number", "decisions", multiple=True, type=DecisionName(), metavar="N",
              help="Explain decision N instead: its number, or its id where several replicas have "
              "the number; may be said again.")  # fmt: skip
@click.option("--node", metavar="NAME",
              help="Show this node in detail, or what is kept of it.")  # fmt: skip
@click.option("--limit", type=Whole(0, EVERY), help="How many nodes to list; unless set, 10 in the "
              "table, and every candidate in the wide one and for programs.")  # fmt: skip
@click.option("--scores", is_flag=True, help="Show what the score of a node in detail is made of.")
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
    """Why each POD (namespace/name, name or UID) went where it went, or what it waits for.

    Shown is the record that the decision was made from: the readings, their source and age, and
    the pods that were assumed by then. With -f nothing is created: the answer says what would
    happen now. Reasons are in the words of docs/decision.md; --scores adds the arithmetic. Status 1
    where nothing is known of a pod, a decision or --node, and where with -f no node would do.
    """
    if sum(map(bool, (pods, filename, decisions))) != 1:
        raise click.UsageError("name one of: POD..., --filename FILE, --number N")
    client = session.client
    if limit is None:
        limit = FEW if session.output == "table" else EVERY
    asked: list[Callable[[], Explanation]] = [
        *(partial(client.explain, pod, limit=limit, node=node) for pod in pods),
        *(partial(client.explain, number=one, limit=limit, node=node) for one in decisions),
        *(
            partial(client.foresee, pod, limit=limit, node=node)
            for pod in (read_pods(filename) if filename else ())
        ),
    ]
    statuses = [
        _show(session, ask, node=node, limit=limit, is_only=len(asked) == 1, has_scores=scores)
        for ask in asked
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
    """Show one explanation; return the exit status that it calls for.

    Of several the others are shown although one cannot be: it is not known, or not clear which is
    meant.

    Raises:
        ClientError: it cannot be shown, and it is the only one, or the others could not be, either.
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
    """Whether nothing is known of the node that was asked for."""
    one = answer.asked_node
    return node is not None and (one is None or one.kept not in {"in-full", "in-short"})
