"""The queries, as text: everything that several series of one device repeat is folded there.

Shared GPUs, pods that come and go, MIG and replicas of Prometheus give several series with the
same value of the device; `max by` makes one of them, and an answer without the other labels is a
fifth of the size.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from extender.core.devices.readings import GROWTH_SECONDS, REMAPPED_SECONDS, Signal
from extender.sources.prometheus.dcgm import Metric

UUID_LABELS: Final = ("UUID", "uuid")
"""`uuid` is what 1.x and --use-old-namespace write."""
INSTANCE_LABEL: Final = "GPU_I_ID"
DRIVER_LABELS: Final = ("DCGM_FI_DRIVER_VERSION", "DCGM_FI_SYSTEM_DRIVER_VERSION")
MODEL_LABEL: Final = "modelName"
PROFILE_LABEL: Final = "GPU_I_PROFILE"
INDEX_LABEL: Final = "gpu"

XID_COUNTS: Final = "DCGM_EXP_XID_ERRORS_COUNT"
XID_LABEL: Final = "xid"

SHARE_LABEL: Final = "vgpu"
"""Names the share of a device that a pod holds; nothing to do with NVIDIA vGPU."""

EXPORTER_WORD: Final = "dcgm-exporter"
"""In the names of exporters' pods and containers; a workload is hardly ever called so."""

_DEVICE_LABELS: Final = (*UUID_LABELS, INSTANCE_LABEL)
_INFO_LABELS: Final = (PROFILE_LABEL, INDEX_LABEL, MODEL_LABEL, *DRIVER_LABELS)


def bare_selector(text: str) -> str:
    """Take off the braces and commas that people write around label matchers.

    Example:
        >>> bare_selector('{cluster="a",}')
        'cluster="a"'
    """
    return text.strip().strip("{},").strip()


def _selected(name: str, *matchers: str) -> str:
    return f"{name}{{{','.join(matcher for matcher in matchers if matcher)}}}"


def _by(labels: Iterable[str]) -> str:
    return f"by ({', '.join(dict.fromkeys(labels))})"


def metric_query(metric: Metric, selector: str, *, is_above_zero: bool = False) -> str:
    """Ask for one metric, one value for each device.

    Args:
        metric: the metric.
        selector: which series.
        is_above_zero: only of devices of which it is above 0.

    Example:
        >>> from extender.sources.prometheus.dcgm import DEFAULT_METRICS
        >>> metric_query(DEFAULT_METRICS[0], 'cluster="a"')
        'max by (UUID, uuid, GPU_I_ID) (DCGM_FI_DEV_GPU_UTIL{cluster="a"})'
    """
    if metric.signal is Signal.ROWS_REMAPPED_LATELY:
        return _added_query(metric, selector)
    series, labels = _selected(metric.name, selector), [*_DEVICE_LABELS]
    if metric.name == XID_COUNTS:
        # Of what happened in its window, one series each; else one without the label, at 0.
        series, labels = f"{series} > 0", [*_DEVICE_LABELS, XID_LABEL]
    elif is_above_zero:
        series = f"{series} > 0"
    if metric.is_counter:
        # Of most devices it does not grow: they are left out, for each row costs.
        series = f"rate({series}[{GROWTH_SECONDS:.0f}s]) > 0"
    return f"{metric.aggregation} {_by(labels)} ({series})"


def _added_query(metric: Metric, selector: str) -> str:
    """Ask by how much a count has grown in a day, of devices of which it has.

    By two instants: a range of a day is thousands of samples for each device. Pods come and go in
    it, so that their labels are taken off before the two are compared.
    """
    series, by = _selected(metric.name, selector), f"max {_by(_DEVICE_LABELS)}"
    before = f"{by} ({series} offset {REMAPPED_SECONDS:.0f}s)"
    return f"{by} ({by} ({series}) - {before} > 0)"


def most_query(metric: Metric, selector: str, seconds: float) -> str:
    """Ask for the highest value of one metric in the time before, one value for each device.

    Example:
        >>> from extender.sources.prometheus.dcgm import DEFAULT_METRICS
        >>> most_query(DEFAULT_METRICS[0], "", 900.0)
        'max by (UUID, uuid, GPU_I_ID) (max_over_time(DCGM_FI_DEV_GPU_UTIL{}[900s]))'
    """
    series = f"max_over_time({_selected(metric.name, selector)}[{seconds:.0f}s])"
    return f"max {_by(_DEVICE_LABELS)} ({series})"


