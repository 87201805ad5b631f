"""Attribute a device's memory in use to pods that declared memory, to other pods, and to no pod.

Readings show the memory in use of the whole device, and rarely per pod. Declared memory counts for
its pod whether in use or not, so the unknown is the memory in use by others: processes outside
Kubernetes and pods that declared none. Each reading limits the growth of that part, and memory in
use before a pod came does not belong to the pod.
"""

from dataclasses import dataclass

import numpy as np

from extender.core.devices.readings import Column
from extender.core.nodes.snapshot import Flags

WHOLE_DEVICE = 1 << 62
"""Declared memory of a pod that holds a whole device: all of it, of any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Owners of the memory in use on each device at the last reading.

    Attributes:
        used: memory in use in bytes, NaN if unknown.
        others: the part of `used` outside pods that declared memory, NaN if unknown.
        foreign: the part of `others` that belongs to no pod, NaN if unknown.
    """

    used: Column
    others: Column
    foreign: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTenancy:
    """Pods that may use the memory of each device.

    Attributes:
        declared: memory declared by its pods in total, in bytes; infinite for a whole device, NaN
            while the device holders are unknown.
        has_undeclared: pods without declared memory may hold the device.
        is_filling: a pod without declared memory is not covered by readings yet, and may still
            grow.
        is_emptying: a pod without declared memory has left since the last reading.
        is_free: no pod can hold the device.
    """

    declared: Column
    has_undeclared: Flags
    is_filling: Flags
    is_emptying: Flags
    is_free: Flags


def account(
    before: Occupancy, tenancy: MemoryTenancy, used: Column, reported_foreign: Column
) -> Occupancy:
    """Update the owners of memory in use with a new reading.

    Memory in use beyond the declared total belongs to others. Any further growth belongs to pods
    that declared memory, which they may have just allocated, unless other pods have just come.

    Args:
        before: owners at the previous reading.
        tenancy: pods that may use the memory.
        used: memory in use now, in bytes.
        reported_foreign: foreign memory reported by the node agent, NaN if not reported.
    """
    is_whole = np.isinf(tenancy.declared)
    beyond = np.where(is_whole, np.nan, np.maximum(used - tenancy.declared, 0.0))
    others = np.fmax(_left(before, tenancy, used), beyond)
    reported = np.minimum(reported_foreign, used)
    is_reported = ~np.isnan(reported)
    estimated = np.where(tenancy.has_undeclared, np.minimum(before.foreign, others), others)
    foreign = np.where(is_reported, reported, estimated)
    # If all pods declared memory, others hold exactly the foreign memory that the agent reports.
    at_least = np.fmax(np.where(tenancy.has_undeclared, others, np.nan), np.fmax(reported, beyond))
    others = np.where(is_reported, at_least, others)
    return Occupancy(
        used=used,
        others=np.where(tenancy.is_free, used, others),
        foreign=np.where(tenancy.is_free, used, foreign),
    )


def _left(before: Occupancy, tenancy: MemoryTenancy, used: Column) -> Column:
    """Return the memory that others still use of their share at the previous reading."""
    declared_use = before.used - before.others
    change = used - before.used
    # A process releases all its memory at once: the remaining use shows whose memory it was.
    is_others = np.abs(used - declared_use) < np.abs(used - before.others)
    is_others |= tenancy.is_emptying
    after = np.where(is_others, np.maximum(before.others + change, 0.0), before.others)
    grown = np.where(tenancy.is_filling, before.others + change, before.others)
    return np.minimum(np.where(change < 0, after, grown), used)
