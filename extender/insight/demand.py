"""Metrics for autoscalers: GPUs that pods wait for, and idle and stranded GPUs by node pool.

Label values are bounded: models are mapped to a fixed list, sizes to steps, and pools beyond
`_MOST_POOLS` to one value.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import compress
from typing import Final

import numpy as np
from prometheus_client.core import GaugeMetricFamily, Metric

from extender.core.decision.assessment import Assessment
from extender.core.devices.gpu_models import ANY, OTHER, models_in, short_model
from extender.core.nodes.inventory import POOL_LABELS, NodeRecord, PodRecord
from extender.core.nodes.snapshot import Batch, Pool, Snapshot
from extender.core.steps import Steps
from extender.insight.stranded import TypicalNeeds, count_usable

_NO_POOL: Final = "none"
_MOST_POOLS: Final = 64
"""Number of pools with a label value of their own, first by name."""

_SIZES: Final = (1, 2, 4, 8)
_LARGER: Final = "more"
"""Label value for pods that request more GPUs than the largest size."""

_PIECE_NODES: Final = 250
"""Nodes to count in one step: about a millisecond's work."""


class Supply:
    """Counts GPUs by node pool, resource and model.

    Args:
        nodes: nodes by name.
        models: model names by number, as in the snapshot.
        model_of: returns the model of a device by its row, "" if no source reports it.
        needs: CPU, memory and storage of the node for one GPU.
        labels: node labels that name a pool; they override the cloud providers' labels.
    """

    def __init__(
        self,
        nodes: Mapping[str, NodeRecord],
        models: tuple[str, ...],
        model_of: Callable[[int], str],
        needs: TypicalNeeds,
        labels: tuple[str, ...] = (),
    ) -> None:
        self._nodes = nodes
        self._needs = needs
        self._models = list(map(_model_word, models))
        self._model_of = model_of
        self._all: Counter[tuple[str, str, str]] = Counter()
        self._idle: Counter[tuple[str, str, str]] = Counter()
        self._stranded: Counter[tuple[str, str, str]] = Counter()
        self._pools = {name: _pool_of(record, labels) for name, record in nodes.items()}
        names = sorted(set(self._pools.values()) - {_NO_POOL})
        self._labelled = {_NO_POOL, *names[:_MOST_POOLS]}

    def add_in_steps(self, pool: Pool, batch: Batch, assessment: Assessment) -> Steps[None]:
        """Count the devices of a resource pool.

        A device counts as idle if a pod could get it: its node accepts pods, and no pod holds the
        device or, with replicas, not all replicas are held. It is stranded instead if its node
        lacks the CPU, memory or ephemeral storage for it. On a node of several models each device
        counts under its own.
        """
        telemetry = batch.telemetry
        is_idle = batch.present & (assessment.idle_chance >= 1.0)
        is_idle &= ~telemetry.is_excluded & ~(telemetry.is_foreign & ~batch.is_shared[:, None])
        is_idle &= batch.used < batch.replicas[:, None]
        # `taken` counts pods on whole devices whose device is unknown.
        idle = np.maximum(is_idle.sum(axis=1) - batch.taken, 0).tolist()
        slots_idle, by_labels = is_idle.tolist(), batch.model_id.tolist()
        for at, name in enumerate(pool.nodes):
            if at % _PIECE_NODES == 0:
                yield
            record, label = self._nodes.get(name), self._pools.get(name)
            if record is None or label is None:  # the node came or went since this count began
                continue
            row, own = pool.rows[at], self._models[by_labels[at]]
            models = list(map(self._model_of, row.slots))
            if len(set(models)) == 1:  # the usual case
                word = _model_word(models[0]) if models[0] else own
                all_of, idle_of = {word: len(models)}, {word: sum(slots_idle[at])}
            else:
                words = [_model_word(model) if model else own for model in models]
                all_of, idle_of = Counter(words), Counter(compress(words, slots_idle[at]))
            accepts = record.is_ready and not record.is_unschedulable
            left = idle[at] if accepts else 0
            usable = count_usable(record, pool.resource, row, self._needs) if left else 0
            for model, count in all_of.items():
                key = (label if label in self._labelled else OTHER, pool.resource, model)
                free = min(idle_of.get(model, 0), left)
                used = min(free, usable)
                left, usable = left - free, usable - used
                self._all[key] += count
                self._idle[key] += used
                self._stranded[key] += free - used

    def metrics(self) -> Iterable[Metric]:
        """Yield the gauges of all, of idle and of stranded GPUs."""
        labels = ["pool", "resource", "model"]
        every = GaugeMetricFamily(
            "idlegpu_pool_gpus", "GPUs, or MIG instances, by pool of nodes.", labels=labels
        )
        idle = GaugeMetricFamily(
            "idlegpu_pool_idle_gpus",
            "Idle GPUs, or MIG instances, that a pod could get, by pool of nodes.",
            labels=labels,
        )
        stranded = GaugeMetricFamily(
            "idlegpu_pool_stranded_gpus",
            "Idle GPUs, or MIG instances, whose nodes lack CPU, memory or ephemeral storage for "
            "another pod, by pool of nodes.",
            labels=labels,
        )
        for key, count in self._all.items():
            every.add_metric(key, count)
            idle.add_metric(key, self._idle[key])
            stranded.add_metric(key, self._stranded[key])
        yield from (every, idle, stranded)


