"""What each pod holds of the memory of devices that pods share, as DCGM series say.

Exporters from 4.8.2 on split the memory in use by pod on shared devices, and tell that of the whole
device besides.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from extender.core.devices.readings import DeviceKey, Signal
from extender.sources.prometheus.dcgm import Metric, convert
from extender.sources.prometheus.dcgm_devices import device_key, number

Row = Mapping[str, Any]

PodShare = tuple[DeviceKey, str, int]
"""A device, a pod on it (`namespace/name`), and what that holds of its memory, in bytes."""


def devices_in(rows: Iterable[Row]) -> list[DeviceKey]:
    """Read which devices an answer names."""
    keys = (device_key(row["metric"]) for row in rows)
    return [key for key in keys if key is not None]


def shares_in(rows: Iterable[Row], metric: Metric) -> list[PodShare]:
    """Read what pods hold; of a pod with several shares of a device it is told of each.

    Args:
        rows: of an answer to `promql.shares_query`.
        metric: the metric that was asked for.
    """
    found: dict[tuple[DeviceKey, str], float] = {}
    for row in rows:
        labels = row["metric"]
        key = device_key(labels)
        name = labels.get("exported_pod") or labels.get("pod")
        if key is None or not name:
            continue
        prefix = "exported_" if labels.get("exported_pod") else ""
        pod = f"{labels.get(prefix + 'namespace', '')}/{name}"
        told = convert(np.array([number(row["value"][1])]), metric.unit, Signal.MEMORY_USED)
        if not np.isnan(told[0]):
            found[key, pod] = max(found.get((key, pod), 0.0), float(told[0]))
    return [(key, pod, int(held)) for (key, pod), held in found.items()]
