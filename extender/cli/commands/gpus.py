"""`idlegpu gpus`: list GPUs."""

import click
from rich.console import RenderableType

from extender.answers.fleet import ForeignProcessAnswer, Gpu
from extender.cli import formatting
from extender.cli.session import NODES, Session, connected
from extender.cli.tables import Cell, sheet, word

_COLUMNS = ["GPU", "MODEL", ">ACTIVITY", ">MEMORY GiB", "?>°C", "STATE", "TENANTS"]
_WIDE_COLUMNS = [">W", ">SHARES", ">ASSUMED", "SOURCE", ">AGE", "WHY", "UUID"]
_PROCESSES_COLUMN = "_PROCESSES"
_HELD_IDLE = "held idle"
STATES = ("idle", _HELD_IDLE, "busy", "stale", "unknown", "unhealthy", "excluded", "foreign")


@click.command("gpus")
@connected
@click.argument("node", required=False, shell_complete=NODES)
@click.option("--state", type=click.Choice([state.replace(" ", "-") for state in STATES]),
              help="Only GPUs in this state.")  # fmt: skip
@click.option("--model", default="", help="Only GPUs whose model contains this text.")
def command(session: Session, *, node: str | None, state: str | None, model: str) -> None:
    """List GPUs of the cluster, or of NODE: activity, memory, state, tenants.

    A GPU's name is NODE::INDEX. Held idle: idle although a pod holds it. PROCESSES: processes that
    use a GPU although their pod, if any, does not hold it, as reported by the agent; shown to
    callers who may read the pods of all namespaces. -o wide adds the reason for its state, the
    source of its readings, SHARES (held and offered) and ASSUMED (pods that no reading shows yet).
    """
    answer = session.client.gpus(node)
    answer.gpus = [
        gpu
        for gpu in answer.gpus
        if state in {None, state_of(gpu).replace(" ", "-")} and model.lower() in gpu.model.lower()
    ]
    session.show(answer, lambda: table(answer.gpus, is_wide=session.is_wide))
    if not answer.gpus:
        click.echo("no such GPUs", err=True)
        click.get_current_context().exit(1)


def state_of(gpu: Gpu) -> str:
    """Return a GPU's state; an idle GPU that a pod holds is `held idle`, as in `idlegpu nodes`."""
    return _HELD_IDLE if gpu.state == "idle" and gpu.replicas_used else gpu.state


def table(gpus: list[Gpu], *, is_wide: bool) -> RenderableType:
    """Format GPUs as a table."""
    has_processes = any(gpu.foreign_processes for gpu in gpus)
    columns = [*_COLUMNS, _PROCESSES_COLUMN] if has_processes else _COLUMNS
    rows = (_row(gpu, is_wide=is_wide, has_processes=has_processes) for gpu in gpus)
    return sheet(columns, rows, _WIDE_COLUMNS if is_wide else ())


def _row(gpu: Gpu, *, is_wide: bool, has_processes: bool) -> list[Cell]:
    profile = f" {gpu.mig_profile}" if gpu.mig_profile else ""
    row: list[Cell] = [
        gpu.name,
        (gpu.model or formatting.UNKNOWN) + profile,
        formatting.percent(gpu.utilization_ratio),
        _memory(gpu),
        formatting.UNKNOWN if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f}",
        word(state_of(gpu)),
        formatting.listed(gpu.tenants)
        if gpu.tenants or not gpu.replicas_used
        else formatting.UNKNOWN,
    ]
    if has_processes:
        row.append("; ".join(map(process, gpu.foreign_processes)) or formatting.NOTHING)
    if is_wide:
        row += [
            formatting.UNKNOWN if gpu.power_watts is None else f"{gpu.power_watts:.0f}",
            f"{gpu.replicas_used}/{gpu.replicas}",
            str(gpu.assumed),
            gpu.source,
            formatting.span(gpu.age_seconds),
            gpu.why,
            gpu.uuid or formatting.UNKNOWN,
        ]
    return row


def process(one: ForeignProcessAnswer) -> str:
    """Describe a process that uses a GPU without holding it."""
    place = f"in pod {one.pod}" if one.pod else "outside Kubernetes"
    parts = [
        f"{formatting.gib(one.memory_bytes)} GiB by {one.name or 'a process'}",
        f"PID {one.pid}",
        f"{place} ({one.container})" if one.container else place,
        f"since {formatting.since(one.started_at)}" if one.started_at else "",
    ]
    return ", ".join(filter(None, parts))


def _memory(gpu: Gpu) -> str:
    """Format a GPU's used and total memory in GiB."""
    used = None
    if gpu.memory_used_ratio is not None and gpu.memory_total_bytes is not None:
        used = gpu.memory_used_ratio * gpu.memory_total_bytes
    return f"{formatting.gib(used)}/{formatting.gib(gpu.memory_total_bytes)}"
