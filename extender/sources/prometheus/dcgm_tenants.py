"""Which pods hold which device, as the labels of DCGM series say: facts and guesses kept apart.

What `pod` means depends on how Prometheus was told to scrape. With `honorLabels: false` workloads
are under `exported_pod` and `pod` is the exporter's own; with `honorLabels: true` and in plain
scrape configurations workloads are under `pod`, but with the former an idle GPU carries the
exporter's own pod there and looks held.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from extender.core.devices.readings import DeviceKey
from extender.sources.prometheus.dcgm_devices import device_key
from extender.sources.prometheus.promql import EXPORTER_WORD

Row = Mapping[str, Any]
Tenants = dict[DeviceKey, tuple[str, ...]]


def pods_of(rows: Iterable[Row], namespace_label: str, pod_label: str) -> set[str]:
    """Read the pods of an answer as `namespace/name`."""
    return {
        f"{row['metric'].get(namespace_label, '')}/{row['metric'][pod_label]}"
        for row in rows
        if row["metric"].get(pod_label)
    }


def tenants_in(
    rows: Iterable[Row], namespace_label: str, pod_label: str
) -> dict[DeviceKey, set[str]]:
    """Read the pods that these labels surely name."""
    tenants: dict[DeviceKey, set[str]] = {}
    for row in rows:
        labels = row["metric"]
        key = device_key(labels)
        if key is not None and labels.get(pod_label):
            pod = f"{labels.get(namespace_label, '')}/{labels[pod_label]}"
            tenants.setdefault(key, set()).add(pod)
    return tenants


def without_exporters(
    rows: Iterable[Row], exporters: Container[str], exporter_names: Container[str]
) -> list[Row]:
    """Leave out the series whose `pod` is the exporter's own.

    Args:
        rows: series with `namespace`, `pod`, `container` and `service`.
        exporters: exporters as `namespace/name`, where Prometheus's `up` tells them.
        exporter_names: names of pods that are exporters, as the cluster knows them.
    """
    kept = []
    for row in rows:
        labels = row["metric"]
        pod = labels.get("pod", "")
        is_exporter = (
            f"{labels.get('namespace', '')}/{pod}" in exporters
            or pod in exporter_names
            or _looks_like_exporter(labels, pod)
        )
        if not is_exporter:
            kept.append(row)
    return kept


def _looks_like_exporter(labels: Mapping[str, str], pod: str) -> bool:
    """Guess by names, for servers that keep no `up`: a workload is hardly ever called so.

    `job` is no hint: it is the target's, whoever `pod` is.
    """
    service = labels.get("service", "")
    return (
        EXPORTER_WORD in labels.get("container", "")
        or EXPORTER_WORD in pod
        or bool(service and pod.startswith(f"{service}-") and "dcgm" in service)
    )


def frozen(answers: Iterable[Mapping[DeviceKey, Iterable[str]]]) -> Tenants:
    """Join what several answers say; each device's pods in order, so that equals are equal."""
    joined: dict[DeviceKey, set[str]] = {}
    for answer in answers:
        for key, pods in answer.items():
            joined.setdefault(key, set()).update(pods)
    return {key: tuple(sorted(pods)) for key, pods in joined.items()}


def changes(before: Tenants, after: Tenants) -> Tenants:
    """Say what changed; a device that nobody holds any more has no pods.

    Example:
        >>> changes({("a", ""): ("ns/x",)}, {("b", ""): ("ns/y",)})
        {('b', ''): ('ns/y',), ('a', ''): ()}
    """
    changed = {key: pods for key, pods in after.items() if before.get(key) != pods}
    changed.update({key: () for key in before if key not in after})
    return changed
