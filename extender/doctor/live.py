"""Gathers facts from a cluster and an extender; what one may not read is noted, and left out."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from extender.client import Client
from extender.core.untyped import mapping_of, objects_of, text_of
from extender.doctor.checks.layouts import MANAGER_WORDS
from extender.doctor.checks.neighbours import AUTOSCALERS
from extender.doctor.checks.nodes import DRA_WORDS, MPS_WORDS, PLUGIN_WORDS
from extender.doctor.exposition import parse_exposition
from extender.doctor.facts import Object
from extender.doctor.objects import (
    AGENT_WORDS,
    EXPORTER_WORDS,
    asked,
    is_called,
    is_running,
    name_of,
    parse_time,
)
from extender.doctor.pile import Pile
from extender.doctor.rights import ask_rights
from extender.remote.cluster import Cluster
from extender.remote.errors import ClientError, Failure

PAGE: Final = "500"
MOST_PAGES: Final = 1000
"""Of one list: half a million objects."""
LISTS: Final = {
    "nodes": ("Node", "/api/v1/nodes"),
    "pods": ("Pod", "/api/v1/pods"),
    "daemon_sets": ("DaemonSet", "/apis/apps/v1/daemonsets"),
}
CONFIG_WORDS: Final = (
    *("kube-scheduler", "idlegpu", "nvidia-device-plugin", "nvidia-gpu-device-plugin"),
    *("dcgm-exporter", "cluster-autoscaler"),
)
"""Pods in whose namespaces ConfigMaps are looked at."""
KEPT_WORDS: Final = (
    *CONFIG_WORDS,
    *PLUGIN_WORDS,
    *DRA_WORDS,
    *MPS_WORDS,
    *MANAGER_WORDS,
    *AUTOSCALERS,
    *EXPORTER_WORDS,
    *AGENT_WORDS,
)
"""Pods that the checks look at although they ask for no GPUs; of a large cluster's, most go."""
SECRETS: Final = ("idlegpu-extender-tls", "idlegpu-kube-scheduler-tls", "idlegpu-ca")
EXPORTER_PORT: Final = 9400
MOST_EXPORTERS: Final = 2
"""So many exporters are asked: they are of one DaemonSet, as a rule."""

NO_SCHEDULER: Final = (
    "no readable ConfigMap holds one (kubeadm has it in a file on the control plane): give the "
    "file, idlegpu doctor FILE"
)


def gather_cluster(pile: Pile, cluster: Callable[[], Cluster], account: str) -> None:
    """Add what an API server tells.

    Args:
        pile: where it goes.
        cluster: returns the API server, or raises ClientError.
        account: the extender's, `namespace/name`.
    """
    try:
        server = cluster()
    except ClientError as error:
        names = (*LISTS, "config_maps", "schedulers", "exporter", "certificates", "rights")
        pile.missing |= dict.fromkeys(names, str(error))
        return
    found: dict[str, list[Object]] = {}
    for name, (kind, path) in LISTS.items():
        try:
            found[name] = [item for item in _pages(server, path) if _is_kept(kind, item)]
            pile.add_list(kind, found[name])
        except ClientError as error:
            pile.missing[name] = str(error)
    pods, namespace = found.get("pods", []), account.partition("/")[0]
    _add_config_maps(pile, server, pods, namespace)
    _add_secrets(pile, server, namespace)
    _add_exporters(pile, server, pods)
    try:
        pile.rights = ask_rights(server, account, pile.facts(0.0).settings or {})
    except ClientError as error:
        pile.missing["rights"] = str(error)


def _is_kept(kind: str, item: Object) -> bool:
    return kind != "Pod" or bool(asked(item)) or is_called(item, KEPT_WORDS)


def _pages(server: Cluster, path: str) -> Iterator[Object]:
    """Yield every object of a collection.

    Raises:
        ClientError: the API server does not give it, or not to its end.
    """
    params, tokens = {"limit": PAGE}, set[str]()
    while len(tokens) < MOST_PAGES:
        page = mapping_of(server.get(path, params))
        yield from objects_of(page.get("items"))
        rest = text_of(mapping_of(page.get("metadata")).get("continue"))
        if not rest:
            return
        if rest in tokens:
            break
        tokens.add(rest)
        params = {"limit": PAGE, "continue": rest}
    raise ClientError(f"cannot list {path}: it does not end", Failure.FAULT)


def _add_config_maps(pile: Pile, server: Cluster, pods: list[Object], own: str) -> None:
    """Add the ConfigMaps of the namespaces in which schedulers, plugins and we are."""
    namespaces = {"kube-system", own} | {
        text_of(mapping_of(pod.get("metadata")).get("namespace"))
        for pod in pods
        if is_called(pod, CONFIG_WORDS)
    }
    refused = ""
    for namespace in sorted(namespaces - {""}):
        path = f"/api/v1/namespaces/{namespace}/configmaps"
        try:
            pile.add_list("ConfigMap", list(_pages(server, path)))
        except ClientError as error:
            refused = str(error)
    if refused:
        pile.missing["config_maps"] = refused
    pile.missing["schedulers"] = f"{refused}; {NO_SCHEDULER}" if refused else NO_SCHEDULER


def _add_secrets(pile: Pile, server: Cluster, namespace: str) -> None:
    """Add the certificates of our Secrets: each is read by its name, and no other."""
    why = f"no Secret {' or '.join(SECRETS)} in {namespace}"
    for name in SECRETS:
        try:
            secret = mapping_of(server.get(f"/api/v1/namespaces/{namespace}/secrets/{name}"))
        except ClientError as error:
            if error.failure is not Failure.NOT_FOUND:
                why = str(error)
            continue
        pile.add_list("Secret", [secret])
    pile.missing["certificates"] = why


def _add_exporters(pile: Pile, server: Cluster, pods: list[Object]) -> None:
    """Add what some exporters export, through the API server's proxy."""
    pile.missing["exporter"] = "no pod of dcgm-exporter runs"
    running = (pod for pod in pods if is_called(pod, EXPORTER_WORDS) and is_running(pod))
    for _, pod in zip(range(MOST_EXPORTERS), running, strict=False):
        namespace = text_of(mapping_of(pod.get("metadata")).get("namespace"))
        where = f"/api/v1/namespaces/{namespace}/pods/{name_of(pod)}:{EXPORTER_PORT}"
        try:
            pile.add_samples(parse_exposition(server.text(f"{where}/proxy/metrics")))
        except (ClientError, ValueError) as error:
            pile.missing["exporter"] = str(error)


def gather_extender(pile: Pile, client: Callable[[], Client], at: float) -> None:
    """Add what an extender tells.

    Args:
        pile: where it goes.
        client: returns one, or raises ClientError.
        at: the time that the facts are of.
    """
    paths = {
        "degraded": "/readyz",
        "unasked": "/v1/unasked",
        "devices": "/v1/gpus",
        "sources": "/v1/nodes",
    }
    try:
        extender = client()
    except ClientError as error:
        pile.missing |= dict.fromkeys((*paths, "metrics"), str(error))
        return
    for name, path in paths.items():
        try:
            pile.add_answer(name, extender.get(path))
        except ClientError as error:
            pile.missing[name] = str(error)
    try:
        pile.add_samples(parse_exposition(extender.text("/metrics")))
    except (ClientError, ValueError) as error:
        pile.missing["metrics"] = str(error)
    try:
        told: Any = extender.get("/v1/holders", {"limit": 1})
    except ClientError:
        return
    then = parse_time(mapping_of(told).get("at"))
    if then is not None:
        pile.extender_at = then + at - time.time()
