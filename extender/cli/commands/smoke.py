"""`idlegpu smoke`: run nvidia-smi on a node, in a pod with one GPU."""

import time
from urllib.parse import quote

import click

from extender.cli.cluster import Cluster
from extender.cli.formatting import Span, clean, span
from extender.cli.manifests import IMAGE, PATHS, Object, gpu_pod, pod_of, unique
from extender.cli.session import NAMESPACES, NODES, Session, connected, dump
from extender.cli.transports import ClientError, Failure

_POLL_SECONDS = 0.5


@click.command("smoke")
@connected
@click.argument("node", shell_complete=NODES)
@click.option(
    "--resource", default="nvidia.com/gpu", show_default=True, metavar="NAME", help="GPU resource."
)
@click.option("--image", default=IMAGE, show_default=True, help="The container's image.")
@click.option(
    "-n",
    "--namespace",
    shell_complete=NAMESPACES,
    default="",
    metavar="NAME",
    help="Namespace of the pod; that of the kubeconfig unless set.",
)
@click.option(
    "--wait",
    default="3m",
    show_default=True,
    type=Span(),
    metavar="TIME",
    help="How long to wait for the pod to finish.",
)
@click.option("--keep", is_flag=True, help="Do not delete the pod.")
@click.option(
    "--dry-run", is_flag=True, help="Run nothing: print the pod, as YAML unless -o is json."
)
def command(
    session: Session,
    *,
    node: str,
    resource: str,
    image: str,
    namespace: str,
    wait: int,
    keep: bool,
    dry_run: bool,
) -> None:
    """Run nvidia-smi on NODE in a pod with one GPU, print its output, and delete the pod.

    kube-scheduler places the pod, so it waits while all GPUs of the node are in use. Exits with
    status 1 if the pod did not run or failed. -o json or yaml prints the outcome and the output as
    a document.
    """
    item = _smoke_pod(node, resource=resource, image=image)
    if dry_run:
        click.echo(dump(item, "json" if session.output == "json" else "yaml"), nl=False)
        return
    cluster = session.cluster
    _require_node(cluster, node)
    where = namespace or cluster.namespace
    made = cluster.create(PATHS["Pod"].format(where), item)
    name = made["metadata"]["name"]
    path = f"{PATHS['Pod'].format(where)}/{name}"
    click.echo(f"pod {where}/{name} should run on {node} within {span(wait)} (--wait)", err=True)
    try:
        ended = _wait(cluster, path, wait)
        output = _logs(cluster, path, ended)
    finally:
        if not keep:
            cluster.delete(path)
    has_worked = ended["status"].get("phase") == "Succeeded"
    if session.is_table:
        click.echo(output.rstrip("\n"))
    else:
        session.write(
            {
                "node": node,
                "pod": f"{where}/{name}",
                "succeeded": has_worked,
                "why": None if has_worked else _why(ended),
                "output": output,
            }
        )
    if not has_worked:
        raise ClientError(f"nvidia-smi failed on {node}: {_why(ended)}", Failure.NOT_FOUND)


def _require_node(cluster: Cluster, node: str) -> None:
    """Refuse a node that does not exist; without the right to read nodes the pod will show it.

    Raises:
        ClientError: the node does not exist, or the API server does not answer.
    """
    try:
        cluster.get(f"/api/v1/nodes/{quote(node, safe='')}")
    except ClientError as error:
        if error.failure is Failure.NOT_FOUND:
            raise ClientError(
                f"node {node!r} does not exist: `kubectl get nodes` lists the names", error.failure
            ) from error
        if error.failure is not Failure.REFUSED:
            raise


def _smoke_pod(node: str, *, resource: str, image: str) -> Object:
    """Build a pod that runs nvidia-smi on one GPU of a node and tolerates all taints."""
    template = gpu_pod(
        ["nvidia-smi"], image=image, limits={resource: "1"}, annotations={}, scheduler=""
    )
    spec = template["spec"]
    spec["tolerations"] = [{"operator": "Exists"}]
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    spec["affinity"] = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchFields": [field]}]
            }
        }
    }
    return pod_of(template, name=unique("idlegpu-smoke"), namespace="")


def _wait(cluster: Cluster, path: str, seconds: int) -> Object:
    """Poll until the pod has finished, and return it."""
    until = time.monotonic() + seconds
    while True:
        pod: Object = cluster.get(path)
        if pod["status"].get("phase") in {"Succeeded", "Failed"}:
            return pod
        if time.monotonic() >= until:
            raise ClientError(
                f"the pod has not ended within {span(seconds)} (--wait): {_why(pod)}",
                Failure.NOT_FOUND,
            )
        time.sleep(_POLL_SECONDS)


def _logs(cluster: Cluster, path: str, pod: Object) -> str:
    """Return the pod's output, or the reason why the kubelet cannot return it."""
    try:
        text = cluster.text(f"{path}/log")
    except ClientError as error:
        return f"its output cannot be read: {error}"
    return "\n".join(map(clean, text.splitlines())) or _why(pod)


def _why(pod: Object) -> str:
    """Return the reason in the pod's status for not running, or its result after it finished."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or ():
        for state in (container.get("state") or {}).values():
            text = state.get("message") or state.get("reason")
            if text:
                return clean(str(text))
    for condition in status.get("conditions") or ():
        if condition.get("status") == "False" and condition.get("message"):
            return clean(str(condition["message"]))
    return clean(str(status.get("message") or f"it is {status.get('phase', 'unknown')}"))
