"""Metrics for operators: pods without a node by namespace, and how long the oldest has waited."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from extender.core.devices.gpu_models import ANY, OTHER
from extender.core.nodes.inventory import PodRecord
from extender.core.steps import Steps
from extender.insight.demand import lacks_a_node, size_of

MAX_NAMESPACES: Final = 500
"""Number of namespaces with a label value of their own, first by number of waiting pods."""

_PIECE_PODS: Final = 2000
"""Pods to count in one step."""

_LABELS: Final = ("namespace", "resource", "model", "size", "refused_by")


class Waits:
    """Counts the pods without a node, and finds the longest wait, by namespace and request.

    Args:
        now: seconds since the epoch.
    """

    def __init__(self, now: float) -> None:
        self._now = now
        self._pods: Counter[tuple[str, ...]] = Counter()
        self._longest: dict[tuple[str, ...], float] = {}

    def add_in_steps(self, pods: Iterable[PodRecord]) -> Steps[None]:
        """Count pods; those that need no further node are skipped."""
        for at, record in enumerate(pods):
            if at % _PIECE_PODS == 0:
                yield
            if not lacks_a_node(record):
                continue
            refused_by = "idlegpu" if record.is_refused else "kube-scheduler"
            waited = max(self._now - record.created_at, 0.0)
            for resource, count in record.resources.items():
                model = record.wanted_model or ANY
                key = (record.namespace, resource, model, size_of(count), refused_by)
                self._pods[key] += 1
                self._longest[key] = max(self._longest.get(key, 0.0), waited)

    def metrics(self) -> Iterable[Metric]:
        """Yield the gauges of pods and of the longest wait."""
        pods = GaugeMetricFamily(
            "idlegpu_unplaced_pods",
            "Pods for which kube-scheduler found no node, by namespace and request; refused_by: "
            "whether idlegpu refused some of the nodes, or kube-scheduler's own filters all.",
            labels=_LABELS,
        )
        longest = GaugeMetricFamily(
            "idlegpu_unplaced_longest_seconds",
            "Time since the oldest of these pods was created.",
            labels=_LABELS,
        )
        by_namespace: Counter[str] = Counter()
        for key, count in self._pods.items():
            by_namespace[key[0]] += count
        named = {name for name, _ in by_namespace.most_common(MAX_NAMESPACES)}
        counts: Counter[tuple[str, ...]] = Counter()
        waits: dict[tuple[str, ...], float] = {}
        for key, count in self._pods.items():
            labels = key if key[0] in named else (OTHER, *key[1:])
            counts[labels] += count
            waits[labels] = max(waits.get(labels, 0.0), self._longest[key])
        for labels, count in counts.items():
            pods.add_metric(labels, count)
            longest.add_metric(labels, waits[labels])
        yield from (pods, longest)
