"""`idlegpu nodes`: list the nodes with GPUs."""

import click
from rich.table import Table

from extender.cli import formatting
from extender.cli.remote.answers import Node, Nodes
from extender.cli.session import Session, connected
from extender.cli.tables import Cell, sheet, word

COLUMNS = ["NODE", "MODEL", ">IDLE", ">HELD", ">ACTIVITY", ">MEMORY", "STATUS"]
MIG_COLUMN = ">MIG IDLE"
WIDE_COLUMNS = [">ASSUMED", ">FAILED EARLY", "DRIVER", "RESOURCES", "PODS"]


@click.command("nodes")
@connected
@click.option(
    "--idle", "only_idle", is_flag=True, help="Only nodes with idle GPUs or MIG instances."
)
@click.option("--model", default="", help="Only nodes whose GPU model contains this text.")
def command(session: Session, *, only_idle: bool, model: str) -> None:
    """List nodes with GPUs: idle GPUs, activity, memory, status.

    IDLE: GPUs that are idle by their readings, of all GPUs (a GPU in MIG mode is idle if all its
    instances are). MIG IDLE: idle MIG instances, if there are any. HELD: GPUs that pods hold, of
    the allocatable ones, as the API server counts. ACTIVITY and MEMORY: means over the node's GPUs.
    STATUS: as kubectl shows it.
    """
    answer = session.client.nodes()
    answer.nodes = [
        node
        for node in answer.nodes
        if model.lower() in node.model.lower()
        and (node.gpus_idle or node.mig_instances_idle or not only_idle)
    ]
    session.show(answer, lambda: _sheet(answer, is_wide=session.is_wide))
    if not answer.nodes:
        click.echo("no such nodes", err=True)
        click.get_current_context().exit(1)


def _sheet(answer: Nodes, *, is_wide: bool) -> Table:
    has_instances = any(node.mig_instances_total for node in answer.nodes)
    at = COLUMNS.index(">IDLE") + 1
    columns = [*COLUMNS[:at], *([MIG_COLUMN] if has_instances else []), *COLUMNS[at:]]
    rows = []
    for node in answer.nodes:
        row = _row(node, is_wide=is_wide)
        if has_instances:
            row.insert(at, _instances(node))
        rows.append(row)
    return sheet(columns + (WIDE_COLUMNS if is_wide else []), rows)


def _instances(node: Node) -> str:
    total = node.mig_instances_total
    return f"{node.mig_instances_idle}/{total}" if total else formatting.NOTHING


def _row(node: Node, *, is_wide: bool) -> list[Cell]:
    used = sum(counts.held for counts in node.resources.values())
    offered = sum(counts.allocatable for counts in node.resources.values())
    row: list[Cell] = [
        node.name,
        formatting.model(node.model),
        f"{node.gpus_idle}/{node.gpus_total}",
        f"{used}/{offered}",
        formatting.percent(node.utilization_mean_ratio),
        formatting.percent(node.memory_used_mean_ratio),
        word(status_of(node)),
    ]
    if is_wide:
        assumed = sum(counts.assumed for counts in node.resources.values())
        row += [
            str(assumed),
            str(node.early_failures),
            node.driver_version or formatting.UNKNOWN,
            formatting.resources({name: one.allocatable for name, one in node.resources.items()}),
            formatting.listed(node.pods),
        ]
    return row


def status_of(node: Node) -> str:
    """Return the node's status in kubectl's words."""
    status = "Ready" if node.is_ready else "NotReady"
    return f"{status},SchedulingDisabled" if node.is_unschedulable else status
