"""Build PromQL queries that merge all series with the same value of a device.

Shared GPUs, changing pods, MIG and replicas of Prometheus produce several series with the same
value of a device. `max by` merges them, and an answer without the other labels is a fifth of the
size.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from extender.core.devices.readings import GROWTH_SECONDS, REMAPPED_SECONDS, Signal
from extender.sources.prometheus.dcgm import Metric

UUID_LABELS: Final = ("UUID", "uuid")
"""Label of the UUID; exporters 1.x and those with --use-old-namespace write `uuid`."""
INSTANCE_LABEL: Final = "GPU_I_ID"
DRIVER_LABELS: Final = ("DCGM_FI_DRIVER_VERSION", "DCGM_FI_SYSTEM_DRIVER_VERSION")
MODEL_LABEL: Final = "modelName"
PROFILE_LABEL: Final = "GPU_I_PROFILE"
INDEX_LABEL: Final = "gpu"

XID_COUNTS: Final = "DCGM_EXP_XID_ERRORS_COUNT"
XID_LABEL: Final = "xid"

SHARE_LABEL: Final = "vgpu"
"""Label of the share of a device that a pod holds; unrelated to NVIDIA vGPU."""

EXPORTER_WORD: Final = "dcgm-exporter"
"""Part of the names of exporter pods and containers; workloads rarely have such a name."""

_DEVICE_LABELS: Final = (*UUID_LABELS, INSTANCE_LABEL)
_INFO_LABELS: Final = (PROFILE_LABEL, INDEX_LABEL, MODEL_LABEL, *DRIVER_LABELS)


def bare_selector(text: str) -> str:
    """Remove braces and commas around label matchers.

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
    """Return the query for a metric, one value per device.

    Args:
        selector: label matchers for the series.
        is_above_zero: query only devices on which the metric is above 0.

    Example:
        >>> from extender.sources.prometheus.dcgm import DEFAULT_METRICS
        >>> metric_query(DEFAULT_METRICS[0], 'cluster="a"')
        'max by (UUID, uuid, GPU_I_ID) (DCGM_FI_DEV_GPU_UTIL{cluster="a"})'
    """
    if metric.signal is Signal.ROWS_REMAPPED_LATELY:
        return _growth_query(metric, selector)
    series, labels = _selected(metric.name, selector), [*_DEVICE_LABELS]
    if metric.name == XID_COUNTS:
        # One series per XID in the exporter's window; if there is none, a series without the label.
        series, labels = f"{series} > 0", [*_DEVICE_LABELS, XID_LABEL]
    elif is_above_zero:
        series = f"{series} > 0"
    if metric.is_counter:
        # Constant on most devices: they are left out to keep the answer small.
        series = f"rate({series}[{GROWTH_SECONDS:.0f}s]) > 0"
    return f"{metric.aggregation} {_by(labels)} ({series})"


def _growth_query(metric: Metric, selector: str) -> str:
    """Return the query for the growth of a counter within a day, on devices where it grew.

    Two instants are compared, because a range of a day would be thousands of samples per device.
    Pods change within a day, so their labels are removed before the comparison.
    """
    series, by = _selected(metric.name, selector), f"max {_by(_DEVICE_LABELS)}"
    before = f"{by} ({series} offset {REMAPPED_SECONDS:.0f}s)"
    return f"{by} ({by} ({series}) - {before} > 0)"


def max_query(metric: Metric, selector: str, seconds: float) -> str:
    """Return the query for the maximum of a metric over the last `seconds`, by device.

    Example:
        >>> from extender.sources.prometheus.dcgm import DEFAULT_METRICS
        >>> max_query(DEFAULT_METRICS[0], "", 900.0)
        'max by (UUID, uuid, GPU_I_ID) (max_over_time(DCGM_FI_DEV_GPU_UTIL{}[900s]))'
    """
    series = f"max_over_time({_selected(metric.name, selector)}[{seconds:.0f}s])"
    return f"max {_by(_DEVICE_LABELS)} ({series})"