@lru_cache(maxsize=256)
def _model_word(model: str) -> str:
    """Return the label value for a model, which may be a mix of several."""
    return short_model(model) if model and len(models_in(model)) == 1 else OTHER


def _pool_of(record: NodeRecord, wished: Iterable[str] = ()) -> str:
    """Return the pool of a node by the first label that is set, custom labels first.

    Example:
        >>> _pool_of(NodeRecord(name="a", labels={"karpenter.sh/nodepool": "h100"}))
        'h100'
    """
    for label in (*wished, *POOL_LABELS):
        if value := record.labels.get(label):
            return value
    return _NO_POOL


def size_of(count: int) -> str:
    """Map a number of GPUs to its size step.

    Example:
        >>> size_of(1), size_of(3), size_of(8), size_of(16)
        ('1', '4', '8', 'more')
    """
    return next((str(size) for size in _SIZES if count <= size), _LARGER)


def demand_metrics(pods: Iterable[PodRecord], snapshot: Snapshot) -> Iterable[Metric]:
    """Yield metrics of the pods, and their GPUs, for which kube-scheduler found no node.

    Excluded are pods that need no new node: nominated by preemption, being deleted, or gated; and
    placeholder pods, which an autoscaler adds itself.
    """
    waiting: Counter[tuple[str, str, str]] = Counter()
    gpus: Counter[tuple[str, str, str]] = Counter()
    for record in pods:
        if lacks_a_node(record):
            for resource, count in record.resources.items():
                key = (resource, record.wanted_model or ANY, size_of(count))
                waiting[key] += 1
                gpus[key] += count
    labels = ["resource", "model", "size"]
    pods_metric = GaugeMetricFamily(
        "idlegpu_waiting_pods",
        "Pods for which kube-scheduler found no node, by request; size: GPUs of each pod.",
        labels=labels,
    )
    gpus_metric = GaugeMetricFamily(
        "idlegpu_waiting_gpus", "GPUs that waiting pods request.", labels=labels
    )
    for key, count in waiting.items():
        pods_metric.add_metric(key, count)
        gpus_metric.add_metric(key, gpus[key])
    # An autoscaler treats a missing series as an error, so export zeros.
    for resource in snapshot.pools.keys() - {key[0] for key in waiting}:
        for metric in (pods_metric, gpus_metric):
            metric.add_metric((resource, ANY, str(_SIZES[0])), 0)
    yield from (pods_metric, gpus_metric)


def lacks_a_node(record: PodRecord) -> bool:
    """Check whether kube-scheduler found no node for a pod that would need a further node."""
    is_tried = record.is_unscheduled and not record.is_gated and not record.nominated_node
    is_bound = bool(record.node)
    is_leaving = record.is_deleting or record.phase.is_terminal
    return is_tried and not (is_bound or is_leaving or record.gives_way)
