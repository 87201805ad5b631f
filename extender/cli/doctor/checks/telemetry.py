"""Check that every GPU is measured, and that the extender reads recent readings."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from extender.cli.doctor.checks.nodes import PLUGIN, PRODUCT, REPLICAS, STRATEGY
from extender.cli.doctor.facts import (
    AGENT_WORDS,
    EXPORTER_WORDS,
    GPU,
    NODE_LABELS,
    Facts,
    Object,
    capacity,
    command_of,
    containers,
    environment_of,
    gpu_nodes,
    is_called,
    is_ready,
    is_running,
    key_of,
    labels_of,
    live_pods,
    name_of,
    node_of,
    number,
    number_setting,
    parse_time,
    some,
)
from extender.cli.doctor.findings import MOST, Problem, Severity, check, delete, named
from extender.core.untyped import mapping_of, number_of, objects_of, text_of

_MAX_AGE_SECONDS: Final = 120.0
"""Default of freshness.max_age_seconds."""
_EXPORTER_SECONDS: Final = 30.0
"""Default of prometheus.exporter_interval_seconds, and of dcgm-exporter itself."""
_QUERY_SECONDS: Final = 10.0
"""Default of prometheus.interval_seconds."""

_INTERVAL: Final = re.compile(r"(?:-c|--collect-interval)[= ]([0-9]+)\b")


@check("IG102", "series name nodes of the cluster", needs=("sources|metrics|exporter",))
def _unmatched(facts: Facts) -> Iterator[Problem]:
    """Find metric series whose labels match no node, address or exporter.

    Remedy: set `prometheus.node_labels`.
    """
    evidence = []
    for name, state in sorted((facts.sources or {}).items()):
        count = state.get("unmatched_series")
        if isinstance(count, int) and count:
            example = state.get("unmatched_example") or "not shown to this caller"
            evidence.append(f"{name}: {count} series, one of them {example}")
    if facts.sources is None:
        evidence += [
            f"{sample.labels.get('source')}: {sample.value:g} series"
            for sample in facts.metrics or ()
            if sample.name == "idlegpu_unmatched_series" and sample.value
        ]
    strangers = _strangers(facts)
    if strangers:
        names = [name_of(node) for node in facts.nodes or ()]
        evidence.append(f"dcgm-exporter reports {some(strangers)}; nodes are {some(names)}")
    if evidence:
        yield Problem(
            severity=Severity.ERROR,
            what="series of GPUs name no node of the cluster, and are ignored",
            evidence=tuple(evidence),
            remedy="prometheus: {node_labels: [LABEL]} in the extender's settings, with a label "
            "that holds the node's name; or set it for dcgm-exporter: env: [{name: NODE_NAME, "
            "valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]",
        )


def _strangers(facts: Facts) -> list[str]:
    """Return the host names in a scrape that match no node, address or exporter pod."""
    if facts.nodes is None or not facts.exporter:
        return []
    known = {name_of(node) for node in facts.nodes} | {
        text_of(one.get("address"))
        for node in facts.nodes
        for one in objects_of(mapping_of(node.get("status")).get("addresses"))
    }
    known |= {name_of(pod) for pod in facts.pods or () if is_called(pod, EXPORTER_WORDS)}
    # The extender also accepts short and fully qualified host names.
    hosts = {name.lower().partition(".")[0] for name in known if not name[:1].isdecimal()}
    reported = {sample.labels.get(label, "") for sample in facts.exporter for label in NODE_LABELS}
    strange = reported - known - {""}
    return sorted(one for one in strange if one.lower().partition(".")[0] not in hosts)


@check("IG103", "readings are fresh when they arrive", needs=("metrics|pods",))
def _stale(facts: Facts) -> Iterator[Problem]:
    """Find readings that are stale on arrival, and the intervals that cause it.

    The median age of the readings exceeds `freshness.max_age_seconds`, or their exporter's interval
    does. An exporter's interval that differs from `prometheus.exporter_interval_seconds` is a
    warning.

    Remedy: correct the interval that the finding names.
    """
    limit = number_setting(facts, "freshness.max_age_seconds", _MAX_AGE_SECONDS)
    query = number_setting(facts, "prometheus.interval_seconds", _QUERY_SECONDS)
    assumed = number_setting(facts, "prometheus.exporter_interval_seconds", _EXPORTER_SECONDS)
    for sample in facts.metrics or ():
        is_median = sample.labels.get("stat") == "median"
        if sample.name == "idlegpu_telemetry_age_seconds" and is_median and sample.value > limit:
            yield Problem(
                severity=Severity.ERROR,
                what="readings are stale when they arrive: half of the GPUs count as unknown",
                evidence=(
                    f"{sample.labels.get('source')}: median age {sample.value:.0f} s, fresh up "
                    f"to {limit:g} s (freshness.max_age_seconds)",
                ),
                remedy="scrape dcgm-exporter at least every 30 s (interval: 15s in its "
                "ServiceMonitor), and collect as often (DCGM_EXPORTER_INTERVAL=10000); else "
                f"freshness: {{max_age_seconds: {2 * sample.value:.0f}}}",
            )
    by_interval: defaultdict[float, list[str]] = defaultdict(list)
    for pod in live_pods(facts, EXPORTER_WORDS):
        by_interval[_interval(pod)].append(key_of(pod))
    for seconds, pods in sorted(by_interval.items()):
        evidence = (f"{some(pods)}: collects every {seconds:g} s",)
        if seconds + query > limit:
            yield Problem(
                severity=Severity.ERROR,
                what="dcgm-exporter collects so rarely that its readings are stale",
                evidence=(*evidence, f"fresh up to {limit:g} s, queried every {query:g} s"),
                remedy="env: [{name: DCGM_EXPORTER_INTERVAL, value: '10000'}] for dcgm-exporter",
            )
        elif seconds != assumed and facts.settings is not None:
            yield Problem(
                severity=Severity.WARNING,
                what="ages of readings are computed with another interval than dcgm-exporter has",
                evidence=(*evidence, f"prometheus.exporter_interval_seconds: {assumed:g}"),
                remedy=f"prometheus: {{exporter_interval_seconds: {seconds:g}}} in the extender's "
                "settings",
            )


def _interval(pod: Object) -> float:
    """Return the collection interval of an exporter pod, in seconds."""
    for container in containers(pod):
        variable = environment_of(container).get("DCGM_EXPORTER_INTERVAL", "")
        match = _INTERVAL.search(" ".join(command_of(container)))
        text = match[1] if match else variable
        if (milliseconds := number_of(text)) is not None:
            return milliseconds / 1000
    return _EXPORTER_SECONDS


_GKE_PARTS: Final = (
    "cloud.google.com/gke-gpu-partition-size",
    "cloud.google.com/gke-gpu-sharing-strategy",
    "cloud.google.com/gke-max-shared-clients-per-gpu",
)
"""Labels of nodes whose GPUs Google's device plugin partitions or shares."""

