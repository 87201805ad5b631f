"""`idlegpu run`: print or submit a stock Job that runs a command on GPUs."""

import re
from dataclasses import replace
from functools import partial
from typing import Any, Final

import click

from extender.cli.formatting import Whole
from extender.cli.manifests import (
    DEFAULT_SCHEDULER,
    HOLD,
    IMAGE,
    PATHS,
    GpuJob,
    Object,
    name_for,
    only_scheduler,
    unique,
)
from extender.cli.session import NAMESPACES, NODES, Session, connected, dump
from extender.cli.transports import ClientError, Failure

_HURRY_SECONDS: Final = 3.0
"""Timeout for the optional request to the extender: a Job can be printed without its answer."""


def _checked_environment(
    _: click.Context, __: click.Parameter, value: tuple[str, ...]
) -> tuple[str, ...]:
    """Check environment variables.

    Raises:
        BadParameter: one is not NAME=VALUE.
    """
    for one in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", one, re.DOTALL):
            raise click.BadParameter(f"{one!r}: must be NAME=VALUE, such as EPOCHS=3")
    return value


@click.command("run")
@partial(connected, timeout=False)
@click.option("--gpus", default=1, show_default=True, type=Whole(1, 1024), help="Number of GPUs.")
@click.option(
    "--resource", default="nvidia.com/gpu", show_default=True, metavar="NAME", help="GPU resource."
)
@click.option("--memory", metavar="QUANTITY", help="Memory needed on each GPU, such as 20Gi.")
@click.option("--model", metavar="MODELS", help="Models to prefer, such as H100,A100.")
@click.option("--require-model", metavar="MODELS", help="Models to accept, and no other.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="NODE[::GPU,...]",
    help="Node, and GPUs to prefer on it, such as gpu-1::0,2; repeat it for one Job per node.",
)
@click.option(
    "--strategy", type=click.Choice(["auto", "spread", "pack"]), help="Placement strategy."
)
@click.option("--require-idle", is_flag=True, help="Wait for GPUs known to be idle.")
@click.option("--image", default=IMAGE, show_default=True, help="The container's image.")
@click.option("--env", "environment", multiple=True, metavar="NAME=VALUE",
              callback=_checked_environment,
              help="Environment variable; repeatable.")  # fmt: skip
@click.option("--shm", metavar="QUANTITY", help="Size of /dev/shm, such as 16Gi; part of the RAM.")
@click.option("--node", default="", metavar="NAME", shell_complete=NODES, help="Only this node.")
@click.option("--timeout", "longest", default="", metavar="DURATION",
              help="Time limit, such as 90m or 12h, after which the run is stopped.")  # fmt: skip
@click.option("--cpu", metavar="QUANTITY", help="CPU, such as 8.")
@click.option("--ram", metavar="QUANTITY", help="Main memory, such as 64Gi.")
@click.option(
    "--scheduler",
    default="",
    metavar="NAME",
    help="schedulerName; unless set, the one that calls the extender, else the cluster's default.",
)
@click.option("--name", default="", help="Name; made from the command unless set.")
@click.option(
    "-n",
    "--namespace",
    shell_complete=NAMESPACES,
    default="",
    metavar="NAME",
    help="Namespace; that of the kubeconfig unless set.",
)
@click.option("--hold", is_flag=True, help="Create an idle pod to work in.")
@click.option(
    "--apply",
    "is_applied",
    is_flag=True,
    help="Submit the object instead of printing it; print only its name.",
)
@click.argument("arguments", nargs=-1, metavar="-- CMD [ARG]...",
                type=click.UNPROCESSED)  # fmt: skip
def command(
    session: Session,
    *,
    targets: tuple[str, ...],
    environment: tuple[str, ...],
    longest: str,
    scheduler: str,
    name: str,
    namespace: str,
    hold: bool,
    is_applied: bool,
    arguments: tuple[str, ...],
    **wishes: Any,  # noqa: ANN401 - the options that are named as attributes of `GpuJob`
) -> None:
    """Print a Job that runs CMD on GPUs; with --apply submit it.

    It is a stock Job: idlegpu needs only resources, annotations and schedulerName.
    """
    words = list(arguments or (HOLD if hold else ()))
    if hold and arguments:
        raise click.UsageError("--hold takes no command: leave out CMD")
    if not words:
        raise click.UsageError(
            "state the command to run after --, or use --hold for an interactive pod"
        )
    base = name or unique("hold" if hold else name_for(words))
    jobs = [
        GpuJob(
            **wishes,
            command=words,
            env=dict(one.split("=", 1) for one in environment),
            target=target,
            timeout_seconds=_seconds(longest) if longest else None,
            name=f"{base}-{number}" if len(targets) > 1 else base,
            namespace=namespace,
            is_held=hold,
        )
        for number, target in enumerate(targets or (None,))
    ]
    if not scheduler:
        scheduler = _choose_scheduler(session)
    items = [replace(job, scheduler=scheduler).manifest() for job in jobs]
    if is_applied:
        for item in items:
            _apply(session, item, namespace)
        return
    document = items[0] if len(items) == 1 else {"apiVersion": "v1", "kind": "List", "items": items}
    click.echo(dump(document, "json" if session.output == "json" else "yaml"), nl=False)


def _seconds(text: str) -> int:
    """Parse a duration.

    Raises:
        BadParameter: it is not a duration.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", text)
    if match is None:
        raise click.BadParameter(
            f"{text!r}: must be a number and s, m, h or d, such as 90m", param_hint="--timeout"
        )
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]


def _choose_scheduler(session: Session) -> str:
    """Choose and print the schedulerName: the only one that calls the extender, else ""."""
    try:
        callers = session.with_timeout(_HURRY_SECONDS).client.bypassed().schedulers
        known = f"schedulers that call idlegpu: {', '.join(callers) or 'none known'}"
    except ClientError as error:
        is_refused = error.failure is Failure.REFUSED
        callers, known = [], str(error) if is_refused else "idlegpu does not answer"
    chosen = only_scheduler(callers)
    click.echo(
        f"{chosen or DEFAULT_SCHEDULER} will place it (--scheduler NAME for another): {known}",
        err=True,
    )
    return chosen


def _apply(session: Session, item: Object, namespace: str) -> None:
    """Submit an object to the API server, and print the next steps."""
    where = namespace or session.cluster.namespace
    kind = item["kind"]
    made = session.cluster.create(PATHS[kind].format(where), item)
    name = made["metadata"]["name"]
    if not session.is_table:
        session.write(made)
        return
    click.echo(f"{kind.lower()}/{name}")
    if kind == "Pod":
        click.echo(f"work in it: kubectl -n {where} exec -it {name} -- bash", err=True)
        click.echo(f"free its GPUs: kubectl -n {where} delete pod {name}", err=True)
        click.echo(f"where it goes, and why: idlegpu explain {where}/{name}", err=True)
    else:
        click.echo(f"its output: kubectl -n {where} logs -f job/{name}", err=True)
        click.echo(
            "where its pod goes: idlegpu decisions; while it waits: idlegpu pending", err=True
        )
