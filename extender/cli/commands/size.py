"""`idlegpu size`: propose the GPUs of a task."""

import shlex

import click
from rich.console import RenderableType
from rich.text import Text

from extender.cli.manifests import load_documents, propose_for
from extender.cli.session import FILE, NAMESPACES, Session, connected, show_table
from extender.cli.tables import line, stack
from extender.core.quantity import GIB
from extender.core.sizing import NODE_GPUS, Certainty, Proposal

_WORDS = {
    Certainty.MEASURED: "measured from similar pods",
    Certainty.STATED: "stated by the command",
    Certainty.ESTIMATED: "an estimate from the size of the model",
    Certainty.GUESSED: "a guess: name the task and the size of the model for a better one",
}


@click.command("size")
@connected
@click.option("-f", "--file", "file", type=FILE, metavar="FILE",
              help="Manifest of the task (- for standard input).")  # fmt: skip
@click.option("--image", default="", help="Image of the task, to find similar pods.")
@click.option("--owner", default="", metavar="KIND/NAME",
              help="Controller of similar pods, such as Deployment/chat.")  # fmt: skip
@click.option("--text", default="", help='Description, such as "fine-tune a 7 billion model".')
@click.option("-n", "--namespace", default="default", show_default=True, metavar="NAME",
              shell_complete=NAMESPACES,
              help="Namespace of similar pods.")  # fmt: skip
def command(
    session: Session, *, file: str | None, image: str, owner: str, text: str, namespace: str
) -> None:
    """Propose number, memory, share and models of GPUs for a task.

    The measured use of similar pods counts first, then options of the command such as
    --tensor-parallel-size, then the description. The output states the basis of the proposal and
    its certainty.
    """
    if not (file or image or owner or text):
        raise click.UsageError("state the task to size: -f FILE, --image, --owner or --text")
    found = propose_for(
        lambda pod, of: session.client.measured(pod, owner=of),
        documents=load_documents(file) if file else (),
        text=text,
        image=image,
        owner=owner,
        namespace=namespace,
        on_unreachable=lambda error: click.echo(f"similar pods are not known: {error}", err=True),
    )
    if session.is_table:
        show_table(session.console, _render(found))
    else:
        session.write(found)


def _render(found: Proposal) -> RenderableType:
    what = f"{found.gpus} GPU{'s' * (found.gpus > 1)}"
    what = "a share of a GPU" if found.is_share_enough else what
    memory = f", {found.memory_bytes // GIB} GiB on each" if found.memory_bytes else ""
    wishes = {"gpu-memory": f"{found.memory_bytes // GIB}Gi" if found.memory_bytes else ""}
    wishes["prefer-models"] = ",".join(found.models)
    options = [f"--gpus {min(found.gpus, NODE_GPUS)}"]
    options += [f"--memory {wishes['gpu-memory']}"] if wishes["gpu-memory"] else []
    options += [f"--model {shlex.quote(wishes['prefer-models'])}"] if found.models else []
    return stack(
        [
            line(f"{what}{memory}: {_WORDS[found.certainty]}", "bold"),
            *(line(reason, "dim") for reason in found.because),
            Text(""),
            *(line(f"idlegpu.io/{name}: {value}") for name, value in wishes.items() if value),
            line(f"idlegpu run {' '.join(options)} -- CMD"),
        ]
    )
