"""Judge whether a pod with several whole devices can get them side by side.

Devices that NVLink joins exchange data many times faster than over PCIe, and devices on one NUMA
node faster than across the processors' link. The kubelet chooses the devices, and device plugins
prefer such sets, so it is enough that the devices that the pod can land on contain one.
"""

from typing import Final

import numpy as np

from extender.core.decision.assessment import Assessment, DeviceRequests
from extender.core.nodes.snapshot import Batch, Flags, Ratios, Rows
from extender.core.nodes.topology_manager import Alignment

JOINED: Final = 2.0
"""Units of fit of a node where NVLink joins all devices of the pod, ..."""

NEAR: Final = 1.0
"""... and of one where they are on one NUMA node: both are less than one device of fit."""

_MASK_SLOTS: Final = 62
"""Slots of a mask; nodes with more devices have no sets."""

_NOTHING: Final[Ratios] = np.zeros(1)


def side_by_side(batch: Batch, assessment: Assessment) -> Ratios:
    """Return the units of fit of each node for devices side by side: `JOINED`, `NEAR` or 0.

    Devices that are allocated, without knowing which, may be of any set.

    Args:
        batch: the nodes.
        assessment: the nodes' devices, assessed for the pod.
    """
    landing = assessment.landing
    if landing.needed.max(initial=0) <= 1 or not (batch.joined.any() or batch.numa.any()):
        return _NOTHING
    mask = _masks_of(assessment.is_clean)
    count = landing.needed + landing.taken
    is_asked = (landing.needed > 1) & ~batch.is_shared
    near = np.where(_largest(batch.numa, mask) >= count, NEAR, 0.0)
    units = np.where(_largest(batch.joined, mask) >= count, JOINED, near)
    found: Ratios = np.where(is_asked, units, 0.0)
    return found


def is_misaligned(batch: Batch, asks: DeviceRequests, assessment: Assessment) -> Flags:
    """Return per node whether the kubelet would refuse the pod for the NUMA nodes of its devices.

    Only devices that certainly are allocated or withdrawn count as not free. A device without a
    known NUMA node refuses no pod.
    """
    refuses: Flags = batch.alignment != Alignment.NONE
    if not refuses.any():
        return refuses
    free = _masks_of(np.where(batch.is_agreed[:, None], assessment.landing.devices, batch.present))
    by_pod = (batch.alignment & Alignment.BY_POD) != 0
    count = np.where(by_pod, asks.count, asks.container_count)
    is_known = (free & ~np.bitwise_or.reduce(batch.numa, axis=1)) == 0
    # `restricted` asks for no fewer NUMA nodes than an empty node would need.
    is_restricted = (batch.alignment & Alignment.RESTRICTED) != 0
    may_span = is_restricted & (np.bitwise_count(batch.numa).max(axis=1) < count)
    is_split = _largest(batch.numa, free) < count
    found: Flags = is_split & refuses & is_known & ~may_span & ~batch.is_shared
    return found


def _masks_of(devices: Flags) -> Rows:
    """Return the flagged devices of each node as a bit mask of slots."""
    masks = np.zeros(len(devices), dtype=np.intp)
    for slot in range(min(devices.shape[1], _MASK_SLOTS)):
        masks |= devices[:, slot].astype(np.intp) << slot
    return masks


def _largest(sets: Rows, mask: Rows) -> Rows:
    """Return the size of the largest set of each node within a mask."""
    sizes: Rows = np.bitwise_count(sets & mask[:, None]).max(axis=1, initial=0).astype(np.intp)
    return sizes
