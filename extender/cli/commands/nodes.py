"""`idlegpu nodes`: list the nodes with GPUs."""

from collections.abc import Mapping

import click
from rich.console import RenderableType
from rich.text import Text

from extender.answers.fleet import Node, Nodes, StateCounts
from extender.cli import formatting
from extender.cli.session import Session, connected
from extender.cli.tables import Cell, sheet, word

_STATUS_COLUMN = "STATUS"
_WIDE_COLUMNS = [">HELD", ">ASSUMED", ">FAILED EARLY", "DRIVER", "RESOURCES", "PODS"]
_KINDS = {
    "idle": "green",
    "held_idle": "yellow",
    "busy": "",
    "foreign": "magenta",
    "unhealthy": "bold red",
    "excluded": "red",
    "unknown": "yellow",
}
"""Columns of counts, by field of the answer, and their colors."""


@click.command("nodes")
@connected
@click.option(
    "--idle", "only_idle", is_flag=True, help="Only nodes with idle GPUs or MIG instances."
)
@click.option("--model", default="", help="Only nodes whose GPU model contains this text.")
def command(session: Session, *, only_idle: bool, model: str) -> None:
    """List nodes with GPUs, and count their GPUs by state; nodes with problems come first.

    Each GPU counts once: GPUS is the sum of the columns up to UNKNOWN. MIG instances have a
    separate row under their node. IDLE: idle according to readings, and no pod holds them. HELD
    IDLE: idle although a pod holds them. FOREIGN: a process outside Kubernetes uses them. EXCLUDED,
    shown if there are any: they work, but another GPU of their node has a fault that excludes the
    whole node. UNKNOWN: without fresh readings. ACTIVITY and MEMORY: means over the node. STATUS:
    as kubectl shows it, unless a node is only Ready. -o wide adds HELD: number of allocatable GPUs
    that pods hold, by the API server's count; ASSUMED: GPUs of pods whose binding
    is not visible yet; FAILED EARLY: owners whose pods failed there soon after their start.
    """
    answer = session.client.nodes()
    answer.nodes = [
        node
        for node in answer.nodes
        if model.lower() in node.model.lower()
        and (node.gpu_states.idle or node.mig_states.idle or not only_idle)
    ]
    answer.nodes.sort(key=lambda node: not _has_trouble(node))
    session.show(answer, lambda: _sheet(answer, is_wide=session.is_wide))
    if not answer.nodes:
        click.echo("no such nodes", err=True)
        click.get_current_context().exit(1)


def _sheet(answer: Nodes, *, is_wide: bool) -> RenderableType:
    has_status = any(_status_of(node) != "Ready" for node in answer.nodes)
    kinds = dict(_KINDS)
    if not any(node.gpu_states.excluded or node.mig_states.excluded for node in answer.nodes):
        del kinds["excluded"]
    counts = [f">{name.upper().replace('_', ' ')}" for name in kinds]
    columns = ["NODE", "MODEL", ">GPUS", *counts, "?>ACTIVITY", "?>MEMORY"]
    columns += [_STATUS_COLUMN] if has_status else []
    extra = [*([] if has_status else [_STATUS_COLUMN]), *_WIDE_COLUMNS] if is_wide else []
    rows = []
    for node in answer.nodes:
        states = [node.gpu_states] if node.gpu_states.total or not node.mig_states.total else []
        if node.mig_states.total:
            states.append(node.mig_states)
        for one in states:
            row = _row(node, one, kinds)
            if has_status or is_wide:
                row.append(word(_status_of(node)))
            if is_wide:
                row += _more(node)
            rows.append(row)
    return sheet(columns, rows, extra)


def _row(node: Node, states: StateCounts, kinds: Mapping[str, str]) -> list[Cell]:
    kind = " MIG" if states is node.mig_states else ""
    counted = [(getattr(states, name), style) for name, style in kinds.items()]
    return [
        node.name,
        (node.model or formatting.UNKNOWN) + kind,
        str(states.total),
        *(Text(str(count), style=style if count else "dim") for count, style in counted),
        formatting.percent(node.utilization_mean_ratio),
        formatting.percent(node.memory_used_mean_ratio),
    ]


def _more(node: Node) -> list[Cell]:
    counts = list(node.resources.values())
    held, offered = sum(one.held for one in counts), sum(one.allocatable for one in counts)
    return [
        f"{held}/{offered}",
        str(sum(one.assumed for one in counts)),
        str(node.early_failures),
        node.driver_version or formatting.UNKNOWN,
        formatting.resources({name: one.allocatable for name, one in node.resources.items()}),
        formatting.listed(node.pods),
    ]


def _has_trouble(node: Node) -> bool:
    """Return whether a node is not ready, or has a GPU that is foreign, unhealthy or unknown."""
    return not node.is_ready or any(
        one.foreign or one.unhealthy or one.unknown for one in (node.gpu_states, node.mig_states)
    )


def _status_of(node: Node) -> str:
    """Return the node's status in kubectl's words."""
    status = "Ready" if node.is_ready else "NotReady"
    return f"{status},SchedulingDisabled" if node.is_unschedulable else status
