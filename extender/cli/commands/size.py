"""`idlegpu size`: propose the GPUs of a task."""

import shlex

import click
from rich.console import RenderableType
from rich.text import Text

from extender.cli.manifests import Object, load_documents, owner_of, pods_of
from extender.cli.name_completion import NAMESPACES
from extender.cli.remote.errors import ClientError, Failure
from extender.cli.session import FILE, Session, connected, show_table
from extender.cli.sizing import GIB, Certainty, Measured, Proposal, propose, texts_in
from extender.cli.tables import line, stack

WORDS = {
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

    What similar pods were measured to use counts first, then options of the command such as
    --tensor-parallel-size, then the description. It says what it rests on, and how sure it is.
    """
    if not (file or image or owner or text):
        raise click.UsageError("say what to size: -f FILE, --image, --owner or --text")
    documents = load_documents(file) if file else []
    pods = [(pod, document) for document in documents for pod in pods_of(document)]
    pod: Object = {"spec": {"containers": [{"image": image} if image else {}]}}
    if pods:
        pod, document = pods[0]
        owner = owner or owner_of(document)
    pod["metadata"] = {"namespace": namespace} | pod.get("metadata", {})
    measured = _measured(session, pod, owner) if pods or image or owner else None
    found = propose(text, " ".join(texts_in(documents)), measured)
    if session.is_table:
        show_table(session.console, _render(found))
    else:
        session.write(found)


def _measured(session: Session, pod: Object, owner: str) -> Measured | None:
    """Ask the extender what similar pods used; without an answer print a note and return None."""
    kind, _, name = owner.partition("/")
    if owner and not (kind and name):
        raise click.BadParameter("must be KIND/NAME, such as Deployment/chat", param_hint="--owner")
    try:
        answer = session.client.size(pod, owner=f"{kind} {name}" if owner else None)
    except ClientError as error:
        if error.failure is not Failure.UNREACHABLE:
            raise
        click.echo(f"similar pods are not known: {error}", err=True)
        return None
    used = answer.measured
    if used is None:
        return None
    return Measured(by=used.by, pods=used.pods, memory_bytes=used.memory_bytes)


def _render(found: Proposal) -> RenderableType:
    what = f"{found.gpus} GPU{'s' * (found.gpus > 1)}"
    what = "a share of a GPU" if found.is_share_enough else what
    memory = f", {found.memory_bytes // GIB} GiB on each" if found.memory_bytes else ""
    wishes = {"gpu-memory": f"{found.memory_bytes // GIB}Gi" if found.memory_bytes else ""}
    wishes["prefer-models"] = ",".join(found.models)
    options = [f"--gpus {found.gpus}"]
    options += [f"--memory {wishes['gpu-memory']}"] if wishes["gpu-memory"] else []
    options += [f"--model {shlex.quote(wishes['prefer-models'])}"] if found.models else []
    return stack(
        [
            line(f"{what}{memory}: {WORDS[found.certainty]}", "bold"),
            *(line(reason, "dim") for reason in found.because),
            Text(""),
            *(line(f"idlegpu.io/{name}: {value}") for name, value in wishes.items() if value),
            line(f"idlegpu run {' '.join(options)} -- CMD"),
        ]
    )
