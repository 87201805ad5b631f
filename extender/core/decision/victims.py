"""Predict a node's state after pods that are being deleted, or would be evicted, have left it."""

from dataclasses import replace

import numpy as np

from extender.core.decision.landing import assume, closed_slots
from extender.core.nodes.snapshot import (
    Batch,
    Leaving,
    Ratios,
    Telemetry,
    Tenant,
    batch_rows,
)


def batch_after(
    leaving: Leaving,
    tenants: tuple[Tenant, ...],
    telemetry: Telemetry,
    suspicion: Ratios,
    *,
    is_presumed_idle: bool,
) -> Batch:
    """Build a one-row batch of a node as if some pods had left and readings showed it.

    Only the memory of these pods is released. Foreign use from before they came stays. Readings of
    a device after its pods ended show its true activity, but their memory may be released later.

    Args:
        leaving: the node without these pods.
        tenants: tentative tenants of the node.
        telemetry: telemetry of every device.
        suspicion: suspicion of the node, an array with one element.
        is_presumed_idle: whether freed devices count as idle, because they are freed for this pod,
            unless they were in use or active before the leaving pods came; else they count as
            unknown.
    """
    row = assume(leaving.row, tenants, closed_slots(leaving.row, telemetry.is_out))
    batch = batch_rows((row,), telemetry, suspicion)
    seen = batch.telemetry
    freed = np.array([leaving.freed], dtype=np.bool_)
    size = seen.memory_total_bytes
    used = seen.memory_used * size
    released = np.minimum(np.array([leaving.released_bytes]), used)
    others = np.maximum(seen.others_bytes - np.array([leaving.released_others]), 0.0)
    # A freed device has no reading yet; memory in use by others is known from before.
    used = np.where(freed, others, used - released)
    free = np.where(freed, size - others, seen.memory_free_bytes + released)
    was_foreign = np.array([leaving.foreign], dtype=np.bool_)
    was_active = was_foreign | np.array([leaving.active], dtype=np.bool_)
    is_read = np.array([leaving.ended], dtype=np.bool_) & (seen.freshness > 0)
    unread = freed & ~is_read
    # Memory that pods release late looks foreign meanwhile.
    is_late = freed & (released > 0) & ~was_foreign
    after = replace(
        seen,
        utilization=np.where(unread, 0.0, seen.utilization),
        latest=np.where(unread, 0.0, seen.latest),
        # Such use is not foreign, so the mean of the last minutes does not count.
        peak=np.where(
            unread, 0.0, np.where(is_late, np.minimum(seen.peak, seen.latest), seen.peak)
        ),
        presumed=np.where(unread, 0.0, seen.presumed),
        freshness=np.where(unread, is_presumed_idle & ~was_active, seen.freshness),
        memory_used=used / np.where(size > 0, size, np.inf),
        memory_free_bytes=free,
        memory_freshness=np.where(freed, size > 0, seen.memory_freshness),
        others_bytes=others,
        is_foreign=np.where(unread, was_foreign, seen.is_foreign & ~is_late),
        is_in_use=seen.is_in_use & ~freed,
    )
    return replace(batch, telemetry=after)
