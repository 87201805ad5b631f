"""`idlegpu explain`: why a pod went where it went, or waits; what would happen to another."""

from functools import partial

import click

from extender.cli.commands.explain_tables import render
from extender.cli.manifests import read_pods
from extender.cli.session import Session, connected
from extender.remote.answers import Explanation


@click.command("explain")
@connected
@click.argument("pod", required=False)
@click.option(
    "-f",
    "--filename",
    metavar="FILE",
    help="Say what would happen to the pods of this manifest (- for standard input).",
)
@click.option("--number", type=click.IntRange(1), metavar="N", help="Explain decision N instead.")
@click.option("--node", metavar="NAME",
              help="Show this node in detail, or what is kept of it.")  # fmt: skip
@click.option("--limit", default=10, show_default=True, type=click.IntRange(0, 10_000),
              help="How many nodes to list.")  # fmt: skip
def command(
    session: Session,
    *,
    pod: str | None,
    filename: str | None,
    number: int | None,
    node: str | None,
    limit: int,
) -> None:
    """Why POD (namespace/name, name or UID) went where it went, or what it waits for.

    Shown is the record that the decision was made from: the readings, their source and age, and
    the pods that were assumed by then. With -f nothing is created: the answer says what would
    happen now; status 1 where no node would do, and where nothing is known of --node.
    """
    given = [one for one in (pod, filename, number) if one is not None]
    if len(given) != 1:
        raise click.UsageError("name one of: POD, --filename FILE, --number N")
    if filename is None:
        found = [session.client.explain(pod, number=number, limit=limit, node=node)]
    else:
        found = [session.client.foresee(one, limit=limit, node=node) for one in read_pods(filename)]
    for answer in found:
        session.show(
            answer,
            partial(render, answer, node=node, limit=limit, is_wide=session.is_wide),
        )
    if any(answer.state == "unplaceable" or _is_missed(answer, node) for answer in found):
        click.get_current_context().exit(1)


def _is_missed(answer: Explanation, node: str | None) -> bool:
    """Whether nothing is known of the node that was asked for."""
    one = answer.asked_node
    return node is not None and (one is None or one.kept not in {"in-full", "in-short"})
