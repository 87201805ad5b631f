"""`idlegpu best`: the nodes that a pod would get."""

from collections import Counter

import click
from rich.console import RenderableType

from extender.cli import words
from extender.cli.session import Session, connected
from extender.cli.sheets import Cell, line, sheet, stack
from extender.remote.answers import Best, Verdict

COLUMNS = [">#", "NODE", "MODEL", ">IDLE", ">CHANCE", ">ACTIVITY", ">FREE GiB"]
WIDE_COLUMNS = ["LANDS ON", ">ASSUMED", "COUNTS AGREE", ">SCORE"]


@click.command("best")
@connected
@click.option("--gpus", default=1, show_default=True, type=words.Whole(1, 1024), help="How many.")
@click.option("--memory", metavar="QUANTITY", help="Room on each, such as 20Gi.")
@click.option("--model", metavar="MODELS", help="Models that it prefers, such as H100,A100.")
@click.option("--resource", metavar="NAME", help="Which resource; nvidia.com/gpu unless set so.")
@click.option(
    "--strategy", type=click.Choice(["auto", "spread", "pack"]), help="Which node is best."
)
@click.option("--require-idle", is_flag=True, help="Only nodes known to be idle.")
@click.option("--max-utilization", metavar="PERCENT", help="Busier GPUs are not idle.")
@click.option("--max-memory", metavar="PERCENT", help="Fuller GPUs are not idle.")
@click.option("--limit", default=20, show_default=True, type=words.Whole(1, 1000),
              help="How many nodes to show.")  # fmt: skip
def command(session: Session, *, require_idle: bool, **wishes: str | int | None) -> None:
    """The nodes that a pod with these wishes would get now, best first.

    IDLE: GPUs that it could land on and that are idle, of those that it could land on. CHANCE: that
    all GPUs that the kubelet picks are idle. ACTIVITY and FREE: means of the GPUs that it could
    land on. WHY: in the words of docs/decision.md. Ends with status 1 where no node would do.
    """
    idle = "true" if require_idle else None
    answer = session.client.best(**wishes, require_idle=idle)  # type: ignore[arg-type] # gpus is a number
    session.show(answer, lambda: _render(answer, is_wide=session.is_wide))
    if not answer.feasible:
        click.get_current_context().exit(1)


def _render(answer: Best, *, is_wide: bool) -> RenderableType:
    shown = answer.best
    parts: list[RenderableType | None] = []
    if shown:
        columns = [*COLUMNS, "WHY", *(WIDE_COLUMNS if is_wide else [])]
        rows = (
            [*row(rank, one), one.reason, *(_wide(one) if is_wide else [])]
            for rank, one in enumerate(shown, 1)
        )
        parts.append(sheet(columns, rows))
    else:
        parts.append(line("no node would do", "bold"))
    left = answer.feasible - len(shown)
    if left > 0:
        parts.append(line(f"and {left} more that would do (--limit)", "dim"))
    counted = Counter(answer.rejected.values())
    parts += [line(f"{count} {reason}", "dim") for reason, count in counted.most_common()]
    return stack(parts)


def row(rank: int | None, verdict: Verdict) -> list[Cell]:
    """Return one node as a row."""
    landing = [device for device in verdict.devices if device.can_land]
    known = [device.utilization_ratio for device in landing if device.utilization_ratio is not None]
    free = [device.free_bytes for device in landing if device.free_bytes is not None]
    return [
        words.NOTHING if rank is None else str(rank),
        verdict.node,
        words.model(verdict.model.upper()),
        f"{verdict.idle}/{verdict.landing}",
        words.percent(verdict.chance),
        words.percent(sum(known) / len(known) if known else None),
        words.gib(sum(free) / len(free) if free else None),
    ]


def _wide(verdict: Verdict) -> list[Cell]:
    """Return what a wide row has besides."""
    landing = [device for device in verdict.devices if device.can_land]
    on = ["?" if device.index is None else str(device.index) for device in landing]
    return [
        words.listed(on, 16),
        str(sum(device.assumed for device in verdict.devices)),
        "yes" if verdict.is_agreed else "no",
        f"{verdict.score:.6f}",
    ]
