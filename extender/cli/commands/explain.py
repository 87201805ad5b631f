"""`idlegpu explain`: why a pod went where it went, or waits; what would happen to another."""

import click
from rich.console import RenderableType

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
@click.option("--node", metavar="NAME", help="Show this node in detail, not the chosen one.")
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
    happen now; status 1 where no node would do.
    """
    given = [one for one in (pod, filename, number) if one is not None]
    if len(given) != 1:
        raise click.UsageError("name one of: POD, --filename FILE, --number N")
    if filename is None:
        found = [session.client.explain(pod, number=number, limit=limit)]
    else:
        found = [session.client.foresee(one, limit=limit) for one in read_pods(filename)]
    for answer in found:
        session.show(answer, lambda answer=answer: _shown(answer, node, limit, session))  # type: ignore[misc] # bound at once
    if any(answer.state == "unplaceable" for answer in found):
        click.get_current_context().exit(1)


def _shown(answer: Explanation, node: str | None, limit: int, session: Session) -> RenderableType:
    known = [verdict.node for verdict in answer.nodes]
    if node is not None and node not in known:
        some = ", ".join(known[:5]) or "none"
        raise click.UsageError(
            f"--node {node}: that node is not kept in full: must be one of {some}"
        )
    return render(answer, node=node, limit=limit, is_wide=session.is_wide)