def devices_query(names: Sequence[str], node_labels: Iterable[str], selector: str) -> str:
    """Return the query for the devices, their nodes, and the time of each one's last scrape.

    The value is the time of the sample, which `timestamp()` returns only for a plain selector. The
    operands of `or` are metrics; each device has at least one of them.
    """
    labels = (*_DEVICE_LABELS, *_INFO_LABELS, *node_labels)
    return f"max {_by(labels)} ({_times(names, selector)})"


def ages_query(names: Sequence[str], selector: str) -> str:
    """Return the query for the time of each device's last scrape, without other labels."""
    return f"max {_by(_DEVICE_LABELS)} ({_times(names, selector)})"


def _times(names: Sequence[str], selector: str) -> str:
    return " or ".join(f"timestamp({_selected(name, selector)})" for name in names)


def relabeled_pods_query(names: Sequence[str], selector: str) -> str:
    """Return the query for pods whose labels Prometheus renamed (`honorLabels: false`)."""
    series = " or ".join(_selected(name, 'exported_pod!=""', selector) for name in names)
    return f"group {_by((*_DEVICE_LABELS, 'exported_namespace', 'exported_pod'))} ({series})"


def plain_pods_query(names: Sequence[str], selector: str) -> str:
    """Return the query for pods with unchanged labels: workloads, or the exporter itself.

    Exporters with the usual names are excluded: otherwise each idle device would add a row.
    """
    no_exporters = [f'{label}!~".*{EXPORTER_WORD}.*"' for label in ("container", "pod")]
    series = " or ".join(
        _selected(name, 'exported_pod=""', 'pod!=""', *no_exporters, selector) for name in names
    )
    labels = (*_DEVICE_LABELS, "namespace", "pod", "container", "service")
    return f"group {_by(labels)} ({series})"


def legacy_pods_query(names: Sequence[str], selector: str) -> str:
    """Return the query for pods with the labels of dcgm-exporter 1.x."""
    series = " or ".join(_selected(name, 'pod_name!=""', selector) for name in names)
    return f"group {_by((*_DEVICE_LABELS, 'pod_namespace', 'pod_name'))} ({series})"


def exporter_pods_query(names: Sequence[str], selector: str) -> str:
    """Return the query for the exporters' own pods.

    `up` has exactly the labels that Prometheus gave the target. If it has a `pod`, this is the
    exporter's. If not, every `pod` comes from the exporter's metrics and is a workload.
    """
    series = " or ".join(_selected(name, selector) for name in names)
    up = _selected("up", 'pod!=""', selector)
    return f"group by (namespace, pod) ({up} and on (job, instance) ({series}))"


def shares_query(metric: Metric, selector: str) -> str:
    """Return the query for the memory of each pod on shared devices, if exporters report it by pod.

    Such an exporter also reports the value of the whole device, without a share label. Otherwise
    each pod's series has the device's value, which is not the pod's own.
    """
    labels = (*_DEVICE_LABELS, "namespace", "pod", "exported_namespace", "exported_pod")
    of_pods = _selected(metric.name, f'{SHARE_LABEL}!=""', selector)
    of_device = _selected(metric.name, f'{SHARE_LABEL}=""', selector)
    is_split = f"and on ({', '.join(_DEVICE_LABELS)}) {of_device}"
    return f"max {_by(labels)} ({of_pods} {is_split})"


def shared_devices_query(names: Sequence[str], selector: str) -> str:
    """Return the query for devices of which a pod holds a share by its id.

    Such an id (`GPU-…::3`) proves that the device is shared.
    """
    series = " or ".join(_selected(name, f'{SHARE_LABEL}!=""', selector) for name in names)
    return f"group {_by(_DEVICE_LABELS)} ({series})"


def names_query(names: Iterable[str], selector: str) -> str:
    """Return the query for the names of existing metrics, for servers that do not list them."""
    alternatives = "|".join(names)
    is_one = f'__name__=~"{alternatives}"'  # anchored by Prometheus; names need no escape
    return f"group by (__name__) ({_selected('', is_one, selector)})"