_FIRST_READINGS_SECONDS: Final = 300.0
"""Time after an exporter's start until its first reading: image pull, scrape, query."""


@check("IG105", "every GPU node is measured", needs=("nodes", "pods"))
def _unmeasured(facts: Facts) -> Iterator[Problem]:
    """Find GPU nodes without a ready pod of dcgm-exporter or the agent, or without any reading.

    A pod counts as silent after five minutes without a reading of its node's GPUs.

    Remedy: correct the tolerations or the DaemonSet; else the ServiceMonitor or `prometheus.url`.
    """
    running: dict[str, Object] = {}
    broken: dict[str, str] = {}
    for pod in live_pods(facts, EXPORTER_WORDS + AGENT_WORDS):
        if is_running(pod):
            running[node_of(pod)] = pod
        elif node_of(pod):
            phase = mapping_of(pod.get("status")).get("phase")
            broken[node_of(pod)] = f"{key_of(pod)} is not ready ({phase})"
    seen = {
        text_of(device.get("node"))
        for device in facts.devices or ()
        if device.get("uuid") and device.get("freshness") == "fresh"
    }
    yield from _unread(facts, running)
    measured = running.keys() | seen
    bare = [node for node in gpu_nodes(facts) if is_ready(node) and name_of(node) not in measured]
    if not bare:
        return
    taints = sorted({taint for node in bare for taint in _taints(node)})
    evidence = [
        f"{name_of(node)}: {broken.get(name_of(node), 'no pod of dcgm-exporter or idlegpu-agent')}"
        for node in bare
    ]
    sets = [_set_line(item) for item in facts.daemon_sets or () if _measures(item)]
    if taints:
        evidence.append(f"taints of these nodes: {some(taints)}")
    tolerations = "tolerations: [{operator: Exists}]"
    yield Problem(
        severity=Severity.ERROR,
        what="nothing measures the GPUs of these nodes: the extender does not know their load",
        evidence=(*evidence, *sets),
        remedy=f"{tolerations} and a fitting nodeSelector for dcgm-exporter's DaemonSet"
        if sets
        else "install dcgm-exporter (helm install dcgm-exporter gpu-helm-charts/dcgm-exporter), or "
        "idlegpu's own agent: manifests/render.sh REGISTRY | kubectl apply -f -",
    )