def devices_query(names: Sequence[str], node_labels: Iterable[str], selector: str) -> str:
    """Ask which devices there are, on which node, and when each was last scraped.

    The value is the time of the sample: `timestamp()` tells it only of a bare selector. The
    operands of `or` are the metrics of which each device has at least one.
    """
    labels = (*_DEVICE_LABELS, *_INFO_LABELS, *node_labels)
    return f"max {_by(labels)} ({_times(names, selector)})"


def ages_query(names: Sequence[str], selector: str) -> str:
    """Ask only when each device was last scraped: an answer of a quarter of the size."""
    return f"max {_by(_DEVICE_LABELS)} ({_times(names, selector)})"


def _times(names: Sequence[str], selector: str) -> str:
    return " or ".join(f"timestamp({_selected(name, selector)})" for name in names)


def relabeled_pods_query(names: Sequence[str], selector: str) -> str:
    """Ask for the pods whose labels Prometheus renamed (`honorLabels: false`): surely workloads."""
    series = " or ".join(_selected(name, 'exported_pod!=""', selector) for name in names)
    return f"group {_by((*_DEVICE_LABELS, 'exported_namespace', 'exported_pod'))} ({series})"


def plain_pods_query(names: Sequence[str], selector: str) -> str:
    """Ask for the pods that stand under their own labels: workloads, or the exporter itself.

    Where all exporters are called so, which is nearly everywhere, the latter are no part of the
    answer: one row for each idle device otherwise.
    """
    no_exporters = [f'{label}!~".*{EXPORTER_WORD}.*"' for label in ("container", "pod")]
    series = " or ".join(
        _selected(name, 'exported_pod=""', 'pod!=""', *no_exporters, selector) for name in names
    )
    labels = (*_DEVICE_LABELS, "namespace", "pod", "container", "service")
    return f"group {_by(labels)} ({series})"


def old_pods_query(names: Sequence[str], selector: str) -> str:
    """Ask for the pods as 1.x exporters label them."""
    series = " or ".join(_selected(name, 'pod_name!=""', selector) for name in names)
    return f"group {_by((*_DEVICE_LABELS, 'pod_namespace', 'pod_name'))} ({series})"


def exporter_pods_query(names: Sequence[str], selector: str) -> str:
    """Ask for the exporters' own pods.

    `up` carries exactly the labels that Prometheus gave the target. A `pod` there is the
    exporter's, and where the target has none, every `pod` comes from the exposition: a workload.
    """
    series = " or ".join(_selected(name, selector) for name in names)
    up = _selected("up", 'pod!=""', selector)
    return f"group by (namespace, pod) ({up} and on (job, instance) ({series}))"


def shares_query(metric: Metric, selector: str) -> str:
    """Ask what each pod holds of devices that pods share, where the exporter splits it by pod.

    It does where it tells the whole device's value besides, under no share's label. Elsewhere each
    pod's series has that value, and says nothing of the pod.
    """
    labels = (*_DEVICE_LABELS, "namespace", "pod", "exported_namespace", "exported_pod")
    of_pods = _selected(metric.name, f'{SHARE_LABEL}!=""', selector)
    of_device = _selected(metric.name, f'{SHARE_LABEL}=""', selector)
    is_split = f"and on ({', '.join(_DEVICE_LABELS)}) {of_device}"
    return f"max {_by(labels)} ({of_pods} {is_split})"


def divided_query(names: Sequence[str], selector: str) -> str:
    """Ask which devices pods hold a named share of: ids like `GPU-…::3` say that they have more."""
    series = " or ".join(_selected(name, f'{SHARE_LABEL}!=""', selector) for name in names)
    return f"group {_by(_DEVICE_LABELS)} ({series})"


def names_query(names: Iterable[str], selector: str) -> str:
    """Ask which of these metrics exist, where the server does not list names."""
    alternatives = "|".join(names)
    is_one = f'__name__=~"{alternatives}"'  # anchored by Prometheus; names need no escape
    return f"group by (__name__) ({_selected('', is_one, selector)})"
