"""`idlegpu defrag`: list the fewest pods to move so that a node has room for a large request."""

import re
from typing import Any, Final

import click
from rich.console import RenderableType
from typing_extensions import override  # in typing from Python 3.12 on

from extender.answers.fleet import Defrag, MovePlan
from extender.answers.routes import DEFRAG
from extender.cli import formatting
from extender.cli.session import Session, connected
from extender.cli.tables import Cell, left_out, line, sheet, stack

_MAX_GPUS: Final = DEFRAG.number("gpus").high
_COLUMNS = ["NODE", ">FREE", ">MOVES", "POD", ">GPUS", "OWNER", "TO"]


class _Room(click.ParamType[int]):
    """Option type for the requested GPUs: `gpus=8`."""

    name = "gpus=N"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the number of GPUs."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"gpus=([0-9]{1,4})", str(value).strip())
        if found is None or not 1 <= int(found[1]) <= _MAX_GPUS:
            self.fail(
                f"{str(value)!r}: must be gpus=N with N from 1 to {_MAX_GPUS}, such as gpus=8",
                param,
                ctx,
            )
        return int(found[1])


@click.command("defrag")
@connected
@click.option("--for", "gpus", required=True, type=_Room(), metavar="gpus=N",
              help="GPUs that must be free on one node, such as gpus=8.")  # fmt: skip
@click.option("--resource", metavar="NAME", help="GPU resource; unless set, nvidia.com/gpu.")
@formatting.number_option(DEFRAG, "limit", "Largest number of nodes to show.")
def command(session: Session, *, gpus: int, resource: str | None, limit: int) -> None:
    """List the fewest pods to move so that one node has room for a large request.

    TO is a node with free GPUs, CPU, memory and storage for the pod; whether its affinity allows
    that node is not checked. Nothing is moved: to move a pod that has a controller, cordon its node
    and delete the pod. Pods of DaemonSets stay. Exits with status 1 if no node can be freed.
    """
    answer = session.client.defrag(gpus=gpus, resource=resource, limit=limit)
    session.show(answer, lambda: _render(answer))
    if not answer.ready and not any(plan.fits for plan in answer.plans):
        click.get_current_context().exit(1)


def _render(answer: Defrag) -> RenderableType:
    parts: list[RenderableType | None] = []
    what = f"{answer.gpus} {answer.resource}"
    if answer.ready:
        parts.append(line(f"room for {what} already: {formatting.listed(answer.ready)}", "green"))
    if answer.plans:
        rows = [row for plan in answer.plans for row in _rows(plan)]
        parts.append(sheet(_COLUMNS, rows))
    elif not answer.ready:
        parts.append(line(f"no node can be freed for {what}", "bold"))
    parts.append(left_out(answer.total - len(answer.plans), " nodes"))
    return stack(parts)


def _rows(plan: MovePlan) -> list[list[Cell]]:
    """Format a plan: a row for each move, with the node in the first one."""
    if not plan.moves:
        return [[plan.node, str(plan.free), "0", "pods being deleted hold the rest", *[""] * 3]]
    return [
        [
            *([plan.node, str(plan.free), str(len(plan.moves))] if first else ["", "", ""]),
            move.pod,
            str(move.gpus),
            move.owner or formatting.NOTHING,
            move.to or "no room",
        ]
        for first, move in zip([True] + [False] * len(plan.moves), plan.moves, strict=False)
    ]
