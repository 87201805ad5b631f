"""Collect facts from a cluster and an extender; record unreadable ones and continue."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from extender.cli.client import Client
from extender.cli.cluster import Cluster
from extender.cli.doctor.checks.neighbours import AUTOSCALERS
from extender.cli.doctor.checks.nodes import DRA_WORDS, MANAGER_WORDS, MPS_WORDS, PLUGIN_WORDS
from extender.cli.doctor.fact_collector import FactCollector, parse_exposition
from extender.cli.doctor.facts import (
    AGENT_WORDS,
    EXPORTER_WORDS,
    Object,
    is_called,
    is_running,
    name_of,
    parse_time,
    requested_gpus,
)
from extender.cli.doctor.rights import review_rights
from extender.cli.transports import ClientError, Failure
from extender.core.untyped import mapping_of, objects_of, text_of

_PAGE: Final = "500"
_MOST_PAGES: Final = 1000
"""Page limit of one list: half a million objects."""
_LISTS: Final = {
    "nodes": ("Node", "/api/v1/nodes"),
    "pods": ("Pod", "/api/v1/pods"),
    "daemon_sets": ("DaemonSet", "/apis/apps/v1/daemonsets"),
    "claims": ("ResourceClaim", "/apis/resource.k8s.io/v1/resourceclaims"),
}
_CONFIG_WORDS: Final = (
    *("kube-scheduler", "idlegpu", "nvidia-device-plugin", "nvidia-gpu-device-plugin"),
    *("dcgm-exporter", "cluster-autoscaler"),
)
"""Words in names of pods whose namespaces are searched for ConfigMaps."""
_KEPT_WORDS: Final = (
    *_CONFIG_WORDS,
    *PLUGIN_WORDS,
    *DRA_WORDS,
    *MPS_WORDS,
    *MANAGER_WORDS,
    *AUTOSCALERS,
    *EXPORTER_WORDS,
    *AGENT_WORDS,
)
"""Words in names of pods without GPUs that checks need; other pods without GPUs are dropped."""
_SECRETS: Final = ("idlegpu-extender-tls", "idlegpu-kube-scheduler-tls", "idlegpu-ca")
_EXPORTER_PORT: Final = 9400
_MOST_EXPORTERS: Final = 2
"""Number of dcgm-exporter pods to query: usually all belong to one DaemonSet."""

_NO_SCHEDULER: Final = (
    "no readable ConfigMap holds one (kubeadm keeps it in a file on the control plane): pass "
    "the file, idlegpu doctor FILE"
)


def gather_cluster(collector: FactCollector, cluster: Callable[[], Cluster], account: str) -> None:
    """Collect facts from an API server.

    Args:
        collector: receives the facts, and the reason for each missing one.
        cluster: returns the client, or raises ClientError.
        account: the extender's service account, `namespace/name`.
    """
    try:
        server = cluster()
    except ClientError as error:
        names = (*_LISTS, "config_maps", "schedulers", "exporter", "certificates", "rights")
        names += ("services", "version")
        collector.missing |= dict.fromkeys(names, str(error))
        return
    found: dict[str, list[Object]] = {}
    for name, (kind, path) in _LISTS.items():
        try:
            found[name] = [item for item in _pages(server, path) if _is_needed(kind, item)]
            collector.add_list(kind, found[name])
        except ClientError as error:
            if name == "claims" and error.failure is Failure.NOT_FOUND:
                collector.add_list(kind, ())  # before Kubernetes 1.34
            else:
                collector.missing[name] = str(error)
    pods, namespace = found.get("pods", []), account.partition("/")[0]
    _add_config_maps(collector, server, pods, namespace)
    _add_secrets(collector, server, namespace)
    _add_service_and_version(collector, server, namespace)
    _add_exporters(collector, server, pods)
    try:
        collector.rights = review_rights(server, account, collector.facts(0.0).settings or {})
    except ClientError as error:
        collector.missing["rights"] = str(error)


def _is_needed(kind: str, item: Object) -> bool:
    return kind != "Pod" or bool(requested_gpus(item)) or is_called(item, _KEPT_WORDS)


def _pages(server: Cluster, path: str) -> Iterator[Object]:
    """List all objects of a collection, page by page.

    Raises:
        ClientError: a page cannot be read, or the list does not end.
    """
    params, tokens = {"limit": _PAGE}, set[str]()
    while len(tokens) < _MOST_PAGES:
        page = mapping_of(server.get(path, params))
        yield from objects_of(page.get("items"))
        rest = text_of(mapping_of(page.get("metadata")).get("continue"))
        if not rest:
            return
        if rest in tokens:
            break
        tokens.add(rest)
        params = {"limit": _PAGE, "continue": rest}
    raise ClientError(f"cannot list {path}: the list does not end", Failure.FAULT)


def _add_config_maps(
    collector: FactCollector, server: Cluster, pods: list[Object], own: str
) -> None:
    """Add the ConfigMaps in the namespaces of kube-scheduler, device plugin and extender."""
    namespaces = {"kube-system", own} | {
        text_of(mapping_of(pod.get("metadata")).get("namespace"))
        for pod in pods
        if is_called(pod, _CONFIG_WORDS)
    }
    refused = ""
    for namespace in sorted(namespaces - {""}):
        path = f"/api/v1/namespaces/{namespace}/configmaps"
        try:
            collector.add_list("ConfigMap", list(_pages(server, path)))
        except ClientError as error:
            refused = str(error)
    if refused:
        collector.missing["config_maps"] = refused
    collector.missing["schedulers"] = f"{refused}; {_NO_SCHEDULER}" if refused else _NO_SCHEDULER


def _add_secrets(collector: FactCollector, server: Cluster, namespace: str) -> None:
    """Add the certificates of the extender's Secrets; each Secret is read by name, no others."""
    why = f"no Secret {' or '.join(_SECRETS)} in {namespace}"
    for name in _SECRETS:
        try:
            secret = mapping_of(server.get(f"/api/v1/namespaces/{namespace}/secrets/{name}"))
        except ClientError as error:
            if error.failure is not Failure.NOT_FOUND:
                why = str(error)
            continue
        collector.add_list("Secret", [secret])
    collector.missing["certificates"] = why


