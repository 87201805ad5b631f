"""Check that readings arrive, name their node, and are recent enough."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from extender.cli.doctor.facts import Facts, Object
from extender.cli.doctor.findings import Problem, Severity, check
from extender.cli.doctor.objects import (
    EXPORTER_WORDS,
    NODE_LABELS,
    command_of,
    containers,
    environment_of,
    is_called,
    key_of,
    live_pods,
    name_of,
    number_setting,
    some,
)
from extender.core.untyped import mapping_of, number_of, objects_of, text_of

MAX_AGE_SECONDS: Final = 120.0
"""Default of freshness.max_age_seconds."""
EXPORTER_SECONDS: Final = 30.0
"""Default of prometheus.exporter_interval_seconds, and of dcgm-exporter itself."""
QUERY_SECONDS: Final = 10.0
"""Default of prometheus.interval_seconds."""

_INTERVAL: Final = re.compile(r"(?:-c|--collect-interval)[= ]([0-9]+)\b")


@check("IG102", "series name nodes of the cluster", needs=("sources|metrics|exporter",))
def _unmatched(facts: Facts) -> Iterator[Problem]:
    """Find metric series whose labels match no node, address or exporter.

    Remedy: `prometheus.node_labels`.
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

    Remedy: the interval.
    """
    limit = number_setting(facts, "freshness.max_age_seconds", MAX_AGE_SECONDS)
    query = number_setting(facts, "prometheus.interval_seconds", QUERY_SECONDS)
    assumed = number_setting(facts, "prometheus.exporter_interval_seconds", EXPORTER_SECONDS)
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
    return EXPORTER_SECONDS
