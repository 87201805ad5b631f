"""Which XID a device is judged by, where dcgm-exporter tells several of them.

`DCGM_FI_DEV_XID_ERRORS` holds the last one alone: an application's fault often follows a card's and
hides it. `DCGM_EXP_XID_ERRORS_COUNT` has a series for each that happened in the last minutes.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from extender.core.devices.readings import LARGEST_XID, Column, DeviceKey
from extender.core.policy import Health
from extender.core.xids import SEVERITY, is_of_recovery, xid_action
from extender.sources.prometheus.dcgm_devices import device_key
from extender.sources.prometheus.promql import XID_LABEL
from extender.sources.prometheus.rows import Row

_GRAVITY: Final = np.array(
    [
        2 * SEVERITY[xid_action(Health(), xid)] - is_of_recovery(Health(), xid)
        for xid in range(LARGEST_XID + 1)
    ],
    dtype=np.int8,
)
"""By the built-in table: it only says which of several is told; of two as grave not that the
recovery action has changed, but why."""


def xids_of(rows: Iterable[Row]) -> Iterator[tuple[DeviceKey, float]]:
    """Read of each device the gravest XID that its rows name; each row names one."""
    found: dict[DeviceKey, int] = {}
    for row in rows:
        key, label = device_key(row["metric"]), row["metric"].get(XID_LABEL, "")
        if key is None or not label.isdecimal() or int(label) > LARGEST_XID:
            continue
        xid = int(label)
        if key not in found or _GRAVITY[xid] > _GRAVITY[found[key]]:
            found[key] = xid
    for key, xid in found.items():
        yield key, float(xid)


def graver(one: Column, other: Column) -> Column:
    """Return of each device the graver of two XIDs; NaN is none.

    Example:
        >>> graver(np.array([31.0, 79.0, np.nan]), np.array([48.0, 31.0, 13.0])).tolist()
        [48.0, 79.0, 13.0]
    """
    is_other = np.isnan(one) | (_gravity(other) > _gravity(one))
    chosen: Column = np.where(is_other, other, one)
    return chosen


def _gravity(xids: Column) -> Column:
    gravity = _GRAVITY[np.nan_to_num(xids).astype(np.intp)].astype(np.float64)
    told: Column = np.where(np.isnan(xids), -1.0, gravity)
    return told
