"""`idlegpu best`: list the nodes that suit a pod now."""

from collections import Counter

import click
from rich.console import RenderableType

from extender.answers.decisions import Best, ModelCount, VerdictAnswer
from extender.answers.routes import BEST
from extender.cli import formatting
from extender.cli.session import Session, connected
from extender.cli.tables import Cell, left_out, line, sheet, stack

_STRANDED = ">STRANDED"
_WIDE_COLUMNS = ["LANDS ON", ">ASSUMED", "COUNTS AGREE", ">SCORE"]


@click.command("best")
@connected
@formatting.number_option(BEST, "gpus", "Number of GPUs.")
@click.option("--memory", metavar="QUANTITY", help="Memory needed on each GPU, such as 20Gi.")
@click.option("--model", metavar="MODELS", help="Preferred GPU models, such as H100,A100.")
@click.option("--resource", metavar="NAME", help="GPU resource; unless set, nvidia.com/gpu.")
@click.option(
    "--strategy", type=click.Choice(["auto", "spread", "pack"]), help="Placement strategy."
)
@click.option("--require-idle", is_flag=True, help="Only nodes known to be idle.")
@click.option("--max-utilization", metavar="PERCENT", help="A GPU above this is not idle.")
@click.option("--max-memory", metavar="PERCENT", help="A GPU with more memory used is not idle.")
@formatting.number_option(BEST, "limit", "Largest number of nodes to show.")
def command(
    session: Session, *, require_idle: bool, gpus: int, limit: int, **wishes: str | None
) -> None:
    """List the nodes that suit a pod with these requirements now, best first.

    Of the GPUs that the pod could land on: IDLE counts the idle ones; ACTIVITY and FREE are means.
    CHANCE is the probability that all GPUs that the kubelet picks are idle. docs/decision.md
    explains the terms of WHY. STRANDED counts free GPUs for which the node lacks CPU, memory or
    ephemeral storage (docs/advice.md). -o wide adds LANDS ON: the GPUs that the kubelet could pick;
    ASSUMED: pods on them that no reading shows yet; COUNTS AGREE: whether readings and API server
    agree on the GPUs in use. Exits with status 1 if no node suits.
    """
    idle = "true" if require_idle else None
    answer = session.client.best(gpus=gpus, limit=limit, require_idle=idle, **wishes)
    session.show(answer, lambda: _render(answer, is_wide=session.is_wide))
    if not answer.feasible:
        click.get_current_context().exit(1)


def _render(answer: Best, *, is_wide: bool) -> RenderableType:
    shown = answer.best
    parts: list[RenderableType | None] = []
    if shown:
        stranded = [_STRANDED] if any(one.stranded for one in shown) else []
        rows = (
            [
                *formatting.ranked_node(rank, one),
                *([str(one.stranded)] if stranded else []),
                one.reason,
                *(_wide(one) if is_wide else []),
            ]
            for rank, one in enumerate(shown, 1)
        )
        parts.append(
            sheet(
                [*formatting.RANKED_COLUMNS, *stranded, "WHY"],
                rows,
                _WIDE_COLUMNS if is_wide else (),
            )
        )
    else:
        parts.append(line("no node suits", "bold"))
        if not answer.rejected:
            parts.append(line("no node offers this resource: idlegpu nodes lists all", "yellow"))
    parts.append(left_out(answer.feasible - len(shown), " that suit"))
    for model, count in answer.models.items():
        if not count.gpus:
            parts.append(
                line(f"no node has a GPU of the model {model}: idlegpu nodes lists all", "yellow")
            )
        elif not count.free:
            parts.append(line(f"no {model} is free: {_taken(count)}", "yellow"))
    counted = Counter(answer.rejected.values())
    parts += [line(f"{count} {reason}", "dim") for reason, count in counted.most_common()]
    return stack(parts)


def _taken(count: ModelCount) -> str:
    """Explain why no GPU of a model is free."""
    if not count.stranded:
        return f"all {count.gpus} are held"
    held = f"{count.held} held, " if count.held else ""
    return f"{held}{count.stranded} stranded without CPU, memory or storage (idlegpu advise)"


def _wide(verdict: VerdictAnswer) -> list[Cell]:
    landing = [device for device in verdict.devices if device.can_land]
    on = ["?" if device.index is None else str(device.index) for device in landing]
    return [
        formatting.listed(on, 16),
        str(sum(device.assumed for device in verdict.devices)),
        "yes" if verdict.is_agreed else "no",
        f"{verdict.score:.6f}",
    ]
