"""`idlegpu holders`: list pods that hold GPUs without using them."""

import click
from rich.console import RenderableType

from extender.answers.holding import HolderAnswer, HoldersAnswer
from extender.answers.routes import HOLDERS
from extender.cli import formatting
from extender.cli.session import Session, connected, namespace_option
from extender.cli.tables import Cell, left_out, line, sheet, stack

_COLUMNS = [
    "POD",
    "NODE",
    ">IDLE GPUS",
    formatting.IDLE_MIG,
    ">IDLE FOR",
    "?>GPU-HOURS",
    ">IDLE HOURS",
    "?>MEMORY GiB",
    "?OWNER",
]
_COST_COLUMNS = [">COST USED", ">COST IDLE"]
_WIDE_COLUMNS = ["WHY", ">HELD FOR", "GPUS"]


@click.command("holders")
@connected
@click.option(
    "--idle-for",
    default="1h",
    show_default=True,
    type=formatting.span_of(HOLDERS, "idle_for"),
    metavar="TIME",
    help="Only pods idle for at least this long (30m, 1h, 1d12h); 0 lists every holder.",
)
@namespace_option
@click.option("--some", is_flag=True, help="Include pods that use some of their GPUs.")
@formatting.number_option(HOLDERS, "limit", "Largest number of pods to show.")
def command(
    session: Session, *, idle_for: int, namespace: str | None, some: bool, limit: int
) -> None:
    """List pods that hold GPUs without using them, the longest idle first.

    A GPU counts as used if it is busy for at least 2% of the time; MIG instances are counted
    separately. A + after IDLE FOR means that the GPU was already idle when the extender started to
    watch it. A shared GPU is idle only if no tenant uses it.
    """
    answer = session.client.holders(
        idle_for_seconds=idle_for, namespace=namespace, some=some, limit=limit
    )
    session.show(answer, lambda: _render(answer, is_wide=session.is_wide))


def _render(answer: HoldersAnswer, *, is_wide: bool) -> RenderableType:
    parts: list[RenderableType | None] = []
    if answer.holders:
        costs = _COST_COLUMNS if answer.is_priced else []
        has_mig = any(one.mig_instances for one in answer.holders)
        rows = (
            _row(one, has_mig=has_mig, is_wide=is_wide, is_priced=answer.is_priced)
            for one in answer.holders
        )
        columns = [name for name in _COLUMNS if name != formatting.IDLE_MIG or has_mig]
        parts.append(sheet(columns + costs, rows, _WIDE_COLUMNS if is_wide else ()))
    else:
        parts.append(line(formatting.no_holders(answer.idle_for_seconds)))
    parts.append(left_out(answer.total - len(answer.holders)))
    if answer.sums is not None and answer.sums.pods > 1:
        parts.append(line(f"in all {formatting.summed(answer.sums)}", "dim"))
    if answer.unknown:
        parts.append(
            line(f"pods not judged, because no source reports their GPUs: {answer.unknown}", "dim")
        )
    if answer.watched_since:
        parts.append(line(f"watched since {formatting.since(answer.watched_since)}", "dim"))
    return stack(parts)


def _row(holder: HolderAnswer, *, has_mig: bool, is_wide: bool, is_priced: bool) -> list[Cell]:
    least = "+" if holder.is_at_least else ""
    row: list[Cell] = [
        holder.pod,
        holder.node,
        *formatting.idle_of(holder, has_mig=has_mig),
        formatting.span(holder.idle_seconds) + least,
        f"{holder.gpu_hours:.1f}",
        f"{holder.gpu_hours_idle:.1f}",
        formatting.gib(holder.memory_used_bytes),
        holder.owner or formatting.NOTHING,
    ]
    if is_priced:
        row += [formatting.money(holder.cost_used), formatting.money(holder.cost_idle)]
    if is_wide:
        on = ["?" if device.index is None else str(device.index) for device in holder.devices]
        row += [holder.why, formatting.span(holder.held_seconds), formatting.listed(on, 16)]
    return row
