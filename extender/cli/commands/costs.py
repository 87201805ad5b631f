"""`idlegpu costs`: show the cost of the GPUs that pods hold, used and idle."""

import click
from click.core import ParameterSource
from rich.console import RenderableType

from extender.answers.holding import CostGroup, Costs, Usage, UsageFigures
from extender.answers.routes import COSTS, USAGE
from extender.cli import formatting
from extender.cli.session import Session, connected, namespace_option
from extender.cli.tables import Cell, line, sheet, stack

_COLUMNS = [">PODS", ">IDLE GPUS", formatting.IDLE_MIG, ">GPU-HOURS", ">IDLE HOURS"]
_COST_COLUMNS = [">COST", ">COST USED", ">COST IDLE"]


@click.command("costs")
@connected
@click.option(
    "--by",
    default="owner",
    show_default=True,
    type=click.Choice(["pod", "owner", "namespace"]),
    help="Grouping of the costs.",
)
@click.option(
    "--idle-for",
    default="0",
    show_default=True,
    type=formatting.span_of(COSTS, "idle_for"),
    metavar="TIME",
    help="Only pods whose GPUs have been idle this long (30m, 1h, 1d12h); 0 for every holder.",
)
@namespace_option
@click.option(
    "--some", is_flag=True, help="With --idle-for, include pods that use some of their GPUs."
)
@click.option(
    "--since", default=0, type=formatting.span_of(USAGE, "since"), metavar="TIME",
    help="Count all pods of this period (1d, 7d), ended ones included, by namespace, kind of owner "
    "and model.",
)  # fmt: skip
@formatting.number_option(COSTS, "limit", "Largest number of groups to show.")
def command(
    session: Session,
    *,
    by: str,
    idle_for: int,
    namespace: str | None,
    some: bool,
    since: int,
    limit: int,
) -> None:
    """Show the cost of GPUs since their pods were bound; the highest idle cost first.

    COST IDLE covers the time since the currently idle GPUs were last used, COST USED the rest.
    Costs need a price list in the extender's settings (prices); without it only GPU-hours are
    shown.
    """
    if since:
        _refuse_with_since("by", "idle_for", "some", "limit")
        used = session.client.usage(since_seconds=since, namespace=namespace)
        session.show(used, lambda: _render_usage(used))
        return
    answer = session.client.costs(
        by=by, idle_for_seconds=idle_for, namespace=namespace, some=some, limit=limit
    )
    session.show(answer, lambda: _render(answer))


def _refuse_with_since(*names: str) -> None:
    """Refuse options that have no effect with --since.

    Raises:
        UsageError: one of them was given.
    """
    source = click.get_current_context().get_parameter_source
    given = [name for name in names if source(name) is ParameterSource.COMMANDLINE]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"--since lists all groups of all pods: leave out {options}")


def _render(answer: Costs) -> RenderableType:
    parts: list[RenderableType | None] = []
    if answer.costs:
        has_mig = any(one.mig_instances for one in answer.costs)
        columns = [
            answer.by.upper(),
            *(name for name in _COLUMNS if name != formatting.IDLE_MIG or has_mig),
        ]
        rows = (
            _row(one, answer.by, has_mig=has_mig, is_priced=answer.is_priced)
            for one in answer.costs
        )
        parts.append(sheet(columns + (_COST_COLUMNS if answer.is_priced else []), rows))
        parts.append(line(f"in all {formatting.summed(answer.sums)}"))
    else:
        parts.append(line(formatting.no_holders(answer.idle_for_seconds)))
    left = answer.total - len(answer.costs)
    notes = {
        "and {} more (--limit)": left,
        "pods for whose GPUs no price is known: {}": answer.sums.unpriced_pods * answer.is_priced,
        "pods left out, because you may not read them: {}": answer.hidden_pods,
        "pods left out, because no source reports their GPUs: {}": answer.unknown,
    }
    parts += [line(text.format(count), "dim") for text, count in notes.items() if count > 0]
    if not answer.is_priced:
        parts.append(line("no cost: the extender has no price list (prices)", "dim"))
    return stack(parts)


def _render_usage(answer: Usage) -> RenderableType:
    since = formatting.since(answer.since)
    if not answer.usage:
        return line(f"no GPU-hours are recorded since {since}; they are added up once a minute")
    columns = ["NAMESPACE", "OWNER KIND", "MODEL", ">GPU-HOURS", ">IDLE HOURS"]
    columns += [">COST", ">COST IDLE"] if answer.is_priced else []
    rows = [
        [one.namespace, one.owner_kind, one.model, *_figures(one, is_priced=answer.is_priced)]
        for one in answer.usage
    ]
    sums = _figures(answer.sums, is_priced=answer.is_priced)
    total = [f"in all since {since}", "", "", *sums]
    return stack([sheet(columns, [*rows, total])])


def _figures(one: UsageFigures, *, is_priced: bool) -> list[Cell]:
    hours: list[Cell] = [f"{one.gpu_hours:.1f}", f"{one.gpu_hours_idle:.1f}"]
    costs: list[Cell] = [formatting.money(one.cost), formatting.money(one.cost_idle)]
    return [*hours, *(costs if is_priced else [])]


def _row(one: CostGroup, by: str, *, has_mig: bool, is_priced: bool) -> list[Cell]:
    name = {
        "pod": one.pod or formatting.NOTHING,
        "owner": f"{one.namespace}/{one.owner or formatting.NOTHING}",
        "namespace": one.namespace,
    }[by]
    row: list[Cell] = [
        name,
        str(one.pods),
        *formatting.idle_of(one, has_mig=has_mig),
        f"{one.gpu_hours:.1f}",
        f"{one.gpu_hours_idle:.1f}",
    ]
    if is_priced:
        row += [
            formatting.money(one.cost),
            formatting.money(one.cost_used),
            formatting.money(one.cost_idle),
        ]
    return row