def _unread(facts: Facts, running: Mapping[str, Object]) -> Iterator[Problem]:
    """Find nodes with a running exporter or agent whose readings never arrive."""
    freshness: defaultdict[str, set[str]] = defaultdict(set)
    for device in facts.devices or ():
        freshness[text_of(device.get("node"))].add(text_of(device.get("freshness")))
    unread = {
        name_of(node): running[name_of(node)]
        for node in gpu_nodes(facts)
        if is_ready(node)
        and name_of(node) in running
        and freshness.get(name_of(node)) == {"missing"}
    }
    settled = {node: pod for node, pod in unread.items() if not _is_new(pod, facts.at)}
    if not settled:
        return
    has_agent = any(is_called(pod, AGENT_WORDS) for pod in settled.values())
    names = some(name_of(pod) for pod in settled.values())
    yield Problem(
        severity=Severity.ERROR,
        what="an exporter or agent runs on these nodes, but no reading of their GPUs arrives: "
        "the extender does not know their load",
        evidence=tuple(
            f"{node}: {key_of(pod)} runs, the extender has no reading of any GPU"
            for node, pod in sorted(settled.items())
        ),
        remedy=f"kubectl -n idlegpu-agent logs of {names} (without a driver: docs/install.md, GPUs "
        "that the agent does not see), and agents in the extender's settings"
        if has_agent
        else f"have Prometheus scrape {names} (serviceMonitor: {{enabled: true, honorLabels: true}}"
        " in dcgm-exporter's values); where it does, prometheus: {url: URL} in the extender's "
        "settings must be that Prometheus",
    )


def _is_new(pod: Object, at: float) -> bool:
    """Check whether a pod started so recently that its first readings may not have arrived yet."""
    started_at = parse_time(mapping_of(pod.get("status")).get("startTime"))
    return started_at is not None and at - started_at < _FIRST_READINGS_SECONDS


def _measures(item: Object) -> bool:
    return is_called(item, EXPORTER_WORDS + AGENT_WORDS)


def _set_line(item: Object) -> str:
    status = mapping_of(item.get("status"))
    spec = mapping_of(mapping_of(mapping_of(item.get("spec")).get("template")).get("spec"))
    return (
        f"DaemonSet {key_of(item)}: {status.get('numberReady', 0)} of "
        f"{status.get('desiredNumberScheduled', 0)} ready, nodeSelector "
        f"{dict(mapping_of(spec.get('nodeSelector'))) or 'none'}"
    )


def _taints(node: Object) -> list[str]:
    return [
        f"{text_of(taint.get('key'))}:{text_of(taint.get('effect'))}"
        for taint in objects_of(mapping_of(node.get("spec")).get("taints"))
        if taint.get("effect") in {"NoSchedule", "NoExecute"}
    ]


@check("IG106", "the extender reads its sources and settings", needs=("degraded",))
def _degraded(facts: Facts) -> Iterator[Problem]:
    """Find components that the extender reports as degraded.

    A component is a source, or the settings.

    Remedy: follow the cause that the extender names.
    """
    for name, cause in sorted((facts.degraded or {}).items()):
        resource = name.removeprefix("apiserver/").removesuffix(" objects")
        unreadable = facts.unreadable.get(resource, ()) if name.endswith(" objects") else ()
        yield Problem(
            severity=Severity.ERROR,
            what=f"the extender is degraded: {name}",
            evidence=(
                f"GET /readyz: {name}: {cause}",
                *(f"GET /v1/nodes: cannot read {resource} {one}" for one in unreadable),
            ),
            remedy="kubectl -n idlegpu edit configmap idlegpu-extender"
            if name in {"settings", "telemetry"}
            else "kubectl -n idlegpu logs deploy/idlegpu-extender, and the address in "
            "settings.yaml of ConfigMap idlegpu-extender"
            + (': prometheus.url, "" for none' if name == "prometheus" else ""),
        )


