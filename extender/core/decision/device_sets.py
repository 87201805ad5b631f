"""Rate whether a pod can get several whole devices that are joined by NVLink or on one NUMA node.

Devices that NVLink joins exchange data many times faster than over PCIe, and devices on one NUMA
node faster than across the processors' link. The kubelet chooses the devices, and device plugins
prefer such sets, so it is enough if the landing devices contain such a set.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from extender.core.decision.assessment import Assessment, DeviceRequests
from extender.core.devices.topology import Alignment
from extender.core.nodes.snapshot import Batch, Flags, Ratios, Rows
from extender.core.request.gpu_resources import ContainerDevices

JOINED: Final = 2.0
"""Units of fit of a node where NVLink joins all devices of the pod: less than one device."""

NEAR: Final = 1.0
"""Units of fit of a node where all devices of the pod are on one NUMA node."""

_MASK_SLOTS: Final = 62
"""Slots of a mask; nodes with more devices have no sets."""

_NOTHING: Final[Ratios] = np.zeros(1)


def side_by_side(batch: Batch, assessment: Assessment) -> Ratios:
    """Return the score units of each node for devices close together: `JOINED`, `NEAR` or 0.

    If it is unknown which devices are allocated, they may belong to any set.

    Args:
        assessment: the nodes' devices, assessed for the pod.
    """
    landing = assessment.landing
    is_requested = (landing.needed > 1) & ~batch.is_shared
    if not is_requested.any() or not (batch.joined.any() or batch.numa.any()):
        return _NOTHING
    mask = _masks_of(assessment.is_clean)
    count = landing.needed + landing.taken
    near = np.where(_largest(batch.numa, mask) >= count, NEAR, 0.0)
    units = np.where(_largest(batch.joined, mask) >= count, JOINED, near)
    found: Ratios = np.where(is_requested, units, 0.0)
    return found


def is_misaligned(batch: Batch, requested: DeviceRequests, assessment: Assessment) -> Flags:
    """Return per node whether the kubelet would reject the pod because of its devices' NUMA nodes.

    Only devices that certainly are allocated or withdrawn count as not free. No pod is rejected for
    a device without a known NUMA node.
    """
    found: Flags = (batch.alignment != Alignment.NONE) & ~batch.is_shared
    if not found.any():
        return found
    free = _masks_of(np.where(batch.is_agreed[:, None], assessment.landing.devices, batch.present))
    found &= (free & ~np.bitwise_or.reduce(batch.numa, axis=1)) == 0
    is_by_pod = (batch.alignment & Alignment.BY_POD) != 0
    is_restricted = (batch.alignment & Alignment.RESTRICTED) != 0
    pods, counts = (
        np.broadcast_to(requested.pod, len(found)),
        np.broadcast_to(requested.count, len(found)),
    )
    for pod, containers in enumerate(requested.containers):
        is_pods = found & (pods == pod)
        for is_whole in (False, True):
            at = np.flatnonzero(is_pods & (is_by_pod == is_whole))
            if at.size:
                whole = (ContainerDevices(int(counts[at[0]])),)
                steps = whole if is_whole else containers or whole
                found[at] = _is_refused(steps, batch.numa[at], free[at], is_restricted[at])
    return found


def _is_refused(
    containers: Sequence[ContainerDevices], numa: Rows, free: Rows, is_restricted: Flags
) -> Flags:
    """Return per node whether the kubelet, which admits containers one by one, refuses one of them.

    The kubelet takes the first NUMA node with enough free devices. It passes the devices of init
    containers on to the next container, which must then be on their NUMA node.

    Args:
        containers: the containers in the kubelet's order.
        numa: sets of devices on one NUMA node, in the order of their numbers.
        free: masks of free devices.
        is_restricted: whether the policy of the node is `restricted`. That policy accepts as many
            NUMA nodes as the container would need on an empty node.
    """
    rows = np.arange(len(numa))
    most = np.bitwise_count(numa).max(axis=1)
    left = np.bitwise_count(numa & free[:, None]).astype(np.intp)
    passed_on = np.zeros_like(left)
    refused = np.zeros(len(numa), dtype=np.bool_)
    for count, is_passed_on in containers:
        has_all = passed_on == passed_on.sum(axis=1, keepdims=True)
        suits = has_all & (left + passed_on >= count)
        is_aligned = suits.any(axis=1)
        refused |= ~is_aligned & ~(is_restricted & (most < count))
        chosen = suits.argmax(axis=1)
        again = np.minimum(passed_on[rows, chosen], count)
        left[rows, chosen] -= np.where(is_aligned, count - again, 0)
        passed_on[rows, chosen] += np.where(
            is_aligned, count - again if is_passed_on else -again, 0
        )
    return refused


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