def _add_service_and_version(collector: FactCollector, server: Cluster, namespace: str) -> None:
    """Add the Services of the extender's namespace, and the API server's version."""
    try:
        services = list(_pages(server, f"/api/v1/namespaces/{namespace}/services"))
        collector.add_list("Service", services)
    except ClientError as error:
        collector.missing["services"] = str(error)
    try:
        collector.add_version(mapping_of(server.get("/version")))
    except ClientError as error:
        collector.missing["version"] = str(error)


def _add_exporters(collector: FactCollector, server: Cluster, pods: list[Object]) -> None:
    """Add the metrics of a few dcgm-exporters, read through the API server's proxy."""
    collector.missing["exporter"] = "no pod of dcgm-exporter runs"
    running = (pod for pod in pods if is_called(pod, EXPORTER_WORDS) and is_running(pod))
    for _, pod in zip(range(_MOST_EXPORTERS), running, strict=False):
        namespace = text_of(mapping_of(pod.get("metadata")).get("namespace"))
        where = f"/api/v1/namespaces/{namespace}/pods/{name_of(pod)}:{_EXPORTER_PORT}"
        try:
            collector.add_samples(parse_exposition(server.text(f"{where}/proxy/metrics")))
        except (ClientError, ValueError) as error:
            collector.missing["exporter"] = str(error)


def gather_extender(collector: FactCollector, client: Callable[[], Client], at: float) -> None:
    """Collect facts from the extender's API.

    Args:
        collector: receives the facts, and the reason for each missing one.
        client: returns the client, or raises ClientError.
        at: time of the facts, seconds since the epoch.
    """
    paths = {
        "degraded": "/readyz",
        "bypassed": "/v1/bypassed",
        "devices": "/v1/gpus",
        "sources": "/v1/nodes",
    }
    try:
        extender = client()
    except ClientError as error:
        collector.missing |= dict.fromkeys((*paths, "metrics"), str(error))
        return
    for name, path in paths.items():
        try:
            collector.add_answer(name, extender.get(path))
        except ClientError as error:
            collector.missing[name] = str(error)
    try:
        collector.add_samples(parse_exposition(extender.text("/metrics")))
    except (ClientError, ValueError) as error:
        collector.missing["metrics"] = str(error)
    try:
        answer: Any = extender.get("/v1/holders", {"limit": 1})
    except ClientError:
        return
    then = parse_time(mapping_of(answer).get("at"))
    if then is not None:
        collector.extender_at = then + at - time.time()