@check("IG107", "telemetry shows every GPU of a node", needs=("nodes", "devices|exporter"))
def _unlike_telemetry(facts: Facts) -> Iterator[Problem]:
    """Find nodes whose number of GPUs in telemetry differs from their labels or capacity.

    Capacity (`nvidia.com/gpu`) counts only without the label `nvidia.com/gpu.count`, and only if it
    does not count shares or instances.

    Remedy: run `idlegpu smoke NODE`, or reboot the node.
    """
    seen, partitioned = _seen(facts), _partitioned(facts)
    evidence: list[str] = []
    fewer: list[str] = []
    more: list[str] = []
    for node in gpu_nodes(facts):
        name = name_of(node)
        shown, expected = seen.get(name, 0), _cards(node)
        offered = 0 if name in partitioned or _may_be_shares(facts, node) else _wholes(node)
        if shown and expected and shown != expected:
            evidence.append(f"{name}: has {expected} GPUs, telemetry shows {shown}")
            (fewer if shown < expected else more).append(name)
        # A whole multiple may be shares of each GPU: nothing in the facts excludes that.
        elif shown and not expected and offered % shown:
            evidence.append(f"{name}: capacity {GPU} is {offered}, telemetry shows {shown}")
            (fewer if shown < offered else more).append(name)
    if evidence:
        yield Problem(
            severity=Severity.WARNING,
            what="telemetry shows another number of GPUs than the node has: one may be lost",
            evidence=tuple(evidence),
            remedy="; ".join(_recounted(facts, fewer, more)),
        )


def _recounted(facts: Facts, fewer: Sequence[str], more: Sequence[str]) -> Iterator[str]:
    """Yield remedies for nodes with fewer, and with more, GPUs in telemetry than expected."""
    for name in (*fewer, *more)[:MOST]:
        yield f"idlegpu smoke {name} (nvidia-smi there)"
    if fewer:
        yield (
            f"a GPU that is lost takes a reboot: kubectl drain --ignore-daemonsets {named(fewer)}"
        )
    if more:
        pods = PLUGIN.pods_on(facts, more)
        yield f"GPUs that the node does not offer: {delete(pods, 'restart its device plugin')}"


def _seen(facts: Facts) -> dict[str, int]:
    """Count the cards in telemetry, by node."""
    cards: defaultdict[str, set[str]] = defaultdict(set)
    for device in facts.devices or ():
        if device.get("uuid") and device.get("freshness") == "fresh":
            cards[text_of(device.get("node"))].add(text_of(device.get("uuid")))
    for sample in facts.exporter or ():
        uuid = sample.labels.get("UUID") or sample.labels.get("uuid", "")
        for label in NODE_LABELS:
            if sample.labels.get(label) and uuid:
                cards[sample.labels[label]].add(uuid)
    return {node: len(uuids) for node, uuids in cards.items()}


def _cards(node: Object) -> int:
    """Return a node's number of cards by its labels, 0 if unknown.

    With MIG strategy `single` the label counts instances, so it is ignored.
    """
    labels = labels_of(node)
    count = labels.get("nvidia.com/gpu.count", "")
    has_instances = labels.get("nvidia.com/mig.strategy") == "single" and "-MIG-" in labels.get(
        "nvidia.com/gpu.product", ""
    )
    return 0 if has_instances else number_of(count) or 0


def _wholes(node: Object) -> int:
    """Return a node's number of whole GPUs by capacity, 0 if it also has shares or instances."""
    counts = {name: count for name, count in capacity(node).items() if count}
    return counts.get(GPU, 0) if len(counts) == 1 else 0


def _may_be_shares(facts: Facts, node: Object) -> bool:
    """Check whether labels or the plugin's configuration say that the node's GPUs are shares."""
    labels = labels_of(node)
    is_labelled = (
        number(labels.get(REPLICAS)) > 1
        or labels.get(STRATEGY, "none") != "none"
        or "-MIG-" in labels.get(PRODUCT, "")
        or any(name in labels for name in _GKE_PARTS)
    )
    sharing = [mapping_of(one.get("sharing")) for one in (facts.plugin_configs or {}).values()]
    return is_labelled or any(one.get("timeSlicing") or one.get("mps") for one in sharing)


def _partitioned(facts: Facts) -> set[str]:
    """Return the nodes for which telemetry shows MIG instances."""
    found = {
        text_of(device.get("node"))
        for device in facts.devices or ()
        if device.get("mig_profile") or device.get("gpu_instance_id")
    }
    for sample in facts.exporter or ():
        if sample.labels.get("GPU_I_ID"):
            found |= {sample.labels.get(label, "") for label in NODE_LABELS}
    return found
